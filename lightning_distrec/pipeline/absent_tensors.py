"""Tensors whose values are on another rank: they have a shape and a type, and what is computed from
them is absent too.

User code before and after the chain of blocks runs on ranks that lack some of its weights. What it
computes from those must not reach a loss, which is checked there by asking `is_absent`.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_distrec._compat.torch import without_torch_function
from lightning_distrec.errors import UnsupportedError

HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
ATTRIBUTES = ("__get__", "__set__", "__delete__", "requires_grad_", "retain_grad", *HOOKS)
"""Functions that read or set a tensor's attributes rather than its values: `requires_grad`, `grad`,
`shape`."""
DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
WAY_OUT = (
    "Let training_step read values after the model has returned only, and name what belongs to the "
    "first or the last stage: first_stage=[...], last_stage=[...]."
)


class AbsentTensor(Tensor):
    """A tensor on the meta device, of a parameter or computed from one."""

    is_absent = True
    """By which strategies recognize what an earlier run has left."""
    shown_device = torch.device("cpu")
    """What `.device` returns: the rank's, because user code makes tensors there that never meet
    this one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS:
            name = name.strip("_")
            raise UnsupportedError(
                f"{name}() was called on a value that depends on weights of another stage. "
                f"{WAY_OUT}"
            )
        _refuse_write(name, args, kwargs)
        # Read through the property's getter, which is how torch passes the attribute to this
        # function.
        if func == DEVICE:
            return cls.shown_device
        # _apply_optimizer_in_backward finds the node that accumulates a gradient by a view of the
        # tensor as itself.
        if name in ATTRIBUTES or (func == Tensor.view_as and args[0] is args[1]):
            # On the tensor itself, not on a copy. Outside of this context the call would come back
            # to this method.
            with without_torch_function():
                return apply_to_collection(func(*args, **kwargs), Tensor, _absent)
        if name in ("to", "cpu", "cuda") and isinstance(args[0], AbsentTensor):
            # Every move is a change of dtype alone: it stays on the meta device, and shows the
            # rank's.
            args = (
                args[0],
                *(argument for argument in args[1:] if isinstance(argument, torch.dtype)),
            )
            kwargs = {key: value for key, value in kwargs.items() if key == "dtype"}
            if len(args) == 1 and not kwargs:
                return args[0]
            func = Tensor.to
        # The operation runs on the meta device: it computes shapes alone, whatever devices it would
        # mix.
        with without_torch_function(), torch.no_grad():
            args, kwargs = apply_to_collection((args, kwargs), Tensor, _on_meta)
            result = func(*args, **kwargs)
        return apply_to_collection(result, Tensor, _absent)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return another one: there are no values to copy."""
        copied = memo[id(self)] = absent_parameter(self) if isinstance(self, nn.Parameter) else self
        return copied


def _refuse_write(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedError: a tensor that this rank has would be written to, and the write be
    lost."""
    # torch's names of writes in place end with one underscore, those of operators with two.
    writes = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
    target = kwargs.get("out", args[0] if writes and args else None)
    if name.startswith("_foreach") or (
        isinstance(target, Tensor) and not isinstance(target, AbsentTensor)
    ):
        raise UnsupportedError(
            f"{name or 'it'} would write values of another stage's weights to this one's. {WAY_OUT}"
        )


def _on_meta(tensor: Tensor) -> Tensor:
    return (
        tensor.detach().as_subclass(Tensor)
        if isinstance(tensor, AbsentTensor)
        else tensor.detach().to("meta")
    )


def _absent(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, AbsentTensor) else tensor.as_subclass(AbsentTensor)


def absent_parameter(like: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape and type without values."""
    # nn.Parameter keeps a tensor's class where it is not Tensor, and marks it by `_is_param` for
    # isinstance.
    return nn.Parameter(absent_like(like), like.requires_grad)


def absent_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type without values."""
    return _absent(torch.empty_like(tensor, device="meta"))


def is_absent(value: Any) -> bool:
    """Whether a value, or any tensor in it, is absent."""
    tensors: list[Tensor] = []
    apply_to_collection(value, AbsentTensor, tensors.append)
    return bool(tensors)
