"""The key of a job: a secret that its ranks have and strangers have not, by which ranks prove that they are of the job.

It is never sent. A rank shows that it has the key by an HMAC of numbers that both sides have just drawn.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_distrec.errors import RendezvousError

KEY_VARIABLE = "LIGHTNING_DISTREC_KEY"
MUNGE_SECONDS = 10.0
SET_IT = (
    f"Set {KEY_VARIABLE} to the same secret text for all ranks, e.g. `export {KEY_VARIABLE}=$(openssl rand -hex 16)`"
)
FROM_VARIABLE, FROM_FILE, FROM_MUNGE = "variable", "file", "munge "
OPENED_AGAIN = (15, 16, 17)
"""Exit statuses of unmunge: the credential is expired, from the future, or was opened before."""


@dataclass(frozen=True)
class JobKey:
    """A secret, and where it comes from."""

    secret: bytes = field(repr=False)
    offer: str
    """What rank 0 sends to the others, so that they find the same key; a stranger learns nothing from it."""
    origin: str
    """Where this rank found it, for people."""

    def sign(self, *words: object) -> str:
        """Return what only those who have the key can return for these words, of which none holds a line break."""
        return hmac.new(self.secret, "\n".join(map(str, words)).encode(), hashlib.sha256).hexdigest()

    def is_signed(self, signature: object, *words: object) -> bool:
        """Return whether `signature` is what `sign` returns for these words."""
        # As bytes: for texts beyond ASCII, which a stranger may send, compare_digest raises TypeError.
        return isinstance(signature, str) and hmac.compare_digest(signature.encode(), self.sign(*words).encode())


def choose_key(environ: Mapping[str, str]) -> JobKey:
    """Return the key that rank 0 chooses. environ: the environment.

    LIGHTNING_DISTREC_KEY, which Lightning's launcher passes to the ranks that it starts; in a Slurm job, a secret that
    munge seals for this user; otherwise a file that only this user may read.
    Raises RendezvousError: none of them can be had.
    """
    if environ.get(KEY_VARIABLE):
        return find_key(FROM_VARIABLE, environ)
    if "SLURM_JOB_ID" in environ:
        # Drawn for this start alone; only this user can open it, and only where munged has this cluster's key.
        secret = secrets.token_hex(32)
        if sealed := _munge("munge", f"--restrict-uid={os.getuid()}", text=secret):
            return JobKey(secret.encode(), FROM_MUNGE + sealed.strip(), "munge")
    return find_key(FROM_FILE, environ)


def find_key(offer: str, environ: Mapping[str, str]) -> JobKey:
    """Return the key that rank 0 offers, from where this rank has it.

    Raises RendezvousError: this rank does not have it.
    """
    if offer == FROM_VARIABLE:
        if not environ.get(KEY_VARIABLE):
            raise RendezvousError(f"rank 0 has {KEY_VARIABLE} in its environment, and this rank has not. {SET_IT}.")
        return JobKey(environ[KEY_VARIABLE].encode(), offer, KEY_VARIABLE)
    if offer == FROM_FILE:
        secret, path = _read_key_file()
        return JobKey(secret, offer, str(path))
    if offer.startswith(FROM_MUNGE):
        opened = _munge("unmunge", "--numeric", "--keys=UID", text=offer[len(FROM_MUNGE) :])
        # unmunge prints the metadata, an empty line, and then the text.
        metadata, _, text = opened.partition("\n\n")
        if metadata.split() != ["UID:", str(os.getuid())]:  # another user can seal for this one too
            raise RendezvousError(f"rank 0's munge credential cannot be opened here. {SET_IT}.")
        return JobKey(text.encode(), offer, "munge")
    raise RendezvousError(
        f"rank 0 names a kind of key that is unknown here: '{offer[:40]}'. Use one version on all nodes."
    )


def _munge(program: str, *options: str, text: str) -> str:
    """Return what munge or unmunge prints for a text on stdin; "" where it cannot be asked.

    A credential may be opened once only, or late: unmunge says so by its exit status, and opens it all the same. What
    counts here is who has sealed it.
    """
    command = [program, *options, *_find_munge_socket()]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=MUNGE_SECONDS)
        if done.returncode in (0, *OPENED_AGAIN):
            return done.stdout
    return ""


def _find_munge_socket() -> list[str]:
    """Return the option for the socket of the munged that this Slurm uses, if that is not munge's default."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["scontrol", "show", "config"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MUNGE_SECONDS)
        if match := re.search(r"^AuthInfo\s*=.*\bsocket=([^,\s]+)", done.stdout, re.MULTILINE):
            return [f"--socket={match[1]}"]
    return []


def _read_key_file() -> tuple[bytes, Path]:
    """Return the secret of this user's key file, which is made where there is none, and its path."""
    problem = "this user has no home"
    for folder in _key_folders():
        path = folder / "key"
        try:
            if not path.exists():
                _make_key_file(path)
            with path.open("rb") as file:
                # Of the open file: the name may lead to another one by now.
                status = os.fstat(file.fileno())
                # Who can read the key can pass as a rank, and who can write it can choose it.
                if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                    raise RendezvousError(
                        f"{path}, the key by which ranks know each other, may be read by others than this user. Delete "
                        f"it, and a new one is made; or set {KEY_VARIABLE}."
                    )
                return file.read(), path
        except OSError as error:
            problem = str(error)
    raise RendezvousError(f"there is no place for the key by which ranks know each other: {problem}. {SET_IT}.")


def _key_folders() -> Iterator[Path]:
    """Yield where the key file may be: in the user's home, which nodes often share, or on this machine."""
    with contextlib.suppress(RuntimeError):
        yield Path.home() / ".config" / "lightning_distrec"
    yield Path(tempfile.gettempdir()) / f"lightning_distrec-{os.getuid()}"


def _make_key_file(path: Path) -> None:
    """Make the file with all its content at once: ranks that start at the same time find the same key."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent)  # mode 600
    try:
        with open(handle, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        # A link and not a rename, which would replace the key that another rank has just made and read.
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
