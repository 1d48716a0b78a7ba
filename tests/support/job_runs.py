"""Runs a job of jobs.py: once unsharded by a plain loop, once through Lightning on these ranks."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_configs import DataType, PoolingType

from lightning_distrec.errors import DistRecError
from tests.support.click_model import NO_OUTPUT
from tests.support.embedding_models import whole_state
from tests.support.jobs import OPTIMIZERS, Collection, Job
from tests.support.ranks import rank_and_num_ranks


@dataclass
class Outcome:
    """What became of a job: weights, or a refusal before the first step or for its drift, or a
    failure."""

    state: dict[str, Tensor] = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)
    refused: str = ""
    stopped: str = ""
    """What its drift was refused with."""
    failed: str = ""
    logged: float = 0.0
    """The mean loss of all examples, as it is logged at the epoch's end."""


class JobModel(pl.LightningModule):
    """The model of a job."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.begun = False
        self.outcome = Outcome()
        self.collections = nn.ModuleList(
            _build(collection, c) for c, collection in enumerate(job.collections)
        )
        width = sum(table.dim * len(table.features) for table in job.tables().values())
        self.mlp = nn.Sequential(
            nn.Linear(width, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False)
        )
        self.kept = {"first": self.mlp[0].weight, "last": [self.mlp[2].weight]}
        weights = dict(self.named_parameters())
        self.not_optimized = set()
        for (name, table), weight in zip(
            job.tables().items(), self.collections.parameters(), strict=True
        ):
            nn.init.uniform_(weight, -0.5, 0.5)
            weight.requires_grad_(table.frozen != "requires_grad")
            if table.frozen == "no optimizer":
                self.not_optimized |= {key for key in weights if weights[key] is weight}
            assert weight.shape == (table.rows, table.dim), name

    def forward(self, batch: dict[str, Tensor], step: int) -> Tensor:
        columns = []
        for collection, module in zip(self.job.collections, self.collections, strict=True):
            look_up = {
                "bags": _bags,
                "rows": _rows,
                "nn.Embedding": _embedding,
                "nn.EmbeddingBag": _embedding_bag,
            }
            calls = [
                look_up[collection.kind](self.job, collection, module, other_ids, step)
                for other_ids in _batches_of_calls(collection, batch)
            ]
            columns += [sum(outputs) for outputs in zip(*calls, strict=True)]
        scores = self.mlp(torch.cat(columns, 1)).squeeze(-1)
        if self.job.keeps_weights:
            scores = scores * (1 + self.kept["first"].mean() + self.kept["last"][0].mean())
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.begun = True
        losses = nn.functional.binary_cross_entropy_with_logits(
            self(batch, batch_idx), batch["label"], reduction="none"
        )
        self.log_loss(losses)
        return losses.mean() if self.job.loss == "mean" else losses.sum() / 8

    def log_loss(self, losses: Tensor) -> None:
        """Log the mean of a batch; batches of ranks may be of unequal sizes."""
        self.log(
            "loss",
            losses.mean(),
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(losses),
        )

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rank, num_ranks = rank_and_num_ranks()
        if batch_idx == self.job.drift and rank == num_ranks - 1:
            for group in self.optimizers().param_groups:
                group["lr"] *= 2

    def draw_tables(self) -> None:
        """Draw all tables again, alike on all ranks."""
        torch.manual_seed(self.job.seed + 1)
        for module in self.collections:
            module.reset_parameters()

    def configure_optimizers(self) -> Any:
        optimizer, options = OPTIMIZERS[self.job.optimizer]
        named = {
            key: weight for key, weight in self.named_parameters() if key not in self.not_optimized
        }
        groups = [{"params": list(named.values())}]
        table_weights = [weight for key, weight in named.items() if not key.startswith("mlp")]
        if self.job.groups and table_weights:
            groups = [
                {"params": table_weights, "lr": options["lr"] / 2},
                {"params": list(self.mlp.parameters())},
            ]
        steps = optimizer(groups, **options)
        decay = torch.optim.lr_scheduler.ExponentialLR(steps, self.job.decay or 1.0)
        return [steps], [{"scheduler": decay, "interval": "step"}]

    def on_train_start(self) -> None:
        if self.job.draws_anew:
            self.draw_tables()
        setup = self.trainer.strategy.run_tables
        plan = setup.shards.plan
        self.outcome.updates = [
            f"{update.kind} {plan[name].sharding_type}" for name, update in setup.updates.items()
        ]

    def on_train_end(self) -> None:
        self.outcome.state = whole_state(self)
        self.outcome.logged = float(self.trainer.callback_metrics["loss"])


def _batches_of_calls(collection: Collection, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    second = {key: batch.get(f"{key}.turned", value) for key, value in batch.items()}
    return [batch, second][: collection.calls]


def _build(collection: Collection, index: int) -> nn.Module:
    first = collection.tables[0]
    dtype, data_type = (
        (torch.float16, DataType.FP16) if collection.half else (torch.float32, DataType.FP32)
    )
    if collection.kind == "nn.Embedding":
        return nn.Embedding(first.rows, first.dim, padding_idx=collection.padding_idx, dtype=dtype)
    if collection.kind == "nn.EmbeddingBag":
        mode = "mean" if first.mean else "sum"
        return nn.EmbeddingBag(
            first.rows, first.dim, mode=mode, padding_idx=collection.padding_idx, dtype=dtype
        )
    named = [
        {
            "name": f"c{index}t{t}",
            "num_embeddings": table.rows,
            "embedding_dim": table.dim,
            "feature_names": [f"f{feature}" for feature in table.features],
            "data_type": data_type,
        }
        for t, table in enumerate(collection.tables)
    ]
    if collection.kind == "rows":
        return EmbeddingCollection(tables=[EmbeddingConfig(**options) for options in named])
    poolings = [PoolingType.MEAN if table.mean else PoolingType.SUM for table in collection.tables]
    configs = [
        EmbeddingBagConfig(**o, pooling=pooling) for o, pooling in zip(named, poolings, strict=True)
    ]
    return EmbeddingBagCollection(tables=configs, is_weighted=collection.weighted)


def _bags(
    job: Job, collection: Collection, module: nn.Module, batch: dict[str, Tensor], step: int
) -> list[Tensor]:
    return [module(_keyed(job, collection, batch, step)).values().float()]


def _rows(
    job: Job, collection: Collection, module: nn.Module, batch: dict[str, Tensor], step: int
) -> list[Tensor]:
    actual = module(_keyed(job, collection, batch, step))
    return [_pooled(jagged.values(), jagged.lengths()) for jagged in actual.values()]


def _embedding(
    _: Job, collection: Collection, module: nn.Module, batch: dict[str, Tensor], __: int
) -> list[Tensor]:
    actual = [
        (module(_ids(batch, f)), batch[f"f{f}.lengths"]) for f in collection.tables[0].features
    ]
    return [_pooled(rows.flatten(0, -2), lengths) for rows, lengths in actual]


def _embedding_bag(
    _: Job, collection: Collection, module: nn.Module, batch: dict[str, Tensor], __: int
) -> list[Tensor]:
    columns = []
    for feature in collection.tables[0].features:
        ids, lengths = _ids(batch, feature), batch[f"f{feature}.lengths"]
        weights = batch[f"f{feature}.weights"].view(ids.shape) if collection.weighted else None
        offsets = None if ids.dim() == 2 else lengths.cumsum(0) - lengths
        columns.append(module(ids, offsets, per_sample_weights=weights).float())
    return columns


def _keyed(
    job: Job, collection: Collection, batch: dict[str, Tensor], step: int
) -> KeyedJaggedTensor:
    features = list(
        dict.fromkeys(feature for table in collection.tables for feature in table.features)
    )
    turn = step % len(features) if collection.keys == "turning" else 0
    keys = (
        list(range(len(job.features)))
        if collection.keys == "all"
        else features[turn:] + features[:turn]
    )
    ids, lengths, weights = (
        torch.cat([batch[f"f{key}.{part}"].flatten() for key in keys])
        for part in ("ids", "lengths", "weights")
    )
    return KeyedJaggedTensor(
        [f"f{key}" for key in keys], ids, weights if collection.weighted else None, lengths
    )


def _ids(batch: dict[str, Tensor], feature: int) -> Tensor:
    ids, lengths = batch[f"f{feature}.ids"], batch[f"f{feature}.lengths"]
    return ids.view(len(lengths), -1) if f"f{feature}.fixed" in batch else ids


def _pooled(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over each bag of something that is not linear in the rows and depends on
    their order."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place = 1 / (1 + torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[owner])
    sums = torch.zeros(len(lengths), rows.shape[1]).index_add(
        0, owner, rows.float().tanh() * place.unsqueeze(1)
    )
    return sums / lengths.clamp(min=1).unsqueeze(1)


def make_batch(job: Job, step: int, rank: int) -> dict[str, Tensor]:
    """Return the batch of one rank."""
    draw = torch.Generator().manual_seed(10_000 * job.seed + 100 * step + rank)
    size = job.sizes[step][rank]
    batch: dict[str, Tensor] = {"label": torch.randint(0, 2, (size,), generator=draw).float()}
    for f, feature in enumerate(job.features):
        lengths = torch.randint(0, feature.longest + 1, (size,), generator=draw)
        if feature.fixed:
            lengths = torch.full((size,), feature.longest)
            batch[f"f{f}.fixed"] = torch.ones(1)
        if {"always": True, "odd steps": step % 2 == 1, "rank 0": rank == 0}.get(
            feature.empty, False
        ):
            lengths = torch.zeros(size, dtype=torch.long)
        num_ids = job.num_ids(f)
        distinct = min(feature.distinct, num_ids)
        count = int(lengths.sum())
        ids = num_ids - 1 - (torch.rand(count, generator=draw) * distinct).long()
        batch[f"f{f}.ids"] = ids
        # Turned here: in the step, a rank that has several parts of a batch would turn them as one.
        batch[f"f{f}.ids.turned"] = ids.flip(0)
        batch[f"f{f}.lengths"] = lengths
        batch[f"f{f}.weights"] = torch.rand(count, generator=draw) + 0.5
    return batch


def start(job: Job) -> JobModel:
    """Return the model with the weights that every rank and the reference start from."""
    torch.manual_seed(job.seed)
    return JobModel(job)


def train_unsharded(job: Job) -> tuple[dict[str, Tensor], float]:
    """Train in this process by a plain torch loop; a step's gradient is made of those of the ranks'
    batches.

    Returns the state, and the mean loss of all examples.
    """
    model = start(job)
    losses: list[Tensor] = []
    model.log_loss = losses.append  # type: ignore[method-assign]
    if job.draws_anew:
        model.draw_tables()
    (optimizer,), (schedule,) = model.configure_optimizers()
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    half = job.precision == "bf16-mixed"
    for step in range(len(job.sizes)):
        for rank in range(job.num_ranks):
            with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
                loss = model.training_step(make_batch(job, step, rank), step)
            share = job.sizes[step][rank] / sum(job.sizes[step])
            factor = {"mean": share * job.num_ranks, "sum": job.num_ranks, "rank_mean": 1}[job.loss]
            (loss * factor / job.accumulate).backward()
        if (step + 1) % job.accumulate and step + 1 < len(job.sizes):
            continue
        for weight in parameters:
            if weight.grad is not None:
                weight.grad /= job.num_ranks
        if job.clip is not None:
            algorithm, value = job.clip
            clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
            clip(parameters, value)
        optimizer.step()
        schedule["scheduler"].step()
        model.zero_grad()
    state = {key: value.detach() for key, value in model.state_dict().items()}
    return state, float(torch.cat(losses).detach().float().mean())


def table_options(job: Job) -> dict[str, dict[str, Any]]:
    """Return the strategy's options for each table, those alone that the job sets."""
    return {
        name: {
            option: value
            for option, value in {
                "sharding_types": list(table.cuts) or None,
                "min_partition": table.min_partition,
                "embedding_update": table.update,
            }.items()
            if value is not None
        }
        for name, table in job.tables().items()
    }


def train_sharded(job: Job) -> Outcome:
    """Train on this rank through Lightning, tables sharded."""
    from lightning_distrec import TorchRecShardedStrategy

    rank, num_ranks = rank_and_num_ranks()
    options = table_options(job)
    model = start(job)
    batches = [make_batch(job, step, rank) for step in range(len(job.sizes))]
    try:
        trainer = pl.Trainer(
            strategy=TorchRecShardedStrategy(  # type: ignore[arg-type]
                job.update, "all", tables=options, loss_reduction=job.loss, dense=job.dense
            ),
            accelerator="cpu",
            devices=num_ranks,
            max_epochs=1,
            use_distributed_sampler=False,
            precision=job.precision,
            accumulate_grad_batches=job.accumulate,
            gradient_clip_algorithm=job.clip[0] if job.clip else None,
            gradient_clip_val=job.clip[1] if job.clip else None,
            **NO_OUTPUT,
        )
        trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    except DistRecError as error:
        if model.begun and job.drift is not None:
            return Outcome(stopped=f"{type(error).__name__}: {error}")
        if model.begun:
            raise
        return Outcome(refused=f"{type(error).__name__}: {error}")
    return model.outcome
