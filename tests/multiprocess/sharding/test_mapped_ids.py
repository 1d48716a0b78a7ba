"""Tables whose ids have no fixed range, on 2 and 3 ranks: with the rows, and the ids of rows, of
one process."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec import DynamicIds
from lightning_distrec.errors import CheckpointError, ShardingError
from lightning_distrec.serving import answer
from lightning_distrec.serving.artifact import export_for_serving
from lightning_distrec.sharding.mapping import id_mapping
from lightning_distrec.sharding.mapping.spec import specs_of
from tests.support.adapted_models import Adapted, MapsByHand, Subclassed
from tests.support.click_model import seeded
from tests.support.embedding_models import too_far, whole_state
from tests.support.mapped_models import (
    ROWS,
    Checkpointed,
    DynamicModel,
    ManagedModel,
    ManagedSequences,
    MchModel,
    Padded,
    hash_zch,
    joined,
    learn,
    loader,
    make_batch,
)
from tests.support.mapped_runs import (
    BATCH_PARTS,
    ByHand,
    Clock,
    refusal,
    step_plainly,
    train,
    train_by_hand,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 6


class Logged(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        if any(name.startswith("dynamic_ids") for name in metrics):
            self.entries.append(dict(metrics))


def _torchrec_state(kind: type[ManagedModel], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train TorchRec's unsharded module by a plain loop. Its kernel for a CPU only finds rows: it
    begins with the ids.

    Without eviction an id has one row, from the step on in which it is first looked up.
    """
    model = seeded(kind)
    model.load_state_dict(
        {key: value for key, value in state.items() if "hash_zch" in key}, strict=False
    )
    model.mc._managed_collision_collection.eval()
    step_plainly(model, STEPS)
    return model.state_dict()


def test_managed_collisions_train_as_torchrec_does_in_one_process() -> None:
    kinds = {kind.__name__: kind for kind in (ManagedModel, ManagedSequences)}
    actual = run_each_on_ranks(
        {name: (train, kind, {}, (0, STEPS)) for name, kind in kinds.items()}, 2
    )
    for name, kind in kinds.items():
        state = actual[0][name]["state"]
        expected = _torchrec_state(kind, state)
        assert state.keys() == expected.keys()
        assert too_far(state, expected, 1e-5) == {}, name
        identities = [value for key, value in state.items() if key.endswith("identities")]
        assert sum(int((rows >= 0).sum()) for rows in identities) > 30
        assert sum(rank_result[name]["shared"] for rank_result in actual) > 0


def test_the_collections_of_an_adapter_are_sharded() -> None:
    first, two = (
        run_each_on_ranks({"": (train, Adapted, {}, (0, 2 * STEPS))}, num_ranks)
        for num_ranks in (1, 2)
    )
    assert too_far(two[0][""]["state"], first[0][""]["state"], 1e-5) == {}
    assert sum(rank_result[""]["evicted"] for rank_result in two) == first[0][""]["evicted"] > 10


class HashedByHand(ByHand):
    """Maps ids as one rank would."""

    def __init__(self, specs: Any, config: Any, weight: Tensor) -> None:
        super().__init__(config, weight)
        spec = specs[config.name]
        self.mapping = id_mapping.IdMapping(spec, 0, spec.num_buckets, torch.device("cpu"))

    def find_rows(self, ids: Tensor) -> Tensor:
        evicted = learn(self.mapping, ids)
        self.start_anew(evicted, self.mapping.ids.view(-1)[evicted])
        return self.mapping.find(ids)

    def optimizer_stepped(self) -> None:
        self.mapping.optimizer_stepped()


EVICTING: dict[str, tuple[type[ManagedModel], dict[str, Any]]] = {
    "fused": (ManagedModel, {"evicts": True}),
    "dense": (ManagedModel, {"evicts": True, "optimizer": "Adam"}),
    "a step for each number": (ManagedModel, {"evicts": True, "optimizer": "Rprop"}),
}


DYNAMIC = {
    "convert_embeddings": "all",
    "tables": {
        "users": {"ids": "dynamic", "rows": 20, "buckets": 6, "evict": "lfu"},
        "goods": {"ids": "dynamic", "rows": 60, "buckets": 12, "min_sights": 2},
        "first": {"ids": "dynamic", "rows": 32, "buckets": 6, "embedding_update": "dense"},
    },
}


