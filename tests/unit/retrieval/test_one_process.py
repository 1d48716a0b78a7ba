"""In one process the functions are torch's own formulas, in blocks of rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_distrec.errors import ConfigError, IdsError
from lightning_distrec.retrieval import (
    SampledFrequency,
    by_frequency,
    in_batch_loss,
    sampled_softmax_loss,
    softmax_loss,
    top_k,
)
from lightning_distrec.retrieval.sampled_softmax import SAMPLERS

ROWS, DIM = 40, 8


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that an operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.num_elements = max(self.num_elements, output.numel())
        return output


def _tensors(*shape: int) -> tuple[nn.Embedding, Tensor, Tensor]:
    torch.manual_seed(2)
    queries = torch.randn(*shape, DIM, requires_grad=True)
    return nn.Embedding(ROWS, DIM), queries, torch.randint(ROWS, shape)


@pytest.mark.parametrize(
    ("reduction", "options"),
    [("mean", {"ignore_index": 7}), ("sum", {"label_smoothing": 0.3}), ("none", {})],
)
def test_losses_and_gradients_are_those_of_cross_entropy(
    reduction: Any, options: dict[str, Any]
) -> None:
    table, queries, targets = _tensors(3, 4)
    targets[0, 1] = 7
    bias = torch.rand(ROWS, requires_grad=True)
    inputs = [queries, table.weight, bias]
    actual = softmax_loss(
        queries, table, targets, bias=bias, reduction=reduction, max_bytes=500, **options
    )
    logits = (queries @ table.weight.T + bias).flatten(0, 1)
    expected = functional.cross_entropy(logits, targets.flatten(), reduction=reduction, **options)
    torch.testing.assert_close(actual.flatten(), expected.flatten())
    factor = torch.rand_like(actual)
    gradients = torch.autograd.grad((actual * factor).sum(), inputs)
    other = torch.autograd.grad((expected.view(factor.shape) * factor).sum(), inputs)
    torch.testing.assert_close(gradients, other)


def test_scores_are_never_larger_than_the_bound() -> None:
    table, queries, targets = _tensors(16)
    table = nn.Embedding(4000, DIM)
    with LargestTensor() as largest:
        softmax_loss(queries, table, targets, max_bytes=8000).backward()
    # The gradient of the table is the largest, where 16 x 4000 scores would be twice as many.
    assert largest.num_elements == 4000 * DIM


def test_a_batch_without_targets_has_the_loss_of_torch() -> None:
    table, queries, targets = _tensors(3)
    assert softmax_loss(queries, table, torch.full_like(targets, -100)).isnan()
    assert softmax_loss(queries, table, targets * 0 - 100, reduction="sum") == 0


def test_bad_input_is_refused() -> None:
    table, queries, targets = _tensors(3)
    with pytest.raises(IdsError, match="softmax_loss: .*target 40 is no row of 'Embedding'"):
        softmax_loss(queries, table, targets * 0 + ROWS)
    with pytest.raises(ConfigError, match="reduction='max'"):
        softmax_loss(queries, table, targets, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="k=41 must be 1 to 40"):
        top_k(queries, table, ROWS + 1)
    with pytest.raises(ConfigError, match="keys .*2, 8.* must be .queries, dim."):
        in_batch_loss(queries, queries[:2])


@pytest.mark.parametrize("name", ["uniform", "log_uniform", "counts"])
def test_rows_are_drawn_as_often_as_their_probabilities_say(name: str) -> None:
    counts = torch.arange(10.0)
    sampler = SAMPLERS.get(name) or by_frequency(counts)
    draws = sampler.draw(200_000, 10, torch.Generator().manual_seed(1))
    shares = draws.bincount(minlength=10) / len(draws)
    probabilities = sampler.log_probabilities(torch.arange(10), 10).exp()
    assert float(probabilities.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(shares, probabilities, atol=5e-3, rtol=0)
    if name == "counts":
        assert not (draws == 0).any()


def test_negatives_depend_on_seed_and_step_alone() -> None:
    table, queries, targets = _tensors(3)

    def loss(**options: int) -> Tensor:
        torch.rand(1)
        return sampled_softmax_loss(
            queries, table, targets, num_negatives=5, **({"step": 1, "seed": 0} | options)
        )

    assert loss() == loss()
    assert len({float(loss()), float(loss(step=2)), float(loss(seed=1))}) == 3


def test_sampled_losses_come_close_to_the_full_one() -> None:
    table, queries, targets = _tensors(64)
    full = float(softmax_loss(queries, table, targets))
    sampler = by_frequency(torch.rand(ROWS) + 0.2)
    for log_q, is_close in [(True, True), (False, False)]:
        sampled = sampled_softmax_loss(
            queries, table, targets, num_negatives=20_000, step=0, sampler=sampler, log_q=log_q
        )
        assert (abs(float(sampled) - full) < 0.1) == is_close


def test_frequencies_follow_batches_and_stay_in_evaluation() -> None:
    frequency = SampledFrequency(100)
    for step in range(200):
        frequency(torch.tensor([1, 1, 2 if step % 4 == 0 else 3]))
    before = frequency.eval()(torch.tensor([1, 2])).exp()
    assert before.tolist() == pytest.approx([2.0, 0.25], rel=0.1)
    assert torch.equal(frequency(torch.tensor([1, 2])).exp(), before)
