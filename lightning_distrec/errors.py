"""The exception tree: everything that lightning_distrec raises on purpose.

DistRecError
├── ConfigError        an option has a value it cannot have
├── VersionError       torch, fbgemm and torchrec do not belong together
├── UnsupportedError   a Trainer setting or callback that cannot be exact over sharded tables
├── ShardingError      a module or table cannot be sharded
│   ├── PlanError            no plan suits the tables, or a plan does not suit the run
│   │   └── InfeasiblePlanError          ... because they need more memory than there is
│   └── RowsElsewhereError   a sharded table's weight was read as if it were whole
├── OptimizerError     an optimizer's update cannot be carried over to a table
├── IdsError           an id is outside of its table
├── DataError          a dataset or a dataloader is not what it must be
├── ProvenanceError    a lookup that was sent ahead is called with something else
├── CheckpointError    something cannot be saved or loaded exactly
├── RendezvousError    the ranks do not find each other
└── RankError          another rank failed; its message is repeated here
"""

import difflib
from collections.abc import Iterable


class DistRecError(Exception):
    """Base of all errors raised by lightning_distrec."""


class ConfigError(DistRecError, ValueError):
    """An option has a value it cannot have."""


class VersionError(DistRecError, ImportError):
    """The installed torch, fbgemm and torchrec do not belong together."""


class UnsupportedError(DistRecError):
    """A Trainer setting or callback cannot be exact over sharded tables."""


class ShardingError(DistRecError):
    """A module or a table cannot be sharded."""


class PlanError(ShardingError):
    """No placement of the tables fits what was said of them, or a plan does not suit the run."""


class InfeasiblePlanError(PlanError):
    """The tables need more memory than the ranks have."""


class ShardedWeightError(ShardingError, AttributeError):
    """A sharded table's weight was read as if it were whole. An AttributeError too, so that hasattr says False."""


class OptimizerError(DistRecError):
    """An optimizer's update cannot be carried over to a table exactly."""


class IdsError(DistRecError, IndexError):
    """An id is outside of its table."""


class DataError(DistRecError):
    """A dataset or a dataloader is not what it must be."""


class ProvenanceError(DistRecError):
    """A table is called with another input than the one that was sent ahead for this call."""


class CheckpointError(DistRecError):
    """Something cannot be saved or loaded exactly."""


class RendezvousError(DistRecError, RuntimeError):
    """The ranks of a job do not find each other."""


class RankError(DistRecError, RuntimeError):
    """Another rank failed; its message is repeated here."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean ...?" with those of `words` that are like `word`, or "."."""
    close = difflib.get_close_matches(word, list(words), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(w) for w in close)}?" if close else "."
