"""What `import lightning_distrec` promises: sorted names that exist, and no torchrec before it is needed."""

import subprocess
import sys

import pytest

import lightning_distrec


def run_python(code: str) -> str:
    """Run `code` in a new interpreter; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_sorted_and_each_is_there_once():
    names = list(lightning_distrec.__all__)
    assert names == sorted(set(names))


@pytest.mark.parametrize("name", lightning_distrec.__all__)
def test_every_public_name_resolves(name):
    assert getattr(lightning_distrec, name) is not None


def test_importing_the_package_imports_neither_torchrec_nor_fbgemm():
    loaded = run_python("import lightning_distrec, sys; print({'torchrec', 'fbgemm_gpu'} & set(sys.modules))")
    assert loaded == "set()"


def test_importing_the_package_registers_its_strategies_with_lightning():
    code = (
        "import lightning_distrec\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print(sorted(set(StrategyRegistry.available_strategies()) & {'torchrec_sharded', 'ddp_tuned'}))"
    )
    assert run_python(code) == "['ddp_tuned', 'torchrec_sharded']"
