"""What a run under `pipeline_parallel` lives through: checkpoints, further runs, and becoming whole again."""

import os
import signal
import time
import xml.dom.minidom
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_distrec import PipelineParallelStrategy, StageSchedule, Throughput, TunedDDPStrategy
from tests.support.chain_models import Drawing, Sequence, Transformer, Unchanged
from tests.support.parameters import slow_except
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS


def _trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    options = DEFAULTS | {"max_epochs": 2, "limit_val_batches": 0} | settings
    return pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **options)


def _whole(trainer: pl.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}  # type: ignore[attr-defined]


def _close(ours: dict[str, Tensor], other: dict[str, Tensor], most: float = 1e-5) -> None:
    assert list(ours) == list(other)
    for name, value in ours.items():
        torch.testing.assert_close(value, other[name], atol=most, rtol=most, msg=name)


def _straight(folder: str, strategy: Any) -> list[float]:
    pl.seed_everything(5)
    model = Transformer()
    saving = ModelCheckpoint(folder, every_n_train_steps=14, save_top_k=-1, filename="{step}")
    _trainer(strategy, callbacks=[saving], enable_checkpointing=True).fit(model)
    return model.losses


def _saved(folder: str) -> list[float]:
    """Losses of a run in stages, which saves a folder and one file."""
    _straight(f"{folder}/file", PipelineParallelStrategy(checkpoint={"distributed": False}))
    checkpoint = {"single_file_below": 0, "async_save": True}
    return _straight(f"{folder}/folder", PipelineParallelStrategy(checkpoint=checkpoint))


def _resumed(path: str, strategy: str, options: dict[str, Any]) -> list[float]:
    pl.seed_everything(9)
    model = Transformer()
    kind: Any = PipelineParallelStrategy if strategy == "stages" else TunedDDPStrategy
    _trainer(kind(**options)).fit(model, ckpt_path=path)
    return model.losses


INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}


def test_a_run_of_two_stages_goes_on_in_others(tmp_path: Path) -> None:
    straight, *_ = run_on_warm_ranks(_saved, 2, str(tmp_path))
    file, folder = f"{tmp_path}/file/step=14.ckpt", f"{tmp_path}/folder/step=14.ckpt"
    assert Path(file).is_file()
    assert Path(folder).is_dir()
    calls: dict[str, tuple[Any, ...]] = {
        "file": (_resumed, file, "stages", {}),
        "cut elsewhere": (_resumed, folder, "stages", {"split": ["blocks.1"], "schedule": "1f1b"}),
        "interleaved": (_resumed, folder, "stages", INTERLEAVED),
    }
    for of_rank in run_each_on_ranks(calls, 2):
        for name, losses in of_rank.items():
            assert losses == pytest.approx(straight[14:], abs=1e-5), name


def _killed() -> None:
    class Dies(Sequence):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3 and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    _trainer(PipelineParallelStrategy()).fit(Dies())


@pytest.mark.slow
def test_a_dead_rank_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1"):
        run_on_ranks(_killed, 2, timeout_seconds=60)
    assert time.monotonic() - began < 40


def _stopped() -> tuple[int, str]:
    class Stops(Sequence):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3 and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = _trainer(PipelineParallelStrategy())
    try:
        trainer.fit(Stops())
    except SIGTERMException as stop:
        return trainer.global_step, f"{type(stop).__name__}: {stop}"
    return trainer.global_step, "no signal"


def test_a_signal_to_one_rank_stops_all_after_the_same_step() -> None:
    one, other = run_on_warm_ranks(_stopped, 2)
    assert one == other
    assert 3 <= one[0] <= 6
    assert one[1].startswith("SIGTERMException")


