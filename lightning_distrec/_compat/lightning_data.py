"""Private names of lightning: how a fit's loaders are made, begun and saved."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.loops import fetchers
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage

from lightning_distrec._compat.lightning import replace_fetchers
from lightning_distrec._compat.patches import Patches


def combining_mode(combined_loader: Any) -> str:
    """Return the mode of Lightning's CombinedLoader: "min_size", "sequential", ..."""
    return str(combined_loader._mode)


def loader_states(combined_loader: Any) -> list[dict[str, Any]]:
    """Return the states of the stateful loaders. Source:
    lightning/pytorch/utilities/combined_loader.py."""
    states: list[dict[str, Any]] = type(combined_loader)._state_dicts(combined_loader)
    return states


def override_loader_states(
    combined_loader: Any, states: Callable[[], list[dict[str, Any]]] | None
) -> None:
    """Save the states that `states` returns in checkpoints, in place of the loaders' own; None
    undoes it."""
    # Upstream asks the loaders when a checkpoint is saved. With batches in flight they are ahead of
    # the module, and a resumed fit would skip these batches. Written into the instance's
    # `__dict__`: no other CombinedLoader changes. Can go when Lightning lets a fetcher provide the
    # states. Source: lightning/pytorch/loops/fit_loop.py.
    if states is not None:
        combined_loader._state_dicts = states
    else:
        combined_loader.__dict__.pop("_state_dicts", None)


def current_loader_states(trainer: Any) -> list[dict[str, Any]]:
    """Return the states of the training loaders that a checkpoint would hold now; see
    `override_loader_states`."""
    combined_loader = trainer.fit_loop._combined_loader
    return [] if combined_loader is None else list(combined_loader._state_dicts())


def wrapped_sampler(sampler: Any) -> Any:
    """Return the user's sampler in Lightning's DistributedSamplerWrapper; any other sampler as it
    is."""
    # Source: lightning/fabric/utilities/distributed.py.
    dataset: Any = sampler.dataset if isinstance(sampler, DistributedSamplerWrapper) else None
    return sampler if dataset is None else dataset._sampler


def watch_dataloader_hooks(
    trainer: Any, watch: Callable[[str], AbstractContextManager[None]]
) -> Patches:
    """Call the user's train_dataloader and val_dataloader, for a fit, inside of `watch(the hook's
    name)`."""

    # Upstream calls them when a loop begins, and each time that it reloads: no hook of a strategy
    # comes before.
    # Can go when a strategy is asked first. Source:
    # lightning/pytorch/trainer/connectors/data_connector.py.
    def watched(source: Any) -> Any:
        with watch(source.name) if source.is_module() else nullcontext():
            return type(source).dataloader(source)

    patches = Patches()
    loop = trainer.fit_loop
    for source in (loop._data_source, loop.epoch_loop.val_loop._data_source):
        patches.replace(source, "dataloader", partial(watched, source))
    return patches


def reload_epochs(trainer: Any) -> list[Any]:
    """Return the epochs in which the training and the validation loaders of a fit were made; -inf:
    not yet."""
    # Source: lightning/pytorch/loops/fit_loop.py, evaluation_loop.py,
    # reload_dataloaders_every_n_epochs.
    loop = trainer.fit_loop
    return [loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch]


def set_reload_epochs(trainer: Any, epochs: list[Any]) -> None:
    """Set what `reload_epochs` returns; None: it stays. Upstream takes a resumed fit's first epoch
    for both."""
    loop = trainer.fit_loop
    train, validation = epochs
    loop._last_train_dl_reload_epoch = loop._last_train_dl_reload_epoch if train is None else train
    if validation is not None:
        loop.epoch_loop.val_loop._last_val_dl_reload_epoch = validation


