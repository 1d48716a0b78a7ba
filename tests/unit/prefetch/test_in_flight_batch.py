"""On a GPU a lookup is begun when its batch is drawn, and prepared once, when the batch has
arrived."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_distrec.prefetch.in_flight_batch import PrefetchedLookup
from lightning_distrec.prefetch.sources import BatchRoots


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_host_does_not_wait_for_a_batch_that_was_just_drawn(on_gpu: bool) -> None:
    prepared: list[Any] = []

    def prepare(begun: Any) -> str:
        prepared.append(begun)
        return "request"

    table = SimpleNamespace(
        on_gpu=on_gpu, begin=lambda arguments: f"{len(arguments)} begun", prepare=prepare
    )
    call: Any = SimpleNamespace(path="table", get=lambda roots: (torch.ones(2),))
    lookup = PrefetchedLookup(call, table, BatchRoots(None))
    assert prepared == ([] if on_gpu else ["1 begun"])
    for _ in range(2):
        lookup.finish_preparing()
        assert lookup.request == "request"
    assert prepared == ["1 begun"]
