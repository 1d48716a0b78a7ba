"""A plan is saved, read by people, changed, and followed: on real ranks, with the numbers of an
unsharded run."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_distrec.checkpoint.contents import verify
from lightning_distrec.cli.command_line import EXIT_OK
from lightning_distrec.cli.main import main
from lightning_distrec.errors import DistRecError
from lightning_distrec.serving.describe import describe
from lightning_distrec.sharding.planning.plan_file import load_plan
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from lightning_distrec.strategies.tables.plan_of_run import OF_CHECKPOINT
from tests.support.click_model import (
    ClickModel,
    EvaluatedModel,
    largest_difference,
    rank_loader,
    seeded,
    train_unsharded,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

SGD = (torch.optim.SGD, {"lr": 0.5})
STEPS = 4


def fit(
    planning: dict[str, Any] | None = None,
    optimizer: tuple[type, dict[str, Any]] = SGD,
    save: str | None = None,
    tables: dict[str, Any] | None = None,
    steps: int = STEPS,
    ckpt_path: str | None = None,
    cuts: list[str] | None = None,
    memory_bytes: int | None = None,
    one_file: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train on this rank; return the plan that was followed, the losses and the weights."""
    strategy = {
        "planning": planning,
        "tables": tables,
        "sharding_types": cuts,
        "memory_bytes_per_rank": memory_bytes,
    }
    strategy["checkpoint"] = {"distributed": not one_file}
    trainer = make_trainer(strategy, **options)
    module = seeded(ClickModel, *optimizer)
    trainer.fit(module, rank_loader(steps, rank_and_num_ranks()[0]), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "plan": sharded_tables_of(module).plan,
        "losses": module.losses,
        "state": module.final_state,
    }


def refusal(*args: Any, folder: str, **options: Any) -> str:
    """Return the error that a fit ends with before it trains; nothing is written."""
    logger = CSVLogger(folder, name="logs", version=0)
    try:
        fit(*args, logger=logger, default_root_dir=folder, **options)
    except DistRecError as error:
        # Other ranks say whose error it is.
        return f"{type(error).__name__}: {str(error).removeprefix('rank 0: ')}"
    return "it trained"


def _plans_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("plan.json"))


