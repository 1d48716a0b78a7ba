"""A resumed run draws what the run that never stopped drew, and trains each sample as often, or a
warning says that it does not."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
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
    Streaming,
    WithTable,
    fit,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

TABLES, DDP = "torchrec_sharded", "ddp_tuned"
STRATEGIES: dict[str, Callable[[], Any]] = {
    TABLES: lambda: TorchRecShardedStrategy(convert_embeddings="all"),
    DDP: lambda: "ddp_tuned",
    "fsdp_tuned": lambda: "fsdp_tuned",
    "pipeline_parallel": lambda: "pipeline_parallel",
}
MIDDLE, END = ("batch", 7), ("epoch", 6)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run that is saved on its way and goes on."""

    save: tuple[str, int]
    """The hook, and after how many batches."""
    data: Callable[[], pl.LightningDataModule] = Drawing
    strategy: str = TABLES
    kind: type[Noisy] = Noisy
    settings: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return what `fit` takes."""
        is_sharded = self.strategy == TABLES and self.kind is Noisy
        return {"kind": WithTable if is_sharded else self.kind, **self.settings}


def _resume(row: Row, path: str) -> tuple[list[Any], list[Any], list[str]]:
    """Return what the module saw after the checkpoint, what it saw in the resumed run, and warnings
    of that one."""
    make, saves = STRATEGIES[row.strategy], SavesAt(path, *row.save)
    never_stopped = fit(make(), row.data(), saves, **row.options())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(make(), row.data(), ckpt_path=path, **row.options())
    messages = [str(warning.message) for warning in caught]
    return never_stopped.seen[saves.num_seen :], resumed.seen, messages


class Permuted(Sampler[int]):
    """As torchdata's RandomSampler: none of torch's, and with a generator of its own, of a seed
    that is drawn."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        seed = int(torch.empty((), dtype=torch.int64).random_())
        self.generator = torch.Generator().manual_seed(seed)

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
        options.pop("shuffle", None)
        if batch_sampler is None and not isinstance(dataset, IterableDataset):
            sampler = options.pop("sampler", None) or Permuted(dataset)
            drops = options.pop("drop_last", False)
            batch_sampler = InBatches(sampler, options.pop("batch_size", 1), drops)
        if isinstance(dataset, IterableDataset):
            super().__init__(dataset, batch_size=options["batch_size"])
        else:
            super().__init__(dataset, batch_sampler=batch_sampler)
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


class Webdataset:
    """A loader of no class of torch's, and without a length."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.samples = Ordered(rank, num_replicas)

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.samples, batch_size=4))


class OfAnyKind(Splitting):
    """Makes its training loader by a function of its samples, or of those of its rank's stream."""

    def __init__(self, make: Any, is_stream: bool = False) -> None:
        super().__init__()
        self.make, self.is_stream = make, is_stream

    def train_dataloader(self) -> Any:
        if self.is_stream:
            return self.make(**self.trainer.distributed_sampler_kwargs)
        return self.make(Subset(Numbered(), range(40)))


def _own(samples: Any) -> Any:
    draw = torch.Generator().manual_seed(1)
    return DataLoader(samples, batch_size=4, shuffle=True, generator=draw)


def _stateful(samples: Any) -> Any:
    return StatefulLoader(samples, batch_size=4, shuffle=True)


def _stateful_stream(**ranks: int) -> Any:
    return StatefulLoader(Ordered(**ranks), batch_size=4)


def _streamed(**ranks: int) -> Any:
    return DataLoader(Ordered(**ranks), batch_size=4)


def _several(samples: Any) -> Any:
    return {"a": _own(samples), "b": DataLoader(samples, batch_size=3, shuffle=True)}


class Several(Noisy):
    """Takes the batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(_both(batch), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, _both(batch), batch_idx)


def _both(batch: Any) -> Any:
    return torch.cat([batch["a"][0], batch["b"][0]]), batch["a"][1]


class Averages(StochasticWeightAveraging):
    """A user's own, which has more state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "of_user": 1}


