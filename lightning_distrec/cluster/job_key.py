"""The key of a job: a secret that its ranks have and strangers have not, by which ranks prove that
they are of the job.

It is never sent. A rank shows that it has the key by an HMAC of numbers that both sides have just
drawn.
"""

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_distrec.cluster import door
from lightning_distrec.errors import RendezvousError

KEY_VARIABLE = "LIGHTNING_DISTREC_KEY"
SET_IT = (
    f"Set {KEY_VARIABLE} to the same secret text for all ranks, e.g. `export "
    f"{KEY_VARIABLE}=$(openssl rand -hex 16)`"
)
FROM_VARIABLE, FROM_FILE = "variable", "file"


@dataclass(frozen=True)
class JobKey:
    """A secret, and where it comes from."""

    secret: bytes = field(repr=False)
    offer: str
    """What rank 0 sends to the others, so that they find the same key; a stranger learns nothing
    from it."""
    origin: str
    """Where this rank found it, for people."""

    def sign(self, *words: object) -> str:
        """Return what only those who have the key can return for these words."""
        return door.sign(self.secret, *words)

    def is_signed(self, signature: object, *words: object) -> bool:
        """Return whether `signature` is what `sign` returns for these words."""
        return door.is_signed(self.secret, signature, *words)


def choose_key(environ: Mapping[str, str]) -> JobKey:
    """Return the key that rank 0 chooses. environ: the environment.

    LIGHTNING_DISTREC_KEY, which Lightning's launcher and our batch scripts pass to the ranks that
    they start; otherwise a file that only this user may read. Raises RendezvousError: there is
    neither.
    """
    return find_key(FROM_VARIABLE if environ.get(KEY_VARIABLE) else FROM_FILE, environ)


def find_key(offer: str, environ: Mapping[str, str]) -> JobKey:
    """Return the key that rank 0 offers, from where this rank has it.

    Raises RendezvousError: this rank does not have it.
    """
    if offer == FROM_VARIABLE:
        if not environ.get(KEY_VARIABLE):
            raise RendezvousError(
                f"rank 0 has {KEY_VARIABLE} in its environment, and this rank has not. {SET_IT}."
            )
        return JobKey(environ[KEY_VARIABLE].encode(), offer, KEY_VARIABLE)
    if offer == FROM_FILE:
        secret, path = _read_key_file()
        return JobKey(secret, offer, str(path))
    raise RendezvousError(
        f"rank 0 names a kind of key that is unknown here: '{offer[:40]}'. Use one version on all "
        "nodes."
    )


def _read_key_file() -> tuple[bytes, Path]:
    """Return the secret of this user's key file, which is made where there is none, and its
    path."""
    problem = "this user has no home"
    for folder in _key_folders():
        path = folder / "key"
        try:
            if not path.exists():
                _make_key_file(path)
            # Not of what a link leads to: somebody else's may lead to a file of this user's whose
            # content is known.
            if os.lstat(folder).st_uid != os.getuid():
                raise PermissionError(f"{folder} is another user's")
            with path.open("rb") as file:
                # Of the open file: the name may lead to another one by now.
                status = os.fstat(file.fileno())
                # Who can read the key can pass as a rank, and who can write it can choose it.
                if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                    raise RendezvousError(
                        f"{path}, the key by which ranks know each other, may be read by others "
                        "than this user. Delete "
                        f"it, and a new one is made; or set {KEY_VARIABLE}."
                    )
                return file.read(), path
        except OSError as error:
            problem = str(error)
    raise RendezvousError(
        f"there is no place for the key by which ranks know each other: {problem}. {SET_IT}."
    )


def _key_folders() -> Iterator[Path]:
    """Yield where the key file may be: in the user's home, which nodes often share, or on this
    machine."""
    with contextlib.suppress(RuntimeError):
        yield Path.home() / ".config" / "lightning_distrec"
    yield Path(tempfile.gettempdir()) / f"lightning_distrec-{os.getuid()}"


def _make_key_file(path: Path) -> None:
    """Make the file with all its content at once: ranks that start at the same time find the same
    key."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent)  # mode 600
    try:
        with open(handle, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        # A link and not a rename, which would replace the key that another rank has just made and
        # read.
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
