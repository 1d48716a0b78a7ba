"""Prefetching on emulated CUDA streams."""

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
    Unfreezing,
    found_in,
    found_in_torchrecs_pipeline,
)
from tests.support.ranks import run_each_on_ranks

CASES: dict[str, tuple[Any, ...]] = {
    "an EmbeddingBagCollection, table- and row-wise": (found_in, Deaf, SGD, "table_wise", "row_wise"),
    "column-wise and table-row-wise": (found_in, Deaf, Adam, "column_wise", "table_row_wise"),
    "an EmbeddingCollection, row-wise": (found_in, Sequences, Adam, "", "row_wise"),
    "an EmbeddingCollection, table-wise": (found_in, Sequences, SGD, "", "table_wise"),
    "an EmbeddingCollection, column-wise": (found_in, Sequences, Adam, "", "column_wise"),
    "a KeyedJaggedTensor in the batch": (found_in, JaggedBatches, Adagrad, "", "column_wise"),
    "computed ids of an nn.EmbeddingBag": (found_in, PlainBags, SGD, "", "row_wise"),
    "computed ids, and Adam": (found_in, PlainBags, Adam, "", "table_wise"),
    "declared ids, and a new dict for each batch": (found_in, DeclaredBags, SGD, "", "row_wise"),
    "sparse updates, clipped": (found_in, Deaf, SGD, "table_wise", "row_wise", "sparse", 0.1),
    "a layer that is unfrozen": (found_in, Unfreezing, SGD, "", "row_wise"),
}
LEARNED = {name: 5 for name in CASES if name.startswith("computed ids")}
"""Steps that are looked at before ids are sent ahead; 1 for others."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What was found on each rank in each case."""
    return run_each_on_ranks(CASES | {TORCHRECS: (found_in_torchrecs_pipeline,)}, 2)


@pytest.fixture(scope="module")
def ours(found: Any) -> list[dict[str, Any]]:
    """Those of our own prefetching."""
    return [{name: of_rank[name] for name in CASES} for of_rank in found]


IDS = "stream 3"
ON_HOST = ("cluster/consensus.py", "optimizers/joint_steps.py", "optimizer_step <")
"""Not of a GPU: these tensors are in the host's memory, such as Adam's step counts."""
OF_IDS = {
    "sharding/calls.py": 1,  # extremes and numbers of the ids of the lookup
    "__init__ < lookup/ids_exchange.py": 1,  # how many go to each rank; row-wise tables
    " < _compat/torchrec_ids.py": 2,  # how many come from each rank, and from how large a batch
    "_wait_impl < lookup/ids_exchange.py": 1,  # how many have come for each feature
}
"""What the host waits for on the ids' stream, and how often in a step with one lookup: as docs/performance.md says."""
TORCHRECS = "torchrec's own pipeline"


def test_no_stream_uses_memory_of_another_too_early_or_too_late(ours: Any) -> None:
    for of_rank in ours:
        for name, (hazards, _, ahead) in of_rank.items():
            assert hazards == [], name
            assert ahead == f"{STEPS - LEARNED.get(name, 1)} of {STEPS} lookups", name


def test_the_host_queues_the_forward_before_it_waits_for_sizes(ours: Any) -> None:
    num_waits = 0
    for of_rank in ours:
        for name, (_, waits, _) in of_rank.items():
            for step in steady_steps(waits):
                sizes = [i for i, (_, what, where) in enumerate(step) if what == "tolist" and "send_ids" in where]
                num_waits += len(sizes)  # none on the short path
                assert all(i > step.index(FORWARD) for i in sizes), name
    assert num_waits


def steady_steps(waits: list[Any]) -> list[list[Any]]:
    """Return the waits of each step but the first ones, in which inputs are learned, and the last ones."""
    begins = [i for i, wait in enumerate(waits) if wait == STEP]
    steps = [waits[begin:end] for begin, end in pairwise(begins)]
    return steps[6:-3]


def test_the_host_waits_where_it_is_known_only(ours: Any) -> None:
    for name, (_, waits, _) in ours[0].items():
        assert len(steady_steps(waits)) >= 2
        for step in steady_steps(waits):
            of_ids = [where for stream, what, where in step if what and stream == IDS]
            others = [wait for wait in step if wait[1] and wait[0] != IDS]
            for stream, what, where in others:
                assert stream == "step", (name, stream, what, where)
                assert any(place in where for place in ON_HOST), (name, what, where)
            for place, limit in OF_IDS.items():
                assert len([where for where in of_ids if where_of(where) == place]) <= limit, (name, of_ids)
            assert None not in map(where_of, of_ids), (name, of_ids)


def where_of(where: str) -> str | None:
    """Return the key of OF_IDS for a place."""
    return next((place for place in OF_IDS if place in where), None)


def test_the_host_waits_less_often_for_ids_than_in_torchrecs_own_pipeline(found: Any) -> None:
    theirs = [[what for _, what, _ in step].count("tolist") for step in found[0][TORCHRECS][6:-3]]
    _, waits, _ = found[0]["a KeyedJaggedTensor in the batch"]
    ours = [[stream for stream, what, _ in step if what].count(IDS) for step in steady_steps(waits)]
    assert max(ours) == 4
    assert min(theirs) == 7
