"""Private names of jsonargparse, which parses the arguments of LightningCLI."""

from collections.abc import Callable
from typing import Any

from jsonargparse import _typehints

_list_subclasses = _typehints.get_all_subclass_paths
_resolve_name = _typehints.resolve_class_path_by_name


def _list_without_doubles(*args: Any, **options: Any) -> list[str]:
    paths = _list_subclasses(*args, **options)
    names = {path.rpartition(".")[2] for path in paths if path.startswith("torch.")}
    return [
        path
        for path in paths
        if not path.startswith("torchrec.") or path.rpartition(".")[2] not in names
    ]


def prefer_torchs_names() -> None:
    """Let --optimizer=Adam be torch's where torchrec has an optimizer of that name; it has its
    class_path."""
    # torchrec's optimizers are subclasses of torch's Optimizer as soon as torchrec is imported, and
    # two of one name are an error. Source: jsonargparse/_typehints.py, resolve_class_path_by_name.
    # Can go when torchrec is imported later.
    _typehints.get_all_subclass_paths = _list_without_doubles


def take_names_of_strategies(class_path: Callable[[str], str]) -> None:
    """Let options follow the name of a strategy as they follow a class. class_path: "" for names
    that are not ours."""

    def resolve(cls: Any, name: str) -> str:
        return _resolve_name(cls, class_path(name) or name)

    # Source: jsonargparse/_typehints.py, adapt_typehints: --trainer.strategy.init_args.min_rows=10
    # takes what was there for a class. Can go when Lightning's registry gives jsonargparse classes.
    _typehints.resolve_class_path_by_name = resolve
