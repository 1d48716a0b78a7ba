"""The same metrics for each task of a multi-task model."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_distrec.errors import ConfigError


class TaskMetrics(nn.Module):
    """A MetricCollection for each task; results are named task/metric.

    In `validation_step`: `self.metrics.update(preds, labels)` and
    `self.log_dict(self.metrics.by_name())`.

    Args:
        tasks: their names, such as ["click", "purchase"].
        metrics: metrics by name; each task gets copies.
        prefix: begins each name, such as "val/".
        ignore_index: examples with this label do not count for the task, such as purchases of what
            was not clicked.
    """

    def __init__(
        self,
        tasks: Iterable[str],
        metrics: Mapping[str, Metric],
        prefix: str = "",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        collection = MetricCollection(dict(metrics))
        collections = nn.ModuleDict({
            task: collection.clone(prefix=f"{prefix}{task}/") for task in tasks
        })
        self.tasks = cast(dict[str, MetricCollection], collections)
        self.ignore_index = ignore_index

    def update(
        self,
        preds: Mapping[str, Tensor] | Tensor,
        labels: Mapping[str, Tensor] | Tensor,
        **columns: Any,
    ) -> None:
        """Add examples. preds, labels: of each task by its name, or (examples, tasks) in the order
        of tasks.

        columns: further arguments of the metrics that take them, such as users and weights,
        (examples,) for all tasks,
            or by task.
        Raises ConfigError: tasks are missing, or there are too many.
        """
        task_values = [
            self._by_task(name, values) for name, values in (("preds", preds), ("labels", labels))
        ]
        for task, collection in self.tasks.items():
            its_preds, its_labels = (values[task] for values in task_values)
            task_columns = {
                name: c[task] if isinstance(c, Mapping) else c for name, c in columns.items()
            }
            if self.ignore_index is not None:
                counts = its_labels != self.ignore_index
                its_preds = its_preds[counts]
                its_labels = its_labels[counts]
                task_columns = {name: other[counts] for name, other in task_columns.items()}
            collection.update(its_preds, its_labels, **task_columns)

    def compute(self) -> dict[str, Tensor]:
        """Collective. Return task/metric -> value over all ranks."""
        values = {}
        for collection in self.tasks.values():
            for name, value in collection.compute().items():
                values[name] = value
        return values

    def reset(self) -> None:
        """Forget all examples."""
        for collection in self.tasks.values():
            collection.reset()

    def by_name(self) -> dict[str, Metric]:
        """Return task/metric -> the metric, for `self.log_dict`."""
        items = (
            collection.items(keep_base=False, copy_state=False)
            for collection in self.tasks.values()
        )
        return dict(itertools.chain.from_iterable(items))

    def _by_task(
        self, argument: str, values: Mapping[str, Tensor] | Tensor
    ) -> Mapping[str, Tensor]:
        names: Sequence[str] = list(self.tasks)
        if isinstance(values, Tensor):
            if values.ndim != 2 or values.shape[1] != len(names):
                shape = tuple(values.shape)
                raise ConfigError(
                    f"TaskMetrics: {argument} {shape} must be (examples, {len(names)}), one column "
                    f"for each of {names}."
                )
            return dict(zip(names, values.unbind(1), strict=True))
        if set(values) != set(names):
            raise ConfigError(
                f"TaskMetrics: {argument} are of {sorted(values)}; the tasks are {sorted(names)}."
            )
        return values
