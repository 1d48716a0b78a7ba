"""Private names of lightning: what `self.log` does in a training step, at less Python where its
arguments recur."""

from collections.abc import Callable
from functools import partial, wraps
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _METRICS,
    _get_default_dtype,
    _ResultCollection,
    _ResultMetric,
)
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_distrec._compat.patches import Patches

_upstream_log: Callable[..., None] = LightningModule.log
_DEVICE_OF = attrgetter("device")
_MOVES = nn.Module.to
_ACCUMULATED = (torch.float32, torch.float64)
"""Types of values that are added up as they are."""


class _ExactResults(_ResultCollection):
    """A loop's values, whose means over ranks in a step are of all examples: upstream's are of the
    ranks' means."""

    # Source: _ResultMetric.update. Can go when Lightning does so.

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """As upstream's."""
        sync = self[key].meta.sync
        reduce = sync._fn
        if sync.should and sync.op == "mean":
            sync._fn = partial(_mean_of_examples, reduce, batch_size)
        super().update_metrics(key, value, batch_size)
        sync._fn = reduce


def _mean_of_examples(reduce: Callable[[Tensor], Tensor], batch_size: int, mean: Tensor) -> Tensor:
    total, num_examples = reduce(torch.stack([mean, torch.ones_like(mean)]) * batch_size)
    return total / num_examples


class _Results(_ExactResults):
    """A training loop's values, with those that were logged before by the arguments of their
    calls."""

    logged_before: dict[Any, tuple[str, _ResultMetric]]

    def metrics(self, on_step: bool) -> Any:
        """As upstream's: what goes to loggers, callbacks and the progress bar."""
        if not on_step or self.dataloader_idx is not None:
            return super().metrics(on_step)
        metrics = _METRICS(callback={}, log={}, pbar={})
        for metric in self.values():
            meta = metric.meta
            if not meta.on_step or metric.has_reset or meta.dataloader_idx is not None:
                continue
            value = metric._forward_cache
            if not isinstance(value, Tensor):
                if value is None:
                    continue
                return super().metrics(on_step)  # which raises
            if not meta.enable_graph:
                value = value.detach()
            name = meta.name
            step_name = f"{name}_step" if meta.on_epoch else name
            if meta.logger:
                metrics["log"][step_name] = value
            metrics["callback"][name] = value
            metrics["callback"][step_name] = value
            if meta.prog_bar:
                metrics["pbar"][step_name] = (
                    value.item() if value.numel() == 1 else convert_tensors_to_scalars(value)
                )
        return metrics


def log_at_less_python(trainer: Any) -> Patches:
    """Let `self.log` in training steps of this trainer check once what does not change from call to
    call.

    A step's means over ranks count each rank's value by the `batch_size` that it was logged with,
    as an epoch's do.
    """
    # Upstream checks arguments, inspects the signature of training_step, builds and compares the
    # value's metadata and moves its state to the device, by several walks through collections, at
    # each call. Here the first call with the same arguments in the same hook is upstream's, as is
    # any call whose value is of another kind, type or device; the others make the same tensor and
    # add it up by the same operations. A `log` that somebody else has replaced stays.
    # Source: LightningModule.log in lightning/pytorch/core/module.py; _ResultCollection and
    # _ResultMetric in lightning/pytorch/trainer/connectors/logger_connector/result.py;
    # Metric._wrap_update in torchmetrics/metric.py. Can go when Lightning does so.
    patches = Patches()
    fit = trainer.fit_loop.epoch_loop
    for loop in (
        (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop)
        if trainer.world_size > 1
        else ()
    ):
        patches.replace_class(loop._results, _ExactResults)
    if LightningModule.log not in (_upstream_log, _log):
        return patches
    patches.replace(LightningModule, "log", _log)
    results = fit._results
    patches.callback(results.__dict__.pop, "logged_before", None)
    results.logged_before = {}
    patches.replace_class(results, _Results)
    return patches


@wraps(_upstream_log)
def _log(
    self: Any,
    name: Any,
    value: Any,
    prog_bar: Any = False,
    logger: Any = None,
    on_step: Any = None,
    on_epoch: Any = None,
    reduce_fx: Any = "mean",
    enable_graph: Any = False,
    sync_dist: Any = False,
    sync_dist_group: Any = None,
    add_dataloader_idx: Any = True,
    batch_size: Any = None,
    metric_attribute: Any = None,
    rank_zero_only: Any = False,
) -> None:
    options = (
        *(prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group),
        *(add_dataloader_idx, batch_size, metric_attribute, rank_zero_only),
    )
    trainer = None if self._fabric is not None or torch.compiler.is_compiling() else self._trainer
    if trainer is None or trainer.state.stage is not RunningStage.TRAINING:
        _upstream_log(self, name, value, *options)
        return
    results = trainer.fit_loop.epoch_loop._results
    if type(results) is not _Results or enable_graph or (logger and not trainer.loggers):
        _upstream_log(self, name, value, *options)
        return
    fx = self._current_fx_name
    step = self.__dict__.get("training_step") or type(self).training_step
    call = (fx, step, name, *options[:9], batch_size is None, *options[10:], results.dataloader_idx)
    try:
        key, metric = results.logged_before[call]
    except (KeyError, TypeError):  # TypeError: one of them has no hash
        pass
    else:
        if results.get(key) is metric and _adds_up(self, trainer, metric, value, batch_size):
            return
    _upstream_log(self, name, value, *options)
    _remember(results, call)


