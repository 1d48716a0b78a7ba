"""A resumed run trains each sample as often as the run that never stopped, or a warning says that
it does not."""

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, Subset

from lightning_distrec import TorchRecShardedStrategy
from tests.support.drawing_runs import (
    Drawing,
    Noisy,
    Numbered,
    Sample,
    SavesAt,
    Splitting,
    Stream,
    WithTable,
    fit,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

KINDS: dict[str, tuple[type[Noisy], Any]] = {
    "ddp_tuned": (Noisy, lambda: "ddp_tuned"),
    "torchrec_sharded": (WithTable, lambda: TorchRecShardedStrategy(convert_embeddings="all")),
}
PLAIN = {"limit_val_batches": 0, "max_epochs": 3}


class Permuted(Sampler[int]):
    """As torchdata's RandomSampler: none of torch's, and with a generator of its own, of a seed
    that is drawn."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.generator = torch.Generator().manual_seed(
            int(torch.empty((), dtype=torch.int64).random_())
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self.samples), generator=self.generator).tolist())


class InBatches(BatchSampler):
    """As torchdata's BatchSampler: its iterators are its own."""

    __module__ = "torchdata.stateful_dataloader.sampler"

    def __iter__(self) -> Iterator[list[int]]:
        entries = iter(self.sampler)
        while batch := [entry for _, entry in zip(range(self.batch_size), entries, strict=False)]:
            yield batch


class StatefulLoader(DataLoader[Any]):
    """As torchdata's StatefulDataLoader: its state is a count, by which it goes forward in the
    sampler's next order."""

    __module__ = "torchdata.stateful_dataloader.stateful_dataloader"

    def __init__(self, dataset: Any, batch_sampler: Any = None, **options: Any) -> None:
        is_stream = isinstance(dataset, IterableDataset)
        options.pop("shuffle", None)
        if batch_sampler is None and not is_stream:
            sampler = options.pop("sampler", None) or Permuted(dataset)
            batch_sampler = InBatches(
                sampler, options.pop("batch_size", 1), options.pop("drop_last", False)
            )
        chosen = {} if is_stream else {"batch_sampler": batch_sampler}
        super().__init__(
            dataset, **chosen, **({"batch_size": options.get("batch_size", 1)} if is_stream else {})
        )
        self.num_yielded = self.num_skipped = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_skipped = state["num_yielded"]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skipped, self.num_skipped, self.num_yielded = self.num_skipped, 0, 0
        return self._batches(super().__iter__(), skipped)

    def _batches(self, batches: Iterator[Any], num_skipped: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, 1):
            self.num_yielded = number
            if number > num_skipped:
                yield batch


class Ordered(Stream):
    """A stream of one order."""

    def __iter__(self) -> Iterator[Sample]:
        for index in range(self.rank, 40, self.num_replicas):
            yield Numbered()[index]

    def state_dict(self) -> dict[str, Any]:
        """Hugging Face's iterable datasets have a state, which a plain DataLoader asks for
        nothing."""
        return {}


class OfAnyKind(Splitting):
    """Makes its training loader by a function of its samples."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make(self, Subset(Numbered(), range(40)))


class Webdataset:
    """A loader of no class of torch's, and without a length."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.samples = Ordered(rank, num_replicas)

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.samples, batch_size=4))


def _own(data: Any, samples: Any) -> Any:
    return DataLoader(
        samples, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    )


def _wrapped(data: Any, samples: Any) -> Any:
    return DataLoader(samples, batch_size=4, sampler=Permuted(samples))


def _stateful(data: Any, samples: Any) -> Any:
    return StatefulLoader(samples, batch_size=4, shuffle=True)


def _stateful_stream(data: Any, samples: Any) -> Any:
    return StatefulLoader(Ordered(**data.trainer.distributed_sampler_kwargs), batch_size=4)


def _streamed(data: Any, samples: Any) -> Any:
    return DataLoader(Ordered(**data.trainer.distributed_sampler_kwargs), batch_size=4)


def _webdataset(data: Any, samples: Any) -> Any:
    return Webdataset(**data.trainer.distributed_sampler_kwargs)


def _several(data: Any, samples: Any) -> Any:
    return {"a": _own(data, samples), "b": DataLoader(samples, batch_size=3, shuffle=True)}


