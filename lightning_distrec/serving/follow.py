"""Takes over what a training job publishes, while a folder answers. Served folders get this file.

A publication is a manifest, `manifest-00000012.json`, and the files that it names. It has the rows
that changed since the one before, some have all rows as well; each has all other weights. It needs
pyarrow; a folder in an object store also the package with which fsspec reads it.
"""

import json
import re
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import fsspec
import torch
from safetensors.torch import load

FORMAT = 1
MANIFEST = re.compile(r"manifest-\d{8,}\.json")
PREFIX = "predictor.module."
"""Of the trained module's names in a program."""
BLOCK_BYTES = 2**24
MAX_PAUSE = 30.0
"""Seconds between looks at a folder where something is wrong; each is twice as long as the last."""


class PublicationError(ValueError):
    """A publication cannot be read, or not taken over."""


class Publications:
    """The publications of a folder, local or of an object store."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files, self.root = fsspec.core.url_to_fs(folder)

    def path(self, name: str) -> str:
        """Return where a file of the folder is."""
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """Return what is in the folder; nothing where it does not exist."""
        self.files.invalidate_cache()
        if not self.files.isdir(self.root):
            return []
        paths = self.files.ls(self.root, detail=False)
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def sequences(self) -> list[int]:
        """Return the numbers of the publications, ascending."""
        names = filter(MANIFEST.fullmatch, self.names())
        return sorted(int(name[len("manifest-") : -len(".json")]) for name in names)

    def manifest(self, sequence: int) -> dict[str, Any]:
        """Return what a publication says of itself. Raises PublicationError: it is damaged, or of
        another format."""
        name = manifest_name(sequence)
        try:
            manifest: dict[str, Any] = json.loads(self.files.cat_file(self.path(name)))
            if manifest["crc32"] != manifest_crc32(manifest):
                raise ValueError("it does not match its checksum")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PublicationError(f"{self.folder}/{name} is damaged: {error}") from error
        if manifest["format"] != FORMAT:
            raise PublicationError(
                f"{self.folder}/{name} has the format {manifest['format']}, and this program reads "
                f"{FORMAT}"
            )
        return manifest

    def crc32(self, name: str) -> int:
        """Return the checksum of a file."""
        checksum = 0
        with self.files.open(self.path(name)) as stream:
            for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
                checksum = zlib.crc32(block, checksum)
        return checksum

    def verify(self, file: dict[str, Any]) -> None:
        """Read a file once. Raises PublicationError: it is not what its manifest says."""
        name = f"{self.folder}/{file['file']}"
        try:
            checksum = self.crc32(file["file"])
        except OSError as error:
            raise PublicationError(f"{name} cannot be read: {error!r}") from error
        if checksum != file["crc32"]:
            raise PublicationError(f"{name} is damaged: it does not match its checksum")

    def rows(self, file: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor, Any]]:
        """Yield the numbers of rows, (num_rows,), the rows, (num_rows, dim), and their raw ids, an
        Arrow array with nulls, or None."""
        from pyarrow import parquet

        with self.files.open(self.path(file["file"])) as stream:
            for batch in parquet.ParquetFile(stream).iter_batches():
                numbers = torch.from_numpy(batch["row"].to_numpy().copy())
                column = batch["values"]
                values = torch.from_numpy(column.flatten().to_numpy().copy())
                ids = batch["id"] if "id" in batch.schema.names else None
                yield numbers, values.view(len(numbers), column.type.list_size), ids

    def tensors(self, file: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a file by name."""
        return load(self.files.cat_file(self.path(file["file"])))


def manifest_name(sequence: int) -> str:
    """Return the file's name."""
    return f"manifest-{sequence:08d}.json"


