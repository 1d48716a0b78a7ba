"""What a pipeline's steps share, draw and log, where the module is on a device that this machine
may lack."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_distrec.pipeline.pipelined_module import TOLERANCE, close_enough
from lightning_distrec.pipeline.step_effects import (
    StepDraws,
    on_host,
    to_device,
)


class CountedCopies(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "_to_copy" in func.__name__
        return func(*args, **(kwargs or {}))


def test_tensors_of_any_types_move_as_one_and_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = [
        torch.tensor(True),
        torch.randn(3, 2).T,
        torch.arange(2.0, dtype=torch.float64),
        torch.ones(3).bfloat16(),
    ]
    value = {"a": numbers, "b": (torch.empty(0, 2), torch.tensor(7, dtype=torch.int16))}
    plain, flags = on_host(value), iter([True, False] * 3)
    monkeypatch.setattr("lightning_distrec.gpu.is_on_gpu", lambda _: True)
    monkeypatch.setattr("lightning_distrec.gpu.is_gpu", lambda _: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    for moved in (on_host(value), to_device(value, torch.device("cpu"), lambda _: next(flags))):
        torch.testing.assert_close(moved, plain, rtol=0, atol=0)


def test_tensors_of_a_device_come_to_the_host_in_one_copy() -> None:
    plain = torch.arange(3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        losses = [torch.ones(2, 3, device="cuda"), torch.ones((), device="cuda")]
        with CountedCopies() as copies:
            message = on_host({
                "losses": losses,
                "ids": (torch.ones(4, dtype=torch.int64, device="cuda"), plain, "a"),
            })
    assert [tensor.device.type for tensor in (*message["losses"], *message["ids"][:2])] == [
        "cpu"
    ] * 4
    assert [tuple(tensor.shape) for tensor in (*message["losses"], message["ids"][0])] == [
        (2, 3),
        (),
        (4,),
    ]
    assert copies.number == 1
    assert torch.equal(on_host(plain), plain)


def test_a_draw_on_a_gpu_counts_as_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", on_device.get_state)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", on_device.manual_seed)
    draws = StepDraws(messages=None)  # type: ignore[arg-type]
    with draws.seeded(0) as has_drawn:
        assert not has_drawn()
    with draws.seeded(0) as has_drawn:
        torch.rand(3, generator=on_device)
        assert has_drawn()


def test_means_of_rounded_losses_are_not_taken_for_sums() -> None:
    """In bfloat16 a batch's loss and the mean of its micro-batches' differ by rounding, and a sum
    by a factor."""
    differs = 0
    for seed in range(200):
        draw = torch.Generator().manual_seed(seed)
        scores = torch.randn(32, 100, generator=draw).bfloat16()
        labels = torch.randint(100, (32,), generator=draw)
        full = functional.cross_entropy(scores, labels)
        parts = [
            functional.cross_entropy(*pair)
            for pair in zip(scores.chunk(4), labels.chunk(4), strict=True)
        ]
        mean = torch.stack(parts).double().mean().to(full.dtype)
        differs += abs(float(full - mean)) > TOLERANCE * (1 + float(full))
        assert close_enough(full, mean, scores)
        assert not close_enough(full, 4 * mean, scores)
    assert differs > 10
    assert not close_enough(torch.tensor(1.0), torch.tensor(1.01), torch.ones(1))
