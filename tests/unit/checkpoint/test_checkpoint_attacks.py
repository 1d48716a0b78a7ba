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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_distrec._compat.torch_distributed import DCP_METADATA_NAMES
from lightning_distrec.checkpoint.atomic_folder import MARKER, UNFINISHED, clean_up, remove
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.storage import METADATA_FILE, read_metadata
from lightning_distrec.errors import CheckpointError
from tests.support.checkpoint_folders import by_rows, edit_marker, write_folder
from tests.support.plain_checkpoints import load

STATE, RANK, TENSORS = "state.pt", "rank_0.pt", "__0_0.distcp"


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
    _edit_metadata(folder, lambda metadata: None)
    _edit_state(folder, lambda state: None)
    assert _read_all(folder).keys() == actual.keys()


def _put(folder: Path, name: str, content: bytes) -> Path:
    """Replace a file, and have the marker say so."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    edit_marker(folder, lambda marker: marker["files"].update({name: len(content)}))
    return folder


def _edit_metadata(folder: Path, edit: Callable[[Any], Any]) -> Path:
    with open(folder / METADATA_FILE, "rb") as file:
        metadata = read_metadata(file)
    edit(metadata)
    return _put(folder, METADATA_FILE, pickle.dumps(metadata))


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
    "OBJ": lambda module, name, options: b"(c" + f"{module}\n{name}\n".encode() + options + b"o.",
    "NEWOBJ": lambda module, name, options: (
        b"\x80\x04" + _global(module, name) + _tuple(options) + b"\x81."
    ),
    "NEWOBJ_EX": lambda module, name, options: (
        b"\x80\x04" + _global(module, name) + _tuple(options) + b"}\x92."
    ),
    "memo": lambda module, name, options: (
        b"\x80\x04" + _global(module, name) + b"\x94" + b"0" + b"h\x00" + _tuple(options) + b"R."
    ),
    "hidden": lambda module, name, options: (  # before good metadata, and dropped from the stack
        b"\x80\x04"
        + _global(module, name)
        + _tuple(options)
        + b"R0"
        + pickle.dumps(Metadata({}, storage_data={}))[2:]
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
        ("torch.distributed.checkpoint.metadata", "os.system", touch),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__", "os"),
        ("torch.distributed.checkpoint.metadata", "dataclass", "x"),
        ("torch.distributed.checkpoint.filesystem", "os.system", touch),
        ("torch.distributed.checkpoint.filesystem", "FileSystem", "x"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo.__init__.__globals__", "os"),
        ("lightning_distrec.checkpoint.atomic_folder", "remove", str(canary.parent)),
    ]


def _zipped(pickled: bytes) -> bytes:
    """Return a file of torch.save with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def _chunks_at(folder: Path, name: str, length: int) -> Path:
    """Say that every chunk lies at the beginning of that file, with that length."""

    def edit(metadata: Any) -> None:
        metadata.storage_data = {
            index: _StorageInfo(name, 0, length) for index in metadata.storage_data
        }

    return _edit_metadata(folder, edit)


