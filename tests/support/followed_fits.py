"""Prefetched fits on CUDA devices in host memory, and the models that they train."""

import os
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_distrec import PipelineParallelStrategy
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.benchmarks.performance_contenders import ByHandPrefetched
from tests.benchmarks.performance_model import Batches
from tests.benchmarks.turns import Turn
from tests.support.chain_models import CHAINS
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    SequenceModel,
    bag_configs,
    make_batch,
    seeded,
)
from tests.support.host_cuda.following import followed_device
from tests.support.mapped_models import ManagedModel, loader
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import DEFAULTS, make_trainer

STEPS = 12


class Deaf(ClickModel):
    """Never asks a loss for its value, and is called with one feature more than its collection
    has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mlp = nn.Linear(24, 1)

    def _build(self) -> None:
        self.ebc = EmbeddingBagCollection(tables=bag_configs(self.pooling)[1:])

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.mlp(self.ebc(features).values()).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])


class Sequences(SequenceModel):
    """The same over an EmbeddingCollection."""

    training_step = Deaf.training_step


class JaggedBatches(Deaf):
    """Batches that hold a KeyedJaggedTensor."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.mlp(self.ebc(batch["features"]).values()).squeeze(-1)


class PlainBags(Deaf):
    """An nn.EmbeddingBag; ids are declared by `sparse_inputs` where `declares` is set, else
    computed in the step."""

    def _build(self) -> None:
        self.ebc = nn.EmbeddingBag(60, 24, mode="mean")

    def _ids(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["single"] * 7 + 1) % 60

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.mlp(self.ebc(self._ids(batch))).squeeze(-1)


class RewrittenBuffer(PlainBags):
    """Adds a buffer to its ids, and writes to it in each step, after a look at it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("first_id", torch.tensor([5]))

    def _ids(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["single"] * 7 + self.first_id) % 60

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.first_id.copy_(torch.full_like(self.first_id, 5))
        return loss


class DeclaredBags(PlainBags):
    """Gets its batch in a new dict, as under DDP with device_ids, and declares its ids."""

    def sparse_inputs(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the ids."""
        return self._ids(batch)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = self.sparse_inputs(dict(batch))
        return self.mlp(self.ebc(ids)).squeeze(-1)


class Unfreezing(Deaf):
    """Unfreezes a layer in its third step, for which DDP is built again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extra = nn.Linear(24, 24).requires_grad_(False)
        self.mlp = nn.Sequential(self.extra, self.mlp)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.extra.requires_grad_(batch_idx > 1)


def batch_of(kind: type, number: int) -> dict[str, Any]:
    """Return a batch of this rank."""
    batch: dict[str, Any] = make_batch(1000 * number + rank_and_num_ranks()[0])
    draw = torch.Generator().manual_seed(number)
    batch["single"] = torch.randint(0, 60, (len(batch["label"]), 3), generator=draw)
    if kind is JaggedBatches:
        batch["features"] = KeyedJaggedTensor(
            keys=FEATURES, values=batch["ids"], lengths=batch["lengths"]
        )
    return batch


class Marks(pl.Callback):
    """Notes among the waits of the host where steps begin, and where their forward is queued."""

    def __init__(self, last_layer: nn.Module) -> None:
        self.waits: list[Any] = []
        self._last_layer = last_layer

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._last_layer.register_forward_hook(
            lambda *_: self.waits.append(FORWARD) if torch.is_grad_enabled() else None
        )

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.waits.append(STEP)


STEP, FORWARD = ("step begins", "", ""), ("forward is queued", "", "")


def follow_fit(
    kind: type,
    optimizer: type,
    narrow: str,
    wide: str,
    update: str = "auto",
    clip: float | None = None,
) -> tuple[list[str], list[Any], str]:
    """Return the hazards of a fit on a device, the waits of the host, and how many lookups were
    sent ahead.

    narrow, wide: the sharding types of the table "narrow", and of all other ones. clip: the limit
    of the norm. Three batches are in flight.
    """
    model = seeded(kind, optimizer, {"lr": 0.1}, pooling="mean")
    strategy: dict[str, Any] = {
        "sharding_types": [wide],
        "convert_embeddings": "all",
        "embedding_update": update,
    }
    if kind is Deaf:
        strategy["tables"] = {"ebc.narrow": {"sharding_types": [narrow]}}
    return _follow(
        model, model.mlp, strategy, [batch_of(kind, number) for number in range(STEPS)], clip
    )


def follow_mapped_fit(
    kind: type[ManagedModel], options: dict[str, Any], tables: dict[str, Any]
) -> Any:
    """The same of a model whose ids have no fixed range; with them the number of rows that were
    taken from ids."""
    model = seeded(kind, **options)
    strategy = {"convert_embeddings": "all", "tables": tables}
    rank, num_ranks = rank_and_num_ranks()
    result = _follow(
        model, model.over, strategy, loader(0, STEPS, rank, num_ranks, num_ranks).dataset
    )
    mapped = sharded_tables_of(model)
    assert mapped is not None
    return *result, sum(mapping.counts.evicted for mapping in mapped.mappings.values())


def _follow(
    model: Any,
    last_layer: nn.Module,
    options: dict[str, Any],
    batches: Any,
    clip: float | None = None,
) -> tuple[list[str], list[Any], str]:
    marks = Marks(last_layer)
    strategy = {"prefetch": {"depth": 3}, "process_group_backend": "nccl", **options}
    trainer = make_trainer(strategy, accelerator="gpu", callbacks=[marks], gradient_clip_val=clip)
    with followed_device() as found:
        marks.waits = found.waits
        trainer.fit(model, DataLoader(batches, batch_size=None))
    ahead = str(trainer.strategy.lookups_ahead.get("training 0"))  # type: ignore[attr-defined]
    return sorted(set(found.hazards)), found.waits, ahead


def follow_pipeline_fit(kind: str, options: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Return the hazards of a fit whose chain is computed in stages, on devices, and the waits of
    the host."""
    model, rank = CHAINS[kind](), rank_and_num_ranks()
    model.on_train_batch_end = lambda *_: None  # which reads what is logged
    marks = Marks(nn.Identity())
    strategy = PipelineParallelStrategy(process_group_backend="nccl", **options)
    settings = DEFAULTS | {"accelerator": "gpu", "callbacks": [marks], "limit_val_batches": 0}
    trainer = pl.Trainer(strategy=strategy, devices=rank[1], **settings)
    with followed_device() as found:
        marks.waits = found.waits
        trainer.fit(model)
    return sorted(set(found.hazards)), found.waits


def follow_torchrec_pipeline() -> list[list[Any]]:
    """Return what the host waits for in each step of torchrec's TrainPipelineSparseDist, over
    table-wise tables."""
    with followed_device() as found:
        os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
        turn, device = Turn(1, STEPS - 4, 3), torch.device("cuda", torch.cuda.current_device())
        batches = Batches(60, turn.steps, dist.get_rank(), num_tables=2, batch_size=8)
        manual = ByHandPrefetched(60, batches, turn, device)
        begins: list[int] = []
        manual.clock = lambda: float(begins.append(len(found.waits)) or 0)  # type: ignore[func-returns-value]
        manual.turn()
    return [found.waits[begin:end] for begin, end in pairwise(begins)]
