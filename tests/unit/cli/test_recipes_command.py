"""`lightning-distrec recipes` copies what a recipe needs, and nothing that is there is lost."""

from pathlib import Path

import pytest

from lightning_distrec.cli.main import main
from lightning_distrec.cli.recipes import recipes_folder


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
    assert not (tmp_path / "recipes/criteo_dlrm").exists()
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
