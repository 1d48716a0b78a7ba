"""Everything that lightning_distrec raises on purpose; docs/faq.md has the usual ways
out."""

import difflib
from collections.abc import Iterable
from importlib.util import find_spec


class DistRecError(Exception):
    """Base of all errors raised by lightning_distrec."""


class ConfigError(DistRecError, ValueError):
    """An option has an invalid value."""


class VersionError(DistRecError, ImportError):
    """The installed versions of torch, fbgemm and torchrec do not belong together."""


class MissingPackageError(DistRecError, ImportError):
    """An optional package is needed, and not installed."""


class UnsupportedError(DistRecError):
    """A Trainer setting or a callback cannot be exact with sharded tables."""


class ShardingError(DistRecError):
    """A module or a table cannot be sharded."""


class PlanError(ShardingError):
    """No sharding plan meets the constraints, or a plan does not fit the run."""


class InfeasiblePlanError(PlanError):
    """The tables need more memory than the ranks have."""


class ShardedWeightError(ShardingError):
    """The weight of a sharded table was read as if it were unsharded."""


class OptimizerError(DistRecError):
    """An optimizer cannot update a table exactly."""


class IdsError(DistRecError, IndexError):
    """A batch's ids cannot be looked up: out of their table's range, or lengths, weights or types
    do not fit."""


class DataError(DistRecError):
    """A dataset or a dataloader does not meet a requirement."""


class ProvenanceError(DistRecError):
    """A lookup that was prefetched for one input is called with another."""


class CheckpointError(DistRecError):
    """Something cannot be saved or loaded exactly."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was given."""


class RendezvousError(DistRecError, RuntimeError):
    """The ranks of a job do not find each other."""


class RankError(DistRecError, RuntimeError):
    """Another rank failed; its message is repeated here."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean ...?" with those of `words` that are similar to `word`, or "."."""
    close = difflib.get_close_matches(word, list(words), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."


EXTRAS = {
    "distributed": "dask",
    "matplotlib": "plots",
    "pyarrow": "parquet",
    "shtab": "completion",
    "tensorboard": "tensorboard",
}
"""Optional package -> the extra of lightning-distrec that brings it."""


def missing_package(package: str, purpose: str) -> str:
    """Return what to install. purpose: what needs the package."""
    extra = f", or pip install 'lightning-distrec[{EXTRAS[package]}]'" if package in EXTRAS else ""
    return (
        f"{purpose} needs the package {package}, which is not installed. Run pip install "
        f"{package}{extra}."
    )


def require(package: str, purpose: str) -> None:
    """Raise MissingPackageError where the package is not installed."""
    if find_spec(package) is None:
        raise MissingPackageError(missing_package(package, purpose))
