"""What several ranks have saved is exported for one process: weights for any module, and for stock
Lightning."""

import copy
import json
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec.checkpoint.contents import read_full
from lightning_distrec.serving.describe import describe
from lightning_distrec.serving.export_checkpoint import export
from tests.support.checkpoint_folders import by_columns, by_rows, write_folder
from tests.support.click_model import ClickModel, join_batches, make_batch, seeded
from tests.support.embedding_models import loader, pairs
from tests.support.parameters import slow_except
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.resuming import differences
from tests.support.trainers import DEFAULTS, make_trainer

STEPS = 4
CUTS = ("table_wise", "row_wise", "column_wise", "data_parallel")
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.1})


class Clicks(ClickModel):
    """A click model whose state is kept by whoever runs it."""

    def on_train_end(self) -> None:
        pass


class Ratings(pl.LightningModule):
    """Two ordinary nn.Embeddings and a layer, trained by Adam at a rate that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"dim": 8})
        self.users, self.films = nn.Embedding(50, 8), nn.Embedding(70, 8)
        self.top = nn.Linear(16, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        users, films = batch
        actual = self.top(torch.cat([self.users(users), self.films(films)], 1)).squeeze(1)
        return nn.functional.mse_loss(actual, ((users + films) % 3).float())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        falling = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


def _clicks() -> Clicks:
    return seeded(Clicks, *ADAGRAD)  # type: ignore[no-any-return]


def _ratings() -> Ratings:
    return seeded(Ratings)  # type: ignore[no-any-return]


MAKERS = {"clicks": _clicks, "ratings": _ratings}


def _batch(kind: str, step: int, rank: int) -> Any:
    return make_batch(1000 * step + rank) if kind == "clicks" else pairs(step, rank)


def _global_batch(kind: str, step: int, num_ranks: int) -> Any:
    batches = [_batch(kind, step, rank) for rank in range(num_ranks)]
    if kind == "clicks":
        return join_batches(batches)
    return tuple(torch.cat(per_rank_results) for per_rank_results in zip(*batches, strict=True))


def _save(kind: str, cut: str, path: str) -> dict[str, Tensor]:
    """Train for an epoch and save; returns the state as rank 0 has it whole."""
    rank, _ = rank_and_num_ranks()
    model: pl.LightningModule = MAKERS[kind]()
    names = ("wide", "narrow", "shared") if kind == "clicks" else ("users", "films")
    tables = {name: {"sharding_types": [cut], "min_partition": 4} for name in names}
    trainer = make_trainer({"convert_embeddings": "all", "tables": tables})
    trainer.fit(model, loader([_batch(kind, step, rank) for step in range(STEPS)]))
    trainer.save_checkpoint(path)
    return {key: value.clone() for key, value in trainer.strategy.full_state_dict().items()}


def _jobs() -> list[tuple[str, str]]:
    return [("clicks", cut) for cut in CUTS] + [("ratings", "row_wise"), ("ratings", "column_wise")]


@pytest.fixture(scope="module", params=slow_except([2], [1, 2, 3]))
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, dict[str, Any]]:
    """Number of ranks; folder with "<kind> <cut>.ckpt"; their whole states."""
    folder = tmp_path_factory.mktemp("saved")
    calls = {
        f"{kind} {cut}": (_save, kind, cut, str(folder / f"{kind} {cut}.ckpt"))
        for kind, cut in _jobs()
    }
    states = run_each_on_ranks(calls, request.param)[0]
    return request.param, folder, states


def test_exported_weights_load_strictly_into_the_unsharded_module_and_are_those_of_the_run(
    saved: tuple[int, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, folder, states = saved
    for kind, cut in _jobs():
        expected = states[f"{kind} {cut}"]
        for suffix in ("pt", "safetensors", "ckpt"):
            export(folder / f"{kind} {cut}.ckpt", tmp_path / f"{kind} {cut}.{suffix}")
        weights = {
            "pt": torch.load(tmp_path / f"{kind} {cut}.pt", weights_only=True),
            "safetensors": load_file(tmp_path / f"{kind} {cut}.safetensors"),
            "ckpt": torch.load(tmp_path / f"{kind} {cut}.ckpt", weights_only=True)["state_dict"],
        }
        for suffix, actual in weights.items():
            module = MAKERS[kind]()
            module.load_state_dict(actual, strict=True)
            assert all(
                torch.equal(value, expected[key]) for key, value in module.state_dict().items()
            ), (cut, suffix)
        start = MAKERS[kind]().state_dict()
        assert not any(torch.equal(start[key], expected[key]) for key in start), (
            "nothing was trained"
        )


def test_optimizers_have_the_state_of_the_unsharded_run_and_go_on_under_stock_lightning(
    saved: tuple[int, Path, dict[str, Any]], tmp_path: Path
) -> None:
    num_ranks, folder, _ = saved
    for kind, cut in _jobs():
        path = tmp_path / f"{kind} {cut}.ckpt"
        export(folder / f"{kind} {cut}.ckpt", path)
        plain = _train_plainly(kind, num_ranks)
        actual = torch.load(path, weights_only=True)
        expected = plain[STEPS]["optimizer"]
        assert _numbers_in_groups(actual["optimizer_states"][0]) == _numbers_in_groups(expected)
        assert (
            _differences(actual["optimizer_states"][0]["state"], expected["state"], num_ranks) == []
        ), cut
        resumed = _resume(kind, path, num_ranks)
        assert resumed["rates"] == plain[2 * STEPS]["rates"][STEPS:]
        assert resumed["steps"] == 2 * STEPS
        assert _differences(resumed["state"], plain[2 * STEPS]["state"], num_ranks) == [], cut


def _numbers_in_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return param groups without what Lightning's schedulers and newer versions of torch note in
    them."""
    return [
        {key: group[key] for key in ("params", "lr", "weight_decay")}
        for group in state["param_groups"]
    ]


