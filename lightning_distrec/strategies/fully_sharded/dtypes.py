"""In which types FSDP2 gathers parameters and reduces gradients: those of the precision, or as the options say."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.strategies.fully_sharded.fsdp_options import DTYPES, FSDPOptions

COMPUTE_DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
"""Precision -> the type in which parameters are gathered; None: their own."""


@dataclass(frozen=True)
class Dtypes:
    """The types of one run."""

    param: torch.dtype | None
    """Type in which parameters are gathered; None: their own."""
    reduce: torch.dtype | None
    """Type in which gradients are reduced; None: that of the gathered parameters."""
    buffer: torch.dtype | None
    """Type of the buffers of blocks; None: their own."""
    casts: bool
    """Whether blocks cast their inputs to `param` and their outputs back. Without autocast nobody else does, so what is
    in no block computes in its own type."""

    def of_root(self) -> MixedPrecisionPolicy:
        """Return the policy of what is in no block."""
        return MixedPrecisionPolicy(None if self.casts else self.param, self.reduce, cast_forward_inputs=False)

    def of_block(self, is_nested: bool) -> MixedPrecisionPolicy:
        """Return the policy of a block. is_nested: whether another block contains it, and takes its outputs."""
        back = torch.float32 if self.casts and not is_nested else None
        return MixedPrecisionPolicy(self.param, self.reduce, output_dtype=back, cast_forward_inputs=self.casts)

    def convert_buffers(self, block: nn.Module) -> None:
        """Convert the floating-point buffers of a block, for good: FSDP2 itself leaves them as they are."""
        for module in block.modules() if self.buffer is not None else ():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(self.buffer))


def choose_dtypes(options: FSDPOptions, precision: str) -> Dtypes:
    """Return the types for a precision of the Trainer.

    Raises UnsupportedError: the precision is not supported; ConfigError: an option contradicts it.
    """
    if precision not in COMPUTE_DTYPES:
        raise UnsupportedError(
            f"Trainer(precision={precision!r}): fsdp_tuned supports {', '.join(map(repr, COMPUTE_DTYPES))}."
        )
    of_precision, is_mixed = COMPUTE_DTYPES[precision], precision.endswith("-mixed")
    param = of_precision
    if options.param_dtype is not None:
        param = DTYPES[options.param_dtype]
        _refuse_param_dtype(options.param_dtype, param, of_precision, precision)
        param = None if param == torch.float32 else param
    reduce = torch.float32 if param is not None else None
    return Dtypes(
        param=param,
        reduce=DTYPES[options.reduce_dtype] if options.reduce_dtype is not None else reduce,
        buffer=DTYPES[options.buffer_dtype] if options.buffer_dtype is not None else None,
        casts=param is not None and not is_mixed,
    )


def _refuse_param_dtype(name: str, param: torch.dtype, of_precision: torch.dtype | None, precision: str) -> None:
    given = f"param_dtype={name!r} with Trainer(precision={precision!r})"
    if precision.endswith("-true") and precision != "32-true":
        raise ConfigError(f"{given}: all parameters are of that precision. Remove param_dtype, or use '32-true'.")
    if precision == "32-true" and param == torch.float16:
        raise ConfigError(f"{given}: gradients of 16 bits need loss scaling. Use 'bf16', or precision='16-mixed'.")
    if of_precision is not None and param not in (of_precision, torch.float32):
        raise ConfigError(
            f"{given}: autocast computes in {str(of_precision).removeprefix('torch.')}. Use 'fp32', or another "
            "precision."
        )
