"""Private names of lightning and pytorch_lightning: where objects of one namespace meet a Trainer of the other."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

CONNECTOR = "pytorch_lightning.trainer.connectors.accelerator_connector"


def refuse_in_other_trainers(refuse: Callable[[Any], None]) -> None:
    """Call `refuse` with the strategy that a `pytorch_lightning` Trainer gets, before it looks at it.

    Upstream: says that the name is invalid, or that ours is no Strategy. pytorch_lightning is not imported for it, as
    that takes a second: where it is not yet, its module gets the check when it is. Can go when the two namespaces are
    one. Source: pytorch_lightning/trainer/connectors/accelerator_connector.py.
    """

    def wrap(connector: ModuleType) -> None:
        theirs = connector._AcceleratorConnector.__init__
        if hasattr(theirs, "theirs"):
            return

        def init(self: Any, *args: Any, strategy: Any = "auto", **options: Any) -> None:
            refuse(strategy)
            theirs(self, *args, strategy=strategy, **options)

        init.theirs = theirs  # type: ignore[attr-defined]
        connector._AcceleratorConnector.__init__ = init

    if CONNECTOR in sys.modules:
        wrap(sys.modules[CONNECTOR])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(CONNECTOR, wrap))


def refuse_other_objects(refuse: Callable[[object], None]) -> None:
    """Call `refuse` with a module or data module that no Trainer of `lightning.pytorch` takes, before it raises.

    Upstream's `_check_mixed_imports` looks at the module in which the object's own class is, which is the user's.
    Can go when it looks at the classes that this one inherits from.
    Source: lightning/pytorch/utilities/model_helpers.py, which compile.py imports from.
    """
    from lightning.pytorch.utilities import compile as compiled
    from lightning.pytorch.utilities import model_helpers

    theirs = model_helpers._check_mixed_imports
    if hasattr(theirs, "theirs"):
        return

    def check(instance: object) -> None:
        refuse(instance)
        theirs(instance)

    check.theirs = theirs  # type: ignore[attr-defined]
    for module in (model_helpers, compiled):
        module.__dict__["_check_mixed_imports"] = check


class _AfterImport(MetaPathFinder):
    """Calls `then` with the module `name` once, when it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # find_spec below asks the other finders
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
