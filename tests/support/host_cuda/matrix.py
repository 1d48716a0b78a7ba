"""What a first job on a cluster would be, in many forms: each is fitted on CPUs and on CUDA devices
in host memory."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.optim import RowWiseAdagrad

from lightning_distrec import (
    PipelineParallelStrategy,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
from tests.support import mapped_models
from tests.support.chain_models import Sequence
from tests.support.click_model import ClickModel, EvaluatedModel, SequenceModel, make_batch, seeded
from tests.support.dense_models import BareAndTied, loader
from tests.support.embedding_models import whole_state
from tests.support.host_cuda.runs import DeviceRanks
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

STEPS = 8
STRATEGIES: dict[str, Any] = {
    "tables": TorchRecShardedStrategy,
    "ddp": TunedDDPStrategy,
    "fsdp": TunedFSDPStrategy,
    "pipeline": PipelineParallelStrategy,
}


class SequencesEvaluated(EvaluatedModel):
    """The same over an EmbeddingCollection."""

    _build = SequenceModel._build
    forward = SequenceModel.forward


class Weighted(EvaluatedModel):
    """A bag's ids have weights."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, weighted=True)


class Embeddings(EvaluatedModel):
    """An nn.Embedding and an nn.EmbeddingBag, whose ids are computed in the step."""

    def _build(self) -> None:
        self.ebc, self.bags = nn.Embedding(60, 16), nn.EmbeddingBag(60, 8, mode="mean")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = (batch["single"] * 7 + 1) % 60
        return self.mlp(torch.cat([self.ebc(ids).flatten(1), self.bags(ids)], 1)).squeeze(-1)


@dataclass(frozen=True)
class Case:
    """A fit: what it trains by which optimizer, options of the strategy and of the Trainer."""

    model: Any = EvaluatedModel
    optimizer: Any = torch.optim.Adagrad
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: str = "tables"
    resumes: bool = False
    """Whether a second fit continues a checkpoint of the first one."""
    on_cpu: dict[str, Any] = field(default_factory=dict)
    """What is otherwise where it is fitted on CPUs, with the same numbers."""
    tolerance: float = 1e-6


def _on_host(kernel: str, **changes: Any) -> Case:
    """Return a case whose rows are on the host, which on a CPU they are anyway."""
    options = changes.pop("options", {})
    tables = {"*": {"compute_kernels": [kernel]}}
    return Case(options=options | {"tables": tables}, on_cpu={"options": options}, **changes)


def _offloaded(**changes: Any) -> Case:
    """Return a case whose parameters, gradients and optimizer state are on the host."""
    return Case(
        BareAndTied, options={"min_num_parameters": 20, "offload": True}, strategy="fsdp", **changes
    )


