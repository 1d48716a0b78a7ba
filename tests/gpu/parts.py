"""What is checked on a device, part by part, each in a process of its own with one rank: `Found` is
what came of it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.click_model import ClickModel, make_batch, seeded
from tests.support.followed_fits import Deaf, batch_of
from tests.support.trainers import DEFAULTS, make_trainer


@dataclass
class Found:
    """What one part has found."""

    differences: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What was compared -> the largest difference, and its limit."""
    numbers: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What could not be done here, and why."""

    @property
    def wrong(self) -> list[str]:
        """What is over its limit, or no number."""
        return [name for name, (actual, limit) in self.differences.items() if not actual <= limit]


def accelerator(device: str) -> str:
    """Return what the Trainer calls a device."""
    return "gpu" if device == "cuda" else device


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(
        float((actual[name].cpu() - value.cpu()).abs().max()) for name, value in expected.items()
    )


def kernels(device: str, small: bool) -> Found:
    """Compare FBGEMM's forward and backward with torch's own embedding in double precision."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    rows, bags, dim = (100, 50, 8) if small else (100_000, 8192, 128)
    on_gpu = device == "cuda"
    place = (
        (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        if on_gpu
        else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    )
    optimizers = {"SGD": EmbOptimType.EXACT_SGD, "Adagrad": EmbOptimType.EXACT_ADAGRAD}
    actual = Found()
    for mode in ("sum", "mean"):
        for name, kind in optimizers.items():
            torch.manual_seed(1)
            lengths = torch.randint(0, 20, (bags,))
            ids = torch.randint(0, rows, (int(lengths.sum()),))
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
            factors = torch.randn(bags, dim)
            kernel = SplitTableBatchedEmbeddingBagsCodegen(
                [(rows, dim, *place)],
                optimizer=kind,
                learning_rate=0.1,
                eps=1e-8,
                pooling_mode=PoolingMode.SUM if mode == "sum" else PoolingMode.MEAN,
                device=torch.device(device),
            )
            kernel.init_embedding_weights_uniform(-1.0, 1.0)
            weight = kernel.split_embedding_weights()[0]
            plain = torch.nn.EmbeddingBag(
                rows, dim, mode=mode, dtype=torch.double, include_last_offset=True
            )
            plain.weight.data.copy_(weight.cpu())
            inputs = {"lr": 0.1} | ({"eps": 1e-8} if name == "Adagrad" else {})
            optimizer = getattr(torch.optim, name)(plain.parameters(), **inputs)
            out, expected = kernel(ids.to(device), offsets.to(device)), plain(ids, offsets)
            (out * factors.to(device)).sum().backward()
            (expected * factors.double()).sum().backward()
            optimizer.step()
            actual.differences[f"{name}, {mode}, forward"] = (
                float((out.cpu() - expected).abs().max()),
                1e-4,
            )
            final = kernel.split_embedding_weights()[0].cpu()
            actual.differences[f"{name}, {mode}, rows after a step"] = (
                float((final - plain.weight).abs().max()),
                1e-4,
            )
    return actual


def parity(device: str, small: bool) -> Found:
    """Compare one sharded rank with Lightning's own single device, after fits of several kinds."""
    steps = 6 if small else 30
    batches = [make_batch(1000 * step, 8 if small else 256) for step in range(steps)]
    cases: dict[str, tuple[dict[str, Any], float]] = {
        "Adam": ({}, 1e-5),
        "Adam, clipped": ({"gradient_clip_val": 0.05}, 1e-5),
        "Adam, 3 batches accumulated": ({"accumulate_grad_batches": 3}, 1e-5),
        "Adam, 16-mixed": ({"precision": "16-mixed"}, 5e-3),
        "Adam, bf16-mixed": ({"precision": "bf16-mixed"}, 5e-3),
    }
    actual = Found()
    for name, (options, limit) in cases.items():
        states = []
        for trainer in (
            make_trainer({}, accelerator=accelerator(device), **options),
            pl.Trainer(devices=1, **(DEFAULTS | {"accelerator": accelerator(device)} | options)),
        ):
            model = seeded(ClickModel, torch.optim.Adam, {"lr": 0.001})
            trainer.fit(model, DataLoader(batches, batch_size=None))
            states.append(model.final_state)
        actual.differences[name] = (largest_difference(*states), limit)
        print(name, actual.differences[name], flush=True)
    return actual


def races(device: str, small: bool) -> Found:
    """Compare three batches in flight with one, while kernels sleep and losses stay on the
    device."""
    from tests.gpu.prefetched_fits import SlowCopies, fit_both
    from tests.support.followed_fits import JaggedBatches, Sequences

    actual = Found()
    for kind in (Deaf,) if small else (Deaf, SlowCopies, Sequences, JaggedBatches):
        (plain, _), (ahead, count) = fit_both(kind, "Adam", 3, ["row_wise"])
        actual.differences[f"{kind.__name__}, depth 3 against 1"] = (
            largest_difference(ahead, plain),
            1e-5,
        )
        actual.notes.append(f"{kind.__name__}: {count} were sent ahead.")
    return actual


def sanitizer(device: str, small: bool) -> Found:
    """Run a prefetched fit under torch's CUDA sanitizer, which raises where streams are not
    ordered."""
    actual = Found()
    if small:
        actual.notes.append("torch's CUDA sanitizer needs a GPU.")
        return actual
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()
    model = seeded(Deaf, torch.optim.Adam, {"lr": 0.001}, pooling="mean")
    trainer = make_trainer(
        {"prefetch": {"depth": 3}, "sharding_types": ["row_wise"]}, accelerator="gpu"
    )
    trainer.fit(
        model, DataLoader([batch_of(Deaf, number) for number in range(12)], batch_size=None)
    )
    actual.numbers["steps without a race"] = trainer.global_step
    return actual


def in_process(
    part: Callable[[str, bool], Found], device: str, small: bool, printed: Path
) -> Found:
    """Run a part on this rank, the only one. printed: the file that gets what it prints."""
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["GPU_TESTS_ON"] = device
    if device == "cuda":
        torch.cuda.set_device(0)
    return partial(part, device, small)()
