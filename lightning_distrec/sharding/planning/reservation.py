"""How much of a rank's memory is kept for what is not tables: dense layers, activations, exchanged batches."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.units import SIZE_UNITS, format_bytes, parse_bytes

DEFAULT_SHARE = 0.15
UNSEEN_SHARE = 0.10
"""Share that "measure" reserves in addition to what it measured: for batches, and for short-lived tensors of a step."""
MEASURE = "measure"
VARIABLE = "STORAGE_RESERVE_PERCENT"
PERCENT = re.compile(r"\s*([-+]?\d+(?:\.\d*)?)\s*%\s*")


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """What is kept of each rank's memory."""

    share: float = 0.0
    fixed_bytes: int = 0
    """On top of the share."""
    host_share: float = DEFAULT_SHARE
    """What is kept of the host's memory of a rank with a GPU."""
    origin: str

    def bytes_of(self, memory_bytes: int) -> int:
        """Return how much is kept of so much memory: never more than all of it."""
        return min(memory_bytes, memory_bytes - int(memory_bytes * (1 - self.share)) + self.fixed_bytes)

    def with_dense(self, dense_bytes: int, memory_bytes: int) -> "Reservation":
        """Return what is kept where layers without tables take so much: more than the default, if they need more."""
        if self != DEFAULT or dense_bytes <= self.bytes_of(memory_bytes):
            return self
        return Reservation(fixed_bytes=dense_bytes, origin="what layers without tables need, more than 15%")

    def of_host(self) -> "Reservation":
        """Return the bytes reserved of a host's memory, for ranks that have a GPU."""
        return Reservation(share=self.host_share, host_share=self.host_share, origin=self.origin)

    @property
    def in_words(self) -> str:
        """What is kept: 15%, 4.0 GiB, 1.2 GiB and 10%."""
        share = f"{100 * self.share:g}%"
        if not self.fixed_bytes:
            return share
        return format_bytes(self.fixed_bytes) + (f" and {share}" if self.share else "")


DEFAULT = Reservation(share=DEFAULT_SHARE, origin="default")


def check_reserve(given: str | None) -> None:
    """Raise ConfigError where this can be no reservation."""
    if given is not None and given != MEASURE:
        _of_argument(given)


def is_measured(given: str | None) -> bool:
    """Whether the argument asks for the layers to be weighed."""
    return given == MEASURE


def measured_reservation(layers_bytes: int, activation_bytes: int | None) -> Reservation:
    """Return what is kept where the layers without tables take so much.

    activation_bytes: what a step keeps for its backward; None: not known.
    """
    return Reservation(
        share=UNSEEN_SHARE,
        fixed_bytes=layers_bytes + (activation_bytes or 0),
        host_share=DEFAULT_SHARE,
        origin="measured without a batch" if activation_bytes is None else "measured with a batch",
    )


def chosen_reservation(given: str | None, environment: Mapping[str, str]) -> Reservation:
    """Return what the argument says ("15%", "4GB"), or else STORAGE_RESERVE_PERCENT, or else the default.

    Raises ConfigError: it is not above 0 (the variable may be 0), leaves nothing, or has a unit that is not known.
    """
    if given is not None:
        return _of_argument(given)
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT
    try:
        percent = float(text)
    except ValueError:
        percent = float("nan")
    if not 0 <= percent < 100:
        raise ConfigError(
            f"the environment's {VARIABLE}={text!r}: a number from 0 to below 100 is needed, the percentage of each "
            "rank's memory that is not for tables."
        )
    return Reservation(share=percent / 100, host_share=percent / 100, origin=f"environment {VARIABLE}")


def _of_argument(given: str) -> Reservation:
    option = f"planning.reserve={given!r}"
    wanted = "Write a percentage such as '15%', a size such as '4GB', or 'measure'."
    if not isinstance(given, str):
        raise ConfigError(f"{option} has no unit. {wanted}")
    if found := PERCENT.fullmatch(given):
        percent = float(found[1])
        if not 0 < percent < 100:
            raise ConfigError(f"{option}: a percentage above 0 and below 100 is needed, or nothing is left. {wanted}")
        return Reservation(share=percent / 100, host_share=percent / 100, origin="argument")
    if given.strip().isalpha():
        near = did_you_mean(given, (MEASURE, *SIZE_UNITS))
        raise ConfigError(f"{option} is not known{near} {wanted}")
    if re.fullmatch(r"[\s\d.]*", given):
        raise ConfigError(f"{option} has no unit. {wanted}")
    return Reservation(fixed_bytes=parse_bytes(given, option), origin="argument")
