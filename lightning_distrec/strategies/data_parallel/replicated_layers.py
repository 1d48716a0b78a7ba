"""Layers that every rank has whole: broadcasts of their buffers, and what would let copies
differ."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_distrec._compat.torch import version_of
from lightning_distrec.cluster.consensus import RankFlags
from lightning_distrec.errors import UnsupportedError

TRIAL_STEPS = 8
"""Steps without a write on any rank, after which broadcasts of buffers stop."""
QUIET_STEPS = 4
"""Steps of these in which nobody looks: comparing waits for a GPU, and a difference stays to be
seen."""
# One for all steps: it has no state, and making it in each step would cost time on the host.
_NO_CONTEXT = nullcontext()


class ReplicatedLayers:
    """Does nothing around steps of layers that DDP averages; FullyShardedModule does something."""

    needs_losses = False
    """Whether a loss that reaches no parameter on a rank is refused there: no backward of zeros can
    be made for it."""

    def step(self) -> AbstractContextManager[None]:
        """Do nothing around a step."""
        return _NO_CONTEXT

    def backward(self) -> AbstractContextManager[None]:
        """Do nothing around a backward."""
        return _NO_CONTEXT

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing around backwards whose gradients accumulate."""
        return _NO_CONTEXT

    def optimizer_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Do nothing around an optimizer's step."""
        return _NO_CONTEXT


class BufferBroadcaster:
    """Broadcasts rank 0's buffers where there is no DistributedDataParallel that does."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.broadcast_buffers = True
        # Those of now, as DistributedDataParallel's: a walk through all layers in every step would
        # cost host time.
        self._places = [
            (child, name)
            for child in module.modules()
            for name, _ in child.named_buffers(recurse=False)
        ]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Collective. Give every rank rank 0's buffers, one message for each type, unless
        broadcasts are skipped."""
        if not self.broadcast_buffers or dist.get_world_size() == 1:
            return
        buffers_by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in (getattr(child, name) for child, name in self._places):
            buffers_by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in buffers_by_dtype.values():
            # One message for each type: many small broadcasts cost more than their bytes.
            values = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(values, src=0)
            for buffer, value in zip(
                buffers, values.split([buffer.numel() for buffer in buffers]), strict=True
            ):
                buffer.copy_(value.view_as(buffer))


class NoBroadcasts:
    """In the place of a BroadcastSkipper where no buffers are broadcast: an evaluation, or no
    DDP."""

    def before_step(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class BroadcastSkipper:
    """Skips the broadcasts of rank 0's buffers while no rank writes to a buffer.

    DistributedDataParallel broadcasts all buffers before every forward. Index tables, masks and the
    like never change, and without the broadcast a step of 3 to 15 ms over gloo is 7 to 29 %
    shorter. Ranks report writes by flags in messages that they exchange anyway. Where running means
    or counters are written to, broadcasts go on as under DDP.
    """

    def __init__(
        self, broadcaster: DistributedDataParallel | BufferBroadcaster, flags: RankFlags
    ) -> None:
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
        # Flags are agreed over all ranks: a rank alone must not begin or end broadcasts, which are
        # collective.
        if self._skips and self._flags.was_seen:
            self._skips = False
            self._broadcaster.broadcast_buffers = True
            rank_zero_info(
                f"A buffer has changed{self._written}: rank 0's are broadcast from now on, as "
                "under DDP."
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
        """Return whether a buffer was written to on this rank; called for each message that the
        ranks exchange."""
        if self._skips:
            # Autograd's version counters show writes in place without reading a buffer, and ids
            # show new tensors.
            pairs = zip(self._names, self._current_versions(), self._versions, strict=True)
            written = [name for (_, _, name), current, earlier in pairs if current != earlier]
        elif self._flags.was_seen or self._flags.num_unseen < QUIET_STEPS:
            return False
        else:
            # Versions are no evidence while DDP broadcasts: a broadcast writes to buffers too.
            triples = zip(self._names, self._buffers(), self._values, strict=False)
            written = [
                name
                for (_, _, name), current, earlier in triples
                if (current.shape, current.dtype) != (earlier.shape, earlier.dtype)
                or not torch.equal(current, earlier)
            ]
        if written and not self._written:
            self._written = f" ('{written[0]}')"
        return bool(written)

    def _buffers(self) -> list[Tensor]:
        return [getattr(module, name) for module, name, _ in self._names]

    def _current_versions(self) -> list[tuple[int, int | None]]:
        return [(id(buffer), version_of(buffer)) for buffer in self._buffers()]


def refuse_local_lookups(module: nn.Module, num_readers: int, num_ranks: int) -> None:
    """Raise UnsupportedError: lookups change rows, or count ids, on each rank by itself.

    num_readers: ranks with batches of their own. The ranks of a pipeline share theirs, of which
    each has a part.
    """
    for path, child in module.named_modules():
        if not isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if (child.max_norm is not None and num_readers > 1) or (
            child.scale_grad_by_freq and num_ranks > 1
        ):
            raise UnsupportedError(
                f"'{path}' has max_norm={child.max_norm} and "
                f"scale_grad_by_freq={child.scale_grad_by_freq}: each rank would shorten rows by, "
                "and count, the ids of its own part of a batch alone, and copies of the weight "
                "would not be those of one process. Leave both out, or train in one process. The "
                f"callback NormalizeRows(['{path}.weight'], max_norm) shortens rows after every "
                "batch."
            )
