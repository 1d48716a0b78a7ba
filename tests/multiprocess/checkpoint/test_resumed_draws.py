"""What hooks draw before a resumed run trains is what they drew in the run that never stopped, and
so on to its end."""

import warnings
from functools import partial
from typing import Any

import pytest

from lightning_distrec import TorchRecShardedStrategy
from tests.support.drawing_runs import Drawing, Noisy, SavesAt, Splitting, Streaming, WithTable, fit
from tests.support.parameters import slow_except
from tests.support.ranks import run_on_warm_ranks

STRATEGIES: dict[str, tuple[type[Noisy], Any]] = {
    "ddp_tuned": (Noisy, lambda: "ddp_tuned"),
    "torchrec_sharded": (WithTable, lambda: TorchRecShardedStrategy(convert_embeddings="all")),
    "fsdp_tuned": (Noisy, lambda: "fsdp_tuned"),
    "pipeline_parallel": (Noisy, lambda: "pipeline_parallel"),
}
MIDDLE, END = ("batch", 7), ("epoch", 6)
CASES: dict[str, tuple[tuple[str, int], Any, dict[str, Any]]] = {
    "in an epoch": (MIDDLE, Drawing, {}),
    "between epochs": (END, Drawing, {}),
    "validated later": (END, Drawing, {"check_val_every_n_epoch": 3}),
    "validated in an epoch": (MIDDLE, Drawing, {"val_check_interval": 3}),
    "reloaded, in an epoch": (MIDDLE, Drawing, {"reload_dataloaders_every_n_epochs": 1}),
    "reloaded, between epochs": (END, Drawing, {"reload_dataloaders_every_n_epochs": 2}),
    "workers": (END, partial(Drawing, {"num_workers": 1}), {}),
    "a stream and max_steps": (END, Streaming, {"max_steps": 35, "max_epochs": -1}),
}
USUAL = ("between epochs", "reloaded, in an epoch")


def _resume(
    strategy: str, case: str, folder: str, seed: int | None = 5
) -> tuple[list[Any], list[Any], list[str]]:
    """Return what the module saw after the checkpoint, what it saw in the resumed run, and warnings
    of that one."""
    (hook, num_batches), data, settings = CASES[case]
    kind, make_strategy = STRATEGIES[strategy]
    settings = {"kind": kind, "seed": seed, **settings}
    saves = SavesAt(f"{folder}/{case}.ckpt", hook, num_batches)
    never_stopped = fit(make_strategy(), data(), saves, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(make_strategy(), data(), ckpt_path=saves.path, **settings)
    return (
        never_stopped.seen[saves.num_seen :],
        resumed.seen,
        [str(warning.message) for warning in caught],
    )


def _resume_each(strategy: str, cases: list[str], folder: str) -> dict[str, Any]:
    return {case: _resume(strategy, case, folder) for case in cases}


def _check(strategy: str, cases: list[str], folder: Any) -> None:
    for outcomes in run_on_warm_ranks(_resume_each, 2, strategy, cases, str(folder)):
        for case, (expected, actual, _) in outcomes.items():
            assert len(expected) > 5, case
            assert actual == expected, case


@pytest.mark.parametrize("strategy", slow_except(["torchrec_sharded"], STRATEGIES))
def test_hooks_draw_as_in_the_run_that_never_stopped(strategy: str, tmp_path: Any) -> None:
    _check(strategy, list(USUAL), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_draw_as_before_however_often_loaders_are_made_and_validation_runs(
    strategy: str, tmp_path: Any
) -> None:
    _check(strategy, [case for case in CASES if case not in USUAL], tmp_path)


def _resume_unseeded(folder: str) -> dict[str, Any]:
    cases = {"setup draws": Drawing, "loaders draw": Splitting}
    outcomes = {}
    for name, data in cases.items():
        CASES[name] = (MIDDLE, data, {})
        outcomes[name] = _resume("ddp_tuned", name, folder, seed=None)
    return outcomes


def test_draws_of_setup_that_no_seed_repeats_are_reported_and_those_of_loaders_repeated(
    tmp_path: Any,
) -> None:
    for rank, outcomes in enumerate(run_on_warm_ranks(_resume_unseeded, 2, str(tmp_path))):
        reports = {
            name: [text for text in texts if "prepare_data or setup drew random numbers" in text]
            for name, (_, _, texts) in outcomes.items()
        }
        assert len(reports["setup draws"]) == (rank == 0)
        assert reports["loaders draw"] == []
        expected, actual, _ = outcomes["loaders draw"]
        assert [ids for kind, ids, *_ in actual if kind == "train"] == [
            ids for kind, ids, *_ in expected if kind == "train"
        ]
