"""The package that is built: what is in it, and what an index shows of it."""

import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.console import finished

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/owner/name"


def _build(kind: str, folder: Path, address: str = "") -> Path:
    """Build a wheel or an sdist, and return it."""
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        kind,
        "--directory",
        str(folder),
    ]
    variables = {**os.environ, "REPOSITORY_URL": address}
    done = finished(command, ROOT, env=variables)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


def _files_of_recipes() -> set[str]:
    """Return the recipes' files that belong to the project, relative to its root."""
    kinds = {".py", ".yaml", ".md", ".png", ".sh"}
    actual = (
        path
        for path in (ROOT / "recipes").rglob("*")
        if path.suffix in kinds and "data" not in path.parts
    )
    return {str(path.relative_to(ROOT)) for path in actual}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(_build("wheel", tmp_path_factory.mktemp("wheel"), ADDRESS))


def _metadata(wheel: zipfile.ZipFile) -> str:
    return wheel.read(
        next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    ).decode()


def test_the_wheel_has_the_package_and_the_recipes_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"lightning_distrec/{name}" for name in _files_of_recipes()} <= names
    assert "lightning_distrec/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "lightning_distrec"
    }


def test_the_readme_on_an_index_has_no_relative_link(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    files = f"{ADDRESS}/blob/v"
    targets = [
        link.removeprefix(files).split("/", 1)[1].split("#")[0]
        for link in links
        if link.startswith(files)
    ]
    assert targets
    assert all((ROOT / target).exists() for target in targets)
    assert f"Project-URL: Changelog, {files}" in metadata


def test_without_an_address_the_package_claims_none(tmp_path: Path) -> None:
    metadata = _metadata(zipfile.ZipFile(_build("wheel", tmp_path)))
    assert "\nProject-URL:" not in metadata
    assert "# lightning_distrec" in metadata


def test_the_site_shows_the_recipes_own_pictures() -> None:
    copies = sorted((ROOT / "docs/images/recipes").iterdir())
    assert [copy.stem for copy in copies] == sorted(
        path.parent.name for path in ROOT.glob("recipes/*/curves.png")
    )
    assert all(
        copy.read_bytes() == (ROOT / "recipes" / copy.stem / "curves.png").read_bytes()
        for copy in copies
    )


def test_the_sdist_can_be_built_and_tested(tmp_path: Path) -> None:
    with tarfile.open(_build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    expected = {
        "hatch_build.py",
        "Makefile",
        "LICENSE",
        "CHANGELOG.md",
        "docs/index.md",
        "tests/conftest.py",
    }
    assert expected | _files_of_recipes() <= names
