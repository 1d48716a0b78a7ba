"""What ranks send is counted: byte for byte where a test sends it, and as sharding implies where
torchrec does."""

import csv
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import Communication, PipelineParallelStrategy, RankMonitor, Throughput
from lightning_distrec.observe.communication import (
    COLLECTIVES,
    DENSE_GRADIENTS,
    IDS,
    KINDS,
    OTHER,
    RARE_KINDS,
    ROW_GRADIENTS,
    ROWS,
    STAGE_GRADIENTS,
    STAGE_OUTPUTS,
    exchanged_bytes,
    find_nodes,
    ring_bytes,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.weights.shard_access import without_guards
from tests.support.chain_models import Transformer
from tests.support.click_model import FEATURES, ClickModel, make_batch, seeded
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS, make_ddp_trainer, make_trainer

WORD = 8
"""Bytes of an int64."""


class Exchange(torch.autograd.Function):
    """Sends rows to the other ranks in forward, and their gradients back in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _exchanged(rows)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Tensor:  # type: ignore[override]
        return _exchanged(gradients)


def _exchanged(rows: Tensor) -> Tensor:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous())
    return received


class Sends(pl.LightningModule):
    """A model under plain DDP that sends known numbers of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10, bias=False)
        self.frozen = nn.Linear(50, 50)
        self.frozen.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        # To rank r: r + 1 ids, of which each rank keeps its own.
        ids = torch.zeros(sum(r + 1 for r in range(num_ranks)), dtype=torch.int64)
        received = torch.empty(num_ranks * (rank + 1), dtype=torch.int64)
        splits = [r + 1 for r in range(num_ranks)]
        dist.all_to_all_single(received, ids, [rank + 1] * num_ranks, splits, async_op=True).wait()
        rows = Exchange.apply(self.layer(batch))  # (12, 10) float32
        dist.all_reduce(torch.zeros(7))
        time.sleep(0.02)
        return rows.sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        _exchanged(torch.ones(1000))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(steps: int) -> DataLoader:
    return DataLoader([torch.ones(12, 6) for _ in range(steps)], batch_size=None)


def _fit(
    folder: str = "", accumulate: int = 1, validate: bool = False, local: int = 0
) -> dict[str, Any]:
    original = dist.all_to_all_single
    callbacks: list[Any] = [Communication(), Throughput()]
    options: dict[str, Any] = {"logger": CSVLogger(folder)} if folder else {}
    trainer = make_ddp_trainer(
        callbacks=callbacks, accumulate_grad_batches=accumulate, log_every_n_steps=2, **options
    )
    if local:
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
    trainer.fit(Sends(), _loader(4), *([_loader(2)] if validate else []))
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    assert dist.all_to_all_single is original
    _, across, *calls = callbacks[0]._fit.per_step().unbind(1)
    return {
        "sent": callbacks[0].bytes_per_step,
        "across": dict(zip(KINDS, across.tolist(), strict=True)),
        "calls": {
            name: number.sum()
            for name, number in zip(COLLECTIVES, calls, strict=True)
            if number.any()
        },
        "speed": callbacks[1].numbers,
    }


def test_bytes_and_calls_of_each_kind_are_those_that_left_the_rank(tmp_path: Path) -> None:
    calls = {
        "logged": (_fit, str(tmp_path)),
        "accumulated": (_fit, "", 2),
        "validated": (_fit, "", 1, True),
    }
    ranks = run_each_on_ranks(calls, 2)
    for rank, actual in enumerate(ranks):
        sent = actual["logged"]["sent"]
        assert sent[IDS] == [2, 1][rank] * WORD
        assert sent[ROWS] == sent[ROW_GRADIENTS] == 12 * 10 * 4 / 2
        # 2 (W - 1) / W is 1; what is frozen is not averaged
        assert sent[DENSE_GRADIENTS] == 6 * 10 * 4
        sigterm = WORD / 2  # Lightning broadcasts one number with every batch
        assert sent[OTHER] == pytest.approx(7 * 4 + sigterm)
        # ids, rows and their gradients; a sum of seven numbers; Lightning's broadcast
        assert actual["logged"]["calls"] == {"all_to_all": 3, "all_reduce": 1, "other calls": 1}
        # once for all accumulated batches
        assert actual["accumulated"]["sent"][DENSE_GRADIENTS] == 6 * 10 * 4 / 2
        assert actual["accumulated"]["sent"][ROWS] == sent[ROWS]
        assert actual["validated"]["sent"] == sent, "validation does not count"
    check_log(tmp_path, ranks[0]["logged"]["sent"])
    first, second = (actual["logged"]["speed"] for actual in ranks)
    seconds = first["throughput/step_ms"] / 1000
    assert first["throughput/samples_per_second"] == pytest.approx(2 * 12 / seconds)
    assert seconds >= 0.02
    assert second == {}  # only rank 0 measures


