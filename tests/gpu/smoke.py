"""Checks on one GPU, in about four minutes, what tells most. Where there is none it says so, and
exits with 0.

    python -m tests.gpu.smoke [--only waits kernels] [--json FILE] [--small]

Eight parts, those first that tell most, each in a process of its own: one that fails or hangs costs
only its own time. A line is printed for each as it ends. It takes no package that only tests need:
a machine with a GPU may have no network. On the CUDA device in host memory:

    python -m tests.support.host_cuda -m tests.gpu.smoke --small

Exits with 1 where a part fails, or something is over its limit.
"""

import argparse
import json
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.benchmarks.performance_model import Batches
from tests.benchmarks.report import versions
from tests.benchmarks.turns import Turn, silence
from tests.gpu import parts, speed
from tests.gpu.parts import Found
from tests.support.click_model import ClickModel, make_batch, seeded
from tests.support.counted_steps import steps_of_ours, steps_of_torchrec
from tests.support.ranks import run_on_ranks
from tests.support.trainers import DEFAULTS, make_trainer

DEVICE = "cuda"
NO_DEVICE = "There is no CUDA device on this machine: nothing was checked, and nothing has passed."
OPTIMIZERS = {"Adagrad": {"lr": 0.02}, "SGD": {"lr": 0.1}, "Adam": {"lr": 0.001}}
SLOWER_IN_HOST_MEMORY = 20
SHOWN = 5
"""Numbers of a part in its line."""
SMALLEST = 1e-30


def fits(device: str, small: bool) -> Found:
    """Compare fits of one rank on the device with those of one process on the CPU, without our
    strategy."""
    found = Found()
    batches = [make_batch(1000 * step, 8 if small else 256) for step in range(6 if small else 30)]
    for name, options in OPTIMIZERS.items():
        states = []
        trainers = (
            make_trainer({}, accelerator=parts.accelerator(device)),
            pl.Trainer(devices=1, **DEFAULTS),
        )
        for trainer in trainers:
            model = seeded(ClickModel, getattr(torch.optim, name), options)
            trainer.fit(model, DataLoader(batches, batch_size=None))
            states.append(model.final_state)
        found.differences[f"{name}, weights"] = parts.largest_difference(*states), 2e-5
    return found


def waits(device: str, small: bool) -> Found:
    """Count the host's waits in a step beside those of TorchRec's TrainPipelineSparseDist, for the
    same model."""
    silence()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    turn = Turn(first=6, counted=10, last=4)
    batches = Batches(1000, turn.steps, 0, batch_size=64 if small else 512)
    ours = steps_of_ours(turn, batches, torch.device(DEVICE), depth=3).waits
    torchrecs = steps_of_torchrec(turn, batches, torch.device(DEVICE)).waits
    per_step = [counts.total() / turn.counted for counts in (ours, torchrecs)]
    found = Found(differences={"in a step, against TorchRec's": (per_step[0], per_step[1])})
    for name, counts in (("ours", ours), ("TorchRec's", torchrecs)):
        found.numbers |= {
            f"{name}: {place}": count / turn.counted for place, count in counts.items()
        }
    return found


def short_path(device: str, small: bool) -> Found:
    """Run what several ranks have with one: packed ids, their streams and exchanges over NCCL,
    without a peer."""
    from lightning_distrec.sharding.lookup import sharded_lookup, short_path

    lookups = 0

    class OfOneRank(short_path.ShortPath):
        def look_up(self, ids: Any) -> Any:
            nonlocal lookups
            lookups += 1
            return super().look_up(ids)

    def of_one_rank(sharded: Any, kernels: Any, num_ranks: int, device: torch.device) -> Any:
        sharding = short_path.pooled_sharding(sharded)
        return None if sharding is None else OfOneRank(sharding, kernels[0], device)

    with patch.object(sharded_lookup, "short_path_of", of_one_rank):
        found = parts.races(device, True)
    assert lookups > 0, "no lookup went the short path"
    return found


def step_times(device: str, small: bool) -> Found:
    """Time steps beside TrainPipelineSparseDist; idle shares and the peak of memory."""
    # 2.7 GB of tables, which the host draws in 3 s.
    with patch.multiple(speed, ROWS=200_000, BATCH_SIZES=(8192,)):
        found = speed.speed(device, small)
    found.numbers["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found


@dataclass(frozen=True)
class Part:
    """What is checked, and how many seconds it may take on a GPU."""

    check: Callable[[str, bool], Found]
    seconds: int


PARTS = {
    "kernels": Part(parts.kernels, 40),
    "fits": Part(fits, 40),
    "waits": Part(waits, 40),
    "depths": Part(parts.races, 60),
    "short path": Part(short_path, 40),
    "step times": Part(step_times, 90),
    "parity": Part(parts.parity, 50),
    "sanitizer": Part(parts.sanitizer, 40),
}
"""FBGEMM's kernels against double precision; fits against a CPU; waits of the host; three batches
in flight against one; the short path; times beside TorchRec's pipeline; mixed precision, clipping
and accumulation; and torch's own look at streams."""


def main() -> int:
    """Run the parts, print and write what they found; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--json", type=Path, default=Path("outputs", "gpu_smoke.json"), help="where the results go"
    )
    parser.add_argument(
        "--small", action="store_true", help="small sizes, for a CUDA device in host memory"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "parts": {},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        results["parts"][name] = result = run(PARTS[name], options.small)
        # After each part: whoever ends this command keeps those that were run.
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(line(name, result), flush=True)
    failed = [name for name, result in results["parts"].items() if result["failed"]]
    print(
        f"On {results['device']}: {len(results['parts']) - len(failed)} of "
        f"{len(results['parts'])} parts passed."
    )
    return int(bool(failed))


def line(name: str, result: dict[str, Any]) -> str:
    """Return what a part has found, as one line: of what it compared, what is nearest to its limit.
    All is written."""
    words = []
    compared: dict[str, tuple[float, float]] = result["differences"]
    if compared:
        what, (actual, limit) = max(
            compared.items(), key=lambda item: item[1][0] / max(item[1][1], SMALLEST)
        )
        words.append(f"{what}: {actual:.2g} (limit {limit:.2g})")
    if len(compared) > 1:
        words.append(f"{len(compared) - 1} more below their limits" if not result["failed"] else "")
    if len(result["numbers"]) <= SHOWN:
        words += [f"{what}: {number:.4g}" for what, number in result["numbers"].items()]
    verdict = "FAILED" if result["failed"] else "passed"
    text = (
        f"{name:<10} {verdict} in {result['seconds']:>2.0f} s.  "
        f"{'; '.join(filter(None, [*words, *result['notes']]))}"
    )
    return text + textwrap.indent(f"\n{result['failed']}" if result["failed"] else "", "    ")


def run(part: Part, small: bool) -> dict[str, Any]:
    """Return what a part has found, how long it took, and as `failed` what is wrong."""
    began, found, failed = time.monotonic(), Found(), ""
    limit = part.seconds * (SLOWER_IN_HOST_MEMORY if small else 1)
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        try:
            found = run_on_ranks(
                parts.in_process, 1, part.check, DEVICE, small, printed, timeout_seconds=limit
            )[0]
            failed = ", ".join(f"over its limit: {name}" for name in found.wrong)
        except Exception as error:  # mostly RankFailed; the other parts are run all the same
            output = printed.read_text(errors="replace") if printed.exists() else ""
            failed = f"{str(error)[-1500:]}\nIt printed:\n{output[-1500:]}"
    return {"seconds": round(time.monotonic() - began, 1), "failed": failed, **asdict(found)}


if __name__ == "__main__":
    sys.exit(main())
