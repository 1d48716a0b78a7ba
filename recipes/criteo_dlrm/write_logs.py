"""Writes generated examples as files in Criteo's format, to try the readers or another program on them.

python -m recipes.criteo_dlrm.write_logs day_0.tsv --examples 1000000
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from jsonargparse import auto_cli
from pyarrow import csv, parquet

from lightning_distrec.errors import ConfigError
from recipes.criteo_dlrm.columns import CATEGORIES, INTEGERS
from recipes.criteo_dlrm.generator import BLOCK, Block, Generator
from recipes.criteo_dlrm.read_logs import COLUMNS, LABEL


def write_logs(out: str, examples: int = 1_000_000, seed: int = 1, max_ids: int = 1_000_000) -> None:
    """Write a new file.

    Args:
        out: a name that ends in .tsv or .parquet.
        examples: how many.
        seed: of the generator.
        max_ids: no category has more different ids.
    """
    generator = Generator(seed, max_ids)
    sizes = [min(BLOCK, examples - start) for start in range(0, examples, BLOCK)]
    tables = (_table(generator.block(number, size)) for number, size in enumerate(sizes))
    schema = pa.schema([(name, pa.string() if name in CATEGORIES else pa.int64()) for name in COLUMNS])
    if Path(out).suffix not in (".tsv", ".parquet"):
        raise ConfigError(f"{out}: the name must end in .tsv or .parquet.")
    with open(out, "xb") as file:
        if out.endswith(".parquet"):
            with parquet.ParquetWriter(file, schema) as writer:
                for table in tables:
                    writer.write_table(table.cast(schema))
            return
        plain = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        with csv.CSVWriter(file, schema, write_options=plain) as writer:
            for table in tables:
                writer.write_table(table.cast(schema))


def _table(block: Block) -> pa.Table:
    columns = {LABEL: pa.array(block.labels[:, 0].astype(np.int64))}
    for position, name in enumerate(INTEGERS):
        values = block.integers[:, position]
        columns[name] = pa.array(values, mask=values < 0)
    for position, name in enumerate(CATEGORIES):
        tokens = block.tokens[:, position]
        columns[name] = pa.array([f"{token:08x}" if token else None for token in tokens.tolist()])
    return pa.table(columns)


if __name__ == "__main__":
    auto_cli(write_logs, as_positional=True)
