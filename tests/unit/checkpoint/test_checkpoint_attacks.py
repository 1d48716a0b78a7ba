"""Crafted checkpoints: nothing in them is run, nothing outside of them is read or moved, and each
is told as one."""

import copyreg
import io
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_distrec.checkpoint.atomic_folder import (
    MARKER,
    MARKER_CHECKSUM,
    UNFINISHED,
    clean_up,
    marker_crc32,
    remove,
)
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.tensor_files import PLACES as PLACES_KEY
from lightning_distrec.errors import CheckpointError
from tests.support.checkpoint_folders import by_rows, edit_marker, write_folder
from tests.support.plain_checkpoints import load

STATE, RANK = "state.pt", "rank_0.pt"
TENSORS, SECOND = "rank_0.safetensors", "rank_0_1.safetensors"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tensor in parts, a large whole one, and a small one."""
    table = torch.arange(2000.0).view(40, 50)
    state = {"table": by_rows(table, 25), "large": torch.ones(100, 100), "small": torch.ones(3)}
    return write_folder(tmp_path_factory.mktemp("template") / "it.ckpt", {"state_dict": state})


@pytest.fixture
def folder(tmp_path: Path, template: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(template, tmp_path / "it.ckpt"))


@pytest.fixture
def fresh(tmp_path: Path, template: Path) -> Callable[[], Path]:
    """Make a new copy with each call."""
    numbers = itertools.count()
    return lambda: Path(shutil.copytree(template, tmp_path / str(next(numbers)) / "it.ckpt"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What payloads create."""
    return tmp_path / "canary"


def _read_all(path: Path) -> dict[str, Any]:
    """Read a checkpoint in full."""
    loaded = load(path, 0, 1)
    return {key: materialized(value) for key, value in loaded.checkpoint["state_dict"].items()}


def _refusal(path: Path) -> str:
    """Return the message with which a checkpoint is refused; fails where it is not, or by another
    exception."""
    with pytest.raises(CheckpointError) as refused:
        _read_all(path)
    return str(refused.value)


def test_the_checkpoint_that_is_spoilt_below_is_good(folder: Path) -> None:
    actual = _read_all(folder)
    assert torch.equal(actual["table"], torch.arange(2000.0).view(40, 50))
    assert torch.equal(actual["large"], torch.ones(100, 100))
    _edit_tensors(folder, lambda header, places: None)
    _edit_state(folder, lambda state: None)
    assert _read_all(folder).keys() == actual.keys()


def _put(folder: Path, name: str, content: bytes) -> Path:
    """Replace a file, and have the marker say so."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    edit_marker(folder, lambda marker: marker["files"].update({name: len(content)}))
    return folder


def _edit_tensors(folder: Path, edit: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Path:
    """Change what a file with tensors says of them: its header, and where chunks begin."""
    content = (folder / TENSORS).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    places = json.loads(header["__metadata__"][PLACES_KEY])
    edit(header, places)
    if PLACES_KEY in header.get("__metadata__", {}):
        header["__metadata__"][PLACES_KEY] = json.dumps(places)
    return _put(folder, TENSORS, _safe(header, content[8 + size :]))


def _edit_state(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    state = torch.load(folder / STATE, weights_only=True)
    edit(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return _put(folder, STATE, buffer.getvalue())


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _tuple(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def _global(module: str, name: str) -> bytes:
    """STACK_GLOBAL, which looks dotted names up piece by piece."""
    return _text(module) + _text(name) + b"\x93"


FORMS: dict[str, Callable[[str, str, bytes], bytes]] = {
    "REDUCE": lambda module, name, options: (
        b"\x80\x04" + _global(module, name) + _tuple(options) + b"R."
    ),
    "GLOBAL": lambda module, name, options: (
        b"\x80\x02c" + f"{module}\n{name}\n".encode() + _tuple(options) + b"R."
    ),
    "INST": lambda module, name, options: (
        b"(" + options + b"i" + f"{module}\n{name}\n".encode() + b"."
    ),
}


def _gadgets(canary: Path, evil: Path) -> list[tuple[str, str, str]]:
    """Return module, name and argument of calls that create the canary. evil: a pickle that
    does."""
    touch, write_it = f"touch {canary}", f"open({str(canary)!r}, 'w')"
    return [
        ("os", "system", touch),
        ("posix", "system", touch),
        ("builtins", "eval", write_it),
        ("builtins", "getattr", "x"),
        ("functools", "partial", "x"),
        ("torch", "ops.load_library", str(evil)),
        ("torch", "os.system", touch),
        ("torch.serialization", "os.system", touch),
        ("torch.serialization", "_get_layout.__globals__", "x"),
        ("lightning_distrec.checkpoint.atomic_folder", "remove", str(canary.parent)),
    ]


def _zipped(pickled: bytes) -> bytes:
    """Return a file of torch.save with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


