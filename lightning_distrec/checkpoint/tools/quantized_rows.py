"""Rows of 8 or 4 bits a number, with a scale and an offset for each row, as FBGEMM's inference kernels have them.

8 bits: dim bytes, then scale and offset in float32. 4 bits: two numbers in a byte, the first in its low half, then
scale and offset in float16. A number is
`bits * scale + offset`. Source: fbgemm_gpu's FloatToFused8BitRowwiseQuantized and
FloatToFusedNBitRowwiseQuantizedSBHalf.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_distrec.chunks import Chunk, LazyTensor, row_ranges


def usable_bits(dim: int, bits: int) -> int:
    """Return `bits`, or 8 where rows of `dim` numbers cannot be packed in 4: FBGEMM wants pairs of bytes."""
    return 8 if dim % 4 else bits


def packed_width(dim: int, bits: int) -> int:
    """Return the bytes of a row of `dim` numbers."""
    return dim + 8 if bits == 8 else dim // 2 + 4


def quantized(rows: Tensor, bits: int) -> Tensor:
    """Return rows packed, (num_rows, packed_width) uint8. rows: (num_rows, dim) float32, on the host."""
    import fbgemm_gpu  # noqa: F401  it registers the operators

    if bits == 8:
        packed: Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    else:
        packed = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)
    return packed


def dequantized(packed: Tensor, dim: int, bits: int) -> Tensor:
    """Return rows in float32, (num_rows, dim), by operators of torch alone. packed: as `quantized` returns them."""
    numbers, rest = packed[:, : dim if bits == 8 else dim // 2], packed[:, dim if bits == 8 else dim // 2 :]
    of_row = rest.contiguous().view(torch.float32 if bits == 8 else torch.float16).float()
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=2).reshape(-1, dim)
    return numbers.float() * of_row[:, :1] + of_row[:, 1:]


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
