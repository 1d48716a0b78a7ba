"""What a module computes with outputs of layers that are split: as one process does, in values and in shapes.

These outputs are DTensors. torch computes with them as with full tensors, each rank its part, but takes no plain
tensors next to them: masks, norms' weights, residuals. All ranks of a group have these alike, so they become replicated
DTensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_distrec.errors import UnsupportedError

READ = {"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__format__"}
"""Methods of a tensor that return values, of which a DTensor would return this rank's."""
IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor")}


class MixedOperands(TorchFunctionMode):
    """Inside of it functions of torch take DTensors of a group's mesh together with plain, replicated tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function. Collective where it reads values."""
        kwargs = kwargs or {}
        found = [value for value in _tensors([*args, *kwargs.values()])]
        if not any(isinstance(value, DTensor) for value in found):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if function is functional.scaled_dot_product_attention:
            return _attention(self._replicated, *args, **kwargs)
        if name in READ:
            return function(_full(args[0]), *args[1:], **kwargs)
        if all(isinstance(value, DTensor) for value in found):
            return function(*args, **kwargs)
        writes = name in IN_PLACE or name == "__setitem__" or (name.endswith("_") and name[-2:] != "__")
        written = args[0] if writes and args else kwargs.get("out")
        if isinstance(written, Tensor) and not isinstance(written, DTensor):
            raise UnsupportedError(
                f"tensor_parallel: {name} writes the output of a layer that is split into a tensor that is not. Write "
                "it out of place: x = x + y."
            )
        return function(*self._replicated(args), **self._replicated(kwargs))

    def _replicated(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, DTensor):
                return value
            return DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)
        if isinstance(value, dict):
            return {key: self._replicated(each) for key, each in value.items()}
        return type(value)(self._replicated(each) for each in value) if type(value) in (list, tuple) else value


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _full(value: Any) -> Any:
    """Collective for a DTensor. Return it in full."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _attention(
    replicated: Callable[[Any], Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """Attend with the heads of this rank, where heads are split evenly; with all of them otherwise.

    torch's DTensor knows only the kernels of CUDA. Dropout draws for all heads, as one process does.
    """
    tensors = [replicated(tensor) for tensor in (query, key, value)]
    mesh, heads = tensors[0].device_mesh, query.dim() - 3
    placements: tuple[Placement, ...] = (Shard(heads),)
    is_split = dropout_p == 0 and all(
        tensor.placements == placements and tensor.shape[heads] % tensor.device_mesh.size() == 0 for tensor in tensors
    )
    if not is_split:
        placements = (Replicate(),)
        tensors = [tensor.redistribute(placements=placements) for tensor in tensors]
    mask = None if attn_mask is None else _mask(replicated(attn_mask), is_split)
    local = [tensor.to_local() for tensor in tensors]
    query, key, value = local
    attended = functional.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, **others)
    return DTensor.from_local(attended, mesh, placements, run_check=False)


def _mask(mask: DTensor, is_split: bool) -> Tensor:
    """Return a mask for the heads of this rank. What it learns from them is summed over the ranks."""
    if is_split and mask.dim() > 2 and mask.shape[-3] > 1:
        return mask.redistribute(placements=[Shard(mask.dim() - 3)]).to_local()
    mask = mask.redistribute(placements=[Replicate()])
    return mask.to_local(grad_placements=[Partial()]) if is_split else mask.to_local()


@contextmanager
def mixed_operands(mesh: DeviceMesh) -> Iterator[None]:
    """Around forward, and around a backward that computes activations again."""
    with MixedOperands(mesh):
        yield


def confine(part: nn.Module, mesh: DeviceMesh) -> None:
    """Let a module compute in `mixed_operands`, and return plain tensors."""
    forward = part.forward

    @wraps(forward)
    def confined(*args: Any, **kwargs: Any) -> Any:
        with mixed_operands(mesh):
            return apply_to_collection(forward(*args, **kwargs), DTensor, _full, allow_frozen=True)

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
