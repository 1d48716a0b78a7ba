"""Any small training job, drawn at random, gives sharded the weights that one unsharded process
gives, or is refused.

DISTREC_PROPERTY_JOBS is the number of jobs for each number of ranks, DISTREC_PROPERTY_SEED where
drawing starts. A job that fails is printed as Python; `check([Job(...)])` runs it again, alone.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.drawn_jobs import jobs_of
from tests.support.job_runs import Outcome, start, train_sharded, train_unsharded
from tests.support.jobs import Job
from tests.support.limits import at_most
from tests.support.parameters import slow_except
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks

JOBS = int(os.environ.get("DISTREC_PROPERTY_JOBS", "8"))
SEED = int(os.environ.get("DISTREC_PROPERTY_SEED", "0"))
AT_ONCE = 12
"""Jobs that run one after the other in the same ranks."""


def _train_all(jobs: list[Job], folder: str) -> None:
    """Train one job after the other; rank 0 leaves each outcome in the folder, for what comes after
    may fail."""
    for index, job in enumerate(jobs):
        outcome = train_sharded(job)
        if rank_and_num_ranks()[0] == 0:
            torch.save(outcome, f"{folder}/unfinished")
            os.replace(f"{folder}/unfinished", f"{folder}/{index}.pt")


def outcomes_of(jobs: list[Job]) -> list[Outcome]:
    """Return what became of each job; where a rank raised or hung, the jobs after go on in new
    ranks."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(jobs):
        todo = jobs[len(outcomes) :][:AT_ONCE]
        with tempfile.TemporaryDirectory() as folder:
            failed = ""
            try:
                run_on_ranks(
                    _train_all, todo[0].num_ranks, todo, folder, timeout_seconds=at_most(len(todo))
                )
            except RankFailed as error:
                failed = str(error)
            done = len(list(Path(folder).glob("*.pt")))
            outcomes += [torch.load(f"{folder}/{i}.pt", weights_only=False) for i in range(done)]
        if failed and done < len(todo):
            outcomes.append(Outcome(failed=failed))
        elif failed:
            outcomes[-1] = Outcome(
                failed=f"when all {done} jobs before and this one were done: {failed}"
            )
    return outcomes


def problem_of(job: Job, outcome: Outcome) -> str:
    """Return what is wrong with the outcome, or "" where it is that of one unsharded process, or a
    refusal."""
    if outcome.failed or outcome.refused:
        return outcome.failed
    if job.drift is not None:
        is_named = outcome.stopped.startswith("OptimizerError: 'lr' of param group")
        return "" if is_named else f"rates that have drifted apart are not named: {outcome.stopped}"
    with _one_thread():
        (expected, mean_loss), begun = train_unsharded(job), start(job).state_dict()
    if outcome.state.keys() != expected.keys():
        return f"the state has {sorted(outcome.state)}, not {sorted(expected)}"
    frozen = {name for name, table in job.tables().items() if table.frozen}
    is_half = job.precision == "bf16-mixed" or any(
        collection.half for collection in job.collections
    )
    limit = 3e-3 if is_half else 1e-6 if job.optimizer.startswith("SGD") else 1e-5
    problems = []
    if not abs(outcome.logged - mean_loss) <= 10 * limit * max(1.0, mean_loss):
        problems.append(f"the mean loss is logged as {outcome.logged}, not {mean_loss}")
    for key, value in expected.items():
        path = key.replace("embedding_bags.", "").replace("embeddings.", "").removesuffix(".weight")
        allowed = 0.0 if path in frozen else limit * max(1.0, float(value.abs().max()))
        actual = outcome.state[key]
        if actual.shape != value.shape or not float((actual - value).abs().max()) <= allowed:
            moved = float((value - begun[key]).abs().max())
            off = (
                float((actual - value).abs().max())
                if actual.shape == value.shape
                else tuple(actual.shape)
            )
            problems.append(
                f"{path} is off by {off}, where {allowed:.1e} is allowed and it moved "
                f"by {moved:.1e}"
            )
    return "\n".join(problems)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the ranks have: on a busy machine, threads that wait for each other take many times as
    long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(jobs: list[Job]) -> Counter[str]:
    """Run the jobs and return how many there were of each kind of update and cut. Raises
    AssertionError: one fails."""
    seen: Counter[str] = Counter()
    problems = []
    for job, outcome in zip(jobs, outcomes_of(jobs), strict=True):
        seen.update(outcome.updates or [outcome.refused.split(":")[0] or "failed"])
        seen.update(["refused" if outcome.refused else "stopped" if outcome.stopped else "trained"])
        if problem := problem_of(job, outcome):
            problems.append(f"{job}\n{outcome.updates}\n{problem}")
    if problems:
        raise AssertionError(
            f"{len(problems)} of {len(jobs)} jobs are wrong:\n\n" + "\n\n".join(problems)
        )
    return seen


@pytest.mark.timeout(at_most(10 * JOBS))
@pytest.mark.parametrize("num_ranks", slow_except([2], [1, 2, 3]))
def test_any_job_trains_to_the_weights_of_one_unsharded_process(num_ranks: int) -> None:
    seen = check(jobs_of(num_ranks, JOBS, SEED))
    print(num_ranks, "ranks:", ", ".join(f"{count} {name}" for name, count in sorted(seen.items())))
    assert seen["trained"] > seen["refused"]
