"""What a run under `fsdp_tuned` lives through: checkpoints, further runs, copies and averages."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from tests.support.dense_models import Layers, Numbers, WithBatchNorm, loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS


def _sharded(**options: Any) -> TunedFSDPStrategy:
    return TunedFSDPStrategy(**{"min_num_parameters": 8} | options)


def _trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    options = DEFAULTS | {"max_epochs": 2} | settings
    return pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **options)


def _whole(trainer: pl.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}  # type: ignore[attr-defined]


def _close(distrec: dict[str, Tensor], other: dict[str, Tensor], most: float = 1e-6) -> None:
    assert distrec.keys() == other.keys()
    for name, value in distrec.items():
        torch.testing.assert_close(value, other[name], atol=most, rtol=most, msg=name)


# ----------------------------------------------------------------------------------------------------- checkpoints


def _straight(folder: str, strategy: Any = None, **settings: Any) -> list[float]:
    pl.seed_everything(5)
    model = Numbers()
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    trainer = _trainer(
        strategy or _sharded(), callbacks=[saving], enable_checkpointing=True, **settings
    )
    trainer.fit(model, loader(*rank_and_num_ranks()))
    return model.losses


def _straight_in_one_file(folder: str) -> list[float]:
    return _straight(folder, _sharded(checkpoint={"distributed": False}))


def _resumed(path: str, strategy: Any = None) -> list[float]:
    pl.seed_everything(9)
    model = Numbers()
    _trainer(strategy or _sharded()).fit(model, loader(*rank_and_num_ranks()), ckpt_path=path)
    return model.losses


def _saved_and_resumed(folder: str) -> dict[str, list[float]]:
    """A run that never stopped, and runs that go on from its first checkpoint."""
    straight = _straight(folder)
    one_file = _straight(f"{folder}/whole", _sharded(checkpoint={"distributed": False}))
    ddp_values = _straight(f"{folder}/ddp", TunedDDPStrategy())
    async_save = _straight(f"{folder}/async", _sharded(checkpoint={"async_save": True}))
    return {
        "straight": straight[4:],
        "straight, one file": one_file[4:],
        "straight, ddp": ddp_values[4:],
        "straight, saved behind the steps": async_save[4:],
        "resumed": _resumed(f"{folder}/step=4.ckpt"),
        "in two replicas": _resumed(f"{folder}/step=4.ckpt", _sharded(replicas=2)),
        "under ddp_tuned": _resumed(f"{folder}/step=4.ckpt", TunedDDPStrategy()),
        "from one file": _resumed(f"{folder}/whole/step=4.ckpt"),
        "from ddp_tuned": _resumed(f"{folder}/ddp/step=4.ckpt"),
        "saved behind the steps": _resumed(f"{folder}/async/step=4.ckpt"),
    }


def test_a_resumed_run_goes_on_as_one_that_never_stopped(tmp_path: Path) -> None:
    for result in run_on_warm_ranks(_saved_and_resumed, 2, str(tmp_path)):
        for case, losses in result.items():
            assert losses == pytest.approx(result["straight"], abs=1e-5), case


def _weights_of(path: str) -> dict[str, Tensor]:
    """The weights in a checkpoint, by a run on these ranks that starts from them."""
    trainer = _trainer(_sharded(checkpoint={"start_from": path}), max_epochs=0)
    trainer.fit(Numbers(), loader(*rank_and_num_ranks()))
    return _whole(trainer)


def test_checkpoints_load_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_on_warm_ranks(_straight, 2, str(tmp_path))
    two, *_ = run_on_warm_ranks(_weights_of, 2, f"{tmp_path}/step=4.ckpt")
    three, *_ = run_on_warm_ranks(_weights_of, 3, f"{tmp_path}/step=4.ckpt")
    _close(two, three)
    resumed = run_on_warm_ranks(_resumed, 3, f"{tmp_path}/step=4.ckpt")
    assert all(losses for losses in resumed)


def test_one_file_is_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    run_on_warm_ranks(_straight_in_one_file, 2, str(tmp_path))
    whole, *_ = run_on_warm_ranks(_weights_of, 2, f"{tmp_path}/step=4.ckpt")
    plain = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    Numbers().load_state_dict(plain["state_dict"])
    _close(whole, plain["state_dict"])
    (state,) = plain["optimizer_states"]
    moments = [values["exp_avg"].shape for values in state["state"].values()]
    assert moments == [parameter.shape for parameter in Numbers().parameters()]


# ---------------------------------------------------------------------------------------- further
# runs, and copies


def _further_runs() -> tuple[list[float], list[float]]:
    """Fit, validate and fit again with one module; and the same losses without the run in
    between."""
    rank, num_ranks = rank_and_num_ranks()
    actual = []
    for looks in (True, False):
        pl.seed_everything(5)
        model = Layers()
        for _ in range(2):
            trainer = _trainer(_sharded(), max_epochs=1)
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
    trainer = _trainer(_sharded())
    trainer.validate(model, loader(rank, num_ranks), verbose=False)
    return local, _whole(trainer)


class KeepsCopies(pl.Callback):
    """Keeps an average in a deep copy of the module, and computes with it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.copy = copy.deepcopy(pl_module)
        self.part = copy.deepcopy(pl_module.blocks)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for local, current in zip(self.copy.parameters(), pl_module.parameters(), strict=True):
            local.lerp_(current, 0.1)
        self.losses.append(float(functional.mse_loss(self.copy(batch[0]), batch[1])))
        self.losses.append(float(self.part(batch[0]).sum()))


