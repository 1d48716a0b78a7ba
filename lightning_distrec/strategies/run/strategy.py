"""The hooks that are the same for all strategies of ours: their ranks begin, save, stop and end at
the same points."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec import spans
from lightning_distrec._compat import hide_upstream_deprecations
from lightning_distrec._compat.jsonargparse import prefer_torchs_names
from lightning_distrec._compat.lightning import call_overridden_hooks
from lightning_distrec._compat.lightning_checkpoints import resume_from
from lightning_distrec._compat.lightning_data import predict_few_examples, resume_loaders
from lightning_distrec._compat.lightning_logging import (
    before_values_are_reduced,
    log_at_less_python,
)
from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
from lightning_distrec.cluster.environment import LaunchedRanks, local_world_size, publish_ranks
from lightning_distrec.cluster.host_resources import THREADS_VARIABLE
from lightning_distrec.cluster.launched import Launched, name_in_store
from lightning_distrec.errors import ConfigError, DistRecError, ShardingError
from lightning_distrec.module_shards import holds_shards
from lightning_distrec.option_values import as_options, parse_timeout
from lightning_distrec.prefetch.even_batches import (
    UnevenInputs,
    choose_repeats,
    even,
    join_predictions,
)
from lightning_distrec.strategies.checkpoints.checkpoint_io import refuse_checkpoint_io
from lightning_distrec.strategies.checkpoints.resuming import (
    FIT_NUMBERS,
    JobFit,
    Resuming,
    run_name,
)
from lightning_distrec.strategies.data_parallel.gradient_exchange import name_option
from lightning_distrec.strategies.data_parallel.replicated_layers import refuse_local_lookups
from lightning_distrec.strategies.run.checkpoint_hooks import CheckpointHooks
from lightning_distrec.strategies.run.launched_ranks import (
    check_trainer,
    connect_ranks,
    fork_launcher,
    forks_ranks,
    has_no_script,
    refuse_other_callbacks,
    wrap_launch,
)
from lightning_distrec.strategies.run.process_runs import PROCESS, Waits
from lightning_distrec.strategies.run.rank_comparisons import compare_first_batches
from lightning_distrec.strategies.run.run import Run, refuse_shards_of_torchrec, start_session
from lightning_distrec.strategies.run.stopping import STOPPED, StopHandler, StopOptions
from lightning_distrec.strategies.run.strategy_arguments import Backend, MatmulPrecision

prefer_torchs_names()  # importing this module imports torchrec
AnyRun = TypeVar("AnyRun", bound=Run)


class DistRecStrategy(CheckpointHooks, Generic[AnyRun]):
    """A DDPStrategy whose ranks are those that were launched, and agree on when to begin, save,
    stop and end.

    `setup_environment` starts its session, `setup` of a subclass its run, which `teardown` ends.

    Args:
        uneven_inputs: what to do where ranks have unequal numbers of batches: "stop" after the last
            that all ranks have, though predict all; or raise an "error".
        checkpoint: distributed, async_save, pickles, start_from, ...: see CheckpointOptions.
        stopping: auto_requeue, requeue_signal, on_sigterm, resume, run_name: see StopOptions.
        process_group_backend: "gloo" or "nccl"; None: the device's default. Between stages of
            pipeline_parallel on GPUs "gloo" is an error.
        float32_matmul_precision: "high" computes float32 products of dense layers in TF32, "medium"
            in bfloat16, where the device can; "highest" in float32. None: leave torch's setting as
            it is.
        timeout_seconds: how long a rank waits in any collective. None:
            PROCESS_GROUP_TIMEOUT_SECONDS, or else 1800.
        start_seconds: how long ranks wait for each other at the start; at most timeout_seconds. The
            error names those that are missing.
        watchdog_seconds: seconds of silence after which all ranks abort and name the missing one; 0
            disables.
        deadlock_seconds: how long ranks may wait for each other in different exchanges; then they
            are ended, and their places are named. 0 disables, and so does watchdog_seconds=0.
    """

    takes_launched_ranks = True
    """Read by `lightning_distrec`, before Lightning chooses a cluster environment."""
    predicts_alone = False  # whether a prediction makes no exchanges
    cluster_environment: ClusterEnvironment  # the Trainer sets it before it calls any hook
    _run: AnyRun | None = None
    undo_last = ExitStack()  # of a launch that has failed
    _has_trainer = False

    def __init__(
        self,
        uneven_inputs: UnevenInputs = "stop",
        checkpoint: CheckpointOptions | dict[str, Any] | None = None,
        stopping: StopOptions | dict[str, Any] | None = None,
        process_group_backend: Backend | None = None,
        float32_matmul_precision: MatmulPrecision | None = None,
        timeout_seconds: float | None = None,
        start_seconds: float = 300.0,
        watchdog_seconds: float = 30.0,
        deadlock_seconds: float = 60.0,
    ) -> None:
        if float32_matmul_precision is not None:
            torch.set_float32_matmul_precision(float32_matmul_precision)
        self._uneven_inputs: UnevenInputs = uneven_inputs
        self._checkpoint_options = as_options("checkpoint", CheckpointOptions, checkpoint)
        self._stop_options = as_options("stopping", StopOptions, stopping)
        self._wait = parse_timeout(timeout_seconds, os.environ)
        self._waits = Waits(self._wait, start_seconds, watchdog_seconds, deadlock_seconds)
        self._sets_threads = False
        super().__init__(process_group_backend=process_group_backend, timeout=self._wait)
        PROCESS.leave_at_exit(self.release)
        hide_upstream_deprecations()

    def __repr__(self) -> str:
        # in Fabric's refusal
        return f"<{type(self).__name__}, for lightning.pytorch's Trainer, not for Fabric>"

    @property
    def run(self) -> AnyRun:
        """What the run has that is in progress, from `setup` to `teardown`."""
        if self._run is None:
            raise DistRecError(
                f"{type(self).__name__}: no run is in progress. The Trainer's fit, for one, begins "
                "one."
            )
        return self._run

    @property
    def launched(self) -> Launched | None:
        """The ranks as the launcher describes them; None under Lightning's own launcher, or a
        plugin of the user's."""
        environment = self.cluster_environment
        return environment.launched if isinstance(environment, LaunchedRanks) else None

    @property
    def num_nodes(self) -> int:
        """Nodes that ranks are on."""
        return self._num_nodes if self.launched is None else self.launched.num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def leave_trainer(self) -> None:
        """Forget what a Trainer has given, for another one. Raises ConfigError: a run of the first
        is in progress."""
        if self._run is not None:
            raise ConfigError(
                f"this {type(self).__name__} is in a run of another Trainer "
                f"(trainer.{self._run.method}). Give a Trainer that is made within a run a "
                "strategy of its own."
            )
        if self._has_trainer:
            self._has_trainer = False
            self._accelerator = self._precision_plugin = self._checkpoint_io = (
                self.parallel_devices
            ) = None
            # Until the Trainer sets the next.
            self.cluster_environment = None  # type: ignore[assignment]

    @property
    @override
    def root_device(self) -> torch.device:
        # The Trainer has set them.
        devices: list[torch.device] = self.parallel_devices  # type: ignore[assignment]
        # A task that sees one device alone (--gpus-per-task, --gpu-bind) has that one, whatever its
        # local rank.
        return devices[self.local_rank % len(devices)]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        self._has_trainer = True
        # Lightning's launcher sets the variable.
        self._sets_threads = self.launched is not None and THREADS_VARIABLE not in os.environ
        check_trainer(self, self._num_nodes)
        super()._configure_launcher()
        # Lightning has chosen its launcher by now, which would run sys.argv again.
        if has_no_script(self.cluster_environment, self.num_processes, self._num_nodes):
            self._launcher = fork_launcher(self)
        wrap_launch(self, self._prepare_fit, self._wait.total_seconds())

    def _prepare_fit(self, trainer: Trainer) -> ExitStack:
        """Let a fit resume from what the same job has saved before it was restarted."""
        options = self._stop_options
        launched = self.launched
        fit = next(FIT_NUMBERS)
        run = run_name(options.run_name)
        job = launched.job if launched else ""
        attempt, launcher = (launched.attempt, launched.launcher) if launched else (0, "")
        point = launched.point if launched is not None and launched.point.is_hosted else None

        def begin(job: str) -> Resuming:
            job_fit = JobFit(trainer.default_root_dir, job, fit, run)
            never = options.resume == "never"
            pickles = self._checkpoint_options.pickles
            self.resuming = Resuming(trainer, job_fit, attempt, launcher, never, pickles)
            return self.resuming

        resuming = begin(job)

        def find(ckpt_path: object) -> str | None:
            if not (run or job or point):
                return None
            self.setup_environment()  # rank 0 decides, so the ranks must have met
            ranks = self.session.consensus
            last = resuming
            if not (run or job) and point is not None:
                last = begin(ranks.all_gather(name_in_store(point, ranks.rank))[0])
            return last.find(ckpt_path, ranks)

        return resume_from(trainer, find)

    @override
    def setup_environment(self) -> None:
        PROCESS.calls_outside.begin_run(self._wait)
        super().setup_environment()
        timeout_seconds = self._wait.total_seconds()
        place = (self.node_rank, self.num_local_ranks)
        self._session = start_session(
            self.module, self._checkpoint_options, timeout_seconds, self._session, place
        )

    @override
    def setup_distributed(self) -> None:
        """Collective. Meet the other ranks and make the process group, unless there is one.

        Raises ConfigError: there is one, of other ranks.
        """
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = backend = self._get_process_group_backend()
        connect_ranks(self, backend, self._waits, self._sets_threads, self._num_nodes)
        self.num_local_ranks = publish_ranks(self.cluster_environment, self.num_processes)

    def exchange(self, value: Any) -> list[Any]:
        """Collective. Return what each rank has passed, in rank order: numbers, texts, lists,
        dicts; tensors, which come back in the host's memory.

        Once the ranks have met: in `setup` of modules and datamodules, where loaders are made, in
        hooks. Raises RankError on every rank: one rank's value cannot be pickled.
        """
        return self.session.consensus.all_gather(value)

    def begin_run(self, trainer: Trainer, kind: type[AnyRun]) -> AnyRun:
        """Begin `setup`: from now on signals are recorded, and what is put into `run.undo` is
        undone by teardown.

        Raises ConfigError: a CheckpointIO plugin would be ignored, or a callback is one of
        pytorch_lightning's.
        ShardingError: TorchRec has sharded the module already.
        """
        session = self.session
        module = trainer.lightning_module
        refuse_other_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        refuse_shards_of_torchrec(module)
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_local_lookups(
                module, self.distributed_sampler_kwargs["num_replicas"], self.world_size
            )
        refuse_checkpoint_io(self._checkpoint_options, self.checkpoint_io)
        job = self.resuming.job if self.resuming else JobFit(".", "")
        session.checkpoints.start_run(module, job)
        stopping = StopHandler(
            trainer, session.step_consensus, session.checkpoints, self._stop_options, job
        )
        self._run = run = kind(trainer=trainer, module=module, session=session, stopping=stopping)
        # ExitStack runs the last one first: handlers are put back after the patches below are
        # undone.
        run.undo.callback(lambda: stopping.undo(run.has_failed))
        run.undo.enter_context(local_world_size(self.num_local_ranks))
        run.undo.enter_context(
            compare_first_batches(self) if run.is_fitting else join_predictions(trainer, self)
        )
        positions = session.checkpoints.positions
        run.undo.enter_context(
            resume_loaders(trainer, positions.begins_late, positions.draws.note_first_batch)
        )
        run.undo.enter_context(predict_few_examples())
        run.undo.enter_context(call_overridden_hooks(trainer))
        run.undo.enter_context(log_at_less_python(trainer))
        run.undo.enter_context(before_values_are_reduced(trainer, run.before_epoch_ends))
        run.undo.enter_context(run.gradient_hooks)
        return run

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # a loop was asked for its data outside of a run: there are no others to agree with
        if self._session is None:
            return dataloader
        trainer = self.module.trainer
        session = self.session
        mode = self._uneven_inputs
        loader = even(
            dataloader, session.consensus, mode, rank_zero_warn, choose_repeats(trainer, self)
        )
        return session.checkpoints.positions.keep(loader) if trainer.training else loader

    def before_training_step(self, batch: Any) -> AnyRun:
        """Begin every training step. Raises as Run.before_step."""
        run = self.run
        run.before_step(batch)
        # Making DDP is collective: the user's code unfreezes on all ranks alike, or none could
        # train.
        if any(parameter.requires_grad for parameter in run.frozen):
            # DDP ignores what was frozen for good: each rank would train weights of its own
            self.configure_ddp()
            run.note_parameters()
        return run

    @override
    def on_train_start(self) -> None:
        """Collective. Take over hooks on gradients: called after the user's hook of this name, the
        last to add some."""
        super().on_train_start()
        run = self.run
        if run.gradient_hooks.take(run.layers(), run.tensor_hooks, run.session.consensus):
            # In one process they run after every backward, also where gradients accumulate.
            run.gradient_hooks.replace(self, "block_backward_sync", nullcontext)
        # averages inside of the plugin's backward
        is_ddp = isinstance(self.model, DistributedDataParallel)
        run.gradient_hooks.call_after(self.precision_plugin if is_ddp else self, is_ddp)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        run = self.before_training_step(args[0])
        with spans.span(spans.FORWARD), run.dense.step():
            return self.call_training_step(*args, **kwargs)

    def call_training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the user's training_step."""
        return super().training_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync(), self.run.dense.no_sync():
            yield

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # A run has a model.
        closure_loss = self.run.complete(closure_loss, self.model)  # type: ignore[arg-type]
        with self.run.dense.backward(), spans.span(spans.BACKWARD):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with self.run.dense.optimizer_step(optimizer), spans.span(spans.OPTIMIZER):
            return super().optimizer_step(optimizer, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.evaluate("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.evaluate("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.evaluate("predict_step", *args, **kwargs)

    def evaluate(self, step: str, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run a step of validation, test or prediction. step: its name."""
        with self.evaluation_step(*args):
            return getattr(super(), step)(*args, **kwargs)  # type: ignore[no-any-return]

    def evaluation_step(self, *args: Any) -> AbstractContextManager[None]:
        """Return what goes around a step of validation, test or prediction. args: of the step.
        Collective."""
        return self.run.evaluation_step()

    @override
    def refuse_during_run(self) -> None:
        if self._run is not None:
            raise ShardingError(
                f"trainer.strategy.unshard() was called while trainer.{self._run.method} runs, "
                "which needs the shards. Call it on every rank after that."
            )

    # -- the end of a run

    @override
    def on_exception(self, exception: BaseException) -> None:
        # The parent of forked ranks has no process group: nothing below could be exchanged or noted
        # there.
        launcher = self.launcher
        if forks_ranks(launcher):
            launcher.after_failure()
            return
        PROCESS.has_failed = True
        if self._run is not None:
            self._run.has_failed = True
            self._run.stopping.note_failure(exception)
            # Lightning's, out of an evaluation
            if isinstance(exception, SystemExit) and exception.code is None:
                exception.code = STOPPED
                exception.args = (STOPPED,)
        strategy = type(self).__name__
        exception.args = tuple(
            name_option(arg, strategy) if isinstance(arg, str) else arg for arg in exception.args
        )
        super().on_exception(exception)

    @property
    def module_stays(self) -> bool:
        """Whether teardown leaves the module on its device, where shards stay, whoever has made
        them."""
        return holds_shards(self.lightning_module)

    @override
    def teardown(self) -> None:
        # First: a failing teardown is called again by Lightning, and what has been undone must not
        # be undone twice.
        run = self._run
        self._run = None
        with PROCESS.leaving(run is not None and run.has_failed):
            try:
                if run is not None:
                    run.end()
            finally:
                with self.undo_last:
                    self._leave_module()

    def _leave_module(self) -> None:
        if not self.module_stays:
            super().teardown()
            return
        # Strategy.teardown but for `module.cpu()`: shards stay where their kernels and collectives
        # are.
        self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()  # type: ignore[union-attr]
        self.checkpoint_io.teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # this process's own
        return super().__getstate__() | {"_session": None, "_run": None, "undo_last": ExitStack()}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        PROCESS.leave_at_exit(self.release)

    def release(self) -> None:
        """Drop the module and everything that holds requests of gloo; called before the process
        ends."""
        self._run = self._session = None
        self._lightning_module = self.model = None
        self.optimizers = []
        self.lr_scheduler_configs = []
