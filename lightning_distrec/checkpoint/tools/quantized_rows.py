"""Tables in rows of 8 or 4 bits a number, quantized while they are read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_distrec.checkpoint.incremental.packed_rows import packed_width, quantized
from lightning_distrec.chunks import Chunk, LazyTensor, row_ranges


class QuantizedTensor:
    """A table that is quantized while it is read. source: (num_rows, dim), of any floating type."""

    dtype = torch.uint8

    def __init__(self, source: LazyTensor, bits: int) -> None:
        self._source, self._bits = source, bits
        self.shape = (source.shape[0], packed_width(source.shape[1], bits))

    def read_into(self, chunks: Sequence[Chunk]) -> None:
        """Quantize the rows of `chunks`, which have full rows."""
        dim = self._source.shape[1]
        for chunk in chunks:
            for first, count in row_ranges((chunk.tensor.shape[0], dim), 4):
                rows = torch.empty((count, dim), dtype=self._source.dtype)
                self._source.read_into([Chunk((chunk.offsets[0] + first, 0), rows)])
                chunk.tensor[first : first + count] = quantized(rows.float(), self._bits)

    def read(self) -> Tensor:
        """Quantize and return the table."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into([Chunk((0, 0), tensor)])
        return tensor
