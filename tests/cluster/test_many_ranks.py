"""Many ranks on one machine start, train, save, lose one of them, and go on with fewer and with
more.

`make test-ranks` has 64 of them, some GiB and minutes; RANKS=N chooses another number, a multiple
of 4.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec.errors import RankError
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks, words_of_ranks
from tests.support.trainers import make_trainer

TABLES, ROWS, DIM = 8, 2_000, 16
RANKS = int(os.environ.get("RANKS_OF_TEST", "16"))
STEPS, KILLED_AT, SAVES = 8, 5, 2
EXAMPLES = 6 * RANKS
"""Of all ranks together in a step: three quarters and one and a half of the ranks divide it too."""
LOST = RANKS // 2
SILENCE_SECONDS = 5
NAMED_SECONDS = 10 * max(1, RANKS // 16)
"""They share this machine's cores."""
LIMIT_SECONDS = 60 + 20 * RANKS


def _ids() -> Tensor:
    return torch.randint(
        0, ROWS, (STEPS * EXAMPLES, TABLES, 2), generator=torch.Generator().manual_seed(2)
    )


class Small(LightningModule):
    """Tables of which a lookup costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(TABLES))
        self.top = nn.Linear(TABLES * DIM, 1)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of ids, (examples, tables, 2)."""
        bags = [embedding(ids[:, number]) for number, embedding in enumerate(self.tables)]
        return self.top(torch.cat(bags, 1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Killed(Callback):
    """Kills a rank in the middle of an epoch, once a checkpoint is complete."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == KILLED_AT and rank_and_num_ranks()[0] == LOST:
            Path(os.environ["MANY_RANKS"], "sent").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: str, checkpoint: str | None) -> dict[str, Tensor]:
    os.environ["MANY_RANKS"] = folder
    rank, num_ranks = rank_and_num_ranks()
    torch.manual_seed(1)
    module = Small()
    callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVES, save_top_k=-1)]
    callbacks += [] if checkpoint else [Killed()]
    strategy = {"convert_embeddings": "all", "watchdog_seconds": SILENCE_SECONDS}
    trainer = make_trainer(
        strategy, callbacks=callbacks, enable_checkpointing=True, use_distributed_sampler=True
    )
    try:
        trainer.fit(
            module, DataLoader(_ids(), batch_size=EXAMPLES // num_ranks), ckpt_path=checkpoint
        )
    except RankError:
        Path(folder, f"named by {rank}").write_text(repr(time.time()))
        with open(f"{folder}/stderr of {rank}", "w") as log, contextlib.redirect_stderr(log):
            sys.excepthook(*sys.exc_info())  # as the interpreter does at the end of a script
        raise
    return trainer.strategy.full_state_dict() if checkpoint else {}


def _train_in_one_process() -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = Small()
    optimizer = module.configure_optimizers()
    # Lightning gives training a DistributedSampler that shuffles, of seed 0: each step has the next
    # of this order.
    order = torch.randperm(STEPS * EXAMPLES, generator=torch.Generator().manual_seed(0))
    for ids in _ids()[order].split(EXAMPLES):
        optimizer.zero_grad()
        module.training_step(ids, 0).backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_SECONDS)
def test_many_ranks_name_a_dead_one_at_once_and_its_checkpoint_goes_on_on_fewer_and_more(
    tmp_path: Path,
) -> None:
    verdict = f"rank {LOST} has died"
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(_train, RANKS, str(tmp_path), None, timeout_seconds=LIMIT_SECONDS)
    words = words_of_ranks(failed.value)
    assert [rank for rank in range(RANKS) if rank != LOST and verdict not in words[rank]] == []
    named = [float(file.read_text()) for file in tmp_path.glob("named by *")]
    assert max(named) - float((tmp_path / "sent").read_text()) < NAMED_SECONDS
    logs = {rank: tmp_path / f"stderr of {rank}" for rank in range(RANKS) if rank != LOST}
    assert "Traceback" in logs.pop(0).read_text()
    reports = {rank: log.read_text() for rank, log in logs.items()}
    assert {
        rank for rank, text in reports.items() if text.count("\n") != 1 or verdict not in text
    } == set()
    expected = _train_in_one_process()
    checkpoint = str(next(tmp_path.glob(f"step={KILLED_AT - KILLED_AT % SAVES}*")))
    for num_ranks in (3 * RANKS // 4, 3 * RANKS // 2):
        states = run_on_ranks(
            _train,
            num_ranks,
            str(tmp_path / str(num_ranks)),
            checkpoint,
            timeout_seconds=LIMIT_SECONDS,
        )
        assert states[0].keys() == expected.keys()
        assert (
            max((states[0][name] - expected[name]).abs().max().item() for name in expected) < 1e-6
        )