def check_log(folder: Path, sent: dict[str, float]) -> None:
    with open(next(folder.rglob("metrics.csv"))) as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    rows = [row for row in rows if "communication/all_bytes" in row]  # others are Throughput's
    assert [row["step"] for row in rows] == [1, 3]
    for row in rows:
        kinds = [kind for kind in KINDS if kind not in RARE_KINDS]
        logged = {kind: row[f"communication/{kind.replace(' ', '_')}_bytes"] for kind in kinds}
        assert logged == {kind: sent[kind] for kind in logged}
        assert row["communication/all_bytes"] == sum(sent.values())
        calls = {kind: row.get(f"communication/{kind.replace(' ', '_')}_calls") for kind in KINDS}
        assert calls == dict.fromkeys(KINDS) | {IDS: 1, ROWS: 1, ROW_GRADIENTS: 1, OTHER: 2}
        assert "communication/across_nodes_bytes" not in row


def _sharded(cut: str) -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
    callback = Communication()
    trainer = make_trainer({"sharding_types": [cut]}, callbacks=callback)
    held: dict[str, Any] = {}

    @without_guards  # shards are plain tensors
    def look() -> None:
        tables = trainer.strategy.run_tables  # type: ignore[attr-defined]
        local = (name for name, shards in tables.shards.shards.items() if shards[0].weight.numel())
        held["local"] = sorted(name.rpartition(".")[2] for name in local)
        held["updates"] = {update.kind for update in tables.updates.values()}

    model.on_train_start = look  # type: ignore[method-assign]
    trainer.fit(model, DataLoader([make_batch(rank)] * 3, batch_size=None))
    return held | {"sent": callback.bytes_per_step}


FEATURES_OF = {"wide": ["a", "b"], "narrow": ["c"], "shared": ["b", "d"]}
DIMS = {"wide": 16, "narrow": 8, "shared": 8}
EXAMPLES = 8
DENSE_BYTES = (56 * 16 + 16) * 4


def test_bytes_of_tables_are_those_of_their_cut() -> None:
    cuts = ("table_wise", "row_wise", "data_parallel")
    ranks = run_each_on_ranks({cut: (_sharded, cut) for cut in cuts}, 2)
    columns = {name: len(FEATURES_OF[name]) * DIMS[name] for name in DIMS}
    assert sorted(name for rank in ranks for name in rank["table_wise"]["local"]) == sorted(DIMS)
    for rank, actual in enumerate(ranks):
        sent, local = actual["table_wise"]["sent"], actual["table_wise"]["local"]
        other = ranks[1 - rank]["table_wise"]["local"]
        assert sent[ROWS] == sum(columns[name] for name in local) * EXAMPLES * 4
        assert sent[ROW_GRADIENTS] == sum(columns[name] for name in other) * EXAMPLES * 4
        assert sent[DENSE_GRADIENTS] == DENSE_BYTES
        lengths = make_batch(rank)["lengths"].view(len(FEATURES), EXAMPLES).sum(1)
        features = [feature for name in other for feature in FEATURES_OF[name]]
        ids = sum(int(lengths[FEATURES.index(feature)]) for feature in features)
        numbers = (ids + len(features) * EXAMPLES) * 4  # of 32 bits
        # How many there are of each, and what ranks agree on, is in control messages.
        assert sent[IDS] == numbers
        sent = actual["row_wise"]["sent"]
        assert sent[ROWS] == sent[ROW_GRADIENTS] == sum(columns.values()) * EXAMPLES * 4
        assert actual["row_wise"]["updates"] == {"fused"}, "watching leaves them in backward"
        sent = actual["data_parallel"]["sent"]
        assert sent[IDS] == sent[ROWS] == sent[ROW_GRADIENTS] == 0
        assert sent[DENSE_GRADIENTS] == DENSE_BYTES + (60 * 16 + 37 * 8 + 11 * 8) * 4


