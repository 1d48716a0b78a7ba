"""What pipeline_parallel needs for a module: of the fullest stage, and of the rank that sends the most."""

from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule

from lightning_distrec.errors import DistRecError, UnsupportedError
from lightning_distrec.strategies.estimates.estimate import Estimate, Job, replicated_memory
from lightning_distrec.strategies.estimates.meta_copy import configured_optimizers, meta_copy
from lightning_distrec.strategies.estimates.module_sizes import ModuleSizes
from lightning_distrec.strategies.estimates.step_profile import StepProfile
from lightning_distrec.strategies.fully_sharded.refusals import refuse_sharded
from lightning_distrec.strategies.stages.chain import Chain, StageLayout, find_chain, split_chain
from lightning_distrec.strategies.stages.microbatches import num_parts
from lightning_distrec.strategies.stages.refusals import refuse_optimizers, refuse_run
from lightning_distrec.strategies.stages.stage_options import StageOptions
from lightning_distrec.units import quantity

PIPELINE = "pipeline_parallel"


def estimate_stages(
    module: LightningModule, sizes: ModuleSizes, job: Job, settings: Any, profile: StepProfile
) -> tuple[Estimate, list[str]]:
    """Return what pipeline_parallel needs with its defaults, and what was assumed; or why it refuses the module."""
    options = StageOptions()
    if job.num_ranks < 2:
        return Estimate(strategy=PIPELINE, refused="one rank is no pipeline: use at least 2"), []
    try:
        layout = _layout(_copied(module), options, job, settings)
        _check_order(layout.chain, profile)
    except DistRecError as error:
        return Estimate(strategy=PIPELINE, refused=str(error)), []
    num_replicas = job.num_ranks // layout.num_stages
    of_stages = [_memory(layout, stage, sizes, job, profile) for stage in range(layout.num_stages)]
    memory = max(of_stages, key=lambda of_stage: sum(of_stage.values()))
    sent = None
    if profile.blocks is not None:
        sent = _sent(layout, sizes, job, profile.blocks.input_bytes, num_replicas)
    num = num_parts(profile.batch_size or options.microbatches, options.microbatches)
    idle = (layout.num_stages - 1) / (num + layout.num_stages - 1)
    of = quantity(layout.num_stages, "stage") + (f" (stages: {layout.num_stages})" if num_replicas > 1 else "")
    note = (
        f"pipeline_parallel is estimated with {of} of '{layout.chain.path}' and "
        f"{num} micro-batches, so that ranks idle {idle:.0%} of a step at best; memory is "
        "the fullest stage's, and one batch is for all ranks of a pipeline"
    )
    return Estimate(strategy=PIPELINE, memory=memory, sent=sent), [note]


def _copied(module: LightningModule) -> LightningModule:
    try:
        return meta_copy(module)
    except Exception:  # it needs a Trainer: `measure_module` has noted why
        return module


def _layout(module: LightningModule, options: StageOptions, job: Job, settings: Any) -> StageLayout:
    """Return where the module is split: over all ranks, or as many stages as its blocks are enough for.

    Raises DistRecError: pipeline_parallel would refuse the module, or its optimizers.
    """
    trainer: Any = SimpleNamespace(precision=job.precision, callbacks=settings.callbacks)
    refuse_run(trainer, module)
    refuse_sharded(module, PIPELINE)
    num_blocks = len(find_chain(module, options.chain).blocks)
    possible = [num for num in range(2, min(num_blocks, job.num_ranks) + 1) if job.num_ranks % num == 0]
    layout = split_chain(module, options, max(possible, default=job.num_ranks))
    try:
        optimizers = configured_optimizers(module)
    except Exception:  # it needs a Trainer: `measure_module` has noted why
        optimizers = []
    refuse_optimizers(optimizers, module)
    return layout


def _check_order(chain: Chain, profile: StepProfile) -> None:
    """Raise UnsupportedError: the step that was run did not go from each block straight to the next."""
    if profile.blocks is None:
        return
    for number in range(1, len(chain.blocks)):
        if chain.path_of(number) not in profile.blocks.follows:
            raise UnsupportedError(
                f"forward does not give '{chain.path_of(number)}' just what '{chain.path_of(number - 1)}' returns"
            )


def _memory(layout: StageLayout, stage: int, sizes: ModuleSizes, job: Job, profile: StepProfile) -> dict[str, float]:
    memory = replicated_memory((p for p in sizes.parameters if layout.stage_of[p.name] == stage), job)
    memory["parameters"] += sizes.buffer_bytes  # every rank has all of them
    if profile.activation_bytes is not None:
        saved, chain = profile.blocks.saved_bytes if profile.blocks else {}, layout.chain
        others = (chain.path_of(i) for i in range(len(chain.blocks)) if i not in layout.blocks_of(stage))
        memory["activations"] = float(profile.activation_bytes - sum(saved.get(path, 0) for path in others))
    return memory


def _sent(
    layout: StageLayout, sizes: ModuleSizes, job: Job, inputs: dict[str, int], num_replicas: int
) -> dict[str, float]:
    """Return what the rank that sends the most sends: outputs on, gradients back, and gradients to its replicas."""
    of_stages = []
    entering = [inputs.get(layout.chain.path_of(begin), 0) for begin in layout.begins]  # the first may get it by name
    for stage in range(layout.num_stages):
        own = [p for p in sizes.parameters if layout.stage_of[p.name] == stage and p.requires_grad]
        gradients = sum(p.numel * job.itemsize(p) for p in own)
        of_stages.append(
            {
                "stage outputs": float(sum(entering[stage + 1 : stage + 2])),
                "stage gradients": float(entering[stage] if stage else 0),
                "dense gradients": 2 * (num_replicas - 1) / num_replicas * gradients,
            }
        )
    return max(of_stages, key=lambda sent: sum(sent.values()))
