"""Loaders of other libraries, and of users, continue as if the run had never stopped: in the epoch
that is resumed, and in those after it."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as pl
import pytest
import torch
import webdataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.drawing_runs import WIDTH, Noisy, SavesAt, WithTable, fit
from tests.support.ranks import RankFailed, run_each_on_ranks

NUM_ROWS = 40
IN_EPOCH, AT_AN_END, BETWEEN = ("batch", 7), ("batch", 5), ("epoch", 8)


def collate(rows: list[Any]) -> Any:
    ids = torch.tensor([int(row["id"]) if isinstance(row, dict) else row for row in rows])
    return ids, torch.sin(torch.arange(WIDTH) * (1.0 + ids[:, None]))


def stateful(dataset: Any, **options: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=4, collate_fn=collate, **options)


def rows_of(rank: int, num_ranks: int) -> list[int]:
    return list(range(rank, NUM_ROWS, num_ranks))


def stream(rank: int, num_ranks: int, folder: Path, **options: Any) -> Any:
    """A stream of datasets; each rank has shards of it, in another order than they are made in."""
    rows = datasets.Dataset.from_dict({"id": list(range(NUM_ROWS))})
    shards = rows.to_iterable_dataset(num_shards=4)
    if not options:
        shards = shards.shuffle(seed=3, buffer_size=1)
    return stateful(split_dataset_by_node(shards, rank, num_ranks), **options)


def map_style(rank: int, num_ranks: int, folder: Path) -> Any:
    rows = datasets.Dataset.from_dict({"id": list(range(NUM_ROWS))})
    return DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)


class Permuted(IterableDataset[int]):
    """Has no state: torchdata counts its samples, whose order is drawn when it begins."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        yield from (self.rows[i] for i in torch.randperm(len(self.rows)).tolist())


class Sticks(Permuted):
    """Its state stays where it was loaded."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        for i in range(self.start, len(self.rows)):
            self.i = i + 1
            yield self.rows[i]

    def state_dict(self) -> dict[str, int]:
        return {"i": getattr(self, "i", 0)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["i"]


class Turns(Sticks):
    """Goes the other way in each epoch, which its state counts."""

    start = epoch = 0

    def __iter__(self) -> Iterator[int]:
        rows = self.rows[::-1] if self.epoch % 2 else self.rows
        while self.start < len(rows):
            self.start += 1
            yield rows[self.start - 1]
        self.start = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"i": self.start, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.epoch = state["i"], state["epoch"]


class Generates:
    """A user's own loader, which begins, and draws an order, with its first batch."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rows = rows_of(rank, num_ranks)
        self.start = self.count = 0

    def __len__(self) -> int:
        return len(self.rows) // 4

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        batches = DataLoader(self.rows, batch_size=4, shuffle=True, collate_fn=collate)
        for self.count, batch in enumerate(batches, 1):
            if self.count > start:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["count"]


class GeneratesFromThere(Generates):
    """Never begins at its beginning again."""

    def __iter__(self) -> Iterator[Any]:
        batches = DataLoader(self.rows, batch_size=4, collate_fn=collate)
        for self.count, batch in enumerate(batches, 1):
            if self.count > self.start:
                yield batch


