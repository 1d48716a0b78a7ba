"""The bandwidths that the planner assumes: configured, measured, or torchrec's defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torchrec.distributed.planner import constants

from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.units import format_bandwidth, parse_bandwidth

MEASURE, REMEASURE = "measure", "remeasure"
VARIABLES = {"intra_node": "INTRA_NODE_BANDWIDTH", "cross_node": "CROSS_NODE_BANDWIDTH"}
MILLISECONDS = 1000
"""torchrec counts bytes per millisecond, we count bytes per second."""
DEFAULTS = {
    "intra_node": constants.INTRA_NODE_BANDWIDTH * MILLISECONDS,
    "cross_node": constants.CROSS_NODE_BANDWIDTH * MILLISECONDS,
    "device_memory": constants.HBM_MEM_BW * MILLISECONDS,
    "host_memory": constants.DDR_MEM_BW * MILLISECONDS,
    "host_to_device": constants.HBM_TO_DDR_MEM_BW * MILLISECONDS,
}
"""torchrec's own, in bytes per second."""


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """How fast bytes move: "25GB/s", "200Gbit/s", a number of bytes per second, or "measure"; None: see the docs."""

    intra_node: str | float | None = None
    """What one rank sends to the others on its node, all ranks sending at once."""

    cross_node: str | float | None = None
    """What one rank sends to ranks on other nodes, all ranks sending at once."""

    device_memory: str | float | None = None
    """What a GPU reads and writes in its own memory."""

    host_memory: str | float | None = None
    """What a rank reads and writes in its host's memory."""

    host_to_device: str | float | None = None
    """What a GPU reads from its host's memory."""

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is not None and given not in (MEASURE, REMEASURE):
                parse_bandwidth(given, f"planning.bandwidths.{field.name}={given!r}")


GivenBandwidths = Bandwidths | dict[str, Any] | Literal["measure", "remeasure"] | None
NAMES = tuple(field.name for field in fields(Bandwidths))


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """One of them."""

    bytes_per_second: float
    origin: str
    """Who says so, in words."""

    @property
    def bytes_per_millisecond(self) -> float:
        """As torchrec counts."""
        return self.bytes_per_second / MILLISECONDS


@dataclass(frozen=True, kw_only=True)
class ChosenBandwidths:
    """What the planner believes."""

    intra_node: Bandwidth
    cross_node: Bandwidth
    device_memory: Bandwidth
    host_memory: Bandwidth
    host_to_device: Bandwidth

    def in_words(self, names: tuple[str, ...]) -> str:
        """Return some of them with who says so: those of one origin stand together."""
        by_origin: dict[str, list[str]] = {}
        for name in names:
            one: Bandwidth = getattr(self, name)
            words = f"{name} {format_bandwidth(one.bytes_per_second)}"
            by_origin.setdefault(one.origin, []).append(words)
        return ", ".join(f"{', '.join(words)} ({origin})" for origin, words in by_origin.items())


@dataclass(frozen=True)
class Asked:
    """What is known before anything is measured, and what is to be measured."""

    known: Mapping[str, Bandwidth]
    wanted: tuple[str, ...] = ()
    afresh: bool = False
    """Whether an earlier measurement does not do."""
    bare: tuple[str, ...] = ()
    """Environment variables that are numbers without a unit."""

    def with_measured(self, measured: Mapping[str, Bandwidth]) -> ChosenBandwidths:
        """Return the bandwidths to plan with; torchrec's defaults where none is configured or could be measured."""
        default = {name: Bandwidth(bytes_per_second=DEFAULTS[name], origin="torchrec's default") for name in NAMES}
        return ChosenBandwidths(**(default | dict(measured) | dict(self.known)))


def check_bandwidths(given: GivenBandwidths) -> None:
    """Raise ConfigError where these cannot be bandwidths."""
    _as_bandwidths(given)


def asked_bandwidths(given: GivenBandwidths, environment: Mapping[str, str]) -> Asked:
    """Return what the argument says, or else the environment, and what is to be measured.

    "measure" for all measures what neither says; for one value it stands above the environment.
    Raises ConfigError: a variable is no bandwidth.
    """
    argument = _as_bandwidths(given)
    everywhere = given if isinstance(given, str) else None
    known: dict[str, Bandwidth] = {}
    wanted: dict[str, str] = {}
    bare = []
    for name in NAMES:
        value, variable = getattr(argument, name), VARIABLES.get(name, "")
        if value in (MEASURE, REMEASURE):
            wanted[name] = value
        elif value is not None:
            number = parse_bandwidth(value, f"planning.bandwidths.{name}={value!r}")
            known[name] = Bandwidth(bytes_per_second=number, origin="argument")
        elif text := environment.get(variable, "").strip():
            number = parse_bandwidth(text, f"the environment's {variable}={text!r}")
            known[name] = Bandwidth(bytes_per_second=number, origin=f"environment {variable}")
            if not text.endswith("/s"):
                bare.append(variable)
        elif everywhere is not None:
            wanted[name] = everywhere
    return Asked(known, tuple(wanted), REMEASURE in wanted.values(), tuple(bare))


def _as_bandwidths(given: GivenBandwidths) -> Bandwidths:
    if given is None or (isinstance(given, str) and given in (MEASURE, REMEASURE)):
        return Bandwidths()
    if isinstance(given, Bandwidths):
        return given
    if isinstance(given, str):
        near = did_you_mean(given, (MEASURE, REMEASURE))
        raise ConfigError(
            f"planning.bandwidths={given!r} is not known{near} Use 'measure', 'remeasure', or some of {_names()}."
        )
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"planning.bandwidths={given!r}: 'measure', 'remeasure' or a dict with some of {_names()} is needed."
        )
    for name in given:
        if name not in NAMES:
            near = did_you_mean(str(name), NAMES)
            raise ConfigError(f"planning.bandwidths: there is no bandwidth {name!r}{near} Use some of {_names()}.")
    return Bandwidths(**given)


def _names() -> str:
    return ", ".join(NAMES)
