"""What is estimated to be sent for tables is what real ranks send, kind by kind."""

import os
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from lightning_distrec import Communication, TorchRecShardedStrategy
from lightning_distrec.observe.communication import DENSE_GRADIENTS, KINDS
from lightning_distrec.sharding.planning.traffic import (
    IDS,
    REPLICATED_GRADIENTS,
    ROW_GRADIENTS,
    ROWS,
)
from lightning_distrec.strategies.tables import first_step
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

EXAMPLES = 8
DENSE_BYTES = 4
"""The only layer has one parameter."""
STEPS = 4
COLLECTIONS = 2
UNUSED = 8
"""Bytes a step of the place for the weights' sizes, which each exchange of sizes has, where there
are no weights."""
AGREED = (COLLECTIONS - 1) * 8 * 8
"""Bytes a step that are no ids. The bags, some of them row-wise, agree by an exchange of their own
before. With each other lookup every rank sends each other one eight numbers:
that its ids are in range, how many examples it has, of which types they are, that nobody asked it
to stop, that no buffer was written to, that it goes on, and a digest of its param groups with its
negative."""

FEATURES = {"a": (2, 16), "b": (3, 24), "c": (4, 32), "d": (1, 8)}
"""Feature -> ids per example, and rows of its tables: so many that the ids of a batch are each row
once."""
BAGS = {
    "wide": (["a"], 16),
    "long": (["b"], 8),
    "both": (["b"], 16),
    "two": (["c"], 24),
    "last": (["d"], 8),
}
"""Table -> its features and dim."""


class Lookups(pl.LightningModule):
    """Sums what it looks up: bags, with weights or without, and single rows."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        options = {
            name: {"feature_names": entry, "embedding_dim": dim}
            for name, (entry, dim) in BAGS.items()
        }
        rows = {name: FEATURES[entry[0]][1] for name, (entry, _) in BAGS.items()}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=n, num_embeddings=rows[n], **o) for n, o in options.items()
            ],
            is_weighted=weighted,
        )
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=f"of_{n}",
                    embedding_dim=8,
                    num_embeddings=rows[n],
                    feature_names=BAGS[n][0],
                )
                for n in ("wide", "two")
            ]
        )
        self.weighted = weighted
        self.scale = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        weights = torch.ones(len(batch["ids"])) if self.weighted else None
        features = KeyedJaggedTensor(
            list(FEATURES), batch["ids"], lengths=batch["lengths"], weights=weights
        )
        unweighted = KeyedJaggedTensor(list(FEATURES), batch["ids"], lengths=batch["lengths"])
        rows = self.rows(unweighted)
        return self.scale.sum() * (
            self.bags(features).values().sum()
            + sum(entry.values().sum() for entry in rows.values())
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _batch() -> dict[str, Tensor]:
    """Each feature's ids are all rows of its tables, each once, so that they are spread evenly."""
    ids = torch.cat([torch.arange(rows) for _, rows in FEATURES.values()])
    lengths = torch.cat([torch.full((EXAMPLES,), ids_of) for ids_of, _ in FEATURES.values()])
    return {"ids": ids, "lengths": lengths}


