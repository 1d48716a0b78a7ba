"""A YAML of recipes/strategies behind a model's YAML puts its strategy in place of the model's, and
changes no more."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_distrec.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
FRAGMENTS = sorted((ROOT / "recipes" / "strategies").glob("*.yaml"))

BY_NAME = ROOT / "recipes" / "next_character" / "cpu.yaml"
OPTIONS = {
    "TunedDDPStrategy": {"comm_dtype": "bf16", "timeout_seconds": 60.0},
    "PipelineParallelStrategy": {
        "schedule": "1f1b",
        "split": ["blocks.1"],
        "timeout_seconds": 60.0,
    },
    "TunedFSDPStrategy": {"min_num_parameters": 1000, "timeout_seconds": 60.0},
    "TorchRecShardedStrategy": {"min_rows": 50, "timeout_seconds": 60.0},
}


def fragment(name: str) -> Path:
    return ROOT / "recipes" / "strategies" / f"{name}.yaml"


def with_options(class_name: str, folder: Path) -> Path:
    """Return a YAML in which the strategy is a class with options."""
    file = folder / f"{class_name}.yaml"
    selection = {"class_path": f"lightning_distrec.{class_name}", "init_args": OPTIONS[class_name]}
    file.write_text(yaml.safe_dump({"trainer": {"strategy": selection}}))
    return file


@pytest.fixture
def print_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """A function of files that returns what --print_config shows."""

    def show(*files: Path) -> dict[str, Any]:
        configs = [argument for file in files for argument in ("--config", str(file))]
        monkeypatch.setattr(sys, "argv", ["lightning-distrec", "fit", *configs, "--print_config"])
        with pytest.raises(SystemExit) as remaining:
            main()
        assert remaining.value.code == 0
        return yaml.safe_load(capsys.readouterr().out)

    return show


@pytest.mark.parametrize("file", FRAGMENTS, ids=lambda file: file.stem)
def test_a_fragment_sets_its_strategy_and_nothing_else(file: Path) -> None:
    assert yaml.safe_load(file.read_text()) == {"trainer": {"strategy": file.stem}}
    assert f"--config recipes/strategies/{file.name}" in file.read_text()


@pytest.mark.parametrize("name", ["ddp_tuned", "torchrec_sharded"])
def test_the_strategy_is_replaced_whether_it_was_a_name_or_a_class_with_options(
    name: str, tmp_path: Path, print_config: Callable[..., dict[str, Any]]
) -> None:
    single = print_config(BY_NAME)
    expected = single | {"trainer": single["trainer"] | {"strategy": name}}
    assert print_config(BY_NAME, fragment(name)) == expected
    for class_name in ("PipelineParallelStrategy", "TorchRecShardedStrategy"):
        assert print_config(BY_NAME, with_options(class_name, tmp_path), fragment(name)) == expected


def test_a_class_behind_a_class_keeps_the_options_that_it_has_too(
    tmp_path: Path, print_config: Callable[..., dict[str, Any]]
) -> None:
    files = [
        with_options(name, tmp_path) for name in ("TorchRecShardedStrategy", "TunedDDPStrategy")
    ]
    files[1].write_text("trainer: {strategy: {class_path: lightning_distrec.TunedDDPStrategy}}")
    strategy = print_config(BY_NAME, *files)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_distrec.TunedDDPStrategy"
    assert strategy["init_args"]["timeout_seconds"] == 60
    assert "min_rows" not in strategy["init_args"]
