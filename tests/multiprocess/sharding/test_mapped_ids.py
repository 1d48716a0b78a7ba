"""Tables whose ids have no fixed range, on 2 and 3 ranks: with the rows, and the ids of rows, of
one process."""

import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_distrec import DynamicIds, TableOptions
from lightning_distrec.errors import CheckpointError, ConfigError, DistRecError, ShardingError
from lightning_distrec.serving import answer
from lightning_distrec.serving.artifact import export_for_serving
from lightning_distrec.sharding.mapping import id_mapping
from lightning_distrec.sharding.mapping.spec import specs_of
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.adapted_models import Adapted, MapsByHand, Subclassed
from tests.support.click_model import seeded
from tests.support.embedding_models import too_far, whole_state
from tests.support.mapped_models import (
    FEATURES,
    ROWS,
    Checkpointed,
    DynamicModel,
    ManagedModel,
    ManagedSequences,
    Padded,
    hash_zch,
    joined,
    learn,
    loader,
    make_batch,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 6
OF = 6
"""Each step has the batches of this number of ranks, however many ranks train."""


class Logged(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        if any(name.startswith("dynamic_ids") for name in metrics):
            self.entries.append(dict(metrics))


class Clock:
    """Hours go by with the lookups of the one mapping that asks."""

    def __init__(self, hour: int = 0) -> None:
        self.calls = 2 * hour  # two tables

    def __call__(self) -> int:
        self.calls += 1
        return 1000 + (self.calls - 1) // 2


def _train(
    kind: type[ManagedModel],
    options: dict[str, Any],
    steps: tuple[int, int] = (0, STEPS),
    saves: str = "",
    resumes: str = "",
    strategy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train in the steps from one to another; save a checkpoint, or resume from one that was saved
    before them."""
    rank, num_ranks = rank_and_num_ranks()
    model = seeded(kind, **options)
    trainer = make_trainer(strategy, max_epochs=2 if resumes else 1)
    with patch.object(id_mapping, "current_hour", Clock(steps[0])):
        trainer.fit(model, loader(*steps, rank, num_ranks, OF), ckpt_path=resumes or None)
    if saves:
        trainer.save_checkpoint(saves)
    tables = sharded_tables_of(model)
    assert tables is not None
    counts = [mapping.counts for mapping in tables.mappings.values()]
    return {
        "state": whole_state(model),
        "evicted": sum(item.evicted for item in counts),
        "shared": sum(item.shared for item in counts),
    }


def _torchrec_state(kind: type[ManagedModel], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train TorchRec's unsharded module by a plain loop. Its kernel for a CPU only finds rows: it
    begins with the ids.

    Without eviction an id has one row, from the step on in which it is first looked up.
    """
    model = seeded(kind)
    model.load_state_dict(
        {key: value for key, value in state.items() if "hash_zch" in key}, strict=False
    )
    optimizer = model.configure_optimizers()
    model.mc._managed_collision_collection.eval()
    for step in range(STEPS):
        loss = model.training_step(joined([make_batch(100 * step + rank) for rank in range(OF)]), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_managed_collisions_train_as_torchrec_does_in_one_process(num_ranks: int) -> None:
    kinds = {kind.__name__: kind for kind in (ManagedModel, ManagedSequences)}
    actual = run_each_on_ranks(
        {name: (_train, kind, {}) for name, kind in kinds.items()}, num_ranks
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
        run_each_on_ranks({"": (_train, Adapted, {}, (0, 2 * STEPS))}, num_ranks)
        for num_ranks in (1, 2)
    )
    assert too_far(two[0][""]["state"], first[0][""]["state"], 1e-5) == {}
    assert sum(rank_result[""]["evicted"] for rank_result in two) == first[0][""]["evicted"] > 10


def _train_by_hand(
    kind: type[ManagedModel], options: dict[str, Any], steps: int
) -> dict[str, Tensor]:
    """Train plain tables of rows by a plain loop, and reset the rows that ids are evicted from."""
    model = seeded(kind, **options)
    tables_of_rows = model.mc._embedding_module
    optimizer = model.configure_optimizers()
    tables = {
        config.name: (
            id_mapping.IdMapping(spec, 0, spec.num_buckets, torch.device("cpu")),
            tables_of_rows.embedding_bags[config.name].weight,
            _first_rows(config),
            [FEATURES.index(feature) for feature in config.feature_names],
        )
        for config in tables_of_rows.embedding_bag_configs()
        for spec in [specs_of(model.mc)[config.name]]  # type: ignore[index]
    }
    with patch.object(id_mapping, "current_hour", Clock()):
        for step in range(steps):
            batch = joined([make_batch(100 * step + rank) for rank in range(OF)])
            per_feature = list(
                batch["ids"].split(batch["lengths"].view(len(FEATURES), -1).sum(1).tolist())
            )
            for mapping, weight, first_rows, features in tables.values():
                ids = torch.cat([per_feature[feature] for feature in features])
                evicted = learn(mapping, ids)
                with torch.no_grad():
                    weight[evicted] = first_rows[mapping.ids.view(-1)[evicted] % len(first_rows)]
                    for state in optimizer.state[weight].values():
                        if state.dim():
                            state[evicted] = 0.0
                for feature in features:
                    per_feature[feature] = mapping.find(per_feature[feature])
            features = KeyedJaggedTensor(FEATURES, torch.cat(per_feature), lengths=batch["lengths"])
            scores = model.over(tables_of_rows(features).values()).squeeze(-1)
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(scores, batch["label"]).backward()
            optimizer.step()
            for mapping, *_ in tables.values():
                mapping.optimizer_stepped()
    return {
        key: value.detach() for key, value in model.state_dict().items() if "collision" not in key
    }


def _first_rows(config: Any) -> Tensor:
    torch.manual_seed(zlib.crc32(f"mc._embedding_module.{config.name}".encode()))
    return config.init_fn(torch.empty(config.num_embeddings, config.embedding_dim))  # type: ignore[no-any-return]


EVICTING: dict[str, tuple[type[ManagedModel], dict[str, Any]]] = {
    "fused": (ManagedModel, {"evicts": True}),
    "dense": (ManagedModel, {"evicts": True, "optimizer": "Adam"}),
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
    path, twice, later = f"{tmp_path}/half.ckpt", (0, 2 * STEPS), (STEPS, 2 * STEPS)

    def runs(*expected: str) -> dict[str, tuple[Any, ...]]:
        calls = {
            "all": (twice, "", ""),
            "half": ((0, STEPS), path, ""),
            "resumed": (later, "", path),
        }
        return {name: (_train, DynamicModel, {}, *calls[name], DYNAMIC) for name in expected}

    first = run_each_on_ranks(runs("all"), 1)[0]["all"]
    expected = first["state"]
    assert first["evicted"] > 10
    assert first["shared"] > 10
    assert expected["mc.bags.embedding_bags.users.weight"].shape == (24, 8)
    assert expected["first.ids"].shape == (36, 1)
    two = run_each_on_ranks(runs("all", "half", "resumed"), 2)[0]
    actual = {2: two["all"], 1: run_each_on_ranks(runs("resumed"), 1)[0]["resumed"]}
    actual[3] = run_each_on_ranks(runs("resumed"), 3)[0]["resumed"]
    for num_ranks, run in (*actual.items(), (2, two["resumed"])):
        assert run["state"].keys() == expected.keys()
        assert too_far(run["state"], expected, 1e-5) == {}, num_ranks


def _logged() -> tuple[list[dict[str, float]], int]:
    rank, num_ranks = rank_and_num_ranks()
    model, logged = seeded(DynamicModel), Logged()
    trainer = make_trainer(DYNAMIC, logger=logged, callbacks=[DynamicIds()], log_every_n_steps=2)
    trainer.fit(model, loader(0, STEPS, rank, num_ranks, OF))
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


def test_options_that_a_table_with_dynamic_ids_cannot_have_are_refused() -> None:
    for options, message in (
        ({"rows": 10}, "rows=10 is for a table with ids: dynamic"),
        ({"ids": "any"}, "ids='any' is not known"),
        ({"ids": "dynamic", "evict": "fifo"}, "evict='fifo' is not known"),
        ({"ids": "dynamic", "min_sights": 0}, "min_sights=0: must be at least 1"),
        ({"ids": "dynamic", "rows": 10, "buckets": 6}, "a bucket needs at least 2 rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            TableOptions(**options)  # type: ignore[arg-type]


def _served(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the answers of the sharded module, of the ordinary one that it becomes, of two
    servers, to new ids too."""
    rank, num_ranks = rank_and_num_ranks()
    model, batch = (
        seeded(DynamicModel),
        joined([make_batch(100 * step, kinds=90) for step in range(3)]),
    )
    trainer = make_trainer(DYNAMIC)
    trainer.fit(model, loader(0, STEPS, rank, num_ranks, OF))
    trainer.save_checkpoint(f"{folder}/trained.ckpt")
    (sharded,) = trainer.predict(model, DataLoader([batch], batch_size=None))  # type: ignore[misc]
    trainer.strategy.unshard()  # type: ignore[attr-defined]
    with torch.no_grad():
        ordinary = model.eval()(batch)
    with pytest.raises(ShardingError, match="new ids would get no rows"):
        make_trainer(DYNAMIC).fit(model, loader(0, 1, rank, num_ranks, OF))
    if rank:
        return sharded, ordinary, sharded, sharded
    state = torch.load(f"{folder}/trained.ckpt", weights_only=True)["state_dict"]
    answers = []
    for bits, name in ((None, "float"), (8, "packed")):
        export_for_serving(seeded(DynamicModel), batch, Path(folder, name), state=state, bits=bits)
        server = answer.Server(Path(folder, name))
        answers.append(
            answer.leaves(server.answer({key: batch[key] for key in server.about["inputs"]}))[0]
        )
    return sharded, ordinary, *answers  # type: ignore[return-value]


@pytest.mark.slow
def test_ids_find_their_rows_after_unshard_and_in_exports(tmp_path: Path) -> None:
    for rank_result in run_on_warm_ranks(_served, 2, str(tmp_path)):
        sharded, ordinary, served, packed = rank_result
        torch.testing.assert_close(ordinary, sharded)
        torch.testing.assert_close(served, sharded)
        torch.testing.assert_close(packed, sharded, atol=0.02, rtol=0.0)


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
    "unserved": (
        ManagedModel,
        {"track_id_freq": True},
        {},
        "HashZchManagedCollisionModule with track_id_freq",
    ),
    "left out": (
        ManagedModel,
        {"disable_fallback": True},
        {},
        "HashZchManagedCollisionModule with disable_fallback",
    ),
}


def _refused(kind: type[ManagedModel], options: dict[str, Any], tables: dict[str, Any]) -> str:
    rank, num_ranks = rank_and_num_ranks()
    try:
        trainer = make_trainer({"convert_embeddings": "all", "tables": tables})
        trainer.fit(kind(**options), loader(0, 1, rank, num_ranks, 2))
    except DistRecError as error:
        return str(error)
    return ""


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
    _train(Resized, {}, (0, 1), saves=path)
    messages = []
    for scale, resumes, options in (
        (2, path, {}),
        (2, "", {"start_from": path, "grow_tables": True}),
    ):
        try:
            _train(
                Resized, {"scale": scale}, (0, 1), resumes=resumes, strategy={"checkpoint": options}
            )
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
    path, twice = str(tmp_path), (0, 2 * STEPS)
    first = run_each_on_ranks({name: (_train, *item, twice) for name, item in EVICTING.items()}, 1)[
        0
    ]
    two = run_each_on_ranks(
        {
            f"{when} {name}": (_train, *item, steps, saves)
            for name, item in EVICTING.items()
            for when, steps, saves in (
                ("all", twice, ""),
                ("half", (0, STEPS), f"{path}/{name}.ckpt"),
            )
        },
        2,
    )
    later = (STEPS, 2 * STEPS)
    resumes = {
        name: (_train, *item, later, "", f"{path}/{name}.ckpt") for name, item in EVICTING.items()
    }
    resumed = {num_ranks: run_each_on_ranks(resumes, num_ranks)[0] for num_ranks in (1, 3)}
    for name in EVICTING:
        expected = first[name]["state"]
        assert (
            first[name]["evicted"]
            == sum(rank_result[f"all {name}"]["evicted"] for rank_result in two)
            > 10
        )
        assert too_far(two[0][f"all {name}"]["state"], expected, 1e-5) == {}, name
        assert first[name]["shared"] > 0, "they are left out, where the module says so"
        hand_trained = _train_by_hand(*EVICTING[name], 2 * STEPS)
        assert too_far({key: expected[key] for key in hand_trained}, hand_trained, 1e-5) == {}, name
        for num_ranks, actual in resumed.items():
            assert too_far(actual[name]["state"], expected, 1e-5) == {}, (name, num_ranks)
