"""Skips the broadcasts of rank 0's buffers while no rank writes to a buffer.

DistributedDataParallel broadcasts all buffers before every forward. Index tables, masks and the like never change, and
without the broadcast a step of 3 to 15 ms over gloo is 7 to 29 % shorter. Buffers that are written to (running means,
counters) are broadcast before every forward, as under DDP.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_distrec._compat.torch import version_of
from lightning_distrec.cluster.consensus import RankFlags

TRIAL_STEPS = 8
"""Steps without a write on any rank, after which broadcasts stop."""
QUIET_STEPS = 4
"""Steps of these in which nobody looks: comparing waits for a GPU, and a difference stays to be seen."""


class Broadcaster(Protocol):
    """What DistributedDataParallel has: a module, and whether its buffers are broadcast before each forward."""

    module: nn.Module
    broadcast_buffers: bool


class BufferBroadcaster:
    """Broadcasts rank 0's buffers where there is no DistributedDataParallel that does."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.broadcast_buffers = True

    @torch.no_grad()
    def broadcast(self) -> None:
        """Collective. Give every rank rank 0's buffers, one message for each type, unless broadcasts are skipped."""
        if not self.broadcast_buffers or dist.get_world_size() == 1:
            return
        buffers_by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            buffers_by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in buffers_by_dtype.values():
            values = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(values, src=0)
            for buffer, value in zip(buffers, values.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(value.view_as(buffer))


class NoBroadcasts:
    """In the place of a BroadcastSkipper where no buffers are broadcast: an evaluation, or no DDP."""

    def before_step(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class BroadcastSkipper:
    """Watches the buffers of a broadcaster. Ranks report writes by flags in messages that they exchange anyway."""

    def __init__(self, broadcaster: Broadcaster, flags: RankFlags) -> None:
        self._broadcaster = broadcaster
        self._flags = flags
        self._names = [
            (module, name, f"{path}.{name}".lstrip("."))
            for path, module in broadcaster.module.named_modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        self._skips = False
        self._written = ""
        self._values = [buffer.clone() for buffer in self._buffers()]
        self._versions: list[tuple[int, int | None]] = []
        if self._names:
            flags.watch(self._was_written)

    def before_step(self) -> None:
        """Decide whether this step's forward broadcasts; all ranks decide alike."""
        if not self._names or not self._broadcaster.broadcast_buffers and not self._skips:
            return
        if self._skips and self._flags.was_seen:
            self._skips = False
            self._broadcaster.broadcast_buffers = True
            rank_zero_info(
                f"A buffer has changed{self._written} after {TRIAL_STEPS} steps in which none did. From now on rank "
                "0's buffers are broadcast before every forward, as under DDP."
            )
        elif not self._skips and not self._flags.was_seen and self._flags.num_unseen >= TRIAL_STEPS:
            self._skips = True
            self._broadcaster.broadcast_buffers = False
            self._versions = self._current_versions()
            self._values = []

    def stop(self) -> None:
        """Stop watching."""
        self._flags.watch(None)

    def _was_written(self) -> bool:
        """Return whether a buffer was written to on this rank; called for each message that the ranks exchange."""
        if self._skips:
            pairs = zip(self._names, self._current_versions(), self._versions, strict=True)
            written = [name for (_, _, name), current, earlier in pairs if current != earlier]
        elif self._flags.was_seen or self._flags.num_unseen < QUIET_STEPS:
            return False
        else:
            # Versions are no evidence while DDP broadcasts: a broadcast writes to buffers too.
            triples = zip(self._names, self._buffers(), self._values, strict=False)
            written = [name for (_, _, name), current, earlier in triples if not _equal(current, earlier)]
        if written and not self._written:
            self._written = f" ('{written[0]}')"
        return bool(written)

    def _buffers(self) -> list[Tensor]:
        return [getattr(module, name) for module, name, _ in self._names]

    def _current_versions(self) -> list[tuple[int, int | None]]:
        return [(id(buffer), version_of(buffer)) for buffer in self._buffers()]


def _equal(buffer: Tensor, other: Tensor) -> bool:
    return buffer.shape == other.shape and buffer.dtype == other.dtype and torch.equal(buffer, other)
