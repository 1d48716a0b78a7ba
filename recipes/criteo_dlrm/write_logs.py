"""Writes generated examples as files in Criteo's format, for the recipe itself or to try another
program on them.

python -m recipes.criteo_dlrm.write_logs day_0.tsv --examples 1000000
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from jsonargparse import auto_cli
from pyarrow import compute, csv, parquet

from lightning_distrec.errors import ConfigError
from recipes.criteo_dlrm.columns import CATEGORIES, COLUMNS, INTEGERS, LABEL, MLPERF_BAG_SIZES
from recipes.criteo_dlrm.generator import BLOCK, TASKS, Block, Generator

PURCHASE = "purchase"
TRUTH = tuple(f"truth_{task}" for task in TASKS)
"""Of Parquet files alone: whether a purchase followed, and the log-odds that labels were drawn
by."""

# Steps between the tokens that the multi-hot variant makes of one: an odd number, spread over 32
# bits.
BAG_STEP = 0x9E3779B1
HEXADECIMAL = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
DIGITS = 8


def write_logs(
    out: str,
    examples: int = 1_000_000,
    seed: int = 1,
    max_ids: int = 1_000_000,
    multi_hot: bool = False,
) -> None:
    """Write a new file.

    Args:
        out: a name that ends in .tsv or .parquet.
        examples: how many.
        seed: of the generator.
        max_ids: no category has more different ids.
        multi_hot: write lists of tokens, as many as in MLPerf's DLRM-DCNv2; .parquet alone.
    """
    if Path(out).suffix not in (".tsv", ".parquet") or (multi_hot and not out.endswith(".parquet")):
        raise ConfigError(
            f"{out}: the name must end in .tsv or .parquet, with multi_hot in .parquet."
        )
    generator = Generator(seed, max_ids)
    sizes = [min(BLOCK, examples - start) for start in range(0, examples, BLOCK)]
    tables = (_table(generator.block(number, size), multi_hot) for number, size in enumerate(sizes))
    first = next(tables)
    with open(out, "xb") as file:
        if out.endswith(".parquet"):
            with parquet.ParquetWriter(file, first.schema) as writer:
                for table in (first, *tables):
                    writer.write_table(table)
            return
        plain = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        with csv.CSVWriter(file, first.select(COLUMNS).schema, write_options=plain) as writer:
            for table in (first, *tables):
                writer.write_table(table.select(COLUMNS))


def _table(block: Block, multi_hot: bool) -> pa.Table:
    columns = {LABEL: pa.array(block.labels[:, 0].astype(np.int64))}
    for position, name in enumerate(INTEGERS):
        values = block.integers[:, position]
        columns[name] = pa.array(values, mask=values < 0)
    for position, name in enumerate(CATEGORIES):
        tokens = block.tokens[:, position]
        columns[name] = _bags(tokens, MLPERF_BAG_SIZES[position]) if multi_hot else _texts(tokens)
    columns[PURCHASE] = pa.array(block.labels[:, 1].astype(np.int64))
    return pa.table(columns | {name: block.log_odds[:, task] for task, name in enumerate(TRUTH)})


def _texts(tokens: np.ndarray) -> pa.Array:
    """Return each token's 8 hexadecimal digits; 0 is missing."""
    digits = HEXADECIMAL[
        (tokens[:, None] >> np.arange(4 * (DIGITS - 1), -1, -4, dtype=np.uint32)) & 15
    ]
    ends = DIGITS * np.arange(len(tokens) + 1, dtype=np.int32)
    texts = pa.Array.from_buffers(
        pa.string(), len(tokens), [None, pa.py_buffer(ends), pa.py_buffer(digits)]
    )
    return compute.if_else(pa.array(tokens > 0), texts, pa.scalar(None, pa.string()))


def _bags(tokens: np.ndarray, size: int) -> pa.Array:
    """Return lists of the token and those derived from it; that of a missing one is empty."""
    steps = (np.arange(size, dtype=np.uint64) * BAG_STEP).astype(np.uint32)
    bags = (tokens[:, None] + steps)[tokens > 0]
    ends = np.concatenate([[0], np.cumsum((tokens > 0) * size)]).astype(np.int32)
    return pa.ListArray.from_arrays(ends, _texts(np.maximum(bags.ravel(), 1)))


if __name__ == "__main__":
    auto_cli(write_logs, as_positional=True)
