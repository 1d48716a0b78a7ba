"""Whether a batch's features come in the order of the first batch, where the calls of a step may depend on it.

A step may iterate over its batch: `KeyedJaggedTensor(list(batch), torch.cat(list(batch.values())))`, or
`for name, ids in batch: self.tables[name](ids)`. With other features, or features in another order, it calls its tables
with other parts of the batch than in the first step.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.pipeline.provenance.batch_objects import BatchObjects
from lightning_distrec.pipeline.provenance.sources import BatchRoots, Path, object_at, path_text


class FeatureOrder:
    """The order of features in the first batch of a kind of step.

    objects: those of that batch. paths: of the objects that tables are called with. names: of tables and features.
    """

    def __init__(self, objects: BatchObjects, paths: Iterable[Path], names: set[str]) -> None:
        used = {path[:i]: {of[i][1] for of in paths if of[:i] == path[:i]} for path in paths for i in range(len(path))}
        self._orders: list[tuple[Path, set[Any], list[Any]]] = []
        """Path of a dict or KeyedJaggedTensor, which of its keys count, and these in their order."""
        self._names: list[tuple[Path, str]] = []
        """Path of a text of the batch that names a feature, and that name."""
        for container, path in objects.containers:
            if path in used and isinstance(container, (dict, KeyedJaggedTensor)):
                counting = used[path] | names
                self._orders.append((path, counting, _order(container, counting)))
            self._names += [((*path, step), text) for step, text in _texts(container) if text in names]

    def difference(self, roots: BatchRoots) -> str:
        """Return in what a batch differs from the first one, or "". Raises as `object_at` does."""
        for path, counting, before in self._orders:
            if (now := _order(object_at(roots, path), counting)) != before:
                return f"{path_text(path)} has the features {now}, and had {before}"
        for path, name in self._names:
            if (text := object_at(roots, path)) != name:
                return f"{path_text(path)} is {text!r}, and was {name!r}"
        return ""


def _order(container: Any, counting: set[Any]) -> list[Any]:
    return [key for key in container if key in counting] if isinstance(container, dict) else list(container.keys())


def _texts(container: Any) -> Iterator[tuple[tuple[str, Any], str]]:
    if isinstance(container, (list, tuple)):
        yield from ((("item", i), child) for i, child in enumerate(container) if isinstance(child, str))
    elif isinstance(container, dict):
        yield from ((("item", key), child) for key, child in container.items() if isinstance(child, str))
