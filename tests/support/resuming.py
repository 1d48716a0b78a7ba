"""Runs that are saved on their way and go on elsewhere, and the run that never stopped.

All runs train on the same examples in the same global batches, whatever the number of ranks:
examples are dealt by a DistributedSampler, in an order of their own in each epoch.
"""

import copy
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from tests.support.click_model import (
    FEATURES,
    ClickModel,
    LooksUpTwice,
    SequenceModel,
    _mean,
    bag_configs,
    join_batches,
    make_batch,
    seeded,
)
from tests.support.plain_checkpoints import plain_checkpoint
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_trainer

GLOBAL_BATCH = 12
STEPS_PER_EPOCH = 5


class Clicks(ClickModel):
    """A click model that validates, tests and predicts, under any strategy."""

    def on_train_end(self) -> None:
        """Whoever runs it keeps the state."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["label"]))

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch)


class Twice(LooksUpTwice, Clicks):
    """Looks its tables up twice in a step."""


class Sequences(SequenceModel, Clicks):
    """Over an EmbeddingCollection."""


class PlainTables(Clicks):
    """Over nn.EmbeddingBag and nn.Embedding; one of them is called twice in a step."""

    def _build(self) -> None:
        self.ebc = None
        self.bags = nn.ModuleDict({
            "wide": nn.EmbeddingBag(60, 16, mode="sum"),
            "narrow": nn.EmbeddingBag(37, 8, mode="mean"),
        })
        self.shared = nn.Embedding(11, 8, padding_idx=3)

    def configure_model(self) -> None:
        """Everything is built."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        a, b, c, d = (jagged for jagged in _jagged(batch))
        columns = [self.bags["wide"](*a), self.bags["wide"](*b), self.bags["narrow"](*c)]
        for ids, offsets in (b, d):
            ends = torch.cat([offsets[1:], torch.tensor([len(ids)])])
            columns.append(_mean(self.shared(ids), ends - offsets))
        return self.mlp(torch.cat(columns, 1)).squeeze(-1)


def _jagged(batch: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the ids and offsets of each feature."""
    ends = batch["lengths"].view(len(FEATURES), -1).sum(1).cumsum(0)
    for lengths, end in zip(batch["lengths"].view(len(FEATURES), -1), ends, strict=True):
        yield batch["ids"][end - lengths.sum() : end], lengths.cumsum(0) - lengths


class Frozen(Clicks):
    """Has one table that does not learn, and one that no optimizer has."""

    def _build(self) -> None:
        super()._build()
        self.ebc.embedding_bags["narrow"].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return self.optimizer(
            [p for n, p in self.named_parameters() if "shared" not in n], **self.options
        )


class NamedTwice(Clicks):
    """Has its tables under two names."""

    def _build(self) -> None:
        super()._build()
        self.again = self.ebc


class Random(Clicks):
    """Draws in each step, on each rank in its own way, from all generators; where they begin is
    `start`."""

    def __init__(self, *args: Any, start: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.start = start
        self.mlp = nn.Sequential(nn.Dropout(0.3), *self.mlp)

    def on_fit_start(self) -> None:
        seed = 10 * self.start + rank_and_num_ranks()[0]
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noise = random.random() + float(numpy.random.rand())
        return super().training_step(
            batch | {"label": batch["label"] * (0.5 + noise / 4)}, batch_idx
        )


class Grouped(Clicks):
    """Its tables have param groups, and so rates, of their own."""

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        rate = self.options["lr"]
        groups = [
            {"params": [p for n, p in named.items() if "narrow" in n], "lr": rate / 3},
            {
                "params": [p for n, p in named.items() if "ebc" in n and "narrow" not in n],
                "lr": rate / 2,
            },
            {"params": list(self.mlp.parameters())},
        ]
        return self.optimizer(groups, **self.options)


class GroupedInSteps(Grouped):
    """And they fall every third step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        falling = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


class TwoOptimizers(Clicks):
    """Steps by hand: tables by one optimizer, dense layers by Adam, whose rate it lets fall."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        dense = torch.optim.Adam(self.mlp.parameters(), lr=0.01)
        tables = self.optimizer(self.ebc.parameters(), **self.options)
        return [tables, dense], [torch.optim.lr_scheduler.ExponentialLR(dense, 0.97)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.lr_schedulers().step()


class Unfreezes(BaseFinetuning):
    """Lets the tables learn from an epoch on, at half the rate."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.ebc)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.ebc, optimizer, initial_denom_lr=2.0)


class LearnsInPart(Clicks):
    """Gives its optimizer what learns at the start."""

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], **self.options)


