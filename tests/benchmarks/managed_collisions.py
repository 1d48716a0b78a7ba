"""Processor time of lookups in training by MCHManagedCollisionModule: torchrec's own beside the
product's buckets, in turns.

    python -m tests.benchmarks.managed_collisions [--quick] [--write]

2^20 rows, 20,000 ids a step, one core; every eighth step is an update, which gives ids rows. About
a minute.
"""

import sys
from collections.abc import Callable, Iterator
from statistics import median
from time import process_time

import torch
from torch import Tensor
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_distrec.sharding.mapping.mch_mapping import MchMapping
from lightning_distrec.sharding.mapping.spec import MchSpec, spec_of
from tests.benchmarks.report import start, table

ROWS, IDS, INTERVAL = 2**20, 20_000, 8
CPU = torch.device("cpu")
TORCHREC = "torchrec"
HEADER = ["", "ms a step", "of torchrec's", "ms an update", "of torchrec's"]


def _module(buckets: int) -> MCHManagedCollisionModule:
    policy = DistanceLFU_EvictionPolicy()
    return MCHManagedCollisionModule(ROWS, CPU, policy, eviction_interval=INTERVAL, buckets=buckets)


def _torchrec() -> Callable[[Tensor], None]:
    module = _module(1).train()

    def look_up(ids: Tensor) -> None:
        features = module.preprocess({"f": JaggedTensor(ids, lengths=torch.ones_like(ids))})
        module.profile(features)
        module.evict()
        module.remap(features)

    return look_up


def _buckets(number: int) -> Callable[[Tensor], None]:
    module = _module(number)
    spec = spec_of(module, "table")
    assert isinstance(spec, MchSpec)
    mapping = MchMapping(spec, 0, number, CPU, module)

    def look_up(ids: Tensor) -> None:
        mapping.learn(mapping.note_lookup(ids).tolist())
        mapping.find(ids)
        mapping.optimizer_stepped()

    return look_up


def _batches(number: int) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(0)
    for _ in range(number):
        yield (
            torch.rand(IDS, generator=draws, dtype=torch.float64) ** 4 * 20_000_000
        ).long() * 7919


def _measure(updates: int) -> list[list[str]]:
    contenders = {TORCHREC: _torchrec()}
    contenders |= {f"{buckets} buckets": _buckets(buckets) for buckets in (1, 8, 64)}
    names = list(contenders)
    times: dict[bool, dict[str, list[float]]] = {kind: {n: [] for n in names} for kind in (0, 1)}
    for number, ids in enumerate(_batches((updates + 1) * INTERVAL)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = process_time()
            contenders[name](ids)
            seconds = process_time() - began
            if number >= INTERVAL:  # the first interval does not count
                times[(number + 1) % INTERVAL == 0][name].append(1000 * seconds)
    rows = []
    for name in names:
        cells = [name]
        for kind in (False, True):
            own, theirs = times[kind][name], times[kind][TORCHREC]
            ratio = median(a / b for a, b in zip(own, theirs, strict=True))
            cells += [f"{median(own):.1f}", f"{ratio:.2f}"]
        rows.append(cells)
    return rows


def main() -> int:
    """Measure, print, and write the results; returns the exit status."""
    report = start(
        "managed_collisions",
        __doc__,
        rounds={"type": int, "default": 8, "help": "updates of each contender"},
    )
    torch.set_num_threads(1)
    rounds = 2 if report.options.quick else report.options.rounds
    report.sections.append(table(HEADER, _measure(rounds)))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
