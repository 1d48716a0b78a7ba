"""What a run under `fsdp_tuned` lives through: checkpoints, further runs, copies and averages."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from tests.support.dense_models import Layers, Numbers, WithBatchNorm, loader
from tests.support.dense_runs import make_dense_trainer, whole_weights
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks


def _sharded(**options: Any) -> TunedFSDPStrategy:
    return TunedFSDPStrategy(**{"min_num_parameters": 8} | options)


def _straight(folder: str, strategy: Any) -> list[float]:
    pl.seed_everything(5)
    model = Numbers()
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    trainer = make_dense_trainer(strategy, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(model, loader(*rank_and_num_ranks()))
    return model.losses[4:]


def _resumed(folder: str, strategy: Any) -> list[float]:
    pl.seed_everything(9)
    model, path = Numbers(), f"{folder}/step=4.ckpt"
    make_dense_trainer(strategy).fit(model, loader(*rank_and_num_ranks()), ckpt_path=path)
    return model.losses


def _weights_of(path: str) -> dict[str, Tensor]:
    """The weights in a checkpoint, by a run on these ranks that starts from them."""
    trainer = make_dense_trainer(_sharded(checkpoint={"start_from": path}), max_epochs=0)
    trainer.fit(Numbers(), loader(*rank_and_num_ranks()))
    return whole_weights(trainer)


def test_a_resumed_run_goes_on_as_one_that_never_stopped(tmp_path: Path) -> None:
    parts, file, ddp = (str(tmp_path / name) for name in ("parts", "file", "ddp"))
    calls: dict[str, tuple[Any, ...]] = {
        "saved behind the steps": (_straight, parts, _sharded(checkpoint={"async_save": True})),
        "in one file": (_straight, file, _sharded(checkpoint={"distributed": False})),
        "ddp": (_straight, ddp, TunedDDPStrategy()),
        "resumed in two replicas": (_resumed, parts, _sharded(replicas=2)),
        "resumed under ddp_tuned": (_resumed, parts, TunedDDPStrategy()),
        "resumed from one file": (_resumed, file, _sharded()),
        "resumed from ddp_tuned": (_resumed, ddp, _sharded()),
    }
    for results in run_each_on_ranks(calls, 2):
        for case, losses in results.items():
            assert losses == pytest.approx(results["ddp"], abs=1e-5), case
    weights, *_ = run_on_warm_ranks(_weights_of, 3, f"{parts}/step=4.ckpt")
    plain = torch.load(f"{file}/step=4.ckpt", weights_only=True)
    torch.testing.assert_close(weights, dict(plain["state_dict"]), atol=1e-6, rtol=1e-6)
    Numbers().load_state_dict(plain["state_dict"])
    (state,) = plain["optimizer_states"]
    moments = [values["exp_avg"].shape for values in state["state"].values()]
    assert moments == [parameter.shape for parameter in Numbers().parameters()]


def _further_runs() -> tuple[list[float], list[float]]:
    """Fit, validate and fit again with one module; and the same losses without the run in
    between."""
    rank, num_ranks = rank_and_num_ranks()
    actual = []
    for looks in (True, False):
        pl.seed_everything(5)
        model = Layers()
        for _ in range(2):
            trainer = make_dense_trainer(_sharded(), max_epochs=1)
            trainer.fit(model, loader(rank, num_ranks))
            if looks:
                recorded = list(model.losses)
                trainer.validate(model, loader(rank, num_ranks), verbose=False)
                assert len(model.losses) > len(recorded)
                model.losses = recorded
        actual.append(model.losses)
    return actual[0], actual[1]


def _alone() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A validation that no fit came before sees rank 0's weights on every rank."""
    rank, num_ranks = rank_and_num_ranks()
    torch.manual_seed(rank)
    model = Layers()
    local = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_dense_trainer(_sharded())
    trainer.validate(model, loader(rank, num_ranks), verbose=False)
    return local, whole_weights(trainer)


def test_a_validation_between_two_fits_changes_nothing_and_may_come_first() -> None:
    lives = run_each_on_ranks({"further runs": (_further_runs,), "alone": (_alone,)}, 2)
    for rank_result in lives:
        looked, plain = rank_result["further runs"]
        assert looked == pytest.approx(plain, abs=1e-6)
    local, whole = lives[0]["alone"]
    torch.testing.assert_close(local, whole, atol=1e-6, rtol=1e-6)
    assert not torch.equal(lives[1]["alone"][0]["out.weight"], local["out.weight"])


class Validated(WithBatchNorm):
    """Computes each rank's own loss with the running statistics; a table beside it or none."""

    def __init__(self, has_table: bool = False) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["f"])
        self.bags = EmbeddingBagCollection(tables=[table]) if has_table else None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.net[0](inputs)
        if self.bags is not None:
            features = KeyedJaggedTensor(
                ["f"], (inputs[:, 0] > 0).long(), lengths=torch.ones(len(inputs)).long()
            )
            hidden = hidden + self.bags(features).values()
        return self.net[1:](hidden)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", functional.mse_loss(self(batch[0]), batch[1]))


def _validated(strategy: Any, has_table: bool = False) -> list[float]:
    pl.seed_everything(5)
    model, data = Validated(has_table), loader(*rank_and_num_ranks())
    trainer = make_dense_trainer(strategy, max_epochs=1, limit_train_batches=3)
    trainer.fit(model, data)
    return [trainer.validate(model, data, verbose=False)[0]["loss"] for _ in range(2)]


def test_an_evaluation_after_fit_has_rank_zeros_running_statistics_as_ddp() -> None:
    with_table = TorchRecShardedStrategy(dense="fsdp", fsdp={"min_num_parameters": 8})
    cases: dict[str, tuple[Any, ...]] = {
        "ddp": (_validated, "ddp"),
        "ddp_tuned": (_validated, TunedDDPStrategy()),
        "fsdp_tuned": (_validated, _sharded()),
        "tables beside ddp": (_validated, "torchrec_sharded", True),
        "tables beside fsdp": (_validated, with_table, True),
    }
    for rank in run_each_on_ranks(cases, 2):
        for name, losses in rank.items():
            expected = rank["tables beside ddp" if name.startswith("tables") else "ddp"]
            assert losses == pytest.approx(expected, rel=1e-5), name