def resume_loaders(
    trainer: Any, begins_late: Callable[[], bool], begun: Callable[[], None]
) -> Patches:
    """Let a fit draw ahead from loaders without a length in such a way that it can resume.

    begins_late: whether the first batch is drawn after all hooks before it; asked when the loaders
    have been made.
    begun: called after the batch that is drawn ahead, if one is.
    """
    # Upstream draws a batch ahead of all hooks, before a resumed run has set its generators, and
    # saves states that are ahead by a batch, which a resumed fit would skip. Source:
    # lightning/pytorch/loops/fetchers.py.
    plain = fetchers._PrefetchDataFetcher

    def make(stage: RunningStage) -> Any:
        return _ResumingFetcher(begins_late, begun) if stage is RunningStage.TRAINING else plain()

    return replace_fetchers(trainer, make)


class _ResumingFetcher(fetchers._PrefetchDataFetcher):
    def __init__(self, begins_late: Callable[[], bool], begun: Callable[[], None]) -> None:
        super().__init__()
        self._begins_late = begins_late
        self._begun = begun

    def __iter__(self) -> Any:
        if not self._begins_late():
            super().__iter__()
        else:
            fetchers._DataFetcher.__iter__(self)
            if self.length is None:
                self.batches = _FirstBatch(self)
        self._begun()
        return self

    def __next__(self) -> Any:
        if self.length is not None:
            return super().__next__()
        # The batch that is returned here was the last that was drawn, unless there is none ahead.
        states = loader_states(self.combined_loader)
        batch = super().__next__()
        # After the last batch a loader is where its next epoch begins.
        override_loader_states(self.combined_loader, None if self.done else lambda: states)
        return batch

    def teardown(self) -> None:
        if self._combined_loader is not None:
            override_loader_states(self._combined_loader, None)
        super().teardown()


class _FirstBatch(list[Any]):
    """What a fetcher has drawn ahead: a batch that is drawn when it is taken, after
    on_train_epoch_start."""

    def __init__(self, fetcher: Any) -> None:
        super().__init__([None])
        self._fetcher = fetcher

    def pop(self, index: Any = -1) -> Any:
        batch = super().pop(index)
        return fetchers._DataFetcher.__next__(self._fetcher) if batch is None else batch


def predict_few_examples() -> Patches:
    """Let loaders of predictions be empty on a rank, where there are fewer examples than ranks."""
    # Upstream's sampler asserts that each rank has one. Can go when it does not.
    # Source: lightning/pytorch/overrides/distributed.py.
    patches = Patches()
    patches.replace(data_connector, "UnrepeatedDistributedSamplerWrapper", _MayBeEmpty)
    return patches


class _MayBeEmpty(UnrepeatedDistributedSamplerWrapper):
    def __init__(self, *args: Any, **options: Any) -> None:
        with suppress(AssertionError):  # the last line of upstream's
            super().__init__(*args, **options)


def replace_predictions(
    trainer: Any, kind: type, predict: Callable[[Any, int, int], None]
) -> Patches:
    """Call `predict` for batches of a class, by index and dataloader, in place of predict_step and
    all of its hooks."""
    # Upstream: the loop calls all hooks and keeps a result for each batch. Can go when a batch can
    # be left out.
    # Source: lightning/pytorch/loops/prediction_loop.py.
    loop = trainer.predict_loop
    original = loop._predict_step

    def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if isinstance(batch, kind):
            predict(batch, batch_idx, dataloader_idx)
        else:
            original(batch, batch_idx, dataloader_idx, dataloader_iter)

    patches = Patches()
    patches.replace(loop, "_predict_step", step)
    return patches


def predict_again(trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
    """Run the strategy's predict_step as the loop does, without its hooks. Source: as above."""
    loop = trainer.predict_loop
    strategy = trainer.strategy
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    batch = strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
    kwargs = loop._build_kwargs(
        batch, batch_idx, dataloader_idx if loop.num_dataloaders > 1 else None
    )
    strategy.predict_step(*loop._build_step_args_from_hook_kwargs(kwargs, "predict_step"))
