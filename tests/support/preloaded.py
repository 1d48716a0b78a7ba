"""What ranks have imported before they are forked."""

import gc
from functools import cache
from importlib import import_module

MODULES = (
    "lightning_distrec.pipeline",
    "lightning_distrec.strategies.torchrec",
    "pytest",
    "torchrec.datasets.utils",
    "torchrec.distributed.planner",
    "torchrec.models.dlrm",
)

# Looking for garbage among what modules hold takes an eighth of the imports' time.
gc.disable()
for name in MODULES:
    import_module(name)
gc.enable()

# Each Trainer reads those of all installed packages, for callbacks: a tenth of a small fit's time.
registry = import_module("lightning.fabric.utilities.registry")
registry.entry_points = cache(registry.entry_points)
