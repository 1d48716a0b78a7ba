"""Options for layers whose weights are split over the ranks that compute one batch together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_distrec.errors import ConfigError

STYLES = ("colwise", "rowwise", "colwise_gather_output")


def make_style(style: str) -> ParallelStyle:
    """Return torch's style of a name.

    Outputs of "colwise" stay DTensors, so that what is computed with them until the next layer has the meaning, shapes
    and values of one process. "rowwise" takes those, and replicated tensors as well.
    """
    if style == "colwise":
        return ColwiseParallel(use_local_output=False)
    if style == "rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    return ColwiseParallel(output_layouts=Replicate())


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Which layers are split over the ranks of a tensor-parallel group, and how."""

    size: int = 0
    """Ranks of a group: consecutive ones, which get the same batches. A divisor of the number of ranks."""

    plan: Mapping[str, str] | Literal["auto"] = "auto"
    """Path of an nn.Linear or nn.Embedding, `*` for any name in it -> "colwise": its output features are split,
    "rowwise": its input features are, "colwise_gather_output": as colwise, its output is gathered. "auto": the pairs of
    nn.Linear in an nn.Sequential with functions of single elements in between, and those of torch's transformer
    layers."""

    compare_first_batch: bool = True
    """Whether each function of split tensors is compared with the same of full ones, values and gradients, on the first
    batch of training and of evaluation. Takes the time and the memory of one function in full."""

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 2:
            raise ConfigError(
                f"tensor_parallel: size={self.size!r} must be a number of ranks, at least 2. Without tensor_parallel, "
                "every rank computes batches of its own."
            )
        if self.plan == "auto":
            return
        if not isinstance(self.plan, Mapping) or not self.plan:
            raise ConfigError(
                f"tensor_parallel: plan={self.plan!r} must be 'auto', or map the paths of layers to "
                f"{', '.join(STYLES)}."
            )
        for path, style in self.plan.items():
            if style not in STYLES:
                raise ConfigError(
                    f"tensor_parallel: plan has {style!r} for '{path}', which is not known. Use one of "
                    f"{', '.join(STYLES)}."
                )