class Counts(Clicks):
    """Logs the number of its epoch."""

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))


class Changed(Clicks):
    """Has tables that were changed since the run was saved; `changes` are those of their
    configs."""

    changes: dict[str, dict[str, Any]] = {}

    def _build(self) -> None:
        configs = bag_configs()
        for config in configs:
            vars(config).update(self.changes.get(config.name, {}))
        self.ebc = EmbeddingBagCollection(tables=configs)


class Renamed(Changed):
    """Has another name for one table."""

    changes = {"wide": {"name": "broad"}}


class RenamedLoosely(Renamed):
    """And takes what it finds of a checkpoint."""

    strict_loading = False


class Grown(Changed):
    """Has more rows in two tables."""

    changes = {"wide": {"num_embeddings": 80}, "narrow": {"num_embeddings": 50}}


class Shorter(Changed):
    """Has fewer rows in one table."""

    changes = {"wide": {"num_embeddings": 59}}


class Narrower(Changed):
    """Has fewer columns in one table and more in another."""

    changes = {"wide": {"embedding_dim": 12}, "narrow": {"embedding_dim": 16}}


class Tower(Clicks):
    """Has all its layers in a submodule."""

    def _build(self) -> None:
        super()._build()
        self.tower = nn.ModuleDict({"tables": self.ebc})
        del self.ebc
        self.ebc = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tower["mlp"] = self.mlp
        del self.mlp

    def configure_model(self) -> None:
        """Everything is built."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.tower["mlp"](self.tower["tables"](features).values()).squeeze(-1)


class Examples(Dataset[dict[str, Tensor]]):
    """Single examples of `make_batch`."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.examples = [make_batch(first + i, 1) for i in range(count)]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.examples[index]


def loader(
    num_ranks: int, shuffle: bool = True, steps: int = STEPS_PER_EPOCH, first: int = 0
) -> DataLoader:
    """Return the loader of this rank: as a user writes it, for Lightning to deal; or, not shuffled,
    dealt by itself."""
    examples = Examples(steps * GLOBAL_BATCH, first)
    options: dict[str, Any] = {"batch_size": GLOBAL_BATCH // num_ranks, "collate_fn": join_batches}
    if shuffle:
        return DataLoader(examples, shuffle=True, **options)
    dealt = DistributedSampler(examples, num_ranks, rank_and_num_ranks()[0], shuffle=False)
    return DataLoader(examples, sampler=dealt, **options)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, in what can be sent to a rank."""

    model: type[Clicks] = Clicks
    optimizer: tuple[type, dict[str, Any]] = (torch.optim.Adagrad, {"lr": 0.05})
    model_options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] | None = field(default_factory=dict)
    """None: Lightning's own for one device."""
    trainer: dict[str, Any] = field(default_factory=dict)
    extra: Callable[[], dict[str, Any]] = dict
    """Makes options of the Trainer that only its ranks can have: callbacks, plugins."""
    save: tuple[str, int] = ("on_train_epoch_end", STEPS_PER_EPOCH)
    """The hook that saves it, and after how many batches."""
    epochs: int = 3
    shuffle: bool = True
    validates: bool = False
    resume: str | None = None
    """Path that it goes on from."""


@dataclass
class Outcome:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    """Of each batch."""
    rates: list[list[float]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    """Rank 0, of a run that does not go on from another: what it saved on its way, tensors in
    memory."""
    final: dict[str, Any] = field(default_factory=dict)
    """Rank 0: what it saves at the end."""
    plan: dict[str, str] = field(default_factory=dict)
    """Table -> its cut and update."""
    messages: list[str] = field(default_factory=list)
    """Warnings."""
    failed: str = ""
    """The exception that ended it."""
    trace: str = ""


class Recorder(Checkpoint):
    """Saves a run on its way and at its end; called after all other callbacks, as checkpoints
    are."""

    def __init__(self, hook: str, num_batches: int, folder: str) -> None:
        self.when = hook, num_batches
        self.folder = folder
        self.outcome = Outcome()

    def _save(self, trainer: pl.Trainer, hook: str) -> None:
        if (hook, trainer.fit_loop.epoch_loop.batch_progress.total.processed) == self.when:
            trainer.save_checkpoint(f"{self.folder}/saved.ckpt")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "on_train_start")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.outcome.rates.append([
            group["lr"] for o in trainer.optimizers for group in o.param_groups
        ])
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            self.outcome.scales.append(scaler.get_scale())
        self._save(trainer, "on_train_batch_end")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "on_train_epoch_end")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "on_validation_end")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        setup = getattr(trainer.strategy, "run_tables", None)
        if setup is not None:
            plan = setup.shards.plan
            self.outcome.plan = {
                name: f"{plan[name].sharding_type} {u.kind}" for name, u in setup.updates.items()
            }
        trainer.save_checkpoint(f"{self.folder}/final.ckpt")


