"""`lightning-distrec plan`: what it answers, its exit codes, and what it says where something is
wrong."""

import json
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec.cli import main as cli
from lightning_distrec.sharding.planning.plan_file import load_plan
from tests.support.advised_models import Advised
from tests.support.command import Run, run_command, write_config

GB = 10**9
GB80 = ("--device-memory", "80GB")


class Huge(pl.LightningModule):
    """Tables that no machine has memory for: ten billion rows, and some thousands."""

    def __init__(self, rows: int = 10**10) -> None:
        super().__init__()
        self.rows = rows
        self.bags: EmbeddingBagCollection | None = None
        self.layer = nn.Linear(4, 4)

    def configure_model(self) -> None:
        if self.bags is None:
            sizes = {"huge": self.rows, "days": 4_096, "films": 5_000}
            self.bags = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=name,
                        num_embeddings=rows,
                        embedding_dim=16,
                        feature_names=[f"of_{name}"],
                    )
                    for name, rows in sizes.items()
                ]
            )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class NeedsTrainer(Huge):
    """Its learning rate goes by the number of steps."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1 / self.trainer.estimated_stepping_batches)


class Layered(Advised):
    """No tables."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class ReadsNumbers(nn.Module):
    """Looks at a number of its own while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.size = int(torch.arange(4).sum())


class BuiltFromNumbers(Huge):
    """Has a layer that cannot be built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = ReadsNumbers()


class ConfiguredFromNumbers(Huge):
    """Builds that layer later."""

    def configure_model(self) -> None:
        self.reader = ReadsNumbers()


