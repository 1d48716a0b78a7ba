"""What user code calls tables with: nn.Embedding's arguments as features, and whether a batch's
tensors fit each other.

FBGEMM and torchrec trust lengths. Where these do not add up, bags get the rows of other bags, or
memory beyond the tensors is read: other numbers, or the end of the process. So they are checked
before any kernel reads them.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec import gpu
from lightning_distrec._compat.torchrec_modules import keep_length_per_key
from lightning_distrec.errors import IdsError
from lightning_distrec.gpu import HostCopy, kept_on_device

FEATURE = "ids"
"""The one feature of a plain embedding's collection."""
# The smallest id is not below 0, and the largest is below every limit: such a batch passes all
# checks of ranges.
NO_IDS = (0, -1)
_ID_TYPES = (torch.int64, torch.int32)
_SHOWN = 5
_NO_LIMIT = 2**63 - 1


Extremes = tuple[int, int]
"""The smallest and the largest id; NO_IDS where there are none, or where nothing else has to be
known of them."""


def check_batch(
    call: str,
    features: KeyedJaggedTensor,
    weights: Tensor | None,
    limits: Mapping[str, int] | None = None,
) -> Extremes:
    """Do all of `begin_check`."""
    return begin_check(call, features, weights, limits)()


def begin_check(
    call: str,
    features: KeyedJaggedTensor,
    weights: Tensor | None,
    limits: Mapping[str, int] | None = None,
    gpu_of_tables: torch.device | None = None,
) -> Callable[[], Extremes]:
    """Begin to check whether a batch's tensors fit each other; returns what ends it, and waits for
    a GPU once.

    call: names the lookup in errors. weights: of the ids, where they count. limits: feature -> its
    number of rows; on a GPU NO_IDS is returned too where all ids are below their limits, so that
    nothing else has to be read. gpu_of_tables: where all tensors must be. The end raises IdsError:
    types, devices, lengths, offsets or weights do not fit.
    """
    values = features.values()
    lengths_or_none = features.lengths_or_none()
    # Looked at first: `lengths()` below computes and keeps lengths where a batch has offsets only.
    offsets = features.offsets_or_none() if lengths_or_none is None else None
    typed = (
        {"ids": values, "lengths": lengths_or_none}
        if offsets is None
        else {"ids": values, "offsets": offsets}
    )
    try:
        _check_types(call, typed)
        if gpu_of_tables is not None:
            _check_devices(call, gpu_of_tables, typed | {"weights": features.weights_or_none()})
        lengths = features.lengths()
        bags = _check_numbers(call, features, lengths.numel(), weights is not None)
    except IdsError as error:
        return partial(_raise, error)
    if not lengths.numel():
        return lambda: NO_IDS
    # All that is needed of the tensors' values is read at once.
    smallest_and_largest = list(torch.aminmax(values)) if values.numel() else []
    first_offset = [] if offsets is None else [offsets[0]]
    # One sum for each feature, where all have one batch size: torchrec asks for these numbers too
    # (length_per_key).
    sums = lengths.view(-1, bags).sum(1) if bags else lengths.sum()
    margin = []
    on_gpu = gpu.is_on_gpu(values)
    if on_gpu and limits is not None and bags and smallest_and_largest:
        keys = features.keys()
        key_limits = [limits.get(key, _NO_LIMIT) for key in keys]
        # Where all are equal, the largest id suffices: six kernels less.
        if min(key_limits) < max(key_limits):
            margin = [_smallest_margin(values, sums, key_limits)]
    tensors = [*torch.aminmax(lengths), *margin, *first_offset, *smallest_and_largest, sums]
    # One tensor and one copy to the host: each `int(tensor)` would wait for all that was queued
    # before it.
    copy = HostCopy(torch.cat([tensor.view(-1) for tensor in tensors])) if on_gpu else None

    def end() -> Extremes:
        read: list[int] = [] if copy is None else copy.read()
        for tensor in tensors if copy is None else ():
            read += tensor.tolist() if tensor.dim() else [int(tensor)]
        shortest, longest, *numbers = read
        are_inside = bool(margin) and numbers.pop(0) > 0
        first = 0 if offsets is None else numbers.pop(0)
        if first != 0:
            raise IdsError(f"{call} has offsets that begin with {first}; they must begin with 0.")
        extremes = (numbers.pop(0), numbers.pop(0)) if smallest_and_largest else NO_IDS
        if shortest < 0:
            limit = f"nor lie beyond the {values.numel()} ids"
            raise IdsError(f"{call} has a bag of {shortest} ids. Offsets must never fall, {limit}.")
        words = "lengths add up to" if offsets is None else "offsets end with"
        # a sum of huge lengths may have overflowed
        if longest > values.numel() or sum(numbers) != values.numel():
            raise IdsError(
                f"{call} has {values.numel()} ids, but its {words} "
                f"{sum(numbers)}{_list_counts(features.keys(), numbers)}. Each id must belong to "
                "one bag."
            )
        # Kept in the KeyedJaggedTensor: torchrec would compute them once more, for which a GPU is
        # waited for again.
        if bags and not keep_length_per_key(features, numbers):
            raise IdsError(
                f"{call} was made with a length_per_key that its lengths do not add up to, "
                f"{numbers}."
            )
        return NO_IDS if are_inside and extremes[0] >= 0 else extremes

    return end


def _raise(error: IdsError) -> Extremes:
    raise error


