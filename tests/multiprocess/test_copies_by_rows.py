"""A copy in memory that has changed rows alone holds, with those before it, what a full checkpoint holds."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_distrec.checkpoint.in_memory.part import Part, check, parts_in
from tests.support.click_model import rank_loader, seeded
from tests.support.incremental_runs import (
    EVERY,
    NARROW,
    FullToo,
    KeepsGradients,
    LargeTables,
    Loads,
    Optimizer,
    WritesInStep,
    tensors_in,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.shared_memory import folder_in_memory
from tests.support.trainers import make_trainer

ADAGRAD: Optimizer = (torch.optim.Adagrad, {"lr": 0.1})
STEPS = 17


class LargerTables(LargeTables):
    """Looks up few rows of its tables."""

    changes = {"wide": {"num_embeddings": 900}, "narrow": {"num_embeddings": 600}, "shared": {"num_embeddings": 300}}


class _Compares(pl.Callback):
    """Compares each copy with the full checkpoint of its step, once it is written."""

    def __init__(self, folder: str, memory: str) -> None:
        self.folder, self.memory = Path(folder), Path(memory)
        self.found: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if not step or step % EVERY:
            return
        copies = trainer.strategy._run.session.checkpoints.copies
        copies.finish()
        part: Part = max(parts_in(copies.folder.path), key=lambda part: part.step)
        copied, full = tensors_in(Path(part.path)), tensors_in(self.folder / "full" / f"step={step}.ckpt")
        differ = [name for name in full if name not in copied or not torch.equal(copied[name], full[name])]
        damaged = [check(Path(path), rank) for path in part.paths for rank in (0, 1)]
        held = sum(file.stat().st_size for file in Path(part.path).glob("*.distcp"))
        facts = {"step": part.step, "over": len(part.over), "differ": differ, "damaged": damaged, "bytes": held}
        self.found.append(facts | {"kept": len(list(Path(part.path).parent.glob("*.ckpt")))})


def _fit(
    folder: str, memory: str, optimizer: Optimizer, model: type, strategy: dict[str, Any], series: bool
) -> list[dict[str, Any]]:
    rank, _ = rank_and_num_ranks()
    compares = _Compares(folder, memory)
    checkpoint: dict[str, Any] = {"in_memory": {"every": EVERY, "folder": memory}}
    if series:
        checkpoint["incremental"] = {"every": EVERY, "full_every": 100, "keep": 10, "dirpath": f"{folder}/series"}
    trainer = make_trainer(
        {"checkpoint": checkpoint, "stopping": {"run_name": "copies"}, **strategy},
        callbacks=[FullToo(folder), compares],
        default_root_dir=folder,
    )
    trainer.fit(seeded(model, *optimizer), rank_loader(STEPS, rank))
    return compares.found


CASES: dict[str, tuple[Optimizer, type, dict[str, Any], bool]] = {
    "fused": (ADAGRAD, LargerTables, {}, False),
    "sparse": (ADAGRAD, LargeTables, {"embedding_update": "sparse"}, False),
    "all rows move": ((torch.optim.Adam, {"lr": 0.1}), LargeTables, {}, False),
    "a table is loaded": (ADAGRAD, Loads, {}, False),
    "a step writes a table": (ADAGRAD, WritesInStep, {}, False),
    "gradients wait": (ADAGRAD, KeepsGradients, {"embedding_update": "sparse"}, False),
    "with incremental": (ADAGRAD, LargerTables, {}, True),
}


@pytest.mark.parametrize(
    "case",
    [case if case in ("fused", "with incremental") else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_each_copy_is_bitwise_the_full_checkpoint_of_its_step(tmp_path: Path, case: str) -> None:
    with folder_in_memory() as memory:
        found, _ = run_on_warm_ranks(_fit, 2, str(tmp_path), str(memory), *CASES[case])
    # A step of KeepsGradients steps one optimizer or two.
    assert {each["step"] for each in found} >= {*range(EVERY, STEPS, EVERY)}
    assert [(each["differ"], set(each["damaged"]), each["kept"] - each["over"]) for each in found] == [
        ([], {""}, 1)
    ] * len(found)
    depths = [each["over"] for each in found]
    if case == "all rows move":
        assert set(depths) == {0}
    elif case in ("fused", "with incremental"):
        assert max(depths) >= 2
        assert depths.count(0) >= 2  # full again, once the differences have half of its bytes
        assert all(each["bytes"] < found[0]["bytes"] for each in found if each["over"])
    if case == "with incremental":
        for path in (tmp_path / "series").glob("*-difference.ckpt"):
            full = tensors_in(tmp_path / "full" / f"{path.name.partition('-')[0]}.ckpt")
            of_series = tensors_in(path)
            assert [name for name in full if not torch.equal(full[name], of_series[name])] == []
        assert list((tmp_path / "series").glob("*-difference.ckpt"))
    assert any(NARROW in name for name in tensors_in(tmp_path / "full" / f"step={EVERY}.ckpt"))
