"""Where a chain is split, and what absent tensors do, on one process."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_distrec.errors import ConfigError, DistRecError, UnsupportedError
from lightning_distrec.pipeline.absent_tensors import absent_parameter, is_absent
from lightning_distrec.pipeline.chain import (
    StageOptions,
    balance_stages,
    find_chain,
    split_chain,
)
from lightning_distrec.pipeline.step_over_chain import (
    enter_chain,
    split_batch,
)
from tests.support.chain_models import Flat, Sequence, Transformer
from tests.support.dense_models import WithBatchNorm


@pytest.mark.parametrize(
    ("costs", "num_stages", "begins"),
    [
        ([1, 1, 1, 1], 2, (0, 2)),
        ([5, 1, 1, 1], 2, (0, 1)),
        ([0, 0, 0, 9], 2, (0, 2)),
        ([0, 0, 0, 0], 4, (0, 1, 2, 3)),
        ([3, 1, 4, 1, 5, 9, 2, 6], 3, (0, 5, 7)),
    ],
)
def test_the_largest_stage_is_as_small_as_possible(
    costs: list[int], num_stages: int, begins: tuple[int, ...]
) -> None:
    assert balance_stages(costs, num_stages) == begins


class Tied(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.ones(1, 8))
        self.lift.weight = self.head.weight  # type: ignore[assignment]


class Twice(Sequence):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(block := nn.Linear(12, 12), block)


class PlainBatchNorm(Sequence):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12, track_running_stats=False))


class Lazy(Sequence):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))


SPLITS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "'lift.weight' and 'head.weight' are one parameter": (Tied, {}, 2),
    "chain='model': a block is in it twice": (Twice, {}, 2),
    "'model.0.weight' has no shape before the first forward": (Lazy, {}, 2),
    "'net.1' (BatchNorm1d) uses the statistics of batches": (WithBatchNorm, {}, 2),
    "'model.1' (BatchNorm1d) uses the statistics of batches": (PlainBatchNorm, {}, 2),
    "the chain has 7 blocks, which cannot be split into 8 stages": (Sequence, {}, 8),
    "no chain of blocks there; did you mean 'model'": (Sequence, {"chain": "modle"}, 2),
    "'model.9' is no block after the first of 'model'": (Sequence, {"split": ["model.9"]}, 2),
    "split names 1 blocks, which makes 2 stages, and": (Sequence, {"split": ["model.3"]}, 3),
    "last_stage: no parameter outside of 'blocks'": (Transformer, {"last_stage": ("lif",)}, 2),
    "Or name a module whose forward calls its layers one": (Flat, {}, 2),
    "chain='fc1': the module has no chain of blocks there": (Flat, {"chain": "fc1"}, 2),
    "the module has no chain of blocks. Name an nn.Sequential": (nn.Identity, {}, 2),
}


@pytest.mark.parametrize("words", SPLITS)
def test_what_cannot_be_split_is_refused(words: str) -> None:
    kind, options, num_stages = SPLITS[words]
    with pytest.raises(DistRecError, match=re.escape(words)):
        split_chain(kind(), StageOptions(**options), num_stages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 0}, "microbatches=0: must be at least 1"),
        (
            {"schedule": "zero"},
            "schedule='zero' is not known. Use one of 'gpipe', '1f1b', 'interleaved_1f1b'",
        ),
        (
            {"stages_per_rank": 2},
            "stages_per_rank=2 and schedule='gpipe': a rank computes several stages",
        ),
        ({"split": "evenly"}, "split='evenly': must be 'parameters', or a list: write"),
        ({"stages": 1}, "stages=1: must be at least 2"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StageOptions(**options)


def test_what_is_computed_from_absent_weights_is_absent_and_cannot_be_read() -> None:
    layer = nn.Embedding(4, 3)
    layer.weight = absent_parameter(layer.weight)
    hidden = torch.ones(2, 3) * layer(torch.tensor([1, 2]))
    assert is_absent({"loss": hidden.sum()})
    assert (hidden.shape, hidden.device.type, layer.weight.requires_grad) == ((2, 3), "cpu", True)
    assert not is_absent(torch.ones(1))
    with pytest.raises(
        UnsupportedError, match=r"item\(\) was called on a value that depends on weights of another"
    ):
        hidden.sum().item()
    with pytest.raises(
        UnsupportedError, match="add_ would write values of another stage's weights"
    ):
        torch.ones(2, 3).add_(hidden)
    with pytest.raises(UnsupportedError, match="_foreach_add_ would write"):
        torch._foreach_add_([torch.ones(2, 3)], [hidden])


def test_a_batch_is_divided_into_equal_parts() -> None:
    four = StageOptions(microbatches=4)
    assert [four.num_parts(size, 2) for size in (8, 6, 7, 2, 1)] == [4, 3, 1, 2, 1]
    interleaved = StageOptions(microbatches=8, schedule="interleaved_1f1b", stages_per_rank=2)
    assert [interleaved.num_parts(size, 2) for size in (8, 10, 7, 5)] == [8, 2, 1, 1]
    parts = split_batch({"x": torch.arange(4), "names": 3}, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    with pytest.raises(UnsupportedError, match=r"a tensor of shape \(3,\) next to 4 examples"):
        split_batch([torch.arange(4), torch.arange(3)], 2)


def _between(model: Sequence, x: torch.Tensor) -> Any:
    return model.model[1](model.model[0](x) + 1)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (_between, r"forward computes something between 'model\.0' and 'model\.1'"),
        (lambda m, x: m.model[1](torch.relu(m.model[0](x))), r"between 'model\.0' and 'model\.1'"),
        (lambda m, x: m.model[1](x), r"calls 'model\.1' where block 0 of 'model' is next"),
        (lambda m, x: m.model[0](input=x), r"'model\.0' is called without a positional argument"),
        (lambda m, x: (m.model[0](x), m.model[1](x)), r"between 'model\.0' and 'model\.1'"),
        (lambda m, x: m.model[0](x), "a step did not call every block of 'model'"),
        (
            lambda m, x: m.model[0](x, absent_parameter(nn.Parameter(x))),
            "takes a second argument that depends on",
        ),
    ],
)
def test_a_step_that_is_not_a_chain_is_refused(forward: Any, words: str) -> None:
    model = Sequence()
    chain = find_chain(model, "auto")
    with pytest.raises(UnsupportedError, match=words):
        enter_chain(chain, lambda: forward(model, torch.ones(2, 12)))
    assert model(torch.ones(2, 12)).shape == (2, 1)
