"""With `uneven_inputs="join"` ranks whose batches are over change nothing, and all ranks end together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy
from lightning_distrec.errors import ConfigError
from tests.support.dense_models import KINDS, WIDTH, BareAndTied, Recording, samples
from tests.support.dense_runs import Outcome, check_same
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

LENGTHS = {2: (3, 5), 3: (4, 2, 5)}
"""Batches of each rank: rank 0's are over before another's."""


class Plain(BareAndTied):
    """Whose step on a batch depends on nothing but its weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Evaluated(BareAndTied):
    """Logs what it can, and is evaluated."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("here", loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_train_end(self) -> None:
        self.logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}


KINDS |= {kind.__name__: kind for kind in (Plain, Evaluated)}


class Stream(IterableDataset[Any]):
    """Batches without a length."""

    def __init__(self, batches: list[Any], fails_at: int | None = None) -> None:
        self.batches, self.fails_at = batches, fails_at

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            if number == self.fails_at:
                raise OSError("the disk went away")
            yield batch


def _sized(rank: int, lengths: tuple[int, ...]) -> DataLoader[Any]:
    first = 3 * sum(lengths[:rank])
    return DataLoader(Subset(samples(), range(first, first + 3 * lengths[rank])), batch_size=3)


def _loader(form: str, rank: int, lengths: tuple[int, ...]) -> DataLoader[Any]:
    sized = _sized(rank, lengths)
    return sized if form == "sized" else DataLoader(Stream(list(sized)), batch_size=None)


def _fit(kind: str, form: str, strategy: dict[str, Any], settings: dict[str, Any]) -> Outcome:
    pl.seed_everything(5)
    model = KINDS[kind]()
    rank, num_ranks = rank_and_num_ranks()
    chosen = DEFAULTS | {"max_epochs": 2} | settings
    path = chosen.pop("ckpt_path", None)
    trainer = pl.Trainer(strategy=TunedDDPStrategy(uneven_inputs="join", **strategy), devices=num_ranks, **chosen)
    loader = _loader(form, rank, LENGTHS[num_ranks])
    trainer.fit(model, loader, loader if kind == "Evaluated" else None, ckpt_path=path)
    assert trainer.global_step * trainer.accumulate_grad_batches >= 2 * 5 or path
    return model.losses, {name: value.clone() for name, value in model.state_dict().items()}


def _by_torch(kind: str) -> Outcome:
    """Train by hand in torch's own context for this."""
    pl.seed_everything(5)
    model = KINDS[kind]()
    rank, num_ranks = rank_and_num_ranks()
    ddp = DistributedDataParallel(model)
    optimizer = model.configure_optimizers()
    for _ in range(2):
        with ddp.join(divide_by_initial_world_size=False):
            for inputs, targets in _sized(rank, LENGTHS[num_ranks]):
                optimizer.zero_grad()
                loss = functional.mse_loss(ddp(inputs), targets)
                loss.backward()
                optimizer.step()
                model.losses.append(float(loss.detach()))
    return model.losses, {name: value.clone() for name, value in model.state_dict().items()}


def _like_torch(kind: str, form: str) -> tuple[Outcome, Outcome]:
    ours = _fit(kind, form, {}, {})
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return ours, _by_torch(kind)


def _alone(kind: str, num_ranks: int, every: int, clip: float | None) -> dict[str, Tensor]:
    """Train in one process: each step's loss is the mean over the ranks that have a batch."""
    pl.seed_everything(5)
    model = KINDS[kind]()
    optimizer = model.configure_optimizers()
    lengths = LENGTHS[num_ranks]
    for _ in range(2):
        batches = [list(_sized(rank, lengths)) for rank in range(num_ranks)]
        for step in range(max(lengths)):
            theirs = [functional.mse_loss(model(b[step][0]), b[step][1]) for b in batches if step < len(b)]
            (torch.stack(theirs).mean() / every).backward()
            if (step + 1) % every == 0 or step + 1 == max(lengths):
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_losses_and_weights_are_those_of_a_loop_in_torchs_join(num_ranks: int) -> None:
    calls = {form: (_like_torch, "Plain", form) for form in ("sized", "stream")}
    for results in run_each_on_ranks(calls, num_ranks):
        for ours, by_torch in results.values():
            check_same(ours, by_torch)