def train(run: Run, folder: str) -> Outcome:
    """Collective. Train on this rank; a run that does not go on from another saves
    `folder`/saved.ckpt on its way."""
    rank, num_ranks = rank_and_num_ranks()
    recorder = Recorder(*(("never", 0) if run.resume else run.save), folder)
    options = {
        "max_epochs": run.epochs,
        "use_distributed_sampler": True,
        "enable_checkpointing": True,
    }
    options |= run.trainer | run.extra()
    options["callbacks"] = [*options.get("callbacks", ()), recorder]
    model = seeded(run.model, *run.optimizer, **run.model_options)
    if run.strategy is None:
        trainer = pl.Trainer(strategy="auto", devices=1, **(DEFAULTS | options))
    else:
        trainer = make_trainer(copy.deepcopy(run.strategy), **options)
    evaluated = loader(num_ranks, shuffle=False, steps=2, first=10_000) if run.validates else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        trainer.fit(model, loader(num_ranks, run.shuffle), evaluated, ckpt_path=run.resume)
    actual = recorder.outcome
    actual.losses, actual.messages = model.losses, [str(warning.message) for warning in caught]
    if rank == 0:
        actual.final = plain_checkpoint(f"{folder}/final.ckpt")
        actual.saved = {} if run.resume else plain_checkpoint(f"{folder}/saved.ckpt")
    return actual


def train_each(runs: Mapping[str, tuple[Run, str]]) -> dict[str, Outcome]:
    """Collective. Train one run after the other; one that fails is told in its outcome, and the
    next begins.

    runs: name -> the run, and the folder that it saves in.
    """
    actual = {}
    for name, (run, folder) in runs.items():
        try:
            actual[name] = train(run, folder)
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            actual[name] = Outcome(failed=f"{type(error).__name__}: {error}", trace=trace)
    return actual


@dataclass(frozen=True)
class Life:
    """A run that never stops, and those that go on from its checkpoint."""

    first: Run
    num_ranks: int
    later: tuple[tuple[int, dict[str, Any]], ...]
    """Numbers of ranks, and what else changes."""
    limit: float = 1e-6
    """The largest difference, where the ranks or the plan are other ones."""


@dataclass
class Lived:
    """What became of a life, by rank."""

    first: list[Outcome]
    later: list[list[Outcome]]


def live(lives: Mapping[str, Life]) -> dict[str, Lived]:
    """Return what became of each life; all runs on as many ranks are made by the same ones, one
    after the other."""
    first = {(name, -1): (life.num_ranks, life.first) for name, life in lives.items()}
    with tempfile.TemporaryDirectory() as folder:
        later = {
            (name, i): (
                num_ranks,
                replace(life.first, **changes, resume=f"{folder}/{name} -1/saved.ckpt"),
            )
            for name, life in lives.items()
            for i, (num_ranks, changes) in enumerate(life.later)
        }
        actual = _on_their_ranks(first, folder) | _on_their_ranks(later, folder)
    return {
        name: Lived(actual[name, -1], [actual[name, i] for i in range(len(life.later))])
        for name, life in lives.items()
    }


def _on_their_ranks(
    runs: Mapping[tuple[str, int], tuple[int, Run]], folder: str
) -> dict[tuple[str, int], list[Outcome]]:
    actual: dict[tuple[str, int], list[Outcome]] = {}
    for num_ranks in sorted({num_ranks for num_ranks, _ in runs.values()}):
        selected_runs = {key: run for key, (expected, run) in runs.items() if expected == num_ranks}
        named = {
            f"{name} {i}": (run, f"{folder}/{name} {i}") for (name, i), run in selected_runs.items()
        }
        per_rank_results = run_on_warm_ranks(train_each, num_ranks, named)
        actual |= {
            (name, i): [rank_results[f"{name} {i}"] for rank_results in per_rank_results]
            for name, i in selected_runs
        }
    return actual