class Scheduled(Noisy):
    """Its rate falls; a fit begins with the weights with which training begins, and notes them at
    the end."""

    def _sum(self) -> float:
        return float(self.trainer.strategy.full_parameter("model.0.weight").double().sum())

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.at_start = self._sum()

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self._sum() == self.at_start, "on_fit_start had other weights"

    def on_train_end(self) -> None:
        self.seen.append(("end", self._sum()))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        return [optimizer], [falling]


def averages() -> list[pl.Callback]:
    return [Averages(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2)]


def of_average(strategy: str, kind: type[Noisy] = Scheduled) -> Row:
    """Return a row that is saved in the third of five epochs, the second of the averaging."""
    settings = {"limit_val_batches": 0, "max_epochs": 5, "callbacks": averages}
    options: dict[str, Any] = {"data": Splitting, "kind": kind, "settings": settings}
    return Row(save=("epoch", 11), strategy=strategy, **options)


def of_loader(make: Any, save: tuple[str, int], strategy: str = DDP, **options: Any) -> Row:
    """Return a row of a kind of loaders, without validation."""
    data = partial(OfAnyKind, make, make is _stateful_stream)
    settings = {"limit_val_batches": 0, "max_epochs": 3}
    return Row(save=save, data=data, strategy=strategy, settings=settings, **options)


IN_EPOCH, BETWEEN = ("batch", 12), ("epoch", 5)
QUICK = {
    "between epochs": Row(save=END),
    "reloaded, in an epoch": Row(save=MIDDLE, settings={"reload_dataloaders_every_n_epochs": 1}),
    "own generator": of_loader(_own, IN_EPOCH),
    "own generator, between": of_loader(_own, BETWEEN),
    "torchdata": of_loader(_stateful, IN_EPOCH),
    "torchdata, between": of_loader(_stateful, BETWEEN),
    "two loaders": of_loader(_several, IN_EPOCH, kind=Several),
    "an average of the user's own": of_average(DDP),
}
SLOW = {
    "in an epoch": Row(save=MIDDLE),
    "validated later": Row(save=END, settings={"check_val_every_n_epoch": 3}),
    "validated in an epoch": Row(save=MIDDLE, settings={"val_check_interval": 3}),
    "reloaded, between epochs": Row(save=END, settings={"reload_dataloaders_every_n_epochs": 2}),
    "workers": Row(save=END, data=partial(Drawing, {"num_workers": 1})),
    "a stream and max_steps": Row(
        save=END, data=Streaming, settings={"max_steps": 35, "max_epochs": -1}
    ),
}


def _check(rows: dict[str, Row], folder: Any) -> None:
    calls = {name: (_resume, row, f"{folder}/{name}.ckpt") for name, row in rows.items()}
    for outcomes in run_each_on_ranks(calls, 2):
        for name, (expected, actual, texts) in outcomes.items():
            assert len(expected) > 2, name
            assert actual == expected, name
            assert not any("starts again" in text for text in texts), name
            assert not any("another order" in text for text in texts), name


