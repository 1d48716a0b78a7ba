"""What pipeline_parallel needs for a module: of the fullest stage, and of the rank that sends the most."""

from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule

from lightning_distrec._compat.torch_distributed import Action
from lightning_distrec.errors import DistRecError, UnsupportedError
from lightning_distrec.strategies.estimates.estimate import Estimate, replicated_memory
from lightning_distrec.strategies.estimates.module_sizes import Job, ModuleSizes, configured_optimizers, meta_copy
from lightning_distrec.strategies.estimates.step_profile import StepProfile
from lightning_distrec.strategies.fully_sharded.shards import refuse_sharded
from lightning_distrec.strategies.stages.chain import (
    Chain,
    StageLayout,
    find_chain,
    refuse_optimizers,
    refuse_run,
    split_chain,
)
from lightning_distrec.strategies.stages.idle_time import (
    HOST_SECONDS,
    StageTimes,
    idle_share,
    order_actions,
    peak_activation_bytes,
    stage_times,
)
from lightning_distrec.strategies.stages.microbatches import num_microbatches
from lightning_distrec.strategies.stages.stage_options import StageOptions, ranks_of_pipeline
from lightning_distrec.units import quantity

PIPELINE = "pipeline_parallel"


def estimate_stages(
    module: LightningModule,
    sizes: ModuleSizes,
    job: Job,
    settings: Any,
    profile: StepProfile,
    device_type: str,
    options: StageOptions | None = None,
) -> tuple[Estimate, list[str]]:
    """Return what pipeline_parallel needs, and what was assumed; or why it refuses the module.

    options: None: its defaults.
    """
    options = options or StageOptions()
    if job.num_ranks < 2:
        return Estimate(strategy=PIPELINE, refused="one rank is no pipeline: use at least 2"), []
    try:
        layout = _layout(_copied(module), options, job, settings, profile)
        _check_order(layout.chain, profile)
    except DistRecError as error:
        return Estimate(strategy=PIPELINE, refused=str(error)), []
    num_ranks = layout.num_stages // options.stages_per_rank
    num_replicas = job.num_ranks // num_ranks
    num = _num_parts(profile, options, num_ranks)
    actions = order_actions(options.schedule, num_ranks, layout.num_stages, num)
    memories = [_memory(layout, rank_actions, options, sizes, job, profile) for rank_actions in actions]
    memory = max(memories, key=lambda rank_actions: sum(rank_actions.values()))
    sent = None
    if profile.blocks is not None:
        sent = _sent(layout, num_ranks, sizes, job, profile.blocks.input_bytes, num_replicas)
    idle, idle_note = _idle(layout, num_ranks, num, options, profile, device_type)
    stages = quantity(layout.num_stages, "stage") + (f" (stages: {layout.num_stages})" if num_replicas > 1 else "")
    note = (
        f"pipeline_parallel is estimated with {stages} of '{layout.chain.path}' and {idle_note}; memory is "
        "the fullest rank's, and one batch is for all ranks of a pipeline"
    )
    return Estimate(strategy=PIPELINE, memory=memory, sent=sent, idle=idle), [note]