COMPARED = (
    "epoch",
    "global_step",
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "MixedPrecision",
    "callbacks",
    "current_model_state",
    "averaging_state",
)
"""What of the checkpoints at the end is compared."""


def problems_of(life: Life, lived: Lived) -> list[str]:
    """Return what is not as in the run that never stopped; every bit counts on the same 1 or 2
    ranks and plan.

    Sums over more ranks depend on how DDP has filled its buckets, which it does anew after its
    first step.
    """
    if failed := _failures(lived.first):
        return [f"the first run: {failed}"]
    problems = []
    for (num_ranks, changes), actual in zip(life.later, lived.later, strict=True):
        label = f"{life.num_ranks} to {num_ranks} ranks, {changes or 'nothing else'}"
        if failed := _failures(actual):
            problems.append(f"{label}: {failed}")
            continue
        expected = lived.first
        begun = len(expected[0].losses) - len(actual[0].losses)
        if begun != life.first.save[1]:
            problems.append(
                f"{label}: it made {len(actual[0].losses)} of {len(expected[0].losses)} steps"
            )
        pairs: dict[str, tuple[Any, Any]] = {
            "losses": (mean_losses(actual), mean_losses(expected)[begun:]),
            "rates": (actual[0].rates, expected[0].rates[begun:]),
            "scales": (actual[0].scales, expected[0].scales[begun:]),
        }
        if "model" not in changes:
            ends = [
                {key: _plain(end.final.get(key), key) for key in COMPARED}
                for end in (actual[0], expected[0])
            ]
            pairs["final"] = ends[0], ends[1]
        is_same = num_ranks == life.num_ranks <= 2 and not changes.keys() - {"model_options"}
        if is_same:
            pairs["of ranks"] = [o.losses for o in actual], [o.losses[begun:] for o in expected]
        allowed = 0.0 if is_same else life.limit
        problems += [
            f"{label}: {message}"
            for key, pair in pairs.items()
            for message in differences(*pair, key, allowed)
        ]
    return problems


def _failures(outcomes: list[Outcome]) -> str:
    return "\n".join(f"rank {rank}: {o.trace}" for rank, o in enumerate(outcomes) if o.failed)


def _plain(value: Any, key: str) -> Any:
    """Return a part of a checkpoint as it is compared.

    Optimizers' parameters have numbers in the place of names. What a finetuning callback keeps is
    left out: it has the names of shards.
    """
    if key == "callbacks" and value is not None:
        return {
            name: state
            for name, state in value.items()
            if "internal_optimizer_metadata" not in state
        }
    return [_numbered(state) for state in value] if key == "optimizer_states" else value


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    names = [name for group in state["param_groups"] for name in group["params"]]
    retained = {names.index(name): values for name, values in state["state"].items() if values}
    return {
        "state": retained,
        "param_groups": [{**g, "params": len(g["params"])} for g in state["param_groups"]],
    }


def mean_losses(outcomes: list[Outcome]) -> list[float]:
    """Return the losses of the global batches."""
    losses: list[float] = (
        torch.tensor([outcome.losses for outcome in outcomes], dtype=torch.float64).mean(0).tolist()
    )
    return losses


def differences(actual: Any, expected: Any, place: str, allowed: float) -> list[str]:
    """Return where two nests of dicts and lists differ; numbers, and tensors' elements, by more
    than `allowed`."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return [f"{place} has {sorted(map(str, actual))}, not {sorted(map(str, expected))}"]
        return [
            d
            for key in expected
            for d in differences(actual[key], expected[key], f"{place}/{key}", allowed)
        ]
    if isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            return [f"{place} has {len(actual)} entries, not {len(expected)}"]
        item = enumerate(zip(actual, expected, strict=True))
        return [d for i, pair in item for d in differences(*pair, f"{place}/{i}", allowed)]
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return [
                f"{place} is {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} "
                f"{tuple(expected.shape)}"
            ]
        off = float((actual.double() - expected.double()).abs().max()) if expected.numel() else 0.0
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        return [] if off <= allowed * scale else [f"{place} is off by {off}"]
    if isinstance(actual, float) and isinstance(expected, float):
        is_same = actual == expected or abs(actual - expected) <= allowed * max(1.0, abs(expected))
        return [] if is_same else [f"{place} is {actual}, not {expected}"]
    return [] if actual == expected else [f"{place} is {actual!r}, not {expected!r}"]