MORE = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weights_are_those_of_one_process(num_ranks: int) -> None:
    calls = {
        "sized": (_fit, "BareAndTied", "sized", {}, {}),
        "zero": (_fit, "BareAndTied", "stream", {"zero_optimizer": True}, {}),
        "clipped": (_fit, "BareAndTied", "stream", {}, MORE),
        "evaluated": (_fit, "Evaluated", "stream", {}, MORE),
        "bf16": (_fit, "BareAndTied", "sized", {"comm_dtype": "bf16"}, {}),
        "sparse": (_fit, "WithEmbedding", "sized", {}, {}),
        "sparse stream": (_fit, "WithEmbedding", "stream", {}, {}),
    }
    plain, clipped = (_alone("BareAndTied", num_ranks, *how) for how in ((1, None), (2, 0.5)))
    sparse = _alone("WithEmbedding", num_ranks, 1, None)
    for rank, results in enumerate(run_each_on_ranks(calls, num_ranks)):
        for name, (losses, weights) in results.items():
            expected = clipped if name in ("clipped", "evaluated") else sparse if "sparse" in name else plain
            assert len(losses) == 2 * LENGTHS[num_ranks][rank]
            most = 0.05 if name == "bf16" else 1e-5
            for key, value in weights.items():
                torch.testing.assert_close(value, expected[key], atol=most, rtol=most, msg=f"{name} {key}")


def _buffers() -> dict[str, Tensor]:
    return _fit("WithBatchNorm", "sized", {}, {})[1]


def test_buffers_are_those_of_a_rank_that_has_batches() -> None:
    lengths = LENGTHS[2]
    first, other = run_on_warm_ranks(_buffers, 2)
    assert first["net.1.num_batches_tracked"] == other["net.1.num_batches_tracked"] == 2 * max(lengths)
    for name, value in first.items():
        torch.testing.assert_close(value, other[name], msg=name)


def _logged() -> dict[str, Any]:
    rank, num_ranks = rank_and_num_ranks()
    pl.seed_everything(5)
    model = Evaluated()
    trainer = pl.Trainer(strategy=TunedDDPStrategy(uneven_inputs="join"), devices=num_ranks, **DEFAULTS)
    trainer.fit(model, _loader("stream", rank, LENGTHS[num_ranks]), _loader("sized", rank, (2, 4)))
    several = [_loader("stream", rank, (3, 1)), _loader("sized", rank, (1, 3))]
    of_several = trainer.validate(SeveralLoaders(), several, verbose=False)
    predicted = trainer.predict(Predicting(), _loader("sized", rank, (2, 4)))
    return {
        "losses": model.losses,
        "weights": dict(model.state_dict()),
        "several": of_several,
        "predicted": len(predicted or []),
        **model.logged,
    }


class SeveralLoaders(Evaluated):
    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.log("count", float(len(batch[0])), reduce_fx="sum", sync_dist=True)


