"""Which rank holds the others up, by what all report."""

from dataclasses import replace

from lightning_distrec.cluster.verdicts import Judge, RankState, Verdict

JUDGE = Judge(["a", "a", "b"], silence_seconds=3.0, deadlock_seconds=60.0)
RUNS = [RankState(rank, started=1, location="x.py:1", progress="batch 1") for rank in range(3)]
NONE = Verdict(RUNS[0])
ENDED = [replace(state, ended=1) for state in RUNS]
CASES = {
    "all run": (RUNS, ""),
    "one is gone": ([*RUNS[:2], replace(RUNS[2], is_gone=True)], "rank 2 on b has died"),
    "one is gone, and the others do not need it": (
        [*ENDED[:2], replace(ENDED[2], is_gone=True)],
        "",
    ),
    "one has left between two runs, the others go on": (
        [
            replace(RUNS[0], started=2, ended=1),
            replace(RUNS[1], started=2, ended=1),
            replace(ENDED[2], is_gone=True),
        ],
        "rank 2 on b has died",
    ),
    "one is silent": (
        [RUNS[0], replace(RUNS[1], is_silent=True), RUNS[2]],
        "rank 1 on a has been silent for 3 s: it is stopped, or in one call that holds",
    ),
    "one has failed": (
        [RUNS[0], RUNS[1], replace(RUNS[2], failed=1, failure="ValueError: no")],
        "rank 2 on b failed: ValueError: no",
    ),
    "one was killed, another failed because of it": (
        [
            RUNS[0],
            replace(RUNS[1], failed=1, failure="RuntimeError: closed"),
            replace(RUNS[2], is_gone=True),
        ],
        "rank 2 on b has died",
    ),
    "one has failed, another repeats that and is gone": (
        [
            RUNS[0],
            replace(RUNS[1], failed=1, is_gone=True),
            replace(RUNS[2], failed=1, failure="ValueError: no"),
        ],
        "rank 2 on b failed: ValueError: no",
    ),
    "one goes on with another run after a failure that it caught": (
        [replace(RUNS[0], started=2, failed=1, failure="ValueError: no"), RUNS[1], RUNS[2]],
        "rank 0 on a failed: ValueError: no",
    ),
    "all but one have ended after a collective that it did not make": (
        [RUNS[0], *(replace(state, failed=1, is_gone=True) for state in RUNS[1:])],
        "rank 1 on a has ended after a failed collective",
    ),
    "all wait, each for the others": (
        [
            replace(state, is_stuck=True, progress=f"exchanges {min(state.rank, 1)}")
            for state in RUNS
        ],
        "ranks wait in different exchanges for 60 s: rank 0 on a: exchanges 0, x.py:1; ranks 1, "
        "2: exchanges 1, x.py:1",
    ),
    "all wait in one exchange": ([replace(state, is_stuck=True) for state in RUNS], ""),
    "one takes long, and the others wait for it": (
        [*(replace(state, is_stuck=True, progress="exchanges 1") for state in RUNS[:2]), RUNS[2]],
        "",
    ),
    "one is not watched any more": (
        [*RUNS[:2], replace(RUNS[2], is_closed=True, is_gone=True)],
        "",
    ),
}


LEAVING = [replace(state, failed=1, is_leaving=True) for state in RUNS]
CASES_OF_LEAVING = {
    "all are leaving": (LEAVING, ""),
    "one is gone": ([*LEAVING[:2], replace(RUNS[2], is_gone=True)], "rank 2 on b has died"),
    "one has failed and is gone": (
        [*LEAVING[:2], replace(LEAVING[2], failure="ValueError: no", is_gone=True)],
        "rank 2 on b failed: ValueError: no",
    ),
    "one has failed and is leaving too": (
        [*LEAVING[:2], replace(LEAVING[2], failure="ValueError: no")],
        "",
    ),
    "one is gone, and the others have left": (
        [
            *(replace(state, is_leaving=False) for state in LEAVING[:2]),
            replace(RUNS[2], is_gone=True),
        ],
        "",
    ),
}


def test_who_holds_ranks_up_that_are_leaving() -> None:
    for case, (states, expected) in CASES_OF_LEAVING.items():
        verdict = JUDGE.judge(states, NONE)
        assert verdict.leaving.startswith(expected), case
        assert bool(verdict.leaving) == bool(expected), case
        assert verdict.running == "", "none of them is running"


def test_who_holds_the_others_up() -> None:
    for case, (states, expected) in CASES.items():
        verdict = JUDGE.judge(states, NONE)
        assert verdict.running.startswith(expected), case
        assert bool(verdict.running) == bool(expected), case


def test_the_first_reason_stays_while_ranks_end_for_it() -> None:
    silent = JUDGE.judge([*RUNS[:2], replace(RUNS[2], is_silent=True)], NONE)
    assert silent.running.startswith("rank 2 on b has been silent")
    one_has_ended = [RUNS[0], replace(RUNS[1], is_gone=True), replace(RUNS[2], is_silent=True)]
    assert JUDGE.judge(one_has_ended, silent).running == silent.running
    assert JUDGE.judge(RUNS, silent).running == "", "it was stopped for a moment"


def test_rank_zero_looks_at_each_rank_a_few_times() -> None:
    """It judges several times a second, beside its own steps."""

    class Counted(RankState):
        looks = 0

        def __getattribute__(self, name: str) -> object:
            Counted.looks += 1
            return super().__getattribute__(name)

    for num_ranks in (64, 256):
        ranks = [Counted(rank, started=1) for rank in range(num_ranks)]
        Counted.looks = 0
        assert JUDGE.judge(ranks, NONE).running == ""
        assert Counted.looks < 50 * num_ranks
