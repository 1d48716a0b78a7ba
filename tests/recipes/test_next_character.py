"""The text is split without overlap, the model looks back only, and cpu.yaml learns more than pairs
tell."""

import csv
import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from recipes.next_character.baseline import pairs_log_loss
from recipes.next_character.data import ManualDataModule, Windows
from recipes.next_character.model import NextCharacter
from recipes.next_character.text import NUM_CHARACTERS, encode, read_pages, split_pages
from tests.support.console import fit_by_console


def test_no_paragraph_is_on_both_sides_and_none_is_lost() -> None:
    pages = read_pages()
    sides = [{" ".join(p.split()) for p in side.split("\n\n")} for side in split_pages(pages)]
    assert sides[0] & sides[1] == set()
    assert sides[0] | sides[1] == {
        " ".join(p.split()) for page in pages.values() for p in page.split("\n\n")
    }
    assert len(sides[1]) > 20


def test_a_window_is_followed_by_what_comes_next() -> None:
    windows = Windows(torch.arange(10), length=3)
    assert [
        (current.tolist(), following.tolist())
        for current, following in (windows[i] for i in range(len(windows)))
    ] == [
        ([0, 1, 2], [1, 2, 3]),
        ([3, 4, 5], [4, 5, 6]),
        ([6, 7, 8], [7, 8, 9]),
    ]


def test_the_baseline_equals_shares_counted_by_hand() -> None:
    # In training a is followed by b twice and by a once; of 97 pairs that begin with a each counts
    # once more.
    expected = -(math.log(3 / 100) + math.log(2 / 100)) / 2
    assert pairs_log_loss(encode("aabab"), encode("aab")) == pytest.approx(expected)


def test_what_comes_later_changes_nothing_before() -> None:
    torch.manual_seed(1)
    model = NextCharacter(length=8).eval()
    windows = torch.randint(NUM_CHARACTERS, (2, 8))
    changed = windows.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % NUM_CHARACTERS
    assert_close(model(windows)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(windows)[:, 5:], model(changed)[:, 5:])
    assert_close(model(windows[:, :5]), model(windows)[:, :5])


@pytest.mark.slow
def test_cpu_yaml_learns_more_than_pairs_of_characters_tell(tmp_path: Path) -> None:
    arguments = [
        "--config",
        "recipes/next_character/cpu.yaml",
        f"--trainer.logger.init_args.save_dir={tmp_path}",
    ]
    done = fit_by_console(*arguments)
    assert "2 ranks on 1 node" in done.stderr
    folder = tmp_path / "next_character" / "version_0"
    with (folder / "metrics.csv").open(newline="") as rows:
        losses = [float(row["val_loss"]) for row in csv.DictReader(rows) if row["val_loss"]]
    data = ManualDataModule()
    data.setup("fit")
    untrained = math.log(NUM_CHARACTERS)
    assert losses[-1] < losses[0] < untrained - 1
    assert losses[-1] < data.baseline() - 0.2
    assert (folder / "checkpoints" / "best.ckpt").is_file()
