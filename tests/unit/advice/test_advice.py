"""Which strategy is advised, and why; what is assumed is noted, and the module stays as it was."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_distrec.advice.strategy_advice import (
    Advice,
    ChosenOptions,
    advise,
    as_json,
    print_advice,
)
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.strategies.estimates.dense_options import DenseOptions, watched_layers
from lightning_distrec.strategies.estimates.estimate import (
    Estimate,
    TablesShare,
    estimate_strategies,
)
from lightning_distrec.strategies.estimates.module_sizes import Job, measure_module
from lightning_distrec.strategies.estimates.step_profile import StepProfile, profile_step
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from tests.benchmarks.decision_tree import PICTURE, drawn
from tests.support.advised_models import Advised, Chained, Wide, WithBags, WithTable, batches

SETTINGS = SimpleNamespace(callbacks=[], accumulate_grad_batches=1, gradient_clip_val=None)


def advise_on(
    module: Any, profile: StepProfile | None = None, settings: Any = SETTINGS, **job: Any
) -> Advice:
    settings_of_job = {"num_ranks": 4, "num_nodes": 1, "memory_bytes": 10**9} | job
    return advise(module, Job(**settings_of_job), settings, "cpu", profile)


def row(advice: Advice, strategy: str) -> Estimate:
    return next(row for row in advice.estimates if row.strategy == strategy)


def test_a_module_that_fits_trains_by_ddp() -> None:
    advice = advise_on(Wide())
    assert advice.strategy == "ddp_tuned"
    assert advice.reason == (
        "the replicated module needs 49.2 MiB, which is within 80% of a rank's 953.7 MiB"
    )
    assert [row.strategy for row in advice.estimates] == [
        "ddp_tuned",
        "fsdp_tuned",
        "pipeline_parallel",
    ]


def test_a_module_that_does_not_fit_is_sharded_by_fsdp() -> None:
    advice = advise_on(Wide(), memory_bytes=60 * 10**6)
    assert advice.strategy == "fsdp_tuned"
    assert advice.reason == (
        "the replicated module needs 49.2 MiB, more than 80% of a rank's 57.2 MiB; sharded over 4 "
        "ranks it needs 20.9 "
        "MiB"
    )
    assert advise_on(Wide(), memory_bytes=10**6).reason.endswith(
        "which is too much as well: use more ranks"
    )


def test_tables_that_are_most_of_the_module_are_sharded_by_torchrec() -> None:
    for module in (WithTable(), WithBags()):
        advice = advise_on(module)
        assert advice.strategy == "torchrec_sharded"
        assert "table" in advice.reason
    assert advice.reason == (
        "2 tables, including bags.many of 120,000 rows, take 100% of the memory of parameters and "
        "optimizer state, "
        "which is sharded over the ranks"
    )
    assert advise_on(WithTable(), memory_bytes=10**6).reason.startswith(
        "table users of 120,000 rows takes 100% of the memory of parameters and optimizer state, "
        "which is sharded over "
        "the ranks, although the tables do not fit: table 'users' fits on no rank"
    )


def test_layers_other_than_tables_are_sharded_where_they_do_not_fit() -> None:
    module = WithTable()
    module.wide = nn.Linear(1000, 1000)
    assert advise_on(module).strategy == "torchrec_sharded"
    advice = advise_on(module, memory_bytes=25 * 10**6)
    assert advice.strategy == "torchrec_sharded with dense: fsdp"
    assert "; with the other layers replicated, a rank needs " in advice.reason
    assert row(advice, "torchrec_sharded").total > 20 * 10**6 >= row(advice, advice.strategy).total


def test_tables_that_are_less_than_half_of_the_module_do_not_decide() -> None:
    module = WithTable()
    module.wide = nn.Linear(2000, 2000)
    advice = advise_on(module)
    assert advice.strategy == "ddp_tuned"
    assert row(advice, "torchrec_sharded").total < row(advice, "ddp_tuned").total


class Unheard(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


class HasItsOwn(Wide):
    """Is updated by it."""

    def configure_optimizers(self) -> Any:
        return {"optimizer": Unheard(self.parameters())}


def test_an_unknown_optimizer_is_assumed_to_be_adam() -> None:
    advice = advise_on(HasItsOwn())
    assert (
        "the state of Unheard is unknown: 2 tensors are assumed for each parameter" in advice.notes
    )
    assert row(advice, "ddp_tuned").memory == row(advise_on(Wide("AdamW")), "ddp_tuned").memory


class AsksTheTrainer(Advised):
    """Makes its optimizer of what only a Trainer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(100, 100)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


