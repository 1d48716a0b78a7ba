"""The caches of tables whose rows are on the host and partly on the GPU (kernel fused_uvm_caching).

What is trained is in the cache, and the weight that torchrec shows is the host's memory: it is stale until the cache is
written back, and what is written to it is lost while the cache holds the row. Where no table has a cache, nothing is
done. Not run on a GPU yet.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

_kernels: "WeakSet[Any]" = WeakSet()


def watch_caches(kernels: Iterable[Any]) -> None:
    """Note those FBGEMM kernels that have a cache."""
    for kernel in kernels:
        cache = getattr(kernel, "lxu_cache_weights", None)
        if cache is not None and cache.numel():
            _kernels.add(kernel)


def write_back() -> None:
    """Bring the host's rows of all tables up to date, before they are read."""
    for kernel in _kernels:
        kernel.flush()


@contextmanager
def rewriting() -> Iterator[None]:
    """Let the context write to the host's rows: it finds them up to date, and afterwards no cache holds other ones.

    Not between a forward and its backward, which writes to the places in the cache that the forward has found.
    """
    write_back()
    yield
    for kernel in _kernels:
        # flush() does not empty the cache.
        kernel.reset_cache_states()
