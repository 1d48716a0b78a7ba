"""What a step logs on the last stage, so that all ranks log it: loggers, callbacks and schedulers read it on theirs."""

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_distrec.errors import UnsupportedError

Call = dict[str, Any]
"""The arguments of self.log."""
METRIC = "metric of the module"
"""In place of a Metric: the key under which its path is sent."""


class LoggedValues:
    """Records calls of a module's `log`, and repeats them."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._signature = inspect.signature(type(module).log)
        if any(isinstance(submodule, Metric) for submodule in module.modules()):
            # The last stage alone updates them; the others add states without any update, as they should.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before", UserWarning)

    @contextmanager
    def recorded(self) -> Iterator[list[Call]]:
        """Record what the module logs inside of the context, instead of logging it."""
        calls: list[Call] = []

        def record(*args: Any, **kwargs: Any) -> None:
            calls.append({
                k: v for k, v in self._signature.bind(self._module, *args, **kwargs).arguments.items() if k != "self"
            })

        # On the instance: log_dict calls self.log too.
        self._module.log = record  # type: ignore[method-assign]
        try:
            yield calls
        finally:
            del self._module.log

    @contextmanager
    def metrics_unchanged(self) -> Iterator[None]:
        """Set the module's Metrics back after the context, in which a step runs once more."""
        metrics = [submodule for submodule in self._module.modules() if isinstance(submodule, Metric)]
        states = [{k: copy.deepcopy(v) for k, v in vars(metric).items() if not callable(v)} for metric in metrics]
        try:
            yield
        finally:
            for metric, state in zip(metrics, states, strict=True):
                vars(metric).update(state)

    def to_send(self, of_parts: Sequence[Sequence[Call]], weights: Tensor) -> list[Call]:
        """Return the calls of a step as plain values: the mean of the parts' values, each weighted by its examples.

        Raises UnsupportedError: parts have logged different names, or a call has an argument that is no plain value.
        """
        if len({tuple(call["name"] for call in calls) for calls in of_parts}) > 1:
            raise UnsupportedError(
                "training_step logs different names in different micro-batches. Log the same ones in each, or use "
                "schedule='gpipe', whose training_step gets whole batches."
            )
        return [self._mean(calls, weights) for calls in zip(*of_parts, strict=True)]

    def repeat(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Log on this rank what the last stage has recorded."""
        for call in calls:
            arguments = dict(call)
            path = arguments.pop(METRIC, None)
            if path is not None:
                arguments["value"] = self._module.get_submodule(path)
            self._module.log(**arguments)

    def _mean(self, calls: Sequence[Call], weights: Tensor) -> Call:
        first = calls[0]
        for key, value in first.items():
            if key != "value" and value is not None and not isinstance(value, (bool, int, float, str)):
                raise UnsupportedError(
                    f"self.log({first['name']!r}, {key}={value!r}): the last stage logs, and the others are sent plain "
                    f"values. Leave {key} out, or give it as a string."
                )
        value = first["value"]
        if isinstance(value, Metric):
            paths = {id(submodule): path for path, submodule in self._module.named_modules()}
            if id(value) not in paths:
                raise UnsupportedError(
                    f"self.log({first['name']!r}) of a Metric that is not in the module. Set it as an attribute."
                )
            return {**{k: v for k, v in first.items() if k != "value"}, METRIC: paths[id(value)]}
        values = torch.stack([torch.as_tensor(call["value"]).detach().cpu().double() for call in calls])
        mean = (values * weights.view(-1, *[1] * (values.dim() - 1))).sum(0)
        dtype = torch.as_tensor(value).dtype
        return {**first, "value": mean.to(dtype if dtype.is_floating_point else torch.float32)}
