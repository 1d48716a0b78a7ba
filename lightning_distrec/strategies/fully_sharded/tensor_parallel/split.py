"""Splits layers over the ranks of a tensor-parallel group, by torch's parallelize_module."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from lightning_distrec.errors import UnsupportedError
from lightning_distrec.strategies.fully_sharded.tensor_parallel.mixed_operands import confine, share_input
from lightning_distrec.strategies.fully_sharded.tensor_parallel.options import TensorParallelOptions, make_style
from lightning_distrec.strategies.fully_sharded.tensor_parallel.plan import called_parts, can_be_called


@dataclass(frozen=True)
class SplitLayers:
    """The layers that are split over a mesh; without a mesh there are none."""

    mesh: DeviceMesh | None = None
    styles: Mapping[nn.Module, str] = field(default_factory=dict)
    options: TensorParallelOptions | None = None

    def split(self, block: nn.Module) -> None:
        """Let each rank keep its part of the layers in a block. All ranks have their weights in full, and alike."""
        for layer in block.modules():
            style = self.styles.get(layer)
            if style is not None and not any(isinstance(p, DTensor) for p in layer.parameters(False)):
                layer.register_forward_pre_hook(share_input)
                # Without a source rank nothing is sent: each rank takes its own part.
                parallelize_module(layer, self.mesh, make_style(style), src_data_rank=None)

    def confine(self, root: nn.Module) -> None:
        """Let nothing but plain tensors leave the submodules that the root's own code calls."""
        if self.mesh is None or self.options is None:
            return
        for part in called_parts(root).values():
            for module in part.modules():
                has_split = module not in self.styles and any(layer in self.styles for layer in module.modules())
                if has_split and can_be_called(module):
                    confine(module, self.mesh, self.options.compare_first_batch, is_outermost=module is part)

    def refuse_deepcopy(self, module: nn.Module) -> None:
        """Let copy.deepcopy raise UnsupportedError."""

        def deepcopy(memo: dict[int, Any]) -> nn.Module:
            raise UnsupportedError(
                "tensor_parallel: a module with layers that are split cannot be copied. Load "
                "trainer.strategy.full_state_dict() into another module."
            )

        module.__deepcopy__ = deepcopy  # type: ignore[assignment]