def _smallest_margin(values: Tensor, ids_per_feature: Tensor, limits: list[int]) -> Tensor:
    """Return by how much the ids are below their features' limits, at the least, on the device.

    Where `ids_per_feature` does not add up, the result means nothing, and no memory beyond the
    tensors is read.
    """
    ends = ids_per_feature.cumsum(0)
    feature = torch.searchsorted(
        ends, torch.arange(values.numel(), device=values.device), right=True
    )
    # Where lengths add up to fewer ids, searchsorted returns a number behind the last feature; the
    # caller raises later.
    limit_of_id = kept_on_device((*limits, _NO_LIMIT), values.device)[feature]
    # Few kernels over all ids. An id far below 0 may overflow, and is seen as the smallest.
    return (limit_of_id - values).amin()


def _check_types(call: str, tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            raise IdsError(
                f"{call} has ids without {name}. Give the KeyedJaggedTensor lengths or offsets: "
                "its third argument is weights."
            )
        if tensor.dtype not in _ID_TYPES or tensor.dim() != 1:
            text = f"{call} has {name} of {tensor.dtype} and shape {tuple(tensor.shape)}"
            raise IdsError(f"{text}. They must be int64 or int32, and of one dimension.")


def _check_devices(call: str, gpu: torch.device, tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != gpu:
            raise IdsError(
                f"{call} has {name} on {tensor.device}, and its tables are on {gpu}. Make tensors "
                "of a step there (device=self.device); Lightning moves those that are in the batch."
            )


def _check_numbers(
    call: str, features: KeyedJaggedTensor, num_lengths: int, counts_weights: bool
) -> int | None:
    """Return the number of bags of each feature; None: features have unequal numbers."""
    num_ids = features.values().numel()
    weights = features.weights_or_none()
    if weights is not None and (
        weights.shape != features.values().shape
        or (counts_weights and not weights.is_floating_point())
    ):
        shape = tuple(weights.shape)
        raise IdsError(
            f"{call} has {num_ids} ids, and weights of {weights.dtype} and shape {shape}: one "
            "float each."
        )
    keys = features.keys()
    variable = features.variable_stride_per_key()
    stride = None if variable else features.stride()
    if stride is None or num_lengths != len(keys) * stride:
        bags = features.stride_per_key() if stride is None else [stride] * len(keys)
        if len(bags) != len(keys) or num_lengths != sum(bags) or min(bags, default=0) < 0:
            counts = _list_counts(keys, bags)
            raise IdsError(
                f"{call} has {num_lengths} lengths, but {sum(bags)} are needed{counts}: one for "
                "each example."
            )
        stride = None
    if num_ids and not num_lengths:
        raise IdsError(f"{call} has {num_ids} ids, but no lengths, so that they belong to no bag.")
    return stride


def _list_counts(keys: list[str], numbers: list[int]) -> str:
    if len(keys) < 2 or len(keys) != len(numbers):
        return ""
    shown = ", ".join(
        f"'{key}': {number}" for key, number in list(zip(keys, numbers, strict=True))[:_SHOWN]
    )
    return f" ({shown}{', ...' if len(keys) > _SHOWN else ''})"


def rows_call(path: str, input: Tensor) -> KeyedJaggedTensor:
    """Return the ids of a call of nn.Embedding as one bag. path: of the embedding. Raises IdsError:
    no integers."""
    ids = _as_ids(path, input).flatten().contiguous()
    # One bag is enough: an EmbeddingCollection returns a row for each id, whatever the examples
    # are.
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

    path: of the embedding. Raises IdsError: shapes or types do not fit; of offsets, whoever looks
    the bags up checks the values.
    """
    if weights is not None and weights.shape != input.shape:
        shapes = (
            f"per_sample_weights of shape {tuple(weights.shape)} and ids of shape "
            f"{tuple(input.shape)}"
        )
        raise IdsError(f"'{path}' was called with {shapes}; they must be the same.")
    ids = _as_ids(path, input)
    features = KeyedJaggedTensor(
        keys=[FEATURE],
        values=ids.flatten().contiguous(),
        offsets=_offsets(path, ids, offsets, include_last_offset),
        # FBGEMM's forward makes them float32 as well.
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
            f"'{path}' was called with ids of shape {tuple(ids.shape)} and "
            f"{'no ' if offsets is None else ''}offsets. Ids must have two dimensions, or one and "
            "offsets."
        )
    _check_types(f"'{path}'", {"offsets": offsets})
    if not include_last_offset:
        return torch.cat([offsets.long(), offsets.new_full((1,), ids.numel(), dtype=torch.long)])
    if not offsets.numel():
        raise IdsError(
            f"'{path}' has include_last_offset=True, and was called with offsets of shape (0,)."
        )
    return offsets.long()


def _without_padding(path: str, features: KeyedJaggedTensor, padding_idx: int) -> KeyedJaggedTensor:
    # Checked before ids are left out: by wrong offsets they would be left out of other bags.
    check_batch(f"'{path}'", features, features.weights_or_none())
    ids = features.values()
    weights = features.weights_or_none()
    keep = ids != padding_idx
    retained_offsets = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    return KeyedJaggedTensor(
        keys=[FEATURE],
        values=ids[keep],
        # A bag begins behind the ids that stay of the bags before it.
        offsets=retained_offsets[features.offsets()],
        weights=None if weights is None else weights[keep],
    )


def _as_ids(path: str, input: Tensor) -> Tensor:
    if input.dtype not in _ID_TYPES:
        raise IdsError(
            f"'{path}' was called with ids of {input.dtype}; they must be int64 or int32."
        )
    return input.long()
