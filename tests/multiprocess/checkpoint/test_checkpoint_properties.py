"""Any small job, drawn at random, goes on from its checkpoint on any ranks with any plan as if it
had never stopped.

DISTREC_CHECKPOINT_PAIRS is the number of jobs that are saved and go on elsewhere,
DISTREC_PROPERTY_SEED where drawing starts. A pair that fails is printed as Python;
`check([Pair(...)])` runs it again, alone.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import DistRecError
from tests.support.click_model import NO_OUTPUT
from tests.support.drawn_jobs import _table, a_job
from tests.support.job_runs import JobModel, Outcome, make_batch, table_options
from tests.support.jobs import FUSED, Collection, Feature, Job, Table, _Plain
from tests.support.limits import at_most
from tests.support.plain_checkpoints import plain_checkpoint
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks

PAIRS = int(os.environ.get("DISTREC_CHECKPOINT_PAIRS", "3"))
SEED = int(os.environ.get("DISTREC_PROPERTY_SEED", "0"))
PARTS = 12
"""Parts of each global batch, which 1, 2, 3 or 4 ranks share: a job's `sizes` are those of its
parts."""
RANKS = (1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4)
"""More of those that are fast on a machine with few cores."""
AT_ONCE = 15
"""Runs that are made one after the other by the same ranks."""


@dataclass(frozen=True, repr=False)
class Pair(_Plain):
    """A job, and what is changed about it when it goes on after some epochs."""

    job: Job
    num_ranks: int
    second: Job
    """The same job with other plans and updates."""
    then_ranks: int
    epochs: int = 1
    """Those before it is saved; as many follow as make 3."""
    one_file: bool = False
    whole: bool = False
    """Whether nn.Embedding and nn.EmbeddingBag are not sharded afterwards."""


class _Model(JobModel):
    """The model of a job, which may have no sharded tables."""

    def on_train_start(self) -> None:
        if self.trainer.strategy.run_tables is not None:
            super().on_train_start()


@st.composite
def _changed(
    draw: st.DrawFn, table: Table, collection: Collection, optimizer: str, fuses: bool
) -> Table:
    """Draw another cut and update of a table."""
    other = draw(
        _table(collection.kind, table.features, optimizer, fuses, collection.calls, collection.half)
    )
    cuts = tuple(cut for cut in other.cuts if table.rows >= 4 or "row_wise" not in cut)
    # torchrec wants one width of columns in all tables of an EmbeddingCollection.
    columns = None if collection.kind == "rows" else other.min_partition
    return replace(table, cuts=cuts, min_partition=columns, update=other.update)


@st.composite
def a_pair(draw: st.DrawFn) -> Pair:
    """Draw a job that mostly is not refused."""
    # A hook that draws tables at the start of a fit would do so in the one that resumes, too.
    job = replace(draw(a_job(PARTS)), draws_anew=False)
    if job.loss == "rank_mean":  # the mean of other ranks' means is another one
        job = replace(job, loss="sum")
    # Optimizers keep their state in 16 bits there, and FBGEMM in 32.
    job = replace(job, collections=tuple(replace(c, half=False) for c in job.collections))
    num_ranks, then_ranks = draw(st.sampled_from(RANKS)), draw(st.sampled_from(RANKS))
    if num_ranks != then_ranks:  # 16 bits round what other batches add up to in another way
        job = replace(job, precision="32-true")
    fuses = job.accumulate == 1 and job.clip is None
    collections = tuple(
        replace(
            c, tables=tuple(draw(_changed(table, c, job.optimizer, fuses)) for table in c.tables)
        )
        for c in job.collections
    )
    updates = ["auto"] * 4 + (["fused"] if fuses and job.optimizer in FUSED else [])
    return Pair(
        job=job,
        num_ranks=num_ranks,
        second=replace(job, collections=collections, update=draw(st.sampled_from(updates))),
        then_ranks=then_ranks,
        epochs=draw(st.integers(1, 2)),
        one_file=draw(st.booleans()) and draw(st.booleans()),
        # Without any sharded table the strategy is DDP, whose gradients are those of means.
        whole=draw(st.booleans()) and any(not c.kind.startswith("nn.") for c in collections),
    )


def pairs_of(count: int, first_seed: int) -> list[Pair]:
    """Return the first `count` pairs that are drawn; always the same ones for one seed."""
    pairs: list[Pair] = []

    @seed(first_seed)
    @settings(
        max_examples=6 * count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(a_pair())
    def collect(pair: Pair) -> None:
        if len(pairs) < count and all(
            pair.job.seed != o.job.seed and pair.job.collections != o.job.collections for o in pairs
        ):
            pairs.append(pair)

    collect()
    return pairs


def _batch_of_rank(job: Job, step: int) -> dict[str, Tensor]:
    rank, num_ranks = rank_and_num_ranks()
    local = range(rank * PARTS // num_ranks, (rank + 1) * PARTS // num_ranks)
    parts = [make_batch(job, step, part) for part in local]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _train(pair: Pair, folder: str, goes_on: bool) -> Outcome:
    """Collective. Train for 3 epochs, or those that follow the checkpoint; the state at the end is
    saved too."""
    job = pair.second if goes_on else pair.job
    plain = [
        name for name, table in job.tables().items() if "." not in name.removeprefix("collections.")
    ]
    options = {
        name: sampled
        for name, sampled in table_options(job).items()
        if not (goes_on and pair.whole and name in plain)
    }
    torch.manual_seed(job.seed)
    model = _Model(job)
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    try:
        trainer = pl.Trainer(
            strategy=TorchRecShardedStrategy(
                job.update,  # type: ignore[arg-type]
                "none" if goes_on and pair.whole else "all",
                tables=options,  # type: ignore[arg-type]
                loss_reduction=job.loss,
                checkpoint={"distributed": not pair.one_file},
            ),
            accelerator="cpu",
            devices=rank_and_num_ranks()[1],
            max_epochs=3,
            use_distributed_sampler=False,
            precision=job.precision,
            accumulate_grad_batches=job.accumulate,
            gradient_clip_algorithm=job.clip[0] if job.clip else None,
            gradient_clip_val=job.clip[1] if job.clip else None,
            num_sanity_val_steps=0,
            callbacks=[keep],
            **NO_OUTPUT | {"enable_checkpointing": True},
        )
        batches: Any = DataLoader(
            [_batch_of_rank(job, step) for step in range(len(job.sizes))], batch_size=None
        )
        trainer.fit(
            model, batches, ckpt_path=f"{folder}/epoch={pair.epochs - 1}.ckpt" if goes_on else None
        )
    except DistRecError as error:
        if model.begun or "CheckpointError" in type(error).__name__:
            raise
        return Outcome(refused=f"{type(error).__name__}: {error}")
    trainer.save_checkpoint(f"{folder}/{'then' if goes_on else 'first'}.ckpt")
    return model.outcome


def _train_all(pairs: list[tuple[int, Pair]], folder: str, goes_on: bool) -> None:
    """Train one pair after the other; rank 0 leaves each outcome in the folder, for what comes
    after may fail."""
    for index, pair in pairs:
        outcome = _train(pair, f"{folder}/{index}", goes_on)
        if rank_and_num_ranks()[0] == 0:
            torch.save(outcome, f"{folder}/unfinished")
            os.replace(f"{folder}/unfinished", f"{folder}/{index} {goes_on}.pt")


def _outcomes(pairs: Sequence[tuple[int, Pair]], folder: str, goes_on: bool) -> dict[int, Outcome]:
    """Return what became of each pair, by its number; where a rank raised or hung, those after go
    on in new ranks."""
    outcomes: dict[int, Outcome] = {}
    for num_ranks in (1, 2, 3, 4):
        todo = [(i, p) for i, p in pairs if (p.then_ranks if goes_on else p.num_ranks) == num_ranks]
        while todo:
            current, failed = todo[:AT_ONCE], ""
            try:
                run_on_ranks(
                    _train_all,
                    num_ranks,
                    current,
                    folder,
                    goes_on,
                    timeout_seconds=at_most(len(current)),
                )
            except RankFailed as error:
                failed = str(error)
            done = [i for i, _ in current if Path(f"{folder}/{i} {goes_on}.pt").exists()]
            outcomes |= {
                i: torch.load(f"{folder}/{i} {goes_on}.pt", weights_only=False) for i in done
            }
            if failed:
                culprit = current[len(done)][0] if len(done) < len(current) else done[-1]
                outcomes[culprit] = Outcome(failed=failed)
            todo = [(i, p) for i, p in todo if i not in outcomes]
    return outcomes


def _too_far(actual: Any, expected: Any, place: str, limit: float) -> list[str]:
    """Return where tensors or numbers in nested dicts differ, or what one of them does not have."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        missing = [f"{place}: only one has {key}" for key in actual.keys() ^ expected.keys()]
        return missing + [
            message
            for key in actual.keys() & expected.keys()
            for message in _too_far(actual[key], expected[key], f"{place} {key}", limit)
        ]
    if not isinstance(expected, Tensor):
        return [] if actual == expected else [f"{place} is {actual}, not {expected}"]
    if actual.shape != expected.shape:
        return [f"{place} is {tuple(actual.shape)}, not {tuple(expected.shape)}"]
    off = float((actual - expected).abs().max()) if expected.numel() else 0.0
    allowed = limit * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    return [] if off <= allowed else [f"{place} is off by {off}, where {allowed:.1e} is allowed"]


