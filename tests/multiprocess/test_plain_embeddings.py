"""nn.Embedding and nn.EmbeddingBag of an unchanged LightningModule, sharded, give the numbers of one unsharded process.

What is compared with is a plain torch loop over all ranks' batches, whose loss is the mean of the ranks' losses.
"""

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import DistRecError
from tests.multiprocess.test_lifecycle import make_trainer
from tests.support.click_model import seeded
from tests.support.ranks import rank_and_num_ranks, run_on_ranks

CUTS = ("table_wise", "row_wise", "column_wise")
OPTIMIZERS: dict[str, tuple[type, dict[str, Any], float]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}, 1e-6),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}, 1e-5),
    "Adam": (torch.optim.Adam, {"lr": 0.001}, 1e-5),
}
STEPS = 5
ROWS, DIM = 37, 8

Embedding = nn.Embedding | nn.EmbeddingBag
Arguments = dict[str, Tensor]
Kind = tuple[Callable[[], Embedding], Callable[[torch.Generator, bool], Arguments]]
"""How an embedding is made, and how its call's arguments are drawn on the rank whose turn it is, and on the others."""


def _rows(**options: Any) -> Callable[[], Embedding]:
    return lambda: nn.Embedding(ROWS, DIM, **options)


def _pretrained(freeze: bool) -> Callable[[], Embedding]:
    return lambda: nn.Embedding.from_pretrained(torch.randn(ROWS, 2 * DIM), freeze=freeze)


def _xavier() -> Embedding:
    table = nn.Embedding(ROWS, 2 * DIM)
    nn.init.xavier_normal_(table.weight)
    return table


def _bags(mode: str, **options: Any) -> Callable[[], Embedding]:
    return lambda: nn.EmbeddingBag(ROWS, DIM, mode=mode, **options)


def _ids(
    *shape: int, of_turn: tuple[int, ...] | None = None, dtype: torch.dtype = torch.long, rows: int = ROWS
) -> Callable[[torch.Generator, bool], Arguments]:
    def draw(generator: torch.Generator, turn: bool) -> Arguments:
        size = of_turn if turn and of_turn is not None else shape
        return {"input": torch.randint(0, rows, size, generator=generator).to(dtype)}

    return draw


def _weighted_ids(*shape: int) -> Callable[[torch.Generator, bool], Arguments]:
    def draw(generator: torch.Generator, turn: bool) -> Arguments:
        return _ids(*shape)(generator, turn) | {"per_sample_weights": torch.rand(*shape, generator=generator) + 0.5}

    return draw


def _offsets(
    last: bool = False,
    weighted: bool = False,
    dtype: torch.dtype = torch.long,
    rows: int = ROWS,
    bags: int = 7,
    of_turn: int = 7,
    ids_of_turn: int = 3,
) -> Callable[[torch.Generator, bool], Arguments]:
    def draw(generator: torch.Generator, turn: bool) -> Arguments:
        size, most = (of_turn, ids_of_turn) if turn else (bags, 3)
        lengths = torch.randint(0, most + 1, (size,), generator=generator)  # some bags are empty
        ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        ids = torch.randint(0, rows, (int(ends[-1]),), generator=generator)
        drawn = {"input": ids.to(dtype), "offsets": (ends if last else ends[:-1]).to(dtype)}
        weights = {"per_sample_weights": torch.rand(len(ids), generator=generator) + 0.5} if weighted else {}
        return drawn | weights

    return draw


