"""Rows and their gradients travel as 16-bit numbers: half the bytes, about three digits."""

from dataclasses import dataclass
from typing import Any

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

from lightning_distrec.errors import ConfigError

PRECISIONS = {"fp32": CommType.FP32, "fp16": CommType.FP16, "bf16": CommType.BF16}


@dataclass(frozen=True, kw_only=True)
class QuantizedComms:
    """The types in which looked up rows and their gradients travel between ranks: fp32, fp16 or bf16.

    Not the same numbers as unsharded: fp16 rounds rows at 5e-4 of their size, bf16 gradients at 4e-3.
    """

    forward: str = "fp32"
    """Of rows, on their way to the rank that looks them up."""
    backward: str = "fp32"
    """Of their gradients, on the way back; fp16 overflows above 65,504, and below 6e-8 there is nothing left."""

    def __post_init__(self) -> None:
        for way in (self.forward, self.backward):
            if way not in PRECISIONS:
                raise ConfigError(f"quantized_comms: {way!r} is not known. Use one of {', '.join(PRECISIONS)}.")

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
