"""What holds for all checkpoints: whole tables, room for them, no leaks, and none after the failure
of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.support.click_model import ClickModel, EvaluatedModel, rank_loader, seeded
from tests.support.plain_checkpoints import plain_checkpoint
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

ONE_FILE = {"checkpoint": {"distributed": False}}
SGD = (torch.optim.SGD, {"lr": 1.0})


def _save_in_small_chunks(path: str) -> dict[str, torch.Tensor]:
    from lightning_distrec import chunks as chunks_module

    chunks_module.BLOCK_BYTES = 100  # a few rows at a time
    model = seeded(EvaluatedModel, *SGD)
    tables = {name: {"sharding_types": [cut], "min_partition": 4} for name, cut in CUTS.items()}
    trainer = make_trainer(ONE_FILE | {"tables": tables})
    old = {key: value.clone() for key, value in model.state_dict().items()}
    model.options = {"lr": 0.0}
    trainer.fit(model, rank_loader(1, rank_and_num_ranks()[0]))
    trainer.save_checkpoint(path)
    return old


CUTS = {"wide": "column_wise", "narrow": "row_wise", "shared": "table_wise"}


def test_tables_that_travel_in_chunks_arrive_whole_whatever_the_sharding_type(
    tmp_path: Path,
) -> None:
    expected = run_on_warm_ranks(_save_in_small_chunks, 3, str(tmp_path / "chunks.ckpt"))[0]
    actual = torch.load(tmp_path / "chunks.ckpt", weights_only=True)["state_dict"]
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def _save_without_room(path: str) -> str:
    from lightning_distrec.checkpoint import host_copies

    free_host_bytes, host_copies.free_host_bytes = host_copies.free_host_bytes, lambda: 1000
    model = seeded(EvaluatedModel, *SGD)
    trainer = make_trainer(ONE_FILE)
    model.on_train_end = lambda: None
    trainer.fit(model, rank_loader(1, rank_and_num_ranks()[0]))
    try:
        trainer.save_checkpoint(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        host_copies.free_host_bytes = free_host_bytes
    return "nothing"


def test_tables_that_do_not_fit_rank_zeros_host_are_reported_on_every_rank(tmp_path: Path) -> None:
    for message in run_on_warm_ranks(_save_without_room, 2, str(tmp_path / "x.ckpt")):
        assert message.startswith("CheckpointError: ")
        assert "full tensors on rank 0 need 5,376 bytes" in message


class Failing(ClickModel):
    """Fails after a step, on all ranks or on one that the others hear nothing of."""

    only_rank: int | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3 and self.only_rank in (None, self.trainer.global_rank):
            raise ValueError("on purpose")

    def on_train_end(self) -> None:
        pass


def _fail(folder: str, only_rank: int | None) -> str:
    from lightning_distrec.strategies.checkpoints import checkpointing

    checkpointing.MEETING_SECONDS = 3.0
    model = seeded(Failing, *SGD)
    model.only_rank = only_rank
    trainer = make_trainer(callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    if only_rank is not None:
        trainer.fit(model, rank_loader(6, rank_and_num_ranks()[0]))
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit(model, rank_loader(6, rank_and_num_ranks()[0]))
    return str(plain_checkpoint(f"{folder}/on_exception.ckpt")["global_step"])


def test_an_exception_of_one_rank_is_seen_soon_and_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_fail, 2, str(tmp_path), 0)
    assert "ValueError: on purpose" in str(failed.value)
    assert "CheckpointError: no checkpoint is saved after the exception above" in str(failed.value)
    assert list(tmp_path.iterdir()) == []
