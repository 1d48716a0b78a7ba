"""The table of a module whose best rows a served folder answers with, and the module's own
answer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_distrec import retrieval
from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.serving.answer import ITEM_OPTIONS
from lightning_distrec.serving.program import lookups_of


@dataclass(frozen=True, kw_only=True)
class TopK:
    """That the folder answers with the best rows of a table, as `retrieval.top_k` finds them."""

    queries: str
    """Method of the module that returns queries, (examples, dim), of a batch."""
    items: str
    """The table's path in the module, or the end of it: "items", "tables.embeddings.item"."""
    vocabulary: str | None = None
    """Table of the columns with a vocabulary, whose values the rows stand for; None: answers are
    numbers of rows."""
    k: int = 10
    """How many rows, unless a request says so."""
    index: str | None = None
    """Factory string of an index of faiss, such as "HNSW32" or "IVF256,Flat nprobe=16"; None: all
    rows are scored."""


def described_items(
    top_k: TopK, module: LightningModule, names: Iterable[str], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what serving.json says of the item table, before rows are quantized.

    names: what a request has, inputs or columns. columns: the mapping of the data's columns; empty:
    there is none. Raises ConfigError: the module or its data lacks what top_k names, or a name is
    that of an option.
    """
    reserved = sorted({*names} & {*ITEM_OPTIONS, "rows"})
    if reserved:
        raise ConfigError(f"top_k: an input or a column is called '{reserved[0]}'. Rename it.")
    if not callable(getattr(module, top_k.queries, None)):
        raise ConfigError(
            f"top_k: {type(module).__name__} has no method '{top_k.queries}' that returns queries."
        )
    lookups = dict(lookups_of(module))
    paths = [path for path in lookups if f".{path}".endswith(f".{top_k.items}")]
    if len(paths) != 1:
        raise ConfigError(
            f"top_k: '{top_k.items}' names {len(paths)} tables of {', '.join(lookups)}. Name one."
        )
    table = lookups[paths[0]]
    if hasattr(table, "ids_made_for"):
        raise ConfigError(
            f"top_k: ids of '{paths[0]}' are mapped to rows (dynamic_ids): a row stands for no "
            "item."
        )
    num_items = table.num_embeddings
    if top_k.vocabulary is not None:
        vocabularies = columns.get("vocabularies", {})
        if top_k.vocabulary not in vocabularies:
            raise ConfigError(
                f"top_k: the data's columns have no vocabulary {top_k.vocabulary!r}"
                f"{did_you_mean(top_k.vocabulary, vocabularies)}"
            )
        num_items = len(vocabularies[top_k.vocabulary])
    if not 1 <= top_k.k <= num_items < table.num_embeddings + (top_k.vocabulary is None):
        raise ConfigError(
            f"top_k: k={top_k.k} of {num_items} items, in a table of {table.num_embeddings} rows: "
            "they do not fit."
        )
    return {
        "queries": top_k.queries,
        "table": f"{paths[0]}.weight",
        "dim": table.embedding_dim,
        "bits": None,
        "vocabulary": top_k.vocabulary,
        "num_items": num_items,
        "k": top_k.k,
    }


def best_items(queries: Any, rows: Tensor, about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the trained module's answer. about: of `described_items`. Raises ConfigError: these
    are no queries of the table."""
    if not isinstance(queries, Tensor):
        raise ConfigError(
            f"top_k: the method returned a {type(queries).__name__}, and queries are a tensor, "
            "(examples, dim)."
        )
    exclude = None
    if about["vocabulary"] is not None:
        # Row 0 is of no value, and so are those behind the last one.
        rows = rows[: 1 + about["num_items"]]
        exclude = torch.zeros(len(queries), 1, dtype=torch.long)
    table = nn.Embedding.from_pretrained(rows)
    scores, numbers = retrieval.top_k(
        queries,
        table,
        about["k"],
        exclude=exclude,
    )
    return {"items": numbers, "scores": scores}
