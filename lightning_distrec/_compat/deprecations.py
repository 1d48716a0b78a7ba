"""Warnings that upstream packages raise about one another, which users cannot act on."""

import logging
import warnings


def hide_upstream_deprecations() -> None:
    """Hide what torchrec, torch and lightning say about their own use of each other; users cannot act on it.

    Can go when torchrec has left ShardedTensor, reduce_scatter_tensor, all_gather_into_tensor and is_fx_tracing, and
    lightning isinstance(..., LeafSpec).
    """
    for message in (
        "Please use DTensor instead and we are deprecating ShardedTensor",
        "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Sparse invariant checks are implicitly disabled",
        "FSDP2-wrapped module .* returned a view tensor",  # strategies/fully_sharded/shard_blocks.py copies them
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("torch.fx._symbolic_trace").addFilter(_not_about_fx_tracing)


def _not_about_fx_tracing(record: logging.LogRecord) -> bool:
    return "is_fx_tracing" not in str(record.msg)
