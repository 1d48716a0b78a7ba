"""Random programs: what is computed ahead is what the program computes, or it is not computed
ahead."""

import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec.prefetch.batch_objects import BatchObjects
from lightning_distrec.prefetch.computed_calls import (
    TRIAL_STEPS,
    ComputedCall,
    Trial,
    have_known_sizes,
    replaying,
)
from lightning_distrec.prefetch.recorded_calls import RecordedCall
from lightning_distrec.prefetch.recorder import Recorder
from lightning_distrec.prefetch.sources import BatchRoots

WIDTHS = (4, 7, 12)
ALONE: Any = SimpleNamespace(all_gather=lambda value: [value])
"""The only rank of its job."""
Step = Callable[[Tensor, dict[str, Tensor]], Tensor]
STEPS: list[Step] = [
    lambda x, b: x + 3,
    lambda x, b: x % 8,
    lambda x, b: x * 5 % x.shape[0],
    lambda x, b: x.flip(0),
    lambda x, b: x[: x.shape[0] // 2 + 1],
    lambda x, b: x[:, : int(b["len"].max())],
    lambda x, b: x[:, :-1] if x.shape[1] > 1 else x,
    lambda x, b: x.clamp(max=int(b["len"].sum()) % 9),
    lambda x, b: x + x.numel(),
    lambda x, b: x + torch.arange(x.shape[1]),
    lambda x, b: torch.cat([x, x]),
    lambda x, b: x.masked_fill(x > 5, 0),
    lambda x, b: x + 1 if b["len"].sum() % 2 == 0 else x * 2,
    lambda x, b: x.clone().index_fill_(0, torch.tensor([0]), 1),
    lambda x, b: torch.where(x > b["len"].max(), x, 0),
    lambda x, b: x.reshape(-1, 1).expand(-1, 2),
    lambda x, b: x + torch.tensor([len(b["len"])]),
]


def run(program: list[int], seed: int) -> tuple[int, int]:
    """Return in how many steps the program's result was computed ahead, and in how many it was
    another one."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    trial, module, ahead, wrong = Trial(["t"], ["t"]), nn.Module(), 0, 0
    calls: list[ComputedCall] = []
    width = draw.choice(WIDTHS)
    for step in range(14):
        size = draw.choice((8, 8, 8, 5))
        lengths = torch.randint(1, width + 1, (size,))
        batch = {"x": torch.randint(0, 50, (size, width)), "len": lengths}
        roots, computed = BatchRoots(batch), None
        if calls and have_known_sizes(roots, trial.sizes):
            with replaying(), suppress(Exception):
                computed = calls[0].get(roots)[0]
        roots.memo.clear()
        recorder: Any = Recorder(module, BatchObjects(roots), roots)
        with recorder.recording():
            x = batch["x"]
            for index in program:
                x = STEPS[index](x, batch)
        if computed is not None:
            ahead += 1
            wrong += not (computed.dtype == x.dtype and torch.equal(computed, x))
        if step < TRIAL_STEPS:
            call = RecordedCall("t", (x,), recorder.objects, recorder)
            recorded: dict[str, Any] = {"t": [call.recording or call.reason]}
            if trial.end_step(recorded, recorder.objects.tensors_with_paths):
                calls = trial.agree(ALONE)
    return ahead, wrong


def test_what_a_random_program_computes_is_computed_ahead_or_not_at_all() -> None:
    """Of very many, some are computed wrongly: that is an error at the call, which compares."""
    draw = random.Random(1)
    counts = []
    for seed in range(60):
        program = [draw.randrange(len(STEPS)) for _ in range(draw.randint(1, 5))]
        counts.append(run(program, seed))
    assert sum(ahead > 0 for ahead, _ in counts) > 20
    assert sum(wrong for _, wrong in counts) == 0
