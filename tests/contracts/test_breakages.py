"""Every deliberate breakage still finds its place, so that tests.breakages can be run at any
time."""

from pathlib import Path

import pytest

from tests.breakages.patches import BREAKAGES, Breakage
from tests.breakages.trial import ROOT, place_of

ROOMS = (
    "cluster",
    "checkpoint",
    "prefetch",
    "sharding",
    "optimizers",
    "strategies",
    "callbacks",
    "metrics",
    "cli",
    "advice",
    "serving",
)


def test_breakages_change_one_place_each_and_name_tests_that_exist() -> None:
    problems = []
    for breakage in BREAKAGES:
        try:
            place_of(breakage, ROOT)
        except (ValueError, SyntaxError) as error:
            problems.append(str(error))
        problems += [
            f"{breakage.name}: no {test}"
            for test in breakage.tests
            if not (ROOT / "tests" / test).exists()
        ]
    assert not problems, "\n".join(problems)


def test_every_package_is_broken_somewhere() -> None:
    files = [place_of(breakage, ROOT)[0].relative_to(ROOT) for breakage in BREAKAGES]
    assert len(files) >= 30
    assert {file.parts[1] for file in files} >= set(ROOMS)
    assert len({breakage.name for breakage in BREAKAGES}) == len(BREAKAGES)


def test_a_patch_that_finds_nothing_or_too_much_is_refused(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "here.py").write_text("one = 1\ntwo = 1\n")
    for find, replace in (("three", ""), ("= 1", "= 2"), ("one = 1", "one = 1")):
        with pytest.raises(ValueError, match="a patch"):
            place_of(Breakage("a patch", "room", find, replace, "", ()), tmp_path)
    with pytest.raises(SyntaxError):
        place_of(Breakage("a patch", "room", "one = 1", "one = (", "", ()), tmp_path)
