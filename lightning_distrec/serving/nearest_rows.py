"""The rows of an item table that score highest for queries: of all rows, block by block from the
file that they are mapped from, or by an index of faiss. Served folders get this file."""

from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MAX_BYTES = 2**28
"""Bound of the scores of a block, as of `lightning_distrec.retrieval.top_k`."""
INDEX = "items.faiss"
INDEXED_ROWS = 100_000
"""Rows that an index gets at a time, and is trained on at most."""


def dequantized(packed: Tensor, dim: int, bits: int) -> Tensor:
    """Return rows in float32, (num_rows, dim), by operators of torch alone. packed: as
    `lightning_distrec.serving.program.quantized` returns them."""
    width = dim if bits == 8 else dim // 2
    numbers = packed[:, :width]
    scale_bytes = packed[:, width:]
    # A view as floats needs bytes that follow each other; a slice of columns has gaps.
    scales = scale_bytes.contiguous().view(torch.float32 if bits == 8 else torch.float16).float()
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=2).reshape(-1, dim)
    return numbers.float() * scales[:, :1] + scales[:, 1:]


class Items:
    """An item table, which answers queries with its best rows.

    about: `top_k` of serving.json. rows: the table, mapped into memory. encoder: of raw values,
    where rows from 1 on stand for values of a vocabulary.
    """

    def __init__(self, folder: Path, about: dict[str, Any], rows: Tensor, encoder: Any) -> None:
        self.about = about
        self.rows = rows
        self.index: Any = None
        self._encoder = encoder
        self._values: list[str] = []
        self._first_row = 0
        if about["vocabulary"] is not None:
            self._values = encoder.plain["vocabularies"][about["vocabulary"]]
            self._first_row = 1
            self.rows = rows[: 1 + len(self._values)]
        if "index" in about:
            self.index = imported_faiss().read_index(str(folder / INDEX))

    def answer(
        self, queries: Tensor, k: int | None, exclude: list[list[Any]] | None
    ) -> dict[str, Tensor]:
        """Return "items", numbers of rows, and "scores", both (queries, k), the best first.

        Where fewer than k rows count, the rest are -1 and -inf. Raises ValueError: k is no number
        of rows, or something to exclude is no item.
        """
        k = self.about["k"] if k is None else k
        if type(k) is not int or not 1 <= k <= self.about["num_items"]:
            raise ValueError(f"k must be 1 to {self.about['num_items']}, and is {k!r}")
        search = self.best_rows if self.index is None else self._indexed_rows
        scores, rows = search(queries, k, self.excluded_rows(exclude, len(queries)))
        return {"items": rows, "scores": scores}

    def plain(self, answer: dict[str, Tensor]) -> dict[str, list[list[Any]]]:
        """Return an answer as lists, with values for rows, without what is no row."""
        lists: dict[str, list[list[Any]]] = {"items": [], "scores": []}
        for rows, scores in zip(answer["items"], answer["scores"], strict=True):
            items = rows[rows >= 0].tolist()
            if self._values:
                items = [self._values[row - 1] for row in items]
            lists["items"].append(items)
            lists["scores"].append(scores[: len(items)].tolist())
        return lists

    def excluded_rows(self, exclude: list[list[Any]] | None, num_queries: int) -> Tensor:
        """Return the rows that do not count, (queries, most of a query), filled up with -1."""
        lists = [[]] * num_queries if exclude is None else exclude
        if not isinstance(lists, list) or [*map(type, lists)] != [list] * num_queries:
            raise ValueError(f"exclude must be lists of items, for each of {num_queries} queries")
        # One more, because pad_sequence needs one.
        rows = [self._row_numbers(items) for items in [*lists, []]]
        return pad_sequence(rows, batch_first=True, padding_value=-1)[:num_queries]

    def _row_numbers(self, items: list[Any]) -> Tensor:
        """Return the rows of items, and the one that no item has. Raises ValueError: there is no
        such item."""
        rows = items
        if self._first_row:
            rows = self._encoder.rows_of_values(self.about["vocabulary"], items)
        for item, row in zip(items, rows, strict=True):
            if type(row) is not int or not self._first_row <= row < len(self.rows):
                raise ValueError(f"exclude: there is no item {item!r}")
        return torch.tensor([*range(self._first_row), *rows], dtype=torch.long)

    def read(self, block: slice) -> Tensor:
        """Return some rows in their type, quantized ones in float32."""
        rows = self.rows[block]
        bits = self.about["bits"]
        return rows if bits is None else dequantized(rows, self.about["dim"], bits)

    def best_rows(self, queries: Tensor, k: int, exclude: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and rows, (queries, k), exact over all rows: the same bits as those of
        `lightning_distrec.retrieval.top_k`. NaN is a lowest score."""
        dtype = torch.promote_types(queries.dtype, self.read(slice(0)).dtype)
        queries = queries.to(torch.promote_types(dtype, torch.float32))
        scores = queries.new_full((len(queries), k), -inf)
        rows = torch.full_like(scores, -1, dtype=torch.long)
        # Two tensors of the size of the scores exist at a time.
        block_rows = max(1, MAX_BYTES // (2 * queries.itemsize * max(queries.shape)))
        for first in range(0, len(self.rows), block_rows):
            block = self.read(slice(first, first + block_rows)).to(queries.dtype)
            block_scores = queries @ block.T
            block_scores.nan_to_num_(nan=-inf, posinf=inf, neginf=-inf)
            _leave_out(block_scores, exclude - first)
            best, places = block_scores.topk(min(k, len(block)))
            numbers = torch.where(best > -inf, places + first, -1)
            scores, order = torch.cat([scores, best], 1).topk(k)
            rows = torch.cat([rows, numbers], 1).gather(1, order)
        return scores, rows

    def _indexed_rows(self, queries: Tensor, k: int, exclude: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and rows as the index knows them."""
        num_candidates = min(k + exclude.size(1), len(self.rows))
        arrays = self.index.search(queries.float().contiguous().numpy(), num_candidates)
        scores, rows = map(torch.from_numpy, arrays)
        for query, excluded in enumerate(exclude):
            is_left_out = torch.isin(rows[query], excluded) | (rows[query] < 0)
            scores[query, is_left_out] = -inf
        best, places = scores.topk(k)
        return best, torch.where(best > -inf, rows.gather(1, places), -1)

    def add_index(self, folder: Path, factory: str, queries: Tensor) -> float:
        """Write an index of all rows; return its recall of these queries' exact best rows.

        factory: of faiss.index_factory, then parameters of a search: "IVF256,Flat nprobe=16".
        Raises ValueError: faiss is not installed, or cannot make such an index.
        """
        faiss = imported_faiss()
        kind, _, parameters = factory.partition(" ")
        num_rows = len(self.rows)
        try:
            index = faiss.index_factory(self.about["dim"], kind, faiss.METRIC_INNER_PRODUCT)
            sample = slice(0, num_rows, -(-num_rows // INDEXED_ROWS))
            index.train(self.read(sample).float().numpy())
            for first in range(0, num_rows, INDEXED_ROWS):
                index.add(self.read(slice(first, first + INDEXED_ROWS)).float().numpy())
            faiss.ParameterSpace().set_index_parameters(index, parameters)
        except RuntimeError as error:
            raise ValueError(f"index {factory!r}: {error}") from error
        self.index = index
        search = (queries, self.about["k"], self.excluded_rows(None, len(queries)))
        _, exact = self.best_rows(*search)
        _, indexed = self._indexed_rows(*search)
        recall = float((exact[:, :, None] == indexed[:, None]).any(2).float().mean())
        self.about["index"] = {"factory": factory, "recall": recall, "queries": len(queries)}
        faiss.write_index(index, str(folder / INDEX))
        return recall


def _leave_out(scores: Tensor, columns: Tensor) -> None:
    """Give these columns of a query's scores the lowest one. columns: (queries, any), those outside
    of the scores do not count."""
    is_inside = (columns >= 0) & (columns < scores.size(1))
    places = is_inside.nonzero(as_tuple=True)
    scores[places[0], columns[places]] = -inf


def imported_faiss() -> Any:
    """Return faiss. Raises ValueError: it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise ValueError(
            "an index needs the package faiss, which is not installed: run pip install faiss-cpu"
        ) from error
    return faiss