@pytest.mark.slow
def test_a_run_goes_on_in_four_stages_and_in_and_from_one_process(tmp_path: Path) -> None:
    straight, *_ = run_on_warm_ranks(_saved, 2, str(tmp_path))
    four = run_on_warm_ranks(_resumed, 4, f"{tmp_path}/folder/step=14.ckpt", "stages", {})
    alone = run_on_warm_ranks(_resumed, 1, f"{tmp_path}/folder/step=14.ckpt", "one process", {})
    run_on_warm_ranks(_straight, 1, f"{tmp_path}/alone", TunedDDPStrategy())
    from_one = run_on_warm_ranks(_resumed, 2, f"{tmp_path}/alone/step=14.ckpt", "stages", {})
    for losses in [*four, *alone, *from_one]:
        assert losses == pytest.approx(straight[14:], abs=1e-5)


def _replicas_of(path: str) -> dict[str, Tensor]:
    """The weights of this rank's stage after a resumed run in two replicas."""
    model = Transformer()
    _trainer(PipelineParallelStrategy(stages=2)).fit(model, ckpt_path=path)
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}


@pytest.mark.slow
def test_replicas_that_resume_have_the_same_optimizer_state(tmp_path: Path) -> None:
    run_on_warm_ranks(_saved, 2, str(tmp_path))
    for kind in ("file", "folder"):
        of_ranks = run_on_warm_ranks(_replicas_of, 4, f"{tmp_path}/{kind}/step=14.ckpt")
        for rank in (0, 1):
            _close(of_ranks[rank], of_ranks[rank + 2], 0.0)
        assert of_ranks[0].keys().isdisjoint(of_ranks[1])


def _drawing(folder: str) -> dict[str, list[float]]:
    """Losses of modules that draw, by ranks that nobody has seeded."""
    saving = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    model, other, alike = Drawing(), Drawing(), Unchanged()
    _trainer(PipelineParallelStrategy(), callbacks=[saving], enable_checkpointing=True).fit(model)
    _trainer(PipelineParallelStrategy()).fit(other, ckpt_path=f"{folder}/step=5.ckpt")
    _trainer(PipelineParallelStrategy(schedule="1f1b"), max_epochs=1).fit(alike)
    return {"straight": model.losses[5:], "resumed": other.losses, "alike": alike.losses}


def test_all_ranks_draw_the_same_and_a_resumed_run_draws_what_one_that_never_stopped_does(tmp_path: Path) -> None:
    for of_rank in run_on_warm_ranks(_drawing, 2, str(tmp_path)):
        assert of_rank["resumed"] == of_rank["straight"]
        assert len(set(of_rank["straight"])) > 10
        assert of_rank["alike"] == pytest.approx([0.0] * 12, abs=1e-10)