def test_ordinary_tables_get_ids_of_any_range(tmp_path: Path) -> None:
    def run(num_ranks: int, *steps_and_paths: Any) -> dict[str, Any]:
        call = (train, DynamicModel, {}, *steps_and_paths, DYNAMIC)
        return run_each_on_ranks({"": call}, num_ranks)[0][""]

    path = f"{tmp_path}/half.ckpt"
    first = run(1, (0, 2 * STEPS), "", "")
    expected = first["state"]
    assert first["evicted"] > 10
    assert first["shared"] > 10
    assert expected["mc.bags.embedding_bags.users.weight"].shape == (24, 8)
    assert expected["first.ids"].shape == (36, 1)
    run(2, (0, STEPS), path, "")
    resumed = run(3, (STEPS, 2 * STEPS), "", path)["state"]
    assert resumed.keys() == expected.keys()
    assert too_far(resumed, expected, 1e-5) == {}


def _logged() -> tuple[list[dict[str, float]], int]:
    rank, num_ranks = rank_and_num_ranks()
    model, logged = seeded(DynamicModel), Logged()
    trainer = make_trainer(DYNAMIC, logger=logged, callbacks=[DynamicIds()], log_every_n_steps=2)
    trainer.fit(model, loader(0, STEPS, rank, num_ranks, BATCH_PARTS))
    ids = whole_state(model).get("first.ids", torch.empty(0))  # on rank 0
    return logged.entries, int((ids >= 0).sum())


def test_occupancy_collisions_and_evictions_are_logged() -> None:
    (entries, selected), _ = run_on_warm_ranks(_logged, 2)
    assert len(entries) == 3
    assert set(entries[0]) == {
        f"dynamic_ids/{table}/{description}"
        for table in ("mc.bags.users", "mc.bags.goods", "first")
        for description in ("occupancy", "collisions", "evictions")
    }
    assert entries[-1]["dynamic_ids/first/occupancy"] == selected / 36
    assert (
        entries[0]["dynamic_ids/mc.bags.goods/collisions"]
        > entries[-1]["dynamic_ids/mc.bags.goods/collisions"]
        > 0
    )
    assert entries[-1]["dynamic_ids/mc.bags.users/evictions"] > 0


def _served(kind: type[ManagedModel], strategy: dict[str, Any], folder: str) -> list[Tensor]:
    """Return the answers of the sharded module, of the ordinary one that it becomes, and of a
    server, to new ids too."""
    rank, num_ranks = rank_and_num_ranks()
    model, batch = seeded(kind), joined([make_batch(100 * step, kinds=90) for step in range(3)])
    trainer = make_trainer(strategy)
    trainer.fit(model, loader(0, STEPS, rank, num_ranks, BATCH_PARTS))
    trainer.save_checkpoint(f"{folder}/trained.ckpt")
    (sharded,) = trainer.predict(model, DataLoader([batch], batch_size=None))  # type: ignore[misc]
    trainer.strategy.unshard()  # type: ignore[attr-defined]
    with torch.no_grad():
        ordinary = model.eval()(batch)
    if strategy:
        with pytest.raises(ShardingError, match="new ids would get no rows"):
            make_trainer(strategy).fit(model, loader(0, 1, rank, num_ranks, BATCH_PARTS))
    if rank:
        return [sharded, ordinary]
    state = torch.load(f"{folder}/trained.ckpt", weights_only=True)["state_dict"]
    export_for_serving(seeded(kind), batch, Path(folder, "served"), state=state)
    server = answer.Server(Path(folder, "served"))
    (served,) = answer.leaves(server.answer({key: batch[key] for key in server.about["inputs"]}))
    return [sharded, ordinary, served]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), [(DynamicModel, DYNAMIC), (MchModel, {})])
def test_ids_find_their_rows_after_unshard_and_in_exports(
    kind: type[ManagedModel], strategy: dict[str, Any], tmp_path: Path
) -> None:
    for sharded, *others in run_on_warm_ranks(_served, 2, kind, strategy, str(tmp_path)):
        for other in others:
            torch.testing.assert_close(other, sharded)


