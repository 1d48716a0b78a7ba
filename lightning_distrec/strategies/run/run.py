"""What a strategy has from `setup` to `teardown`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_distrec._compat.lightning import mark_stop
from lightning_distrec.strategies.run.buffer_broadcasts import BroadcastSkipper, NoBroadcasts
from lightning_distrec.strategies.run.frozen_layers import FrozenLayers
from lightning_distrec.strategies.run.session import Session
from lightning_distrec.strategies.run.stopping import StopHandler


@dataclass(kw_only=True)
class Run:
    """One fit, validate, test or predict. Its strategy's subclass has further fields; none of them is ever None.

    `setup` makes it first of all and replaces the defaults one by one, so that `teardown` can undo a set-up that has
    failed half way.
    """

    trainer: Trainer
    module: LightningModule
    session: Session
    stopping: StopHandler
    buffers: BroadcastSkipper | NoBroadcasts = field(default_factory=NoBroadcasts)
    """Decides before each training step whether rank 0's buffers are broadcast."""
    frozen: FrozenLayers = field(default_factory=lambda: FrozenLayers([]))
    """The layers that DistributedDataParallel does not average, because they did not learn when it was made."""
    undo: ExitStack = field(default_factory=ExitStack)
    """What teardown undoes, the last first."""
    has_failed: bool = False

    @property
    def is_fitting(self) -> bool:
        """Whether the run trains."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @contextmanager
    def evaluation_step(self) -> Iterator[None]:
        """Around a step of validation, test or prediction. Collective: the ranks may agree to stop after it."""
        yield
        if self.stopping.ends_evaluation():
            mark_stop(self.trainer)

    def end(self) -> None:
        """Collective. Wait for a checkpoint that is still being written, and undo what the run has put on."""
        with self.undo:
            self.session.checkpoints.finish(self.has_failed)
