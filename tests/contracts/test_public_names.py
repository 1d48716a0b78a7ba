"""What `import lightning_distrec` promises: sorted names that exist, and no torchrec before it is
needed."""

import re
import sys
from pathlib import Path

import lightning_distrec
from lightning_distrec.registration import STRATEGIES
from tests.support.console import finished


def test_the_public_names_are_sorted_shown_and_there():
    names = list(lightning_distrec.__all__)
    assert names == sorted(set(names))
    assert dir(lightning_distrec) == sorted([*names, "__version__"])
    text = Path(lightning_distrec.__file__).read_text("utf-8")
    seen = text.partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    for name in names:
        assert re.search(rf"\b{name}\b", seen), f"type checkers do not see {name}"
        assert getattr(lightning_distrec, name) is not None


PROGRAM = """
import sys, lightning_distrec
def loaded():
    return sorted({'torchrec', 'fbgemm_gpu'} & set(sys.modules))
print(loaded())
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry
names = set(StrategyRegistry.available_strategies())
print(sorted(names & set(lightning_distrec.registration.STRATEGIES)))
for strategy in ('ddp_tuned', 'fsdp_tuned'):
    for path in (None, 'x.ckpt'):
        trainer = Trainer(strategy=strategy, accelerator='cpu', devices=1, max_epochs=1, barebones=True)
        trainer.fit(BoringModel(), ckpt_path=path)
        trainer.save_checkpoint('x.ckpt')
    print(loaded())
import lightning_distrec.cli.fit_cli
lightning_distrec.TorchRecShardedStrategy
optional = {'pandas', 'pyarrow', 'polars', 'dask', 'distributed', 'datasets', 'faiss', 'litserve', 'torchdata'}
print(sorted(optional & set(sys.modules)))
"""


def test_importing_registers_strategies_and_only_tables_import_torchrec_and_fbgemm(tmp_path):
    done = finished([sys.executable, "-c", PROGRAM], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines == ["[]", str(sorted(STRATEGIES)), "[]", "[]", "[]"]