def test_optimizers_that_need_a_trainer_are_assumed_to_be_adam() -> None:
    advice = advise_on(AsksTheTrainer())
    assert row(advice, "ddp_tuned").memory["optimizer state"] == 2 * 10100 * 4
    assert any(
        note.startswith("configure_optimizers failed on a copy of the module")
        for note in advice.notes
    )


def test_a_module_that_cannot_be_copied_is_only_looked_at() -> None:
    module = Wide("SGD")
    module.lock = threading.Lock()
    module.configure_optimizers = None  # calling it would fail
    advice = advise_on(module)
    assert row(advice, "ddp_tuned").memory == row(advise_on(Wide("AdamW")), "ddp_tuned").memory
    assert advice.notes[0].startswith(
        "the module cannot be copied and configured without a Trainer (TypeError: cannot"
    )


def test_tables_may_be_sharded_together_with_other_layers() -> None:
    sizes = measure_module(WithTable(), Conversion())
    job = Job(num_ranks=4, num_nodes=1, memory_bytes=10**9)
    tables = 120_000 * 16 // 4
    planned = TablesShare(memory={"parameters": 4.0 * tables}, sent={"rows": 512.0})
    *_, replicated, hybrid = estimate_strategies(sizes, job, StepProfile(batch_size=8), planned)
    assert (replicated.strategy, hybrid.strategy) == (
        "torchrec_sharded",
        "torchrec_sharded with dense: fsdp",
    )
    layers = 16 * 256 + 256
    assert replicated.memory["parameters"] == 4 * (tables + layers)
    # a layer of one row cannot be cut in four
    assert hybrid.memory["parameters"] == 4 * (tables + 16 * 64 + 256)
    assert hybrid.sent["rows"] == replicated.sent["rows"]


def test_the_module_is_left_as_it_was() -> None:
    module = WithTable()
    parameters, initial = (
        list(module.parameters()),
        {k: v.clone() for k, v in module.state_dict().items()},
    )
    advise_on(module)
    assert all(
        parameter is original
        for parameter, original in zip(module.parameters(), parameters, strict=True)
    )
    assert all(torch.equal(value, initial[key]) for key, value in module.state_dict().items())
    bags = WithBags()
    advise_on(bags)
    assert bags.bags is None, "configure_model was called on the module itself"


def test_a_module_on_the_meta_device_has_the_same_needs() -> None:
    with torch.device("meta"):
        copied = WithTable()
    assert advise_on(copied).estimates == advise_on(WithTable()).estimates
    assert "meta device" in profile_step(copied, batches(0, 1)[0], 16, "32-true").notes[0]


def test_refusals_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    module = WithTable("SGD")
    module.users.sparse = True
    advice = advise_on(module)
    assert row(advice, "fsdp_tuned").refused.startswith("'users' has sparse gradients")
    assert (
        "the sparse gradient of users.weight is left out of memory, and of what ddp_tuned sends"
        in advice.notes
    )
    print_advice(advice, Console(width=160))
    assert "fsdp_tuned refuses the module: 'users' has sparse gradients" in capsys.readouterr().out
    advice = advise_on(WithTable("Adafactor"))
    assert (
        "Adafactor is not known to give the same numbers on a part"
        in row(advice, "torchrec_sharded").refused
    )
    assert advice.strategy == "ddp_tuned"


def test_a_gradient_that_is_kept_because_of_clipping_counts() -> None:
    fused = advise_on(WithBags("RowWiseAdagrad"))
    clipped = advise_on(
        WithBags("RowWiseAdagrad"),
        settings=SimpleNamespace(**vars(SETTINGS) | {"gradient_clip_val": 1.0}),
    )
    tables = (120_000 * 16 + 110_000 * 8) * 4 / 4
    difference = row(clipped, "torchrec_sharded").total - row(fused, "torchrec_sharded").total
    assert difference == tables