class OnMeta(Sequence):
    """Builds equal blocks without memory."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(4)), torch.nn.Linear(12, 1))


def _on_meta() -> dict[str, Tensor]:
    pl.seed_everything(5)
    trainer = _trainer(PipelineParallelStrategy(stages=2), max_steps=1, max_epochs=-1)
    trainer.fit(OnMeta())
    whole = trainer.strategy.unshard()  # type: ignore[attr-defined]
    return dict(whole.state_dict())


@pytest.mark.parametrize("num_ranks", slow_except([2], [2, 4]))
def test_stages_on_the_meta_device_draw_weights_of_their_own(num_ranks: int) -> None:
    first, *others = run_on_warm_ranks(_on_meta, num_ranks)
    weights = [first[f"model.{number}.weight"] for number in range(4)]
    assert len({float(weight.sum()) for weight in weights}) == 4
    assert all(0 < float(weight.abs().max()) < 1 for weight in weights)
    for other in others:
        _close(other, first, 0.0)


def _drawn(path: str, options: dict[str, Any]) -> tuple[float, float, float]:
    shown, speed = StageSchedule(path, step=3), Throughput()
    trainer = _trainer(PipelineParallelStrategy(**options), callbacks=[shown, speed], max_steps=6, max_epochs=-1)
    trainer.fit(Transformer())
    assert shown.bubble is not None
    assert shown.ideal_bubble is not None
    return shown.bubble, shown.ideal_bubble, float(speed._num_ranks)


@pytest.mark.parametrize(
    ("options", "ideal", "num_works"),
    [({}, 1 / 5, 20), (INTERLEAVED | {"microbatches": 2}, 1 / 5, 18), ({"schedule": "1f1b"}, 1 / 5, 20)],
)
def test_a_schedule_is_drawn_with_its_bubble(
    tmp_path: Path, options: dict[str, Any], ideal: float, num_works: int
) -> None:
    of_ranks = run_on_warm_ranks(_drawn, 2, f"{tmp_path}/schedule.svg", options)
    assert len(set(of_ranks)) == 1
    bubble, ideal_bubble, num_batches = of_ranks[0]
    assert 0 < bubble < 1
    assert ideal_bubble == pytest.approx(ideal)
    assert num_batches == 1
    picture = xml.dom.minidom.parse(f"{tmp_path}/schedule.svg")
    works = [title.firstChild.data for title in picture.getElementsByTagName("title")]  # type: ignore[union-attr]
    assert len(works) == num_works
    assert any(work.startswith("stage backward, stage 0, micro-batch 1: ") for work in works)


def _receives() -> list[int]:
    """Receives that were made, and not yet waited for, at each forward of this rank's first block in the last step."""
    model, found = Transformer(), []
    trainer = _trainer(PipelineParallelStrategy(), max_steps=3, max_epochs=-1)

    def look(*_: Any) -> None:
        steps: Any = trainer.strategy.run.steps  # type: ignore[attr-defined]
        ((_, (stage,)),) = steps._staged._schedules.values()
        found.append(sum(map(len, (stage._receives or {}).values())))

    model.blocks[2 * rank_and_num_ranks()[0]].register_forward_pre_hook(look)
    trainer.fit(model)
    return found[-4:]


def test_a_step_has_asked_for_all_its_inputs_before_its_first_forward() -> None:
    first, second = run_on_warm_ranks(_receives, 2)
    assert first == [4, 4, 4, 4]  # the gradients of all micro-batches
    assert second == [3, 2, 1, 0]


def _further_runs() -> dict[str, Any]:
    pl.seed_everything(5)
    model = Sequence()
    trainer = _trainer(PipelineParallelStrategy(), limit_val_batches=1.0)
    loader = [[torch.linspace(-1, 1, 12 * 5).view(5, 12), torch.zeros(5, 1)]]
    trainer.fit(model)
    validated = trainer.validate(model, verbose=False)[0]["val_loss"]
    predicted = trainer.predict(model, torch.utils.data.DataLoader(loader, batch_size=None))
    strategy: Any = trainer.strategy
    weight = strategy.full_parameter("model.4.weight")
    before = _whole(trainer)
    numbers = sum(p.numel() for p in model.parameters() if not p.is_meta)
    whole = strategy.unshard()
    return {
        "validated": validated,
        "last": model.validated[-1],
        "predicted": predicted[0],  # type: ignore[index]
        "wanted": whole(loader[0][0]).detach(),
        "whole": {name: value.clone() for name, value in whole.state_dict().items()},
        "before": before,
        "weight": weight,
        "share": numbers / sum(p.numel() for p in whole.parameters()),
        "kinds": {type(p).__name__ for p in whole.parameters()},
    }


def test_further_runs_and_a_whole_module_have_the_same_weights() -> None:
    of_ranks = run_on_warm_ranks(_further_runs, 2)
    for of_rank in of_ranks:
        assert of_rank["validated"] == of_ranks[0]["last"]
        torch.testing.assert_close(of_rank["predicted"], of_rank["wanted"])
        assert of_rank["kinds"] == {"Parameter"}
        assert torch.equal(of_rank["weight"], of_rank["whole"]["model.4.weight"])
        _close(of_rank["whole"], of_ranks[0]["before"], 0.0)
    assert sum(of_rank["share"] for of_rank in of_ranks) == pytest.approx(1.0)