KINDS: dict[str, Kind] = {
    "one_id": (_rows(), _ids()),
    "vector": (_rows(), _ids(6)),
    "matrix": (_rows(), _ids(4, 3)),
    "cube": (_rows(), _ids(2, 3, 4)),
    "int32": (_rows(), _ids(4, 3, dtype=torch.int32)),
    "no_ids": (_rows(), _ids(0)),
    "no_ids_on_a_rank": (_rows(), _ids(6, 2, of_turn=(0, 2))),
    "padding": (_rows(padding_idx=0), _ids(6, 3, rows=5)),
    "padding_at_the_end": (_rows(padding_idx=-1), _ids(60)),
    "frozen": (_pretrained(True), _ids(6)),
    "pretrained": (_pretrained(False), _ids(6)),
    "sparse": (_rows(sparse=True), _ids(6)),
    "xavier": (_xavier, _ids(6)),
    "keyword": (_rows(), _ids(6)),
    "bag_sum": (_bags("sum"), _ids(6, 3)),
    "bag_mean": (_bags("mean"), _ids(6, 3, of_turn=(6, 2))),
    "bag_int32": (_bags("mean"), _ids(6, 3, dtype=torch.int32)),
    "bag_offsets": (_bags("sum"), _offsets()),
    "bag_offsets_mean": (_bags("mean"), _offsets()),
    "bag_offsets_int32": (_bags("mean"), _offsets(dtype=torch.int32)),
    "bag_last": (_bags("sum", include_last_offset=True), _offsets(last=True)),
    "bag_last_mean": (_bags("mean", include_last_offset=True), _offsets(last=True)),
    "bag_weights": (_bags("sum"), _weighted_ids(5, 3)),
    "bag_weights_offsets": (_bags("sum"), _offsets(weighted=True)),
    "bag_weights_padding": (_bags("sum", padding_idx=2), _offsets(weighted=True, rows=5)),
    "bag_padding": (_bags("sum", padding_idx=0), _ids(6, 3, rows=4)),
    "bag_padding_mean": (_bags("mean", padding_idx=-1), _ids(20, 4)),
    "bag_padding_offsets": (_bags("mean", padding_idx=1), _offsets(rows=3)),
    "bag_sparse": (_bags("mean", sparse=True), _ids(6, 3)),
    "bag_all_empty_on_a_rank": (_bags("sum"), _offsets(ids_of_turn=0)),
    "bag_keyword": (_bags("sum"), _offsets(weighted=True)),
}
UNEQUAL: dict[str, Kind] = {
    "fewer_bags": (_bags("mean"), _ids(6, 3, of_turn=(4, 2))),
    "fewer_bags_offsets": (_bags("mean"), _offsets(of_turn=5)),
    "no_bags": (_bags("sum"), _ids(6, 3, of_turn=(0, 3))),
    "no_bags_offsets": (_bags("mean"), _offsets(of_turn=0)),
}
"""The ranks' calls have unequal numbers of bags."""
FROZEN = ("frozen",)
NEVER_LOOKED_UP = ("no_ids",)


def _draws(step: int, rank: int, num_ranks: int, kinds: Sequence[str]) -> dict[str, Arguments]:
    """The batch of one rank: the arguments of every kind's call."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    turn = step % num_ranks == rank
    return {kind: (KINDS | UNEQUAL)[kind][1](generator, turn) for kind in kinds}


class EveryKind(pl.LightningModule):
    """One embedding for each kind; each is read by a layer of its own."""

    def __init__(self, optimizer: str, kinds: Sequence[str]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.tables = nn.ModuleDict({kind: (KINDS | UNEQUAL)[kind][0]() for kind in kinds})
        self.heads = nn.ModuleDict({
            kind: nn.Linear(table.embedding_dim, 2, bias=False) for kind, table in self.tables.items()
        })
        self.final_state: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Arguments], batch_idx: int) -> Tensor:
        losses = []
        for kind, table in self.tables.items():
            arguments = batch[kind]
            if "keyword" in kind:
                rows = table(**arguments)
            elif "offsets" in arguments:
                rows = table(*arguments.values())
            else:
                rows = table(arguments["input"], **{k: v for k, v in arguments.items() if k != "input"})
            losses.append((self.heads[kind](rows) - 1).pow(2).sum() / 20)
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        kind, options, _ = OPTIMIZERS[self.optimizer]
        return kind(self.parameters(), **options)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def whole_state(model: pl.LightningModule) -> dict[str, Tensor]:
    """Collective. Return a copy of the state with whole tables on rank 0."""
    return {key: value.clone() for key, value in model.trainer.strategy.lightning_module_state_dict().items()}


def train_unsharded(model: Any, batches: list[list[Any]]) -> Any:
    """Train a copy of `model` by a plain loop; returns it. batches: step -> rank -> batch."""
    model = copy.deepcopy(model)
    optimizer = model.configure_optimizers()
    for step, of_ranks in enumerate(batches):
        optimizer.zero_grad()
        torch.stack([model.training_step(batch, step) for batch in of_ranks]).mean().backward()
        optimizer.step()
    return model


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute difference of each entry; the keys must be the same, in order."""
    assert list(found) == list(wanted)
    assert all(found[key].shape == wanted[key].shape for key in wanted)
    return {key: float((found[key] - wanted[key]).abs().max()) for key in wanted}


