"""Private names of lightning, torch, torchrec and fbgemm: one file per upstream package, one
function per name.

Each function has a contract test (tests/contracts/test_compat*.py), which fails when an upstream
release changes what is used here. Imports are inside of the functions where a file must load
without torchrec. Every monkeypatch says what upstream does, why that is wrong for us, and when the
patch can go.
"""

import logging
import warnings


def hide_upstream_deprecations() -> None:
    """Hide the deprecation warnings that torchrec and lightning cause in torch; users cannot act on
    them."""
    # Can go when torchrec no longer uses ShardedTensor, reduce_scatter_tensor,
    # all_gather_into_tensor and is_fx_tracing, and lightning no longer calls isinstance(...,
    # LeafSpec).
    for message in (
        "Please use DTensor instead and we are deprecating ShardedTensor",
        "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Sparse invariant checks are implicitly disabled",
        "FSDP2-wrapped module .* returned a view tensor",  # shard_blocks.py copies these views
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("torch.fx._symbolic_trace").addFilter(_not_about_fx_tracing)


def _not_about_fx_tracing(record: logging.LogRecord) -> bool:
    return "is_fx_tracing" not in str(record.msg)
