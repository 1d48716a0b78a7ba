"""Two ranks that share one GPU, over gloo, train what one rank does: exchanges on a machine with
one GPU."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.gpu.device import ACCELERATOR
from tests.gpu.marks import runs_here
from tests.support.click_model import ClickModel, join_batches, make_batch, seeded
from tests.support.embedding_models import whole_state
from tests.support.incremental_runs import FullToo, LargeTables, assert_same_as_full
from tests.support.mapped_models import DynamicModel, ManagedModel, MchModel, MchSequences, loader
from tests.support.ranks import CallsOnRanks, rank_and_num_ranks
from tests.support.trainers import make_trainer
from tests.support.weighted_models import PositionWeighted

pytestmark = runs_here

STEPS = 8
PARTS = 2
"""Each step has this number of batches, one for each rank, or both for one."""


class Ordinary(DynamicModel):
    """Ids in the range of the rows, on the short path."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch | {"ids": batch["ids"] % 24, "first": batch["first"] % 20})


TABLES = {
    "mc.bags.users": {"ids": "dynamic", "rows": 24, "buckets": 6, "evict": "lfu"},
    "mc.bags.goods": {"ids": "dynamic", "rows": 60, "buckets": 6, "min_sights": 2},
    "first": {"ids": "dynamic", "rows": 24, "buckets": 6, "embedding_update": "dense"},
}
ADAGRAD = {"optimizer": torch.optim.Adagrad, "options": {"lr": 0.02}}
SERIES = {"every": 2, "full_every": 100, "keep": 10}
CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "short path, row-wise": (
        Ordinary,
        {},
        {"sharding_types": ["row_wise"], "prefetch": {"depth": 3}},
    ),
    "short path, Adam": (Ordinary, {"optimizer": "Adam"}, {"sharding_types": ["row_wise"]}),
    "sparse updates": (Ordinary, {}, {"embedding_update": "sparse"}),
    "HashZch": (ManagedModel, {}, {}),
    "MCH": (MchModel, {}, {}),
    "MCH of sequences": (MchSequences, {}, {}),
    "groups": (ClickModel, ADAGRAD, {"sharding_groups": {"size": 1}}),
    "learned weights": (PositionWeighted, ADAGRAD, {"sharding_types": ["row_wise"]}),
    "touched rows": (
        LargeTables,
        ADAGRAD,
        {"checkpoint": {"distributed": True, "incremental": SERIES}},
    ),
    "dynamic ids": (DynamicModel, {}, {"convert_embeddings": "all", "tables": TABLES}),
}


def train(
    kind: type, model_options: dict[str, Any], options: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Return the weights and losses after a fit that is saved, and continued from its
    checkpoint."""
    rank, num_ranks = rank_and_num_ranks()
    # To the Trainer each rank is a node with one device, which is the same for both.
    os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"}
    settings: dict[str, Any] = {"accelerator": ACCELERATOR, "devices": 1, "num_nodes": num_ranks}
    strategy = {
        "process_group_backend": "gloo",
        "convert_embeddings": "all",
        **copy.deepcopy({"checkpoint": {"distributed": True}} | options),
    }
    if series := strategy["checkpoint"].get("incremental"):
        series["dirpath"] = str(folder / f"{num_ranks}" / "series")
        settings["callbacks"] = [FullToo(str(folder / f"{num_ranks}"))]
    batches = loader(0, STEPS, rank, num_ranks, PARTS)
    if issubclass(kind, ClickModel):
        parts = range(rank * PARTS // num_ranks, (rank + 1) * PARTS // num_ranks)
        joined = [
            join_batches([make_batch(1000 * step + part) for part in parts])
            for step in range(STEPS)
        ]
        batches = DataLoader(joined, batch_size=None)
    first = make_trainer(strategy, max_steps=STEPS // 2, **settings)
    first.fit(seeded(kind, **model_options), batches)
    path = folder / f"{num_ranks}.ckpt"
    first.save_checkpoint(path)
    model = seeded(kind, **model_options)
    make_trainer(strategy, max_steps=STEPS, **settings).fit(model, batches, ckpt_path=path)
    weights = {
        name: value.cpu() for name, value in whole_state(model).items() if value.is_floating_point()
    }
    if series and rank == 0:
        assert len(assert_same_as_full(folder / f"{num_ranks}")) > 2
    return {"weights": weights, "losses": model.losses}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, CallsOnRanks]:
    """Number of ranks -> what each case gave on each of them."""
    calls = {name: (train, *case, tmp_path_factory.mktemp("saved")) for name, case in CASES.items()}
    return {num: CallsOnRanks(calls, num, timeout_seconds=240) for num in (1, 2)}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_on_one_device_train_as_one_rank(results: Any, name: str) -> None:
    (expected,), per_rank = results[1][name], results[2][name]
    means = torch.tensor([result["losses"] for result in per_rank]).mean(0)
    torch.testing.assert_close(means, torch.tensor(expected["losses"]), atol=1e-5, rtol=1e-4)
    weights = per_rank[0]["weights"]  # rank 0 has the whole state
    assert weights.keys() == expected["weights"].keys()
    for key, value in expected["weights"].items():
        torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=1e-4, msg=key)
