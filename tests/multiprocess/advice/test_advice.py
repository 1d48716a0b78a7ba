"""What is reckoned of a strategy's memory and exchanges is what its ranks hold and send."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distrec import Communication, PipelineParallelStrategy, TorchRecShardedStrategy
from lightning_distrec.advice.strategy_advice import Advice, ChosenOptions, advise, read_options
from lightning_distrec.callbacks.communication import OTHER, STAGE_GRADIENTS, STAGE_OUTPUTS
from lightning_distrec.sharding.weights.shard_access import without_guards
from lightning_distrec.strategies.estimates.estimate import Estimate
from lightning_distrec.strategies.estimates.module_sizes import Job
from lightning_distrec.strategies.estimates.step_profile import profile_step
from lightning_distrec.strategies.stages.absent_tensors import AbsentTensor
from tests.support.advised_models import BATCH, KINDS, batches
from tests.support.embedding_models import loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

SETTINGS = SimpleNamespace(callbacks=[], accumulate_grad_batches=1, gradient_clip_val=None)
NUM_RANKS, STEPS = 2, 3
KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")
"""What PowerSGD keeps."""
PERSISTENT = ("parameters", "gradients", "optimizer state")


def _bytes(tensors: Any) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum((t.coalesce().values() if t.is_sparse else t).numel() * t.itemsize for t in local)


class CountsBytes(pl.Callback):
    """Counts what this rank holds after a step, before the gradients are dropped."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    @without_guards  # shards are plain tensors
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        parameters = [p for p in pl_module.parameters() if not isinstance(p, AbsentTensor)]
        states = [
            v
            for o in trainer.optimizers
            for s in o.state.values()
            for v in s.values()
            if isinstance(v, Tensor)
        ]
        tables = getattr(trainer.strategy, "run_tables", None)
        compression = getattr(getattr(trainer.strategy, "run", None), "compression", None)
        compression_states = (
            [] if compression is None else [getattr(compression._state, state) for state in KEPT]
        )
        for kernel, _ in tables.shards.kernels if tables else []:
            states += [v for table_states in kernel.split_optimizer_states() for v in table_states]
        self.held = {
            "parameters": _bytes([*parameters, *pl_module.buffers()]),
            "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer state": _bytes(state for state in states if state.dim()),
        }
        if compression_states:
            self.held["exchange"] = _bytes(
                tensor for state in compression_states for tensor in state.values()
            )


def _run(
    kind: str, optimizer: str, strategy: str, options: dict[str, Any]
) -> tuple[dict[str, int], dict[str, float]]:
    """Return what this rank holds, and what it sends in a step."""
    pl.seed_everything(5)
    rank, num_ranks = rank_and_num_ranks()
    counts, sent = CountsBytes(), Communication()
    made: Any = (
        StrategyRegistry.get(strategy)
        if not options
        else type(StrategyRegistry.get(strategy))(**options)
    )
    trainer = pl.Trainer(strategy=made, devices=num_ranks, callbacks=[counts, sent], **DEFAULTS)
    with_one_batch = options.get("stages", num_ranks) if strategy == "pipeline_parallel" else 1
    dealt = rank // with_one_batch
    trainer.fit(KINDS[kind](optimizer), loader(batches(dealt, STEPS)))
    return counts.held, sent.bytes_per_step


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    f"{kind} {optimizer} {strategy}": (kind, optimizer, strategy, {})
    for kind, optimizer, strategy in (
        *(
            ("Wide", kind, "ddp_tuned")
            for kind in ("SGD", "AdamW", "amsgrad", "Adagrad", "Adafactor", "RowWiseAdagrad")
        ),
        *(("Wide", kind, "fsdp_tuned") for kind in ("momentum", "AdamW", "RMSprop")),
        *(
            ("WithTable", "AdamW", strategy)
            for strategy in ("ddp_tuned", "fsdp_tuned", "torchrec_sharded")
        ),
        *(("WithTable", kind, "torchrec_sharded") for kind in ("SGD", "Adagrad", "RowWiseAdagrad")),
        *(
            ("WithBags", kind, "torchrec_sharded")
            for kind in ("Adagrad", "RowWiseAdagrad", "AdamW")
        ),
    )
}
BY_TABLE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "WithBags by table": (
        "WithBags",
        "Adagrad",
        "torchrec_sharded",
        {"sharding_types": ["table_wise"]},
    ),
}


