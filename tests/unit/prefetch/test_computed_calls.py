"""What the trial's recordings show of computed calls: numbers, sizes, tensors of the module."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_distrec.prefetch.batch_objects import BatchObjects
from lightning_distrec.prefetch.computed_calls import (
    ComputedCall,
    NotReadyError,
    Trial,
    have_known_sizes,
    replaying,
)
from lightning_distrec.prefetch.recorded_calls import RecordedCall
from lightning_distrec.prefetch.recorder import READS_BATCH, Recorder
from lightning_distrec.prefetch.sources import BatchRoots

Batch = dict[str, Tensor]
Compute = Callable[[nn.Module, Batch], Tensor]


class Held(nn.Module):
    """Looks up the category of an item."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("category_of", torch.arange(10))


def batches(*sizes: int) -> list[Batch]:
    """Return batches of these numbers of ids."""
    return [{"x": torch.arange(size), "y": torch.arange(size)} for size in sizes]


def record(compute: Compute, module: nn.Module, batch: Batch) -> RecordedCall:
    """Return the call of a table with what `compute` makes of a batch."""
    roots = BatchRoots(batch)
    recorder = Recorder(module, BatchObjects(roots), roots)
    with recorder.recording():
        ids = compute(module, batch)
    return RecordedCall("t", (ids,), recorder.objects, recorder)


def try_out(compute: Compute, module: nn.Module, tried: list[Batch]) -> Trial:
    """Return what three steps have shown."""
    trial = Trial(["t"], ["t"])
    for batch in tried:
        call = record(compute, module, batch)
        tensors = BatchObjects(BatchRoots(batch)).tensors_with_paths
        trial.end_step({"t": [call.recording or call.reason]}, tensors)
    return trial


def agreed(*trials: Trial) -> list[ComputedCall]:
    """Return what the first of these ranks may compute ahead. Each rank must agree."""
    gathered = [(trial._tried(), trial.sizes) for trial in trials]
    usable = [trial.agree(_ranks(gathered)) for trial in trials]
    assert len({len(calls) for calls in usable}) == 1
    return usable[0]


def _ranks(gathered: list[Any]) -> Any:
    return SimpleNamespace(all_gather=lambda value: gathered)


def test_a_number_that_may_be_one_of_two_sizes_is_not_guessed() -> None:
    trial = try_out(lambda m, b: torch.arange(len(b["x"])), Held(), batches(3, 4, 5))
    [call] = agreed(trial)
    same, unlike = BatchRoots(batches(9)[0]), BatchRoots({"x": torch.arange(7), "y": torch.ones(2)})
    assert have_known_sizes(same, trial.sizes)
    assert have_known_sizes(unlike, trial.sizes)
    with replaying():
        assert call.get(same)[0].tolist() == list(range(9))
        with pytest.raises(NotReadyError, match="a number may be any of .2, 7."):
            call.get(unlike)


def test_what_is_not_of_the_size_of_recorded_batches_is_not_computed_ahead() -> None:
    trial = try_out(lambda m, b: b["x"][: len(b["x"]) // 2] + 1, Held(), batches(8, 8, 8))
    assert have_known_sizes(BatchRoots(batches(8)[0]), trial.sizes)
    assert not have_known_sizes(BatchRoots(batches(6)[0]), trial.sizes)
    assert not have_known_sizes(BatchRoots({"x": torch.arange(8)}), trial.sizes)


def test_ranks_agree_on_numbers_that_fit_on_all_of_them() -> None:
    compute: Compute = lambda m, b: b["x"] % len(b["x"])  # noqa: E731
    first = try_out(compute, Held(), batches(8, 8, 8))
    [call] = agreed(first, try_out(compute, Held(), batches(6, 6, 5)))
    assert have_known_sizes(BatchRoots(batches(11)[0]), first.sizes)
    assert call.get(BatchRoots({"x": torch.arange(9), "y": torch.ones(9)}))[0].max() == 8
    halves: Compute = lambda m, b: b["x"] % (len(b["x"]) // 2)  # noqa: E731
    first = try_out(halves, Held(), batches(8, 8, 8))
    assert agreed(first, try_out(halves, Held(), batches(6, 6, 6))) == []
    assert "aten.remainder.Scalar is given changes from step to step" in first.reasons["t"]


def test_ranks_that_compute_it_otherwise_look_it_up_as_it_is_called() -> None:
    first = try_out(lambda m, b: b["x"] + 1, Held(), batches(8, 8, 8))
    other = try_out(lambda m, b: b["x"] * 2 + 1, Held(), batches(8, 8, 8))
    assert agreed(first, other) == []
    assert "the step does not compute it with the operations" in first.reasons["t"]


def test_a_buffer_that_changes_after_the_trial_is_looked_up_in_the_step_from_then_on() -> None:
    module = Held()
    compute: Compute = lambda m, b: m.category_of[b["x"]]  # type: ignore[index,operator]  # noqa: E731
    [call] = agreed(try_out(compute, module, batches(4, 4, 4)))
    [batch] = batches(4)
    assert call.get(BatchRoots(batch))[0].tolist() == [0, 1, 2, 3]
    module.category_of.copy_(module.category_of.flip(0))  # type: ignore[operator]
    for _ in range(2):
        with pytest.raises(NotReadyError, match="self.category_of changes"):
            call.get(BatchRoots(batch))
    assert call.refused == "self.category_of changes"


@pytest.mark.parametrize(
    "read",
    [
        lambda b: int(b["x"].max()),
        lambda b: bool(b["x"].any()),
        lambda b: (b["x"] + 1).sum().item(),
    ],
    ids=["number", "truth", "item of a computed tensor"],
)
def test_nothing_is_sent_ahead_of_a_step_that_has_read_a_value_of_its_batch(
    read: Callable[[Batch], Any],
) -> None:
    def found(module: nn.Module, batch: Batch) -> Tensor:
        return batch["x"] if read(batch) >= 0 else batch["y"]

    [batch] = batches(5)
    assert record(found, Held(), batch).reason == READS_BATCH
    assert record(lambda m, b: found(m, b) + 1, Held(), batch).reason == READS_BATCH
    assert record(lambda m, b: b["x"], Held(), batch).reason == ""


def test_a_part_of_wider_batches_that_is_all_of_narrow_ones_is_noticed_in_the_trial() -> None:
    narrow, wide = ({"x": torch.arange(2 * width).view(2, width)} for width in (3, 25))
    compute: Compute = lambda m, b: b["x"][:, :20]  # noqa: E731
    assert record(compute, Held(), narrow).needs_trial
    assert agreed(try_out(compute, Held(), [narrow, narrow, wide])) == []
    narrow_rank = try_out(compute, Held(), [narrow, narrow, narrow])
    assert agreed(narrow_rank, try_out(compute, Held(), [wide, wide, wide])) == []
