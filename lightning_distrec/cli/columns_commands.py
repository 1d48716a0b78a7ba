"""The command `columns fit`, which reads all training rows once, before a job."""

import sys

from jsonargparse import Namespace
from rich import box
from rich.table import Table

from lightning_distrec.cli.command_line import EXIT_OK, check_options, console, exit_on_sigterm
from lightning_distrec.cli.lightning_cli import MetaRecipeBuilder, build_recipe
from lightning_distrec.data import ColumnData
from lightning_distrec.data.fitting import connected
from lightning_distrec.errors import ConfigError


def run_columns(options: Namespace) -> int:
    """Run the command and return its exit code."""
    check_options(options.fit, "columns fit")
    data = build_recipe(options.fit.config, MetaRecipeBuilder).datamodule
    if not isinstance(data, ColumnData):
        raise ConfigError(
            f"columns fit: the data is a {type(data).__name__}, and no ColumnData: it has nothing "
            "to fit."
        )
    with exit_on_sigterm(), connected(options.fit.scheduler) as client:
        path = data.fit_features(client)
    data.setup()
    plain = data.columns.to_plain()
    text = Table("table or feature", "fitted", box=box.SIMPLE)
    for name, values in plain["vocabularies"].items():
        rows = data.columns.tables[name].rows
        text.add_row(name, f"{len(values):,} values for {rows:,} rows")
    for name, boundaries in plain["boundaries"].items():
        text.add_row(name, f"{len(boundaries):,} boundaries")
    for name, (mean, deviation) in plain["moments"].items():
        text.add_row(name, f"mean {mean:.6g}, standard deviation {deviation:.6g}")
    console().print(text)
    print(f"Written to {path}, where fit takes it from.", file=sys.stderr)
    return EXIT_OK
