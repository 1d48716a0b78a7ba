"""A fit that is started again goes on from the copy in memory, which has all that a checkpoint has."""

import itertools
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_distrec import CheckpointOptions, TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from lightning_distrec.checkpoint.atomic_folder import MARKER
from lightning_distrec.checkpoint.in_memory.node_folder import LAUNCHER, NodeFolder
from lightning_distrec.checkpoint.in_memory.part import parts_in
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.checkpoints import job_fit, resuming
from lightning_distrec.strategies.checkpoints.in_memory import copies, taking
from tests.multiprocess.test_restarting import Died, Dies
from tests.support.click_model import EvaluatedModel, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.shared_memory import folder_in_memory

STEPS, EPOCHS = 4, 3
EVERY = 2
STRATEGIES: dict[str, Any] = {
    "torchrec_sharded": (TorchRecShardedStrategy, {}),
    "by rows": (TorchRecShardedStrategy, {}),
    "with fsdp": (TorchRecShardedStrategy, {"dense": "fsdp"}),
    "ddp_tuned": (TunedDDPStrategy, {}),
    "zero": (TunedDDPStrategy, {"zero_optimizer": True}),
    "fsdp_tuned": (TunedFSDPStrategy, {}),
}


class _Dense(pl.LightningModule):
    """Layers alone, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _dense_loader(rank: int) -> Any:
    batches = torch.randn(STEPS, 16, 8, generator=torch.Generator().manual_seed(rank))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(batches), batch_size=None, collate_fn=lambda x: x[0]
    )


_said: list[str] = []


def _listen(*to: Any) -> list[Any]:
    """Let functions hear what is said, in the order in which they are returned; one hears all."""
    places = [(resuming, "rank_zero_info"), *((each, "rank_zero_warn") for each in (resuming, copies, taking))]
    before = [getattr(*place) for place in places]
    for place, function in zip(places, to if len(to) > 1 else to * len(places), strict=True):
        setattr(*place, function)
    return before


def _start(folder: Path, memory: str, kind: str, name: str | None = "a", after: int | None = None) -> dict[str, Any]:
    """Start a script as a new process would. after: the step after which it dies."""
    job_fit._fits = itertools.count(1)
    _said.clear()
    strategy, options = STRATEGIES[kind]
    has_tables = strategy is TorchRecShardedStrategy
    if has_tables:
        # Adam moves all rows, so that each copy is full.
        model = seeded(EvaluatedModel, torch.optim.Adagrad if kind == "by rows" else torch.optim.Adam, {"lr": 0.1})
    else:
        torch.manual_seed(1)
        model = _Dense()
    rank, num_ranks = rank_and_num_ranks()
    options_of_copies = {"in_memory": {"every": EVERY, "folder": memory}}
    trainer = pl.Trainer(
        strategy=strategy(stopping={"run_name": name}, checkpoint=options_of_copies, **options),
        accelerator="cpu",
        devices=num_ranks,
        default_root_dir=folder,
        logger=False,
        max_epochs=EPOCHS,
        callbacks=[Dies(after, Died)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    with suppress(Died):
        trainer.fit(model, rank_loader(STEPS, rank) if has_tables else _dense_loader(rank))
    first = trainer.global_step - len(model.losses)
    return {"losses": model.losses, "first": first, "said": " ".join(_said), "callbacks": len(trainer.callbacks)}


def _live(scratch: str, memory: str, kind: str) -> dict[str, Any]:
    mine = _listen(_said.append)
    folder = Path(scratch)
    try:
        alone = _start(folder, memory, kind, "alone")
        first = _start(folder, memory, kind, after=7)
        held = [(part.step, part.ranks) for part in parts_in(next(Path(memory).glob("*/*")))]
        return {"alone": alone, "starts": [first, _start(folder, memory, kind)], "held": held}
    finally:
        _listen(*mine)


def _check(kind: str, folder: Path, memory: Path) -> None:
    lived = run_on_warm_ranks(_live, 2, str(folder), str(memory), kind)
    for of_rank in lived:
        first, second = of_rank["starts"]
        assert of_rank["held"][-1] == (6, (0, 1))  # the one before may be being removed
        assert (first["first"], second["first"]) == (0, 6)
        assert first["losses"] == of_rank["alone"]["losses"][:7]
        assert second["losses"] == of_rank["alone"]["losses"][6:]
        assert len({each["callbacks"] for each in (first, second)}) == 1
    assert [*memory.glob("*/*")] == []
    said = lived[0]["starts"][1]["said"]
    assert "ranks_0-1/step_6.ckpt, step 6, the furthest" in said
    assert "The job had come to step 7: 1 step is trained again" in said
    assert [*folder.rglob("*.ckpt"), *folder.rglob("*.distcp")] == []


@pytest.mark.parametrize("kind", ["torchrec_sharded", "by rows"])
def test_a_run_goes_on_from_the_copy_in_memory_bit_by_bit(tmp_path: Path, kind: str) -> None:
    with folder_in_memory() as memory:
        _check(kind, tmp_path, memory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind not in ("torchrec_sharded", "by rows")])
def test_all_strategies_go_on_from_the_copy_in_memory(tmp_path: Path, kind: str) -> None:
    with folder_in_memory() as memory:
        _check(kind, tmp_path, memory)


def _damaged(scratch: str, memory: str) -> list[Any]:
    mine = _listen(_said.append)
    rank = rank_and_num_ranks()[0]
    found: list[Any] = []
    try:
        for what in ("bytes", "marker", "memory"):
            if what == "memory":
                NodeFolder.free_bytes, enough = (lambda self: 1000), NodeFolder.free_bytes  # type: ignore[assignment]
                try:
                    _start(Path(scratch), memory, "torchrec_sharded")
                except ConfigError as error:
                    found.append(str(error))
                finally:
                    NodeFolder.free_bytes = enough  # type: ignore[method-assign]
                continue
            _start(Path(scratch), memory, "torchrec_sharded", what, after=5)
            (path,) = Path(memory).glob(f"*/run-{what}*/*/step_4.ckpt")
            if rank == 0 and what == "bytes":
                content = bytearray((path / "__1_0.distcp").read_bytes())
                content[len(content) // 2] ^= 1
                (path / "__1_0.distcp").write_bytes(content)
            elif rank == 0:
                (path / MARKER).unlink()
            found.append(_start(Path(scratch), memory, "torchrec_sharded", what, after=1))
        found.append(_start(Path(scratch), memory, "torchrec_sharded", None, after=3)["said"])
        return found
    finally:
        _listen(*mine)


@pytest.mark.slow
def test_what_cannot_be_taken_from_memory_is_told(tmp_path: Path) -> None:
    with folder_in_memory() as memory:
        lived = run_on_warm_ranks(_damaged, 2, str(tmp_path), str(memory))
    for damaged, incomplete, too_little, _ in lived:
        assert (damaged["first"], incomplete["first"]) == (0, 0)
        assert "in_memory needs" in too_little
        assert re.search("/dev/shm/.* has 1,0..\\.", too_little)
    assert "__1_0.distcp have changed" in lived[0][0]["said"]
    assert "this job has no name" in lived[0][3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every": 0}, "every=0 must be a number of steps"),
        ({"every": 1.5}, "every=1.5 must be a number of steps"),
        ({"every": 5, "folder": "shm"}, "folder='shm' must be an absolute path"),
        ({"often": 5}, "is not known. It takes every"),
        ({}, "is not known. It takes every"),
        (7, "in_memory=7 is not known"),
    ],
)
def test_options_that_cannot_be_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointOptions(in_memory=given)


def test_a_folder_is_its_users_alone_in_memory_and_gone_when_its_launcher_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="folder='/proc' is on proc, not in memory"):
        NodeFolder(Path("/proc"), "x").open()
    with pytest.raises(ConfigError, match="folder='/nowhere' does not exist"):
        NodeFolder(Path("/nowhere"), "x").open()
    with folder_in_memory() as memory:
        dead, alive = NodeFolder(memory, "dead"), NodeFolder(memory, "alive")
        dead.open()
        alive.open()
        assert dead.path.parent.stat().st_mode & 0o777 == 0o700
        noted = (dead.path / LAUNCHER).read_text()
        (dead.path / LAUNCHER).write_text(noted.replace('"started": "', '"started": "1'))
        now = time.time() + 100
        monkeypatch.setattr("lightning_distrec.checkpoint.in_memory.node_folder.time.time", lambda: now)
        NodeFolder(memory, "mine").open()
        assert {path.name for path in dead.path.parent.iterdir()} == {"alive", "mine"}
        dead.path.parent.chmod(0o755)
        with pytest.raises(ConfigError, match="is not a folder that only this user can read"):
            NodeFolder(memory, "mine").open()
