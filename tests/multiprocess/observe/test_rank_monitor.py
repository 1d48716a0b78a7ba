"""Rank 0 has what every rank measured: a rank that is slow is named, and the summary counts all
ranks."""

import json
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec import Communication, RankMonitor
from lightning_distrec.observe import rank_monitor
from tests.support.click_model import ClickModel, make_batch, seeded
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

STEPS, SLEEP_SECONDS = 12, 0.2


class Slow(ClickModel):
    """Rank 1 takes its time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if rank_and_num_ranks()[0] == 1:
            time.sleep(SLEEP_SECONDS)
        loss = super().training_step(batch, batch_idx)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


def _fit(folder: str, lost: bool) -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    monitor = RankMonitor(straggler_share=0.2, samples_from="label")
    if lost:
        rank_monitor.WAIT_SECONDS = 0.5
        if rank == 1:
            monitor._put = lambda *_: None  # type: ignore[method-assign]
    row_wise = {"sharding_types": ["row_wise"]}
    trainer = make_trainer(
        row_wise,
        callbacks=[monitor, Communication()],
        logger=CSVLogger(folder),
        log_every_n_steps=2,
        accumulate_grad_batches=2,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = seeded(Slow, torch.optim.SGD, {"lr": 0.1})
        trainer.fit(model, DataLoader([make_batch(rank)] * STEPS, batch_size=None))
    rank_monitor.WAIT_SECONDS = 60.0
    warned = [str(entry.message) for entry in caught]
    return {"summary": monitor.summary, "warned": warned, "losses": model.losses}


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("logs")
    calls = {name: (_fit, str(folder / name), name == "lost") for name in ("all", "lost")}
    return {"folder": folder, "ranks": run_each_on_ranks(calls, 2)}


def test_the_slow_rank_is_named_and_the_others_wait(actual: dict[str, Any]) -> None:
    summary = actual["ranks"][0]["all"]["summary"]
    assert summary["slowest_rank"] == 1
    assert summary["stragglers"] == [1]
    first, second = summary["by_rank"]
    assert second["own_ms"] - first["own_ms"] > 500 * SLEEP_SECONDS
    assert first["wait_ms"] > second["wait_ms"]
    assert first["step_ms"] == pytest.approx(second["step_ms"], rel=0.3)
    assert (
        sum(
            "rank 1 on" in text
            and "(node 0, local rank 1, cpu) took" in text
            and "took more time of its own" in text
            for text in actual["ranks"][0]["all"]["warned"]
        )
        == 1
    )
    assert actual["ranks"][1]["all"]["summary"] == {}


def test_the_summary_counts_all_ranks_and_is_written_beside_the_logs(
    actual: dict[str, Any],
) -> None:
    summary = actual["ranks"][0]["all"]["summary"]
    assert summary["ranks"] == 2
    assert summary["steps"] == STEPS
    samples = 2 * STEPS * make_batch(0)["label"].shape[0]
    seconds = max(row["step_ms"] for row in summary["by_rank"]) * STEPS / 1000
    assert summary["samples_per_second"] == pytest.approx(samples / seconds)
    assert sum(summary["ms_per_step"].values()) == pytest.approx(summary["step_ms"])
    losses = [loss for local in actual["ranks"] for loss in local["all"]["losses"]]
    assert summary["mean_loss"] == pytest.approx(mean(losses))
    assert 0 < summary["data_wait_share"] < 1
    assert summary["bytes_sent_per_step"]["rows"] > 0
    exchanges = summary["exchanges_per_step"]
    assert exchanges["rows"] == 1
    (node,) = summary["by_node"]
    assert (node["node"], node["ranks"]) == (0, [0, 1])
    assert node["samples_per_second"] == pytest.approx(summary["samples_per_second"])
    assert node["memory_bytes"]["process"] == sum(
        row["memory_bytes"]["process"] for row in summary["by_rank"]
    )
    for rank, row in enumerate(summary["by_rank"]):
        assert (row["rank"], row["node"], row["local_rank"], row["device"]) == (
            rank,
            0,
            rank,
            "cpu",
        )
        assert row["gpu_use"] is None
        assert not [name for name in row if name.startswith("device_")], "a CPU has no events"
        assert 0 < row["memory_bytes"]["process"] <= row["memory_bytes"]["process_peak"]
        assert 0 < row["host_cpu_ms"] < 2 * row["step_ms"]
    written = next(Path(actual["folder"], "all").rglob("run_summary.json"))
    assert json.loads(written.read_text()) == summary
    assert (written.parent / "metrics.csv").read_text().count("ranks/slowest_rank") == 1
