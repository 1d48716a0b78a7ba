"""Crafted checkpoints: nothing in them is run, nothing outside of them is read or moved, and each
is told as one."""

import copyreg
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_distrec.checkpoint.atomic_folder import MARKER, UNFINISHED, clean_up, remove
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


# -----------------------------------------------------------------------------------------------
# pickles that run code


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
        ("nt", "system", touch),
        ("subprocess", "getoutput", touch),
        ("builtins", "eval", write_it),
        ("builtins", "exec", write_it),
        ("__builtin__", "eval", write_it),
        ("builtins", "__import__", "antigravity"),
        ("builtins", "getattr", "x"),
        ("functools", "partial", "x"),
        ("importlib", "import_module", "antigravity"),
        ("pathlib", "Path.touch", str(canary)),
        ("runpy", "run_path", str(evil)),
        ("pickle", "load", str(evil)),
        ("torch", "load", str(evil)),
        ("torch.serialization", "load", str(evil)),
        ("torch.hub", "load", "x"),
        ("torch.jit", "load", str(evil)),
        ("torch", "ops", "x"),
        ("torch", "ops.load_library", str(evil)),
        ("torch", "classes.load_library", str(evil)),
        ("torch", "hub.load", "x"),
        ("torch", "os.system", touch),
        ("torch", "sys.modules", "os"),
        ("torch", "compile", "x"),
        ("torch", "Size.__new__", "x"),
        ("torch", "float32.__class__", "x"),
        ("torch", "serialization.os.system", touch),
        ("torch.serialization", "os.system", touch),
        ("torch.serialization", "pickle.loads", str(evil)),
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


@pytest.mark.parametrize("place", PLACES)
def test_no_pickle_runs_code(tmp_path: Path, folder: Path, canary: Path, place: str) -> None:
    evil = _file(tmp_path / "evil", pickle.dumps(Payload(os.system, f"touch {canary}")))
    for module, name, options in _gadgets(canary, evil):
        for form, make in FORMS.items():
            path = PLACES[place](folder, make(module, name, _text(options)))
            message = _refusal(path)
            assert not canary.exists(), (module, name, form)
            assert str(tmp_path) in message


@pytest.mark.parametrize("place", PLACES)
def test_no_saved_object_runs_code(folder: Path, canary: Path, place: str) -> None:
    calls = [
        Payload(os.system, f"touch {canary}"),
        {"state_dict": {"x": Payload(eval, f"open({str(canary)!r}, 'w')")}},
        [torch.ones(2), Payload(exec, f"open({str(canary)!r}, 'w')")],
    ]
    for call in calls:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            if place not in ("old state", "old plain") or not isinstance(call, list):
                assert _refusal(PLACES[place](folder, pickle.dumps(call, protocol)))
                assert not canary.exists()


def test_files_of_torch_save_run_no_code_in_either_format(folder: Path, canary: Path) -> None:
    payload = Payload(os.system, f"touch {canary}")
    for zipped in (True, False):
        buffer = io.BytesIO()
        torch.save(
            {"state_dict": {"x": torch.ones(2)}, "payload": payload},
            buffer,
            _use_new_zipfile_serialization=zipped,
        )
        for path in (
            _put(folder, STATE, buffer.getvalue()),
            _put(folder, RANK, buffer.getvalue()),
            _file(folder.parent / "plain.ckpt", buffer.getvalue()),
        ):
            assert "Nothing in it was run" in _refusal(path) or path == folder
            assert not canary.exists()


@pytest.mark.parametrize("place", PLACES)
def test_no_message_advises_to_run_the_code_after_all(folder: Path, place: str) -> None:
    for content in (pickle.dumps(Payload(print, "run")), b"", b"\0" * 100):
        message = _refusal(PLACES[place](folder, content))
        assert "weights_only" not in message, message
        assert message.isprintable(), f"more than a line: {message!r}"


