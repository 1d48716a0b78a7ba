"""What a strategy has once its ranks have met, and what it has from `setup` to `teardown`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec._compat.lightning import mark_stop
from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
from lightning_distrec.cluster.consensus import Consensus, job_consensus
from lightning_distrec.errors import ShardingError, UnsupportedError
from lightning_distrec.optimizers.gradient_hooks import GradientHooks
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.strategies.checkpoints.checkpointing import Checkpointing
from lightning_distrec.strategies.checkpoints.random_numbers import fingerprint
from lightning_distrec.strategies.data_parallel.losses import (
    ADVICE,
    BatchSizes,
    UnreachedLoss,
    reaches_a_parameter,
)
from lightning_distrec.strategies.data_parallel.replicated_layers import (
    BroadcastSkipper,
    NoBroadcasts,
    ReplicatedLayers,
)
from lightning_distrec.strategies.run.process_runs import PROCESS
from lightning_distrec.strategies.run.rank_comparisons import LoggedKeys
from lightning_distrec.strategies.run.replicated_state import ReplicatedState
from lightning_distrec.strategies.run.stopping import StopHandler


@dataclass(frozen=True, kw_only=True)
class Session:
    """Made by `setup_environment`, because hooks outside of a run need it too:
    `trainer.save_checkpoint` after fit."""

    consensus: Consensus
    """For everything that is agreed on now and then."""
    step_consensus: Consensus
    """For what is exchanged once in every step; see `JobConsensus` for why it has a group of its
    own."""
    checkpoints: Checkpointing
    nodes: NodeLayout
    """Which ranks share a node."""


def start_session(
    module: LightningModule,
    options: CheckpointOptions,
    timeout_seconds: float,
    earlier: Session | None,
    place: tuple[int, int],
) -> Session:
    """Collective, once the ranks have met. Return the earlier session while its process groups are
    still there.

    place: the number of this rank's node, and how many ranks that has.
    """
    # Groups of the process last as long as its default process group, which all Trainers of a
    # program share.
    job = job_consensus(timeout_seconds)
    if earlier is None or earlier.consensus is not job.general:
        writers = job.writing_thread if options.async_save else job.general
        checkpoints = Checkpointing(options, job.general, writers, module, PROCESS.note_writing)
        # Gathered, not computed: torchrun's agents and Slurm steps may have unequal numbers of
        # ranks.
        nodes = NodeLayout.gathered(job.general.all_gather(place))
        earlier = Session(
            consensus=job.general, step_consensus=job.steps, checkpoints=checkpoints, nodes=nodes
        )
    earlier.checkpoints.fingerprints = (fingerprint(), "")  # Lightning has set the seed by now
    return earlier


@dataclass(kw_only=True)
class Run:
    """One fit, validate, test or predict. Its strategy's subclass has further fields; none of them
    is ever None.

    `setup` makes it first of all and replaces the defaults one by one, so that `teardown` can undo
    a set-up that has failed half way.
    """

    trainer: Trainer
    module: LightningModule
    session: Session
    stopping: StopHandler
    dense: ReplicatedLayers = field(default_factory=ReplicatedLayers)
    """The layers without tables; replicated until setup has sharded them."""
    buffers: BroadcastSkipper | NoBroadcasts = field(default_factory=NoBroadcasts)
    """Decides before each training step whether rank 0's buffers are broadcast."""
    frozen: list[nn.Parameter] = field(default_factory=list)
    """Those that DistributedDataParallel does not average, because they required no gradient when
    it was made."""
    undo: ExitStack = field(default_factory=ExitStack)
    """What teardown undoes, the last first."""
    has_failed: bool = False
    gradient_hooks: GradientHooks = field(default_factory=GradientHooks)
    """The user's, from the start of training on."""
    tensor_hooks: str = ""
    """How hooks of `register_hook` on layers would differ from one process; "": as little as under
    DDP."""

    @property
    def is_fitting(self) -> bool:
        """Whether the run trains."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def method(self) -> str:
        """The Trainer's method that runs: "fit", "validate"."""
        function = self.trainer.state.fn
        return "" if function is None else function.value

    @cached_property
    def unreached_loss(self) -> UnreachedLoss:
        """What completes losses that reach no parameter."""
        return UnreachedLoss(self.layers, self.session.consensus.rank)

    @cached_property
    def logged_keys(self) -> LoggedKeys:
        """What compares the names of logged values over the ranks."""
        return LoggedKeys(self.trainer, self.session.consensus)

    @cached_property
    def replicated_state(self) -> ReplicatedState:
        """What compares param groups and replicated weights over the ranks."""
        return ReplicatedState(self)

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        """What looks for batches of unequal sizes."""
        return BatchSizes(self.trainer, self.session.consensus, self.note_unequal_batches)

    def note_unequal_batches(self, text: str) -> None:
        """Warn of batches of unequal sizes, unless losses are weighted by them."""
        rank_zero_warn(text)

    def note_parameters(self) -> None:
        """Note the parameters that are trained by all ranks together: after set-up, and after each
        wrapping in DDP."""
        self.replicated_state.trained.update(map(id, self.module.parameters()))

    def before_step(self, batch: Any) -> None:
        """Collective at some steps. Begin a training step, and raise on every rank what has gone
        apart or failed."""
        self.session.checkpoints.before_step()
        self.buffers.before_step()
        self.logged_keys.before_step()
        self.batch_sizes.before_step(batch)
        self.replicated_state.before_step()

    def before_epoch_ends(self) -> None:
        """Collective, before values are reduced over ranks. Compare what was not compared in steps.

        Raises RankError or OptimizerError: ranks have logged, or trained, apart.
        """
        self.batch_sizes.compare()
        self.logged_keys.before_epoch_ends()
        self.replicated_state.compare_numbers()

    def complete(self, loss: Tensor, model: nn.Module) -> Tensor:
        """Return a loss whose backward makes all exchanges of this rank. Raises UnsupportedError:
        it cannot."""
        if self.session.consensus.num_ranks == 1:
            return loss
        if self.dense.needs_losses and not reaches_a_parameter(loss):
            raise UnsupportedError(
                f"the loss on rank {self.session.consensus.rank} reaches no parameter, and layers "
                "that are sharded are gathered in backward: the other ranks would wait for this "
                f"one. {ADVICE}"
            )
        return self.unreached_loss.complete(loss, model)

    def layers(self) -> dict[str, nn.Parameter]:
        """Return the parameters without tables that this rank has, by name."""
        return dict(self.module.named_parameters())

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the fit."""
        return self.trainer.optimizers

    def replicas(self) -> dict[str, Tensor]:
        """Return the weights that other ranks have too, by name; of DTensors this rank's shard of a
        replica."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self.unsharded().items():
            if not isinstance(parameter, DTensor):
                weights[name] = parameter
            elif parameter.device_mesh.ndim > 1:
                shard = parameter.device_mesh.get_local_rank("shard")
                weights[f"{name} (shard {shard})"] = parameter.to_local()
        return weights

    def unsharded(self) -> dict[str, nn.Parameter]:
        """Return the parameters, by name, that are no tables' shards."""
        return self.layers()

    @contextmanager
    def evaluation_step(self) -> Iterator[None]:
        """Around a step of validation, test or prediction. Collective: the ranks may agree to stop
        after it."""
        with self.dense.step():
            yield
        # After the step and not before it: all ranks make the exchange, whether they have a request
        # or not.
        if self.stopping.ends_evaluation():
            mark_stop(self.trainer)

    def end(self) -> None:
        """Collective. Wait for a checkpoint that is still being written, and undo what the run has
        put on."""
        # Hooks and patches are undone also where the writer of a checkpoint has failed, which is
        # raised after that.
        with self.undo:
            if not self.has_failed:
                self.session.checkpoints.positions.end(self.trainer)
            self.session.checkpoints.finish(self.has_failed)


def refuse_shards_of_torchrec(module: nn.Module) -> None:
    """Raise ShardingError: TorchRec has sharded the module already."""
    for path, child in module.named_modules():
        # By name: looking for the class would import torchrec in every run. Ours are not in the
        # module tree.
        if any(
            kind.__name__ == "ShardedModule" and kind.__module__.startswith("torchrec.")
            for kind in type(child).__mro__
        ):
            raise ShardingError(
                f"'{path}' is already sharded by TorchRec: by DistributedModelParallel, shard or "
                "shard_modules. Keep the unsharded module, which strategy='torchrec_sharded' "
                "shards. A plan of your own: planning={'plan_file': plan}, with TorchRec's "
                "ShardingPlan."
            )
