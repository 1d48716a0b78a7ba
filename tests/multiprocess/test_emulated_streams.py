"""Pipelined runs on emulated CUDA streams."""

from itertools import pairwise
from typing import Any

import pytest
from torch.optim import SGD, Adagrad, Adam

from tests.support.emulated_fits import (
    FORWARD,
    STEP,
    STEPS,
    Deaf,
    DeclaredBags,
    JaggedBatches,
    PlainBags,
    Sequences,
    found_in,
)
from tests.support.ranks import run_each_on_ranks

CASES: dict[str, tuple[Any, ...]] = {
    "an EmbeddingBagCollection, table- and row-wise": (found_in, Deaf, SGD, "table_wise", "row_wise"),
    "column-wise and table-row-wise": (found_in, Deaf, Adam, "column_wise", "table_row_wise"),
    "an EmbeddingCollection": (found_in, Sequences, Adam, "", "row_wise"),
    "a KeyedJaggedTensor in the batch": (found_in, JaggedBatches, Adagrad, "", "column_wise"),
    "computed ids of an nn.EmbeddingBag": (found_in, PlainBags, SGD, "", "row_wise"),
    "sparse updates, clipped": (found_in, Deaf, SGD, "table_wise", "row_wise", "sparse", 0.1),
    "declared ids, and a new dict for each batch": (found_in, DeclaredBags, SGD, "", "row_wise"),
}
LEARNED = {"computed ids of an nn.EmbeddingBag": 5}
"""Steps that are looked at before ids are sent ahead; 1 for others."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What was found on each rank in each case."""
    return run_each_on_ranks(CASES, 2)


ON_HOST = ("cluster/consensus.py", "optimizers/joint_steps.py", "optimizer_step <", "computed/late_comparison.py")
"""Not of a GPU: these tensors are in the host's memory, such as Adam's step counts."""
OF_IDS = ("batch_check.py", "_compat/torchrec_ids.py", "start_exchange", "lookup/ids_exchange.py")
"""One for each lookup's ids, and those of torchrec's own pipeline: for sizes, before and after they are exchanged."""


def test_no_stream_uses_memory_of_another_too_early_or_too_late(found: Any) -> None:
    for of_rank in found:
        for name, (hazards, _, ahead) in of_rank.items():
            assert hazards == [], name
            assert ahead == f"{STEPS - LEARNED.get(name, 1)} of {STEPS} lookups", name


def test_the_host_queues_the_forward_before_it_waits_for_sizes(found: Any) -> None:
    for of_rank in found:
        for name, (_, waits, _) in of_rank.items():
            for step in steady_steps(waits):
                sizes = [i for i, (_, what, where) in enumerate(step) if what == "tolist" and "send_ids" in where]
                assert min(sizes) > step.index(FORWARD), name


def steady_steps(waits: list[Any]) -> list[list[Any]]:
    """Return the waits of each step but the first ones, in which inputs are learned, and the last ones."""
    begins = [i for i, wait in enumerate(waits) if wait == STEP]
    return [waits[begin:end] for begin, end in pairwise(begins)][5:-1]


def test_the_host_waits_where_it_is_known_only(found: Any) -> None:
    # docs/how_to/gpus.md lists these.
    for name, (_, waits, _) in found[0].items():
        for step in steady_steps(waits):
            for stream, what, where in step:
                known = ON_HOST if stream == "step" else OF_IDS
                assert not what or any(place in where for place in known), (name, stream, what, where)
