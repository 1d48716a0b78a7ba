"""A small training job as plain data: what a property test draws, prints and runs again."""

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

CUTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "data_parallel",
)
# None of them divides by a gradient that may have cancelled to nothing: that would compare
# rounding, not sharding.
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD weight_decay": (torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.05}),
    "Adagrad eps": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2}),
    "Adagrad initial": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "RowWiseAdagrad eps": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}),
    "RowWiseAdagrad initial": (RowWiseAdagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.003, "eps": 1e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.003, "eps": 1e-3, "weight_decay": 0.1}),
}
FUSED = tuple(name for name in OPTIMIZERS if name == "SGD" or "Adagrad" in name)


class _Plain:
    """Prints what is not the default, so that a job that fails can be read."""

    def __repr__(self) -> str:
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]  # type: ignore[arg-type]
        reported = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"{type(self).__name__}({', '.join(reported)})"


@dataclass(frozen=True, repr=False)
class Feature(_Plain):
    """What the ids of one feature are like."""

    longest: int = 3
    """Most ids in a bag."""
    fixed: bool = False
    """Whether every bag is as long, so that nn.Embedding and nn.EmbeddingBag get two dimensions."""
    distinct: int = 1000
    """How many different ids there are, the last ones of the table; 1 repeats one id."""
    empty: Literal["never", "always", "odd steps", "rank 0"] = "never"
    """When all bags of a batch are empty."""


@dataclass(frozen=True, repr=False)
class Table(_Plain):
    """One table and what the strategy is told about it."""

    rows: int
    dim: int
    features: tuple[int, ...]
    mean: bool = False
    frozen: Literal["", "requires_grad", "no optimizer"] = ""
    cuts: tuple[str, ...] = ()
    min_partition: int | None = None
    update: str | None = None


@dataclass(frozen=True, repr=False)
class Collection(_Plain):
    """Tables that are looked up together."""

    kind: Literal["bags", "rows", "nn.Embedding", "nn.EmbeddingBag"]
    tables: tuple[Table, ...]
    weighted: bool = False
    keys: Literal["own", "all", "turning"] = "own"
    """Which features it is called with, and whether their order changes from step to step."""
    padding_idx: int | None = None
    calls: int = 1
    """How often a step calls it, each time with other ids."""
    half: bool = False
    """Whether its rows are float16."""


@dataclass(frozen=True, repr=False)
class Job(_Plain):
    """A whole training job, in plain data."""

    sizes: tuple[tuple[int, ...], ...]
    """Step, then rank -> number of examples."""
    features: tuple[Feature, ...]
    collections: tuple[Collection, ...]
    optimizer: str = "SGD"
    groups: bool = False
    """Whether tables have a param group of their own, with half the learning rate."""
    update: str = "auto"
    accumulate: int = 1
    clip: tuple[str, float] | None = None
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    loss: Literal["mean", "sum", "rank_mean"] = "mean"
    """The strategy's loss_reduction; all but the mean are of a loss that is a sum over examples."""
    decay: float | None = None
    """Factor of all rates after each optimizer step."""
    draws_anew: bool = False
    """Whether a hook draws all tables again, when they are sharded, by their own
    `reset_parameters`."""
    dense: Literal["ddp", "fsdp"] = "ddp"
    keeps_weights: bool = False
    """Whether the step uses the dense weights that its module keeps in a plain dict."""
    drift: int | None = None
    """The step before which the last rank doubles its learning rates, so that ranks would train
    apart."""
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks that share the work."""
        return len(self.sizes[0])

    def tables(self) -> dict[str, Table]:
        """Return full name -> table."""
        return {
            f"collections.{c}"
            if collection.kind.startswith("nn.")
            else f"collections.{c}.c{c}t{t}": table
            for c, collection in enumerate(self.collections)
            for t, table in enumerate(collection.tables)
        }

    def num_ids(self, feature: int) -> int:
        """Return the rows of the smallest table that looks up `feature`."""
        return min(
            (table.rows for table in self.tables().values() if feature in table.features),
            default=100,
        )
