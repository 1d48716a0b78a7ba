"""Provokes what is refused, by the cases of the tests, and keeps what was said."""

import io
import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.multiprocess.checkpoint import test_resuming
from tests.multiprocess.optimizers import test_learning_rates, test_replicas, test_watches
from tests.multiprocess.prefetch import test_uneven_inputs
from tests.multiprocess.sharding import test_ids_check, test_plain_embedding_refusals
from tests.multiprocess.strategies import test_refusals
from tests.support.ranks import run_on_ranks

Call = tuple[Callable[..., Any], tuple[Any, ...]]
NOTHING = "nothing was raised"


def _cases() -> dict[str, dict[str, Call]]:
    """Return heading -> case -> what raises, or returns what was raised."""
    plain = test_plain_embedding_refusals
    tiny = {"tables": {"t1": {"sharding_types": ["row_wise"]}}}
    return {
        "Settings": {name: (test_refusals._refused, (name,)) for name in test_refusals.MESSAGES}
        | {
            "a row-wise cut of one row": (
                test_watches._train,
                (test_watches.TinyTables, test_watches.SGD, tiny),
            ),
            "tables that differ between ranks": (test_refusals._other_tables, ()),
            "tables that another module sharded": (test_watches._borrowed, ()),
        },
        "nn.Embedding and nn.EmbeddingBag": {
            name: (plain._refused, (name,)) for name in plain.REFUSED
        }
        | {name: (plain._call_wrongly, (name,)) for name in plain.WRONG_CALLS},
        "While training": {
            **_watched(),
            "a hyperparameter that changes": (
                test_learning_rates._train_with_decay_added_later,
                (),
            ),
            "an id out of range": (test_ids_check._train, ("row_wise", "error")),
            "uneven_inputs='error'": (
                test_uneven_inputs._train,
                ("sized", (4, 3), (2, 2), "error"),
            ),
            "a rank without batches": (
                test_uneven_inputs._train,
                ("sized", (4, 0), (2, 2), "stop"),
            ),
            "tables called by an old reference": (test_refusals._keeps_a_list, ()),
            "weights that drift apart": (
                test_replicas._train,
                (
                    test_replicas.DependsOnTheRank,
                    test_replicas.SGD,
                    {"sharding_types": ["table_wise"]},
                    40,
                ),
            ),
        },
    }


def _watched() -> dict[str, Call]:
    """Return the parameters of the test in test_watches.py."""
    marks = test_watches.test_is_reported_on_every_rank.pytestmark  # type: ignore[attr-defined]
    rows = next(mark for mark in marks if mark.name == "parametrize").args[1]
    return {
        f"{_words(kind.__name__)}, {optimizer[0].__name__}": (
            test_watches._train,
            (kind, optimizer, strategy),
        )
        for kind, optimizer, strategy, _ in rows
    }


def _words(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z][a-z]|[A-Z]\d)", " ", name).lower().replace("l2", "L2")


def _provoke(folder: str) -> dict[str, dict[str, str]]:
    with redirect_stdout(io.StringIO()):
        message = {
            heading: {name: _said(*call) for name, call in calls.items()}
            for heading, calls in _cases().items()
        }
        resumed = test_resuming._refused(
            {name: case for name, (case, _) in test_resuming.CASES.items()}, folder
        )
        return message | {
            "Checkpoints": {name: outcome.failed or NOTHING for name, outcome in resumed.items()}
        }


def _said(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    try:
        returned = function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    parts = returned if isinstance(returned, tuple) else (returned,)
    return next((part for part in parts if isinstance(part, str)), NOTHING)


def refusals() -> dict[str, dict[str, str]]:
    """Return heading -> case -> what rank 0 raised, each provoked on two ranks, which raise errors
    of one kind."""
    with tempfile.TemporaryDirectory() as folder:
        test_resuming.write_wrong_files(Path(folder))
        first, second = run_on_ranks(_provoke, 2, folder, timeout_seconds=400)
    for heading, output in first.items():
        for case, message in output.items():
            other = second[heading][case]
            assert message.split(":")[0] == other.split(":")[0], (
                f"{case}: {message}, but on rank 1: {other}"
            )
    return {
        heading: {case: message.replace(folder, "...") for case, message in message.items()}
        for heading, message in first.items()
    }
