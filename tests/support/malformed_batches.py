"""Batches that are made badly in many ways, drawn at random, and a module that looks them up in
every way."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_configs import PoolingType

ROWS, DIM, BAGS = 23, 8, 4
KEYS = ["a", "b"]
Parts = dict[str, Any]
"""Arguments of a KeyedJaggedTensor, or of a call of a plain embedding."""


def _bags(
    name: str, pooling: PoolingType = PoolingType.SUM, weighted: bool = False
) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=f"{name}_{key}",
            embedding_dim=DIM,
            num_embeddings=ROWS,
            feature_names=[key],
            pooling=pooling,
        )
        for key in KEYS
    ]
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted)


class EveryKind(pl.LightningModule):
    """One collection or embedding of each kind; `calls` looks all batches up and keeps what comes
    of it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_table = _bags("by_table")
        self.by_rows = _bags("by_rows", PoolingType.MEAN)
        self.by_columns = _bags("by_columns")
        self.everywhere = _bags("everywhere")
        self.weighted = _bags("weighted", weighted=True)
        self.sequence = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=KEYS
                )
            ]
        )
        self.item = nn.Embedding(ROWS, DIM)
        self.padded = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.last = nn.EmbeddingBag(ROWS, DIM, include_last_offset=True)
        self.padded_bag = nn.EmbeddingBag(ROWS, DIM, padding_idx=0)

    def look_up(self, kind: str, parts: Parts) -> Tensor:
        """Return the values of one lookup."""
        module = getattr(self, kind)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return module(**parts)
        features = KeyedJaggedTensor(**parts)
        actual = module(features)
        return (
            actual.values()
            if kind != "sequence"
            else torch.cat([actual[key].values() for key in KEYS])
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.zeros(())
        for kind, parts in batch.items():
            loss = loss + self.look_up(kind, parts).pow(2).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


COLLECTIONS = ("by_table", "by_rows", "by_columns", "everywhere", "weighted", "sequence")
ROW_KINDS = ("item", "padded")
BAG_KINDS = ("bag", "last", "padded_bag")
SHARDING = {
    "by_table.*": {"sharding_types": ["table_wise"]},
    "by_rows.*": {"sharding_types": ["row_wise"]},
    "by_columns.*": {"sharding_types": ["column_wise"], "min_partition": 4},
    "everywhere.*": {"sharding_types": ["data_parallel"]},
    "weighted.*": {"sharding_types": ["table_wise"]},
    "sequence.*": {"sharding_types": ["row_wise"]},
}
STRATEGY: dict[str, Any] = {"convert_embeddings": "all", "tables": SHARDING}


def good(kind: str, draw: torch.Generator) -> Parts:
    """Return the arguments of a call that one process takes."""
    if kind in ROW_KINDS:
        return {"input": torch.randint(0, ROWS, (BAGS, 3), generator=draw)}
    features = 1 if kind in BAG_KINDS else len(KEYS)
    lengths = torch.randint(0, 4, (features * BAGS,), generator=draw)
    lengths[0] = 3
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
    if kind in BAG_KINDS:
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return {"input": ids, "offsets": ends if kind == "last" else ends[:-1]}
    parts = {"keys": list(KEYS), "values": ids, "lengths": lengths}
    return parts | ({"weights": torch.rand(len(ids), generator=draw)} if kind == "weighted" else {})


def _ids_name(parts: Parts) -> str:
    return "input" if "input" in parts else "values"


def _change(name: str, change: Callable[[Any], Any]) -> Callable[[Parts], Parts]:
    def changed(parts: Parts) -> Parts:
        name_here = _ids_name(parts) if name == "ids" else name
        return parts if name_here not in parts else parts | {name_here: change(parts[name_here])}

    return changed


def _set(position: int, value: int) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[position] = value
        return tensor

    return changed


def _move(tensor: Tensor) -> Tensor:
    """Keep the sum: one length below 0, another larger."""
    tensor = tensor.clone()
    tensor[0] -= 5
    tensor[-1] += 5
    return tensor


def _as_offsets(begin: int) -> Callable[[Parts], Parts]:
    def changed(parts: Parts) -> Parts:
        if "lengths" not in parts:
            return parts
        offsets = torch.cat([parts["lengths"].new_zeros(1), parts["lengths"].cumsum(0)]) + begin
        return {name: entry for name, entry in parts.items() if name != "lengths"} | {
            "offsets": offsets
        }

    return changed


BAD: dict[str, Callable[[Parts], Parts]] = {
    "ids missing": _change("ids", lambda ids: ids.flatten()[:-1]),
    "ids too many": _change("ids", lambda ids: torch.cat([ids.flatten(), ids.flatten()[:2]])),
    "float ids": _change("ids", lambda ids: ids + 0.5),
    "bool ids": _change("ids", lambda ids: ids > 3),
    "int32 ids": _change("ids", lambda ids: ids.int()),
    "ids of two dimensions": _change("ids", lambda ids: ids.view(-1, 1)),
    "id too large": _change("ids", _set(0, ROWS)),
    "id below 0": _change("ids", _set(-1, -1)),
    "length too large": _change("lengths", _set(0, 90)),
    "length below 0": _change("lengths", _set(0, -2)),
    "lengths of the right sum": _change("lengths", _move),
    "lengths that overflow": _change(
        "lengths", lambda entry: torch.cat([entry[:-2], entry.new_tensor([2**63 - 1, 2**63 - 1])])
    ),
    "one length less": _change("lengths", lambda entry: entry[:-1]),
    "no lengths": _change("lengths", lambda entry: entry[:0]),
    "int32 lengths": _change("lengths", lambda entry: entry.int()),
    "lengths of two dimensions": _change("lengths", lambda entry: entry.view(len(KEYS), -1)),
    "weights too few": _change("weights", lambda entry: entry[:-1]),
    "one weight": _change("weights", lambda entry: entry[:1]),
    "double weights": _change("weights", lambda entry: entry.double()),
    "half weights": _change("weights", lambda entry: entry.half()),
    "no weights": lambda parts: {name: entry for name, entry in parts.items() if name != "weights"},
    "weights": lambda parts: (
        parts if "keys" not in parts else parts | {"weights": torch.ones(len(parts["values"]))}
    ),
    "per_sample_weights": lambda p: (
        p if "offsets" not in p else p | {"per_sample_weights": torch.ones(len(p["input"]))}
    ),
    "short per_sample_weights": lambda p: (
        p if "offsets" not in p else p | {"per_sample_weights": torch.ones(1)}
    ),
    "a key less": _change("keys", lambda keys: keys[:1]),
    "a key more": _change("keys", lambda keys: [*keys, "c"]),
    "a key twice": _change("keys", lambda keys: ["a", "a"]),
    "another key": _change("keys", lambda keys: ["a", "c"]),
    "other order": _change("keys", lambda keys: keys[::-1]),
    "offsets": _as_offsets(0),
    "offsets from 2": _as_offsets(2),
    "offset too large": _change("offsets", _set(2, 99)),
    "last offset too large": _change("offsets", _set(-1, 99)),
    "offsets that fall": _change("offsets", lambda entry: entry.flip(0)),
    "no offsets": lambda parts: {name: entry for name, entry in parts.items() if name != "offsets"},
    "empty offsets": _change("offsets", lambda entry: entry[:0]),
    "float offsets": _change("offsets", lambda entry: entry.float()),
    "int32 offsets": _change("offsets", lambda entry: entry.int()),
}
"""What may be done to a batch; not all of it is wrong for every kind of lookup."""


def draw_cases(seed: int, number: int, num_ranks: int) -> list[tuple[str, str, list[Parts]]]:
    """Return the kind, what was done to it, and the arguments of each rank, of `number` calls and
    more.

    Every change is made to every kind of lookup, on one rank or on all; then random pairs of
    changes.
    """
    draw = torch.Generator().manual_seed(seed)
    kinds = (*COLLECTIONS, *ROW_KINDS, *BAG_KINDS)

    def pick(among: Any) -> Any:
        return list(among)[int(torch.randint(len(among), (1,), generator=draw))]

    singles = [(kind, [name]) for kind in kinds for name in BAD]
    pairs = [(pick(kinds), [pick(BAD), pick(BAD)]) for _ in range(number)]
    cases = []
    for kind, names in singles + pairs:
        rank_results = [good(kind, draw) for _ in range(num_ranks)]
        bad_ranks = pick([[0], [num_ranks - 1], list(range(num_ranks))])
        try:
            for rank in bad_ranks:
                for name in names:
                    rank_results[rank] = BAD[name](rank_results[rank])
                if "keys" in rank_results[rank]:
                    KeyedJaggedTensor(**rank_results[rank])
        except Exception:  # a batch that cannot even be made
            continue
        cases.append((kind, f"{kind}: {' and '.join(names)} on {bad_ranks}", rank_results))
    return cases


def with_weights_of_the_tables_type(parts: Parts) -> Parts:
    """Return a copy of the arguments as one process takes them; FBGEMM takes weights of any
    type."""
    parts = copy.deepcopy(parts)
    return parts | ({"weights": parts["weights"].float()} if "weights" in parts else {})
