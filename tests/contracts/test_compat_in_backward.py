"""Upstream's in-backward optimizers and TorchRec's wrappers are as `_compat` takes them to be."""

import copy
import inspect

import torch
from torch import nn, optim
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim import KeyedOptimizerWrapper, RowWiseAdagrad, apply_optimizer_in_backward

from lightning_distrec._compat import lightning as _lightning
from lightning_distrec._compat import tensors as _tensors
from lightning_distrec._compat import torch as _torch
from lightning_distrec._compat import torchrec_modules as _torchrec


def _applied(kind: type = optim.SGD) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(4))
    _apply_optimizer_in_backward(kind, [weight], {"lr": 0.5})
    return weight


def test_both_names_leave_the_optimizer_on_the_parameter() -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    apply_optimizer_in_backward(RowWiseAdagrad, [weight], {"lr": 0.1})
    (optimizer,) = _torch.in_backward_optimizers(weight)
    assert isinstance(optimizer, RowWiseAdagrad)
    assert _torch.in_backward_optimizers(nn.Parameter(torch.ones(4))) == []


def test_its_hook_steps_in_backward_until_it_is_dropped() -> None:
    weight = _applied()
    weight.sum().backward()
    assert weight.tolist() == [0.5] * 4
    assert weight.grad is None
    _torch.drop_in_backward_hooks(weight)
    weight.sum().backward()
    assert weight.tolist() == [0.5] * 4


def test_marks_are_those_that_upstream_sets() -> None:
    weight, marked = _applied(), nn.Parameter(torch.ones(2))
    (optimizer,) = _torch.in_backward_optimizers(weight)
    _torch.mark_in_backward(marked, optimizer)
    assert marked.__dict__.keys() == weight.__dict__.keys()
    assert marked._optimizer_classes == weight._optimizer_classes == [optim.SGD]
    assert marked._optimizer_kwargs[0]["lr"] == weight._optimizer_kwargs[0]["lr"]
    with _torch.without_in_backward([weight]):
        assert not weight.__dict__
    assert _torch.in_backward_optimizers(weight) == [optimizer]


def test_copies_of_a_parameter_get_optimizers_of_their_own() -> None:
    weight = _applied()
    twin = copy.deepcopy(weight)  # which drops the attributes
    _torch.copy_in_backward(weight, twin)
    (optimizer,) = _torch.in_backward_optimizers(twin)
    assert optimizer.param_groups[0]["params"][0] is twin
    assert _torch.in_backward_optimizers(weight)[0].param_groups[0]["params"][0] is weight


def test_applying_again_makes_new_optimizers_with_the_present_rates() -> None:
    weight, other = _applied(), nn.Parameter(torch.ones(4))
    (optimizer,) = _torch.in_backward_optimizers(weight)
    optimizer.param_groups[0]["lr"] = 0.25
    _torch.apply_in_backward([optimizer], other)
    other.sum().backward()
    assert other.tolist() == [0.75] * 4
    assert weight.tolist() == [1.0] * 4


def test_an_optimizer_in_backward_is_known_while_it_makes_its_state() -> None:
    made_in_backward = []

    class Watched(optim.Adagrad):
        def __init__(self, parameters: object, **options: float) -> None:
            made_in_backward.append(_tensors.makes_state_in_backward(inspect.currentframe()))

    _applied(Watched)
    Watched([nn.Parameter(torch.ones(4))])
    assert made_in_backward == [True, False]


def test_reached_leaves_are_those_that_get_a_gradient() -> None:
    first, second, third = (torch.ones(2, requires_grad=True) for _ in range(3))
    out = first * 2 + second.detach() + third.sum()
    assert _torch.reached_leaves([out]) == {id(first), id(third)}
    assert _torch.reached_leaves([torch.ones(2)]) == set()


def test_a_keyed_wrapper_shares_groups_and_state_with_what_it_wraps() -> None:
    weight = nn.Parameter(torch.ones(4))
    keyed = KeyedOptimizerWrapper(
        {"weight": weight}, lambda parameters: optim.Adagrad(parameters, lr=0.1)
    )
    inner = _torchrec.wrapped_optimizer(keyed)
    assert isinstance(inner, optim.Adagrad)
    assert keyed.param_groups[0] is inner.param_groups[0]


def test_a_scheduler_does_not_warn_of_a_wrapper_that_is_not_stepped(recwarn: object) -> None:
    keyed = KeyedOptimizerWrapper(
        {"weight": nn.Parameter(torch.ones(4))}, lambda p: optim.SGD(p, lr=1.0)
    )
    scheduler = optim.lr_scheduler.ExponentialLR(keyed, 0.5)
    _lightning.skip_order_check(keyed)
    _torchrec.wrapped_optimizer(keyed).step()
    scheduler.step()
    assert not list(recwarn)  # type: ignore[call-overload]
    assert keyed.param_groups[0]["lr"] == 0.5
