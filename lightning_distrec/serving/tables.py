"""The tables of an unsharded module: what reads a row of them, and the same with rows of 8 or 4 bits a number.

A quantized row is as FBGEMM's inference kernels have it. 8 bits: dim bytes, then scale and offset in float32. 4 bits:
two numbers in a byte, the first in its low half, then scale and offset in float16. A number is `bits * scale + offset`.
Source: fbgemm_gpu's FloatToFused8BitRowwiseQuantized and FloatToFusedNBitRowwiseQuantizedSBHalf.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.chunks import Chunk, LazyTensor, row_ranges
from lightning_distrec.errors import ConfigError


def lookups_of(module: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Yield what reads rows, by path. Raises ConfigError: one has a max_norm, with which a lookup changes rows."""
    for path, inner in module.named_modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)):
            if inner.max_norm is not None:
                raise ConfigError(f"'{path}' has a max_norm: its lookups change rows, and serving only reads them.")
            yield path, inner


def quantize_lookups(module: nn.Module, bits: int) -> dict[str, int]:
    """Replace what reads rows of `module` by what reads quantized ones, which are empty. Return bits by path."""
    # A bag's padding_idx is not known to the replacement, so a bag that has one keeps its rows.
    bits_by_path = {}
    for path, inner in list(lookups_of(module)):
        if isinstance(inner, nn.EmbeddingBag) and inner.padding_idx is not None:
            continue
        # FBGEMM packs pairs of bytes, which dims of other multiples do not have in 4 bits.
        bits_by_path[path] = table_bits = 8 if inner.embedding_dim % 4 else bits
        parent, _, name = path.rpartition(".")
        new: _Quantized = QuantizedEmbedding(inner, table_bits)
        if isinstance(inner, nn.EmbeddingBag):
            new = QuantizedBag(inner, table_bits)
        if hasattr(inner, "ids_made_for"):
            from lightning_distrec.sharding.mapping.state import attach_mapping, mapping_state_of

            attach_mapping(new, mapping_state_of(inner))
        module.get_submodule(parent).add_module(name, new)
    return bits_by_path


def find_rows(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Let lookups of `module` take ids of any range, where a checkpoint's state has the rows of their ids."""
    if not any(key.endswith((".ids_made_for", "._output_segments_tensor")) for key in state):
        return
    from lightning_distrec.sharding.mapping.state import (
        attach_mapping,
        finds_rows,
        lookups_with_mappings,
        mch_modules_of,
        share_rows_of_buckets,
    )

    for mch, segments in mch_modules_of(module, state):
        share_rows_of_buckets(mch, materialized(segments))
    for lookup, lookup_state in lookups_with_mappings(module, state):
        if not finds_rows(lookup):
            attach_mapping(lookup, {name: materialized(value) for name, value in lookup_state.items()})


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


class _Quantized(nn.Module):
    rows: Tensor

    def __init__(self, original: nn.Embedding | nn.EmbeddingBag, bits: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.bits = original.num_embeddings, original.embedding_dim, bits
        width = packed_width(self.embedding_dim, bits)
        # Without rows: the program gets them as an input, in the buffer's place.
        self.register_buffer("rows", torch.empty(0, width, dtype=torch.uint8), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The full table, for models that multiply with it."""
        return dequantized(self.rows, self.embedding_dim, self.bits)


class QuantizedEmbedding(_Quantized):
    """nn.Embedding, of rows as `quantized` packs them."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ids, input.shape + (embedding_dim,)."""
        rows = dequantized(self.rows.index_select(0, input.flatten().long()), self.embedding_dim, self.bits)
        return rows.reshape(*input.shape, self.embedding_dim)


class QuantizedBag(_Quantized):
    """nn.EmbeddingBag without padding_idx, of rows as `quantized` packs them."""

    def __init__(self, original: nn.EmbeddingBag, bits: int) -> None:
        super().__init__(original, bits)
        self.mode, self.include_last_offset = original.mode, original.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return one pooled row per bag, (num_bags, embedding_dim). Arguments: nn.EmbeddingBag's."""
        ids = input.flatten().long()
        # Not self.rows[ids], for which -1 is the last row.
        rows = dequantized(self.rows.index_select(0, ids), self.embedding_dim, self.bits)
        # The rows that were looked up become a table themselves, of which each row is read once.
        places = torch.arange(ids.shape[0], device=ids.device).reshape(input.shape)
        offsets, mode, has_last = None if offsets is None else offsets.long(), self.mode, self.include_last_offset
        return functional.embedding_bag(
            places, rows, offsets, mode=mode, per_sample_weights=per_sample_weights, include_last_offset=has_last
        )


class QuantizedTensor(LazyTensor):
    """A table that is quantized while it is read. source: (num_rows, dim), of any floating type."""

    dtype = torch.uint8

    def __init__(self, source: LazyTensor, bits: int) -> None:
        self._source, self._bits = source, bits
        self.shape = (source.shape[0], packed_width(source.shape[1], bits))

    @override
    def read_into(self, chunks: Sequence[Chunk]) -> None:
        """Quantize the rows of `chunks`, which have full rows."""
        dim = self._source.shape[1]
        for chunk in chunks:
            # 4 bytes a number: FBGEMM quantizes from float32, whatever the table's type.
            for first, count in row_ranges((chunk.tensor.shape[0], dim), 4):
                rows = torch.empty((count, dim), dtype=self._source.dtype)
                self._source.read_into([Chunk((chunk.offsets[0] + first, 0), rows)])
                chunk.tensor[first : first + count] = quantized(rows.float(), self._bits)
