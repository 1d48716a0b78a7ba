"""What ranks have imported before they are forked."""

from functools import cache
from importlib import import_module

from lightning.fabric.utilities import registry

from lightning_distrec.cluster.early_ranks import without_collections

MODULES = (
    "lightning_distrec.pipeline",
    "lightning_distrec.strategies.torchrec",
    "pytest",
    "torchrec.datasets.utils",
    "torchrec.distributed.planner",
    "torchrec.models.dlrm",
)

with without_collections():
    for name in MODULES:
        import_module(name)

# Each Trainer reads those of all installed packages, for callbacks: a tenth of a small fit's time.
registry.entry_points = cache(registry.entry_points)
