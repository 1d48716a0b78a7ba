"""What `import lightning_distrec` promises: sorted names that exist, and no torchrec before it is
needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_distrec
from lightning_distrec.registration import STRATEGIES
from tests.support.environments import environment
from tests.support.parameters import slow_except


def run_python(code: str, folder: Path | None = None) -> str:
    """Run `code` in a new interpreter; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_sorted_and_each_is_there_once():
    names = list(lightning_distrec.__all__)
    assert names == sorted(set(names))


def test_dir_shows_public_names_only():
    assert dir(lightning_distrec) == sorted([*lightning_distrec.__all__, "__version__"])


def test_type_checkers_see_the_public_names():
    text = Path(lightning_distrec.__file__).read_text("utf-8")
    seen = text.partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    for name in lightning_distrec.__all__:
        assert re.search(rf"\b{name}\b", seen), name


@pytest.mark.parametrize("name", lightning_distrec.__all__)
def test_every_public_name_resolves(name):
    assert getattr(lightning_distrec, name) is not None


def test_importing_the_package_registers_its_strategies_and_imports_neither_torchrec_nor_fbgemm():
    code = (
        "import lightning_distrec, sys\n"
        "print({'torchrec', 'fbgemm_gpu'} & set(sys.modules))\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print(sorted(set(StrategyRegistry.available_strategies()) & "
        "set(lightning_distrec.registration.STRATEGIES)))"
    )
    loaded, registered = run_python(code).splitlines()
    assert loaded == "set()"
    assert registered == str(sorted(STRATEGIES))


@pytest.mark.parametrize("strategy", slow_except(["fsdp_tuned"], ["ddp_tuned", "fsdp_tuned"]))
def test_runs_without_tables_import_neither_torchrec_nor_fbgemm(strategy, tmp_path):
    code = (
        "import sys, lightning_distrec\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "for path in (None, 'x.ckpt'):\n"
        f"    trainer = Trainer(strategy='{strategy}', accelerator='cpu', devices=1, "
        "max_epochs=1, barebones=True)\n"
        "    trainer.fit(BoringModel(), ckpt_path=path)\n"
        "    trainer.save_checkpoint('x.ckpt')\n"
        "print({'torchrec', 'fbgemm_gpu'} & set(sys.modules))"
    )
    assert run_python(code, tmp_path).splitlines()[-1] == "set()"
