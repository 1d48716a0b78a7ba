"""A LightningModule with a table for every form of lookup and every cut, its batches, and a plain
loop over them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from torchrec.modules.embedding_configs import DataType

from tests.multiprocess.strategies.test_parity import CUTS, POOLINGS
from tests.support.click_model import FEATURES, join_batches, make_batch

State = dict[str, Tensor]
Batch = dict[str, Tensor]
Cuts = dict[str, tuple[str, ...]]
"""Form of lookup -> the cuts that it has a table for."""

SEQUENCE_CUTS = ("table_wise", "row_wise", "column_wise")
EVERY_FORM: Cuts = {
    **dict.fromkeys(POOLINGS, CUTS),
    "sequence": SEQUENCE_CUTS,
    "embedding": SEQUENCE_CUTS,
    "embedding_bag": CUTS,
}
TOO_LARGE = 1e38
"""What the loss is multiplied by where a step is to be skipped: its scaled gradient is no float32
number."""
SKIPPED_STEPS = (1, 4)


class EveryForm(pl.LightningModule):
    """Looks everything up once in a step.

    cuts: the tables. optimizer, options: one optimizer over everything, unless `of_tables_only`:
    then the dense layers rest, or learn by an SGD of their own under manual optimization. sparse:
    what nn.Embedding is told. half: whether tables hold float16. backwards: of which every step is
    made under manual optimization.
    """

    def __init__(
        self,
        cuts: Cuts,
        optimizer: type,
        options: dict[str, Any],
        tables_only_values: bool = False,
        half: bool = False,
        manual: bool = False,
        backwards: tuple[float, ...] = (1.0,),
        freezes: bool = False,
        float32_inside: bool = False,
    ) -> None:
        super().__init__()
        self.cuts, self.optimizer, self.options = cuts, optimizer, options
        self.of_tables_only, self.half_tables, self.backwards = tables_only_values, half, backwards
        self.freezes, self.float32_inside = freezes, float32_inside
        self.automatic_optimization = not manual
        self.tables = nn.ModuleDict()
        width = 0
        for form, form_values in cuts.items():
            width += self._add(form, form_values)
        self.first = nn.Linear(width, 16, bias=False)
        self.last = nn.Linear(16, 1, bias=False)
        # small, so that neighbours among 16-bit numbers are closer than what is allowed
        with torch.no_grad():
            self.last.weight *= 0.4
        if tables_only_values and not manual:
            self.first.requires_grad_(False)
            self.last.requires_grad_(False)
        self.rows_dtype: torch.dtype | None = None
        """Set in an unsharded run: what the strategy would cast looked up rows to."""
        self.seen_dtypes: set[str] = set()
        self.final_state: State = {}
        self.kinds: dict[str, str] = {}

    def _add(self, form: str, cuts: tuple[str, ...]) -> int:
        """Add the tables of one form and return the number of columns that it is looked up as."""
        options: dict[str, Any] = {
            "data_type": DataType.FP16 if self.half_tables else DataType.FP32
        }
        names = [f"{form}_{cut}" for cut in cuts]
        dims = [(8, 16)[i % 2] for i in range(len(cuts))]
        if form in POOLINGS:
            pooling, weighted = POOLINGS[form]
            configs = [
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=dims[i],
                    num_embeddings=61 + i,
                    feature_names=[FEATURES[i % 4], FEATURES[(i + 1) % 4]],
                    pooling=pooling,
                    **options,
                )
                for i, name in enumerate(names)
            ]
            self.tables[form] = EmbeddingBagCollection(tables=configs, is_weighted=weighted)
            return 2 * sum(dims)
        if form == "sequence":
            sequences = [
                EmbeddingConfig(
                    name=name,
                    embedding_dim=8,
                    num_embeddings=61 + i,
                    feature_names=[FEATURES[i % 4]],
                    **options,
                )
                for i, name in enumerate(names)
            ]
            self.tables[form] = EmbeddingCollection(tables=sequences)
            return 8 * len(cuts)
        dtype = torch.float16 if self.half_tables else torch.float32
        for i, name in enumerate(names):
            if form == "embedding":
                table: nn.Module = nn.Embedding(
                    61 + i, dims[i], sparse=self.of_tables_only, dtype=dtype
                )
            else:
                mode = ("sum", "mean")[i % 2]
                table = nn.EmbeddingBag(
                    61 + i, dims[i], mode=mode, sparse=self.of_tables_only, dtype=dtype
                )
            nn.init.uniform_(table.weight, -0.1, 0.1)
            self.tables[name] = table
        return sum(dims)

    def forward(self, batch: Batch) -> Tensor:
        columns = []
        for name, table in self.tables.items():
            if name in POOLINGS:
                columns.append(table(self._keyed(batch, POOLINGS[name][1])).values())
            elif name == "sequence":
                columns += [
                    _mean(rows.values(), rows.lengths())
                    for rows in table(self._keyed(batch, False)).values()
                ]
            elif name.startswith("embedding_bag"):
                columns.append(table(batch["clicks"]))
            else:
                columns.append(table(batch["clicks"]).tanh().mean(1))
        if self.rows_dtype is not None:
            columns = [column.to(self.rows_dtype) for column in columns]
        self.seen_dtypes |= {str(column.dtype) for column in columns}
        rows = torch.cat(columns, 1)
        rows = rows.float() if self.half_tables else rows
        with torch.autocast("cpu", enabled=False) if self.float32_inside else nullcontext():
            return self.last(torch.tanh(self.first(rows))).squeeze(-1)

    def _keyed(self, batch: Batch, weighted: bool) -> KeyedJaggedTensor:
        weights = batch["weights"] if weighted else None
        if weights is not None and self.rows_dtype is not None:
            weights = weights.float()  # torch's own bags take them in the type of the table only
        if weights is not None and self.half_tables and self._trainer is None:
            weights = weights.half()
        return KeyedJaggedTensor(FEATURES, batch["ids"], weights=weights, lengths=batch["lengths"])

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of the batch, or one whose gradient is too large where the batch
        says so."""
        loss = nn.functional.binary_cross_entropy_with_logits(
            self(batch).float(), batch["label"].float()
        )
        return 8 * loss * batch["factor"].max() if "factor" in batch else 8 * loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for scale in self.backwards:
            self.manual_backward(scale * self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        if not self.of_tables_only:
            return self.optimizer(self.parameters(), **self.options)
        tables_values = self.optimizer(list(self.tables.parameters()), **self.options)
        if self.automatic_optimization:
            return tables_values
        return [
            tables_values,
            torch.optim.SGD([*self.first.parameters(), *self.last.parameters()], lr=0.1),
        ]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.freeze_or_not(batch_idx)

    def freeze_or_not(self, step: int) -> None:
        """Let all tables that are cut by rows, or whole on every rank, rest from step 2 to 5."""
        if self.freezes and step in (2, 5):
            for name, parameter in self.tables.named_parameters():
                if "row_wise" in name or "data_parallel" in name:
                    parameter.requires_grad_(step == 5)

    def on_train_start(self) -> None:
        setup = self.trainer.strategy.run_tables
        for name, update in setup.updates.items():
            self.kinds[name.rsplit(".", 1)[-1]] = (
                f"{update.kind} {setup.shards.plan[name].sharding_type}"
            )

    def on_train_end(self) -> None:
        state = self.trainer.strategy.full_state_dict()
        self.final_state = {key: value.clone() for key, value in state.items()}


def _mean(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of something that is not linear in the rows, over each bag."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), rows.shape[1], dtype=rows.dtype).index_add(
        0, owner, rows.tanh()
    )
    return sums / lengths.clamp(min=1).unsqueeze(1)


def batch_of(step: int, rank: int, num_ranks: int, unequal: bool, overflows: bool) -> Batch:
    """Return the batch of one rank. unequal: ranks have batches of other sizes; overflows: one rank
    does, at times."""
    size = 5 + 4 * rank + step % 3 if unequal else 8
    draw = torch.Generator().manual_seed(7000 + 100 * step + rank)
    batch = make_batch(1000 * step + rank, size)
    batch["clicks"] = torch.randint(0, 61, (size, 3), generator=draw)
    if overflows:
        blows_up = step in SKIPPED_STEPS and rank == step % num_ranks
        batch["factor"] = torch.tensor([TOO_LARGE if blows_up else 1.0])
    return batch


def joined(batches: list[Batch]) -> Batch:
    """Return the global batch of the ranks' batches."""
    further = {
        key: torch.cat([batch[key] for batch in batches])
        for key in ("clicks", "factor")
        if key in batches[0]
    }
    return join_batches(batches) | further


def loader(batches: list[Batch]) -> DataLoader:
    """Return the loader of one rank, batches as they are."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def clip_as_one(kind: str, parameters: list[nn.Parameter], limit: float) -> None:
    """Clip by torch's own functions; those of sparse gradients see them dense, and zeros make no
    row touched."""
    learning = [p for p in parameters if p.grad is not None]
    rows = {p: p.grad.coalesce() for p in learning if p.grad is not None and p.grad.is_sparse}
    for parameter, gradient in rows.items():
        parameter.grad = gradient.to_dense()
    clip = nn.utils.clip_grad_norm_ if kind == "norm" else nn.utils.clip_grad_value_
    clip(learning, limit)
    for parameter, gradient in rows.items():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sparse_mask(gradient)


def train_unsharded(
    model: EveryForm,
    batches: list[Batch],
    accumulate: int = 1,
    clip: tuple[str, float] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Train `model` by a plain torch loop over global batches; returns the loss scale at the end.

    accumulate: batches for one step. context: entered around each forward.
    """
    optimizers = model.configure_optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step, batch in enumerate(batches):
        model.freeze_or_not(step)
        for scale in model.backwards:
            with context():
                loss = scale * model.loss(batch)
            scaler.scale(loss / accumulate).backward()
        if (step + 1) % accumulate:
            continue
        for optimizer in optimizers:
            if clip is not None:
                clip_as_one(
                    clip[0],
                    [p for group in optimizer.param_groups for p in group["params"]],
                    clip[1],
                )
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return float(scaler.get_scale())
