"""`Trainer(strategy="pipeline_parallel")`: an unchanged module whose chain of blocks is split over
ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_distrec import spans
from lightning_distrec._compat.lightning import set_device_and_mesh
from lightning_distrec.errors import ConfigError, DistRecError
from lightning_distrec.gpu import is_gpu
from lightning_distrec.pipeline.absent_tensors import is_absent
from lightning_distrec.pipeline.chain import (
    PipelineRanks,
    Schedule,
    Split,
    StageOptions,
    pipeline_ranks,
    refuse_optimizers,
    refuse_run,
)
from lightning_distrec.pipeline.pipelined_module import PipelinedModule, StepCall
from lightning_distrec.pipeline.placement import (
    chunked_state,
    layout_of,
    present_parameters,
    split_module,
    state_ranks,
    unsplit,
)
from lightning_distrec.pipeline.staged_chain import StagedChain
from lightning_distrec.strategies.fully_sharded.shards import refuse_sharded, refuse_sharded_tables
from lightning_distrec.strategies.run.precision import clip_over_all_ranks
from lightning_distrec.strategies.run.run import Run
from lightning_distrec.strategies.run.strategy import DistRecStrategy
from lightning_distrec.strategies.run.strategy_arguments import (
    RunOptions,
    any_at_run_time,
    check_arguments,
)


@dataclass(kw_only=True)
class PipelineRun(Run):
    """What pipeline_parallel has during one run."""

    steps: PipelinedModule = field(init=False)
    """What runs the steps, once the module is split."""
    tensor_hooks: str = "hooks of register_hook run for every micro-batch, and again for the batch"

    @override
    def complete(self, loss: Tensor, model: nn.Module) -> Tensor:
        # backward has run in the stages, with zeros where the step's loss reached nothing
        return loss

    @override
    def layers(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in super().layers().items() if not is_absent(p)}


class PipelineParallelStrategy(DistRecStrategy[PipelineRun]):
    """Trains an unchanged LightningModule whose chain of blocks is split into stages, each on a
    rank of its own.

    A rank has the weights and optimizer state of its stage alone. Batches go through the stages in
    micro-batches, so that all ranks compute at the same time. Checkpoints, stopping, requeueing and
    the watchdog are those of TorchRecShardedStrategy. Source: torch.distributed.pipelining.

    Args:
        microbatches: parts of a batch that are in the stages at the same time. A batch that cannot
            be divided so is divided into fewer.
        schedule: "gpipe": all forwards, then all backwards; training_step computes its loss of the
            whole batch. "1f1b", and "interleaved_1f1b" with several stages per rank: backwards
            begin earlier, which needs less memory, and training_step computes its loss of each
            micro-batch, which must be a mean over examples.
        stages: number of stages. None: one per rank, or stages_per_rank of them. Further ranks are
            replicas.
        stages_per_rank: stages that each rank computes, with "interleaved_1f1b".
        chain: path of the nn.Sequential or nn.ModuleList that forward goes through in order, or of
            a module whose forward calls its layers one after the other ("" for the
            LightningModule). "auto": the container with the most parameters.
        split: where stages begin. "parameters": so that the largest stage has as few parameters as
            possible; or a list of the paths of blocks or layers, of all stages but the first.
        first_stage: paths outside of the chain whose parameters the first stage has, apart from
            those that are registered before the chain.
        last_stage: the same for the last stage, apart from those that are registered after the
            chain.
        run_options: what all strategies take, as checkpoint and stopping: see DistRecStrategy.
    """

    strategy_name = "pipeline_parallel"

    @any_at_run_time
    def __init__(
        self,
        microbatches: int = 4,
        schedule: Schedule = "gpipe",
        stages: int | None = None,
        stages_per_rank: int = 1,
        chain: str = "auto",
        split: Split = "parameters",
        first_stage: list[str] | None = None,
        last_stage: list[str] | None = None,
        **run_options: Unpack[RunOptions],
    ) -> None:
        check_arguments(PipelineParallelStrategy, locals())
        self._stage_options = StageOptions(
            microbatches=microbatches,
            schedule=schedule,
            stages=stages,
            stages_per_rank=stages_per_rank,
            chain=chain,
            split=split,
            first_stage=tuple(first_stage or ()),
            last_stage=tuple(last_stage or ()),
        )
        self._ranks: PipelineRanks | None = None
        super().__init__(**run_options)

    @property
    def ranks(self) -> PipelineRanks:
        """This rank's pipeline, and its stages in it, once the ranks have met."""
        if self._ranks is None:
            raise DistRecError(
                "pipeline_parallel: the ranks have not met yet; setup_environment comes first."
            )
        return self._ranks

    def ideal_idle_share(self, num_microbatches: int) -> float:
        """Return the share of a step in which ranks wait for each other where all stages take the
        same time."""
        return self._stage_options.idle_share(self.ranks.num_ranks, num_microbatches)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # All ranks of a pipeline have the same batches.
        return {"num_replicas": self.ranks.num_replicas, "rank": self.ranks.replica}

    # -- Lightning's hooks in the order in which it calls them; those of all strategies are in
    # run/strategy.py

    @override
    def setup_environment(self) -> None:
        if is_gpu(self.root_device) and self._get_process_group_backend() == "gloo":
            raise ConfigError(
                "pipeline_parallel: process_group_backend='gloo' sends between stages from the "
                "host's memory only. Leave it out, so that GPUs exchange by NCCL, or train with "
                "accelerator='cpu'."
            )
        super().setup_environment()
        if self._ranks is None:  # one for all runs
            self._ranks = pipeline_ranks(
                self._stage_options, self.global_rank, self.world_size, self._wait
            )

    @override
    def setup(self, trainer: Trainer) -> None:
        run = self.begin_run(trainer, PipelineRun)
        module = run.module
        ranks = self.ranks
        consensus = run.session.consensus
        trainer.accelerator.setup(trainer)
        # Refused before anything is sharded: a failed set-up leaves the module as it was.
        refuse_sharded(module, self.strategy_name)
        refuse_sharded_tables(module, self.strategy_name)
        refuse_run(trainer, module)
        # Before the split, which counts bytes and sends weights in the precision's type.
        self.precision_plugin.convert_module(module)
        layout = split_module(module, self._stage_options, ranks, self.root_device, consensus)
        set_device_and_mesh(module, self.root_device, None)
        context = self.precision_plugin.forward_context
        chain = StagedChain(layout, ranks, self._stage_options.schedule, self.root_device, context)
        run.steps = PipelinedModule(module, chain, self._stage_options, consensus)
        # No wrapper around the module: its steps run in stages, and gradients are averaged after
        # backward.
        self.model = module
        if run.is_fitting:
            self.setup_optimizers(trainer)
            consensus.all_or_none("setup", partial(refuse_optimizers, self.optimizers, module))
            # Every parameter is on one rank of the pipeline only, so that all of them count as
            # shards of one norm.
            parameters = partial(present_parameters, module)
            clipping = clip_over_all_ranks(
                self.precision_plugin, parameters, {}, num_replicas=ranks.num_replicas
            )
            run.undo.enter_context(clipping)
            run.session.checkpoints.state_ranks = state_ranks(module, layout, ranks)
        self.setup_precision_plugin()
        # Samplers' positions are those of a pipeline: its ranks draw the same batches.
        run.session.checkpoints.positions.data_ranks = ranks.replica, ranks.num_replicas
        self.begin_checkpoints(run)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        run = self.before_training_step(None)
        with spans.span(spans.FORWARD):
            return run.steps.training_step(self._step_call("training_step", *args))

    @override
    def evaluate(self, step: str, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.run.evaluation_step():
            output: STEP_OUTPUT = self.run.steps.evaluation_step(self._step_call(step, *args))
            return output

    def _step_call(self, name: str, batch: Any, *indices: Any) -> StepCall:
        def step(*args: Any) -> Any:
            with self.precision_plugin.forward_context():
                return getattr(self.module, name)(*args)

        return StepCall(name=name, step=step, batch=batch, indices=indices)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        # Lightning enters this for the batches before the last one of an accumulation.
        self.run.steps.syncs_gradients = False
        try:
            yield
        finally:
            self.run.steps.syncs_gradients = True

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        # After backward and before Lightning clips: all replicas clip the same gradients.
        self.run.steps.average_gradients()
        return loss

    @override
    def reduce(self, tensor: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        # All ranks of a pipeline have the same values, which sums count once.
        same_stage = None if self._ranks is None else self._ranks.same_stage
        return super().reduce(tensor, same_stage if group is None else group, *args, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        layout = layout_of(self.module)
        return state if layout is None else chunked_state(state, layout, self.ranks)

    @override
    def full_state_dict(self) -> dict[str, Any]:
        state = self.lightning_module_state_dict()
        return state if self._session is None else self.session.checkpoints.full_state(state)

    @override
    def gather_parameter(self, name: str, parameter: Tensor) -> Tensor:
        layout = layout_of(self.module)
        if layout is None:
            return parameter
        state = chunked_state({name: parameter}, layout, self.ranks)
        weight: Tensor = self.session.checkpoints.full_state(state, everywhere=True)[name]
        return weight

    @override
    def put_weights_back(self, full: dict[str, Tensor]) -> None:
        unsplit(self.module, full)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups are this process's own, and cannot be pickled.
        return super().__getstate__() | {"_ranks": None}

    @property
    @override
    def module_stays(self) -> bool:
        # For the next run.
        return super().module_stays or layout_of(self.module) is not None
