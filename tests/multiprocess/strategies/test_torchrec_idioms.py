"""What TorchRec's users write by hand: refused by name on every rank before a step, or taken with
the same numbers."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, ModuleSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.shard import shard, shard_modules
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.types import ShardingPlan, ShardingType

from lightning_distrec import TunedDDPStrategy
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.click_model import (
    ClickModel,
    largest_difference,
    rank_loader,
    seeded,
    train_unsharded,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_trainer

SGD = (torch.optim.SGD, {"lr": 0.1})
STEPS = 3
CPU = torch.device("cpu")
SHARDERS: list[ModuleSharder[nn.Module]] = [EmbeddingBagCollectionSharder()]  # type: ignore[list-item]


class Sharded(ClickModel):
    """Shards its tables by TorchRec in configure_model. way: how."""

    way = ""

    def configure_model(self) -> None:
        if self.way == "DistributedModelParallel":
            self.ebc = DistributedModelParallel(self.ebc, device=CPU, sharders=SHARDERS)
        elif self.way == "shard_modules":
            self.ebc = shard_modules(self.ebc, device=CPU, sharders=SHARDERS)
        else:
            self.ebc = shard(self.ebc, _module_plan(), device=CPU, sharder=SHARDERS[0])


class Piped(ClickModel):
    """Lets one of TorchRec's pipelines make the steps."""

    kind: Any = TrainPipelineSparseDist

    def setup(self, stage: str) -> None:
        self.automatic_optimization = False
        # In a list, which is no attribute that a search through the module would find.
        self.pipelines = [self.kind(self.mlp, torch.optim.SGD(self.parameters(), lr=0.1), CPU)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.pipelines[0].progress(iter([batch]))
        self.losses.append(0.0)


class Unused(ClickModel):
    """Has a layer that no loss uses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spare = nn.Linear(8, 8)


def _module_plan() -> Any:
    per_table = {
        "wide": table_wise(rank=1),
        "narrow": column_wise(ranks=[0, 1]),
        "shared": table_wise(rank=0),
    }
    model = seeded(ClickModel, *SGD)
    return construct_module_sharding_plan(
        model.ebc, per_table, SHARDERS[0], local_size=2, world_size=2, device_type="cpu"
    )


REFUSED: dict[str, tuple[type, Any, str]] = {
    **{
        way: (
            type(way, (Sharded,), {"way": way}),
            {},
            "ShardingError: 'ebc.*' is already sharded by TorchRec",
        )
        for way in ("DistributedModelParallel", "shard", "shard_modules")
    },
    "under ddp_tuned": (
        type("Sharded", (Sharded,), {"way": "DistributedModelParallel"}),
        TunedDDPStrategy,
        "ShardingError: 'ebc.*' is already sharded by TorchRec",
    ),
    **{
        kind.__name__: (
            type(kind.__name__, (Piped,), {"kind": kind}),
            {},
            rf"UnsupportedError: {kind.__name__}.progress was called .* Remove the pipeline",
        )
        for kind in (TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineSemiSync)
    },
    "a plan for other modules": (
        ClickModel,
        {"planning": {"plan_file": ShardingPlan({"sparse.ebc": {}, "model.ebc": {}})}},
        r"PlanError: .*plan_file=ShardingPlan\(...\): 'ebc' fits \['sparse.ebc', 'model.ebc'\]",
    ),
    "a plan without a table": (
        ClickModel,
        {"planning": {"plan_file": ShardingPlan({"ebc": {}})}},
        "PlanError: .*does not suit this run",
    ),
}


def _refused(name: str) -> str:
    kind, strategy, _ = REFUSED[name]
    model = seeded(kind, *SGD)
    by_ddp = pl.Trainer(strategy=TunedDDPStrategy(), devices=rank_and_num_ranks()[1], **DEFAULTS)
    try:
        (by_ddp if strategy is TunedDDPStrategy else make_trainer(strategy)).fit(
            model, rank_loader(STEPS, rank_and_num_ranks()[0])
        )
    except Exception as error:
        assert not model.losses, "a step was taken before the error"
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _refused_all() -> dict[str, str]:
    return {name: _refused(name) for name in REFUSED}


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return run_on_warm_ranks(_refused_all, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_done_by_hand_is_refused_by_name_on_every_rank(
    refusals: list[dict[str, str]], name: str
) -> None:
    for messages in refusals:
        assert re.match(REFUSED[name][2], messages[name], re.DOTALL), messages[name]


def _unused(options: dict[str, Any]) -> str:
    model = seeded(Unused, *SGD)
    try:
        make_trainer(options).fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it trained"


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-5])
def test_a_layer_that_no_loss_uses_is_named_first(bucket_cap_mb: float) -> None:
    for message in run_on_warm_ranks(_unused, 2, {"bucket_cap_mb": bucket_cap_mb}):
        assert message.startswith("OptimizerError: 'spare.weight' has no gradient")
    assert run_on_warm_ranks(_unused, 2, {"find_unused_parameters": True}) == ["it trained"] * 2


def _fit(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    model = seeded(ClickModel, *SGD)
    make_trainer(options).fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    tables = sharded_tables_of(model)
    assert tables is not None
    plan = {name: (table.sharding_type, table.ranks) for name, table in tables.plan.items()}
    return plan, model.final_state


def _planned_by_torchrec() -> ShardingPlan:
    topology = Topology(world_size=2, compute_device="cpu", local_world_size=2)
    types = {"wide": "column_wise", "narrow": "table_wise", "shared": "table_column_wise"}
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=4)
        for name, kind in types.items()
    }
    model = seeded(ClickModel, *SGD)
    return EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(
        model, SHARDERS
    )


def _fit_by_torchrecs_plans() -> list[Any]:
    return [
        _fit({"planning": {"plan_file": ShardingPlan({"model.ebc": _module_plan()})}}),
        _fit({"planning": {"plan_file": _planned_by_torchrec()}}),
        _fit({
            "sharding_types": [ShardingType.ROW_WISE],
            "tables": {"narrow": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE])},
            "quantized_comms": QCommsConfig(forward_precision=CommType.FP32),
        }),
    ]


def test_torchrecs_plans_and_constraints_are_followed_with_the_same_numbers() -> None:
    expected = train_unsharded(seeded(ClickModel, *SGD), STEPS, 2).final_state
    for rank, fits in enumerate(run_on_warm_ranks(_fit_by_torchrecs_plans, 2)):
        for _, state in fits if rank == 0 else ():
            assert max(largest_difference(state, expected).values()) < 1e-5
        (by_hand, _), (planned, _), (constrained, _) = fits
        assert by_hand["ebc.wide"] == ("table_wise", [1])
        assert by_hand["ebc.narrow"] == ("column_wise", [0, 1])
        assert [kind for kind, _ in planned.values()] == [
            "column_wise",
            "table_wise",
            "table_column_wise",
        ]
        assert [kind for kind, _ in constrained.values()] == ["row_wise", "table_wise", "row_wise"]