class NoData(pl.LightningDataModule):
    """Data that must not be looked at."""

    def __init__(self) -> None:
        super().__init__()
        raise AssertionError("the data was built")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function of a model and arguments that runs the command; exit code, stdout,
    stderr."""
    monkeypatch.chdir(tmp_path)
    for variable in ("INTRA_NODE_BANDWIDTH", "CROSS_NODE_BANDWIDTH", "STORAGE_RESERVE_PERCENT"):
        monkeypatch.delenv(variable, raising=False)

    def run_plan(
        model: str, *args: str, strategy: Any = "torchrec_sharded", **trainer: Any
    ) -> tuple[int, str, str]:
        package = "tests.unit.cli.test_plan_command."
        usual = {"accelerator": "gpu", "devices": 8, "num_nodes": 4, "strategy": strategy}
        write_config(package + model, package + "NoData", usual | trainer)
        return run_command(capsys, "plan", "--config", "job.yaml", *args)

    return run_plan


def _torchrec(**options: Any) -> dict[str, Any]:
    return {"class_path": "lightning_distrec.TorchRecShardedStrategy", "init_args": options}


def test_tables_of_ten_billion_rows_are_planned_without_memory_for_them(
    run: Run, tmp_path: Path
) -> None:
    earlier_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, text, _ = run("Huge", *GB80, "--quick", "--json", "--save-plan", "plans/plan.json")
    report = json.loads(text)
    assert code == 0
    assert report["fits"] is True
    assert report["table_bytes"] == (10**10 + 4_096 + 5_000) * 16 * 4
    assert sum(report["ranks"]["memory_bytes"]) > report["table_bytes"]
    assert max(report["ranks"]["memory_bytes"]) <= 80 * GB * 0.85
    assert (
        len(report["ranks"]["milliseconds"]) == report["num_nodes"] * report["ranks_per_node"] == 32
    )
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - earlier_bytes) * 1024 < GB
    assert load_plan(tmp_path / "plans" / "plan.json").num_ranks == 32


def test_the_batch_and_the_nodes_are_as_far_as_plans_go(run: Run) -> None:
    report = json.loads(run("Huge", *GB80, "--json")[1])
    batch, nodes = report["largest_batch"], report["min_nodes"]
    assert (nodes["fits"], batch["ended_early"], nodes["ended_early"]) == (2, None, None)
    assert batch["fits"] > 512
    assert run("Huge", *GB80, "--quick", "--batch-size", str(batch["fits"]))[0] == 0
    code, text, _ = run("Huge", *GB80, "--quick", "--batch-size", str(batch["does_not_fit"]))
    assert code == 1
    assert batch["why_not"][:60] in " ".join(text.split())


def test_tables_that_do_not_fit_are_no_trouble_and_how_few_nodes_would_do_is_reported(
    run: Run,
) -> None:
    code, text, error = run("Huge", *GB80, "--nodes", "1", "--html", "plan.html")
    assert code == 1
    assert text.startswith("DOES NOT FIT: 3 tables of 596.0 GiB on 8 ranks on 1 node, 512 examples")
    assert "table 'bags.huge'" in text
    assert "Minimum nodes of 8 ranks: 2; 1 does not fit: table 'bags.huge'" in text
    assert "there is no plan, so no file was written." in error
    assert not Path("plan.html").exists()


def test_the_options_of_the_strategy_count_and_those_of_the_command_line_more(run: Run) -> None:
    strategy = _torchrec(
        memory_bytes_per_rank=70 * GB,
        batch_size_per_rank=64,
        tables={"huge": {"sharding_types": ["row_wise"], "pooling_factor": 3}},
        planning={
            "reserve": "10%",
            "bandwidths": {"cross_node": "30GB/s", "intra_node": "400GB/s"},
        },
    )
    report = json.loads(
        run("Huge", "--quick", "--json", "--save-plan", "plan.json", strategy=strategy)[1]
    )
    origins = {name: (value, origin) for name, value, origin in report["planned_with"]}
    assert (report["batch_size_per_rank"], report["memory_bytes_per_rank"]) == (64, 70 * GB)
    assert origins["reserved for all but tables"] == ("10%", "argument")
    assert origins["cross_node"] == ("30.0 GB/s", "argument")
    assert load_plan("plan.json").tables["bags.huge"].sharding_type == "row_wise"
    assert "one id per example and feature is assumed for 2 tables" in " ".join(report["assumed"])
    args = [
        "--batch-size",
        "128",
        "--device-memory",
        "40GB",
        "--reserve",
        "5GB",
        "--bandwidth",
        "cross_node=25GB/s",
    ]
    report = json.loads(run("Huge", "--quick", "--json", *args, strategy=strategy)[1])
    origins = {name: (value, origin) for name, value, origin in report["planned_with"]}
    assert (report["batch_size_per_rank"], report["memory_bytes_per_rank"]) == (128, 40 * GB)
    assert origins["reserved for all but tables"] == ("4.7 GiB", "argument")
    assert origins["cross_node"] == ("25.0 GB/s", "--bandwidth")
    assert origins["intra_node"] == ("400.0 GB/s", "argument")


def test_what_was_assumed_is_reported(run: Run) -> None:
    memory = (*GB80, "--quick", "--json")
    report = json.loads(run("NeedsTrainer", "--nodes", "8", *memory)[1])
    assert (
        "configure_optimizers failed without a Trainer (RuntimeError: NeedsTrainer is not "
        "attached to" in str(report)
    )
    assert sum(report["ranks"]["memory_bytes"]) > 3 * report["table_bytes"]
    adagrad = _torchrec(
        table_optimizer={"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}}
    )
    report = json.loads(run("NeedsTrainer", "--nodes", "8", *memory, strategy=adagrad)[1])
    assert "configure_optimizers failed" not in str(report)
    assert sum(report["ranks"]["memory_bytes"]) < 1.1 * report["table_bytes"]
    assumed = str(json.loads(run("Huge", *memory, strategy="ddp")[1])["assumed"])
    assert "the strategy is ddp: the plan is for torchrec_sharded with its defaults" in assumed
    options = _torchrec(planning={"bandwidths": "measure", "estimate_pooling": 3})
    assumed = str(json.loads(run("Huge", *memory, strategy=options)[1])["assumed"])
    assert "cannot be measured without ranks: defaults are used" in assumed
    assert (
        "planning.estimate_pooling: no data is read, so ids per example are not counted" in assumed
    )
    assumed = str(json.loads(run("Huge", *memory, accelerator="auto")[1])["assumed"])
    assert "accelerator: auto is " in assumed


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("Huge", ("--nodes", "0"), "--nodes 0: must be at least 1."),
        ("Huge", (), "plan: this machine has no GPU to ask for its memory. Give it: --device-mem"),
        ("Huge", ("--device-memory", "80QB"), "--device-memory '80QB': A size above 0 is needed"),
        ("Huge", ("--host-memory", "much"), "--host-memory 'much': A size above 0 is needed"),
        ("Huge", ("--bandwidth", "25GB/s"), "--bandwidth 25GB/s: a name and a value are needed"),
        ("Huge", ("--bandwidth", "cross=1GB/s"), "'cross' is not known; did you mean 'cross_node'?"),
        ("Huge", ("--bandwidth", "cross_node=1Gb/s"), "cross_node=1Gb/s: A bandwidth above 0"),
        ("Huge", (*GB80, "--reserve", "15"), "planning.reserve='15' has no unit."),
        ("Layered", GB80, "plan: nothing to plan: Layered has no embedding tables that torchrec"),
        ("BuiltFromNumbers", GB80, "where it takes no memory: ReadsNumbers.__init__, test_plan_com"),
        ("ConfiguredFromNumbers", GB80, "a Trainer (ReadsNumbers.__init__, test_plan_command.py:"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_reported_in_one_line(
    run: Run, model: str, args: tuple[str, ...], message: str
) -> None:
    code, out, error = run(model, *args)
    assert (code, out) == (2, "")
    last = error.splitlines()[-1]
    assert last.startswith("lightning-distrec: ")
    assert message in last
    assert cli.main(["plan"]) == 2  # without --config
