"""`lightning-distrec plan`: what it answers, its exit codes, and what it says where something is
wrong."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec.cli import main as cli
from lightning_distrec.sharding.planning.plan_file import load_plan
from tests.support.advised_models import Advised

Run = Callable[..., tuple[int, str, str]]
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


class Plain(Huge):
    """Has an nn.Embedding, too."""

    def configure_model(self) -> None:
        self.users = nn.Embedding(self.rows, 16)
        nn.init.xavier_uniform_(self.users.weight)


class Batched(Huge):
    """Is told its batch size."""

    def __init__(self, batch_size: int = 96) -> None:
        super().__init__(1_000_000)


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
        config = {
            "model": {"class_path": package + model},
            "data": {"class_path": package + "NoData"},
            "trainer": {"accelerator": "gpu", "devices": 8, "num_nodes": 4, "strategy": strategy}
            | trainer,
        }
        Path("job.yaml").write_text(yaml.safe_dump(config))
        capsys.readouterr()
        code = cli.main(["plan", "--config", "job.yaml", *args])
        return (code, *capsys.readouterr())

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


def test_an_embedding_of_configure_model_is_planned_with_what_ranks_need_while_they_start(
    run: Run,
) -> None:
    code, text, _ = run("Plain", "--accelerator", "cpu", *GB80, "--quick", "--json")
    report = json.loads(text)
    full = 10**10 * 16 * 4
    assert (code, report["table_bytes"]) == (0, full)
    start = report["ranks"]["host_bytes_at_start"]
    assert sum(start["configure_model"]) == full
    assert start["__init__"] == [full + start["configure_model"][0], *[full] * 31]
    _, text, _ = run("Plain", "--accelerator", "cpu", *GB80, "--quick")
    words = (
        "rank starts: 18.6 GiB if configure_model builds them; if __init__ does, 614.7 GiB on "
        "rank 0, 596.0 GiB on"
    )
    assert words in " ".join(text.split())
    assert (report["open_files_per_rank"], report["process_bytes_per_node"]) == (
        5 * 32 + 256,
        8 * 300 << 20,
    )
    assert (report["sockets_per_node"], report["store_requests_per_rank"]) == (
        8 * 3 * 32,
        25 + 14 * 32,
    )
    words = (
        "Processes: 2.3 GiB of host memory a node before any data; a rank opens up to 416 files, "
        "most of them sockets "
        "to other ranks (`ulimit -n`), a node 768 sockets; a rank starts with some 473 requests "
        "to rank 0's store."
    )
    assert words in " ".join(text.split())


def test_tables_in_groups_are_planned_for_one_group(run: Run) -> None:
    for interval, expected in (
        (1, "gradients of rows at each step"),
        (100, "averaged once in 100 steps"),
    ):
        groups = _torchrec(sharding_groups={"size": 16, "sync_interval": interval})
        code, text, _ = run("Batched", *GB80, "--save-plan", "plan.json", strategy=groups)
        assert code == 0
        text = " ".join(text.split())
        assert "on 32 ranks on 4 nodes" in text
        assert "Between groups: " in text
        assert expected in text
        assert "was not searched for: sharding_groups fixes the ranks" in text
        assert load_plan("plan.json").num_ranks == 16
    code, _, message = run("Batched", *GB80, strategy=_torchrec(sharding_groups={"size": 5}))
    assert code != 0
    assert "size=5 does not divide the 32 ranks" in message


def test_the_batch_size_is_that_of_the_yaml_unless_one_is_given(run: Run) -> None:
    for args, strategy, expected in (
        ([], "torchrec_sharded", (96, "batch_size of the YAML")),
        ([], _torchrec(batch_size_per_rank=32), (32, "batch_size_per_rank")),
        (["--batch-size", "7"], "torchrec_sharded", (7, "--batch-size")),
    ):
        report = json.loads(run("Batched", *GB80, "--quick", "--json", *args, strategy=strategy)[1])
        assert report["planned_with"][0] == ["examples per rank", str(expected[0]), expected[1]]
        assert report["batch_size_per_rank"] == expected[0]


def test_layers_without_tables_count_and_are_reserved_where_they_need_more_than_the_default(
    run: Run,
) -> None:
    report = json.loads(run("Batched", *GB80, "--quick", "--json")[1])
    # parameters and gradients; SGD keeps nothing
    assert report["ranks"]["dense_bytes"] == 2 * 4 * (4 * 4 + 4)
    parts = report["ranks"]["memory_bytes_by_part"]
    assert sum(map(sum, parts.values())) == sum(report["ranks"]["memory_bytes"])
    code, text, _ = run("Batched", "--device-memory", "500B", "--quick")
    assert code == 1
    assert "160 B reserved (what layers without tables need, more than 15%)" in " ".join(
        text.split()
    )


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


def test_it_prints_one_screen_and_writes_the_page(run: Run) -> None:
    code, text, _ = run("Huge", *GB80, "--nodes", "4", "--html", "plan.html", "--quick")
    assert code == 0
    assert text.startswith("FITS: 3 tables of 596.0 GiB on 32 ranks on 4 nodes, 512 examples per")
    rows = "memory for tables;... rows;... exchange and cache;usable memory;layers without tables;"
    for row in (rows + "estimated time;sent: ids;sent to other").split(";"):
        assert row in text
    line = " ".join(text.split())
    for sentence in (
        "512 examples per rank (assumed), 74.5 GiB per rank (--device-memory), 15% reserved",
        "one id per example and feature is assumed for 3 tables without pooling_factor",
        "15% of a rank is reserved for them and for layers without tables (default), whatever the",
        "--quick: the largest batch and the minimum number of nodes were not searched for",
    ):
        assert sentence in line
    assert "3 tables over 32 ranks on 4 nodes: all tables fit" in Path("plan.html").read_text()


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


def test_tables_may_lie_in_the_hosts_memory_where_it_is_given_how_much_there_is(run: Run) -> None:
    args = ["--device-memory", "40GB", "--nodes", "1", "--quick", "--json"]
    assert run("Huge", *args)[0] == 1
    code, text, _ = run("Huge", *args, "--host-memory", "2TB")
    assert code == 0
    assert sum(json.loads(text)["ranks"]["host_memory_bytes"]) > 300 * GB


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
    assert "cannot be measured without ranks: torchrec's defaults are used" in assumed
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