def _remember(results: _Results, call: tuple[Any, ...]) -> None:
    fx, _, name, *_ = call
    key = f"{fx}.{name}"
    metric = results.get(key)
    # With a DataLoader's index the key is another; where each step's value is reduced over ranks,
    # upstream does it.
    if (
        metric is None
        or results.dataloader_idx is not None
        or (metric.meta.on_step and metric.meta.sync.should)
    ):
        return
    try:
        results.logged_before[call] = key, metric
    except TypeError:
        return


def _adds_up(module: Any, trainer: Any, metric: _ResultMetric, value: Any, batch_size: Any) -> bool:
    """Log a value of the usual kinds, or change nothing and return False."""
    kind = type(value)
    meta = metric.meta
    if batch_size is not None and type(batch_size) is not int:
        return False
    if metric.is_tensor:
        if kind is Tensor:
            if (
                value.dtype not in _ACCUMULATED
                or value.numel() != 1
                or value.device != metric.value.device
            ):
                return False
            value = value.detach().clone()
            if value.dim():
                value = value.squeeze()
        elif kind in (float, int):
            if module.device != metric.value.device:
                return False
            # By a kernel: a copy from the host would wait for the device.
            value = torch.full((), value, device=module.device, dtype=_get_default_dtype())
        else:
            return False
    elif value is not metric.value or not _is_on_its_device(value):
        return False
    connector = trainer._logger_connector
    fx = module._current_fx_name
    results = trainer.fit_loop.epoch_loop._results
    if connector._current_fx != fx and connector._first_loop_iter in (None, True):
        results.reset(metrics=False, fx=fx)
    if metric.is_tensor:
        # Neither value requires gradients, so that upstream's torch.no_grad has nothing to do here.
        _accumulate(results, metric, value, batch_size)
    else:
        metric._forward_cache = value._forward_cache
    attributes = metric.__dict__  # as _ResultMetric.__setattr__ writes
    attributes["_computed"] = None
    attributes["has_reset"] = False
    attributes["_update_count"] += 1
    connector._current_fx = meta.fx
    return True


def _accumulate(results: _Results, metric: Any, value: Tensor, batch_size: int | None) -> None:
    meta = metric.meta
    attributes = metric.__dict__
    if meta.on_step:
        attributes["_forward_cache"] = value
        if not meta.on_epoch:
            attributes["value"] = value
            return
    if meta.is_mean_reduction:
        batch_size = results._extract_batch_size(metric, batch_size, meta)
        metric.value = metric.value + value * batch_size
        metric.cumulated_batch_size = metric.cumulated_batch_size + batch_size
    elif meta.is_sum_reduction:
        metric.value = metric.value + value
    else:
        metric.value = meta.reduce_fx(metric.value, value)


def _is_on_its_device(metric: Metric) -> bool:
    """Whether moving this metric to its device, as upstream does at each call, changes nothing."""
    device = metric.device
    kind = type(metric)
    attributes = metric.__dict__
    if (
        kind.to is not _MOVES
        or kind._apply is not Metric._apply
        or "to" in attributes
        or "_apply" in attributes
    ):
        return False  # it has its own way to move, which upstream calls
    if metric._dtype != torch.get_default_dtype():
        return False  # Metric._apply sets it, after set_dtype too
    if metric._modules or (
        metric._computed is not None and not isinstance(metric._computed, Tensor)
    ):
        return False
    held_values = [
        metric._forward_cache,
        metric._computed,
        *metric._buffers.values(),
        *metric._parameters.values(),
    ]
    states = [getattr(metric, name) for name in metric._defaults]
    tensors = []
    for tensor in [*held_values, *states]:
        if tensor is not None and not isinstance(tensor, list):
            tensors.append(tensor)
    lists = [state for state in states if isinstance(state, list)]
    try:  # a list has a tensor of every step: each takes as little as it can
        return set(map(_DEVICE_OF, chain(tensors, *lists))) <= {device}
    except AttributeError:
        return False


def before_values_are_reduced(trainer: Any, call: Callable[[], None]) -> Patches:
    """Call `call` at the ends of a trainer's epochs and evaluations, before their values are
    reduced over ranks.

    All ranks come there: at the end of the batches, and after the hooks at the end of an epoch,
    which log as well.
    """
    # Source: logger_connector.py in lightning/pytorch/trainer/connectors/logger_connector, and the
    # loops that call it.
    connector = trainer._logger_connector
    patches = Patches()
    for name in ("epoch_end_reached", "update_train_epoch_metrics", "update_eval_epoch_metrics"):
        patches.replace(connector, name, _calling_first(call, getattr(connector, name)))
    return patches


def _calling_first(call: Callable[[], None], method: Callable[[], Any]) -> Callable[[], Any]:
    def called() -> Any:
        call()
        return method()

    return called


def reduced_values(trainer: Any) -> dict[str, tuple[str, bool]]:
    """Return key -> (name, whether it is reduced in each step), of the running loop's values that
    all ranks reduce.

    They are in the order in which they are reduced at the end of the epoch. Those of a group of
    ranks, or of rank 0 alone, are left out.
    """
    reduced = {}
    for key, metric in (trainer._results or {}).items():
        if (
            (metric.meta.sync.should or not metric.is_tensor)
            and metric.meta.sync._group is None
            and not metric.meta.sync.rank_zero_only
        ):
            reduced[key] = (metric.meta.name, metric.is_tensor and metric.meta.on_step)
    return reduced


def reorder_reduced_values(trainer: Any, keys: list[str]) -> None:
    """Let the running loop's values be reduced in the order of their keys."""
    results = trainer._results
    for key in keys:
        results[key] = results.pop(key)
