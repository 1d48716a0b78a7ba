"""`lightning-distrec recipes` copies what a recipe needs, and nothing that is there is lost."""

from pathlib import Path

import pytest

from lightning_distrec.cli.main import main
from lightning_distrec.cli.recipes import find_parts, recipes_folder


def test_the_list_has_each_recipe_with_its_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list"]) == 0
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if "│" in line]
    strategies = {name.strip(): strategy.strip() for name, strategy in rows}
    assert strategies["criteo_dlrm"] == "torchrec_sharded"
    assert strategies["convnet"] == "ddp_tuned"
    assert strategies["sasrec"] == "torchrec_sharded"


def test_a_recipe_comes_with_all_that_it_imports() -> None:
    assert set(find_parts(recipes_folder(), "multi_task")) == {
        "multi_task",
        "criteo_dlrm",
        "report.py",
    }
    assert set(find_parts(recipes_folder(), "two_tower")) == {"two_tower", "movielens", "report.py"}


def test_a_copy_is_complete_and_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "copy", "sasrec", "--into", str(tmp_path)]) == 0
    assert "lightning-distrec fit --config recipes/sasrec/cpu.yaml" in capsys.readouterr().out
    for file in (
        "__init__.py",
        "report.py",
        "movielens/folder.py",
        "sasrec/model.py",
        "sasrec/cpu.yaml",
    ):
        assert (tmp_path / "recipes" / file).read_text() == (recipes_folder() / file).read_text()
    assert (tmp_path / "recipes/strategies/ddp_tuned.yaml").is_file()
    assert not list(tmp_path.rglob("__pycache__"))
    (changed := tmp_path / "recipes" / "report.py").write_text("# changed\n")
    assert main(["recipes", "copy", "sasrec", "--into", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["recipes", "copy", "two_tower", "--into", str(tmp_path)]) == 0
    assert f"Kept, though they differ from the package's: {changed}" in capsys.readouterr().out
    assert changed.read_text() == "# changed\n"


def test_the_readme_of_a_copy_has_no_link_to_what_is_not_there(tmp_path: Path) -> None:
    assert main(["recipes", "copy", "next_character", "--into", str(tmp_path)]) == 0
    text = (tmp_path / "recipes/next_character/README.md").read_text()
    assert "](../" not in text
    assert "another strategy (lightning_distrec: docs/how_to/choose_strategy.md)" in text


def test_an_unknown_name_is_answered_with_a_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "twotower"]) == 2
    assert (
        "recipes copy twotower: there is none; did you mean 'two_tower'?" in capsys.readouterr().err
    )