class Several(Noisy):
    """Takes the batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(
            (torch.cat([batch["a"][0], batch["b"][0]]), batch["a"][1]), batch_idx
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(
            outputs, (torch.cat([batch["a"][0], batch["b"][0]]), batch["a"][1]), batch_idx
        )


LOADERS = {
    "own generator": _own,
    "wrapped sampler": _wrapped,
    "torchdata": _stateful,
    "torchdata's stream": _stateful_stream,
}
MIDDLES = {"in an epoch": ("batch", 12), "between epochs": ("epoch", 5)}


def _resume(strategy: str, make: Any, save: tuple[str, int], path: str, kind: Any = None) -> Any:
    model, make_strategy = KINDS[strategy]
    saves = SavesAt(path, *save)
    options = PLAIN | {"kind": kind or model}
    first = fit(make_strategy(), OfAnyKind(make), saves, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(make_strategy(), OfAnyKind(make), ckpt_path=path, **options)
    return first.seen[saves.num_seen :], resumed.seen, [str(warning.message) for warning in caught]


def _check(strategies: Any, loaders: Any, num_ranks: int, folder: Any) -> None:
    calls: dict[str, tuple[Any, ...]] = {
        f"{strategy}, {loader}, {place}": (
            _resume,
            strategy,
            LOADERS[loader],
            save,
            f"{folder}/{strategy}{loader}{place}",
        )
        for strategy in strategies
        for loader in loaders
        for place, save in MIDDLES.items()
    }
    calls["two loaders"] = (_resume, "ddp_tuned", _several, ("batch", 12), f"{folder}/two", Several)
    for outcomes in run_each_on_ranks(calls, num_ranks):
        for name, (expected, actual, texts) in outcomes.items():
            assert len(expected) > 2, name
            assert actual == expected, name
            assert not [
                text for text in texts if "starts again" in text or "another order" in text
            ], name


def test_loaders_with_generators_or_a_state_of_their_own_continue(tmp_path: Any) -> None:
    _check(["ddp_tuned"], ["own generator", "torchdata"], 2, tmp_path)


@pytest.mark.slow
def test_loaders_of_all_kinds_continue_under_each_strategy_that_fetches_in_its_own_way(
    tmp_path: Any,
) -> None:
    _check(KINDS, LOADERS, 2, tmp_path)


def test_loaders_without_a_position_start_the_epoch_again_and_it_is_reported(
    tmp_path: Any,
) -> None:
    calls = {
        "stream": (_resume, "ddp_tuned", _streamed, ("batch", 3), f"{tmp_path}/a"),
        "webdataset": (_resume, "torchrec_sharded", _webdataset, ("batch", 3), f"{tmp_path}/b"),
    }
    for rank, outcomes in enumerate(run_each_on_ranks(calls, 2)):
        for name, (_, actual, texts) in outcomes.items():
            described = "DataLoader over Ordered" if name == "stream" else "Webdataset"
            reports = [text for text in texts if "no position of" in text]
            assert len(reports) == (rank == 0)
            assert all(described in text for text in reports)
            assert all("So this epoch starts again" in text for text in reports)
            trained = [ids for kind, ids, *_ in actual if kind == "train"]
            assert sorted(sum(trained, [])) == sorted(list(range(rank, 40, 2)) * 3), name


class Stops(pl.Callback):
    """Stops as a time limit or EarlyStopping does."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = trainer.global_step == 7


def _cut(strategy: str, settings: dict[str, Any], folder: str) -> Any:
    """Return the steps after the seventh in a run that never stopped, and in one that was saved
    when it had ended."""
    kind, make_strategy = KINDS[strategy]
    options: dict[str, Any] = {"kind": kind, "limit_val_batches": 0}
    never_stopped = fit(make_strategy(), Drawing(), max_epochs=4, **options)
    pl.seed_everything(5)
    module, settings = kind(), dict(settings)
    saver = ModelCheckpoint(folder, filename="end", save_on_train_epoch_end=True)
    callbacks = [saver, *(Stops() for _ in range(settings.pop("stops", 0)))]
    trainer = pl.Trainer(
        strategy=make_strategy(),
        devices=rank_and_num_ranks()[1],
        callbacks=callbacks,
        **(
            DEFAULTS
            | {
                "enable_checkpointing": True,
                "use_distributed_sampler": True,
                "limit_val_batches": 0,
            }
            | settings
        ),
    )
    trainer.fit(module, Drawing())
    torch.rand(3)  # of nobody's run
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    resumed = [
        fit(make_strategy(), Drawing(), ckpt_path=path, max_epochs=4, **options).seen
        for path in (f"{folder}/after.ckpt", saver.best_model_path)
    ]
    return never_stopped.seen[-len(resumed[0]) :], *resumed


def test_an_epoch_that_a_limit_has_cut_off_continues_with_its_next_batch(tmp_path: Any) -> None:
    steps, stop = {"max_steps": 7, "max_epochs": -1}, {"stops": 1, "max_epochs": 4}
    calls = {
        "limit": (_cut, "torchrec_sharded", steps, str(tmp_path / "limit")),
        "stop": (_cut, "ddp_tuned", stop, str(tmp_path / "stop")),
    }
    for outcomes in run_each_on_ranks(calls, 2):
        for name, (expected, after, at_end) in outcomes.items():
            # of 4 epochs of 5 batches
            assert sum(kind == "train" for kind, *_ in expected) == 13, name
            assert after == expected, name
            assert at_end == expected, name


class Plain(Noisy):
    """Draws nothing, so that a batch that is trained again gives the same gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        loss = (self(batch[1]) ** 2).mean()
        self.log("loss", loss)
        return loss


def _accumulate(path: str) -> Any:
    saves = SavesAt(path, "batch", 7)
    options: dict[str, Any] = PLAIN | {"kind": Plain, "accumulate_grad_batches": 4}
    first = fit("ddp_tuned", Splitting(), saves, **options)
    resumed = fit("ddp_tuned", Splitting(), ckpt_path=path, **options)
    return (
        first.state_dict(),
        resumed.state_dict(),
        len([one for one in resumed.seen if one[0] == "train"]),
    )


def test_gradients_that_were_accumulated_are_those_of_the_same_batches_again(tmp_path: Any) -> None:
    for outcome in run_each_on_ranks({"it": (_accumulate, str(tmp_path / "it.ckpt"))}, 2):
        expected, actual, num_batches = outcome["it"]
        # the seventh is the second of its epoch, and both are trained again
        assert num_batches == 10
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