class Predicting(Evaluated):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def test_logged_means_are_those_over_all_batches_and_no_more() -> None:
    results = run_on_warm_ranks(_logged, 2)
    losses = [loss for of_rank in results for loss in of_rank["losses"]]
    for of_rank in results:
        assert of_rank["train"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert of_rank["predicted"] == 2
        assert [list(found.values()) for found in of_rank["several"]] == [[12.0], [12.0]]
        assert of_rank["here"] == pytest.approx(of_rank["losses"][-1])
        assert of_rank["val"] == pytest.approx(_evaluated(results[0]["weights"]), rel=1e-6)


def _evaluated(weights: dict[str, Tensor]) -> float:
    model = Evaluated()
    model.load_state_dict(weights)
    batches = [batch for rank in range(2) for batch in _sized(rank, (2, 4))]
    return float(torch.stack([functional.mse_loss(model(x), y) for x, y in batches]).mean())


def _saved(folder: str) -> Outcome:
    saving = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    return _fit("BareAndTied", "stream", {}, {"callbacks": [saving], "enable_checkpointing": True})


def _resumed(path: str) -> Outcome:
    return _fit("BareAndTied", "stream", {}, {"ckpt_path": path})


def test_a_resumed_run_goes_on_as_one_that_never_stopped(tmp_path: Path) -> None:
    straight = run_on_warm_ranks(_saved, 2, str(tmp_path))
    for rank, (losses, weights) in enumerate(run_on_warm_ranks(_resumed, 2, f"{tmp_path}/epoch=0.ckpt")):
        assert losses == pytest.approx(straight[rank][0][LENGTHS[2][rank] :], abs=1e-6)
        check_same(([], weights), ([], straight[rank][1]))


class LogsAtEveryStep(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach(), on_step=True, sync_dist=True)
        return loss


class Gathers(LogsAtEveryStep):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.all_gather(batch[1])
        return Recording.training_step(self, batch, batch_idx)


class Synchronised(LogsAtEveryStep):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.SyncBatchNorm(WIDTH)


KINDS |= {kind.__name__: kind for kind in (LogsAtEveryStep, Gathers, Synchronised)}


def _refused(kind: str) -> str:
    with pytest.raises(ConfigError) as refused:
        _fit(kind, "sized", {}, {})
    return str(refused.value)


def _several_for_training() -> str:
    rank, num_ranks = rank_and_num_ranks()
    trainer = pl.Trainer(strategy=TunedDDPStrategy(uneven_inputs="join"), devices=num_ranks, **DEFAULTS)
    with pytest.raises(ConfigError) as refused:
        trainer.fit(BareAndTied(), {name: _loader("sized", rank, LENGTHS[num_ranks]) for name in "ab"})
    return str(refused.value)


def test_what_some_ranks_could_not_answer_is_refused_at_the_first_step() -> None:
    calls = {kind: (_refused, kind) for kind in ("LogsAtEveryStep", "Gathers", "Synchronised", "TwoByHand")}
    for said in run_each_on_ranks(calls | {"several": (_several_for_training,)}, 2):
        assert r"'join': self.log(on_step=True, sync_dist=True) in a step needs all ranks" in said["LogsAtEveryStep"]
        assert "'join': self.all_gather in a step needs all ranks" in said["Gathers"]
        assert "'join': 'norm' (SyncBatchNorm) runs a collective in every step" in said["Synchronised"]
        assert "'join': with automatic_optimization=False the module's own step runs" in said["TwoByHand"]
        assert "'join': a step draws from 2 dataloaders" in said["several"]


def _fails_on_one() -> None:
    rank, num_ranks = rank_and_num_ranks()
    batches = list(_sized(rank, LENGTHS[num_ranks]))
    loader: Any = DataLoader(Stream(batches, fails_at=4 if rank == 1 else None), batch_size=None)
    trainer = pl.Trainer(strategy=TunedDDPStrategy(uneven_inputs="join"), devices=num_ranks, **DEFAULTS)
    trainer.fit(BareAndTied(), loader)


def test_a_loader_that_fails_after_anothers_end_is_named_on_the_others() -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_fails_on_one, 2)
    assert "DataError: the dataloader of rank 1 failed at batch 4: OSError: the disk went away" in str(failed.value)


def _without_any(form: str) -> None:
    rank, num_ranks = rank_and_num_ranks()
    trainer = pl.Trainer(strategy=TunedDDPStrategy(uneven_inputs="join"), devices=num_ranks, **DEFAULTS)
    trainer.fit(BareAndTied(), _loader(form, rank, (2, 0)))


@pytest.mark.parametrize("form", ["sized", "stream"])
def test_a_rank_without_any_batch_is_an_error_on_every_rank(form: str) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_without_any, 2, form)
    assert str(failed.value).count("needs a first one of all. Give every rank at least one batch") >= 2


@pytest.mark.parametrize(
    ("strategy", "arguments", "said"),
    [
        (TorchRecShardedStrategy, {}, "uneven_inputs='join' is not known. Use one of stop, error"),
        (TunedDDPStrategy, {"static_graph": True}, "uneven_inputs='join' and static_graph=True: a rank whose batches"),
        (TunedDDPStrategy, {"find_unused_parameters": True}, "'join' and find_unused_parameters=True"),
    ],
)
def test_where_ranks_cannot_join(strategy: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        strategy(uneven_inputs="join", **arguments)
    with pytest.raises(ConfigError, match="uneven_inputs='pad' is not known. Use one of stop, error, join"):
        TunedDDPStrategy(uneven_inputs="pad")  # type: ignore[arg-type]