def test_half_precision_halves_what_is_kept_and_tables_stay_as_they_are() -> None:
    half, whole = advise_on(WithTable(), precision="bf16-true"), advise_on(WithTable())
    assert row(half, "ddp_tuned").total == row(whole, "ddp_tuned").total / 2
    tables = 120_000 * 16 * 4 * 4 / 4 + row(whole, "torchrec_sharded").memory["exchange"]
    assert (
        row(half, "torchrec_sharded").total - tables
        == (row(whole, "torchrec_sharded").total - tables) / 2
    )


class TwoLayers(Advised):
    """Keeps, for backward, its input, and the mask and the result of relu, which are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(self.first(batch).relu())


def test_activations_are_what_a_forward_keeps_parameters_aside() -> None:
    module = TwoLayers()
    profile = profile_step(module, torch.ones(10, 8), 10, "32-true")
    # the last: what is squared in the loss
    assert profile.activation_bytes == 4 * 10 * (8 + 32 + 4)
    assert all(parameter.grad is None for parameter in module.parameters())
    memory = row(advise_on(module, profile), "ddp_tuned").memory
    assert memory["activations"] == profile.activation_bytes
    assert "activations" not in row(advise_on(module), "ddp_tuned").memory
    assert "activations are left out: no batch was run" in advise_on(module).notes


def test_a_step_that_fails_without_a_trainer_leaves_activations_out_and_gives_the_reason() -> None:
    profile = profile_step(TwoLayers(), torch.ones(10, 9), 10, "32-true")
    assert profile.activation_bytes is None
    assert profile.notes[0].startswith(
        "activations are left out: training_step failed on a batch without a Trainer (Run"
    )


class ByHand(TwoLayers):
    """Steps its optimizer itself: here without a Trainer, as nothing must."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()
        torch.optim.SGD(self.parameters(), 1.0).step()


def test_no_step_of_manual_optimization_is_run_and_blocks_are_to_be_named() -> None:
    module = ByHand()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    profile = profile_step(module, torch.ones(10, 8), 10, "32-true")
    assert all(torch.equal(value, initial[name]) for name, value in module.state_dict().items())
    needed = row(advise_on(module, profile), "ddp_tuned").total
    assert (
        advise_on(module, profile)
        .notes[0]
        .startswith(
            "activations are left out: with automatic_optimization=False, training_step steps "
            "optimizers itself"
        )
    )
    tight = advise_on(module, profile, memory_bytes=int(needed))
    assert tight.reason.endswith("name classes of layers, as in wrap=['Linear']"), tight.reason
    wrapped = ChosenOptions(dense=DenseOptions(fsdp=FSDPOptions(wrap=["Linear"])))
    job = Job(num_ranks=4, num_nodes=1, memory_bytes=int(needed))
    sharded = advise(module, job, SETTINGS, "cpu", profile, options=wrapped)
    assert row(sharded, "fsdp_tuned").total < needed
    assert "wrap" not in sharded.reason


def test_lookups_are_taken_from_the_batch_size_where_no_step_was_run() -> None:
    advice = advise_on(WithBags(), StepProfile(batch_size=8))
    # The planner gives both tables to one rank, which sends their rows to the three others.
    assert row(advice, "torchrec_sharded").sent["rows"] == 8 * (16 + 16 + 8) * 4 * 3
    assert any(
        note.startswith("8 samples are assumed to look up one id of every feature each")
        for note in advice.notes
    )
    assert row(advise_on(WithBags()), "torchrec_sharded").sent is None


