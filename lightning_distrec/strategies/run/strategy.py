"""What every strategy of ours does over a run: its ranks begin, save, stop and end together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec import spans
from lightning_distrec._compat.deprecations import hide_upstream_deprecations
from lightning_distrec._compat.lightning import mark_stop
from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.cluster.process_exit import leave_at_exit, note_failure
from lightning_distrec.errors import ConfigError
from lightning_distrec.pipeline.even_batches import UnevenInputs, check_uneven_inputs, even
from lightning_distrec.strategies.checkpoints.hooks import CheckpointHooks
from lightning_distrec.strategies.run.buffer_broadcasts import QuietBuffers
from lightning_distrec.strategies.run.frozen_layers import FrozenLayers
from lightning_distrec.strategies.run.given_options import as_options
from lightning_distrec.strategies.run.launched_ranks import RanksFromLauncher
from lightning_distrec.strategies.run.precision import MatmulPrecision, use_matmul_precision
from lightning_distrec.strategies.run.stopping import STOPPED, StopHandler, StopOptions


class DistRecStrategy(CheckpointHooks, RanksFromLauncher):
    """A strategy whose ranks agree on when to begin, save, stop and end.

    The arguments are those of TorchRecShardedStrategy of the same names; ddp: of DistributedDataParallel.
    """

    def __init__(
        self,
        uneven_inputs: UnevenInputs,
        checkpoint: CheckpointOptions | dict[str, Any] | None,
        stopping: StopOptions | dict[str, Any] | None,
        process_group_backend: str | None,
        float32_matmul_precision: MatmulPrecision | None,
        timeout_seconds: float,
        watchdog_seconds: float,
        **ddp: Any,
    ) -> None:
        check_uneven_inputs(uneven_inputs)
        if timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds={timeout_seconds}: must be above 0.")
        if watchdog_seconds < 0:
            raise ConfigError(f"watchdog_seconds={watchdog_seconds}: must not be below 0, which turns the watch off.")
        use_matmul_precision(float32_matmul_precision)
        self._uneven_inputs: UnevenInputs = uneven_inputs
        self._checkpoint_options = as_options("checkpoint", CheckpointOptions, checkpoint)
        self._stop_options = as_options("stopping", StopOptions, stopping)
        self._resumes = self._stop_options.resume == "auto"
        self._timeout_seconds = timeout_seconds
        self._watchdog_seconds = watchdog_seconds
        self._buffers: QuietBuffers | None = None
        self._frozen = FrozenLayers([])
        self._stopping: StopHandler | None = None
        self._consensus: Consensus | None = None
        self._of_steps: Consensus | None = None
        self._failed = False
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_seconds), **ddp)
        leave_at_exit(self.release)
        hide_upstream_deprecations()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._consensus, self._of_steps = self.all_ranks()
        self.set_up_checkpoints(self._checkpoint_options, self._timeout_seconds)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self._of_steps is not None
        self._failed = False
        self._stopping = StopHandler(trainer, self._of_steps, self._stop_options, self.job_checkpoint)
        self.set_up_module(trainer)
        self._frozen = FrozenLayers(self.exchanged_parameters() if trainer.state.fn == TrainerFn.FITTING else [])

    def set_up_module(self, trainer: Trainer) -> None:
        """Collective. Make the module ready to run, with its optimizers; here as DDP does."""
        assert self.lightning_module is not None
        super().setup(trainer)
        self.begin_checkpoints(self.lightning_module, None)

    def exchanged_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are averaged over the ranks by DDP."""
        assert self.lightning_module is not None
        return list(self.lightning_module.parameters())

    def exchange_anew(self) -> None:
        """Collective. Let DDP average the gradients of what learns now; here with the settings that it had."""
        assert self.lightning_module is not None
        self.model = self.lightning_module
        self.configure_ddp()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._consensus is not None
        assert self.lightning_module is not None
        loader = even(dataloader, self._consensus, self._uneven_inputs, warn)
        return self.keep_position(loader) if self.lightning_module.trainer.training else loader

    def module_step(self, name: str, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run a step of the module; here as DDP does."""
        return getattr(super(), name)(*args, **kwargs)

    @contextmanager
    def around_step(self, args: tuple[Any, ...], has_backward: bool) -> Iterator[None]:
        """Around a step of any kind. args: what it is called with."""
        yield

    def before_evaluation_step(self) -> None:
        """Before a step of validation, test or prediction."""

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        if self._buffers is not None:
            self._buffers.before_step()
        self.before_step()
        if self._frozen.have_thawed:
            self.exchange_anew()
            self._frozen = FrozenLayers(self.exchanged_parameters())
        with spans.span(spans.FORWARD), self.around_step(args, self.lightning_module.automatic_optimization):
            return self.module_step("training_step", *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation_step(args):
            return self.module_step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation_step(args):
            return self.module_step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation_step(args):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluation_step(self, args: tuple[Any, ...]) -> Iterator[None]:
        self.before_evaluation_step()
        with self.around_step(args, has_backward=False):
            yield
        assert self._stopping is not None
        if self._stopping.ends_evaluation():
            assert self.lightning_module is not None
            mark_stop(self.lightning_module.trainer)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with spans.span(spans.BACKWARD):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with spans.span(spans.OPTIMIZER):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        note_failure()
        self._failed = True
        if isinstance(exception, SystemExit) and exception.code is None and self._stopping is not None:
            exception.code, exception.args = STOPPED, (STOPPED,)  # Lightning's, out of an evaluation
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        try:
            self.finish_checkpoints(self._failed)
        finally:
            self.end_run()

    def end_run(self) -> None:
        """Give back what the run has taken; here as DDP does."""
        self.stop_listening()
        super().teardown()

    def stop_listening(self) -> None:
        """Give Lightning its signal handlers back, and let DDP's buffers be."""
        if self._stopping is not None:
            self._stopping.undo(self._failed)
        self._stopping = self._buffers = None
        self._frozen = FrozenLayers([])

    def release(self) -> None:
        """Let go of the module and all that holds its requests; called before the process ends."""
        self.model = None
        self._lightning_module = None
        self._consensus = self._of_steps = None
        self.forget_checkpoints()
        self.optimizers, self.lr_scheduler_configs = [], []


def warn(message: str) -> None:
    """Say a warning once for all ranks."""
    rank_zero_warn(message)