WITH_BUCKETS = {"ids": "dynamic", "buckets": 6}
REFUSED: dict[str, tuple[type[ManagedModel], dict[str, Any], dict[str, Any], str]] = {
    "padding": (
        Padded,
        {},
        {"first": WITH_BUCKETS},
        "padding_idx=0 is the number of a row of zeros",
    ),
    "type": (
        DynamicModel,
        {},
        {"users": {**WITH_BUCKETS, "sharding_types": ["table_wise"]}},
        "can only be row_wise",
    ),
    "read": (
        DynamicModel,
        {},
        {"users": {**WITH_BUCKETS, "gathered_weight": True}},
        "have no fixed ids",
    ),
    "kernel": (
        DynamicModel,
        {},
        {"users": {**WITH_BUCKETS, "compute_kernels": ["fused_uvm"]}},
        "it needs fused",
    ),
    "ranks": (
        DynamicModel,
        {},
        {"users": {**WITH_BUCKETS, "buckets": 3}},
        "3 buckets, which 2 ranks cannot share",
    ),
    "checkpoint": (
        Checkpointed,
        {},
        DYNAMIC["tables"],
        "is looked up inside of an activation checkpoint",
    ),
    "managed": (ManagedModel, {}, {"users": WITH_BUCKETS}, "its module maps ids itself"),
    "torchrec's": (
        ManagedModel,
        {"total_num_buckets": 3},
        {},
        "have 3 buckets, which 2 ranks cannot share evenly",
    ),
    "subclass": (
        Subclassed,
        {},
        {},
        "_Own is a subclass and may map ids in another way. Unsharded, each of 2 ranks",
    ),
    "by hand": (
        MapsByHand,
        {},
        {},
        "ManagedCollisionCollection is used outside of a ManagedCollisionEmbedding",
    ),
    "left out": (
        ManagedModel,
        {"disable_fallback": True},
        {},
        "HashZchManagedCollisionModule with disable_fallback",
    ),
}


def _refused(kind: type[ManagedModel], options: dict[str, Any], tables: dict[str, Any]) -> str:
    return refusal(kind, options, convert_embeddings="all", tables=tables)


def test_what_would_map_ids_otherwise_is_refused() -> None:
    calls = {
        name: (_refused, kind, options, tables)
        for name, (kind, options, tables, _) in REFUSED.items()
    }
    for rank_result in run_each_on_ranks(calls, 2):
        for name, (*_, message) in REFUSED.items():
            assert message in rank_result[name], name


class Resized(ManagedModel):
    """Has as many times the rows as `scale` says."""

    @staticmethod
    def maps_by(name: str, evicts: bool = False, scale: int = 1) -> Any:
        return hash_zch(name, evicts, zch_size=ROWS[name] * scale)


def _resized(path: str) -> list[str]:
    train(Resized, {}, (0, 1), saves=path)
    messages = []
    for scale, resumes, options in (
        (2, path, {}),
        (2, "", {"start_from": path, "grow_tables": True}),
    ):
        try:
            strategy = {"checkpoint": options}
            train(Resized, {"scale": scale}, (0, 1), resumes=resumes, strategy=strategy)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_a_table_with_mapped_ids_does_not_grow_and_no_advice_says_that_it_would(
    tmp_path: Path,
) -> None:
    for messages in run_on_warm_ranks(_resized, 2, str(tmp_path / "it.ckpt")):
        assert len(messages) == 2
        for message in messages:
            assert (
                "has 24, to which its ids are mapped: such a table cannot grow or shrink. Keep 24 "
                "rows; or" in message
            )
            assert "grow_tables" not in message


def test_evicted_rows_are_reset_and_checkpoints_go_on_with_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    half, later, twice = (0, STEPS), (STEPS, 2 * STEPS), (0, 2 * STEPS)
    calls, resumes = {}, {}
    for name, item in EVICTING.items():
        path = f"{tmp_path}/{name}.ckpt"
        calls |= {
            f"all {name}": (train, *item, twice),
            f"half {name}": (train, *item, half, path),
        }
        resumes[name] = (train, *item, later, "", path)
    two, three = run_each_on_ranks(calls, 2), run_each_on_ranks(resumes, 3)
    for name, item in EVICTING.items():
        runs = [of_rank[f"all {name}"] for of_rank in two]
        state = runs[0]["state"]
        model = seeded(item[0], **item[1])
        with patch.object(id_mapping, "current_hour", Clock()):
            make_table = partial(HashedByHand, specs_of(model.mc))
            expected, _ = train_by_hand(model, make_table, 2 * STEPS)
        assert too_far({key: state[key] for key in expected}, expected, 1e-5) == {}, name
        assert sum(run["evicted"] for run in runs) > 10
        assert sum(run["shared"] for run in runs) > 0, "they are left out, where the module says so"
        assert too_far(three[0][name]["state"], state, 1e-5) == {}, name
