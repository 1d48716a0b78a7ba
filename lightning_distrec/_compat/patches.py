"""What is replaced in upstream's classes, modules and objects until it is put back."""

from contextlib import ExitStack
from typing import Any

_ABSENT = object()


class Patches(ExitStack):
    """Attributes that are replaced until `close`, which puts back the last first.

    The table in docs/architecture.md lists those of classes and modules;
    tests/contracts/test_patches.py compares.
    """

    def replace(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute of a class, a module or an object; what somebody else has set since then
        stays at the end.

        An object's is written into its `__dict__`, past nn.Module.__setattr__, where it takes
        precedence over methods.
        """
        # vars, not getattr: what is inherited is put back by deleting, or a later change of the
        # base would be hidden.
        original = vars(target).get(name, _ABSENT)
        _set(target, name, value)
        self.callback(
            lambda: _set(target, name, original) if vars(target).get(name) is value else None
        )

    def replace_class(self, instance: Any, kind: type) -> None:
        """Make an object one of a subclass of its class, whose properties cannot be replaced on
        it."""
        original = type(instance)
        # Python looks properties up on the class, past attributes of the instance. A subclass
        # without slots has the layout of its base, so that the object keeps all that it has.
        instance.__class__ = kind
        self.callback(setattr, instance, "__class__", original)


def _set(target: Any, name: str, value: Any) -> None:
    if isinstance(target, type):
        setattr(target, name, value) if value is not _ABSENT else delattr(target, name)
    elif value is _ABSENT:
        del target.__dict__[name]
    else:
        target.__dict__[name] = value
