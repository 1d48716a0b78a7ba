"""pytorch_lightning, which `lightning` installs too: its classes are not those of
lightning.pytorch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.console import finished

pytest.importorskip(
    "pytorch_lightning", reason="this version of lightning does not install pytorch_lightning"
)

CHANGE = "write `import lightning.pytorch as pl` for `import pytorch_lightning as pl`"
ALIAS = "write `import lightning_distrec.pytorch_lightning` before its import"
TRIES = """
import lightning_distrec
import pytorch_lightning as pl
import lightning.pytorch as lightning_pl
from lightning.pytorch.demos.boring_classes import BoringModel
from pytorch_lightning.demos.boring_classes import BoringModel as OtherModel


class Module(OtherModel):
    pass


class Data(pl.LightningDataModule):
    pass


class Callback(pl.Callback):
    pass


def trainer(of, **options):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return of.Trainer(accelerator="cpu", devices=1, fast_dev_run=True, **quiet, **options)


def of_ours(**options):
    return trainer(lightning_pl, strategy="ddp_tuned", **options)


for refused in (
    lambda: trainer(pl, strategy="torchrec_sharded"),
    lambda: trainer(pl, strategy=lightning_distrec.TunedDDPStrategy()),
    lambda: of_ours().fit(Module()),
    lambda: of_ours().validate(Module()),
    lambda: of_ours().fit(BoringModel(), datamodule=Data()),
    lambda: of_ours(callbacks=[Callback()]).fit(BoringModel()),
):
    try:
        refused()
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
trainer(pl, strategy="auto").fit(Module())
trainer(lightning_pl, strategy="auto").fit(BoringModel())
print("end")
"""


def test_what_to_import_is_said_where_the_namespaces_meet(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # a process of its own, as pytorch_lightning is imported once
    script.write_text(TRIES)
    ended = finished([sys.executable, str(script)], tmp_path, timeout=120)
    assert ended.returncode == 0, ended.stderr
    starts = [
        "ValueError: You selected an invalid strategy name: `strategy='torchrec_sharded'`",
        "ValueError: You selected an invalid strategy name: ",
        "TypeError: `model` must be a `LightningModule`",
        "TypeError: `model` must be a `LightningModule`",
        "ConfigError: Data inherits from a class of pytorch_lightning",
        "ConfigError: Callback inherits from a class of pytorch_lightning",
    ]
    *lines, end = ended.stdout.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert all(CHANGE in line and ALIAS in line for line in lines[-2:])
    assert end == "end"


FORECASTS = """
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_fabric.utilities

class Forecast(BoringModel):
    pass

def train(**options):
    trainer = pl.Trainer(accelerator="cpu", devices=1, fast_dev_run=True, enable_progress_bar=False, **options)
    trainer.fit(Forecast())
    return trainer
"""
ALIASED = """
import lightning_distrec.pytorch_lightning
import forecasts
import lightning.pytorch
import lightning.fabric.utilities
import lightning_distrec

trainer = forecasts.train(strategy="ddp_tuned")
trainer = forecasts.train(strategy=lightning_distrec.TunedDDPStrategy(), callbacks=[forecasts.ModelCheckpoint()])
print(forecasts.pl is lightning.pytorch, type(trainer).__module__, trainer.global_step)
print(forecasts.ModelCheckpoint is lightning.pytorch.callbacks.ModelCheckpoint)
print(forecasts.lightning_fabric.utilities is lightning.fabric.utilities, lightning.pytorch.callbacks.__spec__.name)
try:
    import pytorch_lightning.no_such_module
except ModuleNotFoundError as error:
    print(error)
"""
TOO_LATE = "import forecasts\nimport lightning_distrec.pytorch_lightning"


def _run_with_package(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "forecasts.py").write_text(FORECASTS)
    (folder / "script.py").write_text(script)
    return finished([sys.executable, "script.py"], folder, timeout=120)


@pytest.mark.slow
def test_a_package_that_imports_pytorch_lightning_gets_lightnings_classes(tmp_path: Path) -> None:
    ended = _run_with_package(ALIASED, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-4:] == [
        "True lightning.pytorch.trainer.trainer 1",
        "True",
        "True lightning.pytorch.callbacks",
        "No module named 'pytorch_lightning.no_such_module'",
    ]


@pytest.mark.slow
def test_an_alias_that_comes_too_late_is_refused_by_the_package_that_came_first(
    tmp_path: Path,
) -> None:
    error = _run_with_package(TOO_LATE, tmp_path).stderr.splitlines()[-1]
    assert (
        "comes too late: pytorch_lightning was imported before (by forecasts), and its classes "
        "are in use" in error
    )
