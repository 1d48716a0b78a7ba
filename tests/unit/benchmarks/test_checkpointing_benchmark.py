"""The benchmark of checkpoints, where it is plain functions: its numbers, and its place in the
page."""

from pathlib import Path

import pytest
import torch

from tests.benchmarks import checkpointing_model as model
from tests.benchmarks.checkpointing_runs import Loads, Measured, compared, seconds_table, summary
from tests.benchmarks.checkpointing_text import BEGIN, END, section, with_section, with_section_of
from tests.benchmarks.checkpointing_turns import (
    AsyncSaves,
    Peak,
    Saves,
    file_system,
    folder_bytes,
    ratios,
)
from tests.benchmarks.performance_text import GPU

PAGE = f"# How fast\n\nwords\n\n{GPU}\n"
SECTION = section(
    "summary", "seconds", [], machine="2 cores", size="2 GiB", file_system="ext4", rounds=4
)


def test_a_ratio_is_the_median_of_those_of_single_rounds() -> None:
    row = compared("", [1.0, 2.0, 30.0], [2.0, 2.0, 3.0], 1.1)
    assert ratios([1.0, 2.0], [2.0, 2.0]) == [0.5, 1.0]
    assert row.value == 1.0
    assert not row.missed
    assert compared("", [3.0], [2.0], 1.1).missed
    assert compared("", [], []).value is None


def test_the_section_comes_before_the_one_about_gpus_and_replaces_the_one_that_is_there() -> None:
    page = with_section(PAGE, SECTION)
    assert page.index("words") < page.index(BEGIN) < page.index(END) < page.index("## On a GPU")
    assert with_section(page, SECTION) == page
    newer = with_section(page, SECTION.replace("summary", "other"))
    assert newer == page.replace("summary", "other")
    assert with_section("# How fast\n", SECTION).endswith(f"{END}\n")


def test_a_page_that_is_rewritten_keeps_its_section() -> None:
    page = with_section(PAGE, SECTION)
    anew = PAGE.replace("words", "other words")
    assert with_section_of(page, anew) == page.replace("words", "other words")
    assert with_section_of(PAGE, anew) == anew


def test_aims_that_are_missed_are_bold() -> None:
    seconds = {"ours": [3.0, 3.0], "bare": [2.0, 2.0], "dd": [1.0, 1.0]}
    measured = Measured(2**19, saves=Saves(seconds, peak=2**20, folder=11, tensors=10))
    measured.async_saves = AsyncSaves([1.0], [0.5], [1.1], [5.0], [0.1], [0.2], peak=10, shards=10)
    measured.loads[3] = Loads([1.0], [2.0], 2**20)
    measured.exports[".ckpt"] = 2**29
    rows = {row.name: row for row in summary(measured)}
    missed = {name for name, row in rows.items() if row.missed}
    assert missed == {
        "save / bare `dcp.save`",
        "save: bytes a second / dd's",
        "export to .ckpt: MiB by which the process grows",
    }
    assert rows["save: bytes a second / dd's"].value == pytest.approx(1 / 3)
    assert rows["load on 3 ranks / bare `dcp.load`"].value == 0.5
    assert "| save | 3.00 | 3.00 to 3.00 | 716 |" in seconds_table(measured)


def test_what_a_table_holds_depends_on_its_place_name_and_seed_and_not_on_the_cut() -> None:
    whole, part = torch.empty(10_000, 64), torch.empty(3000, 16)
    model._known(whole, "net.ebc.embedding_bags.t_f0.weight", 3, 0, 0)
    model._known(part, "state_dict/net.ebc.embedding_bags.t_f0.weight", 3, 5000, 32)
    assert torch.equal(part, whole[5000:8000, 32:48])
    assert ((whole >= 1) & (whole < 2)).all()
    assert len(whole.unique()) > whole.numel() / 20
    for name, seed in (("t_f0.weight", 4), ("t_f1.weight", 3), ("t_f0.momentum_1", 3)):
        model._known(part, name, seed, 5000, 32)
        assert not torch.equal(part, whole[5000:8000, 32:48])


def test_a_row_that_is_not_as_it_was_saved_is_found() -> None:
    rows = torch.empty(5000, 64)
    model._known(rows, "t_f0.weight", 1, 0, 0)
    model._must_be_known(rows, "t_f0.weight", 1, 0, 0, "the table")
    rows[4999, 63] += 1e-6
    with pytest.raises(
        AssertionError, match=r"the table: 't_f0.weight' is not what was saved, from row 4096 on"
    ):
        model._must_be_known(rows, "t_f0.weight", 1, 0, 0, "the table")


def test_a_peak_sees_memory_that_is_gone_again() -> None:
    peak = Peak()
    memory = torch.ones(16 * 2**20)
    del memory
    assert 60 * 2**20 < peak.bytes() < 80 * 2**20


def test_a_folders_bytes_are_those_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "within").mkdir()
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "within" / "b").write_bytes(b"45")
    assert folder_bytes(tmp_path) == 5
    assert file_system(Path("/proc/self")) == "proc"
