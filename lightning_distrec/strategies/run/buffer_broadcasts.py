"""DDP broadcasts rank 0's buffers before every forward; that is left out while no rank writes to them.

Index tables, masks and the like never change, and a broadcast at every step is a wait at every step. Buffers that are
written to (running means, counters) are broadcast as ever.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distrec._compat.torch import version_of
from lightning_distrec.cluster.consensus import RankFlags

TRIAL_STEPS = 8
"""Steps without a write on any rank, after which broadcasts stop."""


class Broadcasts(Protocol):
    """What broadcasts buffers, as DistributedDataParallel does."""

    module: nn.Module
    broadcast_buffers: bool


class SentBuffers:
    """Rank 0's buffers for every rank, where there is no DistributedDataParallel that sends them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.broadcast_buffers = True

    @torch.no_grad()
    def send(self) -> None:
        """Collective. Give every rank rank 0's buffers, unless broadcasts were stopped."""
        if not self.broadcast_buffers or dist.get_world_size() == 1:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            sent = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(sent, src=0)
            for buffer, values in zip(buffers, sent.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))


class QuietBuffers:
    """Looks whether buffers are written to. The ranks tell each other with the agreements that they have anyway.

    ddp: whose broadcasts are left out. flags: sent along with messages between the ranks. tell: warns that they resume.
    """

    def __init__(self, ddp: Broadcasts, flags: RankFlags, tell: Callable[[str], None]) -> None:
        self._ddp = ddp
        self._flags = flags
        self._tell = tell
        owners = [(module, path) for path, module in ddp.module.named_modules()]
        self._places = [
            (module, name, f"{path}.{name}".lstrip("."))
            for module, path in owners
            for name, _ in module.named_buffers(recurse=False)
        ]
        self._quiet = False
        self._written = ""
        self._seen = [buffer.clone() for buffer in self._buffers()]
        self._versions: list[tuple[int, int | None]] = []
        if self._places:
            flags.watch(self._look)

    def before_step(self) -> None:
        """Choose whether this step's forward broadcasts; all ranks choose alike."""
        if not self._places or not self._ddp.broadcast_buffers and not self._quiet:
            return
        if self._quiet and self._flags.was_seen:
            self._quiet = False
            self._ddp.broadcast_buffers = True
            self._tell(
                "Buffers of the module did not change at first, so that they were not broadcast, and "
                f"do now{self._written}; from now on rank 0's are broadcast before every forward, as under DDP."
            )
        elif not self._quiet and not self._flags.was_seen and self._flags.num_unseen >= TRIAL_STEPS:
            self._quiet = True
            self._ddp.broadcast_buffers = False
            self._versions = self._versions_now()
            self._seen = []

    def stop(self) -> None:
        """Look no more."""
        self._flags.watch(None)

    def _look(self) -> bool:
        """Whether a buffer was written to on this rank; called when the ranks begin to agree on something."""
        if self._quiet:
            now = self._versions_now()
            written = [place[2] for place, a, b in zip(self._places, now, self._versions, strict=True) if a != b]
        else:
            # DDP's own broadcasts write to them too, so that only values tell.
            pairs = zip(self._places, self._buffers(), self._seen, strict=False)
            written = [place[2] for place, now, before in pairs if not _equal(now, before)]
        if written and not self._written:
            self._written = f" ('{written[0]}')"
        return bool(written)

    def _buffers(self) -> list[Tensor]:
        return [getattr(module, name) for module, name, _ in self._places]

    def _versions_now(self) -> list[tuple[int, int | None]]:
        return [(id(buffer), version_of(buffer)) for buffer in self._buffers()]


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(one, other)