def test_a_resumed_run_draws_and_trains_as_the_run_that_never_stopped(tmp_path: Any) -> None:
    _check(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_draw_as_before_however_often_loaders_are_made_and_validation_runs(
    strategy: str, tmp_path: Any
) -> None:
    rows = {"between epochs": QUICK["between epochs"], **SLOW}
    _check(
        {
            name: Row(save=row.save, data=row.data, strategy=strategy, settings=row.settings)
            for name, row in rows.items()
        },
        tmp_path,
    )


def test_draws_of_setup_that_no_seed_repeats_are_reported_and_those_of_loaders_repeated(
    tmp_path: Any,
) -> None:
    unseeded = {"strategy": DDP, "save": MIDDLE, "settings": {"seed": None}}
    rows = {"setup": Row(**unseeded), "loaders": Row(data=Splitting, **unseeded)}
    calls = {name: (_resume, row, f"{tmp_path}/{name}") for name, row in rows.items()}
    for rank, outcomes in enumerate(run_each_on_ranks(calls, 2)):
        num_reports = {
            name: sum("prepare_data or setup drew random numbers" in text for text in texts)
            for name, (_, _, texts) in outcomes.items()
        }
        assert num_reports == {"setup": int(rank == 0), "loaders": 0}
        expected, actual, _ = outcomes["loaders"]
        assert _trained(actual) == _trained(expected)


def _trained(seen: list[Any]) -> list[list[int]]:
    return [ids for kind, ids, *_ in seen if kind == "train"]


def test_loaders_without_a_position_start_the_epoch_again_and_it_is_reported(
    tmp_path: Any,
) -> None:
    settings = {"limit_val_batches": 0, "max_epochs": 3}
    rows = {
        "DataLoader over Ordered": Row(
            save=("batch", 3),
            data=partial(OfAnyKind, _streamed, True),
            strategy=DDP,
            settings=settings,
        ),
        "Webdataset": Row(
            save=("batch", 3), data=partial(OfAnyKind, Webdataset, True), settings=settings
        ),
    }
    calls = {name: (_resume, row, f"{tmp_path}/{name}") for name, row in rows.items()}
    for rank, outcomes in enumerate(run_each_on_ranks(calls, 2)):
        for name, (_, actual, texts) in outcomes.items():
            reports = [text for text in texts if "no position of" in text]
            assert len(reports) == (rank == 0)
            assert all(name in text for text in reports)
            assert all("So this epoch starts again" in text for text in reports)
            assert sorted(sum(_trained(actual), [])) == sorted(list(range(rank, 40, 2)) * 3), name


class Stops(pl.Callback):
    """Stops as a time limit or EarlyStopping does."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = trainer.global_step == 7


def _cut(strategy: str, settings: dict[str, Any], folder: str) -> Any:
    """Return the steps after the seventh in a run that never stopped, and in one that was saved
    when it had ended."""
    make, kind = STRATEGIES[strategy], WithTable if strategy == TABLES else Noisy
    options: dict[str, Any] = {"kind": kind, "limit_val_batches": 0, "max_epochs": 4}
    never_stopped = fit(make(), Drawing(), **options)
    pl.seed_everything(5)
    saver = ModelCheckpoint(folder, filename="end", save_on_train_epoch_end=True)
    stops = [Stops()] if "max_steps" not in settings else []
    trainer = pl.Trainer(
        strategy=make(),
        devices=rank_and_num_ranks()[1],
        callbacks=[saver, *stops],
        **DEFAULTS
        | {"enable_checkpointing": True, "use_distributed_sampler": True, "limit_val_batches": 0}
        | settings,
    )
    trainer.fit(kind(), Drawing())
    torch.rand(3)  # of nobody's run
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    resumed = [
        fit(make(), Drawing(), ckpt_path=path, **options).seen
        for path in (f"{folder}/after.ckpt", saver.best_model_path)
    ]
    return never_stopped.seen[-len(resumed[0]) :], *resumed


def test_an_epoch_that_a_limit_has_cut_off_continues_with_its_next_batch(tmp_path: Any) -> None:
    calls = {
        "limit": (_cut, TABLES, {"max_steps": 7, "max_epochs": -1}, str(tmp_path / "limit")),
        "stop": (_cut, DDP, {"max_epochs": 4}, str(tmp_path / "stop")),
    }
    for outcomes in run_each_on_ranks(calls, 2):
        for name, (expected, after, at_end) in outcomes.items():
            # of 4 epochs of 5 batches
            assert len(_trained(expected)) == 13, name
            assert after == expected, name
            assert at_end == expected, name


class Plain(Noisy):
    """Draws nothing, so that a batch that is trained again gives the same gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = torch.nn.Identity()

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        loss = (self(batch[1]) ** 2).mean()
        self.log("loss", loss)
        return loss


def _accumulate(path: str) -> Any:
    saves = SavesAt(path, "batch", 7)
    options = {"kind": Plain, "accumulate_grad_batches": 4, "limit_val_batches": 0, "max_epochs": 3}
    first = fit("ddp_tuned", Splitting(), saves, **options)
    resumed = fit("ddp_tuned", Splitting(), ckpt_path=path, **options)
    return first.state_dict(), resumed.state_dict(), len(_trained(resumed.seen))


def test_gradients_that_were_accumulated_are_those_of_the_same_batches_again(tmp_path: Any) -> None:
    for outcome in run_each_on_ranks({"it": (_accumulate, str(tmp_path / "it.ckpt"))}, 2):
        expected, actual, num_batches = outcome["it"]
        # the seventh is the second of its epoch, and both are trained again
        assert num_batches == 10
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