def _copies(strategy: Any) -> tuple[list[float], list[float]]:
    pl.seed_everything(5)
    model, copies = Numbers(), KeepsCopies()
    _trainer(strategy, callbacks=[copies]).fit(model, loader(*rank_and_num_ranks()))
    if isinstance(strategy, TunedFSDPStrategy):
        assert isinstance(copies.copy, FSDPModule)
        assert all(isinstance(p, DTensor) for p in copies.copy.parameters() if p.dim())
    return model.losses, copies.losses


def _averaged(strategy: Any) -> dict[str, Tensor]:
    pl.seed_everything(5)
    model = Layers()
    trainer = _trainer(strategy, callbacks=[EMAWeightAveraging(decay=0.8)])
    trainer.fit(model, loader(*rank_and_num_ranks()))
    distrec = isinstance(strategy, TunedFSDPStrategy)
    return (
        _whole(trainer)
        if distrec
        else {name: value.clone() for name, value in model.state_dict().items()}
    )


def _both(run: Any, stock: Any = "ddp") -> tuple[Any, Any]:
    return run(_sharded()), run(stock)


LIVES: dict[str, tuple[Any, ...]] = {
    "further runs": (_further_runs,),
    "alone": (_alone,),
    "copies": (_both, _copies),
    "averaged": (_both, _averaged),
}


@pytest.fixture(scope="module")
def lives() -> list[dict[str, Any]]:
    return run_each_on_ranks(LIVES, 2)


def test_a_validation_between_two_fits_changes_nothing(lives: list[dict[str, Any]]) -> None:
    for rank_result in lives:
        looked, plain = rank_result["further runs"]
        assert looked == pytest.approx(plain, abs=1e-6)


def test_ranks_begin_with_the_weights_of_rank_0(lives: list[dict[str, Any]]) -> None:
    local, whole = lives[0]["alone"]
    _close(local, whole)
    assert not torch.equal(lives[1]["alone"][0]["out.weight"], local["out.weight"])


def test_deep_copies_keep_averages_and_run(lives: list[dict[str, Any]]) -> None:
    for rank_result in lives:
        distrec, stock = rank_result["copies"]
        assert distrec[0] == pytest.approx(stock[0], abs=1e-5)
        assert distrec[1] == pytest.approx(stock[1], abs=1e-4)


def test_averages_of_lightning_are_those_of_ddp(lives: list[dict[str, Any]]) -> None:
    distrec, stock = lives[0]["averaged"]
    _close(distrec, stock, 1e-5)


# ------------------------------------------------------------------------------------------------------ statistics


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
    trainer = _trainer(strategy, max_epochs=1, limit_train_batches=3)
    trainer.fit(model, data)
    return [trainer.validate(model, data, verbose=False)[0]["loss"] for _ in range(2)]


def test_an_evaluation_after_fit_has_rank_zeros_running_statistics_as_ddp() -> None:
    with_table = TorchRecShardedStrategy(dense="fsdp", fsdp={"min_num_parameters": 8})
    cases: dict[str, tuple[Any, ...]] = {
        "ddp": (_validated, "ddp"),
        "ddp_tuned": (_validated, TunedDDPStrategy()),
        "fsdp_tuned": (_validated, _sharded()),
        "torchrec_sharded": (_validated, "torchrec_sharded"),
        "tables beside ddp": (_validated, "torchrec_sharded", True),
        "tables beside fsdp": (_validated, with_table, True),
    }
    for rank in run_each_on_ranks(cases, 2):
        for name, losses in rank.items():
            expected = rank["tables beside ddp" if name.startswith("tables") else "ddp"]
            assert losses == pytest.approx(expected, rel=1e-5), name