def _fit(
    cuts: dict[str, str],
    nodes: int = 1,
    weighted: bool = False,
    comms: dict[str, str] | None = None,
    depth: int = 1,
    first: bool = False,
) -> dict[str, Any]:
    """Train a few steps; return what was sent in each, and on rank 0 what was estimated. cuts: of
    each table. first: nothing says how many ids there are, but those of the first step."""
    rank, num_ranks = rank_and_num_ranks()
    if nodes > 1:  # as torchrun would tell them
        on_node = num_ranks // nodes
        os.environ.update(
            TORCHELASTIC_RUN_ID="none",
            LOCAL_RANK=str(rank % on_node),
            LOCAL_WORLD_SIZE=str(on_node),
            GROUP_RANK=str(rank // on_node),
            GROUP_WORLD_SIZE=str(nodes),
            WORLD_SIZE=str(num_ranks),
        )
    pooling = {name: FEATURES[entry[0]][0] for name, (entry, _) in BAGS.items()}
    options = {
        f"{path}.{prefix}{name}": {
            "sharding_types": [cuts.get(prefix + name, cuts[""])],
            "pooling_factor": None if first else pooling[name],
        }
        for path, prefix, names in (("bags", "", BAGS), ("rows", "of_", ("wide", "two")))
        for name in names
    }
    for table_values in options.values():
        if "column_wise" in table_values["sharding_types"][0]:
            table_values["min_partition"] = 4
    callback = Communication()
    strategy = TorchRecShardedStrategy(
        tables=options,
        batch_size_per_rank=EXAMPLES,
        prefetch={"depth": depth},
        quantized_comms=comms,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        devices=num_ranks // nodes,
        num_nodes=nodes,
        **DEFAULTS,
        callbacks=callback,
    )
    actual: dict[str, Any] = {}
    model = Lookups(weighted)

    def look() -> None:
        setup = trainer.strategy.run_tables  # type: ignore[attr-defined]
        actual["cuts"] = {
            name: sharding.sharding_type for name, sharding in setup.shards.plan.items()
        }
        actual["plan"] = setup.plan

    model.on_train_start = look  # type: ignore[method-assign]
    plans: list[Any] = []
    in_words = first_step.sent_in_words

    def note(plan: Any) -> str:
        plans.append(plan)
        return in_words(plan)

    with patch.object(first_step, "sent_in_words", note):
        trainer.fit(model, DataLoader([_batch()] * STEPS, batch_size=None))
    assert len(plans) == (first and rank == 0)
    if plans:
        assert actual["plan"].traffic.sent().mean() < 0.8 * plans[0].traffic.sent().mean()
        actual["plan"] = plans[0]
    across = dict(zip(KINDS, callback._fit.per_step()[:, 1].tolist(), strict=True))
    return actual | {"sent": callback.bytes_per_step, "across": across}


MIXED = {
    "": "table_wise",
    "long": "row_wise",
    "both": "column_wise",
    "last": "data_parallel",
    "of_two": "row_wise",
}
ON_NODES = {
    "": "table_row_wise",
    "wide": "table_column_wise",
    "of_wide": "column_wise",
    "of_two": "row_wise",
}
ROUNDED = {"forward": "fp16", "backward": "bf16"}
JOBS = {
    "mixed": (2, MIXED),
    "weighted and rounded": (2, MIXED, 1, True, ROUNDED),
    "ahead": (2, MIXED, 1, False, None, 3),
    "first step": (2, MIXED, 1, False, None, 3, True),
    "on nodes": (4, ON_NODES, 2),
    "on nodes, weighted and rounded": (
        4,
        ON_NODES,
        2,
        True,
        {"forward": "fp32", "backward": "fp16"},
    ),
}


@pytest.fixture(scope="module")
def ranks_by_job() -> dict[str, list[dict[str, Any]]]:
    """What each rank sent."""
    results = {}
    for number in (2, 4):
        names = [name for name, job in JOBS.items() if job[0] == number]
        of_ranks = run_each_on_ranks({name: (_fit, *JOBS[name][1:]) for name in names}, number)
        results |= {name: [of_rank[name] for of_rank in of_ranks] for name in names}
    return results


@pytest.mark.parametrize("job", JOBS)
def test_estimated_bytes_are_those_that_ranks_send(ranks_by_job: Any, job: str) -> None:
    of_ranks, num_ranks = ranks_by_job[job], JOBS[job][0]
    plan = of_ranks[0]["plan"]
    traffic = plan.traffic
    assert traffic.layout.num_nodes == num_ranks // 2
    agreed = _agreed(of_ranks[0], "weighted" in job)
    for rank, local in enumerate(of_ranks):
        if job != "first step":  # which only rank 0 tells
            assert local["plan"].tables == plan.tables
        sent = local["sent"]
        ids = sent[IDS] - traffic.sent(IDS)[rank]
        if job in ("ahead", "first step"):
            assert 0 <= ids <= agreed
        else:
            assert ids == pytest.approx(agreed * (num_ranks - 1), abs=1e-6)
        assert traffic.sent(ROWS)[rank] == pytest.approx(sent[ROWS], abs=1e-6)
        assert traffic.sent(ROW_GRADIENTS)[rank] == pytest.approx(sent[ROW_GRADIENTS], abs=1e-6)
        dense = 2 * DENSE_BYTES * (num_ranks - 1) / num_ranks
        gradients = traffic.sent(REPLICATED_GRADIENTS)[rank] + dense
        assert gradients == pytest.approx(sent[DENSE_GRADIENTS], abs=1e-6)
    for kind in (IDS, ROWS, ROW_GRADIENTS):
        assert traffic.sent(kind).sum() > 0
        if num_ranks == 4:
            # Of rings the counters know the mean of ranks only.
            across = sum(local["across"][kind] for local in of_ranks)
            ids = agreed * 2 * 4 if kind == IDS else 0
            assert traffic.across_nodes(kind).sum() + ids == pytest.approx(across, abs=1e-6)


def _agreed(local: dict[str, Any], weighted: bool) -> float:
    """Return the bytes a step, for each other rank, that are no ids. Tables of one sharding type
    have one exchange."""
    exchanges = {
        (name.partition(".")[0], cut)
        for name, cut in local["cuts"].items()
        if cut != "data_parallel"
    }
    return AGREED + UNUSED * sum(
        not weighted or collection == "rows" for collection, _ in exchanges
    )
