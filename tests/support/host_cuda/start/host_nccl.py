"""A process group called nccl for the device in host memory: gloo moves the bytes; what NCCL
refuses is refused."""

import sys
from datetime import timedelta
from typing import Any

_groups: list[Any] = []
"""torch returns the Python object of a backend as long as somebody has it."""

counts = {"communicators": 0, "splits": 0}


def install() -> None:
    """Give torch.distributed the class that a CUDA build has."""
    from torch._C import _distributed_c10d as c10d

    c10d_module: Any = sys.modules["torch.distributed.distributed_c10d"]

    class ProcessGroupNCCL(c10d.ProcessGroupGloo):
        """Of ranks with a device each; tensors of the CPU have no backend beside it."""

        class Options:
            """As NCCL's, as far as torch and we set them."""

            def __init__(self, is_high_priority_stream: bool = False) -> None:
                self.is_high_priority_stream = is_high_priority_stream
                self._timeout = timedelta(minutes=10)
                self.backend = "nccl"
                self.global_ranks_in_group: list[int] = []
                self.group_name = ""
                self.split_from: Any = None
                self.split_color = 0

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(store, rank, size, options._timeout)
            self._options = options
            counts["splits" if options.split_from is not None else "communicators"] += 1
            _groups.append(self)

        supports_splitting = True
        uid = 0

        @property
        def options(self) -> Any:
            return self._options

        def perform_nocolor_split(self, device: Any) -> None:
            counts["splits"] += 1

        def eager_connect_single_device(self, device: Any) -> None:
            pass

        def comm_split_count(self) -> int:
            return counts["splits"]

        def _is_initialized(self) -> bool:
            return True

        def abort(self) -> None:
            pass

        def _group_start(self) -> None:
            pass

        def _group_end(self) -> None:
            pass

        def _set_default_timeout(self, timeout: timedelta) -> None:
            super()._set_default_timeout(timeout)

    def split_group(
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, **_: Any
    ) -> Any:
        """As torch's, which asks NCCL once for all groups."""
        rank = c10d_module.get_rank()
        (mine,) = (ranks for ranks in split_ranks if rank in ranks)
        # Its constructor counts the split.
        return c10d_module.new_group(mine, timeout, use_local_synchronization=True)

    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d_module.split_group = split_group
    c10d_module.ProcessGroupNCCL = ProcessGroupNCCL
    c10d_module._NCCL_AVAILABLE = True
    c10d_module.default_pg_nccl_timeout = timedelta(minutes=10)
