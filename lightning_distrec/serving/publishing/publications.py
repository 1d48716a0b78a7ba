"""Writes publications of rows to a folder that ranks share, local or in an object store; see
`follow` for what they are."""

import json
import re
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from lightning_distrec.errors import ConfigError
from lightning_distrec.serving.follow import (
    FORMAT,
    Publications,
    all_files,
    manifest_crc32,
    manifest_name,
)

FOLDER = re.compile(r"rows-\d{8}-[0-9a-f]{16}")
"""Name of a publication's folder: its number, and its id."""


class PublicationWriter(Publications):
    """Writes into a folder. Raises OSError where that fails."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError: the folder's file system is not known, or lacks a package."""
        try:
            super().__init__(folder)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"PublishRows: folder='{folder}': {error}.") from error

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine, or one that is mounted here."""
        return "file" in self.files.protocol

    def write_tables(self, name: str, tables: Iterable[Any]) -> dict[str, Any] | None:
        """Write Arrow tables as a Parquet file; return what a manifest says of it; None: there are
        no rows.

        All tables are taken, also after a failure: making one may be collective.
        """
        from pyarrow import parquet

        failure: Exception | None = None
        stream: Any = None
        writer: Any = None
        num_rows = 0
        for table in tables:
            if failure is not None or not len(table):
                continue
            try:
                if writer is None:
                    # Neither shrinks floating numbers, and both take time.
                    options: Any = {"use_dictionary": False, "compression": "none"}
                    stream = self._open(name)
                    writer = parquet.ParquetWriter(stream, table.schema, **options)
                writer.write_table(table)
                num_rows += len(table)
            except Exception as error:  # object stores raise errors of their own
                failure = error
        if failure is not None:
            raise failure
        if writer is None:
            return None
        writer.close()
        stream.close()
        return {"num_rows": num_rows, **self._facts(name)}

    def write_bytes(self, name: str, content: bytes) -> dict[str, Any]:
        """Write a file; return what a manifest says of it."""
        with self._open(name) as stream:
            stream.write(content)
        return self._facts(name)

    def exists(self, name: str) -> bool:
        """Return whether a file is there."""
        self.files.invalidate_cache()
        return bool(self.files.exists(self.path(name)))

    def remove(self, name: str) -> None:
        """Remove a file or a folder."""
        self.files.rm(self.path(name), recursive=True)

    def _facts(self, name: str) -> dict[str, Any]:
        return {
            "file": name,
            "num_bytes": self.files.size(self.path(name)),
            "crc32": self.crc32(name),
        }

    def _open(self, name: str) -> Any:
        path = self.path(name)
        if self.is_local:
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        return self.files.open(path, "wb")

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Make a publication of what was written; until this returns there is none. Raises OSError:
        another job has written one of this number, or has removed files."""
        name = manifest_name(manifest["sequence"])
        if self.exists(name):
            raise FileExistsError("another job has published there meanwhile")
        for file in all_files(manifest):
            if self.files.size(self.path(file["file"])) != file["num_bytes"]:
                raise FileNotFoundError(f"{file['file']} is not as it was written")
        manifest = {"format": FORMAT, **manifest}
        manifest["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest["crc32"] = manifest_crc32(manifest)
        self._put(name, json.dumps(manifest, indent=1).encode())

    def _put(self, name: str, content: bytes) -> None:
        """Write a file at once: it is there in full, or not."""
        path = self.path(name)
        if not self.is_local:
            self.files.pipe_file(path, content)
            return
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(f"{path}.new", content)
        self.files.mv(f"{path}.new", path)

    def remove_older(self, keep: int) -> None:
        """Remove publications but the newest `keep`, and those from the newest with all rows on."""
        sequences = self.sequences()
        for sequence in sequences[::-1]:
            if self.manifest(sequence)["is_snapshot"]:
                first = min(sequence, *sequences[-keep:])
                break
        else:
            return
        for sequence in sequences:
            if sequence < first:
                # Without its manifest it is none, should this process die here.
                folder = self.manifest(sequence)["folder"]
                self.remove(manifest_name(sequence))
                self.remove(folder)

    def remove_unfinished(self) -> None:
        """Remove the folders of writers that have died, once no writer is left."""
        folders = {self.manifest(sequence)["folder"] for sequence in self.sequences()}
        for name in self.names():
            if FOLDER.fullmatch(name) and name not in folders:
                self.remove(name)
