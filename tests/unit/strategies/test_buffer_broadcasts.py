"""How often buffers are compared, for which a GPU is waited for."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lightning_distrec.cluster.consensus import RankFlags
from lightning_distrec.strategies.data_parallel.replicated_layers import (
    TRIAL_STEPS,
    BroadcastSkipper,
)

STEPS = 40


class Wrapper:
    """In the place of DistributedDataParallel."""

    broadcast_buffers = True

    def __init__(self) -> None:
        self.module: Any = nn.BatchNorm1d(2)


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("first_write", [0, TRIAL_STEPS + 5, STEPS])
def test_buffers_are_compared_a_few_times_in_a_run(first_write: int, in_flight: int) -> None:
    """in_flight: messages that are sent before the first of them is read."""
    wrapper, flags = Wrapper(), RankFlags()
    skipper, messages, skipped = BroadcastSkipper(wrapper, flags), [], []
    with patch("torch.equal", side_effect=torch.equal) as equal:
        for step in range(STEPS):
            skipper.before_step()
            skipped.append(not wrapper.broadcast_buffers)
            if step >= first_write:
                wrapper.module.running_mean.add_(1)
            messages.append(flags.to_send())
            if len(messages) >= in_flight:
                flags.receive(*messages.pop(0))
    assert equal.call_count <= 3 * TRIAL_STEPS
    assert skipped[STEPS - 1] == (first_write == STEPS)
    assert any(skipped) == (first_write > 0)
    late = [step for step in range(STEPS) if skipped[step] and step >= first_write + in_flight]
    assert late == [], "a write is noticed with the next message"