class Scripted(torch.nn.Module):
    """As a TorchScript archive, which is no checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_archive_is_refused(tmp_path: Path, folder: Path) -> None:
    torch.jit.save(torch.jit.trace(Scripted(), torch.ones(1)), tmp_path / "script.pt")
    assert "script.pt cannot be read" in _refusal(tmp_path / "script.pt")
    assert "state.pt cannot be read" in _refusal(
        _put(folder, STATE, (tmp_path / "script.pt").read_bytes())
    )


@pytest.mark.parametrize("place", PLACES)
def test_extension_codes_and_persistent_ids_reach_nothing(
    folder: Path, canary: Path, place: str
) -> None:
    copyreg.add_extension("os", "system", 77)
    try:
        pickle.loads(b"\x80\x02\x82\x4d.")  # now pickle has it in a cache, and asks nobody
        for pickled in (
            b"\x80\x02\x82\x4d" + _tuple(_text(f"touch {canary}")) + b"R.",
            b"\x80\x02" + _text(f"touch {canary}") + b"Q.",
            f"Ptouch {canary}\n.".encode(),
        ):
            _refusal(PLACES[place](folder, pickled))
            assert not canary.exists()
    finally:
        copyreg.remove_extension("os", "system", 77)


# ------------------------------------------------------------------- what files of tensors say, told to misbehave


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
    "begins nowhere": lambda header, places: places.pop(TABLE),
    "begins in a list": lambda header, places: places.update({TABLE: [0, 0]}),
    "begins at a number": lambda header, places: places.update({TABLE: {"saved_offsets": 7}}),
    "begins at text": _begin("a", "b"),
    "begins at None": _begin(None, None),
    "begins at a fraction": _begin(0.0, 0),
    "begins below 0": _begin(-5, 0),
    "begins in the other chunk": _begin(3, 0),
    "begins far away": _begin(10**15, 0),
    "begins farther away": _begin(2**70, 0),
    "fewer directions": _begin(0),
    "more directions": _begin(0, 0, 0),
    "another type": _said(dtype="I32"),
    "another class": _said(dtype="os.system"),
    "another shape": _said(shape=[50, 25]),
    "a flat shape": _said(shape=[25 * 50]),
    "fewer rows": _said(shape=[24, 50]),
    "rows below 0": _said(shape=[-25, -50]),
    "a huge shape": _said(shape=[10**15, 50]),
    "lies before the file": _said(data_offsets=[-5000, 0]),
    "lies behind the file": _said(data_offsets=[10**9, 10**9 + 5000]),
    "lies in another tensor": _said(data_offsets=[100, 5100]),
    "has no place": lambda header, places: header[TABLE].pop("data_offsets"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_file_of_tensors_that_lies_is_reported_as_damage(folder: Path, case: str) -> None:
    message = _refusal(_edit_tensors(folder, LIES[case]))
    assert str(folder) in message


def test_a_chunk_that_is_missing_or_there_twice_is_reported_as_damage(folder: Path) -> None:
    twice = shutil.copytree(folder, folder.with_name("twice.ckpt"))
    edit_marker(folder, lambda marker: marker["files"].pop(SECOND))
    assert "the chunks of 'state_dict/table' are not all of it, once" in _refusal(folder)
    _put(twice, "rank_1.safetensors", (twice / SECOND).read_bytes())
    assert "the chunks of 'state_dict/table' are not all of it, once" in _refusal(twice)


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, folder: Path) -> None:
    secret = _file(tmp_path / "secret.safetensors", (folder / SECOND).read_bytes())  # would load
    (folder / "link").symlink_to(tmp_path)
    names = {
        "..": "../secret.safetensors",
        "absolute": str(secret),
        "by a link": "link/secret.safetensors",
        "back and forth": f"x/../../{tmp_path.name}/secret.safetensors",
        "a network": "file:///etc/passwd.safetensors",
        "home": "~/secret.safetensors",
    }
    for number, (case, name) in enumerate(names.items()):
        copy = shutil.copytree(folder, tmp_path / f"{number}", symlinks=True)
        listed = {name: secret.stat().st_size}
        edit_marker(copy, lambda marker, listed=listed: marker["files"].update(listed))
        old = os.stat(secret).st_atime_ns
        assert "is missing" in _refusal(copy), case
        assert os.stat(secret).st_atime_ns == old, case


# ------------------------------------------------------------------------------------------------------ the other files


STAND_IN = {
    "__stored__": "state_dict/table",
    "shape": (40, 50),
    "dtype": torch.float32,
    "parted": True,
}
STATES: dict[str, Any] = {
    "no such tensor": {"__stored__": "state_dict/other"},
    "name is a list": {"__stored__": ["x"]},
    "name is a path": {"__stored__": "../../etc/passwd"},
    "another shape": {"shape": (41, 50)},
    "shape of text": {"shape": "abc"},
    "shape is a number": {"shape": 7},
    "shape is huge": {"shape": (10**15, 50), "parted": False},
    "shape is below 0": {"shape": (-1, 50), "parted": False},
    "shape of fractions": {"shape": (40.0, 50.0)},
    "type is text": {"dtype": "float32", "parted": False},
    "type is no number": {"dtype": torch.qint32, "parted": False},
    "no shape": {"shape": ...},
    "no type": {"dtype": ...},
    "no parted": {"parted": ...},
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_lies_is_reported_as_damage(folder: Path, case: str) -> None:
    stand_in = {key: value for key, value in (STAND_IN | STATES[case]).items() if value is not ...}
    message = _refusal(
        _edit_state(folder, lambda state: state["state_dict"].update(table=stand_in))
    )
    assert str(folder) in message


def test_a_state_of_another_kind_is_reported_as_damage(folder: Path) -> None:
    for content in ([1], 7, None, torch.ones(2), {"state_dict": [1]}, {}):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        with pytest.raises(CheckpointError):
            _read_all(_put(folder, STATE, buffer.getvalue()))


MARKERS: dict[str, Any] = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"7",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "a long number": b'{"format": ' + b"9" * 10_000 + b', "files": {}}',
    "files are a list": {"files": ["state.pt"]},
    "no files": {"files": {}},
    "size is text": {"files": {STATE: "many"}},
    "size is a list": {"files": {STATE: [1]}},
    "size is None": {"files": {"other.pt": None}},
    "size is below 0": {"files": {STATE: -1}},
    "size is no number": {"files": {STATE: float("nan")}},
    "name is empty": {"files": {"": 1}},
    "name is .": {"files": {".": 1}},
    "name is ..": {"files": {"..": 1}},
    "name has a zero": {"files": {"a\0b": 1}},
    "name is long": {"files": {"a" * 5000: 1}},
    "no format": {"format": ...},
    "format is text": {"format": "1"},
    "format is None": {"format": None},
}


@pytest.mark.parametrize("case", MARKERS)
def test_a_marker_that_lies_is_reported_as_damage(folder: Path, case: str) -> None:
    content = MARKERS[case]
    if isinstance(content, dict):
        marker = json.loads((folder / MARKER).read_text()) | content
        content = json.dumps({
            key: value for key, value in marker.items() if value is not ...
        }).encode()
    (folder / MARKER).write_bytes(content)
    assert str(folder) in _refusal(folder)


# -------------------------------------------------------------------------------------------------
# files of other kinds


def _safe(
    header: dict[str, Any] | bytes, data: bytes = b"\0" * 64, length: int | None = None
) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _tensor(dtype: str = "F32", shape: Any = (4, 4), offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


SAFE: dict[str, bytes] = {
    "nothing": b"",
    "three bytes": b"abc",
    "zeros": b"\0" * 100,
    "a pickle": pickle.dumps(Payload(print, "run")),
    "header beyond the file": _safe(_tensor(), length=10**6),
    "header huge": _safe(_tensor(), length=2**63),
    "header is no JSON": _safe(b"{{{{"),
    "header is no text": _safe(b"\xff\xfe\xfd"),
    "header is a list": _safe(b"[]"),
    "header is deep": _safe(b"[" * 100_000),
    "data beyond the file": _safe(_tensor(offsets=(0, 640), shape=(40, 4))),
    "data begin after they end": _safe(_tensor(offsets=(64, 0))),
    "data begin below 0": _safe(_tensor(offsets=(-64, 0))),
    "shape huge": _safe(_tensor(shape=(10**15, 4))),
    "shape overflows": _safe(_tensor(shape=(2**63, 2))),
    "shape below 0": _safe(_tensor(shape=(-4, -4))),
    "shape of text": _safe(_tensor(shape="ab")),
    "shape does not fit": _safe(_tensor(shape=(4, 5))),
    "unknown type": _safe(_tensor(dtype="os.system")),
    "type of 8 bits": _safe(_tensor(dtype="F8_E8M0", shape=(8, 8))),
    "a hole": _safe(_tensor(offsets=(0, 16), shape=(4,))),
    "overlap": _safe({**_tensor(), "y": _tensor()["x"]}),
}


@pytest.mark.parametrize("case", SAFE)
def test_a_safetensors_file_that_lies_is_reported_as_one(tmp_path: Path, case: str) -> None:
    assert "it.safetensors" in _refusal(_file(tmp_path / "it.safetensors", SAFE[case]))


def test_small_safetensors_files_are_read(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "one": torch.ones(1),
        "bool": torch.ones(2) > 0,
    }
    save_file(tensors, tmp_path / "it.safetensors")
    actual = _read_all(tmp_path / "it.safetensors")
    assert {key: value.tolist() for key, value in actual.items()} == {
        k: v.tolist() for k, v in tensors.items()
    }


@pytest.mark.parametrize("name", ["it.ckpt", "it.pt", "it.bin"])
def test_plain_files_of_other_kinds_are_reported_as_such(tmp_path: Path, name: str) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x", "y")
    for content in (
        b"",
        b"abc",
        b"\0" * 100,
        archive.getvalue(),
        archive.getvalue()[:-5],
        b"PK\3\4" + b"\0" * 50,
    ):
        assert name in _refusal(_file(tmp_path / name, content))


# -------------------------------------------------------------------------------------------------
# memory and patience


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


def _huge_inline(folder: Path) -> Path:
    """Put a tensor of 10**15 numbers, all at one address, into the state."""
    return _edit_state(
        folder, lambda state: state["state_dict"].update(small=torch.ones(1).expand(10**15))
    )


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


@pytest.mark.parametrize("case", BOMBS)
def test_a_few_bytes_claim_no_gigabytes(folder: Path, case: str) -> None:
    path = BOMBS[case](folder)
    raised, grew = _in_child(lambda: _read_all(path))
    assert raised.startswith("CheckpointError: "), raised
    assert grew < 300, f"it took {grew:.0f} MiB"


def test_a_tensor_that_only_looks_huge_takes_no_memory(folder: Path) -> None:
    path = _huge_inline(folder)
    raised, grew = _in_child(lambda: load(path, 0, 1))
    assert grew < 300
    assert raised == "" or raised.startswith("CheckpointError: ")


@pytest.mark.parametrize("name", [MARKER, STATE, SECOND, TENSORS, RANK])
@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "loop"])
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed"])
def test_what_is_no_file_is_neither_waited_for_nor_read_for_ever(
    folder: Path, name: str, kind: str, listed: bool
) -> None:
    if not listed:
        edit_marker(folder, lambda marker: marker["files"].pop(name, None))
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(kind if kind.startswith("/") else name)
    raised, grew = _in_child(lambda: _read_all(folder))
    assert raised.startswith("CheckpointError: "), raised
    assert grew < 300


def test_files_with_flipped_bytes_load_or_are_reported_as_damaged(folder: Path) -> None:
    draw = random.Random(7)
    files = {name: (folder / name).read_bytes() for name in (MARKER, SECOND, STATE, RANK, TENSORS)}

    def flip() -> None:
        for name, content in files.items():
            for _ in range(60):
                spoilt = bytearray(content)
                for _ in range(draw.choice([1, 1, 4])):
                    spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
                (folder / name).write_bytes(spoilt)
                try:
                    _read_all(folder)
                except CheckpointError:
                    continue
                except BaseException as error:
                    position = [
                        i for i, (a, b) in enumerate(zip(content, spoilt, strict=True)) if a != b
                    ]
                    raise AssertionError(
                        f"{name} with {[(i, spoilt[i]) for i in position]}: {error!r}"
                    ) from error
            (folder / name).write_bytes(content)

    raised, _ = _in_child(flip, seconds=60)
    assert raised == ""


# ----------------------------------------------------------------------------------------- what is
# moved and removed


@pytest.mark.parametrize(
    "name", ["../outside", "{tmp}/outside", "../../outside", ".", "..", "", "a\0b", 7, None, ...]
)
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


def test_writing_over_a_link_leaves_what_it_led_to(tmp_path: Path, folder: Path) -> None:
    link = tmp_path / "last.ckpt"
    link.symlink_to(folder.name)
    write_folder(link, {"state_dict": {"small": torch.zeros(3)}})
    assert not link.is_symlink()
    assert _read_all(link)["small"].tolist() == [0, 0, 0]
    assert _read_all(folder)["small"].tolist() == [1, 1, 1]
