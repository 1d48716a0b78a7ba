"""Which strategy is advised, and why; what is assumed is noted, and the module stays as it was."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec.advice.parameter_sizes import Job, MeasuredStep, measure_step
from lightning_distrec.advice.strategy_advice import Advice, advise
from tests.support.advised_models import Advised, Chained, Wide, WithBags, WithTable

BOTH = "torchrec_sharded with dense: fsdp"


def job_of(trainer: dict[str, Any] | None = None, **settings: Any) -> Job:
    """Return a job of 4 ranks of 1 GB. trainer: settings that its Trainer has."""
    defaults = {
        "callbacks": [],
        "precision": "32-true",
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
    }
    ranks = {"num_ranks": 4, "num_nodes": 1, "memory_bytes": 10**9} | settings
    return Job(trainer=SimpleNamespace(**defaults | (trainer or {})), **ranks)


def advise_on(module: Any, step: MeasuredStep | None = None, **settings: Any) -> Advice:
    return advise(module, job_of(**settings), step)


def test_a_module_that_fits_trains_by_ddp() -> None:
    advice = advise_on(Wide())
    assert advice.strategy == "ddp_tuned"
    assert (
        advice.reason
        == "the replicated module needs 49.2 MiB, which is within 80% of a rank's 953.7 MiB"
    )
    assert list(advice.needs) == ["ddp_tuned", "fsdp_tuned", "pipeline_parallel"]


def test_a_module_that_does_not_fit_is_sharded_by_fsdp() -> None:
    advice = advise_on(Wide(), memory_bytes=60 * 10**6)
    assert advice.strategy == "fsdp_tuned"
    assert advice.reason == (
        "the replicated module needs 49.2 MiB, more than 80% of a rank's 57.2 MiB; sharded over 4 "
        "ranks it needs 20.9 MiB"
    )
    # A quarter of parameters, gradients and two states, and the layer in no block and one block
    # gathered with their gradients.
    block, out = 4 * 1024 * 1024, 4 * 77 * 1024
    sharded = advice.needs["fsdp_tuned"]
    assert sharded.model_bytes == 3 * block + out
    assert sharded.gathered_bytes == 2 * (block + out)
    needed = advise_on(Wide(), memory_bytes=10**6)
    assert needed.reason.endswith("which is too much as well: use more ranks")


def test_tables_that_are_most_of_the_module_are_sharded_by_torchrec() -> None:
    for module in (WithTable(), WithBags()):
        advice = advise_on(module)
        assert advice.strategy == "torchrec_sharded"
        assert "table" in advice.reason
    assert advice.reason == (
        "2 tables, including bags.many of 120,000 rows, take 100% of the memory of parameters and "
        "optimizer state, which is sharded over the ranks"
    )
    too_much = advise_on(WithTable(), memory_bytes=10**6)
    assert too_much.strategy == "torchrec_sharded"
    assert too_much.reason.endswith(": use more ranks; `lightning-distrec plan` says how many")


def test_layers_other_than_tables_are_sharded_where_they_do_not_fit() -> None:
    module = WithTable()
    module.wide = nn.Linear(1000, 1000)
    assert advise_on(module).strategy == "torchrec_sharded"
    advice = advise_on(module, memory_bytes=25 * 10**6)
    assert advice.strategy == BOTH
    assert "; with the other layers replicated, a rank needs " in advice.reason
    assert advice.needs["torchrec_sharded"].total > 20 * 10**6 >= advice.needs[BOTH].total


def test_the_module_is_left_as_it_was() -> None:
    module = WithTable()
    parameters = list(module.parameters())
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    advise_on(module)
    drawn_number = torch.rand(1)
    torch.manual_seed(3)
    assert drawn_number == torch.rand(1)
    for parameter, original in zip(module.parameters(), parameters, strict=True):
        assert parameter is original
    for name, value in module.state_dict().items():
        assert torch.equal(value, initial[name])
    bags = WithBags()
    advise_on(bags)
    assert bags.bags is None, "configure_model was called on the module itself"


def test_a_gradient_that_is_kept_because_of_clipping_counts() -> None:
    fused = advise_on(WithBags("RowWiseAdagrad"))
    clipped = advise_on(WithBags("RowWiseAdagrad"), trainer={"gradient_clip_val": 1.0})
    difference = clipped.needs["torchrec_sharded"].total - fused.needs["torchrec_sharded"].total
    assert difference == (120_000 * 16 + 110_000 * 8) * 4 / 4


class TwoLayers(Advised):
    """Keeps, for backward, its input, and the mask and the result of relu, which are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(self.first(batch).relu())


def test_activations_are_what_a_forward_keeps_parameters_aside() -> None:
    module = TwoLayers()
    step = measure_step(module, torch.ones(10, 8), "32-true")
    assert step.activation_bytes == 4 * 10 * (8 + 32 + 4)  # the last: what is squared in the loss
    assert all(parameter.grad is None for parameter in module.parameters())
    advice = advise_on(module, step)
    assert advice.needs["ddp_tuned"].activation_bytes == step.activation_bytes
    assert advice.needs["fsdp_tuned"].activation_bytes == step.activation_bytes
    without = advise_on(module)
    assert without.needs["ddp_tuned"].activation_bytes == 0
    assert "activations are left out: no batch was run" in without.notes


class ByHand(TwoLayers):
    """Steps its optimizer itself: here without a Trainer, as nothing must."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()
        torch.optim.SGD(self.parameters(), 1.0).step()


def test_why_activations_are_left_out() -> None:
    failed = measure_step(TwoLayers(), torch.ones(10, 9), "32-true")
    assert failed.activation_bytes is None
    assert failed.problem.startswith("training_step failed on a batch without a Trainer (Run")
    module = ByHand()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    step = measure_step(module, torch.ones(10, 8), "32-true")
    for name, value in module.state_dict().items():
        assert torch.equal(value, initial[name])
    assert step.problem.startswith("with automatic_optimization=False, training_step steps optim")
    tight = advise_on(module, step, memory_bytes=int(advise_on(module).needs["ddp_tuned"].total))
    assert tight.reason.endswith("name classes of layers, as in wrap=['Linear']"), tight.reason
    assert f"activations are left out: {step.problem}" in tight.notes


def test_stages_are_advised_where_only_they_fit() -> None:
    stages = advise_on(Chained()).needs["pipeline_parallel"]
    # The first stage of four has one block and the layer before; the last one the layer after.
    assert stages.model_bytes == 4 * 4 * (512 * 512 + 512)
    advice = advise_on(Chained(), memory_bytes=int(1.3 * stages.total))
    assert advice.strategy == "pipeline_parallel", advice.reason
    assert "; the fullest stage needs " in advice.reason
