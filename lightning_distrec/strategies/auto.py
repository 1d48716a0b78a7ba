"""`Trainer(strategy="distrec_auto")`: the strategy that suits the module, chosen when it is known."""

from datetime import timedelta
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_distrec._compat.lightning import replace_strategy
from lightning_distrec.advice.advise import advise
from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.pipeline.even_batches import UnevenInputs
from lightning_distrec.sharding.planning.topology import memory_bytes_per_rank
from lightning_distrec.sharding.shard_tables import sharded_tables_of
from lightning_distrec.strategies.ddp import TunedDDPStrategy
from lightning_distrec.strategies.estimates.estimate import FSDP, TORCHREC, TORCHREC_FSDP, Job
from lightning_distrec.strategies.fsdp import TunedFSDPStrategy
from lightning_distrec.strategies.options import chosen
from lightning_distrec.strategies.run.launched_ranks import RanksFromLauncher
from lightning_distrec.strategies.run.precision import MatmulPrecision
from lightning_distrec.strategies.run.stopping import StopOptions
from lightning_distrec.strategies.run.strategy import DistRecStrategy


class AutoStrategy(RanksFromLauncher):
    """Takes ddp_tuned, fsdp_tuned or torchrec_sharded, whichever suits the module, when the first run begins.

    Rank 0 reckons the memory that each needs, as `lightning-distrec advise` does without a batch: torchrec_sharded
    where large tables are most of the module, else ddp_tuned where the module fits, else fsdp_tuned. What is taken, and
    why, is said in one line; from then on it is the Trainer's strategy, for later runs too.

    Args:
        memory_bytes_per_rank: memory of one rank in bytes, of which 80 % may be taken; None measures it.
        uneven_inputs: when ranks have unequal numbers of batches, "stop" after the last that all have, or "error".
        checkpoint: distributed, async_save, start_from, rename: see CheckpointOptions.
        stopping: auto_requeue, requeue_signal, on_sigterm, resume: see StopOptions.
        process_group_backend: "gloo" or "nccl"; None takes the device's.
        float32_matmul_precision: "high" computes float32 products in TF32, "medium" in bfloat16, where the device can;
            "highest" in float32. None leaves torch's setting as it is.
        timeout_seconds: how long a rank waits for the others in any exchange.
        watchdog_seconds: after so long a rank that has been stopped, or is not heard of, ends the others, which name
            it; one whose process has ended does at once. 0: nobody watches.
    """

    strategy_name = "distrec_auto"

    def __init__(
        self,
        memory_bytes_per_rank: int | None = None,
        uneven_inputs: UnevenInputs = "stop",
        checkpoint: CheckpointOptions | dict[str, Any] | None = None,
        stopping: StopOptions | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        float32_matmul_precision: MatmulPrecision | None = None,
        timeout_seconds: float = 1800.0,
        watchdog_seconds: float = 30.0,
    ) -> None:
        self._memory_bytes = memory_bytes_per_rank
        self._shared: dict[str, Any] = {
            "uneven_inputs": uneven_inputs,
            "checkpoint": checkpoint,
            "stopping": stopping,
            "process_group_backend": process_group_backend,
            "float32_matmul_precision": float32_matmul_precision,
            "timeout_seconds": timeout_seconds,
            "watchdog_seconds": watchdog_seconds,
        }
        TunedDDPStrategy(**self._shared)  # refuses what none of them takes, as early as they would
        self._resumes = chosen("stopping", StopOptions, stopping).resume == "auto"
        self._watchdog_seconds = watchdog_seconds
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_seconds))

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self._launcher
        launch = launcher.launch

        def launch_and_choose(function: Any, *args: Any, trainer: Any = None, **options: Any) -> Any:
            run = function if trainer is None else partial(self._run_as_chosen, trainer, function)
            return launch(run, *args, trainer=trainer, **options)

        launcher.launch = launch_and_choose

    def _run_as_chosen(self, trainer: Trainer, function: Any, *args: Any, **options: Any) -> Any:
        """Collective. Choose a strategy, and run `function` with the Trainer that has it."""
        self.setup_environment()  # rank 0 decides, so the ranks must have met
        ranks = self.all_ranks()[0]
        decided = ranks.all_or_none("setup", lambda: self._decide(trainer) if ranks.rank == 0 else ("", ""))
        name, reason = ranks.all_gather(decided)[0]
        rank_zero_info(f"distrec_auto: {name}, because {reason}.")
        self._hand_over(trainer, self._make(name))
        return function(*args, **options)

    def _decide(self, trainer: Trainer) -> tuple[str, str]:
        """Return a strategy's name, and why it."""
        module = self.lightning_module
        assert module is not None
        if sharded_tables_of(module) is not None:
            name = TORCHREC_FSDP if isinstance(module, FSDPModule) else TORCHREC
            return name, "an earlier run has sharded the module's tables"
        if isinstance(module, FSDPModule):
            return FSDP, "an earlier run has cut the module"
        device = self.root_device
        memory = memory_bytes_per_rank(device, self.num_local_ranks, self._memory_bytes)
        job = Job(
            num_ranks=self.world_size,
            num_nodes=self.num_nodes,
            memory_bytes=memory,
            precision=str(trainer.precision),
        )
        advice = advise(module, job, trainer, device.type)
        return advice.chosen, advice.reason

    def _make(self, name: str) -> DistRecStrategy:
        if name in (TORCHREC, TORCHREC_FSDP):
            from lightning_distrec.strategies.torchrec import TorchRecShardedStrategy

            dense: Literal["ddp", "fsdp"] = "ddp" if name == TORCHREC else "fsdp"
            return TorchRecShardedStrategy(dense=dense, memory_bytes_per_rank=self._memory_bytes, **self._shared)
        return TunedFSDPStrategy(**self._shared) if name == FSDP else TunedDDPStrategy(**self._shared)

    def _hand_over(self, trainer: Trainer, strategy: DistRecStrategy) -> None:
        """Let `strategy` be the Trainer's, with the module and with all that this one was given."""
        module = self.lightning_module
        assert module is not None
        replace_strategy(trainer, strategy)
        strategy.connect(module)
        strategy.job_checkpoint = self.job_checkpoint
        ours, theirs = self.launcher, strategy.launcher
        theirs.procs = ours.procs  # type: ignore[union-attr]  # the other ranks of this node, which it may have to end
        self._lightning_module = self.model = None