WITH_OPTIONS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    f"{strategy}: {options}": (kind, "AdamW", strategy, options)
    for kind, strategy, options in (
        ("Chained", "ddp_tuned", {"comm_dtype": "bf16"}),
        ("Chained", "ddp_tuned", {"powersgd": {"matrix_rank": 4, "start_step": 0}}),
        ("Wide", "fsdp_tuned", {"param_dtype": "bf16", "min_num_parameters": 1000}),
        (
            "Wide",
            "fsdp_tuned",
            {"param_dtype": "bf16", "reduce_dtype": "bf16", "reshard_after_forward": True},
        ),
        ("Wide", "fsdp_tuned", {"reshard_after_forward": False, "wrap": ["blocks.0", "blocks.2"]}),
        ("Wide", "fsdp_tuned", {"reduce_dtype": "bf16"}),
        (
            "Chained",
            "pipeline_parallel",
            {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "chain": "blocks"},
        ),
    )
}
OF_FOUR: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    f"{strategy}: {options}": (kind, "AdamW", strategy, options)
    for kind, strategy, options in (
        ("Wide", "fsdp_tuned", {"replicas": 2}),
        ("Wide", "fsdp_tuned", {"replicas": 2, "param_dtype": "bf16"}),
        ("Chained", "pipeline_parallel", {"stages": 2, "schedule": "1f1b"}),
        ("Chained", "ddp_tuned", {"powersgd": {"matrix_rank": 2, "start_step": 0}}),
    )
}


def _chosen(strategy: str, options: dict[str, Any]) -> ChosenOptions:
    """Return options as those of a YAML."""
    kind = f"lightning_distrec.{type(StrategyRegistry.get(strategy)).__name__}"
    return read_options(SimpleNamespace(class_path=kind, init_args=SimpleNamespace(**options)))


def _advice(
    kind: str,
    optimizer: str,
    options: dict[str, Any] | None = None,
    chosen_options: ChosenOptions | None = None,
    **job: Any,
) -> Advice:
    module = KINDS[kind](optimizer)
    batch = batches(0, 1)[0]
    module.configure_model()
    profile = profile_step(module, batch, BATCH, "32-true")
    expected = {"num_ranks": NUM_RANKS, "num_nodes": 1, "memory_bytes": 10**9} | job
    settings = TorchRecShardedStrategy(**(options or {})).table_settings
    return advise(module, Job(**expected), SETTINGS, "cpu", profile, settings, chosen_options)


def _row(advice: Advice, strategy: str) -> Estimate:
    return next(row for row in advice.estimates if row.strategy == strategy)


@pytest.fixture(scope="module")
def counted() -> list[dict[str, Any]]:
    """Rank -> case -> what it holds and what it sends."""
    cases = CASES | BY_TABLE | WITH_OPTIONS
    return run_each_on_ranks({name: (_run, *case) for name, case in cases.items()}, NUM_RANKS, 150)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_is_estimated(case: str, counted: list[dict[str, Any]]) -> None:
    kind, optimizer, strategy, _ = CASES[case]
    memory = _row(_advice(kind, optimizer), strategy).memory
    for part in PERSISTENT:
        held = sum(rank_results[case][0][part] for rank_results in counted) / NUM_RANKS
        assert memory[part] == pytest.approx(held, rel=0.01, abs=7000), part


def _sent(case: str, counted: list[dict[str, Any]]) -> dict[str, float]:
    """Return what the rank that sends the most sends in a step, by kind."""
    return dict(
        max(
            (rank_results[case][1] for rank_results in counted), key=lambda sent: sum(sent.values())
        )
    )


@pytest.mark.parametrize("case", CASES | BY_TABLE)
def test_a_rank_sends_what_is_estimated(case: str, counted: list[dict[str, Any]]) -> None:
    kind, optimizer, strategy, options = (CASES | BY_TABLE)[case]
    sent = _sent(case, counted)
    del sent[OTHER]  # what ranks agree on is not estimated
    assert _row(_advice(kind, optimizer, options), strategy).sent_total == pytest.approx(
        sum(sent.values()), rel=0.1, abs=100
    )


