"""Writes changed rows as a Parquet file, for serving systems that read tables: columns `table`, `id` and `vector`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.chunks import row_ranges
from lightning_distrec.errors import CheckpointError

IDS, ROWS = ".ids", ".rows"
"""Ends of the names that `changes_since` gives to a table's changed rows."""


def require_pyarrow(target: Path) -> None:
    """Raise CheckpointError: the package is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise CheckpointError(f"{target}: writing Parquet needs the package pyarrow: pip install pyarrow.") from None


def rows_alone(changes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the changed rows of tables, without other layers, which the format has no place for."""
    tables = [name.removesuffix(IDS) for name in changes if name.endswith(IDS) and name[: -len(IDS)] + ROWS in changes]
    return {table + end: changes[table + end] for table in tables for end in (IDS, ROWS)}


def write_parquet(path: Path, rows: Mapping[str, Tensor], on_progress: Callable[[int], None]) -> None:
    """Write rows as `rows_alone` returns them. Vectors are float32 (float64 where they were): 16-bit ones fit into it.

    on_progress: called with the number of bytes written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    wide = any(tensor.dtype == torch.float64 for tensor in rows.values())
    number, dtype = (pa.float64(), torch.float64) if wide else (pa.float32(), torch.float32)
    kinds = {"table": pa.dictionary(pa.int32(), pa.string()), "id": pa.int64(), "vector": pa.list_(number)}
    schema = pa.schema(list(kinds.items()))
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in [name.removesuffix(IDS) for name in rows if name.endswith(IDS)]:
            ids, vectors = rows[table + IDS], rows[table + ROWS]
            dim = vectors.shape[1]
            for first, count in row_ranges(vectors.shape, vectors.element_size()):
                block = vectors[first : first + count]
                ends = torch.arange(0, (count + 1) * dim, dim, dtype=torch.int32).numpy()
                names = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([table]))
                numbers = pa.array(block.to(dtype).flatten().numpy())
                lists = pa.ListArray.from_arrays(pa.array(ends), numbers)
                writer.write_batch(
                    pa.record_batch([names, pa.array(ids[first : first + count].numpy()), lists], schema=schema)
                )
                on_progress(block.nbytes + count * ids.element_size())