def _save_plans(folder: str) -> dict[str, Any]:
    """Fit and save in this folder, and, with whole tables, in "whole" below it."""
    tables = {
        "wide": {"sharding_types": ["column_wise"], "min_partition": 4},
        "narrow": {"sharding_types": ["row_wise"]},
    }
    fit(save=f"{folder}/file.ckpt", tables=tables, one_file=True)
    fit(logger=CSVLogger(f"{folder}/whole", name="logs", version=0), cuts=["table_wise"])
    return fit(
        logger=CSVLogger(folder, name="logs", version=0), save=f"{folder}/it.ckpt", tables=tables
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of plans that fits have saved, and what each rank's last fit has returned."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_on_warm_ranks(_save_plans, 2, str(folder))


def _whole_plan(saved: tuple[Path, Any]) -> Path:
    return saved[0] / "whole" / "logs" / "version_0" / "plan.json"


def _follow(folder: str) -> dict[str, Any]:
    file, checkpoint = f"{folder}/logs/version_0/plan.json", f"{folder}/it.ckpt"
    followed = {"by file": fit({"plan_file": file})}
    followed["by checkpoint"] = fit({"plan_file": checkpoint})
    followed["by a checkpoint that is one file"] = fit({"plan_file": f"{folder}/file.ckpt"})
    # a checkpoint of one plan goes on under another
    followed["resumed"] = fit(ckpt_path=checkpoint, max_steps=STEPS)
    os.environ[OF_CHECKPOINT] = "1"
    followed["resumed by its plan"] = fit(ckpt_path=checkpoint, max_steps=STEPS)
    os.environ[OF_CHECKPOINT] = "yes"
    followed["refused"] = refusal(folder=folder, ckpt_path=checkpoint, max_steps=STEPS)
    del os.environ[OF_CHECKPOINT]
    small = {"plan_file": file, "reserve": "15%"}
    followed["too small"] = refusal(small, memory_bytes=2000, folder=folder)
    followed["gone"] = refusal({"plan_file": f"{folder}/gone.json"}, folder=folder)
    return followed


def test_a_saved_plan_is_followed_bit_by_bit_from_logs_and_checkpoints(saved: Any) -> None:
    folder, first = saved
    assert (folder / "it.ckpt" / "plan.json").exists()
    log, checkpoint = load_plan(folder / "logs" / "version_0"), load_plan(folder / "it.ckpt")
    assert log == checkpoint
    assert log.tables["ebc.wide"].sharding_type == "column_wise"
    for expected, actual in zip(first, run_on_warm_ranks(_follow, 2, str(folder)), strict=True):
        assert actual.pop("resumed")["plan"] != expected["plan"]
        assert actual.pop("resumed by its plan")["plan"] == expected["plan"]
        requests = "set 1 to follow the plan of ckpt_path, or 0."
        assert actual.pop("refused") == f"ConfigError: FORCE_LOAD_SHARDING_PLAN=yes: {requests}"
        message = actual.pop("too small")
        assert message.startswith("InfeasiblePlanError: "), message
        assert " KiB for its tables (rows, gradients, optimizer state), but has 1.7 KiB" in message
        message = f"ConfigError: the plan {folder}/gone.json cannot be read: No such file"
        assert actual.pop("gone").startswith(message)
        for mode, is_equal in actual.items():
            assert is_equal["plan"] == expected["plan"], mode
            assert is_equal["losses"] == expected["losses"], mode
            for key, value in expected["state"].items():
                assert torch.equal(is_equal["state"][key], value), (mode, key)


def _follow_on_other_ranks(folder: str) -> list[Any]:
    os.environ[OF_CHECKPOINT] = "1"
    fits = [fit(ckpt_path=f"{folder}/it.ckpt", max_steps=STEPS)]
    fits.append(
        fit(ckpt_path=f"{folder}/it.ckpt", max_steps=STEPS, cuts=["table_wise", "row_wise"])
    )
    del os.environ[OF_CHECKPOINT]
    return [{name: table.sharding_type for name, table in each["plan"].items()} for each in fits]


def test_on_other_ranks_tables_keep_the_sharding_types_of_a_checkpoint(saved: Any) -> None:
    types, limited = run_on_warm_ranks(_follow_on_other_ranks, 1, str(saved[0]))[0]
    whole = {"ebc.narrow": "row_wise", "ebc.shared": "table_wise"}
    assert types == whole | {"ebc.wide": "column_wise"}
    assert limited == whole | {"ebc.wide": "table_wise"}


def test_the_plan_in_a_checkpoint_is_listed_verified_and_reported(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "it.ckpt"
    shutil.copytree(saved[0] / "it.ckpt", path)
    marker = json.loads((path / "complete.json").read_text())
    assert marker["files"]["plan.json"] == (path / "plan.json").stat().st_size
    assert verify(path) == []
    assert main(["checkpoint", "inspect", str(path)]) == EXIT_OK
    line = f"plan       plan.json, for planning={{'plan_file': '{path}'}}"
    assert line in capsys.readouterr().out
    content = (path / "plan.json").read_text()
    (path / "plan.json").write_text(content.replace('"rank": 0', '"rank": 1', 1))
    assert verify(path) == ["plan.json"]
    (path / "plan.json").write_text(content + " ")
    assert "plan.json has" in (describe(path).problem or "")


def _change(content: dict[str, Any]) -> None:
    """Move a table to the other rank, and cut the two others otherwise."""
    tables = content["tables"]
    rows, dim = tables["ebc.shared"]["rows"], tables["ebc.shared"]["dim"]
    (shared,) = tables["ebc.shared"]["shards"]
    shared["rank"] = 1 - shared["rank"]
    assert (rows, dim) == (11, 8)
    tables["ebc.wide"] |= {
        "sharding_type": "row_wise",
        "shards": [{"rank": r, "offsets": [30 * r, 0], "sizes": [30, 16]} for r in (0, 1)],
    }
    tables["ebc.narrow"] |= {
        "sharding_type": "column_wise",
        "shards": [{"rank": 1 - r, "offsets": [0, 4 * r], "sizes": [37, 4]} for r in (0, 1)],
    }


def _follow_changed(folder: str) -> list[dict[str, Any]]:
    """Follow a plan that rank 0 alone sees, from the start and after two steps of another."""
    os.chdir(f"{folder}/{rank_and_num_ranks()[0]}")
    planning = {"plan_file": "plan.json"}
    followed = fit(planning)
    module, rank = seeded(ClickModel, *SGD), rank_and_num_ranks()[0]
    make_trainer({"sharding_types": ["table_wise"]}).fit(module, rank_loader(2, rank))
    make_trainer({"planning": planning}).fit(module, rank_loader(STEPS - 2, rank, first=2))
    return [followed, {"plan": sharded_tables_of(module).plan, "state": module.final_state}]


def test_a_file_changed_by_hand_is_followed_by_all_and_trains_as_unsharded(
    saved: Any, tmp_path: Path
) -> None:
    content = json.loads(_whole_plan(saved).read_text())
    _change(content)
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0" / "plan.json").write_text(json.dumps(content, indent=4))
    plan = load_plan(tmp_path / "0").for_torchrec([torch.device("cpu")] * 2)
    expected = train_unsharded(seeded(ClickModel, *SGD), STEPS, 2).final_state
    first, second = run_on_warm_ranks(_follow_changed, 2, str(tmp_path))
    for run in first:
        assert max(largest_difference(run["state"], expected).values()) < 1e-5
    assert all(run["plan"] == plan for run in first + second)


def _evaluate(folder: str, plan_file: str) -> dict[str, Any]:
    """Fit with a folder that cannot be written, and without a logger; evaluate. Return warnings, and
    the plans that evaluations have followed."""
    rank = rank_and_num_ranks()[0]
    logger = CSVLogger(folder, name="logs", version=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(logger=logger, steps=2)
    fit(default_root_dir=folder, steps=2, save=f"{folder}/no logger.ckpt")
    actual: dict[str, Any] = {"warnings": " ".join(str(warning.message) for warning in caught)}
    for name in ("validate", "predict"):
        model = seeded(EvaluatedModel, *SGD)
        trainer = make_trainer({"planning": {"plan_file": plan_file}}, logger=logger)
        getattr(trainer, name)(model, rank_loader(2, rank))
        actual[name] = sharded_tables_of(model).plan
    return actual


def test_only_fits_with_a_logger_save_plans_and_evaluations_follow_them(
    saved: Any, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    content = json.loads(_whole_plan(saved).read_text())
    table = content["tables"]["ebc.wide"]
    whole = table["shards"][0]
    table |= {
        "sharding_type": "data_parallel",
        "compute_kernel": "dense",
        "shards": [{**whole, "rank": rank} for rank in (0, 1)],
    }
    file.write_text(json.dumps(content))
    folder = tmp_path / "runs"
    taken = folder / "logs" / "version_0" / "plan.json"
    taken.mkdir(parents=True)
    ranks = run_on_warm_ranks(_evaluate, 2, str(folder), str(file))
    message = f"the plan is not saved: {taken} cannot be written (Is a directory). Training cont"
    assert message in ranks[0]["warnings"]
    expected = {name: table.shards[0].rank for name, table in load_plan(file).tables.items()}
    for plan in [ranks[0]["validate"], ranks[1]["predict"]]:
        followed = {name: plan[name].sharding_spec.shards[0].placement.rank() for name in plan}
        assert followed | {"ebc.wide": 0} == expected
        # Nothing updates it: it is on one rank.
        assert plan["ebc.wide"].sharding_type == "table_wise"
    assert _plans_below(folder) == ["logs/version_0/plan.json", "no logger.ckpt/plan.json"]
