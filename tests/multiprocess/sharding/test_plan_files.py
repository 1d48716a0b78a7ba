"""A plan is saved, read by people, changed, and followed: on real ranks, with the numbers of an
unsharded run."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
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
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2})
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


def _fit_and_save(folder: str) -> dict[str, Any]:
    tables = {
        "wide": {"sharding_types": ["column_wise"], "min_partition": 4},
        "narrow": {"sharding_types": ["row_wise"]},
    }
    fit(save=f"{folder}/file.ckpt", tables=tables, one_file=True)
    return fit(
        logger=CSVLogger(folder, name="logs", version=0), save=f"{folder}/it.ckpt", tables=tables
    )


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
    return followed


def test_a_saved_plan_is_followed_bit_by_bit_from_logs_and_checkpoints(tmp_path: Path) -> None:
    first = run_on_warm_ranks(_fit_and_save, 2, str(tmp_path))
    assert _plans_below(tmp_path) == ["it.ckpt/plan.json", "logs/version_0/plan.json"]
    log, checkpoint = load_plan(tmp_path / "logs" / "version_0"), load_plan(tmp_path / "it.ckpt")
    assert log == checkpoint
    assert {name: table.sharding_type for name, table in log.tables.items()}[
        "ebc.wide"
    ] == "column_wise"
    for expected, actual in zip(first, run_on_warm_ranks(_follow, 2, str(tmp_path)), strict=True):
        assert actual.pop("resumed")["plan"] != expected["plan"]
        assert actual.pop("resumed by its plan")["plan"] == expected["plan"]
        requests = "set 1 to follow the plan of ckpt_path, or 0."
        assert actual.pop("refused") == f"ConfigError: FORCE_LOAD_SHARDING_PLAN=yes: {requests}"
        for mode, is_equal in actual.items():
            assert is_equal["plan"] == expected["plan"], mode
            assert is_equal["losses"] == expected["losses"], mode
            assert all(
                torch.equal(is_equal["state"][key], value)
                for key, value in expected["state"].items()
            ), mode


def _follow_on_other_ranks(folder: str) -> list[Any]:
    os.environ[OF_CHECKPOINT] = "1"
    fits = [fit(ckpt_path=f"{folder}/it.ckpt", max_steps=STEPS)]
    fits.append(
        fit(ckpt_path=f"{folder}/it.ckpt", max_steps=STEPS, cuts=["table_wise", "row_wise"])
    )
    del os.environ[OF_CHECKPOINT]
    return [{name: table.sharding_type for name, table in each["plan"].items()} for each in fits]


def test_on_other_ranks_tables_keep_the_sharding_types_of_a_checkpoint(tmp_path: Path) -> None:
    run_on_warm_ranks(_fit_and_save, 2, str(tmp_path))
    types, limited_types = run_on_warm_ranks(_follow_on_other_ranks, 1, str(tmp_path))[0]
    assert types == {
        "ebc.wide": "column_wise",
        "ebc.narrow": "row_wise",
        "ebc.shared": "table_wise",
    }
    assert limited_types == {
        "ebc.wide": "table_wise",
        "ebc.narrow": "row_wise",
        "ebc.shared": "table_wise",
    }


def _follow_with_little_memory(folder: str) -> str:
    planning = {"plan_file": f"{folder}/logs/version_0/plan.json", "reserve": "15%"}
    return refusal(planning, memory_bytes=2000, folder=folder)


def test_a_file_whose_tables_do_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_on_warm_ranks(_fit_and_save, 2, str(tmp_path))
    for message in run_on_warm_ranks(_follow_with_little_memory, 2, str(tmp_path)):
        assert message.startswith("InfeasiblePlanError: "), message
        assert " KiB for its tables (rows, gradients, optimizer state), but has 1.7 KiB" in message


def test_the_plan_in_a_checkpoint_is_listed_verified_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_on_warm_ranks(_fit_and_save, 2, str(tmp_path))
    path = tmp_path / "it.ckpt"
    marker = json.loads((path / "complete.json").read_text())
    assert marker["files"]["plan.json"] == (path / "plan.json").stat().st_size
    assert verify(path) == []
    assert main(["checkpoint", "inspect", str(path)]) == EXIT_OK
    assert (
        f"plan       plan.json, for planning={{'plan_file': '{path}'}}" in capsys.readouterr().out
    )
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


def _fit_table_wise(folder: str) -> dict[str, Any]:
    return fit(logger=CSVLogger(folder, name="logs", version=0), cuts=["table_wise"])


def _follow_changed(file: str) -> dict[str, Any]:
    actual = {
        "SGD": fit({"plan_file": file}),
        "Adagrad": fit({"plan_file": file}, optimizer=ADAGRAD),
    }
    module, rank = seeded(ClickModel, *SGD), rank_and_num_ranks()[0]
    make_trainer({"sharding_types": ["table_wise"]}).fit(module, rank_loader(2, rank))
    make_trainer({"planning": {"plan_file": file}}).fit(
        module, rank_loader(STEPS - 2, rank, first=2)
    )
    actual["moved"] = {"plan": sharded_tables_of(module).plan, "state": module.final_state}
    return actual


def test_a_file_changed_by_hand_is_followed_and_trains_as_unsharded(tmp_path: Path) -> None:
    run_on_warm_ranks(_fit_table_wise, 2, str(tmp_path))
    content = json.loads((tmp_path / "logs" / "version_0" / "plan.json").read_text())
    _change(content)
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content, indent=4))
    expected = load_plan(changed)
    plain = {
        name: train_unsharded(seeded(ClickModel, *optimizer), STEPS, 2).final_state
        for name, optimizer in (("SGD", SGD), ("Adagrad", ADAGRAD), ("moved", SGD))
    }
    ranks = run_on_warm_ranks(_follow_changed, 2, str(changed))
    for name, state in plain.items():
        # rank 0 has the whole tables
        assert max(largest_difference(ranks[0][name]["state"], state).values()) < 1e-5
    for actual in ranks:
        for run_values in actual.values():
            assert run_values["plan"] == expected.for_torchrec([torch.device("cpu")] * 2)


def _refusals(folder: str, other_values: str, four_values: str) -> dict[str, str]:
    gone = f"{folder}/gone.json"
    return {
        "other model": refusal({"plan_file": other_values}, folder=folder),
        "other ranks": refusal({"plan_file": four_values}, folder=folder),
        "gone": refusal({"plan_file": gone}, folder=folder),
    }


def test_a_file_of_another_model_or_number_of_ranks_fails_on_every_rank_before_training(
    tmp_path: Path,
) -> None:
    run_on_warm_ranks(_fit_table_wise, 2, str(tmp_path / "two"))
    file = tmp_path / "two" / "logs" / "version_0" / "plan.json"
    content = json.loads(file.read_text())
    tables = content["tables"]
    tables["ebc.wyde"] = tables.pop("ebc.wide")
    tables["ebc.narrow"]["rows"] += 1
    tables["ebc.narrow"]["shards"][0]["sizes"][0] += 1
    other_values, four_values = tmp_path / "other.json", tmp_path / "four.json"
    other_values.write_text(json.dumps(content))
    four_values.write_text(
        json.dumps({**json.loads(file.read_text()), "num_ranks": 4, "ranks_per_node": 4})
    )
    folder = tmp_path / "refused"
    for actual in run_on_warm_ranks(_refusals, 2, str(folder), str(other_values), str(four_values)):
        assert actual["other model"].startswith(
            f"PlanError: plan_file='{other_values}' does not suit this run:\n"
        )
        assert (
            "table 'ebc.wyde' is in the plan only; did you mean 'ebc.wide'?"
            in actual["other model"]
        )
        assert (
            "table 'ebc.narrow' is 38 x 8 FP32 in the plan, 37 x 8 FP32 in the module"
            in actual["other model"]
        )
        assert "it is for 4 ranks, and there are 2" in actual["other ranks"]
        assert actual["gone"].startswith(
            f"ConfigError: the plan {folder}/gone.json cannot be read: No such file"
        )
    assert _plans_below(folder) == []
    assert not list(folder.rglob("*.ckpt"))


def _follow_alone(folder: str) -> dict[str, Any]:
    """Each rank has a file system of its own, as far as this file goes."""
    os.chdir(f"{folder}/{rank_and_num_ranks()[0]}")
    return fit({"plan_file": "plan.json"})


def test_a_file_that_only_rank_0_sees_is_followed_by_all(tmp_path: Path) -> None:
    run_on_warm_ranks(_fit_table_wise, 2, str(tmp_path))
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    shutil.copy(tmp_path / "logs" / "version_0" / "plan.json", tmp_path / "0" / "plan.json")
    expected = load_plan(tmp_path / "0").for_torchrec([torch.device("cpu")] * 2)
    assert all(
        actual["plan"] == expected for actual in run_on_warm_ranks(_follow_alone, 2, str(tmp_path))
    )


def _evaluate(folder: str, plan_file: str) -> dict[str, Any]:
    """Fits and evaluations of all kinds, each with a folder of its own."""
    rank = rank_and_num_ranks()[0]

    def trainer(name: str, planning: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
        options = {
            "logger": CSVLogger(folder, name=name, version=0),
            "default_root_dir": f"{folder}/{name}",
        } | options
        return make_trainer({"planning": planning, "checkpoint": {"distributed": True}}, **options)

    actual = {}
    for name, options in {
        "no logger": {"logger": False},
        "fast": {"fast_dev_run": True},
        "two fits": {},
    }.items():
        fits = trainer(name, **options)
        model = seeded(EvaluatedModel, *SGD)
        fits.fit(model, rank_loader(2, rank), rank_loader(1, rank))
        fits.fit(model, rank_loader(2, rank), rank_loader(1, rank))
        fits.save_checkpoint(f"{folder}/{name}/it.ckpt")
    for name in ("validate", "test", "predict"):
        model = seeded(EvaluatedModel, *SGD)
        getattr(trainer(name, {"plan_file": plan_file}), name)(model, rank_loader(2, rank))
        actual[name] = sharded_tables_of(model).plan
    return actual


def test_only_fits_with_a_logger_save_plans_and_evaluations_follow_them(tmp_path: Path) -> None:
    run_on_warm_ranks(_fit_table_wise, 2, str(tmp_path))
    file = tmp_path / "logs" / "version_0" / "plan.json"
    content = json.loads(file.read_text())
    table = content["tables"]["ebc.wide"]
    whole = table["shards"][0]
    table |= {
        "sharding_type": "data_parallel",
        "compute_kernel": "dense",
        "shards": [{**whole, "rank": rank} for rank in (0, 1)],
    }
    file.write_text(json.dumps(content))
    folder = tmp_path / "runs"
    for actual in run_on_warm_ranks(_evaluate, 2, str(folder), str(file)):
        for name, plan in actual.items():
            followed = {
                table: plan[table].sharding_spec.shards[0].placement.rank() for table in plan
            }
            expected = {name: t.shards[0].rank for name, t in load_plan(file).tables.items()}
            assert followed | {"ebc.wide": 0} == expected, name
            assert plan["ebc.wide"].sharding_type == "table_wise", name
    assert _plans_below(folder) == [
        "fast/it.ckpt/plan.json",
        "no logger/it.ckpt/plan.json",
        "two fits/it.ckpt/plan.json",
        "two fits/version_0/plan.json",
    ]


def _fit_where_the_disk_refuses(folder: str) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        actual = fit(logger=CSVLogger(folder, name="logs", version=0), steps=2)
    return {"losses": actual["losses"], "said": [str(warning.message) for warning in message]}


def test_a_folder_that_cannot_be_written_is_a_warning_that_names_the_file(tmp_path: Path) -> None:
    selected = tmp_path / "logs" / "version_0" / "plan.json"
    selected.mkdir(parents=True)
    actual = run_on_warm_ranks(_fit_where_the_disk_refuses, 2, str(tmp_path))
    message = (
        f"the plan is not saved: {selected} cannot be written (Is a directory). Training continues"
    )
    assert any(text.startswith(message) for text in actual[0]["said"]), actual[0]["said"]
    assert all(len(rank_result["losses"]) == 2 for rank_result in actual)