def manifest_crc32(manifest: dict[str, Any]) -> int:
    """Return the checksum of all that a manifest says but for the checksum."""
    content = {name: manifest[name] for name in manifest if name != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def files_of(manifest: dict[str, Any], form: str) -> list[dict[str, Any]]:
    """Return the files to read. form: "changed" for changed rows, "snapshot" for all rows."""
    files = [manifest["dense"]]
    for table in manifest["tables"].values():
        files += table[form]
    return files


def all_files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all files of a publication."""
    files = files_of(manifest, "changed")
    for table in manifest["tables"].values():
        files += table["deleted"] + table["snapshot"]
    return files


class MappingChange:
    """What a publication changes of the buffers that say which id has which row. about: "mapping"
    of a table in a manifest."""

    def __init__(self, about: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
        self._about = about
        self._ids = buffers[about["ids"]]
        self._rows = buffers.get(about["rows"])
        """The row of each id, where ids are sorted; None: ids are in the order of their rows."""
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, numbers: torch.Tensor, rows: torch.Tensor, ids: Any) -> None:
        """Note the ids of rows, as `Publications.rows` yields them."""
        no_id = self._about["no_id"]
        stored = torch.from_numpy(ids.fill_null(no_id).to_numpy().copy())
        if self._about["is_mixed"]:
            stored = torch.where(stored == no_id, stored, mixed(stored))
        self._parts.append((numbers, stored))

    def write(self, server: Any) -> None:
        """Give rows their ids."""
        ids_by_row = self._ids.view(-1)
        if self._rows is not None:
            ids_by_row = torch.empty_like(self._ids)
            ids_by_row[self._rows] = self._ids
        for numbers, ids in self._parts:
            ids_by_row[numbers] = ids
        if self._rows is not None:
            in_order = ids_by_row.sort(stable=True)
            self._ids.copy_(in_order.values)
            self._rows.copy_(in_order.indices)


class TableChange:
    """What a publication changes of a table of a folder, in memory until it is written.

    dim: numbers in a row before it was packed. is_snapshot: whether all rows are noted, which
    become a table in memory.
    """

    def __init__(self, name: str, table: torch.Tensor, dim: int, is_snapshot: bool) -> None:
        self._name = name
        self._table = table
        self._bits = None
        if name.endswith(".rows"):
            self._bits = 8 if table.shape[1] == dim + 8 else 4
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._all_rows = torch.empty(table.shape, dtype=table.dtype) if is_snapshot else None

    def add(self, numbers: torch.Tensor, rows: torch.Tensor, ids: Any) -> None:
        """Note rows, as `Publications.rows` yields them."""
        kept = rows if self._bits is None else quantized(rows.float(), self._bits)
        kept = kept.to(self._table.dtype)
        if self._all_rows is None:
            self._parts.append((numbers, kept))
        else:
            self._all_rows[numbers] = kept

    def write(self, server: Any) -> None:
        """Write all that was noted."""
        if self._all_rows is not None:
            server.tables[self._name] = self._all_rows
            if server.items is not None and server.about["top_k"]["table"] == self._name:
                server.items.rows = self._all_rows[: len(server.items.rows)]
        for numbers, kept in self._parts:
            self._table[numbers] = kept


class Follower:
    """Keeps a `Server` at the newest publication of a folder."""

    def __init__(self, server: Any, folder: str) -> None:
        """Raises PublicationError: the server answers with an index, which would find old rows."""
        if server.items is not None and server.items.index is not None:
            raise PublicationError(
                "the folder has an index, which would go on to find rows of the export: export it "
                "without --index"
            )
        self._server = server
        self._publications = Publications(folder)
        self._weights: dict[str, torch.Tensor] = {}
        """What the program has of the trained module's state but tables, by its names there."""
        tables = self._tables()
        for name, tensor in server.program.state_dict().items():
            if name.removeprefix(PREFIX) not in tables:
                self._weights[name.removeprefix(PREFIX)] = tensor

    def _tables(self) -> dict[str, str]:
        """Return the trained module's names of the folder's tables -> the folder's."""
        return {f"{name.rpartition('.')[0]}.weight": name for name in self._server.tables}

    def take(self) -> int:
        """Take over what is new, in order, and return how many publications. Requests are answered
        by one publication or the next.

        Where one is damaged or not there, a later one that has all rows stands for it. Raises
        PublicationError: none does; the server answers by what it has.
        """
        taken = 0
        while newer := self._newer():
            self._take_next(newer)
            taken += 1
        return taken

    def _newer(self) -> list[int]:
        """Return the numbers of the publications after what is served; of all, where it is none of
        theirs."""
        published = self._server.published
        last = published.get("sequence") or 0
        sequences = self._publications.sequences()
        newer = [number for number in sequences if number > last]
        is_known = bool(newer) and self._value(newer[0], "base") == published.get("id")
        if last in sequences and not is_known:
            is_known = self._value(last, "id") == published.get("id")
        return newer if is_known else sequences

    def _value(self, sequence: int, name: str) -> str | None:
        try:
            value: str | None = self._publications.manifest(sequence)[name]
            return value
        except PublicationError:  # it is damaged: a later one with all rows may stand for it
            return None

    def _take_next(self, newer: list[int]) -> None:
        problem = None
        for form, numbers in (("changed", newer[:1]), ("snapshot", newer[::-1])):
            for number in numbers:
                try:
                    manifest = self._publications.manifest(number)
                    can_take = manifest["is_snapshot"]
                    if form == "changed":
                        can_take = follows(self._server.published, manifest)
                    if can_take:
                        self._apply(manifest, form)
                        return
                except PublicationError as error:
                    problem = problem or error
        raise problem or PublicationError(
            f"{self._publications.folder}: publication {newer[0]} does not go on from what is "
            f"served, of step {self._server.published.get('step')}, and there is no snapshot; the "
            "next one is taken over"
        )

    def _apply(self, manifest: dict[str, Any], form: str) -> None:
        """Read and check all of a publication, then take it over between two requests."""
        server = self._server
        self._check(manifest)
        for file in files_of(manifest, form):
            self._publications.verify(file)
        try:
            dense = self._publications.tensors(manifest["dense"])
            changes = [*self._table_changes(manifest, form), *self._dense_changes(dense)]
        except OSError as error:
            raise PublicationError(f"{manifest['folder']} went away: {error!r}") from error
        with server.lock, torch.no_grad():
            for change in changes:
                change.write(server)
            for name in dense.keys() & self._weights.keys():
                self._weights[name].copy_(dense[name])
            names = ("job", "run", "sequence", "id", "step")
            server.published = {name: manifest[name] for name in names}

    def _table_changes(self, manifest: dict[str, Any], form: str) -> Iterator[Any]:
        """Yield what changes of tables and mappings, which the files of a publication say."""
        names = self._tables()
        for key, about in manifest["tables"].items():
            changes: list[Any] = []
            for name in {key, *about["also"]} & names.keys():
                table = self._server.tables[names[name]]
                changes.append(TableChange(names[name], table, about["dim"], form == "snapshot"))
            if changes and about["mapping"]:
                changes.append(MappingChange(about["mapping"], self._weights))
            for file in about[form] if changes else ():
                for block in self._publications.rows(file):
                    for change in changes:
                        change.add(*block)
            yield from changes

    def _dense_changes(self, dense: dict[str, torch.Tensor]) -> Iterator[Any]:
        """Yield what changes of tables that training does not shard."""
        names = self._tables()
        for name in dense.keys() & names.keys():
            value = dense[name]
            table = self._server.tables[names[name]]
            change = TableChange(
                names[name],
                table,
                value.shape[1],
                is_snapshot=False,
            )
            change.add(torch.arange(len(value)), value, None)
            yield change

    def _check(self, manifest: dict[str, Any]) -> None:
        """Raise PublicationError where a publication is of another job or model than the served
        one."""
        server = self._server
        sequence = f"publication {manifest['sequence']}"
        job = server.published.get("job")
        if job not in (None, manifest["job"]):
            raise PublicationError(
                f"{sequence} is of the job {manifest['job']}, and this folder of {job}"
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        published = {name: tuple(shape) for name, shape in manifest["dense"]["shapes"].items()}
        for key, about in manifest["tables"].items():
            published |= dict.fromkeys((key, *about["also"]), (about["num_rows"], about["dim"]))
            mapping = about["mapping"] or {"names": (), "ids": None}
            if key in self._tables() and mapping["ids"] not in {None, *self._weights}:
                raise PublicationError(
                    f"{sequence} gives ids rows of '{key}', and this folder takes numbers of rows: "
                    "export a checkpoint of the job"
                )
            for name in mapping["names"]:
                shapes.pop(name, None)
        for name, stored_name in self._tables().items():
            table = server.tables[stored_name]
            # Packed rows have another width.
            dim = table.shape[1] if stored_name == name else published.get(name, (0, 0))[1]
            shapes[name] = (len(table), dim)
        for name in sorted(shapes):
            if published.get(name) != shapes[name]:
                shape = f"the shape {published[name]}" if name in published else "nothing"
                raise PublicationError(
                    f"{sequence} is of another model: of '{name}' it has {shape}, and this folder "
                    f"has {shapes[name]}"
                )
        columns = server.about.get("crc32", {}).get("columns.json")
        if columns is not None and manifest["columns"] not in (None, columns):
            raise PublicationError(
                f"{sequence} maps raw values to other rows than this folder; export the model again"
            )

    def run(self, seconds: float = 1.0) -> threading.Thread:
        """Look for publications in a thread, `seconds` after the last time; return the thread."""

        def follow() -> None:
            last_problem = ""
            pause = seconds
            while True:
                problem = ""
                try:
                    if not self._publications.sequences():
                        problem = f"there is no publication in {self._publications.folder} yet"
                    self.take()
                except Exception as error:  # of the store, too: a later look may succeed
                    problem = str(error) if isinstance(error, PublicationError) else repr(error)
                if problem and problem != last_problem:
                    print(f"follow: {problem}.", file=sys.stderr, flush=True)
                last_problem = problem
                pause = min(2 * pause, max(seconds, MAX_PAUSE)) if problem else seconds
                time.sleep(pause)

        thread = threading.Thread(target=follow, name="follow", daemon=True)
        thread.start()
        return thread


def follows(published: dict[str, Any], manifest: dict[str, Any]) -> bool:
    """Return whether the changed rows of a publication are all that differ from what a server has.

    published: what it has: a publication, or the export of a checkpoint after one.
    """
    if manifest["base"] is None or manifest["base"] != published.get("id"):
        return False
    if not published.get("is_export"):
        return True
    step = published["step"]
    if manifest["run"] == published["run"]:
        return bool(manifest["step"] >= step)
    start = manifest["start"]
    return bool(start and start["run"] == published["run"] and start["step"] >= step)


def mixed(ids: torch.Tensor) -> torch.Tensor:
    """Return ids as tables with dynamic ids keep them, as of
    `lightning_distrec.sharding.mapping.id_mapping`."""
    ids = (ids ^ (ids >> 30)) * -0x40A7B892E31B1A47 & 2**63 - 1
    ids = (ids ^ (ids >> 27)) * -0x6B2FB644ECCEEE15 & 2**63 - 1
    return ids ^ (ids >> 31)


def quantized(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows packed, (num_rows, packed width) uint8. rows: (num_rows, dim) float32, on the
    host."""
    import fbgemm_gpu  # noqa: F401  it registers the operators

    if bits == 8:
        packed: torch.Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    else:
        packed = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)
    return packed
