"""Times lookups in training by MCHManagedCollisionModule: torchrec's own beside the product's
buckets, in turns.

    python -m tests.benchmarks.managed_collisions [--updates N]

2^20 rows, 20,000 ids a step, one core; every eighth step is an update, which gives ids rows. About
a minute.
"""

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_distrec.sharding.mapping.mch_mapping import MchMapping
from lightning_distrec.sharding.mapping.spec import MchSpec, spec_of
from tests.benchmarks.page import table

ROWS, IDS, INTERVAL = 2**20, 20_000, 8
CPU = torch.device("cpu")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--updates", type=int, default=8, help="of each contender, after one that does not count"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders = {"torchrec": _torchrec()} | {
        f"{buckets} buckets": _buckets(buckets) for buckets in (1, 8, 64)
    }
    updates: dict[str, list[float]] = {name: [] for name in contenders}
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    for number, ids in enumerate(_batches((options.updates + 1) * INTERVAL)):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = perf_counter()
            contenders[name](ids)
            (steps if (number + 1) % INTERVAL else updates)[name].append(
                1000 * (perf_counter() - began)
            )
    rows = []
    for name in contenders:
        ratios = [
            own / theirs
            for own, theirs in zip(updates[name][1:], updates["torchrec"][1:], strict=True)
        ]
        steps_ms, updates_ms = median(steps[name][INTERVAL:]), median(updates[name][1:])
        rows.append([name, f"{steps_ms:.1f}", f"{updates_ms:.0f}", f"{median(ratios):.2f}"])
    print(table(["", "ms a step", "with an update", "of torchrec's"], rows))


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


if __name__ == "__main__":
    main()