ADAM, SGD = torch.optim.Adam, torch.optim.SGD
DYNAMIC = {"ids": "dynamic", "rows": 24, "buckets": 6}
SERIES = {"every": 2, "full_every": 100, "keep": 10}
MIXED = {
    "wide": {"sharding_types": ["row_wise"]},
    "narrow": {"sharding_types": ["column_wise"], "min_partition": 4},
    "shared": {"sharding_types": ["data_parallel"]},
}
CASES: dict[str, Case] = {
    "bags, Adagrad": Case(),
    "bags, row-wise Adagrad": Case(optimizer=RowWiseAdagrad),
    "bags, Adam": Case(optimizer=ADAM),
    "bags, table-row-wise": Case(options={"sharding_types": ["table_row_wise"]}),
    "bags, replicated": Case(options={"sharding_types": ["data_parallel"]}),
    "bags, replicated and by columns": Case(options={"tables": MIXED}),
    "bags, weighted": Case(model=Weighted),
    "sequences, Adagrad": Case(model=SequencesEvaluated),
    "sequences, each id sent once": Case(
        SequencesEvaluated,
        options={"tables": {"*": {"pooling_factor": 50}}, "sharding_types": ["table_wise"]},
    ),
    "nn.Embedding, Adam": Case(Embeddings, ADAM, {"convert_embeddings": "all"}),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed"}),
    "16-mixed": Case(
        optimizer=SGD,
        trainer={"precision": "16-mixed"},
        on_cpu={"trainer": {"precision": "32"}},
        tolerance=1e-3,
    ),
    "touched rows, Adam": Case(
        optimizer=ADAM,
        options={"embedding_update": "fused_lazy"},
        on_cpu={"options": {}},
        tolerance=0.1,
    ),
    "sparse updates, clipped": Case(
        options={"embedding_update": "sparse"}, trainer={"gradient_clip_val": 0.1}
    ),
    "accumulated": Case(trainer={"accumulate_grad_batches": 2}),
    "sharded dense layers": Case(options={"dense": "fsdp"}),
    "16-bit exchanges": Case(
        optimizer=SGD,
        options={"quantized_comms": {"forward": "fp16", "backward": "bf16"}},
        tolerance=1e-4,
    ),
    "rows on the host": _on_host("fused_uvm"),
    "cached rows, resumed": _on_host("fused_uvm_caching", resumes=True),
    "resumed, Adam, one file": Case(
        optimizer=ADAM, options={"checkpoint": {"distributed": False}}, resumes=True
    ),
    "saved in the background": Case(
        options={"checkpoint": {"distributed": True, "async_save": True}}, resumes=True
    ),
    "saved incrementally": Case(
        options={"checkpoint": {"distributed": True, "incremental": SERIES}}, resumes=True
    ),
    "HashZch": Case(mapped_models.ManagedModel, options={"prefetch": {"depth": 3}}),
    "MCH": Case(mapped_models.MchModel),
    "dynamic ids": Case(
        mapped_models.DynamicModel,
        options={
            "convert_embeddings": "all",
            "tables": {"users": DYNAMIC, "goods": DYNAMIC, "first": DYNAMIC},
        },
        resumes=True,
    ),
    "ddp_tuned": Case(BareAndTied, strategy="ddp", resumes=True),
    "ddp_tuned, 16-bit gradients": Case(
        BareAndTied, options={"comm_dtype": "bf16"}, strategy="ddp"
    ),
    "fsdp_tuned": Case(
        BareAndTied, options={"min_num_parameters": 20}, strategy="fsdp", resumes=True
    ),
    "fsdp_tuned, offloaded, clipped and accumulated": _offloaded(
        trainer={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    ),
    "pipeline_parallel": Case(Sequence, options={"microbatches": 2}, strategy="pipeline"),
    "pipeline_parallel, 1f1b": Case(Sequence, options={"schedule": "1f1b"}, strategy="pipeline"),
}


def assert_fits_as_on_cpus(devices: DeviceRanks, case: Case, folder: Path) -> None:
    """Fit a case by warm ranks of CPUs and of devices, and compare what they have seen."""
    on_cpus = run_on_warm_ranks(fit, 2, replace(case, **case.on_cpu), "cpu", folder / "cpu")
    on_devices = devices.call(fit, case, "gpu", folder / "gpu")
    for expected, seen in zip(on_cpus, on_devices, strict=True):
        assert not seen.error, seen.error
        assert seen.hazards == []
        assert len(seen.result["losses"]) >= 6
        for part, values in expected.items():
            torch.testing.assert_close(
                seen.result[part],
                values,
                atol=case.tolerance,
                rtol=case.tolerance,
                msg=lambda text, part=part: f"{part}: {text}",
            )


def fit(case: Case, accelerator: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Collective. Return losses, what was logged, and the weights of a case's fit, or of both, on
    the host."""
    num_ranks = rank_and_num_ranks()[1]
    backend = "nccl" if accelerator == "gpu" else "gloo"

    def fit_until(step: int, path: Path | None) -> tuple[Any, Any]:
        strategy = STRATEGIES[case.strategy](
            process_group_backend=backend, **_with_folder(case.options, folder)
        )
        settings = (
            DEFAULTS
            | {"accelerator": accelerator, "devices": num_ranks, "max_steps": step}
            | case.trainer
        )
        trainer = pl.Trainer(strategy=strategy, default_root_dir=folder, **(settings | changes))
        module = module_of(case)
        batches = batches_of(case)
        validation = (
            batches
            if hasattr(type(module), "validation_step") and case.model is not Sequence
            else None
        )
        trainer.fit(module, batches, validation, ckpt_path=path)
        return trainer, module

    losses: list[float] = []
    if case.resumes:
        trainer, module = fit_until(STEPS // 2, None)
        trainer.save_checkpoint(folder / "saved.ckpt")
        losses += module.losses
    trainer, module = fit_until(STEPS, folder / "saved.ckpt" if case.resumes else None)
    return {
        "losses": losses + module.losses,
        "logged": {key: float(value) for key, value in sorted(trainer.callback_metrics.items())},
        "weights": _weights(trainer, module, case),
    }


def _with_folder(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    if "incremental" not in options.get("checkpoint", {}):
        return options
    checkpoint = options["checkpoint"]
    series = checkpoint["incremental"] | {"dirpath": str(folder / "series")}
    return options | {"checkpoint": checkpoint | {"incremental": series}}


def module_of(case: Case) -> Any:
    if issubclass(case.model, mapped_models.ManagedModel):
        return seeded(case.model)
    if case.strategy != "tables":
        pl.seed_everything(5)
        return case.model()
    return seeded(case.model, case.optimizer, {"lr": 0.02})


def batches_of(case: Case) -> Any:
    rank, num_ranks = rank_and_num_ranks()
    if case.strategy == "pipeline":
        return None  # the model's own
    if case.strategy != "tables":
        return loader(rank, num_ranks)
    if issubclass(case.model, mapped_models.ManagedModel):
        return mapped_models.loader(0, STEPS, rank, num_ranks, num_ranks)
    batches = [make_batch(1000 * step + rank) for step in range(STEPS)]
    for step, batch in enumerate(batches):
        draw = torch.Generator().manual_seed(step)
        batch["single"] = torch.randint(0, 60, (len(batch["label"]), 3), generator=draw)
    return DataLoader(batches, batch_size=None)


def _weights(trainer: pl.Trainer, module: Any, case: Case) -> dict[str, Tensor]:
    strategy: Any = trainer.strategy
    if case.strategy != "tables":
        state = strategy.full_state_dict()
    else:
        state = module.final_state if isinstance(module, ClickModel) else whole_state(module)
    return {
        key: value.detach().cpu().float()
        for key, value in state.items()
        if value.is_floating_point()
    }