def _num_parts(profile: StepProfile, options: StageOptions, num_ranks: int) -> int:
    def fits(num: int) -> bool:  # as StagedChain has it
        return options.stages_per_rank == 1 or num % max(1, num // num_ranks) == 0

    return num_microbatches(profile.batch_size or options.microbatches, options.microbatches, fits)


def _idle(
    layout: StageLayout, num_ranks: int, num: int, options: StageOptions, profile: StepProfile, device_type: str
) -> tuple[float, str]:
    """Return the share of a step in which ranks idle, and what it was computed from."""
    measured, host = profile.times.chain_times(layout.chain.paths), 0.0
    if measured is None:
        times = StageTimes.equal(layout.num_stages)
    else:
        times = stage_times(measured, layout.begins, num, options.schedule)
        host = HOST_SECONDS if device_type == "cpu" else 0.0
    idle = idle_share(times, num_ranks, num, options.schedule, host)
    origin = "with stages of equal times" if measured is None else "by the times of its blocks on this CPU"
    return idle, f"{num} micro-batches ({options.schedule}): ranks idle {idle:.0%} of a step {origin}"


def _copied(module: LightningModule) -> LightningModule:
    try:
        return meta_copy(module)
    except Exception:  # it needs a Trainer: `measure_module` has noted why
        return module


def _layout(
    module: LightningModule, options: StageOptions, job: Job, settings: Any, profile: StepProfile
) -> StageLayout:
    """Return where the module is split: over all ranks, or as many stages as its blocks are enough for.

    Raises DistRecError: pipeline_parallel would refuse the module, or its optimizers.
    """
    trainer: Any = SimpleNamespace(precision=job.precision, callbacks=settings.callbacks)
    refuse_run(trainer, module)
    refuse_sharded(module, PIPELINE)
    times = None
    if options.split == "time" and (measured := profile.times.chain_times(find_chain(module, options.chain).paths)):
        times = measured.forward_nanoseconds
    layout = split_chain(module, options, _num_stages(module, options, job), times)
    try:
        optimizers = configured_optimizers(module)
    except Exception:  # it needs a Trainer: `measure_module` has noted why
        optimizers = []
    refuse_optimizers(optimizers, module)
    return layout


def _num_stages(module: LightningModule, options: StageOptions, job: Job) -> int:
    """Return the number of stages: what was asked for, or as many as ranks and blocks are enough for."""
    if options.stages is not None:
        return ranks_of_pipeline(options, job.num_ranks) * options.stages_per_rank
    num_blocks = len(find_chain(module, options.chain).blocks)
    limit = min(num_blocks // options.stages_per_rank, job.num_ranks)
    possible = [num for num in range(2, limit + 1) if job.num_ranks % num == 0]
    return max(possible, default=job.num_ranks) * options.stages_per_rank


def _check_order(chain: Chain, profile: StepProfile) -> None:
    """Raise UnsupportedError: the step that was run did not go from each block straight to the next."""
    if profile.blocks is None:
        return
    for number in range(1, len(chain.blocks)):
        if chain.paths[number] not in profile.blocks.follows:
            raise UnsupportedError(
                f"forward does not give '{chain.paths[number]}' just what '{chain.paths[number - 1]}' returns"
            )


def _memory(
    layout: StageLayout,
    actions: list[Action],
    options: StageOptions,
    sizes: ModuleSizes,
    job: Job,
    profile: StepProfile,
) -> dict[str, float]:
    """Return the memory of a rank that computes these."""
    stages = {stage for _, stage, _ in actions}
    memory = replicated_memory((p for p in sizes.parameters if layout.stage_by_name[p.name] in stages), job)
    memory["parameters"] += sizes.buffer_bytes  # every rank has all of them
    if profile.saved is not None:
        block_bytes = [float(profile.saved.bytes_saved_first_in(path)) for path in layout.chain.paths]
        stage_bytes = {stage: sum(block_bytes[number] for number in layout.block_numbers(stage)) for stage in stages}
        head_bytes, tail_bytes = profile.saved.bytes_around(layout.chain.paths)
        # gpipe computes the loss of the whole batch, the others of one micro-batch at a time.
        loss_bytes = tail_bytes if options.schedule == "gpipe" else tail_bytes * len(stages) / (len(actions) / 2)
        ends = head_bytes * (0 in stages) + loss_bytes * (layout.num_stages - 1 in stages)
        memory["activations"] = ends + peak_activation_bytes(actions, stage_bytes)
    return memory


def _sent(
    layout: StageLayout, num_ranks: int, sizes: ModuleSizes, job: Job, inputs: dict[str, int], num_replicas: int
) -> dict[str, float]:
    """Return what the rank that sends the most sends: outputs on, gradients back, and gradients to its replicas."""
    sent_by_rank = []
    entering = [inputs.get(layout.chain.paths[begin], 0) for begin in layout.begins]  # the first may get it by name
    for rank in range(num_ranks):
        stages = set(range(rank, layout.num_stages, num_ranks))
        parameters = [p for p in sizes.parameters if layout.stage_by_name[p.name] in stages and p.requires_grad]
        gradients = sum(p.numel * job.itemsize(p) for p in parameters)
        sent_by_rank.append({
            "stage outputs": float(sum(sum(entering[stage + 1 : stage + 2]) for stage in stages)),
            "stage gradients": float(sum(entering[stage] for stage in stages if stage)),
            "dense gradients": 2 * (num_replicas - 1) / num_replicas * gradients,
        })
    return max(sent_by_rank, key=lambda sent: sum(sent.values()))
