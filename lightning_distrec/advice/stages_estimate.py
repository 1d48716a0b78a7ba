"""What pipeline_parallel needs for a module: of the fullest stage, and of the rank that sends the
most."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule

from lightning_distrec.errors import DistRecError, UnsupportedError
from lightning_distrec.strategies.estimates.estimate import Estimate, replicated_memory
from lightning_distrec.strategies.estimates.module_sizes import (
    Job,
    ModuleSizes,
    configured_optimizers,
    meta_copy,
)
from lightning_distrec.strategies.estimates.step_profile import StepProfile
from lightning_distrec.strategies.fully_sharded.shards import refuse_sharded
from lightning_distrec.strategies.stages.chain import (
    Chain,
    StageLayout,
    StageOptions,
    find_chain,
    ranks_of_pipeline,
    refuse_optimizers,
    refuse_run,
    split_chain,
)
from lightning_distrec.units import quantity

PIPELINE = "pipeline_parallel"


def estimate_stages(
    module: LightningModule,
    sizes: ModuleSizes,
    job: Job,
    settings: Any,
    profile: StepProfile,
    options: StageOptions,
) -> tuple[Estimate, list[str]]:
    """Return what pipeline_parallel needs, and what was assumed; or why it refuses the module."""
    if job.num_ranks < 2:
        return Estimate(strategy=PIPELINE, refused="one rank is no pipeline: use at least 2"), []
    try:
        layout = _layout(_copied(module), options, job, settings)
        if layout.chain.caller is not None:  # the step that was run shows containers' blocks alone
            profile = replace(profile, saved=None, blocks=None)
        _check_order(layout.chain, profile)
    except DistRecError as error:
        return Estimate(strategy=PIPELINE, refused=str(error)), []
    pipeline = _Pipeline(layout=layout, options=options, sizes=sizes, job=job, profile=profile)
    num_ranks, num_microbatches = pipeline.num_ranks, pipeline.num_microbatches()
    memory_by_rank = [pipeline.memory(rank) for rank in range(num_ranks)]
    memory = max(memory_by_rank, key=lambda memory: sum(memory.values()))
    sent = None
    if profile.blocks is not None:
        sent_by_rank = [
            pipeline.sent(rank, profile.blocks.input_bytes) for rank in range(num_ranks)
        ]
        sent = max(sent_by_rank, key=lambda sent: sum(sent.values()))
    idle = options.idle_share(num_ranks, num_microbatches)
    stages = quantity(layout.num_stages, "stage")
    if pipeline.num_replicas > 1:
        stages += f" (stages: {layout.num_stages})"
    note = (
        f"pipeline_parallel is estimated with {stages} of '{layout.chain.path}' and "
        f"{num_microbatches} micro-batches "
        f"({options.schedule}): ranks idle {idle:.0%} of a step where stages take equal times; "
        "memory is the fullest "
        "rank's, and one batch is for all ranks of a pipeline"
    )
    return Estimate(strategy=PIPELINE, memory=memory, sent=sent, idle=idle), [note]


def _copied(module: LightningModule) -> LightningModule:
    try:
        return meta_copy(module)
    except Exception:  # it needs a Trainer: `measure_module` has noted why
        return module


def _layout(module: LightningModule, options: StageOptions, job: Job, settings: Any) -> StageLayout:
    """Return where the module is split: over all ranks, or as many stages as its blocks are enough
    for.

    Raises DistRecError: pipeline_parallel would refuse the module, or its optimizers.
    """
    # What refuse_run reads of a Trainer.
    trainer: Any = SimpleNamespace(precision=job.precision, callbacks=settings.callbacks)
    refuse_run(trainer, module)
    refuse_sharded(module, PIPELINE)
    layout = split_chain(module, options, _num_stages(module, options, job))
    try:
        optimizers = configured_optimizers(module)
    except Exception:  # it needs a Trainer: `measure_module` has noted why
        optimizers = []
    refuse_optimizers(optimizers, module)
    return layout


def _num_stages(module: LightningModule, options: StageOptions, job: Job) -> int:
    """Return the number of stages: what was asked for, or as many as ranks and blocks are enough
    for."""
    if options.stages is not None:
        return ranks_of_pipeline(options, job.num_ranks) * options.stages_per_rank
    num_blocks = len(find_chain(module, options.chain).blocks)
    limit = min(num_blocks // options.stages_per_rank, job.num_ranks)
    # A pipeline takes a divisor of the ranks; the others are its replicas.
    possible = [num for num in range(2, limit + 1) if job.num_ranks % num == 0]
    # Where no number suits, split_chain refuses this one with a reason.
    return max(possible, default=job.num_ranks) * options.stages_per_rank


def _check_order(chain: Chain, profile: StepProfile) -> None:
    """Raise UnsupportedError: the step that was run did not go from each block straight to the
    next."""
    if profile.blocks is None:
        return
    for number in range(1, len(chain.blocks)):
        # A stage's input is the output of the stage before: code between two blocks would not run.
        if chain.paths[number] not in profile.blocks.follows:
            raise UnsupportedError(
                f"forward does not give '{chain.paths[number]}' just what "
                f"'{chain.paths[number - 1]}' returns"
            )


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """A module in stages, in a job."""

    layout: StageLayout
    options: StageOptions
    sizes: ModuleSizes
    job: Job
    profile: StepProfile

    @property
    def num_ranks(self) -> int:
        return self.layout.num_stages // self.options.stages_per_rank

    @property
    def num_replicas(self) -> int:
        return self.job.num_ranks // self.num_ranks

    def num_microbatches(self) -> int:
        return self.options.num_parts(
            self.profile.batch_size or self.options.microbatches, self.num_ranks
        )

    def memory(self, rank: int) -> dict[str, float]:
        """Return the memory of a rank of the pipeline."""
        layout, saved = self.layout, self.profile.saved
        # Stage s is on rank s modulo the pipeline's ranks.
        stages = range(rank, layout.num_stages, self.num_ranks)
        parameters = (p for p in self.sizes.parameters if layout.stage_by_name[p.name] in stages)
        memory = replicated_memory(parameters, self.job)
        memory["parameters"] += self.sizes.buffer_bytes  # every rank has all of them
        if saved is None:
            return memory
        paths = [
            layout.chain.paths[number] for stage in stages for number in layout.block_numbers(stage)
        ]
        num_parts = self.num_microbatches()
        num_forwards = self.options.stages_per_rank * num_parts
        in_flight = self.options.forwards_in_flight(rank, self.num_ranks, num_parts) / num_forwards
        memory["activations"] = in_flight * sum(saved.bytes_saved_first_in(path) for path in paths)
        head_bytes, loss_bytes = saved.bytes_around(layout.chain.paths)
        if 0 in stages:
            memory["activations"] += head_bytes
        if layout.num_stages - 1 in stages:
            # gpipe computes the loss of the whole batch, the others of one micro-batch at a time.
            memory["activations"] += (
                loss_bytes if self.options.schedule == "gpipe" else loss_bytes / num_parts
            )
        return memory

    def sent(self, rank: int, inputs: dict[str, int]) -> dict[str, float]:
        """Return what a rank sends: outputs on, gradients back and to replicas. inputs: of a
        block's path, bytes."""
        layout = self.layout
        stages = range(rank, layout.num_stages, self.num_ranks)
        # The first stage's input is the batch, which no rank sends.
        entering = [
            0,
            *(inputs.get(layout.chain.paths[begin], 0) for begin in layout.begins[1:]),
            0,
        ]
        gradients = sum(
            p.numel * self.job.itemsize(p)
            for p in self.sizes.parameters
            if p.requires_grad and layout.stage_by_name[p.name] in stages
        )
        # entering[stage + 1] is what the next stage takes, the output of this one; the last one's
        # goes nowhere.
        return {
            "stage outputs": float(sum(entering[stage + 1] for stage in stages)),
            "stage gradients": float(sum(entering[stage] for stage in stages)),
            "dense gradients": 2 * (self.num_replicas - 1) / self.num_replicas * gradients,
        }
