"""Jobs of jobs.py, drawn at random by hypothesis."""

from dataclasses import replace
from typing import Any

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.jobs import CUTS, FUSED, OPTIMIZERS, Collection, Feature, Job, Table


def _rarely(value: Any, otherwise: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([otherwise] * 3 + [value])


@st.composite
def _feature(draw: st.DrawFn) -> Feature:
    longest, distinct = draw(
        st.sampled_from([(3, 1000), (3, 1000), (1, 1000), (5, 2), (12, 1), (12, 3)])
    )
    if draw(_rarely(True, False)):
        return Feature(longest, True, distinct)
    empty = draw(st.sampled_from(["never", "never", "never", "always", "odd steps", "rank 0"]))
    return Feature(longest, False, distinct, empty)


@st.composite
def _table(
    draw: st.DrawFn,
    kind: str,
    features: tuple[int, ...],
    optimizer: str,
    fuses: bool,
    calls: int,
    half: bool,
) -> Table:
    cuts = CUTS if kind in ("bags", "nn.EmbeddingBag") else CUTS[:3]
    if optimizer.startswith("RowWise"):
        cuts = tuple(cut for cut in cuts if "column" not in cut)
    rows = draw(st.integers(1, 70) | st.integers(1, 6))
    sampled = draw(st.lists(st.sampled_from(cuts), max_size=2, unique=True))
    sampled = ["data_parallel"] if "data_parallel" in sampled else sampled
    if rows < 4:
        sampled = [cut for cut in sampled if "row_wise" not in cut]
    # Adagrad in backward on request refuses several lookups of one table in a step.
    is_summed = (
        calls > 1 or (kind.startswith("nn.") and len(features) > 1)
    ) and "Adagrad" in optimizer
    updates = ["auto", "auto", "auto", "dense"] if is_summed else [None, None, "auto", "dense"]
    if optimizer in FUSED and "data_parallel" not in sampled:
        updates += ["fused"] if fuses and not is_summed else []
        updates += [] if optimizer.startswith("RowWise") or half else ["sparse"]
    return Table(
        rows=rows,
        dim=4 * draw(st.integers(1, 6)),
        features=features,
        mean=draw(st.booleans()),
        frozen=draw(st.sampled_from([""] * 6 + ["requires_grad", "no optimizer"])),
        cuts=tuple(sampled),
        min_partition=draw(st.sampled_from([None, 4, 4, 8])),
        update="dense" if sampled == ["data_parallel"] else draw(st.sampled_from(updates)),
    )


@st.composite
def _collection(draw: st.DrawFn, num_features: int, optimizer: str, fuses: bool) -> Collection:
    kind = draw(st.sampled_from(["bags", "bags", "rows", "nn.Embedding", "nn.EmbeddingBag"]))
    plain = kind.startswith("nn.")
    calls, half = draw(_rarely(2, 1)), draw(_rarely(True, False))
    tables = tuple(
        draw(_table(kind, tuple(features), optimizer, fuses, calls, half))
        for features in draw(
            st.lists(
                st.lists(st.integers(0, num_features - 1), min_size=1, max_size=2, unique=True),
                min_size=1,
                max_size=1 if plain else 3,
            )
        )
    )
    weighted = kind in ("bags", "nn.EmbeddingBag") and not half and draw(_rarely(True, False))
    if weighted or kind in ("rows", "nn.Embedding"):
        tables = tuple(replace(table, mean=False) for table in tables)
    if kind == "rows":  # torchrec wants one dim in all tables of an EmbeddingCollection
        tables = tuple(replace(table, dim=tables[0].dim) for table in tables)
    return Collection(
        kind=kind,
        tables=tables,
        weighted=weighted,
        keys="own" if plain else draw(st.sampled_from(["own", "own", "all", "turning"])),
        padding_idx=draw(_rarely(tables[0].rows - 1, None)) if plain else None,
        calls=calls,
        half=half,
    )


@st.composite
def a_job(draw: st.DrawFn, num_ranks: int) -> Job:
    """Draw a job that mostly is not refused."""
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    accumulate = draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    clips = [("norm", 0.1), ("norm", 0.02), ("value", 0.02), ("value", 0.001)]
    clip = draw(st.sampled_from([None] * 5 + clips))
    fuses = accumulate == 1 and clip is None
    steps = draw(st.integers(1, 5))
    size = st.sampled_from([1, 2, 5, 8])
    equal = draw(st.booleans())
    sizes = [
        [draw(size)] * num_ranks if equal else [draw(size) for _ in range(num_ranks)]
        for _ in range(steps)
    ]
    features = draw(st.lists(_feature(), min_size=1, max_size=4))
    collections = draw(
        st.lists(_collection(len(features), optimizer, fuses), min_size=1, max_size=3)
    )
    losses = ["mean", "sum", "rank_mean"]
    if all(collection.kind == "nn.Embedding" for collection in collections):
        losses.remove("mean")  # nothing tells how many examples there are
    updates = ["auto"] * 4 + (["fused"] if fuses and optimizer in FUSED else [])
    return Job(
        sizes=tuple(map(tuple, sizes)),
        features=tuple(features),
        collections=tuple(collections),
        optimizer=optimizer,
        groups=draw(st.booleans()),
        update=draw(st.sampled_from(updates)),
        accumulate=accumulate,
        clip=clip,
        precision=draw(_rarely("bf16-mixed", "32-true")),
        loss=draw(st.sampled_from(losses)),
        decay=draw(_rarely(0.7, None)),
        draws_anew=all(c.padding_idx is None for c in collections) and draw(_rarely(True, False)),
        seed=draw(st.integers(0, 1_000_000)),
        # torch's DTensor cannot do what torchrec's own optimizers of dense weights do; a step then
        # says so.
        dense="ddp" if optimizer.startswith("RowWise") else draw(_rarely("fsdp", "ddp")),
        keeps_weights=draw(st.booleans()),
        drift=draw(st.sampled_from([None] * 11 + [steps - 1])) if num_ranks > 1 else None,
    )


def jobs_of(num_ranks: int, count: int, first_seed: int) -> list[Job]:
    """Return the first `count` jobs that are drawn; always the same ones for one seed."""
    jobs: list[Job] = []

    @seed(first_seed + num_ranks)
    @settings(
        max_examples=6 * count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(a_job(num_ranks))
    def collect(job: Job) -> None:
        # Half of what hypothesis draws are examples before with a small part replaced.
        if len(jobs) < count and all(
            job.seed != o.seed and job.collections != o.collections for o in jobs
        ):
            jobs.append(job)

    collect()
    return jobs