@pytest.mark.parametrize(
    ("memory_bytes", "shown"), [(10**9, "fits"), (55 * 10**6, "tight"), (10**7, "DOES NOT FIT")]
)
def test_what_does_not_fit_is_marked(
    memory_bytes: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = advise_on(Wide(), memory_bytes=memory_bytes)
    print_advice(advice, Console(width=160))
    lines = capsys.readouterr().out.splitlines()
    assert shown in next(line for line in lines if "ddp_tuned " in line)
    assert any(line.startswith(f"strategy: {advice.strategy}, because ") for line in lines)
    assert any(line.startswith("Processes: ") for line in lines) == (advice.job.num_ranks > 1)
    assert as_json(advice)["strategies"][0]["fits"] == (shown == "fits")
    assert as_json(advice)["sockets_per_rank"] == 3 * advice.job.num_ranks


def test_stages_are_estimated_where_a_chain_is_split() -> None:
    module = Chained()
    profile = profile_step(module, batches(0, 1)[0], 16, "32-true")
    advice = advise_on(module, profile)
    stages = row(advice, "pipeline_parallel")
    assert stages.memory["parameters"] == 4 * (512 * 512 + 512)
    assert stages.memory["activations"] < row(advice, "ddp_tuned").memory["activations"]
    # The second of four stages: 384 numbers for each example on, and the gradients of 512 back.
    assert stages.sent == {
        "stage outputs": 16 * 512 * 4,
        "stage gradients": 16 * 512 * 4,
        "dense gradients": 0,
    }
    # 3 / (4 + 3)
    assert "(gpipe): ranks idle 43% of a step where stages take equal times" in advice.notes[-1]
    replicas = advise_on(module, profile, num_ranks=8)
    assert "4 stages (stages: 4)" in replicas.notes[-1]
    assert row(replicas, "pipeline_parallel").sent["dense gradients"] == stages.memory["parameters"]


class NamedInput(Chained):
    """Gives its first block the input by name."""

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.blocks[0](input=self.first((batch % 7).float()))
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return self.last(hidden)


def test_a_first_block_may_get_its_input_by_name() -> None:
    sent = []
    for module in (NamedInput(), Chained()):
        profile = profile_step(module, batches(0, 1)[0], 16, "32-true")
        sent.append(row(advise_on(module, profile), "pipeline_parallel").sent)
    assert sent[0] == sent[1] is not None


def test_stages_are_advised_where_only_they_fit() -> None:
    advice = advise_on(
        Chained(), memory_bytes=int(1.3 * row(advise_on(Chained()), "pipeline_parallel").total)
    )
    assert advice.strategy == "pipeline_parallel", advice.reason
    assert "; the fullest stage needs " in advice.reason


def test_why_there_are_no_stages() -> None:
    module = Wide()
    profile = profile_step(module, batches(0, 1)[0], 16, "32-true")
    assert (
        "what 'blocks.0' returns"
        in row(advise_on(module, profile, num_ranks=2), "pipeline_parallel").refused
    )
    assert "has no chain of blocks" in row(advise_on(WithBags()), "pipeline_parallel").refused
    assert (
        "cannot be split into 5 stages"
        in row(advise_on(module, num_ranks=5), "pipeline_parallel").refused
    )
    assert "use at least 2" in row(advise_on(module, num_ranks=1), "pipeline_parallel").refused


def test_activations_that_do_not_fit_are_to_be_computed_again() -> None:
    advice = advise_on(Wide(), StepProfile(batch_size=8, activation_bytes=10**9), num_ranks=5)
    assert "cannot be split into 5 stages" in row(advice, "pipeline_parallel").refused
    assert advice.strategy == "fsdp_tuned"
    assert advice.reason.endswith(
        "activations are 953.7 MiB of it: compute them again in backward "
        "(activation_checkpointing: true)"
    )


class Deep(Advised):
    """Blocks whose activations outweigh their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        )

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(batch.float())))


def test_activations_are_computed_again_before_weights_are_sharded() -> None:
    module = Deep()
    layers = watched_layers(module, DenseOptions())
    profile = profile_step(module, torch.zeros(2000, 6), 2000, "32-true", layers=layers)
    needed = row(advise_on(module, profile), "ddp_tuned").total
    advice = advise_on(module, profile, memory_bytes=int(needed))
    assert row(advice, "fsdp_tuned").total > 0.8 * needed, "sharding shards no activations"
    assert advice.strategy == "ddp_tuned"
    assert advice.reason.endswith("; with activation_checkpointing: true it needs 10.4 MiB")
    # Weights that are large too: less than all activations has to go.
    wide = Deep()
    wide.last = nn.Linear(64, 100_000)
    large = profile_step(
        wide, torch.zeros(20, 6), 20, "32-true", layers=watched_layers(wide, DenseOptions())
    )
    assert (
        advise_on(wide, large, memory_bytes=int(row(advise_on(wide), "ddp_tuned").total)).strategy
        == "fsdp_tuned"
    )


def test_the_picture_of_the_rules_is_the_drawn_one() -> None:
    assert PICTURE.read_text() == drawn()
