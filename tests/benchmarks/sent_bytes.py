"""Bytes that a rank sends in a step of the model of docs/performance.md: by torchrec, and by us
with 64 and 32-bit ids.

`python -m tests.benchmarks.sent_bytes` Two gloo ranks of this machine.
Those of Trainer.fit are counted by the callback Communication, those of the loop by hand at
torch.distributed's collectives, by the same functions.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lightning_distrec import Communication
from lightning_distrec.observe.communication import classify_call, exchanged_bytes
from lightning_distrec.sharding.lookup import lookup_setup
from tests.benchmarks.performance_contenders import ByHand, ByTrainer, Turn, our_strategy
from tests.benchmarks.performance_model import Batches
from tests.support.ranks import rank_and_num_ranks, run_on_ranks

ROWS, TURN = 100_000, Turn(5, 25, 3)


@contextmanager
def counting(actual: dict[str, float]) -> Iterator[None]:
    """Add up the bytes of torchrec's exchanges, by kind; all of its tables' collectives are
    all_to_all_single."""
    send = dist.all_to_all_single
    signature = inspect.signature(send)

    def counted(*inputs: Any, **options: Any) -> Any:
        arguments = dict(signature.bind(*inputs, **options).arguments)
        caller = inspect.currentframe().f_back.f_globals["__name__"]  # type: ignore[union-attr]
        kind = classify_call("all_to_all_single", arguments["input"].dtype, caller)
        actual[kind] += (
            sum(exchanged_bytes(arguments, [0, 1], dist.get_rank()).values()) / TURN.steps
        )
        return send(*inputs, **options)

    with patch.object(dist, "all_to_all_single", counted):
        yield


def measure() -> dict[str, dict[str, float]]:
    """Return the bytes of a step by kind, for each way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, _ = rank_and_num_ranks()
    batches = Batches(ROWS, TURN.steps, rank)
    per_hand: dict[str, float] = defaultdict(float)
    contender = ByHand(ROWS, batches, TURN)
    with counting(per_hand):
        contender.turn()
    actual = {"torchrec by hand": dict(per_hand)}
    for name, limit in (("ours, 64-bit ids", 0), ("ours", lookup_setup.SMALL_ROWS)):
        counts = Communication()
        with patch.object(lookup_setup, "SMALL_ROWS", limit):
            ByTrainer(ROWS, batches, TURN, partial(our_strategy, 3)).turn(counts)
        actual[name] = {kind: sent for kind, sent in counts.mean_bytes_per_step.items() if sent}
    return actual


def main() -> None:
    """Print each way, the mean over ranks."""
    rank_results = run_on_ranks(measure, 2)
    for way in rank_results[0]:
        kinds = {
            kind: sum(result[way].get(kind, 0.0) for result in rank_results) / 2
            for kind in rank_results[0][way]
        }
        tables = sum(
            sent for kind, sent in kinds.items() if "dense" not in kind and "control" not in kind
        )
        words = ", ".join(f"{kind} {sent:,.0f}" for kind, sent in kinds.items())
        print(f"{way}: tables {tables:,.0f}, all {sum(kinds.values()):,.0f}; {words}")


if __name__ == "__main__":
    main()
