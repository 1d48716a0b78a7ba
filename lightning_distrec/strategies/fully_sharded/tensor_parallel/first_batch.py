"""Compares each function that is called with split tensors with the same function of full ones, on the first batch.

torch's DTensor has no rule for some functions, which raises an error, and a wrong one for a few others, which does not:
torch 2.13 adds up each rank's part alone in cumsum(dim=-1), and draws alike on all ranks in exponential_. Gradients are
compared too, by one product with random numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_distrec.checkpoint.generators import generator_states, set_generator_states
from lightning_distrec.errors import UnsupportedError

NOT_COMPARED = {"__get__", "__set__", "backward", "register_hook", "retain_grad", "requires_grad_"}
"""What computes nothing: attributes and hooks."""
DRAWN_APART = {"rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli", "bernoulli_"}
"""What DTensor draws on a GPU for each part, with other numbers than one process; so do functions named "dropout"."""
IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor")}
SMALL = 1e-3
"""Values below it may differ by their own rounding: what is left of sums that cancel."""


def writes_in_place(name: str) -> bool:
    """Return whether a function of this name writes to its first argument."""
    return name in IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def compare(call: Callable[..., Any], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Collective. Raise UnsupportedError: DTensors have other values, or gradients, than full tensors.

    call: does the function with DTensors; args, kwargs: have them, and stay as they are.
    """
    name = getattr(function, "__name__", "")
    if name in NOT_COMPARED or name.startswith(("empty", "new_empty")):
        return
    writes = writes_in_place(name) or "out" in kwargs
    before = generator_states()
    try:
        # In a layer that recomputes its activations, these trials are no part of what it does again.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            split = _tried(call, args, kwargs, writes)
            has_drawn = "cuda" in before and not torch.equal(before["cuda"], generator_states()["cuda"])
            set_generator_states(before)
            full = _Trial(function, args, kwargs, full_of, writes)
            if isinstance(split, RuntimeError):
                raise not_computed(name, split) from split
            if has_drawn and ("dropout" in name or name in DRAWN_APART):
                return
            same = _are_close(split.outputs, full.outputs) and _are_close(*_gradients(split, full))
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"tensor_parallel: the first batch's {name} does not fit into memory in full, where it is compared. Set "
            "compare_first_batch: false, or compare with a smaller batch."
        ) from error
    except RuntimeError:  # which the call itself raises next
        return
    finally:
        set_generator_states(before)
    if not same:
        raise UnsupportedError(
            f"tensor_parallel: {name} of the output of a layer that is split has other values, or gradients, than with "
            "the full output, because of a fault of torch's DTensor. Use colwise_gather_output for the layer."
        )


def not_computed(name: str, error: RuntimeError) -> UnsupportedError:
    """Return what is raised where DTensor cannot do a function."""
    return UnsupportedError(
        f"tensor_parallel: {name} cannot be computed of the output of a layer that is split: {error} Use "
        "colwise_gather_output for the layer; or, for queries, keys and values of one layer, a layer each."
    )


def _tried(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], writes: bool
) -> "_Trial | RuntimeError":
    try:
        return _Trial(call, args, kwargs, _as_it_is, writes)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return error


class _Trial:
    """A function of copies of its arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        form: Callable[[Tensor], Tensor],
        writes: bool,
    ) -> None:
        self.learning: list[Any] = []
        self._form = form
        self._learns = torch.is_grad_enabled() and not writes  # in evaluation there are no gradients
        copied = self._copied(list(args)), self._copied(dict(kwargs))
        result = function(*copied[0], **copied[1])
        written = [copied[0][:1]] if writes else []
        self.outputs = list(tensors_in([result, *written]))

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            copy = self._form(value.detach()).clone()
            if value.requires_grad and self._learns:
                self.learning.append(copy.requires_grad_())
            return copy
        if isinstance(value, dict):
            return {key: self._copied(each) for key, each in value.items()}
        return type(value)(self._copied(each) for each in value) if type(value) in (list, tuple) else value


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _gradients(split: _Trial, full: _Trial) -> tuple[list[Tensor], list[Tensor]]:
    """Collective. Return the gradients of both for the same random gradients of their outputs."""
    if not full.learning:
        return [], []
    outputs: Any = zip(split.outputs, full.outputs, strict=True)
    pairs = [(s, f) for s, f in outputs if isinstance(s, DTensor) and f.requires_grad and s.requires_grad]
    if not pairs:
        return [], []
    of_split: list[Tensor] = []
    of_full: list[Tensor] = []
    mesh = split.learning[0].device_mesh
    for one, other in pairs:
        given = torch.randn(other.shape, device=other.device).to(other.dtype)
        of_full.append(given)
        placements = [Replicate() if placement.is_partial() else placement for placement in one.placements]
        of_split.append(distribute_tensor(given, mesh, placements, src_data_rank=None))
    found = (
        torch.autograd.grad([one for one, _ in pairs], split.learning, of_split, allow_unused=True),
        torch.autograd.grad([other for _, other in pairs], full.learning, of_full, allow_unused=True),
    )
    of_split, of_full = [[gradient for gradient in of_one if gradient is not None] for of_one in found]
    return of_split, of_full


def _are_close(split: Sequence[Tensor], full: Sequence[Tensor]) -> bool:
    """Collective. Return whether tensors are equal but for rounding."""
    return len(split) == len(full) and all(
        _is_close(full_of(s.detach()), f.detach()) for s, f in zip(split, full, strict=True)
    )


def _is_close(value: Tensor, expected: Tensor) -> bool:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    if expected.is_complex():
        value, expected = torch.view_as_real(value), torch.view_as_real(expected)
    if not expected.is_floating_point():
        return torch.equal(value, expected)
    finite = expected[expected.isfinite()]
    within = torch.finfo(expected.dtype).eps ** 0.5
    scale = max(float(finite.abs().max()), SMALL) if finite.numel() else SMALL
    return torch.allclose(value, expected, rtol=within, atol=within * scale, equal_nan=True)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def full_of(tensor: Any) -> Any:
    """Collective for a DTensor. Return it in full; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
