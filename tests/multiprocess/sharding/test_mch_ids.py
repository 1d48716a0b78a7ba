"""MCHManagedCollisionModules on 2 and 3 ranks, against TorchRec's own code in one process: a module
for each bucket."""

import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor
from torchrec.modules.mc_modules import (
    MCHManagedCollisionModule,
    average_threshold_filter,
    probabilistic_threshold_filter,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_distrec.errors import DistRecError
from lightning_distrec.serving import answer
from lightning_distrec.serving.artifact import export_for_serving
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support import incremental_runs
from tests.support.click_model import seeded
from tests.support.embedding_models import too_far, whole_state
from tests.support.mapped_models import (
    BUCKETS,
    FEATURES,
    FEATURES_OF,
    ROWS,
    MchModel,
    MchSequences,
    joined,
    loader,
    make_batch,
    mch,
    remainders,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 8
OF = 6
"""Each step has the batches of this number of ranks, however many ranks train."""
NO_ID = torch.iinfo(torch.int64).max


def _train(
    kind: type[MchModel],
    options: dict[str, Any],
    steps: tuple[int, int] = (0, STEPS),
    saves: str = "",
    resumes: str = "",
    **trainer_options: Any,
) -> dict[str, Any]:
    rank, num_ranks = rank_and_num_ranks()
    model = seeded(kind, **options)
    trainer = make_trainer(max_epochs=2 if resumes else 1, **trainer_options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(model, loader(*steps, rank, num_ranks, OF), ckpt_path=resumes or None)
    if saves:
        trainer.save_checkpoint(saves)
    tables = sharded_tables_of(model)
    assert tables is not None
    counts = [mapping.counts for mapping in tables.mappings.values()]
    totals = {
        name: sum(getattr(item, name) for item in counts)
        for name in ("looked_up", "evicted", "shared")
    }
    notes = [str(part.message) for part in warned if "MCHManaged" in str(part.message)]
    return {"state": whole_state(model), "losses": model.losses, "warned": notes, **totals}


class ByHand:
    """TorchRec's module for each bucket of one table, and what resets rows."""

    def __init__(
        self, name: str, options: dict[str, Any], weight: Tensor, first_rows: Tensor
    ) -> None:
        self.weight, self.first_rows, self.size = weight, first_rows, len(weight) // BUCKETS
        whole: MCHManagedCollisionModule = mch(name, **options)
        self.whole, self.buckets = whole, []
        for bucket in range(BUCKETS):
            ends = (bucket * self.size, (bucket + 1) * self.size)
            module = whole.rebuild_with_output_id_range(ends, list(ends)).train()
            # It has room for the ids of an interval by the first batch, in which a bucket may have
            # none.
            module._init_history_buffers({
                "": JaggedTensor(torch.empty(10_000), lengths=torch.tensor([10_000]))
            })
            self.buckets.append(module)

    def __call__(self, ids: Tensor, states: list[Tensor]) -> Tensor:
        ids = self.whole.preprocess({"": JaggedTensor(ids, lengths=torch.tensor([len(ids)]))})[
            ""
        ].values()
        size = self.whole.input_size()
        bucket_of = ids % BUCKETS if size == NO_ID else ids // -(-size // BUCKETS)
        rows = torch.empty_like(ids)
        for bucket, module in enumerate(self.buckets):
            local = bucket_of == bucket
            had = {int(row) for id_, row in _pairs(module) if id_ != NO_ID}
            arguments = {"": JaggedTensor(ids[local], lengths=torch.tensor([int(local.sum())]))}
            rows[local] = module.remap(module.profile(arguments))[""].values()
            current = {row: id_ for id_, row in _pairs(module)}
            changed = module.evict()
            for row in [] if changed is None else [row for row in changed.tolist() if row in had]:
                with torch.no_grad():
                    self.weight[row] = self.first_rows[current[row] % len(self.first_rows)]
                    for state in states:
                        state[row] = 0.0
        return rows


def _pairs(module: MCHManagedCollisionModule) -> list[tuple[int, int]]:
    ids, rows = module._mch_sorted_raw_ids.tolist(), module._mch_remapped_ids_mapping.tolist()
    return list(zip(ids, rows, strict=True))


def _train_by_hand(
    options: dict[str, Any], steps: int = STEPS
) -> tuple[dict[str, Tensor], dict[str, dict[int, int]]]:
    """Return the weights after a plain loop, and of each table the rows of ids."""
    model = seeded(MchModel, **options)
    bags, optimizer = model.mc._embedding_module, model.configure_optimizers()
    own_values = {name: value for name, value in options.items() if name != "optimizer"}
    tables = {}
    for config in bags.embedding_bag_configs():
        torch.manual_seed(zlib.crc32(f"mc._embedding_module.{config.name}".encode()))
        first_rows = config.init_fn(torch.empty(config.num_embeddings, config.embedding_dim))
        tables[config.name] = ByHand(
            config.name, own_values, bags.embedding_bags[config.name].weight, first_rows
        )
    for step in range(steps):
        batch = joined([make_batch(100 * step + rank) for rank in range(OF)])
        per_feature = list(
            batch["ids"].split(batch["lengths"].view(len(FEATURES), -1).sum(1).tolist())
        )
        for name, table in tables.items():
            places = [FEATURES.index(feature) for feature in FEATURES_OF[name]]
            states = [state for state in optimizer.state[table.weight].values() if state.dim()]
            rows = table(torch.cat([per_feature[place] for place in places]), states)
            for place, part in zip(
                places, rows.split([len(per_feature[place]) for place in places]), strict=True
            ):
                per_feature[place] = part
        features = KeyedJaggedTensor(FEATURES, torch.cat(per_feature), lengths=batch["lengths"])
        scores = model.over(bags(features).values()).squeeze(-1)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(scores, batch["label"]).backward()
        optimizer.step()
    rows_of_ids = {
        name: {id_: row for module in table.buckets for id_, row in _pairs(module) if id_ != NO_ID}
        for name, table in tables.items()
    }
    return {
        key: value.detach() for key, value in model.state_dict().items() if "collision" not in key
    }, rows_of_ids


def _rows_of_ids(state: dict[str, Tensor], table: str) -> dict[int, int]:
    prefix = f"mc._managed_collision_collection._managed_collision_modules.{table}."
    ids, rows = (
        state[f"{prefix}_mch_sorted_raw_ids"].tolist(),
        state[f"{prefix}_mch_remapped_ids_mapping"].tolist(),
    )
    return {id_: row for id_, row in zip(ids, rows, strict=True) if id_ != NO_ID}


HASHED = {"input_hash_func": remainders, "input_hash_size": 1000}
OPTIONS: dict[str, dict[str, Any]] = {
    "lfu": {"policy": "lfu"},
    "lru": {"policy": "lru", "interval": 1, "optimizer": "Adam"},
    "distance": {"policy": "distance", "interval": 1, **HASHED},
    "filtered": {
        "policy": "distance",
        "interval": 3,
        "filters": average_threshold_filter,
        "optimizer": "SGD",
    },
}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ids_have_the_rows_that_torchrec_gives_them_in_each_bucket(num_ranks: int) -> None:
    actual = run_each_on_ranks(
        {name: (_train, MchModel, options) for name, options in OPTIONS.items()}, num_ranks
    )
    for name, options in OPTIONS.items():
        weights, rows_of_ids = _train_by_hand(options)
        state = actual[0][name]["state"]
        for table in ROWS:
            assert _rows_of_ids(state, table) == rows_of_ids[table], name
        assert too_far({key: state[key] for key in weights}, weights, 1e-5) == {}, name
        assert sum(rank_result[name]["evicted"] for rank_result in actual) > 5, name
        assert sum(rank_result[name]["shared"] for rank_result in actual) > 5, name


def alike(rows: Tensor) -> Tensor:
    """Let all ids start alike, whatever row they get."""
    return nn.init.constant_(rows, 0.1)


ROOMY: dict[str, Any] = {"scale": 8, "interval": 1, "init": alike}


@pytest.mark.parametrize("kind", [MchModel, pytest.param(MchSequences, marks=pytest.mark.slow)])
def test_until_an_id_is_evicted_losses_and_ids_are_those_of_torchrec_in_one_process(
    kind: type[MchModel],
) -> None:
    model = seeded(kind, **ROOMY)
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        loss = model.training_step(joined([make_batch(100 * step + rank) for rank in range(OF)]), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    actual = run_each_on_ranks({"": (_train, kind, ROOMY)}, 2)
    losses = torch.tensor([rank_result[""]["losses"] for rank_result in actual]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(model.losses), rtol=0, atol=1e-5)
    for table in ROWS:
        expected = _rows_of_ids(model.state_dict(), table)
        assert len(expected) > 20
        assert _rows_of_ids(actual[0][""]["state"], table).keys() == expected.keys()


def test_checkpoints_go_on_with_other_numbers_of_ranks_and_torchrec_reads_them(
    tmp_path: Path,
) -> None:
    options, path = {"policy": "lru", **HASHED}, f"{tmp_path}/half.ckpt"
    half, later = (0, STEPS), (STEPS, 2 * STEPS)
    calls: dict[str, tuple[Any, ...]] = {}
    for name, interval in (("at an update", 2), ("between", 3)):
        item, saved = {**options, "interval": interval}, path.replace("half", name)
        calls |= {f"all {name}": (_train, MchModel, item, (0, 2 * STEPS))}
        calls |= {f"half {name}": (_train, MchModel, item, half, saved)}
        calls |= {f"resumed {name}": (_train, MchModel, item, later, "", saved)}
    two = run_each_on_ranks(calls, 2)
    for name in ("at an update", "between"):
        assert (
            too_far(two[0][f"resumed {name}"]["state"], two[0][f"all {name}"]["state"], 1e-5) == {}
        ), name
        assert sum(rank_result[f"resumed {name}"]["evicted"] for rank_result in two) > 5
    expected, path = two[0]["all at an update"]["state"], path.replace("half", "at an update")
    resumes = {"": (_train, MchModel, options, later, "", path)}
    resumed = {num_ranks: run_each_on_ranks(resumes, num_ranks)[0][""] for num_ranks in (1, 3)}
    for num_ranks, run in resumed.items():
        assert run["state"].keys() == expected.keys()
        assert too_far(run["state"], expected, 1e-5) == {}, num_ranks
        assert run["warned"] == []
    between = (
        _train,
        MchModel,
        {**options, "interval": 3},
        later,
        "",
        path.replace("at an update", "between"),
    )
    (warned,) = run_each_on_ranks({"": between}, 1)[0][""]["warned"]
    assert "has noted since it last gave rows cannot be restored" in warned
    # TorchRec's own module, unsharded, has the same rows of ids.
    single = seeded(MchModel, **options)
    single.load_state_dict(expected)
    for table in ROWS:
        assert _rows_of_ids(single.state_dict(), table) == _rows_of_ids(expected, table)


def _after_training(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the answers of the sharded module, of one that begins with its state, of the ordinary
    one, of a server.

    Most of the ids have no rows.
    """
    rank, num_ranks = rank_and_num_ranks()
    model, batch = (
        seeded(MchModel),
        joined([make_batch(100 * step, kinds=200) for step in range(3)]),
    )
    trainer, batches = make_trainer(), DataLoader([batch], batch_size=None)
    trainer.fit(model, loader(0, STEPS, rank, num_ranks, OF))
    trainer.save_checkpoint(f"{folder}/trained.ckpt")
    (sharded,) = trainer.predict(model, batches)  # type: ignore[misc]
    state = torch.load(f"{folder}/trained.ckpt", weights_only=True)["state_dict"]
    repeated = MchModel()
    repeated.load_state_dict(state)
    (loaded,) = make_trainer().predict(repeated, batches)  # type: ignore[misc]
    trainer.strategy.unshard()  # type: ignore[attr-defined]
    with torch.no_grad():
        ordinary = model.eval()(batch)
    if rank:
        return sharded, loaded, ordinary, sharded
    export_for_serving(MchModel(), batch, Path(folder, "served"), state=state)
    server = answer.Server(Path(folder, "served"))
    (served,) = answer.leaves(server.answer({key: batch[key] for key in server.about["inputs"]}))
    return sharded, loaded, ordinary, served  # type: ignore[return-value]


@pytest.mark.slow
def test_ids_find_their_rows_after_loading_after_unshard_and_in_exports(tmp_path: Path) -> None:
    for sharded, *remaining in run_on_warm_ranks(_after_training, 2, str(tmp_path)):
        for other in remaining:
            torch.testing.assert_close(other, sharded)


def test_a_policy_that_draws_does_so_alike_on_any_number_of_ranks() -> None:
    states = [
        run_each_on_ranks({"": (_train, MchModel, {"filters": half_of_the_ids})}, num_ranks)[0][""][
            "state"
        ]
        for num_ranks in (1, 2)
    ]
    assert too_far(states[1], states[0], 1e-5) == {}


def half_of_the_ids(counts: Tensor) -> Any:
    """Let ids have rows by chance."""
    return probabilistic_threshold_filter(counts, 0.5)


def out_of_range(ids: Tensor, size: int) -> Tensor:
    """Return numbers that are too large."""
    return ids + size


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "buckets": (
        {"buckets": 1},
        "have one bucket, which 2 ranks cannot share evenly. Set buckets of its MCHManaged",
    ),
    "size": ({"buckets": 10}, "zch_size=24 must be a multiple of buckets=10"),
    "hash": ({"input_hash_func": out_of_range, "input_hash_size": 600}, "numbers for"),
    "part": ({"output_global_offset": 24}, "output_global_offset=24 is not sharded"),
}


def _refused(options: dict[str, Any]) -> str:
    rank, num_ranks = rank_and_num_ranks()
    try:
        make_trainer().fit(MchModel(**options), loader(0, 1, rank, num_ranks, 2))
    except DistRecError as error:
        return str(error)
    return ""


def test_what_would_map_ids_otherwise_is_refused() -> None:
    for rank_result in run_each_on_ranks(
        {name: (_refused, options) for name, (options, _) in REFUSED.items()}, 2
    ):
        for name, (_, message) in REFUSED.items():
            assert message in rank_result[name], name


def _saves_differences(folder: str, options: dict[str, Any]) -> None:
    rank, num_ranks = rank_and_num_ranks()
    arguments = {"incremental": {**incremental_runs.SERIES, "dirpath": f"{folder}/series"}}
    trainer = make_trainer(
        {"checkpoint": arguments},
        callbacks=[incremental_runs.FullToo(folder)],
        default_root_dir=folder,
    )
    trainer.fit(seeded(MchModel, **options), loader(0, 2 * STEPS, rank, num_ranks, OF, kinds=1000))


@pytest.mark.parametrize("optimizer", ["Adagrad", pytest.param("SGD", marks=pytest.mark.slow)])
def test_differences_hold_the_rows_of_ids_that_a_step_does_not_look_up(
    optimizer: str, tmp_path: Path
) -> None:
    options = {"policy": "lru", "interval": 3, "optimizer": optimizer, "scale": 8}
    run_on_warm_ranks(_saves_differences, 2, str(tmp_path), options)
    series = incremental_runs.assert_same_as_full(tmp_path)
    assert any(
        mark.changed
        for name, mark in series.items()
        if int(name.split("-")[0].removeprefix("step=")) > 9
    )