def _staged(options: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank has counted, and the bytes of its gradients."""
    rank, num_ranks = rank_and_num_ranks()
    callback, monitor, model = Communication(), RankMonitor(), Transformer()
    strategy = PipelineParallelStrategy(**options)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"callbacks": [callback, monitor], "default_root_dir": folder, **DEFAULTS}
        pl.Trainer(strategy=strategy, devices=num_ranks, **settings).fit(model)
    return {
        "summary": monitor.summary,
        "sent": callback.bytes_per_step,
        "exchanges": callback.mean_exchanges_per_step,
        "gradients": sum(p.numel() * 4 for p in model.parameters() if not p.is_meta),
    }


HIDDEN = 4 * 12 * 8 * 4
"""Bytes of the output of a block of the transformer for 4 examples."""


def test_what_stages_send_each_other_is_counted() -> None:
    calls = {
        "two": (_staged, {"microbatches": 2}),
        "four": (_staged, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    }
    for rank, actual in enumerate(run_each_on_ranks(calls, 2)):
        for case, outputs, gradients, parts in (
            ("two", (1, 0), (0, 1), 2),
            ("four", (2, 1), (1, 2), 4),
        ):
            counted = actual[case]
            assert counted["sent"][STAGE_OUTPUTS] == outputs[rank] * HIDDEN
            assert counted["sent"][STAGE_GRADIENTS] == gradients[rank] * HIDDEN
            assert counted["exchanges"][STAGE_OUTPUTS] == parts * sum(outputs) / 2
            assert counted["exchanges"][STAGE_GRADIENTS] == parts * sum(gradients) / 2
            if rank == 0:  # both ranks have read the same samples
                summary, rows = counted["summary"], counted["summary"]["by_rank"]
                seconds = max(row["step_ms"] * row["steps"] for row in rows) / 1000
                assert rows[0]["samples"] == rows[1]["samples"] > 0
                assert summary["samples_per_second"] * seconds == pytest.approx(rows[0]["samples"])


@pytest.mark.parametrize(
    ("nodes", "group", "share"),
    [
        ([0, 0, 1, 1], [0, 1, 2, 3], 2 / 4),
        ([0, 1, 0, 1], [0, 1, 2, 3], 1),
        ([0, 1, 0, 1], [0, 2], 0),
        ([0, 0, 0, 1], [0, 1, 2, 3], 2 / 4),
        ([0, 0, 0, 1], [0, 1, 2], 0),
    ],
    ids=["in blocks", "in turns", "one node of them", "unequal nodes", "the larger node"],
)
def test_bytes_across_nodes_follow_the_nodes_of_the_ranks(
    nodes: Any, group: list[int], share: float
) -> None:
    rings = [
        (rank, ring_bytes("all_reduce", {"tensor": torch.zeros(8)}, group, rank)) for rank in group
    ]
    away = [nodes[rank] != nodes[other] for rank, sent in rings for other in sent]
    assert sum(away) / len(group) == pytest.approx(share)
    assert [sum(sent.values()) for _, sent in rings] == [
        2 * 32 * (len(group) - 1) / len(group)
    ] * len(group)
    sent = exchanged_bytes({"input": torch.zeros(len(group))}, group, group[0])
    assert sent == dict.fromkeys(group[1:], 4)


def test_nodes_are_those_of_the_strategy_or_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(nodes=NodeLayout((0, 1, 0)))
    assert find_nodes(SimpleNamespace(strategy=SimpleNamespace(session=session))) == (0, 1, 0)
    stock = SimpleNamespace(strategy=SimpleNamespace(), world_size=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert find_nodes(stock) == [0, 0, 1, 1]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert find_nodes(stock) == [0, 0, 0, 0]