def _check(case: tuple[str, str, str, dict[str, Any]], per_rank_results: list[Any]) -> None:
    """Check memory within 1 %, and what is sent within 10 %, on the ranks that hold and send the
    most."""
    kind, optimizer, strategy, options = case
    row = _row(
        _advice(kind, optimizer, None, _chosen(strategy, options), num_ranks=len(per_rank_results)),
        strategy,
    )
    held = max((held for held, _ in per_rank_results), key=lambda held: sum(held.values()))
    assert {part: row.memory[part] for part in held} == pytest.approx(held, rel=0.01, abs=7000)
    sent = max((sent for _, sent in per_rank_results), key=lambda sent: sum(sent.values()))
    assert row.sent is not None
    assert row.sent == pytest.approx({kind: sent[kind] for kind in row.sent}, rel=0.1, abs=600)
    assert row.sent_total == pytest.approx(sum(sent.values()) - sent[OTHER], rel=0.1, abs=600)


@pytest.mark.parametrize("case", WITH_OPTIONS)
def test_options_change_what_a_rank_holds_and_sends(
    case: str, counted: list[dict[str, Any]]
) -> None:
    _check(WITH_OPTIONS[case], [rank_results[case] for rank_results in counted])


@pytest.mark.slow
def test_options_change_what_four_ranks_hold_and_send() -> None:
    actual = run_each_on_ranks({name: (_run, *case) for name, case in OF_FOUR.items()}, 4)
    for name, case in OF_FOUR.items():
        print(name)
        _check(case, [rank_results[name] for rank_results in actual])


class CountsKept(pl.Callback):
    """Counts the most that autograd keeps at once in a step."""

    def __init__(self) -> None:
        self.live: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        parameters = [p for p in pl_module.parameters() if not isinstance(p, AbsentTensor)]
        parameter_storages = {p.untyped_storage().data_ptr() for p in parameters}
        self.live.clear()
        self.most = 0
        counts = self

        class Kept:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
                counts.live[self.key] += self.key not in parameter_storages
                counts.sizes[self.key] = tensor.untyped_storage().nbytes()
                held = sum(counts.sizes[key] for key, times in counts.live.items() if times)
                counts.most = max(counts.most, held)

            def __del__(self) -> None:
                counts.live[self.key] -= self.key not in parameter_storages

        self.hooks = torch.autograd.graph.saved_tensors_hooks(Kept, lambda saved: saved.tensor)
        self.hooks.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.hooks.__exit__(None, None, None)


def _kept(options: dict[str, Any]) -> int:
    counts = CountsKept()
    strategy = PipelineParallelStrategy(**options)
    trainer = pl.Trainer(strategy=strategy, devices=NUM_RANKS, callbacks=[counts], **DEFAULTS)
    trainer.fit(KINDS["Chained"]("AdamW"), loader(batches(0, STEPS)))
    return counts.most


STAGES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {"schedule": "1f1b", "microbatches": 8},
    "interleaved": {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "chain": "blocks"},
}


@pytest.mark.slow
def test_the_fullest_stage_keeps_the_activations_that_are_estimated() -> None:
    per_rank_results = run_each_on_ranks(
        {case: (_kept, options) for case, options in STAGES.items()}, NUM_RANKS
    )
    for case, options in STAGES.items():
        advice = _advice("Chained", "AdamW", None, _chosen("pipeline_parallel", options))
        estimated = _row(advice, "pipeline_parallel").memory["activations"]
        # it has the most weights
        assert estimated == pytest.approx(per_rank_results[-1][case], rel=0.1), case


def test_the_fullest_stage_holds_and_sends_what_is_estimated() -> None:
    row = _row(_advice("Chained", "AdamW"), "pipeline_parallel")
    ranks = run_on_warm_ranks(_run, NUM_RANKS, "Chained", "AdamW", "pipeline_parallel", {})
    held = max((held for held, _ in ranks), key=lambda held: sum(held.values()))
    assert {part: row.memory[part] for part in PERSISTENT} == pytest.approx(held, rel=0.01)
    sent = max((sent for _, sent in ranks), key=lambda sent: sum(sent.values()))
    assert row.sent is not None
    for kind in (STAGE_OUTPUTS, STAGE_GRADIENTS):
        assert row.sent[kind] == sent[kind]
