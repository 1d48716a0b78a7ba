"""Rows of 8 or 4 bits a number, with a scale and an offset for each row, as FBGEMM's inference kernels have them.

8 bits: dim bytes, then scale and offset in float32. 4 bits: two numbers in a byte, the first in its low half, then
scale and offset in float16. A number is
`bits * scale + offset`. Source: fbgemm_gpu's FloatToFused8BitRowwiseQuantized and
FloatToFusedNBitRowwiseQuantizedSBHalf.
"""

import torch
from torch import Tensor


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
    numbers, scale_bytes = packed[:, : dim if bits == 8 else dim // 2], packed[:, dim if bits == 8 else dim // 2 :]
    # A view as floats needs bytes that follow each other; a slice of columns has gaps.
    scales = scale_bytes.contiguous().view(torch.float32 if bits == 8 else torch.float16).float()
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=2).reshape(-1, dim)
    return numbers.float() * scales[:, :1] + scales[:, 1:]