def problems_of(pair: Pair, first: Outcome, second: Outcome, folder: str) -> list[str]:
    """Return what is wrong: weights or optimizers' state at the end that the run that never stopped
    does not have."""
    if failed := first.failed or second.failed:
        return [failed]
    if first.refused or second.refused:
        return []
    limit = (
        1e-3
        if pair.job.precision == "bf16-mixed"
        else 1e-6
        if pair.job.optimizer.startswith("SGD")
        else 1e-5
    )
    if pair.job.loss == "sum":
        # steps are as many times larger as a batch has examples: 2.7e-6 was seen with SGD
        limit = max(limit, 1e-5)
    expected, actual = (plain_checkpoint(f"{folder}/{index}.ckpt") for index in ("first", "then"))
    problems = _too_far(actual["state_dict"], expected["state_dict"], "state", limit)
    for a, b in zip(actual["optimizer_states"], expected["optimizer_states"], strict=True):
        # the numbers of a file are those of the groups, alike on both
        if pair.one_file is False or not pair.whole:
            state_a, state_b = ({n: s for n, s in state["state"].items() if s} for state in (a, b))
            problems += _too_far(state_a, state_b, "optimizer", limit)
    return problems


def check(pairs: list[Pair]) -> Counter[str]:
    """Run the pairs; return how many tables there were of each cut and update, and the next. Raises
    AssertionError."""
    seen: Counter[str] = Counter()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        first = _outcomes(list(enumerate(pairs)), folder, False)
        begun = [
            (i, p) for i, p in enumerate(pairs) if not first[i].failed and not first[i].refused
        ]
        second = _outcomes(begun, folder, True)
        for i, pair in enumerate(pairs):
            new = second.get(i, Outcome())
            refused = first[i].refused or new.refused
            seen.update(["refused " + refused.split(":")[0] if refused else "gone on"])
            if not pair.whole:
                seen.update(
                    f"{a} -> {b}" for a, b in zip(first[i].updates, new.updates, strict=False)
                )
            if message := problems_of(pair, first[i], new, f"{folder}/{i}"):
                problems.append(f"{pair}\n{first[i].updates} {new.updates}\n" + "\n".join(message))
    if problems:
        raise AssertionError(
            f"{len(problems)} of {len(pairs)} pairs are wrong:\n\n" + "\n\n".join(problems)
        )
    return seen


@pytest.mark.slow
def test_wrong_state_and_failed_ranks_are_reported() -> None:
    job = Job(
        ((2,) * PARTS,), (Feature(),), (Collection("bags", (Table(8, 4, (0,)),)),), optimizer="Adam"
    )
    right = Pair(job, 2, job, 1)
    broken = replace(right, second=replace(job, optimizer="an optimizer that does not exist"))
    forgets = replace(right, second=replace(job, optimizer="AdamW"))
    with pytest.raises(AssertionError, match="2 of 3 pairs are wrong:\n\nPair\\(.*") as warned:
        check([right, broken, forgets])
    assert "KeyError: 'an optimizer that does not exist'" in str(warned.value)
    assert "state mlp.0.weight is off by" in str(warned.value)


@pytest.mark.timeout(at_most(10 * PAIRS))
def test_any_job_goes_on_from_its_checkpoint_as_if_it_had_never_stopped() -> None:
    seen = check(pairs_of(PAIRS, SEED))
    print(", ".join(f"{count} {case}" for case, count in sorted(seen.items())))
    assert seen["gone on"] > PAIRS / 2
