"""Sends rows and their gradients as 16-bit numbers: half the bytes, about three digits."""

from dataclasses import dataclass
from typing import Any

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

from lightning_distrec.errors import ConfigError

PRECISIONS = {"fp32": CommType.FP32, "fp16": CommType.FP16, "bf16": CommType.BF16}


@dataclass(frozen=True, kw_only=True)
class QuantizedComms:
    """The types in which looked up rows and their gradients are sent between ranks: fp32, fp16 or bf16.

    Not the same numbers as unsharded: fp16 rounds rows at 5e-4 of their size, bf16 gradients at 4e-3.
    """

    forward: str = "fp32"
    """Type of rows, in the output dist."""
    backward: str = "fp32"
    """Type of their gradients, sent back in backward; fp16 overflows above 65,504 and underflows below 6e-8."""

    def __post_init__(self) -> None:
        for precision in (self.forward, self.backward):
            if precision not in PRECISIONS:
                raise ConfigError(f"quantized_comms: {precision!r} is not known. Use one of {', '.join(PRECISIONS)}.")

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded."""
        return self.forward == self.backward == "fp32"

    def registry(self) -> dict[str, Any] | None:
        """Return what torchrec's sharders take; None where nothing is rounded."""
        if self.is_exact:
            return None
        config = QCommsConfig(forward_precision=PRECISIONS[self.forward], backward_precision=PRECISIONS[self.backward])
        return dict(get_qcomm_codecs_registry(config))
