"""Sparse and dense gradients of shards, and clipping, give the numbers of a CPU; the host does not
wait in backward."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.gpu.device import ACCELERATOR, DEVICE, num_ranks
from tests.gpu.marks import runs_here
from tests.support.click_model import EvaluatedModel, make_batch, seeded
from tests.support.embedding_models import whole_state
from tests.support.followed_fits import Deaf, batch_of
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

pytestmark = runs_here

STEPS = 12
LATER = 6
"""The first step whose waits count."""


class Waits(pl.Callback):
    """Lists where backward waits for the device, as far as torch notices."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._caught: Any = None

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if DEVICE == "cuda" and trainer.global_step >= LATER:
            self._caught = warnings.catch_warnings(record=True)
            self._list = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if self._caught is not None:
            torch.cuda.set_sync_debug_mode("default")
            self.found += [
                f"{w.filename}:{w.lineno}"
                for w in self._list
                if "called a synchronizing" in str(w.message)
            ]
            self._caught.__exit__(None, None, None)
            self._caught = None


def fit(update: str, accelerator: str, clip: float | None) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights after a fit, and where backward has waited."""
    model = seeded(Deaf, torch.optim.SGD, {"lr": 0.1}, pooling="mean")
    waits = Waits()
    strategy = {
        "embedding_update": update,
        "prefetch": {"depth": 3},
        "sharding_types": ["row_wise"],
    }
    trainer = make_trainer(
        strategy, accelerator=accelerator, callbacks=[waits], gradient_clip_val=clip
    )
    trainer.fit(
        model, DataLoader([batch_of(Deaf, number) for number in range(STEPS)], batch_size=None)
    )
    return {name: value.cpu() for name, value in model.final_state.items()}, waits.found


@pytest.mark.parametrize("update", ["sparse", "dense"])
def test_gradients_of_shards_are_those_of_a_cpu_and_backward_waits_for_nothing(update: str) -> None:
    actual = run_on_ranks(fit, num_ranks(), update, ACCELERATOR, 0.1, timeout_seconds=120)
    expected = run_on_ranks(fit, num_ranks(), update, "cpu", 0.1, timeout_seconds=120)
    for (weights, waits), (cpu_values, _) in zip(actual, expected, strict=True):
        assert waits == []
        for name, value in cpu_values.items():
            torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-4, msg=name)


def save(folder: str, is_async: bool) -> tuple[dict[str, Tensor], int]:
    """Save in the middle of a fit that goes on; return what the checkpoint holds, and the bytes
    that are pinned."""
    model = seeded(EvaluatedModel, torch.optim.Adam, {"lr": 0.01})
    rank = rank_and_num_ranks()[0]
    batches = [make_batch(1000 * step + rank) for step in range(STEPS)]
    strategy = {"checkpoint": {"async_save": is_async, "distributed": True}}

    class Saves(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == LATER:
                trainer.save_checkpoint(f"{folder}/{is_async}.ckpt")

    trainer = make_trainer(strategy, accelerator=ACCELERATOR, callbacks=[Saves()])
    trainer.fit(model, DataLoader(batches, batch_size=None))
    pinned = 0
    if DEVICE == "cuda" and hasattr(torch.cuda, "host_memory_stats"):
        pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    repeated = seeded(EvaluatedModel, torch.optim.Adam, {"lr": 0.01})
    tester = make_trainer(strategy, accelerator=ACCELERATOR, max_steps=LATER + 1)
    tester.fit(
        repeated, DataLoader(batches, batch_size=None), ckpt_path=f"{folder}/{is_async}.ckpt"
    )
    return {name: value.cpu() for name, value in repeated.final_state.items()}, pinned


def test_a_checkpoint_that_is_written_while_training_goes_on_holds_what_there_was(
    tmp_path: Any,
) -> None:
    for (late, pinned), (at_once, _) in zip(
        run_on_ranks(save, num_ranks(), str(tmp_path), True, timeout_seconds=120),
        run_on_ranks(save, num_ranks(), str(tmp_path), False, timeout_seconds=120),
        strict=True,
    ):
        assert pinned < 200 * 2**20
        assert late.keys() == at_once.keys()
        for name, value in at_once.items():
            torch.testing.assert_close(late[name], value, atol=1e-6, rtol=1e-5, msg=name)


class AllRows(pl.LightningModule):
    """Looks up each row of its table once in a step."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", embedding_dim=8, num_embeddings=20, feature_names=["f"]
        )
        self.ebc, self.mlp = EmbeddingBagCollection(tables=[table]), torch.nn.Linear(8, 1)

    def training_step(self, ids: Tensor, _: int) -> Tensor:
        lengths = torch.full((4,), 5, device=ids.device, dtype=torch.int32)
        bags = self.ebc(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values()
        return self.mlp(bags).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit_all_rows(update: str, accelerator: str) -> dict[str, Tensor]:
    """Return the weights after a fit in whose steps every row is looked up."""
    model = seeded(AllRows)
    draw = torch.Generator().manual_seed(1)
    batches = DataLoader(
        [torch.randperm(20, generator=draw) for _ in range(STEPS)], batch_size=None
    )
    make_trainer({"embedding_update": update}, accelerator=accelerator).fit(model, batches)
    return {name: value.cpu() for name, value in whole_state(model).items()}


def test_lazy_adam_is_adam_where_each_row_is_looked_up() -> None:
    (expected,) = run_on_ranks(fit_all_rows, 1, "dense", "cpu", timeout_seconds=120)
    if DEVICE == "cpu":
        with pytest.raises(RankFailed, match="FBGEMM has no Adam on CPU"):
            run_on_ranks(fit_all_rows, 1, "fused_lazy", ACCELERATOR, timeout_seconds=120)
        return
    (actual,) = run_on_ranks(fit_all_rows, 1, "fused_lazy", ACCELERATOR, timeout_seconds=120)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-5, rtol=1e-4, msg=name)
