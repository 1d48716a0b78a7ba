"""Notes which rows get a gradient, from the ids with which FBGEMM's kernels are called: a flag for
each row of a shard.

Rows that begin again, because other ids have them now, are noted too.

It is noted when the gradient arrives, before rows are updated by it; nothing waits for a device. On
the host, rows' numbers are gathered first and many flags are written together: they are in no
cache, and together they wait for memory.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec.sharding.row_gradients import LocalShard
from lightning_distrec.sharding.weights.shard_access import without_guards

PENDING = 2**17
"""How many numbers of rows are gathered, 8 bytes each."""


class TouchedRows:
    """This rank's rows that got gradients, or were reset, since `clear`. kernels: FBGEMM's, with
    their shards."""

    def __init__(self, kernels: list[tuple[Any, list[LocalShard]]]) -> None:
        self._kernels = [_KernelRows(kernel, shards) for kernel, shards in kernels]
        self._flags: dict[int, Tensor] = {}
        self._resets = []
        for rows in self._kernels:
            for shard, flags in rows.flags_by_shard():
                self._flags[id(shard)] = flags
                note = partial(flags.index_fill_, 0, value=True)
                shard.on_reset.append(note)
                self._resets.append((shard, note))

    def ids_of(self, shard: LocalShard) -> Tensor:
        """Return the rows of a shard that were touched, ascending, counted from the shard's
        first."""
        for rows in self._kernels:
            rows.write()
        flags = self._flags.get(id(shard))
        return torch.empty(0, dtype=torch.long) if flags is None else flags.nonzero().squeeze(1)

    def clear(self) -> None:
        """Forget all rows, also those of gradients that no optimizer has used yet."""
        for rows in self._kernels:
            rows.forget()

    @without_guards
    def note_gradients(self) -> None:
        """Note the rows of gradients that are there: those that accumulate will change their rows
        after `clear`."""
        for rows in self._kernels:
            for shard, flags in rows.flags_by_shard():
                gradient = shard.weight.grad
                if gradient is not None and gradient.is_sparse:
                    flags.index_fill_(0, gradient.coalesce().indices()[0], True)

    def release(self) -> None:
        """Stop noting."""
        for rows in self._kernels:
            rows.handle.remove()
        for shard, note in self._resets:
            shard.on_reset.remove(note)


class _KernelRows:
    def __init__(self, kernel: Any, shards: list[LocalShard]) -> None:
        self._shards = shards
        self._firsts = [0, *accumulate(len(shard.values) for shard in shards)]
        device = shards[0].weight.device
        self.flags = torch.zeros(self._firsts[-1], dtype=torch.bool, device=device)
        # A kernel on a GPU writes all flags of a step at once.
        self._pending = torch.empty(PENDING if device.type == "cpu" else 0, dtype=torch.long)
        self._num_pending = 0
        # Feature -> where the rows of its table begin in `flags`.
        firsts = [self._firsts[table] for table in kernel.feature_table_map]
        self._first_of_all = firsts[0] if len(set(firsts)) == 1 else None
        self._first_of_feature = torch.tensor(firsts, device=device)
        self.handle = kernel.register_forward_hook(self._looked_up, with_kwargs=True)

    def write(self) -> None:
        """Write the flags of the rows that have been gathered."""
        if self._num_pending:
            self.flags.index_fill_(0, self._pending[: self._num_pending], True)
            self._num_pending = 0

    def forget(self) -> None:
        """Begin with no rows."""
        self._num_pending = 0
        self.flags.zero_()

    def flags_by_shard(self) -> list[tuple[LocalShard, Tensor]]:
        places = zip(self._shards, pairwise(self._firsts), strict=True)
        return [(shard, self.flags[first:end]) for shard, (first, end) in places]

    def _looked_up(self, _: nn.Module, __: Any, arguments: dict[str, Any], output: Tensor) -> None:
        if output.requires_grad:
            ids = arguments["indices"]
            offsets = arguments["offsets"]
            sizes = arguments.get("batch_size_per_feature_per_rank")
            # Not noted in the forward: rows of a lookup without a backward do not change.
            output.register_hook(partial(self._note, ids, offsets, sizes))

    def _note(
        self, ids: Tensor, offsets: Tensor, batch_sizes: list[list[int]] | None, _: Tensor
    ) -> None:
        """ids: (num_ids,), feature by feature. offsets: (num_features * batch_size + 1,), where
        bags begin in `ids`.

        batch_sizes: feature -> rank -> bags, where features have unequal batch sizes.
        """
        rows = ids
        if self._first_of_all is None:
            num_features = len(self._first_of_feature)
            if batch_sizes is None:
                # A slice: a GPU would wait for numbers of the host.
                ends = offsets[:: max(1, (len(offsets) - 1) // num_features)]
            else:
                bags = torch.tensor([0, *map(sum, batch_sizes)]).cumsum(0)
                ends = offsets[bags.to(offsets.device, non_blocking=True)]
            if len(ends) == 1:
                return  # no bags
            counts = ends.diff()
            rows = rows + self._first_of_feature.repeat_interleave(counts, output_size=len(rows))
        elif self._first_of_all:
            rows = rows.long() + self._first_of_all
        count = self._num_pending
        end = self._num_pending + len(rows)
        if end > len(self._pending):
            self.write()
            count = 0
            end = len(rows)
        if end > len(self._pending):
            self.flags.index_fill_(0, rows.long(), True)
        else:
            # Copied, since whoever made the batch may use its memory again.
            self._pending[count:end].copy_(rows)
            self._num_pending = end
