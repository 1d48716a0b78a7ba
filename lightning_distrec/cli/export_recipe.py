"""Exports the module of a recipe's YAML for serving; it is built without rows, and nothing is
trained."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lightning_distrec._compat import hide_upstream_deprecations
from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.cli.command_line import TOP_K_OPTIONS
from lightning_distrec.cli.lightning_cli import RecipeBuilder, build_recipe
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.serving.artifact import RawRows, Served, export_for_serving
from lightning_distrec.serving.item_table import TopK
from lightning_distrec.serving.publishing.published_fit import published_of
from lightning_distrec.sharding.meta_tables import tables_on_meta
from lightning_distrec.units import format_bytes, quantity

LOADERS = {"predict": "predict_dataloader", "test": "test_dataloader", "validate": "val_dataloader"}
"""Stage -> the loader whose batches predict_step might get; the first that there is."""


class ServingBuilder(RecipeBuilder):
    """Builds the module with tables that have no rows yet."""

    def instantiate_classes(self) -> None:
        with tables_on_meta():
            super().instantiate_classes()


def export_recipe(options: Namespace, on_progress: Callable[[int], None]) -> None:
    """Write the folder that the options describe, and print what it is. Raises as
    `export_for_serving`."""
    if not options.config:
        raise ConfigError(
            f"export: --format {options.format} needs the module's code and an example of its "
            "data: name the YAML that `fit` was given, --config recipe.yaml."
        )
    bits = None if options.format == "torch.export" else options.bits or 8
    if bits is None and options.bits is not None:
        raise ConfigError("export: --bits is for --format quantized.")
    top_k = _top_k_of(options)
    # Before the module is built, which takes longer than to notice a wrong path.
    checkpoint = read_contents(Path(options.checkpoint), options.pickles).checkpoint
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{options.checkpoint} holds no state_dict; there is nothing to export."
        )
    hide_upstream_deprecations()
    recipe = build_recipe(options.config, ServingBuilder)
    module: LightningModule = recipe.model
    methods = [is_overridden(name, module) for name in ("predict_step", "forward")]
    if top_k is None and not any(methods):
        raise ConfigError(
            f"export: {type(module).__name__} has neither predict_step nor forward. Write one of "
            "them."
        )
    # A Trainer would call this hook, where tables may be made as well as in __init__.
    with tables_on_meta():
        module.configure_model()
    batch, first_request, raw = _example_batches(module, recipe.datamodule, checkpoint)
    served = export_for_serving(
        module,
        batch,
        Path(options.out),
        state=state,
        first_request=first_request,
        raw=raw,
        bits=bits,
        top_k=top_k,
        published=published_of(checkpoint),
        overwrite=options.overwrite,
        on_progress=on_progress,
    )
    _print_served(served, options)


def _top_k_of(options: Namespace) -> TopK | None:
    """Return what answers with items; None: predict_step answers. Raises ConfigError: half of it is
    given."""
    fields = {name: options[name] for name in TOP_K_OPTIONS if options[name] is not None}
    if not fields:
        return None
    if "queries" not in fields or "items" not in fields:
        raise ConfigError("export: a folder that answers with items needs --queries and --items.")
    return TopK(**fields)


def _example_batches(
    module: LightningModule, data: LightningDataModule | None, checkpoint: Mapping[str, Any]
) -> tuple[Any, Any, RawRows | None]:
    """Return a batch for predict_step, one of a single example, and the raw rows of the first,
    where data has these.

    Raises ConfigError: there is no batch.
    """
    source: Any = module if data is None else data
    base = LightningModule if data is None else LightningDataModule
    if data is not None:
        data.prepare_data()
    for stage, name in LOADERS.items():
        if not is_overridden(name, source, base):
            continue
        source.setup(stage)
        if hasattr(source, "raw_rows"):
            return _batches_of_columns(source, checkpoint)
        loader = getattr(source, name)()
        # Lightning allows several for each stage.
        loader = loader[0] if isinstance(loader, (list, tuple)) else loader
        return next(iter(loader)), _batch_of_one(loader), None
    raise ConfigError(
        f"export: no example of a batch: there is none of {', '.join(LOADERS.values())}."
    )


def _batches_of_columns(data: Any, checkpoint: Mapping[str, Any]) -> tuple[Any, Any, RawRows]:
    # Values are mapped as in training, whatever the files say now.
    state = checkpoint.get(type(data).__qualname__)
    if state is not None:
        data.load_state_dict(state)
    rows = data.raw_rows()
    single_row = data.columns({column: [value] for column, value in rows[0].items()})
    return (
        next(iter(data.predict_dataloader())),
        single_row,
        RawRows(mapping=data.columns.to_plain(), rows=rows),
    )


def _batch_of_one(loader: Any) -> Any:
    # Without a batch sampler the dataset makes the batches itself, and cannot make one of a single
    # example.
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__getitem__"):
        return None
    # As DataLoader's own fetcher does.
    items = dataset.__getitems__([0]) if hasattr(dataset, "__getitems__") else [dataset[0]]
    return loader.collate_fn(items)


def _print_served(served: Served, options: Namespace) -> None:
    size = format_bytes(served.table_bytes)
    if options.format == "quantized":
        size += f" of {format_bytes(served.float_bytes)}"
    print(f"{options.out}: {quantity(served.num_tables, 'table')}, {size}.")
    if served.largest_answer or not served.integers:
        print(
            f"Answers to {quantity(served.num_examples, 'example')} differ from the trained "
            f"module's by at most {served.largest_difference:.3g}, {served.mean_difference:.3g} on "
            f"average; the largest is {served.largest_answer:.3g}."
        )
    if served.integers:
        print(
            f"Of {served.integers:,} integers in answers to "
            f"{quantity(served.num_examples, 'example')}, {served.other_integers:,} differ from "
            "the trained module's."
        )
    if served.index_recall is not None:
        print(f"The index finds {served.index_recall:.2%} of the exact answers.")
    if served.only_this_size:
        print(
            f"The program takes batches of {served.num_examples} examples alone: predict_step "
            "makes a number of the size. There len(tensor) is a fixed number; tensor.shape[0] "
            "stays free."
        )
    print(
        f"It needs {', '.join(['torch', 'numpy', 'safetensors', *served.needs])}. Ask it: python "
        f"{options.out}/serve.py"
    )