PLACES: dict[str, Callable[[Path, bytes], Path]] = {
    "state": lambda folder, pickled: _put(folder, STATE, _zipped(pickled)),
    "old state": lambda folder, pickled: _put(folder, STATE, pickled),
    "rank": lambda folder, pickled: _put(folder, RANK, _zipped(pickled)),
    "tensors": lambda folder, pickled: _put(folder, TENSORS, pickled),
    "plain": lambda folder, pickled: _file(folder.parent / "plain.ckpt", _zipped(pickled)),
    "old plain": lambda folder, pickled: _file(folder.parent / "plain.pt", pickled),
}


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


class Payload:
    """Runs something when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_the_payloads_would_work_if_they_were_run(tmp_path: Path, canary: Path) -> None:
    evil = _file(tmp_path / "evil", pickle.dumps(Payload(os.system, f"touch {canary}")))
    pickle.loads(evil.read_bytes())
    assert canary.exists()
    for form in FORMS.values():
        canary.unlink(missing_ok=True)
        pickle.loads(form("os", "system", _text(f"touch {canary}")))
        assert canary.exists()
    canary.unlink()
    torch.load(io.BytesIO(_zipped(evil.read_bytes())), weights_only=False)
    assert canary.exists()
    canary.unlink()
    pickle.loads(FORMS["REDUCE"]("torch.serialization", "os.system", _text(f"touch {canary}")))
    assert canary.exists(), "dotted names are not looked up; that attack is none"


def _payloads(canary: Path, evil: Path) -> list[bytes]:
    """Return pickles that would create the canary, and what is none."""
    touch = f"touch {canary}"
    payloads = [
        make(module, name, _text(options))
        for module, name, options in _gadgets(canary, evil)
        for make in FORMS.values()
    ]
    for call in (
        Payload(os.system, touch),
        {"state_dict": {"x": Payload(eval, f"open({str(canary)!r}, 'w')")}},
    ):
        payloads += [pickle.dumps(call, version) for version in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [
        *payloads,
        b"\x80\x02\x82\x4d" + _tuple(_text(touch)) + b"R.",  # by an extension's number
        b"\x80\x02" + _text(touch) + b"Q.",  # persistent ids
        f"P{touch}\n.".encode(),
        b"",
        bytes(99),
    ]


@pytest.fixture
def _extension() -> Iterator[None]:
    """Give os.system a number that pickles may have in the place of its name."""
    copyreg.add_extension("os", "system", 77)
    pickle.loads(b"\x80\x02\x82\x4d.")  # now pickle has it in a cache, and asks nobody
    yield
    copyreg.remove_extension("os", "system", 77)


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("place", PLACES)
def test_no_pickle_runs_code_and_no_message_advises_to_run_it_after_all(
    tmp_path: Path, folder: Path, canary: Path, place: str
) -> None:
    evil = _file(tmp_path / "evil", pickle.dumps(Payload(os.system, f"touch {canary}")))
    for payload in _payloads(canary, evil):
        message = _refusal(PLACES[place](folder, payload))
        assert not canary.exists(), payload
        assert str(tmp_path) in message
        assert "weights_only" not in message, message
        assert message.isprintable(), f"more than a line: {message!r}"


TABLE = "state_dict/table"


def _begin(*offsets: Any) -> Callable[[Any, Any], None]:
    """Say that the table's first chunk begins elsewhere."""
    return lambda header, places: places[TABLE].update(saved_offsets=list(offsets))


def _said(**changes: Any) -> Callable[[Any, Any], None]:
    """Change what the header says of the table's first chunk."""
    return lambda header, places: header[TABLE].update(changes)


def _rename(header: Any, places: Any) -> None:
    header["other"] = header.pop(TABLE)
    places["other"] = places.pop(TABLE)


LIES: dict[str, Callable[[Any, Any], Any]] = {
    "no such tensor": _rename,
    "no tensors": lambda header, places: header.clear(),
    "begins at a number": lambda header, places: places.update({TABLE: {"saved_offsets": 7}}),
    "begins below 0": _begin(-5, 0),
    "begins in the other chunk": _begin(3, 0),
    "begins far away": _begin(10**15, 0),
    "another type": _said(dtype="I32"),
    "another class": _said(dtype="os.system"),
    "fewer rows": _said(shape=[24, 50]),
    "a huge shape": _said(shape=[10**15, 50]),
    "lies before the file": _said(data_offsets=[-5000, 0]),
    "lies behind the file": _said(data_offsets=[10**9, 10**9 + 5000]),
}


