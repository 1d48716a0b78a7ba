"""Ranks find the same key, and nobody else does."""

import os
import stat
import threading
from pathlib import Path

import pytest

from lightning_distrec.cluster import job_key
from lightning_distrec.cluster.job_key import KEY_VARIABLE, JobKey, choose_key, find_key
from lightning_distrec.errors import RendezvousError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(job_key.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "home"


def _agree(key: JobKey, other: JobKey) -> bool:
    return other.is_signed(key.sign("a", 1), "a", 1) and not other.is_signed(
        key.sign("a", 1), "a", 2
    )


def test_the_variable_is_the_key_of_those_that_have_it() -> None:
    key = choose_key({KEY_VARIABLE: "one"})
    assert _agree(key, find_key(key.offer, {KEY_VARIABLE: "one"}))
    assert not _agree(key, find_key(key.offer, {KEY_VARIABLE: "two"}))
    with pytest.raises(
        RendezvousError,
        match=f"rank 0 has {KEY_VARIABLE} in its environment, and this rank has not",
    ):
        find_key(key.offer, {})
    assert "one" not in f"{key}{key.offer}"


def test_ranks_that_start_at_the_same_time_find_one_file_of_this_user_alone(home: Path) -> None:
    keys: list[JobKey] = []
    threads = [threading.Thread(target=lambda: keys.append(choose_key({}))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({key.secret for key in keys}) == 1
    assert len(keys) == 16
    folder = home / ".config" / "lightning_distrec"
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert _agree(keys[0], find_key(keys[0].offer, {}))


def test_a_file_that_others_may_read_is_refused(home: Path) -> None:
    key = choose_key({})
    os.chmod(key.origin, 0o644)
    with pytest.raises(RendezvousError, match="may be read by others than this user. Delete it"):
        choose_key({})


def test_without_a_home_the_file_is_on_this_machine_and_without_that_the_variable_is_asked_for(
    home: Path, tmp_path: Path
) -> None:
    home.write_text("not a folder")
    assert choose_key({}).origin.startswith(str(tmp_path / "tmp"))
    (tmp_path / "tmp").rename(tmp_path / "gone")
    (tmp_path / "tmp").write_text("not a folder")
    with pytest.raises(
        RendezvousError, match=rf"no place for the key .*Set {KEY_VARIABLE} to the same secret text"
    ):
        choose_key({})
