"""What backward needs of a kernel's ids: where those of each feature end, and which rows there are, in order.

Tensor.coalesce, which sums gradients of rows that were looked up several times, asks the GPU how many different rows
there are, for each shard, in the middle of backward. On a GPU the rows are sorted and counted in forward, and numbers
that backward needs on the host are sent there without waiting for them.

Not run on a GPU yet.
"""

from bisect import bisect_left
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_distrec import gpu


class FeatureEnds:
    """The entries of a kernel's offsets between its features.

    offsets: (num_features * batch_size + 1,), on the kernel's device. first_bags: the first bag of each feature, and
    the number of all bags.
    """

    def __init__(self, offsets: Tensor, first_bags: list[int]) -> None:
        self.first_bags = first_bags
        step = first_bags[1] if len(first_bags) > 1 else 1
        even = step > 0 and first_bags == list(range(0, len(first_bags) * step, step))
        # A slice, where it can be one: the numbers of others come from the host, and are waited for.
        chosen = offsets[::step] if even else offsets[torch.tensor(first_bags, device=offsets.device)]
        self.on_device = chosen
        self._on_host = gpu.HostCopy(chosen)

    def read(self) -> list[int]:
        """Return them; waits for the GPU to come to the lookup, not for what comes after it."""
        return self._on_host.read()


def first_bags(batch_sizes: list[list[int]] | None, offsets: Tensor, num_features: int) -> list[int]:
    """Return the first bag of each feature, and the number of all bags.

    batch_sizes: feature -> rank -> bags, where features have unequal batch sizes; None: they have one.
    """
    if batch_sizes is None:
        bags = (offsets.numel() - 1) // num_features
        return [feature * bags for feature in range(num_features + 1)]
    first = [0]
    for of_ranks in batch_sizes:
        first.append(first[-1] + sum(of_ranks))
    return first


class RowSorter:
    """Sorts what one kernel looks up by shard and row.

    shard_of_feature: feature -> number of its shard, ascending. num_rows: of each shard.
    """

    def __init__(self, shard_of_feature: list[int], num_rows: list[int]) -> None:
        self.first_keys = [0, *accumulate(num_rows)]
        self.first_features = [bisect_left(shard_of_feature, shard) for shard in range(len(num_rows) + 1)]
        self._of_features = torch.tensor([self.first_keys[shard] for shard in shard_of_feature])
        self._bounds = torch.tensor(self.first_features)

    def sort(self, rows: Tensor, ends: FeatureEnds) -> "SortedRows":
        """Return the rows in order. rows: (num_ids,), feature by feature."""
        if self._bounds.device != rows.device:  # once: numbers that come from the host are waited for
            self._bounds = self._bounds.to(rows.device)
            self._of_features = self._of_features.to(rows.device)
        return SortedRows(self, self._of_features, self._bounds, rows, ends)


class SortedRows:
    """The rows of all shards of a kernel, the shards one after the other."""

    def __init__(
        self, sorter: RowSorter, first_keys: Tensor, first_features: Tensor, rows: Tensor, ends: FeatureEnds
    ) -> None:
        self._sorter, self._ends = sorter, ends
        lengths = ends.on_device.diff()
        keys = rows.long() + first_keys.repeat_interleave(lengths, output_size=rows.numel())
        self._keys, self._order = keys.sort(stable=True)
        is_new = pad((self._keys[1:] != self._keys[:-1]).long(), (1, 0), value=1)
        self._numbers = is_new[: rows.numel()].cumsum(0)
        """(num_ids,): how many different keys there are up to here."""
        before_shards = pad(self._numbers, (1, 0))[ends.on_device.index_select(0, first_features).long()]
        self._before_shards = gpu.HostCopy(before_shards)

    def sums(self, shard: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the different rows of a shard, ascending, and the sum of the values of each, in the values' order.

        values: (num_ids of the shard, dim), feature by feature.
        """
        ends, first_feature = self._ends.read(), self._sorter.first_features
        begin, end = ends[first_feature[shard]], ends[first_feature[shard + 1]]
        before, until = self._before_shards.read()[shard : shard + 2]
        wanted = torch.arange(before + 1, until + 1, device=values.device)
        starts = torch.searchsorted(self._numbers[begin:end], wanted)
        rows = self._keys[begin:end].index_select(0, starts) - self._sorter.first_keys[shard]
        in_order = values.index_select(0, self._order[begin:end] - begin)
        # unsafe: without checks of the offsets, for which the host would wait.
        sums = torch.segment_reduce(
            in_order, "sum", offsets=pad(starts, (0, 1), value=end - begin), axis=0, unsafe=True
        )
        return rows, sums
