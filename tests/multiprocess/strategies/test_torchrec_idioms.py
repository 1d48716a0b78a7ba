"""What TorchRec's users write by hand: refused by name on every rank before a step, or taken with
the same numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, ModuleSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.types import ShardingPlan, ShardingType

from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.cases import Case, check_refused, click_case
from tests.support.click_model import (
    ClickModel,
    largest_difference,
    rank_loader,
    seeded,
    train_unsharded,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

SGD = (torch.optim.SGD, {"lr": 0.1})
STEPS = 3
CPU = torch.device("cpu")
SHARDERS: list[ModuleSharder[nn.Module]] = [EmbeddingBagCollectionSharder()]  # type: ignore[list-item]


class Sharded(ClickModel):
    """Shards its tables by TorchRec in configure_model. way: how."""

    def __init__(self, *args: Any, way: str) -> None:
        super().__init__(*args)
        self.way = way

    def configure_model(self) -> None:
        if self.way == "DistributedModelParallel":
            self.ebc = DistributedModelParallel(self.ebc, device=CPU, sharders=SHARDERS)
        else:
            self.ebc = shard(self.ebc, _module_plan(), device=CPU, sharder=SHARDERS[0])


class Piped(ClickModel):
    """Lets one of TorchRec's pipelines make the steps."""

    def __init__(self, *args: Any, pipeline: Any) -> None:
        super().__init__(*args)
        self.pipeline = pipeline

    def setup(self, stage: str) -> None:
        self.automatic_optimization = False
        # In a list, which is no attribute that a search through the module would find.
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.pipelines = [self.pipeline(self.mlp, optimizer, CPU)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.pipelines[0].progress(iter([batch]))


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


def planned(**modules: Any) -> Case:
    plan = ShardingPlan({name.replace("_", "."): value for name, value in modules.items()})
    return click_case(ClickModel, SGD, strategy={"planning": {"plan_file": plan}})


BY_TORCHREC = "is already sharded by TorchRec"
REFUSED: dict[str, tuple[Case, str]] = {
    **{
        way: (click_case(Sharded, SGD, way=way), BY_TORCHREC)
        for way in ("DistributedModelParallel", "shard")
    },
    **{
        kind.__name__: (
            click_case(Piped, SGD, pipeline=kind),
            f"UnsupportedError: {kind.__name__}.progress was called ",
        )
        for kind in (TrainPipelineSparseDist, TrainPipelineSemiSync)
    },
    "a plan for other modules": (
        planned(sparse_ebc={}, model_ebc={}),
        "plan_file=ShardingPlan(...): 'ebc' fits ['sparse.ebc', 'model.ebc']",
    ),
    "a plan without a table": (planned(ebc={}), "does not suit this run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_done_by_hand_is_refused_by_name_on_every_rank(name: str) -> None:
    case, words = REFUSED[name]
    check_refused(case, words, started=None if "progress" in words else 0)


def test_a_layer_that_no_loss_uses_is_named_first() -> None:
    unused = click_case(Unused, SGD, strategy={"bucket_cap_mb": 1e-5})
    check_refused(unused, "OptimizerError: 'spare.weight' has no gradient")


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