class DrawsWithEach(Generates):
    """Draws with each batch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            torch.rand(())
            yield batch


def over(kind: Any, rank: int, num_ranks: int, folder: Path, **options: Any) -> Any:
    return stateful(kind(rows_of(rank, num_ranks)), **options)


def nodes_in_order(rank: int, num_ranks: int, folder: Path) -> Any:
    rows = rows_of(rank, num_ranks)
    batches = nodes.Batcher(nodes.SamplerWrapper(SequentialSampler(rows)), 4)
    return nodes.Loader(nodes.Mapper(batches, lambda places: collate([rows[p] for p in places])))


def litdata_stream(rank: int, num_ranks: int, folder: Path) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    rows = StreamingDataset(str(folder / "litdata"), shuffle=True, seed=3)
    return StreamingDataLoader(rows, batch_size=4, collate_fn=collate)


def webdataset_stream(rank: int, num_ranks: int, folder: Path) -> Any:
    files = sorted(map(str, folder.glob("*.tar")))
    rows = webdataset.WebDataset(
        files, nodesplitter=webdataset.split_by_node, shardshuffle=False
    ).decode()
    return stateful(rows.map(lambda row: {"id": row["id.cls"]}))


class Loads(pl.LightningDataModule):
    """Has the loader that a function makes for a rank."""

    def __init__(self, make: Callable[..., Any], folder: Path) -> None:
        super().__init__()
        self.make, self.folder = make, folder

    def train_dataloader(self) -> Any:
        ranks = self.trainer.distributed_sampler_kwargs
        return self.make(ranks["rank"], ranks["num_replicas"], self.folder)


class Quiet(Noisy):
    """Draws nothing when an epoch begins, which Lightning does not tell after the last batch of
    one."""

    def on_train_epoch_start(self) -> None:
        pass


def resume(make: Any, save: tuple[str, int], strategy: str, folder: Path, name: str) -> Any:
    """Return what the module saw after the checkpoint, what in the resumed run, and warnings."""
    options: dict[str, Any] = {"limit_val_batches": 0, "max_epochs": 3, "kind": WithTable}
    options["accumulate_grad_batches"] = 2  # so that it matters how batches are counted
    if strategy == "ddp_tuned":
        options["kind"] = Quiet if save == AT_AN_END else Noisy
    path = str(folder / f"{name}.ckpt")
    saves = SavesAt(path, *save)
    first = fit(strategy, Loads(make, folder), saves, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(strategy, Loads(make, folder), ckpt_path=path, **options)
    return first.seen[saves.num_seen :], resumed.seen, [str(warning.message) for warning in caught]


MAKERS: dict[str, Callable[..., Any]] = {
    "stream": stream,
    "turns": partial(over, Turns),
    "generates": Generates,
}
SLOW_MAKERS: dict[str, Callable[..., Any]] = {
    "map": map_style,
    "permuted": partial(over, Permuted),
    "nodes": nodes_in_order,
    "webdataset": webdataset_stream,
    "stream, workers": partial(stream, num_workers=1),
    "sticks": partial(over, Sticks),
    "sticks, a worker that stays": partial(over, Sticks, num_workers=1, persistent_workers=True),
}
if find_spec("litdata"):
    SLOW_MAKERS["litdata"] = litdata_stream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for first in range(0, NUM_ROWS, 10):
        with webdataset.TarWriter(str(folder / f"{first}.tar")) as shard:
            for row in range(first, first + 10):
                shard.write({"__key__": str(row), "id.cls": row})
    if find_spec("litdata"):
        from litdata.streaming import Cache

        cache = Cache(str(folder / "litdata"), chunk_size=4)
        for row in range(NUM_ROWS):
            cache[row] = {"id": row}
        cache.done()
        cache.merge()
    return folder


def check(rows: dict[str, tuple[Any, ...]], folder: Path) -> None:
    calls = {name: (resume, *row, folder, name) for name, row in rows.items()}
    for outcomes in run_each_on_ranks(calls, 2):
        for name, (expected, actual, texts) in outcomes.items():
            assert len(expected) > 5, name
            assert actual == expected, name
            assert not any("starts again" in text for text in texts), name


def test_loaders_go_on_in_their_epoch_and_begin_the_next_ones_as_never_stopped(
    folder: Path,
) -> None:
    rows = {name: (make, IN_EPOCH, "ddp_tuned") for name, make in MAKERS.items()}
    rows["stream, between"] = (stream, BETWEEN, "ddp_tuned")
    rows["turns, at an end"] = (MAKERS["turns"], AT_AN_END, "ddp_tuned")
    rows["turns, between"] = (MAKERS["turns"], BETWEEN, "ddp_tuned")
    rows["stream and a table"] = (stream, IN_EPOCH, "torchrec_sharded")
    check(rows, folder)


@pytest.mark.slow
@pytest.mark.parametrize("save", [IN_EPOCH, BETWEEN])
def test_loaders_do_so_with_tables_and_workers(save: tuple[str, int], folder: Path) -> None:
    rows = {name: (make, save, "torchrec_sharded") for name, make in SLOW_MAKERS.items()}
    if save == BETWEEN:
        # Its new worker draws a seed, which one that had stayed would not.
        del rows["sticks, a worker that stays"]
    check(rows, folder)


@pytest.mark.skipif(find_spec("litdata") is None, reason="litdata pins torchvision to a torch")
def test_litdata_is_among_the_loaders() -> None:
    assert "litdata" in SLOW_MAKERS


def test_loaders_that_cannot_go_on_so_say_it(folder: Path) -> None:
    calls = {"draws": (resume, DrawsWithEach, IN_EPOCH, "ddp_tuned", folder, "draws")}
    expected, actual, texts = run_each_on_ranks(calls, 2)[0]["draws"]
    assert [row[1] for row in actual[:3]] == [row[1] for row in expected[:3]]
    assert actual != expected
    assert any("DrawsWithEach draws random numbers with each batch" in text for text in texts)
    calls = {"stays": (resume, GeneratesFromThere, IN_EPOCH, "ddp_tuned", folder, "stays")}
    with pytest.raises(RankFailed, match="GeneratesFromThere begins this epoch where the one"):
        run_each_on_ranks(calls, 2)
