"""Runs of Lightning's loops as plain data, drawn at random by hypothesis."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.jobs import _Plain
from tests.support.prefetched_faults import Fails
from tests.support.prefetched_model import ComputesIds, DeclaresIds, Watched, sized, unsized
from tests.support.prefetched_runs import Seen, seen_by
from tests.support.ranks import rank_and_num_ranks

MODELS: dict[str, type] = {"parts": Watched, "computed": ComputesIds, "declared": DeclaresIds}
PLACES = ("before lookups", "after lookups", "batch start", "batch end", "validation")
CUTS = (None, "table_wise", "row_wise", "column_wise")


@dataclass(frozen=True, repr=False)
class LoopJob(_Plain):
    """One fit, and the depth at which it is compared with depth 1."""

    depth: int
    train: tuple[int, ...]
    """Rank -> batches."""
    val: tuple[tuple[int, ...], ...] = ()
    """Loader, then rank -> batches."""
    train_sized: bool = True
    val_sized: tuple[bool, ...] = ()
    epochs: int = 1
    interval: int | None = None
    limit: int | None = None
    max_steps: int = -1
    accumulate: int = 1
    sanity: int = 0
    model: str = "parts"
    cut: str | None = None
    fails: tuple[str, int] | None = None
    """Where all ranks fail, and at which batch; or "transfer hook", where the last rank does."""

    @property
    def num_ranks(self) -> int:
        """Ranks that share the work."""
        return len(self.train)

    def run(self, depth: int) -> Seen:
        """Fit on this rank."""
        rank, num_ranks = rank_and_num_ranks()
        loaders = [
            (sized if is_sized else unsized)(lengths[rank], 500 + 50 * i)
            for i, (lengths, is_sized) in enumerate(zip(self.val, self.val_sized, strict=True))
        ]
        train = (sized if self.train_sized else unsized)(self.train[rank])
        strategy: dict[str, Any] = {"sharding_types": [self.cut] if self.cut else None}
        return seen_by(
            depth,
            lambda trainer, model: trainer.fit(model, train, loaders or None),
            model=self._model,
            strategy=strategy,
            catch=(Exception,),
            max_epochs=self.epochs,
            max_steps=self.max_steps,
            val_check_interval=self.interval,
            limit_train_batches=self.limit,
            accumulate_grad_batches=self.accumulate,
            num_sanity_val_steps=self.sanity,
        )

    def _model(self) -> Any:
        if self.fails is None:
            return MODELS[self.model]()
        place, batch_number = self.fails
        ranks = (self.num_ranks - 1,) if place == "transfer hook" else tuple(range(self.num_ranks))
        return Fails(place, batch_number, ranks)


@st.composite
def a_job(draw: st.DrawFn, num_ranks: int) -> LoopJob:
    """Draw a job."""
    few = st.integers(1, 6)
    equal = draw(st.booleans())

    def lengths() -> tuple[int, ...]:
        return (draw(few),) * num_ranks if equal else tuple(draw(few) for _ in range(num_ranks))

    train = lengths()
    val = tuple(lengths() for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))))
    places = st.sampled_from([*PLACES[: 5 if val else 4], "transfer hook"])
    fails = draw(st.none() | st.none() | st.tuples(places, st.integers(0, 4)))
    if fails is not None and fails[0] == "validation":
        fails = ("validation", 500 + fails[1])
    job = LoopJob(
        depth=draw(st.sampled_from([2, 3, 3, 4])),
        train=train,
        val=val,
        train_sized=draw(st.booleans()),
        val_sized=tuple(draw(st.booleans()) for _ in val),
        epochs=draw(st.integers(1, 3)),
        interval=draw(st.none() | st.integers(1, min(train))) if val else None,
        limit=draw(st.none() | st.integers(1, 5)),
        max_steps=draw(st.sampled_from([-1, -1, 1, 4, 7])),
        accumulate=draw(st.sampled_from([1, 1, 1, 2])),
        sanity=draw(st.sampled_from([0, 0, 2])),
        model="parts" if fails else draw(st.sampled_from(list(MODELS))),
        cut=draw(st.sampled_from(CUTS)),
        fails=fails,
    )
    if job.interval is not None and job.limit is not None and job.interval > job.limit:
        job = replace(job, interval=job.limit)
    return job


def jobs_of(num_ranks: int, count: int, first_seed: int) -> list[LoopJob]:
    """Return the first `count` different jobs that are drawn; always the same ones for one seed."""
    jobs: list[LoopJob] = []

    @seed(first_seed + num_ranks)
    @settings(
        max_examples=6 * count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(a_job(num_ranks))
    def collect(job: LoopJob) -> None:
        if len(jobs) < count and job not in jobs:
            jobs.append(job)

    collect()
    return jobs