def too_far(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> dict[str, float]:
    """Return the differences above `limit`, NaNs among them."""
    return {key: value for key, value in differences(found, wanted).items() if not value <= limit}


def loader(batches: list[Any]) -> DataLoader:
    """Return the loader of one rank, batches as they are."""
    return DataLoader(batches, batch_size=None)


def _train_every_kind(optimizer: str, cuts: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the trained state, and how each table was cut. cuts: kind -> how it is to be cut."""
    rank, num_ranks = rank_and_num_ranks()
    model = seeded(EveryKind, optimizer, tuple(cuts))
    found: dict[str, str] = {}

    def look() -> None:
        plan = model.trainer.strategy.table_setup.shards.plan
        found.update({name.removeprefix("tables."): sharding.sharding_type for name, sharding in plan.items()})

    model.on_train_start = look  # type: ignore[method-assign]
    tables = {f"tables.{kind}": {"sharding_types": [cut], "min_partition": 4} for kind, cut in cuts.items()}
    trainer = make_trainer({"convert_embeddings": "all", "tables": tables})
    trainer.fit(model, loader([_draws(step, rank, num_ranks, tuple(cuts)) for step in range(STEPS)]))
    return model.final_state, found


def _train_every_kind_unsharded(optimizer: str, kinds: Sequence[str], num_ranks: int) -> tuple[EveryKind, EveryKind]:
    """Return the model at the start and trained."""
    start = seeded(EveryKind, optimizer, kinds)
    batches = [[_draws(step, rank, num_ranks, kinds) for rank in range(num_ranks)] for step in range(STEPS)]
    return start, train_unsharded(start, batches)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_call_has_the_weights_of_one_unsharded_process(name: str, num_ranks: int) -> None:
    # torch's own Adam takes no gradients of nn.Embedding(sparse=True), sharded or not.
    kinds = tuple(kind for kind in KINDS if name != "Adam" or "sparse" not in kind)
    # Each kind is cut in another way for each optimizer, so that all pairs of them occur.
    cuts = {kind: CUTS[(list(KINDS).index(kind) + list(OPTIMIZERS).index(name) + num_ranks) % 3] for kind in kinds}
    state, found = run_on_ranks(_train_every_kind, num_ranks, name, cuts)[0]
    assert found == cuts
    start, trained = _train_every_kind_unsharded(name, kinds, num_ranks)
    assert not too_far(state, trained.state_dict(), OPTIMIZERS[name][2])
    for key, moved in differences(trained.state_dict(), start.state_dict()).items():
        kind = key.split(".")[1]
        stays = kind in NEVER_LOOKED_UP or (kind in FROZEN and key.startswith("tables"))
        assert (moved == 0) if stays else (moved > 1e-4), key
    for kind, table in start.tables.items():
        if table.padding_idx is not None:
            row = table.padding_idx
            assert torch.equal(state[f"tables.{kind}.weight"][row], table.weight[row]), kind


@pytest.mark.parametrize("cut", CUTS)
def test_ranks_may_look_up_unequal_numbers_of_bags(cut: str) -> None:
    state, _ = run_on_ranks(_train_every_kind, 2, "Adagrad", dict.fromkeys(UNEQUAL, cut))[0]
    _, trained = _train_every_kind_unsharded("Adagrad", tuple(UNEQUAL), 2)
    assert not too_far(state, trained.state_dict(), OPTIMIZERS["Adagrad"][2])


class OneTable(pl.LightningModule):
    """Users and items are rows of one table, looked up twice in a step; the table has two names."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.user = nn.Embedding(ROWS, DIM)
        self.item = self.user
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.final_state: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tags = self.tags(batch["tags"]) * self.tags(batch["other_tags"])
        scores = (self.user(batch["user"]) * self.item(batch["item"]) + tags).sum(-1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["label"])

    def configure_optimizers(self) -> Any:
        kind, options, _ = OPTIMIZERS[self.optimizer]
        return kind(self.parameters(), **options)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def _clicks(step: int, rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    batch = {name: torch.randint(0, ROWS, (8,), generator=draw) for name in ("user", "item")}
    batch |= {name: torch.randint(0, ROWS, (8, 3), generator=draw) for name in ("tags", "other_tags")}
    return batch | {"label": torch.randint(0, 2, (8,), generator=draw).float()}


def _train_one_table(optimizer: str, strategy: dict[str, Any]) -> dict[str, Tensor] | str:
    rank, _ = rank_and_num_ranks()
    model = seeded(OneTable, optimizer)
    try:
        make_trainer({"convert_embeddings": "all", **strategy}).fit(
            model, loader([_clicks(step, rank) for step in range(STEPS)])
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return model.final_state


def _train_one_table_by_all() -> dict[str, Any]:
    found = {name: _train_one_table(name, {}) for name in OPTIMIZERS}
    found["Adagrad kept"] = _train_one_table("Adagrad", {"embedding_update": "sparse"})
    return found


@pytest.fixture(scope="module", params=[2, 3])
def one_table(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found."""
    return run_on_ranks(_train_one_table_by_all, request.param)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Adagrad kept"])
def test_a_table_looked_up_twice_in_a_step_is_updated_once(one_table: list[dict[str, Any]], name: str) -> None:
    optimizer = name.split()[0]
    start = seeded(OneTable, optimizer)
    batches = [[_clicks(step, rank) for rank in range(len(one_table))] for step in range(STEPS)]
    # The ranks' batches have one size: the mean of their losses is the loss of the joined batch.
    joined = [[{key: torch.cat([batch[key] for batch in of_ranks]) for key in of_ranks[0]}] for of_ranks in batches]
    wanted = train_unsharded(start, joined).state_dict()
    found = one_table[0][name]
    assert not isinstance(found, str), found
    assert not too_far(found, wanted, OPTIMIZERS[optimizer][2])


class SparseModel(pl.LightningModule):
    """As users of SparseAdam write it: an optimizer for the embeddings, one for the rest, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.item = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=0)
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=True)
        self.head = nn.Linear(DIM, 1)
        self.final_state: dict[str, Tensor] = {}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        scores = self.head(self.item(batch["item"]) * self.tags(batch["tags"])).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["label"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        loss = self.loss(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        tables = [p for n, p in self.named_parameters() if not n.startswith("head")]
        return [torch.optim.SparseAdam(tables, lr=0.001), torch.optim.SGD(self.head.parameters(), lr=0.1)]

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def _train_sparse() -> list[dict[str, Tensor]]:
    rank, _ = rank_and_num_ranks()
    found = []
    for cut in CUTS:
        model = seeded(SparseModel)
        tables = {name: {"sharding_types": [cut], "min_partition": 4} for name in ("item", "tags")}
        trainer = make_trainer({"convert_embeddings": "all", "tables": tables})
        trainer.fit(model, loader([_clicks(step, rank) for step in range(STEPS)]))
        found.append(model.final_state)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sparse_adam_has_the_weights_of_one_unsharded_process(num_ranks: int) -> None:
    states = run_on_ranks(_train_sparse, num_ranks)[0]
    model = seeded(SparseModel)
    optimizers = model.configure_optimizers()
    for step in range(STEPS):
        model.zero_grad()
        torch.stack([model.loss(_clicks(step, rank)) for rank in range(num_ranks)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for state in states:
        assert not too_far(state, model.state_dict(), 1e-5)


class TwoTower(pl.LightningModule):
    """Two-tower retrieval as users write it: in-batch softmax over user and item embeddings."""

    def __init__(self, num_users: int = 50, num_items: int = 70, dim: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.user_embedding = nn.Embedding(num_users, dim)
        self.item_embedding = nn.Embedding(num_items, dim)
        nn.init.xavier_uniform_(self.user_embedding.weight)
        nn.init.xavier_uniform_(self.item_embedding.weight)
        self.user_tower = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.item_tower = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        users = nn.functional.normalize(self.user_tower(self.user_embedding(user)), dim=-1)
        items = nn.functional.normalize(self.item_tower(self.item_embedding(item)), dim=-1)
        return users @ items.T / 0.2

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scores = self(*batch)
        loss = nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        if self._trainer is not None:
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores = self(*batch)
        loss = nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        self.log("val_loss", loss, sync_dist=True, batch_size=len(scores))

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(*batch)

    def configure_optimizers(self) -> Any:
        tables = [p for n, p in self.named_parameters() if "embedding" in n]
        rest = [p for n, p in self.named_parameters() if "embedding" not in n]
        return torch.optim.Adam([{"params": tables, "lr": 1e-3}, {"params": rest, "weight_decay": 0.01}], lr=5e-4)


class SASRec(pl.LightningModule):
    """Self-attentive sequential recommendation: one positive and one negative next item for each position."""

    def __init__(self, num_items: int = 60, length: int = 9, dim: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.item_embedding = nn.Embedding(num_items + 1, dim, padding_idx=0)
        self.position_embedding = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, items: Tensor) -> Tensor:
        length = items.shape[1]
        positions = torch.arange(length, device=items.device).expand_as(items)
        inputs = self.item_embedding(items) * self.item_embedding.embedding_dim**0.5
        inputs = inputs + self.position_embedding(positions)
        inputs = inputs * (items != 0).unsqueeze(-1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=items.device)
        return self.norm(self.encoder(inputs, mask=mask, is_causal=True))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        items, positives, negatives = batch
        states = self(items)
        wanted = (states * self.item_embedding(positives)).sum(-1)
        unwanted = (states * self.item_embedding(negatives)).sum(-1)
        seen = positives != 0
        loss = nn.functional.binary_cross_entropy_with_logits(wanted[seen], torch.ones_like(wanted[seen]))
        return loss + nn.functional.binary_cross_entropy_with_logits(unwanted[seen], torch.zeros_like(unwanted[seen]))

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0])[:, -1].unsqueeze(1) * self.item_embedding(batch[1])).sum(-1)

    def configure_optimizers(self) -> Any:
        # The key biases' gradient is 0 but for rounding, which the default eps would make steps of the full rate.
        return torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-5)


def _pairs(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 50, (12,), generator=draw), torch.randint(0, 70, (12,), generator=draw)


def _sequences(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    clicks = torch.randint(1, 61, (6, 10), generator=draw)
    starts = torch.randint(0, 6, (6, 1), generator=draw)
    clicks = clicks * (torch.arange(10) >= starts)
    negatives = torch.randint(1, 61, (6, 9), generator=draw) * (clicks[:, 1:] != 0)
    return clicks[:, :-1], clicks[:, 1:], negatives


MODELS: dict[str, tuple[type, Callable[[int, int], Any]]] = {
    "TwoTower": (TwoTower, _pairs),
    "SASRec": (SASRec, _sequences),
}


def _train_ordinary_by_all(ways: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_train_ordinary(options) for options in ways]


def _train_ordinary(options: dict[str, Any]) -> dict[str, Any]:
    """Return by model what was trained, predicted and sharded. Ranks other than 0 begin with other weights."""
    rank, _ = rank_and_num_ranks()
    found: dict[str, Any] = {}
    for name, (kind, batch_of) in MODELS.items():
        model = seeded(kind)
        if rank:  # rank 0's weights count, as under DDP
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
        trainer = make_trainer(options, enable_model_summary=True)
        trainer.fit(model, loader([batch_of(step, rank) for step in range(STEPS)]))
        found[name] = whole_state(model)
        found[f"{name} predicted"] = trainer.predict(model, loader([batch_of(STEPS, rank)]))
        found[f"{name} sharded"] = [path for path, child in model.named_modules() if hasattr(child, "sharded")]
    return found


ITEMS_ONLY = {name: ["item_embedding"] for name in MODELS}
BOTH = {"TwoTower": ["user_embedding", "item_embedding"], "SASRec": ["item_embedding", "position_embedding"]}
WAYS: dict[int, list[tuple[dict[str, Any], dict[str, list[str]]]]] = {
    2: [
        ({"convert_embeddings": "all"}, BOTH),
        ({"convert_embeddings": ["item_embedding"], "sharding_types": ["column_wise"]}, ITEMS_ONLY),
    ],
    3: [({"min_rows": 60, "sharding_types": ["row_wise"]}, ITEMS_ONLY)],
}
"""Ranks -> options of the strategy, and what they shard."""


@pytest.mark.parametrize("num_ranks", WAYS)
def test_ordinary_models_train_and_predict_as_in_one_unsharded_process(num_ranks: int) -> None:
    found = run_on_ranks(_train_ordinary_by_all, num_ranks, [options for options, _ in WAYS[num_ranks]])
    for name, (kind, batch_of) in MODELS.items():
        batches = [[batch_of(step, rank) for rank in range(num_ranks)] for step in range(STEPS)]
        trained = train_unsharded(seeded(kind), batches)
        trained.eval()
        for way, (_, sharded) in enumerate(WAYS[num_ranks]):
            assert found[0][way][f"{name} sharded"] == sharded[name]
            assert not too_far(found[0][way][name], trained.state_dict(), 1e-5)
            for rank in range(num_ranks):
                with torch.no_grad():
                    wanted = trained.predict_step(batch_of(STEPS, rank), 0)
                torch.testing.assert_close(found[rank][way][f"{name} predicted"][0], wanted, atol=1e-4, rtol=0)


class Nested(TwoTower):
    """Embeddings in nested places, one of them under two names, and state_dict keys before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.ModuleDict({"item": nn.Embedding(70, 16)}), nn.ModuleDict()])
        self.towers[1]["tags"] = nn.EmbeddingBag(50, 16, mode="mean")
        self.scale = nn.Parameter(torch.ones(1))
        self.again = self.towers[0]["item"]
        self.register_buffer("offset", torch.zeros(1))
        self.keys: list[str] = []

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = self.towers[0]["item"](item) + self.again(item.flip(0))
        tags = self.towers[1]["tags"](user.unsqueeze(1))
        return super().forward(user, item) + self.scale * (tags @ rows.T) + self.offset

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.keys = list(self.state_dict())


def _live(folder: str) -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    found: dict[str, Any] = {}
    options = {
        "convert_embeddings": "all",
        "tables": {
            "towers.0.item": {"sharding_types": ["column_wise"], "min_partition": 4},
            "towers.1.tags": {"sharding_types": ["row_wise"]},
        },
    }
    model = seeded(Nested)
    keep = ModelCheckpoint(folder, filename="last", save_weights_only=True)
    trainer = make_trainer(options, callbacks=[keep], enable_checkpointing=True)
    validation = loader([_pairs(step, rank) for step in range(100, 103)])
    found["before"] = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, loader([_pairs(step, rank) for step in range(STEPS)]), validation)
    found["keys"] = model.keys
    found["first"] = whole_state(model)
    found["after"] = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    found["predicted"] = trainer.predict(model, validation)
    second = make_trainer(options)
    second.fit(model, loader([_pairs(step, rank) for step in range(STEPS, 2 * STEPS)]), validation)
    found["second"] = whole_state(model)
    found["path"] = keep.best_model_path
    return found


def _validation_loss(model: TwoTower, num_ranks: int) -> float:
    losses = []
    with torch.no_grad():
        for step in range(100, 103):
            for rank in range(num_ranks):
                scores = model(*_pairs(step, rank))
                losses.append(float(nn.functional.cross_entropy(scores, torch.arange(len(scores)))))
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in the life of one Nested model."""
    return run_on_ranks(_live, 2, str(tmp_path_factory.mktemp("life")))


def test_validate_fit_predict_and_a_second_fit_continue_each_other(life: list[dict[str, Any]]) -> None:
    start = seeded(Nested)
    assert life[0]["before"] == pytest.approx(_validation_loss(start, 2), abs=1e-6)
    first = train_unsharded(start, [[_pairs(step, rank) for rank in range(2)] for step in range(STEPS)])
    assert not too_far(life[0]["first"], first.state_dict(), 1e-5)
    assert life[0]["after"] == pytest.approx(_validation_loss(first, 2), abs=1e-5)
    for rank in range(2):
        with torch.no_grad():
            wanted = [first(*_pairs(step, rank)) for step in range(100, 103)]
        torch.testing.assert_close(life[rank]["predicted"], wanted, atol=1e-4, rtol=0)
    second = train_unsharded(first, [[_pairs(step, rank) for rank in range(2)] for step in range(STEPS, 2 * STEPS)])
    assert not too_far(life[0]["second"], second.state_dict(), 1e-5)


def test_the_state_dict_has_the_unsharded_keys_in_their_order_on_every_rank(life: list[dict[str, Any]]) -> None:
    wanted = list(seeded(Nested).state_dict())
    assert [found["keys"] for found in life] == [wanted, wanted]


def test_a_checkpoint_loads_into_the_users_own_module(life: list[dict[str, Any]]) -> None:
    path = life[0]["path"]
    model = Nested()
    state = torch.load(path, weights_only=True)["state_dict"]
    model.load_state_dict(state, strict=True)
    assert not too_far(model.state_dict(), life[0]["first"], 0)
    assert not too_far(Nested.load_from_checkpoint(path).state_dict(), life[0]["first"], 0)


def _evaluate(path: str) -> list[float]:
    rank, _ = rank_and_num_ranks()
    found = []
    for which in ("all", "none"):
        model = Nested()
        trainer = make_trainer({"convert_embeddings": which, "sharding_types": ["row_wise"]})
        batches = loader([_pairs(step, rank) for step in range(100, 103)])
        found.append(float(trainer.test(model, batches, ckpt_path=path, verbose=False)[0]["val_loss"]))
    return found


def test_a_checkpoint_is_evaluated_over_other_ranks_sharded_and_whole(life: list[dict[str, Any]]) -> None:
    model = Nested.load_from_checkpoint(life[0]["path"])
    assert run_on_ranks(_evaluate, 3, life[0]["path"])[0] == pytest.approx([_validation_loss(model, 3)] * 2, abs=1e-5)


class MyEmbedding(nn.Embedding):
    """A subclass: it may compute anything."""


WHOLE: dict[str, tuple[Callable[[], Embedding], str]] = {
    "normed": (_rows(max_norm=1.0), r"max_norm=1\.0"),
    "normed_bag": (_bags("sum", max_norm=2.0), r"max_norm=2\.0"),
    "scaled": (_rows(scale_grad_by_freq=True), "scale_grad_by_freq"),
    "maximum": (_bags("max"), "mode='max'"),
    "narrow": (lambda: nn.Embedding(ROWS, 6), "embedding_dim=6"),
    "mine": (lambda: MyEmbedding(ROWS, DIM), "MyEmbedding is a subclass"),
    "tied": (_rows(), "output.weight"),
}


class LeftWhole(pl.LightningModule):
    """Embeddings that cannot be sharded exactly, and one that can; `tied` gives its weight to an output layer."""

    def __init__(self, names: Sequence[str] = tuple(WHOLE), sharded: bool = True) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, WHOLE[name][0]())
        if "tied" in names:
            self.output = nn.Linear(DIM, ROWS, bias=False)
            self.output.weight = self.tied.weight
        self.names = names
        if sharded:
            self.item = nn.Embedding(ROWS, DIM)
        self.final_state: dict[str, Tensor] = {}
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        losses = []
        for name in (*self.names, *(["item"] if hasattr(self, "item") else [])):
            table = getattr(self, name)
            rows = table(batch.unsqueeze(1)) if isinstance(table, nn.EmbeddingBag) else table(batch)
            losses.append(((self.output(rows) if name == "tied" else rows) - 1).pow(2).mean())
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def _whole_batch(step: int, rank: int) -> Tensor:
    # No id twice over the ranks: scale_grad_by_freq and max_norm count within one process's batch.
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
    return order[8 * rank : 8 * rank + 8]


def _fit_left_whole(strategy: dict[str, Any], *arguments: Any) -> tuple[list[str], dict[str, Tensor], list[str]]:
    """Return the warnings of this rank, the trained state and the tables that were sharded."""
    rank, _ = rank_and_num_ranks()
    model = seeded(LeftWhole, *arguments)
    trainer = make_trainer(strategy)
    tables: list[str] = []

    def look() -> None:
        setup = trainer.strategy.table_setup
        tables.extend([] if setup is None else sorted(setup.updates))

    model.on_train_start = look  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader([_whole_batch(step, rank) for step in range(3)]))
    return [str(warning.message) for warning in caught], model.final_state, tables


LEFT_WHOLE: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "all": ({"convert_embeddings": "all"}, ()),
    "auto": ({"min_rows": ROWS}, ()),
    "small": ({"min_rows": ROWS + 1}, ()),
    "none": ({"convert_embeddings": "none"}, ()),
    "nothing to shard": ({"convert_embeddings": "all"}, (tuple(WHOLE), False)),
}


def _leave_whole() -> dict[str, Any]:
    return {name: _fit_left_whole(strategy, *arguments) for name, (strategy, arguments) in LEFT_WHOLE.items()}


@pytest.fixture(scope="module")
def left_whole() -> list[dict[str, Any]]:
    """What each rank said and trained, by case."""
    return run_on_ranks(_leave_whole, 2)


@pytest.mark.parametrize("case", LEFT_WHOLE)
def test_what_stays_whole_is_said_once_by_rank_zero_and_trains_exactly(
    left_whole: list[dict[str, Any]], case: str
) -> None:
    _, arguments = LEFT_WHOLE[case]
    said, state, tables = left_whole[0][case]
    asked = case not in ("none", "small")
    for name, (_, reason) in WHOLE.items():
        about = [text for text in said if f"'{name}'" in text and re.search(reason, text)]
        assert len(about) == (1 if asked else 0), (name, said)
    assert not [text for text in left_whole[1][case][0] if "whole" in text]
    assert tables == (["item"] if case in ("all", "auto") else [])
    batches = [[_whole_batch(step, rank) for rank in range(2)] for step in range(3)]
    far = too_far(state, train_unsharded(seeded(LeftWhole, *arguments), batches).state_dict(), 1e-6)
    # Under DDP each rank's lookups shrink rows of its own copy: with max_norm the ranks' copies differ, ours as DDP's.
    assert not {key for key in far if not key.startswith("normed")}


class ReadsWeight(LeftWhole):
    """Scores every item by the weight of a sharded embedding."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.item(batch) @ self.item.weight.T, batch)


class LearnsWeights(LeftWhole):
    """Learns the weights of the ids in a bag."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.importance = nn.Parameter(torch.ones(ROWS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids = batch.view(2, 4)
        return (self.bag(ids, per_sample_weights=self.importance[ids]) + self.item(batch).sum()).pow(2).mean()


class BadIds(LeftWhole):
    """Looks up an id that no row has, on one rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.item(batch + (ROWS if rank_and_num_ranks()[0] == 1 else 0)).sum()


REFUSED: dict[str, tuple[type, tuple[str, ...], Any, str]] = {
    **{
        name: (LeftWhole, tuple(WHOLE), ["item", name], f"ShardingError: .*'{name}' cannot be sharded: .*{reason}")
        for name, (_, reason) in WHOLE.items()
    },
    "unknown path": (LeftWhole, (), ["itm"], "ConfigError: .*'itm'; did you mean 'item'"),
    "unknown path among known": (LeftWhole, (), ["item", "towers.0"], r"ConfigError: .*'towers\.0'"),
    "no embedding": (LeftWhole, ("tied",), ["output"], "ConfigError: .*'output'.* item, tied"),
    "weight": (ReadsWeight, (), "all", "RowsElsewhereError: .*convert_embeddings"),
    "learned weights": (LearnsWeights, (), "all", "ShardingError: .*'bag'.*weights need a gradient.*Detach"),
    "bad ids": (BadIds, (), "all", rf"IdsError: .*'item' has the id {ROWS + 2}"),
}


def _refused_all() -> dict[str, tuple[str, int]]:
    found = {}
    rank, _ = rank_and_num_ranks()
    for case, (kind, names, convert, _) in REFUSED.items():
        model = seeded(kind, names)
        try:
            make_trainer({"convert_embeddings": convert}).fit(model, loader([torch.arange(1, 9) + rank]))
            found[case] = ("nothing was raised", model.steps)
        except Exception as error:
            found[case] = (f"{type(error).__name__}: {error}", model.steps)
    return found


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, int]]]:
    """What each rank raised, by case."""
    return run_on_ranks(_refused_all, 2)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_an_error_of_ours_on_every_rank(
    refusals: list[dict[str, tuple[str, int]]], case: str
) -> None:
    for of_rank in refusals:
        said, steps = of_rank[case]
        assert re.match(REFUSED[case][3], said, re.DOTALL), said
        assert steps == 0, "a step was taken before the error"


class Bags(LeftWhole):
    """One bag of embeddings, called with what the batch holds."""

    def __init__(self) -> None:
        super().__init__((), sharded=False)
        self.bag = nn.EmbeddingBag(ROWS, DIM)

    def training_step(self, batch: Arguments, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.bag(**batch).pow(2).sum()


class Rows(LeftWhole):
    """One embedding, called with what the batch holds."""

    def __init__(self) -> None:
        super().__init__((), sharded=False)
        self.item = nn.Embedding(ROWS, DIM)

    def training_step(self, batch: Arguments, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.item(**batch).pow(2).sum()


WRONG_CALLS: dict[str, tuple[Callable[[], LeftWhole], Arguments]] = {
    "offsets from 2": (Bags, {"input": torch.arange(8), "offsets": torch.tensor([2, 4])}),
    "offsets beyond the ids": (Bags, {"input": torch.arange(8), "offsets": torch.tensor([0, 4, 20])}),
    "offsets that go down": (Bags, {"input": torch.arange(8), "offsets": torch.tensor([0, 6, 3])}),
    "ids without offsets": (Bags, {"input": torch.arange(8)}),
    "offsets and two dimensions": (Bags, {"input": torch.arange(8).view(4, 2), "offsets": torch.tensor([0, 4])}),
    "weights of a mean": (
        Bags,
        {"input": torch.arange(8).view(4, 2), "per_sample_weights": torch.ones(4, 2)},
    ),
    "float ids": (Rows, {"input": torch.arange(8) + 0.5}),
    "bool ids": (Rows, {"input": torch.arange(8) > 3}),
    "float ids in bags": (Bags, {"input": torch.arange(8).view(4, 2) + 0.5}),
}
WRONG_OFFSETS = tuple(case for case in WRONG_CALLS if case.startswith("offsets "))
OTHER_WRONG_CALLS = tuple(case for case in WRONG_CALLS if case not in WRONG_OFFSETS)


def _call_wrongly(cases: Sequence[str]) -> dict[str, tuple[bool, str]]:
    """Return by case whether an error of ours was raised, and what it said."""
    found = {}
    for case in cases:
        kind, batch = WRONG_CALLS[case]
        try:
            make_trainer({"convert_embeddings": "all"}).fit(seeded(kind), loader([batch]))
            found[case] = (False, "nothing was raised")
        except Exception as error:
            found[case] = (isinstance(error, DistRecError), f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("cases", [WRONG_OFFSETS, OTHER_WRONG_CALLS], ids=["offsets", "others"])
def test_a_call_that_torch_refuses_is_an_error_of_ours(cases: tuple[str, ...]) -> None:
    for case in cases:
        kind, batch = WRONG_CALLS[case]
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            seeded(kind).training_step(batch, 0)
    for of_rank in run_on_ranks(_call_wrongly, 2, cases):
        assert not {case: said for case, (ours, said) in of_rank.items() if not ours}


def _hook() -> list[str]:
    model = seeded(Rows)
    seen: list[str] = []
    model.item.register_forward_pre_hook(lambda *_: seen.append("before forward"))
    model.item.register_forward_hook(lambda *_: seen.append("forward"))
    model.item.register_full_backward_hook(lambda *_: seen.append("backward"))
    make_trainer({"convert_embeddings": "all"}).fit(model, loader([{"input": torch.arange(8)}]))
    return seen


def test_hooks_on_an_embedding_run_while_it_is_sharded() -> None:
    found = run_on_ranks(_hook, 2)
    assert found == [["before forward", "forward", "backward"]] * 2


def test_the_strategy_refuses_unknown_conversions() -> None:
    with pytest.raises(ValueError, match="convert_embeddings='every'"):
        TorchRecShardedStrategy(convert_embeddings="every")  # type: ignore[arg-type]
