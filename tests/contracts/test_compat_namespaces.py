"""pytorch_lightning, which `lightning` installs too: its classes are not those of lightning.pytorch."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_distrec._compat import lightning_namespaces as _lightning_namespaces

pytest.importorskip("pytorch_lightning", reason="this version of lightning does not install pytorch_lightning")

CHANGE = "write `import lightning.pytorch as pl` for `import pytorch_lightning as pl`"
TRIES = """
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
    lambda: trainer(pl, strategy="ddp_tuned"),
    lambda: trainer(pl, strategy="fsdp_tuned"),
    lambda: trainer(pl, strategy=lightning_distrec.TunedDDPStrategy()),
    lambda: of_ours().fit(Module()),
    lambda: of_ours().validate(Module()),
    lambda: of_ours().fit(BoringModel(), datamodule=Data()),
    lambda: of_ours(callbacks=[Callback()]).fit(BoringModel()),
):
    try:
        refused()
    except lightning_distrec.errors.ConfigError as error:
        print(error)
trainer(pl, strategy="auto").fit(Module())
trainer(lightning_pl, strategy="auto").fit(BoringModel())
try:
    of_ours().fit(3)
except TypeError as error:
    print(error)
print("end")
"""


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param(
            "import lightning_distrec, lightning_distrec.errors\nimport pytorch_lightning as pl",
            id="imported-after",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import pytorch_lightning as pl\nimport lightning_distrec, lightning_distrec.errors",
            id="imported-before",
        ),
    ],
)
def test_what_to_import_is_said_where_the_namespaces_meet(imports: str, tmp_path: Path) -> None:
    # import of lightning_distrec makes use of both
    assert callable(_lightning_namespaces.refuse_in_other_trainers)
    assert callable(_lightning_namespaces.refuse_other_objects)
    script = tmp_path / "script.py"  # a process of its own, as pytorch_lightning is imported once
    script.write_text(imports + TRIES)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "pytorch_lightning" in line]
    starts = [
        "strategy 'torchrec_sharded' is given to a Trainer of pytorch_lightning",
        "strategy 'ddp_tuned' is given to a Trainer of pytorch_lightning",
        "strategy 'fsdp_tuned' is given to a Trainer of pytorch_lightning",
        "strategy 'TunedDDPStrategy' is given to a Trainer of pytorch_lightning",
        "Module inherits from a class of pytorch_lightning",
        "Module inherits from a class of pytorch_lightning",
        "Data inherits from a class of pytorch_lightning",
        "Callback inherits from a class of pytorch_lightning",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert all(CHANGE in line for line in lines)
    assert "`model` must be a `LightningModule`" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "end"
