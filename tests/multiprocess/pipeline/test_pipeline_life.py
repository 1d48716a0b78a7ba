"""What a run under `pipeline_parallel` lives through: checkpoints, further runs, and becoming whole
again."""

import xml.dom.minidom
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_distrec import PipelineParallelStrategy, StageSchedule, Throughput, TunedDDPStrategy
from tests.support.chain_models import Drawing, Sequence, Transformer, Unchanged
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

NEEDS_LEARNING_STAGES = (2, 12) <= torch.__version__ < (2, 13)
"""torch 2.12 raises where a stage follows one that has nothing to learn."""


def _trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    options = DEFAULTS | {"max_epochs": 2, "limit_val_batches": 0} | settings
    return pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **options)


def _full_state(trainer: pl.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}  # type: ignore[attr-defined]


def _assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    assert list(actual) == list(expected)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], atol=tolerance, rtol=tolerance, msg=name)


def _fit_and_save(folder: str, strategy: Any) -> list[float]:
    pl.seed_everything(5)
    model = Transformer()
    saving = ModelCheckpoint(folder, every_n_train_steps=14, save_top_k=-1, filename="{step}")
    _trainer(strategy, callbacks=[saving], enable_checkpointing=True).fit(model)
    return model.losses


def _fit_in_both_formats(folder: str) -> list[float]:
    """Losses of a run in stages, which saves a folder and one file."""
    _fit_and_save(f"{folder}/file", PipelineParallelStrategy(checkpoint={"distributed": False}))
    checkpoint = {"distributed": True, "async_save": True}
    return _fit_and_save(f"{folder}/folder", PipelineParallelStrategy(checkpoint=checkpoint))


def _resume(path: str, strategy: str, options: dict[str, Any]) -> list[float]:
    pl.seed_everything(9)
    model = Transformer()
    kind: Any = PipelineParallelStrategy if strategy == "stages" else TunedDDPStrategy
    _trainer(kind(**options)).fit(model, ckpt_path=path)
    return model.losses


def _fit_replicas(path: str) -> dict[str, Tensor]:
    """The weights of this rank's stage after a resumed run in two replicas."""
    model = Transformer()
    _trainer(PipelineParallelStrategy(stages=2)).fit(model, ckpt_path=path)
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}


INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}


@pytest.mark.slow
def test_a_run_of_two_stages_goes_on_in_others(tmp_path: Path) -> None:
    straight, *_ = run_on_warm_ranks(_fit_in_both_formats, 2, str(tmp_path))
    run_on_warm_ranks(_fit_and_save, 1, f"{tmp_path}/alone", TunedDDPStrategy())
    file, folder = f"{tmp_path}/file/step=14.ckpt", f"{tmp_path}/folder/step=14.ckpt"
    assert Path(file).is_file()
    assert Path(folder).is_dir()
    further = {"split": ["blocks.1"], "schedule": "1f1b"}
    for num_ranks, path, strategy, options in (
        (2, file, "stages", {}),
        (2, folder, "stages", further),
        (2, folder, "stages", INTERLEAVED),
        (4, folder, "stages", {}),
        (1, folder, "one process", {}),
        (2, f"{tmp_path}/alone/step=14.ckpt", "stages", {}),
    ):
        for losses in run_on_warm_ranks(_resume, num_ranks, path, strategy, options):
            assert losses == pytest.approx(straight[14:], abs=1e-5), (num_ranks, path, options)
    for path in (file, folder):
        replicas = run_on_warm_ranks(_fit_replicas, 4, path)
        for rank in (0, 1):
            _assert_close(replicas[rank], replicas[rank + 2], 0.0)
        assert replicas[0].keys().isdisjoint(replicas[1])


def _fit_drawing(folder: str) -> dict[str, list[float]]:
    """Losses of modules that draw, by ranks that nobody has seeded."""
    saving = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    model, resumed, unchanged = Drawing(), Drawing(), Unchanged()
    _trainer(PipelineParallelStrategy(), callbacks=[saving], enable_checkpointing=True).fit(model)
    _trainer(PipelineParallelStrategy()).fit(resumed, ckpt_path=f"{folder}/step=5.ckpt")
    if not NEEDS_LEARNING_STAGES:
        _trainer(PipelineParallelStrategy(schedule="1f1b"), max_epochs=1).fit(unchanged)
    return {"straight": model.losses[5:], "resumed": resumed.losses, "unchanged": unchanged.losses}


