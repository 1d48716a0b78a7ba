"""What a module computes with outputs of layers that are split: as one process does, in values and in shapes.

These outputs are DTensors. torch computes with them as with full tensors, each rank its part, but takes no plain
tensors next to them: masks, norms' weights, residuals. All ranks of a group have these alike, so they become replicated
DTensors.
"""

from collections.abc import Mapping, Sequence
from functools import wraps
from threading import local
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_distrec._compat.torch import version_of
from lightning_distrec.errors import UnsupportedError
from lightning_distrec.strategies.fully_sharded.tensor_parallel.first_batch import (
    compare,
    full_of,
    not_computed,
    tensors_in,
    writes_in_place,
)

READ = {"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__format__"}
"""Methods of a tensor that return values, of which a DTensor would return this rank's."""

_of_thread = local()
"""Has the MixedOperands in which this thread computes, as `active`."""


class MixedOperands(TorchFunctionMode):
    """Inside of it functions of torch take DTensors of a group's mesh together with plain, replicated tensors."""

    def __init__(self, mesh: DeviceMesh, compares: bool = False) -> None:
        """compares: whether each function is compared with what it computes of full tensors."""
        super().__init__()
        self._mesh, self._compares = mesh, compares
        self._shared: tuple[Tensor, int | None, Any] | None = None

    def __enter__(self) -> "MixedOperands":
        """Begin."""
        _of_thread.active = self
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """End."""
        _of_thread.active = self._shared = None
        super().__exit__(*exception)

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function. Collective where it reads values, or compares. Raises UnsupportedError."""
        kwargs = kwargs or {}
        found = list(tensors_in([*args, *kwargs.values()]))
        if not any(isinstance(value, DTensor) for value in found):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in READ:
            return function(full_of(args[0]), *args[1:], **kwargs)
        written = args[0] if writes_in_place(name) and args else kwargs.get("out")
        if isinstance(written, Tensor) and not isinstance(written, DTensor):
            raise UnsupportedError(
                f"tensor_parallel: {name} writes the output of a layer that is split into a tensor that is not. Write "
                "it out of place: x = x + y."
            )
        args, kwargs = self._replicated(tuple(args)), self._replicated(dict(kwargs))
        call = _attention if function is functional.scaled_dot_product_attention else function
        if self._compares:
            compare(call, function, args, kwargs)
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and "Sharding propagation failed" not in str(error):
                raise  # a shape that does not fit, or a rank that has died
            raise not_computed(name, error) from error

    def share(self, tensor: Tensor) -> Any:
        """Return a tensor as a DTensor, the same one for all layers that take it one after the other.

        Their gradients of it are added up on each rank, and then over the ranks: queries, keys and values send one.
        """
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return self._replicated(tensor)
        known, version, shared = self._shared or (None, None, None)
        if known is not tensor or version != version_of(tensor):
            shared = self._replicated(tensor)
            self._shared = tensor, version_of(tensor), shared
        return shared

    def _replicated(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, DTensor):
                return value
            return DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)
        if isinstance(value, dict):
            return {key: self._replicated(each) for key, each in value.items()}
        return type(value)(self._replicated(each) for each in value) if type(value) in (list, tuple) else value


def _attention(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: DTensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """Attend with the heads of this rank, where heads are split evenly; with all of them otherwise.

    torch's DTensor knows only the kernels of CUDA. Dropout draws for all heads, as one process does.
    """
    tensors: list[Any] = [query, key, value]
    mesh, heads = query.device_mesh, query.dim() - 3
    placements: tuple[Placement, ...] = (Shard(heads),)
    is_split = dropout_p == 0 and all(
        tensor.placements == placements and tensor.shape[heads] % mesh.size() == 0 for tensor in tensors
    )
    if not is_split:
        placements = (Replicate(),)
        tensors = [tensor.redistribute(placements=placements) for tensor in tensors]
    mask = None if attn_mask is None else _mask(attn_mask, is_split)
    of_rank = [tensor.to_local() for tensor in tensors]
    attended = functional.scaled_dot_product_attention(*of_rank, mask, dropout_p, is_causal, **others)  # type: ignore[call-arg]
    return DTensor.from_local(attended, mesh, placements, run_check=False)


def _mask(mask: DTensor, is_split: bool) -> Tensor:
    """Return a mask for the heads of this rank. What it learns from them is summed over the ranks."""
    if is_split and mask.dim() > 2 and mask.shape[-3] > 1:
        return mask.redistribute(placements=[Shard(mask.dim() - 3)]).to_local()
    mask = mask.redistribute(placements=[Replicate()])
    return mask.to_local(grad_placements=[Partial()]) if is_split else mask.to_local()


def share_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Before the forward of a layer that is split: see `MixedOperands.share`."""
    active: MixedOperands | None = getattr(_of_thread, "active", None)
    if active is None or not args or not isinstance(args[0], Tensor) or isinstance(args[0], DTensor):
        return None
    return active.share(args[0]), *args[1:]


def confine(part: nn.Module, mesh: DeviceMesh, compares: bool, is_outermost: bool) -> None:
    """Let a module compute with `MixedOperands`, the outermost one return plain tensors.

    Those inside of it begin where backward computes activations again. compares: whether what is computed first, for
    training and for evaluation, is compared with full tensors.
    """
    forward = part.forward
    compared: set[tuple[bool, bool]] = set()

    @wraps(forward)
    def confined(*args: Any, **kwargs: Any) -> Any:
        if getattr(_of_thread, "active", None) is not None:
            return forward(*args, **kwargs)
        kind = part.training, torch.is_grad_enabled()
        with MixedOperands(mesh, compares and is_outermost and kind not in compared):
            result = forward(*args, **kwargs)
        compared.add(kind)
        if is_outermost:
            result = apply_to_collection(result, DTensor, full_of, allow_frozen=True)
        return result

    confined.of_user = forward  # type: ignore[attr-defined]
    # An attribute of the instance: fully_shard's hooks are around it, and see plain tensors.
    part.forward = confined  # type: ignore[method-assign]


def release(part: nn.Module) -> None:
    """Undo `confine`, where it was called."""
    forward = getattr(vars(part).get("forward"), "of_user", None)
    if forward is None:
        return
    del part.forward
    if part.forward != forward:  # the user has set it on the instance
        part.forward = forward