def _differences(actual: dict[Any, Any], expected: dict[Any, Any], num_ranks: int) -> list[str]:
    """Return what differs in nested dicts of tensors by more than sums in another order may."""
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    messages = []
    for key, value in expected.items():
        if isinstance(value, dict):
            messages += [
                f"{key}: {difference}" for difference in _differences(actual[key], value, num_ranks)
            ]
        elif actual[key].shape != value.shape or not torch.allclose(
            actual[key], value, rtol=2e-4, atol=2e-6
        ):
            messages.append(
                f"{key}: {tuple(actual[key].shape)} by {float((actual[key] - value).abs().max())}"
            )
    return messages


def _train_plainly(kind: str, num_ranks: int) -> dict[int, dict[str, Any]]:
    """Train the unsharded module in a plain loop; returns its state, its optimizer's, and the
    rates, by step."""
    model: Any = MAKERS[kind]()
    made = model.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    actual, rates = {}, []
    for step in range(2 * STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        model.training_step(_global_batch(kind, step, num_ranks), step).backward()
        optimizer.step()
        if isinstance(made, dict):
            made["lr_scheduler"]["scheduler"].step()
        state = {key: value.detach().clone() for key, value in model.state_dict().items()}
        actual[step + 1] = {
            "state": state,
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "rates": list(rates),
        }
    return actual


class _Rates(pl.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _resume(kind: str, path: Path, num_ranks: int) -> dict[str, Any]:
    """Train for one more epoch by stock Lightning, in this process, on the batches of all ranks
    together."""
    model: pl.LightningModule = MAKERS[kind]()
    rates = _Rates()
    trainer = pl.Trainer(
        strategy="auto", devices=1, callbacks=[rates], **(DEFAULTS | {"max_epochs": 2})
    )
    batches = DataLoader(
        [_global_batch(kind, STEPS + s, num_ranks) for s in range(STEPS)], batch_size=None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, about workers
        trainer.fit(model, batches, ckpt_path=str(path))
    return {"state": model.state_dict(), "rates": rates.rates, "steps": trainer.global_step}


def test_a_folder_and_what_it_was_exported_to_do_not_differ(
    saved: tuple[int, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, folder, _ = saved
    for kind, cut in _jobs()[2:]:
        export(folder / f"{kind} {cut}.ckpt", tmp_path / "out.ckpt", overwrite=True)
        exported = torch.load(tmp_path / "out.ckpt", weights_only=True)
        source = read_full(folder / f"{kind} {cut}.ckpt", with_optimizers=True)
        assert differences(exported, source, "checkpoint", 0.0) == []


def test_inspect_shows_how_each_table_was_sharded(saved: tuple[int, Path, dict[str, Any]]) -> None:
    num_ranks, folder, _ = saved
    for kind, cut in _jobs():
        actual = describe(folder / f"{kind} {cut}.ckpt")
        tables = {
            tensor.name: tensor.sharding_type
            for tensor in actual.tensors
            if tensor.sharding_type is not None
        }
        names = [f"ebc.embedding_bags.{name}.weight" for name in ("wide", "narrow", "shared")]
        assert tables == dict.fromkeys(
            names if kind == "clicks" else ["users.weight", "films.weight"], cut
        )
        assert (actual.problem, actual.step, actual.num_ranks) == (None, STEPS, num_ranks)
        assert (actual.versions or "").startswith(f"torch {torch.__version__.split('+')[0]}")


# ------------------------------------------------------------------------------------------------------- size

ROWS = 3 * 2**20


def _table() -> Tensor:
    return torch.arange(ROWS * 64, dtype=torch.int32).view(ROWS, 64)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """Return a folder of 1.1 GB: a table that four ranks had columns of, and what its optimizer
    keeps, cut by rows."""
    table = _table()
    optimizer_state = {
        "optimizer": "torch.optim.adagrad.Adagrad",
        "state": {
            "table.weight": {
                "sum": by_rows(table[: ROWS // 4].clone(), ROWS // 9),
                "step": torch.tensor(1.0),
            }
        },
        "param_groups": [{"lr": 0.1, "params": ["table.weight", "dense.weight"]}],
    }
    state = {
        "table.weight": by_columns(table, 16, 32, 48),
        "dense.weight": table[: ROWS // 16].clone(),
    }
    yield write_folder(
        tmp_path / "large.ckpt", {"state_dict": state, "optimizer_states": [optimizer_state]}
    )
    shutil.rmtree(tmp_path)


def _export_alone(source: Path, *targets: Path) -> dict[str, Any]:
    """Export in one process of its own; returns seconds of each, and by how many MB its memory grew
    meanwhile."""
    code = """
        import json, re, sys, time
        from pathlib import Path
        from lightning_distrec.serving.export_checkpoint import export

        def held(what):
            return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000

        before, took = held("VmRSS"), []
        for target in sys.argv[2:]:
            began = time.monotonic(), time.process_time()
            export(Path(sys.argv[1]), Path(target))
            took.append((time.monotonic() - began[0], time.process_time() - began[1]))
        import torch.distributed as dist
        assert not dist.is_initialized() and "torchrec" not in sys.modules
        print(json.dumps({"took": took, "grown": held("VmHWM") - before}))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(source), *map(str, targets)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_gigabyte_is_exported_within_256_megabytes_of_memory_and_30_seconds(
    large: Path, tmp_path: Path
) -> None:
    assert describe(large).bytes_on_disk > 1e9
    actual = _export_alone(large, tmp_path / "out.ckpt", tmp_path / "out.safetensors")
    print(actual)
    assert actual["grown"] <= 256
    # On the processor: how long the disk takes is not ours, and others may be at work.
    assert max(on_processor for _, on_processor in actual["took"]) < 30
    table = _table()
    checkpoint = torch.load(tmp_path / "out.ckpt", weights_only=True, mmap=True)
    assert torch.equal(checkpoint["optimizer_states"][0]["state"][0]["sum"], table[: ROWS // 4])
    for state in (checkpoint["state_dict"], load_file(tmp_path / "out.safetensors")):
        assert torch.equal(state["table.weight"], table)
        assert torch.equal(state["dense.weight"], table[: ROWS // 16])
