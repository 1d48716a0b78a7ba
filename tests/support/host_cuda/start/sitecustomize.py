"""On PYTHONPATH, with HOST_CUDA_LIBRARY set: this process, and those that it starts, have the
device in host memory."""

import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any

FOLLOWED = (
    "torch",
    "torch.cuda",
    "torch.distributed.distributed_c10d",
    "torch.storage",
    "fbgemm_gpu.split_table_batched_embeddings_ops_training",
)


class _WithDevice(importlib.abc.MetaPathFinder):
    """Loads the device before torch, which asks for its CUDA hooks once, and gives torch what a CPU
    build lacks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec, whose execution is preceded and followed by ours."""
        if name not in FOLLOWED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_with_device(module: Any) -> None:
            import host_cuda_runtime

            host_cuda_runtime.BEFORE.get(name, _nothing)()
            execute(module)
            host_cuda_runtime.AFTER.get(name, _nothing)()

        spec.loader.exec_module = execute_with_device  # type: ignore[method-assign]
        return spec


def _nothing() -> None:
    pass


if "HOST_CUDA_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _WithDevice())
