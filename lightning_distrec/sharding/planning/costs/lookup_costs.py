"""What torchrec's estimates of lookups leave out, or have of GPUs alone."""

MIN_GPU_DIM = 32
"""torchrec counts narrower rows as if they had this number of columns ..."""
GPU_PENALTIES = ((128, 1.0), (64, 1.15), (0, 1.75))
"""... and each row by this factor, from this number of columns on: threads of a GPU's warp have nothing to do."""


def narrow_rows_on_cpu(sharding_type: str, columns: int) -> float:
    """Return by what a CPU's lookups of rows with `columns` columns differ from torchrec's estimate.

    Where shards are blocks of rows, torchrec does not count so.

    Measured with FBGEMM 1.8, ns an id at 60, 40 and 20 ids a bag: 5 to 6 of 16 columns, 20 of 32, 27 of 64, 67 of 128,
    about what memory copies in their bytes' time.
    """
    if "row" in sharding_type or sharding_type == "data_parallel":
        return 1.0
    penalty = next(factor for lower, factor in GPU_PENALTIES if columns >= lower)
    return min(columns, MIN_GPU_DIM) / MIN_GPU_DIM / penalty