PLACES: dict[str, Callable[[Path, bytes], Path]] = {
    "metadata": lambda folder, pickled: _put(folder, METADATA_FILE, pickled),
    "state": lambda folder, pickled: _put(folder, STATE, _zipped(pickled)),
    "old state": lambda folder, pickled: _put(folder, STATE, pickled),
    "rank": lambda folder, pickled: _put(folder, RANK, _zipped(pickled)),
    "tensors": lambda folder, pickled: _chunks_at(
        _put(folder, TENSORS, _zipped(pickled)), TENSORS, len(_zipped(pickled))
    ),
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
        if form is not FORMS["NEWOBJ"] and form is not FORMS["NEWOBJ_EX"]:  # those want a class
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
        for form, make in FORMS.items() if place == "metadata" else list(FORMS.items())[:3]:
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
            if place not in ("metadata", "old state", "old plain") or not isinstance(call, list):
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


# -------------------------------------------------------------------------- what metadata may name,
# told to misbehave


@pytest.fixture
def nothing_changed() -> Iterator[None]:
    """Fails when something that metadata may name has other attributes in the end; puts those
    back."""
    named = [
        getattr(__import__(module, fromlist=["x"]), name)
        for module, name in sorted(DCP_METADATA_NAMES)
    ]
    named += list(_MEM_FORMAT_ENCODING)
    old = [dict(vars(thing)) for thing in named if hasattr(thing, "__dict__")]
    yield
    changed = []
    for thing, was in zip(
        [thing for thing in named if hasattr(thing, "__dict__")], old, strict=True
    ):
        for key, value in dict(vars(thing)).items():
            if key not in was:
                delattr(thing, key)
                changed.append(f"{thing}.{key}")
            elif value is not was[key] and key not in ("__dict__", "__weakref__"):
                setattr(thing, key, was[key])
                changed.append(f"{thing}.{key}")
    assert not changed, f"a checkpoint has changed {changed} for all that is read after it"


HOME = "torch.distributed.checkpoint.metadata"


@pytest.mark.usefixtures("nothing_changed")
@pytest.mark.parametrize(
    ("module", "name"), sorted(DCP_METADATA_NAMES), ids=lambda value: value.split(".")[-1]
)
def test_metadata_change_nothing_that_others_use(folder: Path, module: str, name: str) -> None:
    import torch.serialization

    torch.serialization._get_layout("torch.strided")  # keeps a cache on itself
    attributes = (
        b"}"
        + b"("
        + _text("canary")
        + _global("torch", "Size")
        + _text("__eq__")
        + _global("torch", "Size")
    )
    made = {
        "itself": _global(module, name),
        "one": _global(module, name) + b")\x81",
        "one that all share": _global(module, name) + _tuple(b"K\x00") + b"R",
    }
    for case in made.values():
        for state in (
            attributes + b"u",
            _tuple(b"N", attributes + b"u"),
            _tuple(attributes + b"u", b"N"),
        ):
            _refusal(_put(folder, METADATA_FILE, b"\x80\x04" + case + state + b"b."))
        _refusal(_put(folder, METADATA_FILE, b"\x80\x04" + case + b"."))


CALLS: dict[str, bytes] = {
    "Size of text": _global("torch", "Size") + _tuple(_tuple(_text("a"))) + b"R",
    "Size of too large": _global("torch", "Size")
    + _tuple(_tuple(b"\x8a\x0a" + b"\xff" * 9 + b"\x7f"))
    + b"R",
    "Size of Size": _global("torch", "Size") + _tuple(_tuple(_global("torch", "Size"))) + b"R",
    "Size of nothing": _global("torch", "Size") + b")R",
    "Size of keywords": _global("torch", "Size") + b")}(" + _text("a") + b"Nu\x92",
    "layout of text": _global("torch.serialization", "_get_layout") + _tuple(_text("os")) + b"R",
    "layout of list": _global("torch.serialization", "_get_layout") + _tuple(b"]") + b"R",
    "no such layout": _global("torch.serialization", "_get_layout") + b")R",
    "encoding": _global(HOME, "_MEM_FORMAT_ENCODING") + _tuple(_text("x")) + b"R",
    "new encoding": _global(HOME, "_MEM_FORMAT_ENCODING") + _tuple(_text("x"), b"]") + b"R",
    "properties": _global(HOME, "TensorProperties") + b")\x81" + _tuple(b"N", b"N") + b"b",
    "no arguments": _global(HOME, "Metadata") + b")R",
    "nothing": b"N",
    "a class": _global(HOME, "Metadata"),
    "an empty one": _global(HOME, "Metadata") + b")\x81",
    "a number": b"K\x01",
    "stack underflow": b"R",
    "no end": b"N" * 1000,
    "deep": b"(" * 100_000 + b"t" * 100_000,
    "nothing to get": b"h\x07",
}


@pytest.mark.usefixtures("nothing_changed")
@pytest.mark.parametrize("call", CALLS)
def test_odd_uses_of_what_metadata_may_name_are_refused(folder: Path, call: str) -> None:
    _refusal(_put(folder, METADATA_FILE, b"\x80\x04" + CALLS[call] + b"."))


def _with(**changes: Any) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        vars(metadata).update(changes)

    return edit


def _without(name: str) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        del vars(metadata)[name]
        metadata.__class__ = Metadata

    return edit


def _entry(**changes: Any) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        vars(metadata.state_dict_metadata["state_dict/table"]).update(changes)

    return edit


def _chunk(number: int = 0, **changes: Any) -> Callable[[Any], None]:
    """Change where a chunk of the table is said to lie, in the list of chunks and where it is
    stored."""

    def edit(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["state_dict/table"].chunks[number]
        index = MetadataIndex("state_dict/table", chunk.offsets)
        vars(chunk).update(changes)
        if isinstance(chunk.offsets, tuple):
            new = MetadataIndex("state_dict/table")
            object.__setattr__(new, "offset", chunk.offsets)
            metadata.storage_data[new] = metadata.storage_data.pop(index)

    return edit


def _make_up(metadata: Any) -> None:
    """Leave out a row, and let a chunk of less than nothing make up for the number of its
    elements."""
    entry = metadata.state_dict_metadata["state_dict/table"]
    entry.chunks[0].sizes = torch.Size((24, 50))
    entry.chunks.append(ChunkStorageMetadata(torch.Size((25, 50)), torch.Size((-1, -50))))


def _lies(**changes: Any) -> Callable[[Any], None]:
    """Change in which file, and where in it, the chunks are said to lie."""

    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(changes)

    return edit


METADATA: dict[str, Callable[[Any], Any]] = {
    "no tensors": _with(state_dict_metadata={}),
    "tensors are None": _with(state_dict_metadata=None),
    "tensors are a list": _with(state_dict_metadata=[1]),
    "tensors without a list": _without("state_dict_metadata"),
    "nothing stored": _with(storage_data={}),
    "stored is None": _with(storage_data=None),
    "stored is a list": _with(storage_data=[1]),
    "stored is text": _with(storage_data="abc"),
    "stored under text": _with(storage_data={"a": _StorageInfo(TENSORS, 0, 1)}),
    "stored is no place": _with(storage_data={MetadataIndex("a"): "x"}),
    "place is None": _lies(relative_path=None),
    "place is a number": _lies(relative_path=7),
    "place is empty": _lies(relative_path=""),
    "place is .": _lies(relative_path="."),
    "place is ..": _lies(relative_path=".."),
    "place is not there": _lies(relative_path="__1_0.distcp"),
    "place has a zero": _lies(relative_path="a\0b"),
    "place is the marker": _lies(relative_path=MARKER),
    "begins before the file": _lies(offset=-(10**6)),
    "begins after the file": _lies(offset=10**6),
    "begins far after the file": _lies(offset=2**70),
    "begins at text": _lies(offset="x"),
    "length 0": _lies(length=0),
    "length below 0": _lies(length=-1),
    "length beyond the file": _lies(offset=10, length=10**15),
    "length is None": _lies(length=None),
    "unknown transform": _lies(transform_descriptors=["os.system"]),
    "transform of another kind": _lies(transform_descriptors=[7]),
    "transform is a number": _lies(transform_descriptors=7),
    "size is None": _entry(size=None),
    "size is a number": _entry(size=7),
    "size is another": _entry(size=torch.Size((41, 50))),
    "size is larger": _entry(size=torch.Size((40, 50, 1))),
    "size is huge": _entry(size=torch.Size((10**15, 50))),
    "no chunks": _entry(chunks=[]),
    "chunks are None": _entry(chunks=None),
    "chunks are numbers": _entry(chunks=[1, 2]),
    "a chunk is missing": lambda m: m.state_dict_metadata["state_dict/table"].chunks.pop(),
    "a chunk twice": lambda m: m.state_dict_metadata["state_dict/table"].chunks.__setitem__(
        1, m.state_dict_metadata["state_dict/table"].chunks[0]
    ),
    "chunk begins below 0": _chunk(offsets=(-5, 0)),
    "chunk begins elsewhere": _chunk(offsets=(3, 0)),
    "chunk begins far away": _chunk(offsets=(10**15, 0)),
    "chunk has fewer directions": _chunk(offsets=(0,)),
    "chunk begins nowhere": _chunk(offsets=None),
    "chunk begins at text": _chunk(offsets=("a", "b")),
    "chunk is said to be smaller": _chunk(sizes=torch.Size((20, 50))),
    "chunk has no size": _chunk(sizes=None),
    "chunks make up for each other": _make_up,
    "another class": lambda m: m.state_dict_metadata.update({"state_dict/table": m}),
}


@pytest.mark.usefixtures("nothing_changed")
@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_lie_are_reported_as_damage(folder: Path, case: str) -> None:
    message = _refusal(_edit_metadata(folder, METADATA[case]))
    assert str(folder) in message


def _outside(tmp_path: Path) -> dict[str, str]:
    """Return names by which metadata could lead to a file outside of the checkpoint."""
    (tmp_path / "it.ckpt" / "link").symlink_to(tmp_path)
    return {
        "..": "../secret",
        "absolute": str(tmp_path / "secret"),
        "by a link": "link/secret",
        "back and forth": f"x/../../{tmp_path.name}/secret",
        "a network": "file:///etc/passwd",
        "home": "~/secret",
    }


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, folder: Path) -> None:
    secret = _file(tmp_path / "secret", (folder / TENSORS).read_bytes())  # would load
    places = _outside(tmp_path)
    for number, (update, place) in enumerate(places.items()):
        lying, listing = (
            shutil.copytree(folder, tmp_path / f"{number} {i}", symlinks=True) for i in range(2)
        )
        old = os.stat(secret).st_atime_ns
        _refusal(_edit_metadata(lying, _lies(relative_path=place)))
        assert os.stat(secret).st_atime_ns == old, update
        edit_marker(
            listing,
            lambda marker, position=place: marker["files"].update({
                position: secret.stat().st_size
            }),
        )
        assert "is missing" in _refusal(listing), update


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


def _chunks(tensor: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


CHUNKS: dict[str, Any] = {
    "a dict": {"a": 1},
    "a list": [torch.ones(2)],
    "text": "abc",
    "fewer rows": torch.ones(3, 50),
    "fewer columns": torch.ones(25, 3),
    "fewer directions": torch.ones(25),
    "no memory": torch.ones(25, 50, device="meta"),
    "sparse": torch.ones(25, 50).to_sparse(),
}


@pytest.mark.parametrize("case", CHUNKS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_chunk_that_is_no_tensor_of_its_shape_is_reported_as_damage(
    folder: Path, case: str
) -> None:
    content = _chunks(CHUNKS[case])
    assert str(folder) in _refusal(
        _chunks_at(_put(folder, TENSORS, content), TENSORS, len(content))
    )


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
    pytest.importorskip("safetensors")
    assert "it.safetensors" in _refusal(_file(tmp_path / "it.safetensors", SAFE[case]))


def test_small_safetensors_files_are_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "one": torch.ones(1),
        "bool": torch.ones(2) > 0,
    }
    safetensors.save_file(tensors, tmp_path / "it.safetensors")
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
    return _edit_metadata(folder, _entry(size=torch.Size((10**9, 50))))


def _huge_inline(folder: Path) -> Path:
    """Put a tensor of 10**15 numbers, all at one address, into the state."""
    return _edit_state(
        folder, lambda state: state["state_dict"].update(small=torch.ones(1).expand(10**15))
    )


BOMBS: dict[str, Callable[[Path], Path]] = {
    "a shape of 200 GB": _huge_shape,
    "a memo of 1 GB": lambda folder: _put(
        folder, METADATA_FILE, b"\x80\x04Nr" + struct.pack("<I", 2**26) + b"."
    ),
    "bytes of 4 GB": lambda folder: _put(
        folder, METADATA_FILE, b"\x80\x04B" + struct.pack("<I", 2**32 - 1) + b"x."
    ),
    "a frame of 2**60 bytes": lambda folder: _put(
        folder, METADATA_FILE, b"\x80\x04\x95" + struct.pack("<Q", 2**60)
    ),
    "a number of 2 GB": lambda folder: _put(
        folder, METADATA_FILE, b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1)
    ),
}


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


@pytest.mark.parametrize("name", [MARKER, STATE, METADATA_FILE, TENSORS, RANK])
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
    files = {
        name: (folder / name).read_bytes() for name in (MARKER, METADATA_FILE, STATE, RANK, TENSORS)
    }

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
        b'{"format": 2, "files": {}, "name": "it.ckpt"}',
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


def test_chunk_metadata_of_ours_name_only_what_the_attacks_above_name() -> None:
    """A checker of the above: what metadata may name, and no test here does, is an attack that was
    not thought of."""
    expected_classes = {
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
        ChunkStorageMetadata,
        _StorageInfo,
    }
    named = {f"{kind.__module__}.{kind.__qualname__}" for kind in expected_classes}
    other_results = {".".join(pair) for pair in DCP_METADATA_NAMES} - named
    assert other_results == {
        "torch.Size",
        "torch.serialization._get_layout",
        f"{HOME}._MEM_FORMAT_ENCODING",
    }