def test_a_file_of_tensors_that_lies_is_reported_as_damage(fresh: Callable[[], Path]) -> None:
    for case, lie in LIES.items():
        folder = fresh()
        assert str(folder) in _refusal(_edit_tensors(folder, lie)), case


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, folder: Path) -> None:
    secret = _file(tmp_path / "secret.safetensors", (folder / SECOND).read_bytes())  # would load
    (folder / "link").symlink_to(tmp_path)
    for number, name in enumerate((
        "../secret.safetensors",
        str(secret),
        "link/secret.safetensors",
        f"x/../../{tmp_path.name}/secret.safetensors",
    )):
        copy = shutil.copytree(folder, tmp_path / f"{number}", symlinks=True)
        listed = {name: secret.stat().st_size}
        edit_marker(copy, lambda marker, listed=listed: marker["files"].update(listed))
        old = os.stat(secret).st_atime_ns
        assert "is missing" in _refusal(copy), name
        assert os.stat(secret).st_atime_ns == old, name


STAND_IN = {
    "__stored__": "state_dict/table",
    "shape": (40, 50),
    "dtype": torch.float32,
    "parted": True,
}
STATES: dict[str, Any] = {
    "no such tensor": {"__stored__": "state_dict/other"},
    "name is a path": {"__stored__": "../../etc/passwd"},
    "another shape": {"shape": (41, 50)},
    "shape is huge": {"shape": (10**15, 50), "parted": False},
    "no shape": {"shape": ...},
    "no parted": {"parted": ...},
}


def test_a_state_that_lies_is_reported_as_damage(fresh: Callable[[], Path]) -> None:
    for case, changes in STATES.items():
        stand_in = {key: value for key, value in (STAND_IN | changes).items() if value is not ...}

        def put(state: dict[str, Any], stand_in: dict[str, Any] = stand_in) -> None:
            state["state_dict"].update(table=stand_in)

        folder = fresh()
        assert str(folder) in _refusal(_edit_state(folder, put)), case


MARKERS: dict[str, Any] = {
    "nothing": b"",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "files are a list": {"files": ["state.pt"]},
    "no files": {"files": {}},
    "size is text": {"files": {STATE: "many"}},
    "size is below 0": {"files": {STATE: -1}},
    "name is ..": {"files": {"..": 1}},
    "name is long": {"files": {"a" * 5000: 1}},
    "no format": {"format": ...},
}


def test_a_marker_that_lies_is_reported_as_damage(folder: Path) -> None:
    marker = json.loads((folder / MARKER).read_text())
    del marker[MARKER_CHECKSUM]
    for case, content in MARKERS.items():
        if isinstance(content, dict):
            forged = {key: value for key, value in (marker | content).items() if value is not ...}
            forged[MARKER_CHECKSUM] = marker_crc32(forged)
            content = json.dumps(forged).encode()
        (folder / MARKER).write_bytes(content)
        assert str(folder) in _refusal(folder), case


