"""The hooks for checkpoints, resuming and full weights, the same for all strategies of ours, in a
run and after it."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec._compat.lightning_checkpoints import (
    continue_steps,
    restore_before_fit_starts,
)
from lightning_distrec.checkpoint.plain_state import as_chunked
from lightning_distrec.errors import ConfigError, DistRecError, ShardingError, did_you_mean
from lightning_distrec.host_memory import free_host_bytes
from lightning_distrec.ranks import Ranks
from lightning_distrec.strategies.checkpoints.checkpoint_io import is_elsewhere
from lightning_distrec.strategies.checkpoints.positions import update_in_resumed_epoch
from lightning_distrec.strategies.checkpoints.random_numbers import fingerprint
from lightning_distrec.strategies.checkpoints.resuming import Resuming
from lightning_distrec.strategies.checkpoints.table_states import SavedTables
from lightning_distrec.strategies.run.launched_ranks import refuse_half_checkpoint
from lightning_distrec.strategies.run.process_runs import PROCESS
from lightning_distrec.strategies.run.run import Run, Session
from lightning_distrec.units import format_bytes

Rows = tuple[int, int] | None


class CheckpointHooks(DDPStrategy):
    """A DDPStrategy that saves and loads by `Checkpointing`, once its session has started.

    Before that, when the ranks have not met and nothing is sharded, it saves and loads as Lightning
    does.
    """

    # A property in Lightning, which never changes.
    restore_checkpoint_after_setup = True  # type: ignore[assignment]
    num_local_ranks = 1
    """Ranks on this node, once the ranks have met."""
    resuming: Resuming | None = None
    """Where the fit begins, and what its checkpoints are called; None before the first fit."""
    _session: Session | None = None

    @property
    def session(self) -> Session:
        """What the ranks have from `setup_environment` on, in all runs."""
        if self._session is None:
            raise DistRecError(
                f"{type(self).__name__}: the ranks have not met yet; setup_environment comes first."
            )
        return self._session

    @property
    def module(self) -> LightningModule:
        """The user's module, which the Trainer connects before it calls any hook."""
        return self._lightning_module  # type: ignore[return-value]

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        super().barrier(*args, **kwargs)
        # Lightning's, before it calls configure_model
        if args == ("post_setup",) and self._session is not None:
            checkpoints = self._session.checkpoints
            checkpoints.fingerprints = (checkpoints.fingerprints[0], fingerprint())

    def begin_checkpoints(self, run: Run, tables: SavedTables | None = None) -> None:
        """Collective, when all is set up. Load what the run starts from or resumes from, before
        on_fit_start."""
        checkpoints = run.session.checkpoints
        checkpoints.begin(tables)
        if run.is_fitting:
            run.note_parameters()
            run.undo.enter_context(checkpoints.positions.draws.watch(run.trainer))
            restore_before_fit_starts(run.trainer)
            if checkpoints.positions.num_stepped is not None:
                run.undo.enter_context(
                    continue_steps(run.trainer, checkpoints.positions.num_stepped)
                )

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Collective. Return a checkpoint: a folder, or a plain file. No code is run, but with
        `pickles`."""
        if self._session is None:
            # Without a session there is no setting `pickles`, so that no code in the file is run.
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=True)
        else:
            checkpoint = self.session.checkpoints.load(checkpoint_path)
        if self.resuming is not None:
            self.resuming.keep_folders(checkpoint_path, checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._session is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        self.session.checkpoints.load_model(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._session is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        self.session.checkpoints.load_optimizers(checkpoint, self.optimizers)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.session.checkpoints.positions.on_train_start(self.module.trainer)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        update_in_resumed_epoch(self.module.trainer)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Return the module's state as checkpoints hold it: tables in shards; see
        `full_state_dict`."""
        # An evaluation may have left parameters gathered, whose values are not the shards'.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._session is None:
            return super().lightning_module_state_dict()
        checkpoints = self.session.checkpoints
        # The exception may be this rank's alone, and what follows is collective: all ranks must be
        # asked first whether they save too, or this one would wait for them.
        if self.module.trainer.interrupted:
            PROCESS.has_failed = True
            checkpoints.require_all_ranks(PROCESS.calls_outside.meet_after_failure)
        return {
            key: as_chunked(value) or value
            for key, value in super().lightning_module_state_dict().items()
        }

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        tensor = full_value(tensor)
        # Lightning writes the mean of integers, of batch sizes for one, back to an integer, and so
        # rounds it down.
        if (
            isinstance(tensor, Tensor)
            and reduce_op in ("mean", "avg")
            and not tensor.is_floating_point()
        ):
            tensor = tensor / 1
        return super().reduce(tensor, group, reduce_op)

    def full_state_dict(self) -> dict[str, Any]:
        """Collective. Return the module's state with full tables on the host of rank 0, also after
        fit has ended.

        Other ranks get it without the tables. Raises CheckpointError on every rank: rank 0 has not
        enough memory.
        """
        if self._session is None:
            return super().lightning_module_state_dict()
        return self.session.checkpoints.full_state(super().lightning_module_state_dict())

    def full_parameter(self, name: str, rows: Rows = None) -> Tensor:
        """Collective. Return a copy of a parameter in full, on the host of every rank, in a run and
        after it.

        name: its name in the module, "item_embedding.weight", or a table's. rows: the first one,
        and the one after the last; None: all. Raises ConfigError: there is no such parameter, or
        the ranks ask for different ones;
        ShardingError: a host has not enough memory. Both on every rank.
        """
        ranks = self.session.consensus
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        check_call(name, rows, parameters, ranks)
        parameter = parameters[name]
        first, last = rows_of(name, rows, parameter.shape[0] if parameter.dim() else 1)
        # Before the gather: a rank that runs out of memory in it would leave the others waiting.
        check_memory(name, parameter.nbytes, self.num_local_ranks, ranks)
        full = self.gather_parameter(name, parameter).detach()
        return (full[first:last] if full.dim() else full).cpu().clone()

    def gather_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Collective. Return a parameter in full."""
        return full_value(parameter)  # type: ignore[no-any-return]

    def unshard(self, rank_0_only: bool = False) -> LightningModule | None:
        """Collective, after a run. Turn the module back into an ordinary one with full weights, on
        the host; return it.

        torch.save, torch.export and any later Trainer then work as with a module that was never
        sharded. The optimizers of the run, which hold shards, are dropped.
        rank_0_only: whether the other ranks get None, and their module has no weights left (on the
        meta device). Raises ShardingError: a run is in progress. CheckpointError on every rank: a
        host has not enough memory.
        """
        self.refuse_during_run()
        if self._session is None:
            return self.module
        # Before anything is dropped: collecting the state needs the shards, on every rank.
        state = self.lightning_module_state_dict()
        checkpoints = self.session.checkpoints
        keeps = self.is_global_zero or not rank_0_only
        full = checkpoints.full_state(state, everywhere=not rank_0_only)
        # Optimizers and schedulers hold the shards, and with them the memory on the device.
        module = self.module
        self.model = self.module
        self.optimizers = []
        self.lr_scheduler_configs = []
        self.put_weights_back(full if keeps else {})
        checkpoints.start_run(module)
        if keeps:
            module.cpu()
        return module if keeps else None

    def put_weights_back(self, full: dict[str, Tensor]) -> None:
        """Replace the shards of the module by full weights. full: by key; those that are missing
        stay on meta."""

    def refuse_during_run(self) -> None:
        """Raise ShardingError: a run is in progress."""

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collective. Return an optimizer's state as checkpoints hold it: tables' too, by the
        parameters' names."""
        if self._session is None:
            return super().optimizer_state(optimizer)
        # Under manual optimization users pass Lightning's wrapper, whose parameters are the same
        # objects.
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self.session.checkpoints.optimizer_state(plain)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Collective. Write a checkpoint, a folder or a file: see CheckpointOptions."""
        if self._session is None:
            refuse_half_checkpoint(self.launcher, checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.session.checkpoints.save(checkpoint, filepath, self.checkpoint_io, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._session is None or is_elsewhere(str(filepath), self.checkpoint_io):
            super().remove_checkpoint(filepath)
        else:
            self.session.checkpoints.remove(filepath)


def full_value(value: Any) -> Any:
    """Collective for a DTensor, a norm of sharded weights for example. Return it as a full
    tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_call(name: str, rows: Rows, parameters: Mapping[str, Any], ranks: Ranks) -> None:
    """Collective. Raise ConfigError on every rank: there is no such parameter, or the ranks ask for
    different ones."""
    # Compared before any other exchange: ranks that gather different parameters would wait for one
    # another.
    calls = ranks.all_gather((name, rows))
    if any(call != calls[0] for call in calls):
        raise ConfigError(
            f"full_parameter: the ranks ask for different parameters, {calls}. Ask for one on all."
        )
    if name not in parameters:
        raise ConfigError(
            f"full_parameter: the module has no parameter '{name}'{did_you_mean(name, parameters)}"
        )


def rows_of(name: str, rows: Rows, num_rows: int) -> tuple[int, int]:
    """Return the first row and the row after the last. Raises ConfigError: they are not rows of the
    parameter."""
    first, last = (0, num_rows) if rows is None else rows
    if not 0 <= first <= last <= num_rows:
        raise ConfigError(
            f"full_parameter: rows={rows} are not within the {num_rows:,} rows of '{name}'."
        )
    return first, last


def check_memory(name: str, needed_bytes: int, ranks_on_node: int, ranks: Ranks) -> None:
    """Collective. Raise ShardingError on every rank: the host of one has not enough memory for all
    of its ranks."""
    free = free_host_bytes()
    if not ranks.all_reduce_min(int(needed_bytes * ranks_on_node <= free)):
        raise ShardingError(
            f"full_parameter: '{name}' takes {format_bytes(needed_bytes)} on each of "
            f"{ranks_on_node} ranks of a node, and {format_bytes(free)} are free here. Ask for "
            "some rows at a time: rows=(0, 1000)."
        )
