"""Runs of click models whose ids are mapped to rows: on ranks, and by a plain loop over plain
tables."""

import warnings
import zlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from lightning_distrec.errors import DistRecError
from lightning_distrec.sharding.mapping import id_mapping
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.click_model import seeded
from tests.support.embedding_models import whole_state
from tests.support.mapped_models import (
    FEATURES,
    FEATURES_OF,
    ManagedModel,
    joined,
    loader,
    make_batch,
)
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

BATCH_PARTS = 6
"""Each step has the batches of this number of ranks, however many ranks train."""


class Clock:
    """Hours go by with the lookups of the one mapping that asks."""

    def __init__(self, hour: int = 0) -> None:
        self.calls = 2 * hour  # two tables

    def __call__(self) -> int:
        self.calls += 1
        return 1000 + (self.calls - 1) // 2


def train(
    kind: type[ManagedModel],
    options: dict[str, Any],
    steps: tuple[int, int],
    saves: str = "",
    resumes: str = "",
    strategy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train in the steps from one to another; save a checkpoint, or resume from one that was saved
    before them."""
    rank, num_ranks = rank_and_num_ranks()
    model = seeded(kind, **options)
    trainer = make_trainer(strategy, max_epochs=2 if resumes else 1)
    clock = patch.object(id_mapping, "current_hour", Clock(steps[0]))
    with clock, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(model, loader(*steps, rank, num_ranks, BATCH_PARTS), ckpt_path=resumes or None)
    if saves:
        trainer.save_checkpoint(saves)
    tables = sharded_tables_of(model)
    assert tables is not None
    counts = [mapping.counts for mapping in tables.mappings.values()]
    return {
        "state": whole_state(model),
        "losses": model.losses,
        "warned": [str(part.message) for part in warned if "MCHManaged" in str(part.message)],
        "evicted": sum(item.evicted for item in counts),
        "shared": sum(item.shared for item in counts),
    }


def refusal(kind: type[ManagedModel], options: dict[str, Any], **strategy: Any) -> str:
    """Return the error that a fit of one step ends with."""
    rank, num_ranks = rank_and_num_ranks()
    try:
        make_trainer(strategy).fit(kind(**options), loader(0, 1, rank, num_ranks, 2))
    except DistRecError as error:
        return str(error)
    return ""


def step_plainly(model: ManagedModel, steps: int) -> None:
    """Train a module in one process."""
    optimizer = model.configure_optimizers()
    for step in range(steps):
        loss = model.training_step(global_batch(step), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def global_batch(step: int) -> dict[str, Tensor]:
    """Return the batches of all ranks in a step, as one."""
    return joined([make_batch(100 * step + rank) for rank in range(BATCH_PARTS)])


class ByHand:
    """The rows of one table's ids. Those that another id had start anew."""

    def __init__(self, config: Any, weight: Tensor) -> None:
        self.name, self.weight = config.name, weight
        self.states: dict[str, Tensor] = {}
        self.learning_rate = 0.0
        torch.manual_seed(zlib.crc32(f"mc._embedding_module.{config.name}".encode()))
        rows = torch.empty(config.num_embeddings, config.embedding_dim)
        self.first_rows = config.init_fn(rows)

    def find_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of a batch's ids."""
        raise NotImplementedError

    @torch.no_grad()
    def start_anew(self, rows: Tensor, ids: Tensor) -> None:
        """Give rows the values that they have for new ids, and the state of an optimizer's
        beginning."""
        self.weight[rows] = self.first_rows[ids % len(self.first_rows)]
        for name, state in self.states.items():
            state[rows] = self.learning_rate if name == "step_size" else 0.0

    def optimizer_stepped(self) -> None:
        """Note that rows no longer wait for it."""


def train_by_hand(
    model: ManagedModel, make_table: Callable[[Any, Tensor], ByHand], steps: int
) -> tuple[dict[str, Tensor], list[ByHand]]:
    """Train the plain tables of rows by a plain loop; returns the weights, and what has mapped
    ids."""
    bags, optimizer = model.mc._embedding_module, model.configure_optimizers()
    tables = [
        make_table(config, bags.embedding_bags[config.name].weight)
        for config in bags.embedding_bag_configs()
    ]
    for step in range(steps):
        batch = global_batch(step)
        sizes = batch["lengths"].view(len(FEATURES), -1).sum(1).tolist()
        per_feature = dict(zip(FEATURES, batch["ids"].split(sizes), strict=True))
        for table in tables:
            state = optimizer.state[table.weight]
            table.states = {name: value for name, value in state.items() if value.dim()}
            table.learning_rate = optimizer.param_groups[0]["lr"]
            features = FEATURES_OF[table.name]
            rows = table.find_rows(torch.cat([per_feature[feature] for feature in features]))
            parts = rows.split([len(per_feature[feature]) for feature in features])
            per_feature |= dict(zip(features, parts, strict=True))
        ids = torch.cat([per_feature[feature] for feature in FEATURES])
        looked_up = bags(KeyedJaggedTensor(FEATURES, ids, lengths=batch["lengths"]))
        scores = model.over(looked_up.values()).squeeze(-1)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(scores, batch["label"]).backward()
        optimizer.step()
        for table in tables:
            table.optimizer_stepped()
    state = model.state_dict()
    return {key: state[key].detach() for key in state if "collision" not in key}, tables
