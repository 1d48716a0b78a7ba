"""Calls of nn.Embedding and nn.EmbeddingBag, as a KeyedJaggedTensor of one feature."""

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.errors import IdsError
from lightning_distrec.sharding.calls.batch_check import check_batch

FEATURE = "ids"
"""The one feature of a plain embedding's collection."""


def rows_call(path: str, input: Tensor) -> KeyedJaggedTensor:
    """Return the ids of a call of nn.Embedding as one bag. path: of the embedding. Raises IdsError: no integers."""
    ids = _as_ids(path, input).flatten().contiguous()
    lengths = torch.full((1,), ids.numel(), dtype=torch.int32, device=ids.device)
    return KeyedJaggedTensor(keys=[FEATURE], values=ids, lengths=lengths)


def bags_call(
    path: str,
    input: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    padding_idx: int | None,
    include_last_offset: bool,
) -> KeyedJaggedTensor:
    """Return the bags of a call of nn.EmbeddingBag, without ids that are padding.

    path: of the embedding. Raises IdsError: shapes or types do not fit; of offsets, whoever looks the bags up checks
    the values.
    """
    if weights is not None and weights.shape != input.shape:
        raise IdsError(
            f"'{path}' was called with per_sample_weights of shape {tuple(weights.shape)} and ids of shape "
            f"{tuple(input.shape)}; they must be the same."
        )
    ids = _as_ids(path, input)
    features = KeyedJaggedTensor(
        keys=[FEATURE],
        values=ids.flatten().contiguous(),
        offsets=_offsets(path, ids, offsets, include_last_offset),
        weights=None if weights is None else weights.flatten().contiguous().float(),
    )
    return features if padding_idx is None else _without_padding(path, features, padding_idx)


def _offsets(path: str, ids: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    """Return where bags begin, and the end of the last one."""
    if ids.dim() == 2 and offsets is None:
        num_bags, size = ids.shape
        return torch.arange(num_bags + 1, device=ids.device) * size
    if ids.dim() != 1 or offsets is None:
        raise IdsError(
            f"'{path}' was called with ids of shape {tuple(ids.shape)} and {'no ' if offsets is None else ''}offsets. "
            "Ids must have two dimensions, or one and offsets."
        )
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1:
        raise IdsError(
            f"'{path}' was called with offsets of {offsets.dtype} and shape {tuple(offsets.shape)}; they must be "
            "int64 or int32, and of one dimension."
        )
    if not include_last_offset:
        return torch.cat([offsets.long(), offsets.new_full((1,), ids.numel(), dtype=torch.long)])
    if not offsets.numel():
        raise IdsError(f"'{path}' has include_last_offset=True, and was called with offsets of shape (0,).")
    return offsets.long()


def _without_padding(path: str, features: KeyedJaggedTensor, padding_idx: int) -> KeyedJaggedTensor:
    check_batch(f"'{path}'", features, features.weights_or_none())
    ids, weights = features.values(), features.weights_or_none()
    keep = ids != padding_idx
    kept_before = torch.cat([keep.new_zeros(1, dtype=torch.long), keep.cumsum(0)])
    return KeyedJaggedTensor(
        keys=[FEATURE],
        values=ids[keep],
        offsets=kept_before[features.offsets()],
        weights=None if weights is None else weights[keep],
    )


def _as_ids(path: str, input: Tensor) -> Tensor:
    if input.dtype not in (torch.int32, torch.int64):
        raise IdsError(f"'{path}' was called with ids of {input.dtype}; they must be int64 or int32.")
    return input.long()