def test_all_ranks_draw_the_same_and_a_resumed_run_draws_what_one_that_never_stopped_does(
    tmp_path: Path,
) -> None:
    for results in run_on_warm_ranks(_fit_drawing, 2, str(tmp_path)):
        assert results["resumed"] == results["straight"]
        assert len(set(results["straight"])) > 10
        assert NEEDS_LEARNING_STAGES or results["unchanged"] == pytest.approx([0.0] * 12, abs=1e-10)


class OnMeta(Sequence):
    """Builds equal blocks without memory."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = torch.nn.Sequential(
                *(torch.nn.Linear(12, 12) for _ in range(4)), torch.nn.Linear(12, 1)
            )


def _fit_on_meta() -> dict[str, Tensor]:
    pl.seed_everything(5)
    trainer = _trainer(PipelineParallelStrategy(stages=2), max_steps=1, max_epochs=-1)
    trainer.fit(OnMeta())
    whole = trainer.strategy.unshard()  # type: ignore[attr-defined]
    return dict(whole.state_dict())


def test_stages_on_the_meta_device_draw_weights_of_their_own() -> None:
    first, *other_ranks = run_on_warm_ranks(_fit_on_meta, 2)
    weights = [first[f"model.{number}.weight"] for number in range(4)]
    assert len({float(weight.sum()) for weight in weights}) == 4
    assert all(0 < float(weight.abs().max()) < 1 for weight in weights)
    for weights in other_ranks:
        _assert_close(weights, first, 0.0)


def _draw_schedule(path: str, options: dict[str, Any]) -> tuple[float, float, float]:
    shown, speed = StageSchedule(path, step=3), Throughput()
    trainer = _trainer(
        PipelineParallelStrategy(**options), callbacks=[shown, speed], max_steps=6, max_epochs=-1
    )
    trainer.fit(Transformer())
    assert shown.bubble is not None
    assert shown.ideal_bubble is not None
    return shown.bubble, shown.ideal_bubble, float(speed._num_ranks)


@pytest.mark.parametrize(
    ("options", "ideal", "num_works"),
    [
        (INTERLEAVED | {"microbatches": 2}, 1 / 5, 18),
        ({"schedule": "1f1b"}, 1 / 5, 20),
    ],
)
def test_a_schedule_is_drawn_with_its_bubble(
    tmp_path: Path, options: dict[str, Any], ideal: float, num_works: int
) -> None:
    per_rank_results = run_on_warm_ranks(_draw_schedule, 2, f"{tmp_path}/schedule.svg", options)
    assert len(set(per_rank_results)) == 1
    bubble, ideal_bubble, num_batches = per_rank_results[0]
    assert 0 < bubble < 1
    assert ideal_bubble == pytest.approx(ideal)
    assert num_batches == 1
    picture = xml.dom.minidom.parse(f"{tmp_path}/schedule.svg")
    groups = [group.getAttribute("id") for group in picture.getElementsByTagName("g")]
    works = [group for group in groups if "-micro-batch-" in group]
    assert len(works) == num_works
    assert "backward-stage-0-micro-batch-1" in works


def _run_further() -> dict[str, Any]:
    pl.seed_everything(5)
    model = Sequence()
    trainer = _trainer(PipelineParallelStrategy(), limit_val_batches=1.0)
    loader = [[torch.linspace(-1, 1, 12 * 5).view(5, 12), torch.zeros(5, 1)]]
    trainer.fit(model)
    validated = trainer.validate(model, verbose=False)[0]["val_loss"]
    predicted = trainer.predict(model, torch.utils.data.DataLoader(loader, batch_size=None))
    strategy: Any = trainer.strategy
    weight = strategy.full_parameter("model.4.weight")
    gathered = _full_state(trainer)
    numbers = sum(p.numel() for p in model.parameters() if not p.is_meta)
    whole = strategy.unshard()
    return {
        "validated": validated,
        "last": model.validated[-1],
        "predicted": predicted[0],  # type: ignore[index]
        "expected": whole(loader[0][0]).detach(),
        "whole": {name: value.clone() for name, value in whole.state_dict().items()},
        "gathered": gathered,
        "weight": weight,
        "share": numbers / sum(p.numel() for p in whole.parameters()),
        "kinds": {type(p).__name__ for p in whole.parameters()},
    }


def test_further_runs_and_a_whole_module_have_the_same_weights() -> None:
    per_rank_results = run_on_warm_ranks(_run_further, 2)
    for results in per_rank_results:
        assert results["validated"] == per_rank_results[0]["last"]
        torch.testing.assert_close(results["predicted"], results["expected"])
        assert results["kinds"] == {"Parameter"}
        assert torch.equal(results["weight"], results["whole"]["model.4.weight"])
        _assert_close(results["whole"], per_rank_results[0]["gathered"], 0.0)
    assert sum(results["share"] for results in per_rank_results) == pytest.approx(1.0)
