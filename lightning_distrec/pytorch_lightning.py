"""Import this first where an installed package imports `pytorch_lightning`, which becomes a name of
lightning.pytorch.

pytorch_lightning has the same classes again, which a Trainer of lightning.pytorch does not know as
its own. A package whose code is not yours gets those of lightning.pytorch, and so works with the
strategies of lightning_distrec:

    import lightning_distrec.pytorch_lightning import neuralforecast
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from lightning_distrec.errors import ConfigError

ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class AliasFinder(MetaPathFinder, Loader):
    """Finds the modules of lightning.pytorch and lightning.fabric under the names of their
    standalone packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias; None: the name is none, or there is no such module."""
        package, _, submodule = fullname.partition(".")
        if package not in ALIASES:
            return None
        name = f"{ALIASES[package]}.{submodule}" if submodule else ALIASES[package]
        return None if find_spec(name) is None else ModuleSpec(fullname, self, origin=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that the alias names."""
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its spec back, which the import system has replaced by that of the
        alias."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _install() -> None:
    """Raises ConfigError: a name was imported before, so that its classes are in use."""
    for name in ALIASES:
        standalone = sys.modules.get(name)
        if standalone is None or standalone is sys.modules.get(ALIASES[name]):
            continue
        importers = set()
        for module_name, module in list(sys.modules.items()):
            values = list(getattr(module, "__dict__", {}).values())
            if any(value is standalone for value in values):
                importers.add(module_name.partition(".")[0])
        packages = sorted(name for name in importers - ALIASES.keys() if not name.startswith("__"))
        raise ConfigError(
            f"`import lightning_distrec.pytorch_lightning` comes too late: {name} was imported "
            f"before{f' (by {packages[0]})' if packages else ''}, and its classes are in use. Move "
            "the line to the top of the script, before the imports of other packages."
        )
    sys.meta_path.insert(0, AliasFinder())


_install()
