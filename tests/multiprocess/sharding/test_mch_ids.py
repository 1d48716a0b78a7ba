"""MCHManagedCollisionModules on 2 and 3 ranks, against TorchRec's own code in one process: a module
for each bucket."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mc_modules import (
    MCHManagedCollisionModule,
    average_threshold_filter,
    probabilistic_threshold_filter,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.support import incremental_runs
from tests.support.click_model import seeded
from tests.support.embedding_models import too_far
from tests.support.mapped_models import (
    BUCKETS,
    ROWS,
    MchModel,
    loader,
    mch,
    remainders,
)
from tests.support.mapped_runs import (
    BATCH_PARTS,
    ByHand,
    refusal,
    train,
    train_by_hand,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 8
NO_ID = torch.iinfo(torch.int64).max


class MchByHand(ByHand):
    """TorchRec's module for each bucket of one table."""

    def __init__(self, options: dict[str, Any], config: Any, weight: Tensor) -> None:
        super().__init__(config, weight)
        self.whole: MCHManagedCollisionModule = mch(config.name, **options)
        self.buckets, size = [], len(weight) // BUCKETS
        for bucket in range(BUCKETS):
            ends = (bucket * size, (bucket + 1) * size)
            module = self.whole.rebuild_with_output_id_range(ends, list(ends)).train()
            # It has room for the ids of an interval by the first batch, in which a bucket may have
            # none.
            module._init_history_buffers(_jagged(torch.empty(10_000)))
            self.buckets.append(module)

    def find_rows(self, ids: Tensor) -> Tensor:
        ids = self.whole.preprocess(_jagged(ids))[""].values()
        size = self.whole.input_size()
        bucket_of = ids % BUCKETS if size == NO_ID else ids // -(-size // BUCKETS)
        rows = torch.empty_like(ids)
        for bucket, module in enumerate(self.buckets):
            local = bucket_of == bucket
            had = {int(row) for id_, row in _pairs(module) if id_ != NO_ID}
            rows[local] = module.remap(module.profile(_jagged(ids[local])))[""].values()
            current = {row: id_ for id_, row in _pairs(module)}
            changed = module.evict()
            evicted = [] if changed is None else [row for row in changed.tolist() if row in had]
            self.start_anew(
                torch.tensor(evicted, dtype=torch.long),
                torch.tensor([current[row] for row in evicted], dtype=torch.long),
            )
        return rows


def _jagged(ids: Tensor) -> dict[str, JaggedTensor]:
    return {"": JaggedTensor(ids, lengths=torch.tensor([len(ids)]))}


def _pairs(module: MCHManagedCollisionModule) -> list[tuple[int, int]]:
    ids, rows = module._mch_sorted_raw_ids.tolist(), module._mch_remapped_ids_mapping.tolist()
    return list(zip(ids, rows, strict=True))


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
    "filtered": {
        "policy": "distance",
        "interval": 3,
        "filters": average_threshold_filter,
        "optimizer": "SGD",
        **HASHED,
    },
}


def test_ids_have_the_rows_that_torchrec_gives_them_in_each_bucket() -> None:
    calls = {name: (train, MchModel, options, (0, STEPS)) for name, options in OPTIONS.items()}
    actual = run_each_on_ranks(calls, 2)
    for name, options in OPTIONS.items():
        model = seeded(MchModel, **options)
        of_module = {key: value for key, value in options.items() if key != "optimizer"}
        weights, tables = train_by_hand(model, partial(MchByHand, of_module), STEPS)
        state = actual[0][name]["state"]
        for table in tables:
            pairs = [pair for module in table.buckets for pair in _pairs(module)]
            rows_of_ids = {id_: row for id_, row in pairs if id_ != NO_ID}
            assert _rows_of_ids(state, table.name) == rows_of_ids, name
        assert too_far({key: state[key] for key in weights}, weights, 1e-5) == {}, name
        assert sum(rank_result[name]["evicted"] for rank_result in actual) > 5, name
        assert sum(rank_result[name]["shared"] for rank_result in actual) > 5, name


def alike(rows: Tensor) -> Tensor:
    """Let all ids start alike, whatever row they get."""
    return nn.init.constant_(rows, 0.1)


def test_checkpoints_go_on_with_other_numbers_of_ranks_and_torchrec_reads_them(
    tmp_path: Path,
) -> None:
    half, later = (0, STEPS), (STEPS, 2 * STEPS)
    calls: dict[str, tuple[Any, ...]] = {}
    resumes: dict[str, tuple[Any, ...]] = {}
    for name, interval in (("at an update", 2), ("between", 3)):
        options = {"policy": "lru", "interval": interval, **HASHED}
        path = f"{tmp_path}/{name}.ckpt"
        calls[f"all {name}"] = (train, MchModel, options, (0, 2 * STEPS))
        calls[f"half {name}"] = (train, MchModel, options, half, path)
        resumes[name] = (train, MchModel, options, later, "", path)
    two = run_each_on_ranks(calls | {"resumed": resumes["between"]}, 2)
    assert too_far(two[0]["resumed"]["state"], two[0]["all between"]["state"], 1e-5) == {}
    assert sum(of_rank["resumed"]["evicted"] for of_rank in two) > 5
    expected = two[0]["all at an update"]["state"]
    resumed = run_each_on_ranks({"": resumes["at an update"]}, 3)[0][""]
    assert resumed["state"].keys() == expected.keys()
    assert too_far(resumed["state"], expected, 1e-5) == {}
    assert resumed["warned"] == []
    (warned,) = run_each_on_ranks({"": resumes["between"]}, 1)[0][""]["warned"]
    assert "has noted since it last gave rows cannot be restored" in warned
    # TorchRec's own module, unsharded, has the same rows of ids.
    single = seeded(MchModel, policy="lru", **HASHED)
    single.load_state_dict(expected)
    for table in ROWS:
        assert _rows_of_ids(single.state_dict(), table) == _rows_of_ids(expected, table)


def test_a_policy_that_draws_does_so_alike_on_any_number_of_ranks() -> None:
    call = (train, MchModel, {"filters": half_of_the_ids}, (0, STEPS))
    states = [run_each_on_ranks({"": call}, number)[0][""]["state"] for number in (1, 2)]
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


def test_what_would_map_ids_otherwise_is_refused() -> None:
    calls = {name: (refusal, MchModel, options) for name, (options, _) in REFUSED.items()}
    for rank_result in run_each_on_ranks(calls, 2):
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
    trainer.fit(
        seeded(MchModel, **options), loader(0, 2 * STEPS, rank, num_ranks, BATCH_PARTS, kinds=1000)
    )


def test_differences_hold_the_rows_of_ids_that_a_step_does_not_look_up(tmp_path: Path) -> None:
    options = {"policy": "lru", "interval": 3, "optimizer": "Adagrad", "scale": 8}
    run_on_warm_ranks(_saves_differences, 2, str(tmp_path), options)
    series = incremental_runs.assert_same_as_full(tmp_path)
    assert any(
        mark.changed
        for name, mark in series.items()
        if int(name.split("-")[0].removeprefix("step=")) > 9
    )