def _safe(
    header: dict[str, Any] | bytes, data: bytes = b"\0" * 64, length: int | None = None
) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _tensor(dtype: str = "F32", shape: Any = (4, 4), offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


SAFE: dict[str, bytes] = {
    "nothing": b"",
    "a pickle": pickle.dumps(Payload(print, "run")),
    "header beyond the file": _safe(_tensor(), length=10**6),
    "header huge": _safe(_tensor(), length=2**63),
    "header is no JSON": _safe(b"{{{{"),
    "header is deep": _safe(b"[" * 100_000),
    "data beyond the file": _safe(_tensor(offsets=(0, 640), shape=(40, 4))),
    "shape huge": _safe(_tensor(shape=(10**15, 4))),
    "unknown type": _safe(_tensor(dtype="os.system")),
    "overlap": _safe({**_tensor(), "y": _tensor()["x"]}),
}


def test_a_safetensors_file_that_lies_is_reported_as_one(tmp_path: Path) -> None:
    for case, content in SAFE.items():
        assert "it.safetensors" in _refusal(_file(tmp_path / "it.safetensors", content)), case


def _in_child(action: Callable[[], Any], seconds: int = 5) -> tuple[str, float]:
    """Do this in a child with little more memory than now; return what it raised, and by how many
    MiB it grew."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.close(reading)
        try:
            signal.alarm(seconds)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, resource.RLIM_INFINITY))
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
            old, raised = _peak_mib(), ""
            try:
                action()
            except CheckpointError as error:
                raised = f"CheckpointError: {error}"
            except BaseException:
                raised = traceback.format_exc()
            os.write(writing, json.dumps([raised[-2000:], _peak_mib() - old]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        message = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert message, f"the child was ended by signal {-code}: 14 is for too long"
    return tuple(json.loads(message))


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        / 1024
    )


def _huge_shape(folder: Path) -> Path:
    """Say in both places that the table has 10**9 rows, which are 200 GB."""
    stand_in = STAND_IN | {"shape": (10**9, 50), "parted": False}
    _edit_state(folder, lambda state: state["state_dict"].update(table=stand_in))
    return _edit_tensors(folder, _said(shape=[10**9, 50]))


BOMBS: dict[str, Callable[[Path], Path]] = {
    "a shape of 200 GB": _huge_shape,
    "a shape of 200 GB in the state alone": lambda folder: _edit_state(
        folder, lambda state: state["state_dict"].update(table=STAND_IN | {"shape": (10**9, 50)})
    ),
    "a header of 2**62 bytes": lambda folder: _put(folder, TENSORS, _safe({}, length=2**62)),
    "a header of many brackets": lambda folder: _put(folder, TENSORS, _safe(b"[" * 10**6)),
    "beginnings of many brackets": lambda folder: _edit_tensors(
        folder, lambda header, places: places.update(_nested(900))
    ),
}


def _nested(depth: int) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for _ in range(depth):
        nested = {TABLE: nested}
    return nested


def test_a_few_bytes_claim_no_gigabytes(fresh: Callable[[], Path]) -> None:
    for case, make in BOMBS.items():
        path = make(fresh())
        raised, grew = _in_child(lambda path=path: _read_all(path))
        assert raised.startswith("CheckpointError: "), (case, raised)
        assert grew < 300, f"{case} took {grew:.0f} MiB"


def test_what_is_no_file_is_neither_waited_for_nor_read_for_ever(
    fresh: Callable[[], Path],
) -> None:
    kinds: dict[str, Callable[[Path], Any]] = {
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "loop": lambda path: path.symlink_to(path.name),
    }
    for (kind, make), name in itertools.product(kinds.items(), (MARKER, STATE, TENSORS, RANK)):
        folder = fresh()
        if name == RANK:  # listed no more
            edit_marker(folder, lambda marker: marker["files"].pop(RANK))
        (folder / name).unlink()
        make(folder / name)
        raised, grew = _in_child(lambda folder=folder: _read_all(folder))
        assert raised.startswith("CheckpointError: "), (kind, name, raised)
        assert grew < 300, (kind, name)


@pytest.mark.parametrize("name", ["../outside", "{tmp}/outside", ".", "", "a\0b", 7, ...])
def test_a_leftover_goes_nowhere_but_to_a_name_beside_it(
    tmp_path: Path, template: Path, name: Any
) -> None:
    parent = tmp_path / "a" / "b"
    leftovers = Path(shutil.copytree(template, parent / f"{UNFINISHED}x"))
    named = {"name": name.format(tmp=tmp_path) if isinstance(name, str) else name}
    edit_marker(
        leftovers, lambda marker: marker.pop("name") if name is ... else marker.update(named)
    )
    clean_up(parent)
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert list((tmp_path / "a").iterdir()) == [parent]
    assert list(parent.iterdir()) == []


def test_a_leftover_that_is_damaged_or_of_a_later_version_stops_nobody(
    tmp_path: Path, template: Path
) -> None:
    for number, content in enumerate([
        b"",
        b"[]",
        b'{"format": 3, "files": {}, "name": "it.ckpt"}',
        b"\xff",
    ]):
        leftovers = Path(shutil.copytree(template, tmp_path / f"{UNFINISHED}{number}"))
        (leftovers / MARKER).write_bytes(content)
    clean_up(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_removing_follows_no_links(tmp_path: Path, folder: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (folder / "link").symlink_to(precious)
    (tmp_path / f"{UNFINISHED}link").symlink_to(precious)
    (tmp_path / "best.ckpt").symlink_to(precious)
    remove(folder)
    remove(tmp_path / "best.ckpt")
    clean_up(tmp_path)
    assert list(tmp_path.iterdir()) == [precious]
    assert (precious / "file").read_text() == "x"
