"""What importing and running this package changes in Lightning, torch and torchrec is what a table
says."""

import json
import re
import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lightning_distrec._compat.patches import Patches
from tests.support.launches import ended, start
from tests.support.patched_fits import FITS, RESULT
from tests.support.ports import free_port

PAGE = Path(__file__).parents[2] / "docs/architecture.md"


def _documented() -> dict[str, set[str]]:
    """Return the patterns of the names in the table, by when they are installed."""
    section = PAGE.read_text().partition("## What is patched\n")[2].partition("\n## ")[0]
    names: dict[str, set[str]] = defaultdict(set)
    for row in re.findall(r"^\| (`.*) \|$", section, flags=re.MULTILINE):
        cells = row.split(" | ")
        assert len(cells) == 4, row
        names[cells[1]] |= set(re.findall(r"`([^`]+)`", cells[0]))
    return names


def _undocumented(changes: list[str], patterns: set[str]) -> list[str]:
    return [name for name in changes if not any(fnmatch(name, pattern) for pattern in patterns)]


def _changes() -> dict[str, Any]:
    """Return what fits on two ranks, each one of a node, have changed when."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.support.patched_fits"]
    printed, _ = ended(*(start(*command, **place, RANK=rank) for rank in "01"))
    [line] = [line for line in printed.splitlines() if RESULT in line]
    return json.loads(line.partition(RESULT)[2])


def test_the_table_of_patches_lists_all_of_them_and_fits_leave_nothing_behind() -> None:
    changes = _changes()
    documented = _documented()
    all_items = set().union(*documented.values())
    assert documented.keys() == {"import", "run", "run over several nodes", "`Communication`"}
    assert sorted(documented["import"]) == changes["import"] == changes["all strategies"]
    seen: set[str] = set()
    for fit, (_, fails) in FITS.items():
        fitted: dict[str, Any] = changes[fit]
        assert _undocumented(fitted["during"], all_items) == [], fit
        assert "lightning.pytorch.core.module.LightningModule.log" in fitted["during"], fit
        assert fitted["after"] == [], fit
        assert fitted["objects"] == [], fit
        assert ("on every rank" in fitted["raised"]) == fails, fitted["raised"]
        if not fails:
            # The user's own calls get torch's functions: what a run replaces there is private.
            public = [name for name in fitted["during"] if "._" not in name]
            assert [name for name in public if name.startswith("torch.")] == [], fit
        seen |= set(fitted["during"])
    unseen = [item for item in all_items if not any(fnmatch(name, item) for name in seen)]
    assert unseen == []


class _Upstream:
    greeting = "hello"


def test_patches_put_back_what_was_there_and_leave_what_others_have_set_since() -> None:
    instance = _Upstream()
    with Patches() as patches:
        patches.replace(_Upstream, "greeting", "good day")
        patches.replace(_Upstream, "farewell", "bye")
        patches.replace(instance, "greeting", "you")
        patches.replace_class(instance, type("Subclass", (_Upstream,), {}))
        assert (instance.greeting, _Upstream.greeting, type(instance).__name__) == (
            "you",
            "good day",
            "Subclass",
        )
    assert (instance.greeting, vars(instance), type(instance)) == ("hello", {}, _Upstream)
    assert not hasattr(_Upstream, "farewell")
    with Patches() as patches:
        patches.replace(instance, "greeting", "you")
        instance.greeting = "set by somebody else"
    assert instance.greeting == "set by somebody else"
