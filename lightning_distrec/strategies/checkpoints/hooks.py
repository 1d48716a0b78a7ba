"""Lightning's hooks around checkpoints, for every strategy of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.cluster.consensus import consensus_of_all_ranks, consensus_of_checkpoints
from lightning_distrec.cluster.process_exit import note_failure
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.checkpoints.checkpointing import Checkpointing
from lightning_distrec.strategies.checkpoints.zero_state import OwnerOf

if TYPE_CHECKING:  # they load torchrec, which modules without tables have no use for
    from lightning_distrec.strategies.tables.table_setup import TableSetup


class CheckpointHooks(ParallelStrategy):
    """Saves and loads by `Checkpointing`, which `set_up_checkpoints` makes once the ranks know each other."""

    _checkpointing: Checkpointing | None = None

    @property
    def _checkpoints(self) -> Checkpointing:
        assert self._checkpointing is not None
        return self._checkpointing

    def set_up_checkpoints(self, options: CheckpointOptions, timeout_seconds: float) -> None:
        """Collective, in setup_environment."""
        if self._checkpointing is None:
            consensus = consensus_of_all_ranks(timeout_seconds)[0]
            self._checkpointing = Checkpointing(options, consensus, consensus_of_checkpoints(timeout_seconds))

    def begin_checkpoints(self, module: LightningModule, tables: TableSetup | None) -> None:
        """Collective, at the end of setup. Raises ConfigError: a CheckpointIO plugin would be passed by."""
        if self._checkpoints.writes_folders and not isinstance(self.checkpoint_io, TorchCheckpointIO):
            raise ConfigError(
                f"plugins={type(self.checkpoint_io).__name__}: a checkpoint that every rank writes its part of goes to "
                "the file system directly. For one that goes on in the background set checkpoint={'async_save': True}; "
                "for the plugin, checkpoint={'distributed': False}."
            )
        self._checkpoints.begin(module, tables)

    def share_out_state(self, owner_of: OwnerOf) -> None:
        """Let checkpoints take the optimizer's state of each parameter from the rank that keeps it."""
        self._checkpoints.share_out_state(owner_of)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._checkpoints.on_train_start()

    def keep_position(self, loader: object) -> object:
        """Return a training loader whose position is in the checkpoints."""
        return self._checkpoints.keep_position(loader)

    def before_step(self) -> None:
        """Raise CheckpointError on every rank, at the same step, once a write behind the steps has failed."""
        self._checkpoints.before_step()

    def finish_checkpoints(self, has_failed: bool) -> None:
        """Collective, in teardown: wait for a checkpoint that is being written."""
        if self._checkpointing is not None:
            self._checkpointing.finish(has_failed)

    def forget_checkpoints(self) -> None:
        """Let go of the module and its tables, before the process ends."""
        self._checkpointing = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective. Return the module's state as checkpoints hold it: tables in parts; see `full_state_dict`."""
        module = self.lightning_module
        if module is not None and module.trainer.interrupted:
            note_failure()
            self._checkpoints.require_all_ranks()
        return self._checkpoints.model_state(super().lightning_module_state_dict())

    def full_state_dict(self) -> dict[str, Any]:
        """Collective. Return the module's state with whole tables on the host of rank 0, also after fit has ended.

        Other ranks get it without the tables. Raises CheckpointError on every rank: rank 0 has not enough memory.
        """
        return self._checkpoints.whole(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collective. Return an optimizer's state as checkpoints hold it: of tables too, by the parameters' names."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._checkpoints.optimizer_state(plain)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._checkpoints.make_plain(checkpoint)
        if not self._checkpoints.writes_folders:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif storage_options is None:
            self._checkpoints.save(checkpoint, filepath)
        else:
            raise ConfigError(
                "storage_options belong to a CheckpointIO, which checkpoint={'distributed': True} has not."
            )

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._checkpoints.writes_folders:
            self._checkpoints.remove(filepath)
        else:
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Collective. Return a checkpoint: a folder, or a plain file; whatever weights_only says, no code is run."""
        return self._checkpoints.load(checkpoint_path)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_model(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(checkpoint, self.optimizers)
