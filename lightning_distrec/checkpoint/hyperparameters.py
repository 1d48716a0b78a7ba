"""Hyperparameters of any type: saved as Lightning saves them, and read without running code.

A checkpoint is read by torch's reader of plain types, to which some harmless types are added.
Objects of others become an `Unread`, which takes part in nothing, and may stand among
hyperparameters alone.
"""

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_distrec.errors import CheckpointError

EXTRA = "lightning_distrec"
"""Key of what a file holds besides what Lightning writes: "format", "num_ranks", "versions",
"plan", "files" (name -> content), "optimizers" (class and parameters' names of each) and
"rank_states", one for each rank."""
KINDS = (LightningModule, LightningDataModule)
HYPERPARAMETERS = {
    kind.CHECKPOINT_HYPER_PARAMS_KEY: kind.CHECKPOINT_HYPER_PARAMS_TYPE for kind in KINDS
}
"""The keys of hyperparameters in a checkpoint, and of their type where that is one of
OmegaConf's."""
PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
HARMLESS = {
    "pathlib": PATHS,
    "pathlib._local": PATHS,
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "builtins": ("frozenset", "slice", "range", "dict", "list", "int", "float", "str", "bool"),
    "collections": ("defaultdict",),
    "typing": ("Any", "Union"),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.base": ("ContainerMetadata", "Metadata", "SCMode"),
    "omegaconf.nodes": (
        "AnyNode",
        "StringNode",
        "IntegerNode",
        "FloatNode",
        "BooleanNode",
        "PathNode",
        "EnumNode",
    ),
}
"""Types whose objects are built from plain values, by module."""
ATTRIBUTE_DICT = "lightning.fabric.utilities.data.AttributeDict"


class Unread:
    """In place of an object of a type that is not read. `type_name`: that of the type."""

    type_name = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what the object would be built from, and drops it."""

    def __new__(cls, *_: Any, **__: Any) -> "Unread":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Drop it."""

    def __reduce__(self) -> Any:
        return left_out, (self.type_name,)


def left_out(type_name: str) -> Unread:
    """Return what stands for an object of this type; checkpoints hold it where an object cannot be
    saved."""
    return _unread_type(type_name)()


def _unread_type(type_name: str) -> type[Unread]:
    return type("Unread", (Unread,), {"type_name": type_name})


def _known_type(name: str) -> Any:
    """Return what stands for a global of a checkpoint: a harmless type itself, or a kind of
    `Unread`."""
    module, _, attribute = name.rpartition(".")
    if name == ATTRIBUTE_DICT:
        return dict
    if name == f"{__name__}.{left_out.__name__}":
        return left_out
    if name == "builtins.getattr":  # Python 3.11 pickles members of an Enum by name
        return _member
    if attribute in HARMLESS.get(module, ()):
        package = module.partition(".")[0]
        return (
            getattr(import_module(module), attribute) if find_spec(package) else _unread_type(name)
        )
    # Of a module that the program has imported: nothing of the checkpoint's choice is imported.
    resolved: Any = sys.modules.get(module)
    for part in attribute.split("."):
        resolved = getattr(resolved, part, None)
    return (
        resolved
        if isinstance(resolved, type) and issubclass(resolved, Enum)
        else _unread_type(name)
    )


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an Enum, in place of getattr."""
    if isinstance(kind, type) and issubclass(kind, Enum) and type(name) is str:
        return kind[name]
    return _unread_type("builtins.getattr")()


def without_hyperparameters(value: Any) -> Any:
    """Return a checkpoint without those values in it that may be of any type."""
    if type(value) is not dict:
        return value
    return {key: child for key, child in value.items() if key not in HYPERPARAMETERS}


def load_safely(file: Any, load: Callable[..., Any] = torch.load, **options: Any) -> Any:
    """Return what a file of torch.save holds, and `Unread` for hyperparameters whose types are not
    known.

    file: a path or a file. load: as torch.load. Raises what torch.load(weights_only=True) raises:
    it holds something else of another type, or is no such file.
    """
    try:
        return load(file, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        refusal = error
    try:
        with _allowed_types(file):
            content = load(file, weights_only=True, **options)
    except Exception:
        raise refusal from None
    if any(unread_in(without_hyperparameters(content))):
        raise refusal
    return content


def read_file(path: Any, load: Callable[..., Any], **options: Any) -> Any:
    """Return a checkpoint of ours that `load` has refused for its types, as `load_safely`; others
    raise as before."""
    content = load_safely(path, load, **options)
    if EXTRA not in content:
        # of another program: as without this package
        return load(path, weights_only=True, **options)
    return content


def _allowed_types(file: Any) -> Any:
    """Return a context in which torch reads what stands for the types of a file, from its begin."""
    rewind = file.seek if hasattr(file, "seek") else lambda _: None
    rewind(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    rewind(0)
    return torch.serialization.safe_globals([(_known_type(name), name) for name in names])


def unread_in(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place and the type's name of each `Unread` in nested containers, object or type."""
    if isinstance(value, Unread) or (isinstance(value, type) and issubclass(value, Unread)):
        yield place, value.type_name
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from unread_in(key, place)
            yield from unread_in(child, f"{place}.{key}" if place else str(key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for child in value:
            yield from unread_in(child, place)


def saved_form(name: str, value: Any) -> tuple[Any, str]:
    """Return a hyperparameter as it is saved, and "" or why `load_from_checkpoint` does not give it
    back by itself."""
    buffer = io.BytesIO()
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        torch.save({"value": value}, buffer)
        with _allowed_types(buffer):
            names = []
            for _, kind in unread_in(torch.load(buffer, weights_only=True, map_location="meta")):
                names.append(kind)
    except Exception as error:  # whatever pickling a user's object raises
        return left_out(type_name), (
            f"'{name}', a {type_name}, cannot be saved ({str(error).splitlines()[0]})"
        )
    return value, f"'{name}' has {', '.join(dict.fromkeys(names))}" if names else ""


class CompleteOnly(dict[str, Any]):
    """Hyperparameters that Lightning may update, and read once none of them is an `Unread`."""

    def _check(self) -> None:
        missing = {
            place.partition(".")[0]: kind for place, kind in unread_in(dict(super().items()))
        }
        if missing:
            described = ", ".join(f"'{name}' ({kind})" for name, kind in missing.items())
            raise CheckpointError(
                f"the hyperparameters {described} are objects, and reading them would run code. "
                f"Pass each by its name, load_from_checkpoint(path, {next(iter(missing))}=...); "
                "or, if you trust the checkpoint, all with load_from_checkpoint(path, "
                "weights_only=False)."
            )

    def __iter__(self) -> Iterator[str]:
        self._check()
        return super().__iter__()

    def keys(self) -> Any:
        self._check()
        return super().keys()


def with_complete_only(checkpoint: Any) -> Any:
    """Return a checkpoint for load_from_checkpoint, which fails by name where hyperparameters are
    missing."""
    for key in HYPERPARAMETERS:
        if isinstance(checkpoint, dict) and type(checkpoint.get(key)) is dict:
            checkpoint[key] = CompleteOnly(checkpoint[key])
    return checkpoint
