"""Private names of jsonargparse, which parses the arguments of LightningCLI."""

from typing import Any

from jsonargparse import _typehints

_list_subclasses = _typehints.get_all_subclass_paths


def _list_without_doubles(*args: Any, **options: Any) -> list[str]:
    paths = _list_subclasses(*args, **options)
    names = {path.rpartition(".")[2] for path in paths if path.startswith("torch.")}
    return [path for path in paths if not path.startswith("torchrec.") or path.rpartition(".")[2] not in names]


def prefer_torchs_names() -> None:
    """Let --optimizer=Adam be torch's where torchrec has an optimizer of that name; it has its class_path."""
    # torchrec's optimizers are subclasses of torch's Optimizer as soon as torchrec is imported, and two of one name are
    # an error. Source: jsonargparse/_typehints.py, resolve_class_path_by_name. Can go when torchrec is imported later.
    _typehints.get_all_subclass_paths = _list_without_doubles
