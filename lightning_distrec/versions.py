"""Which versions of torch, fbgemm and torchrec match: the table, and the check at import.

The three are compiled against each other, but their metadata do not say so. The Makefile asks this
file what to install; it needs only the standard library, so that it runs before anything else is
there:

    python lightning_distrec/versions.py torch [torch==X.Y.Z]  # the torch to install
    python lightning_distrec/versions.py matching [FBGEMM]     # fbgemm and torchrec for this torch
    python lightning_distrec/versions.py table                 # the table as Markdown
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple


class Triple(NamedTuple):
    """Versions that match: torch's minor release, and what to install for it. A minor stands for
    its patch releases."""

    torch: str
    fbgemm: str
    torchrec: str


TRIPLES = (
    Triple("2.11", "1.6.0", "1.6.1"),  # torchrec 1.6.0 was never released
    Triple("2.12", "1.7.0", "1.7.0"),
    Triple("2.13", "1.8.0", "1.8.0"),
    Triple("2.14", "1.9.0", "1.9.0"),
)

DEFAULT_TORCH = "2.13.0"
"""What `make install` takes where no torch is installed and none is requested."""

FBGEMM_PACKAGES = ("fbgemm-gpu", "fbgemm-gpu-cpu")
"""fbgemm with and without CUDA. Both write the folder `fbgemm_gpu`, so only one can be
installed."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Installed versions; None: not installed."""

    torch: str | None = None
    torch_build: str = "cpu"
    """"cpu", "cuda" or "rocm"; of no meaning without torch."""
    fbgemm_cuda: str | None = None
    """Version of the package `fbgemm-gpu`; the next one: of `fbgemm-gpu-cpu`."""
    fbgemm_cpu: str | None = None
    torchrec: str | None = None
    torch_cuda: str = ""
    """CUDA's major version of torch, and that which `fbgemm-gpu` is linked with, "13" for example;
    "": not known."""
    fbgemm_links_cuda: str = ""
    has_nvidia_driver: bool = False
    """Whether `fbgemm-gpu` could be loaded on this machine."""

    @property
    def fbgemms(self) -> dict[str, str]:
        """Installed fbgemm packages: name -> version."""
        packages = zip(FBGEMM_PACKAGES, (self.fbgemm_cuda, self.fbgemm_cpu), strict=True)
        return {name: version for name, version in packages if version is not None}

    def __str__(self) -> str:
        torch = (
            f"torch {self.torch} ({self.torch_build.upper()} build)" if self.torch else "no torch"
        )
        fbgemm = (
            ", ".join(f"{name} {version}" for name, version in self.fbgemms.items()) or "no fbgemm"
        )
        torchrec = f"torchrec {self.torchrec}" if self.torchrec else "no torchrec"
        return f"{torch}, {fbgemm}, {torchrec}"


def triple_for(torch_version: str) -> Triple | None:
    """Return the table's row for a torch such as "2.13.1+cu130", or None if it has none."""
    return next((triple for triple in TRIPLES if triple.torch == minor(torch_version)), None)


def minor(version: str) -> str:
    """Return "2.13" of "2.13.1+cu130" or of "2.13.0.dev20260101"."""
    return ".".join(re.findall(r"\d+", version)[:2])


def supported() -> str:
    """Return the table as one line of text."""
    return ", ".join(
        f"torch {t.torch} with fbgemm {minor(t.fbgemm)} and torchrec {minor(t.torchrec)}"
        for t in TRIPLES
    )


def markdown_table() -> str:
    """Return the table as docs/installing.md shows it."""
    rows = [f"| {t.torch} | {t.fbgemm} | {t.torchrec} |" for t in TRIPLES]
    return "\n".join([
        "| torch | fbgemm-gpu-cpu or fbgemm-gpu | torchrec |",
        "| --- | --- | --- |",
        *rows,
    ])


def fbgemm_for(installed: Installed) -> str:
    """Return the fbgemm package for the torch and this machine."""
    # `fbgemm-gpu` needs a CUDA build of torch and, even to be imported, the NVIDIA driver. Without
    # that an installed `fbgemm-gpu` stays: a login node or an image may be set up for machines that
    # have the driver.
    if installed.torch_build == "cuda" and (
        installed.has_nvidia_driver or list(installed.fbgemms) == ["fbgemm-gpu"]
    ):
        return "fbgemm-gpu"
    return "fbgemm-gpu-cpu"


def require_matching_versions(*, on_cuda: bool = False) -> None:
    """Check that the installed torch, fbgemm and torchrec match; none of them is imported.

    on_cuda: the tables are to be on a CUDA device.
    Raises VersionError: one is missing, or they do not match. It says what is installed, what
    matches, and what to run.
    """
    problem = problem_with(find_installed(), on_cuda=on_cuda)
    if problem is not None:
        # Late: the Makefile runs this file before the package, or torch, can be imported.
        from lightning_distrec.errors import VersionError

        raise VersionError(problem)


def problem_with(installed: Installed, *, on_cuda: bool = False) -> str | None:
    """Return what is wrong with the installed versions and how to fix it, or None if they match."""
    triple = triple_for(installed.torch or "")
    install = f"python -m pip install torch=={DEFAULT_TORCH}"
    if triple is None:
        return _problem(installed, f"torch must be one of: {supported()}", install)
    if installed.torch_build == "rocm":
        reason = "fbgemm is released for CPU and CUDA builds of torch only"
        return _problem(installed, reason, f"python -m pip uninstall -y torch && {install}")

    fbgemm = fbgemm_for(installed)
    if len(installed.fbgemms) > 1:
        other = next(name for name in FBGEMM_PACKAGES if name != fbgemm)
        reason = (
            f"both fbgemm packages write the folder fbgemm_gpu and break each other: {other} must "
            "be removed"
        )
    elif installed.fbgemm_cuda and installed.torch_build == "cpu":
        reason = "fbgemm-gpu needs a CUDA build of torch and cannot be loaded with a CPU build"
    elif installed.fbgemm_cuda and not installed.has_nvidia_driver:
        fbgemm = "fbgemm-gpu-cpu"
        reason = (
            "fbgemm-gpu cannot be loaded without the NVIDIA driver (libnvidia-ml.so.1), which this "
            "machine lacks"
        )
    elif installed.fbgemm_cpu and on_cuda:
        fbgemm = "fbgemm-gpu"
        reason = "fbgemm-gpu-cpu has no CUDA kernels, and the tables are to be on a CUDA device"
    elif not installed.fbgemms:
        reason = "fbgemm is missing"
    elif minor(next(iter(installed.fbgemms.values()))) != minor(triple.fbgemm):
        fbgemm = next(iter(installed.fbgemms))
        reason = "this fbgemm was made for another torch"
    elif installed.fbgemm_cuda and {installed.torch_cuda, installed.fbgemm_links_cuda} - {
        "",
        installed.torch_cuda,
    }:
        needed = installed.fbgemm_links_cuda
        release = (installed.torch or "").partition("+")[0]
        reason = (
            f"fbgemm-gpu needs CUDA {needed} (libcudart.so.{needed}); this torch brings CUDA "
            f"{installed.torch_cuda}"
        )
        build = {"12": "cu126", "13": "cu130"}.get(needed, f"cu{needed}0")
        return _problem(
            installed,
            reason,
            f"python -m pip install torch=={release}+{build}  # for CUDA {needed}",
        )
    elif installed.torchrec is None:
        reason = "torchrec is missing"
    elif minor(installed.torchrec) != minor(triple.torchrec):
        reason = "this torchrec was made for another torch"
    else:
        return None

    matching = (
        f"Torch {triple.torch} needs {fbgemm} {minor(triple.fbgemm)} and torchrec "
        f"{minor(triple.torchrec)}"
    )
    command = (
        f"python -m pip install --no-deps {fbgemm}=={triple.fbgemm} torchrec=={triple.torchrec}"
    )
    if set(installed.fbgemms) - {fbgemm}:
        # Uninstalling one removes files of the other, so both are uninstalled before the right one
        # is installed.
        command = f"python -m pip uninstall -y {' '.join(installed.fbgemms)} && {command}"
    return _problem(installed, f"{reason}. {matching}", command)


def _problem(installed: Installed, reason: str, command: str) -> str:
    return (
        f"Installed: {installed}. These versions do not match: {reason}. To fix this, run:\n\n "
        f"   {command}\n"
    )


def find_installed() -> Installed:
    """Read the versions from the packages' metadata, without importing the packages."""
    torch = _version_of("torch")
    fbgemm_cuda = _version_of("fbgemm-gpu")
    file = _torch_version_file()
    return Installed(
        torch=torch,
        torch_build=build_of(torch, file) if torch else "cpu",
        fbgemm_cuda=fbgemm_cuda,
        fbgemm_cpu=_version_of("fbgemm-gpu-cpu"),
        torchrec=_version_of("torchrec"),
        torch_cuda=cuda_of(torch or "", file),
        fbgemm_links_cuda="".join(map(linked_cuda, _folders_of("fbgemm_gpu")))
        if fbgemm_cuda
        else "",
        has_nvidia_driver=_has_nvidia_driver(),
    )


def build_of(torch_version: str, version_file: str) -> str:
    """Return "cpu", "cuda" or "rocm", from torch's version or, if it has no suffix, the text of
    torch/version.py."""
    local = torch_version.partition("+")[2]
    for prefix, build in (("cpu", "cpu"), ("cu", "cuda"), ("rocm", "rocm")):
        if local.startswith(prefix):
            return build
    for name, build in (("cuda", "cuda"), ("hip", "rocm")):
        match = re.search(rf"^{name}\b[^=\n]*=\s*(.+)$", version_file, re.MULTILINE)
        if match and match[1].strip() != "None":
            return build
    return "cpu"


def cuda_of(torch_version: str, version_file: str) -> str:
    """Return CUDA's major version, "13" of "2.13.0+cu130" or, without a suffix, from the text of
    torch/version.py."""
    suffix = re.search(r"\+cu(\d+)\d$", torch_version)
    in_file = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)", version_file, re.MULTILINE)
    match = suffix or in_file
    return match[1] if match else ""


def linked_cuda(folder: str | Path = "") -> str:
    """Return CUDA's major version that the libraries in a folder are linked with; "" where none
    is."""
    for library in sorted(Path(folder).glob("*.so")) if folder else ():
        if library.stat().st_size:
            with (
                library.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                match = re.search(rb"libcudart\.so\.(\d+)", content)
                if match:
                    return match[1].decode()
    return ""


def _folders_of(package: str) -> Sequence[str]:
    spec = util.find_spec(package)  # finds the folder, runs nothing
    return (spec.submodule_search_locations or ()) if spec else ()


def _torch_version_file() -> str:
    files = [Path(folder, "version.py") for folder in _folders_of("torch")]
    return next((file.read_text("utf-8") for file in files if file.is_file()), "")


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _has_nvidia_driver() -> bool:
    try:
        # fbgemm-gpu is linked against it: its import needs the same
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def torch_to_install(installed: Installed, requested: str) -> str:
    """Return the torch to install, as "torch==2.13.0": the requested, else the installed, else the
    default one.

    requested: "torch==X.Y.Z", or empty. Raises ValueError: it is no single version, or none of the
    table's.
    """
    if not requested:
        return f"torch=={installed.torch or DEFAULT_TORCH}"
    match = re.fullmatch(r"torch==(\d+\.\d+\.\d+\S*)", requested.strip())
    if match is None:
        raise ValueError(
            f"TORCH={requested!r} names no single version. Write it as "
            f"TORCH=torch=={DEFAULT_TORCH}."
        )
    if triple_for(match[1]) is None:
        raise ValueError(
            f"TORCH={requested!r} has no matching fbgemm in the table. Use one of: {supported()}."
        )
    return f"torch=={match[1]}"


def matching(installed: Installed, requested_fbgemm: str) -> list[str]:
    """Return the fbgemm and torchrec that match the installed torch, as pip's requirements.

    requested_fbgemm: one of FBGEMM_PACKAGES, or empty for the one that `fbgemm_for` chooses.
    Raises ValueError: torch is not one of the table's, or the requested fbgemm does not work with
    it.
    """
    triple = triple_for(installed.torch or "")
    if triple is None or installed.torch_build == "rocm":
        raise ValueError(problem_with(installed))
    if requested_fbgemm not in ("", *FBGEMM_PACKAGES):
        raise ValueError(
            f"FBGEMM={requested_fbgemm!r} is no fbgemm package. Use one of: "
            f"{', '.join(FBGEMM_PACKAGES)}."
        )
    if requested_fbgemm == "fbgemm-gpu" and installed.torch_build == "cpu":
        raise ValueError(
            f"FBGEMM={requested_fbgemm!r} cannot be loaded with torch {installed.torch}, which is "
            "a CPU build. Install a CUDA build of torch first, or leave FBGEMM unset."
        )
    return [
        f"{requested_fbgemm or fbgemm_for(installed)}=={triple.fbgemm}",
        f"torchrec=={triple.torchrec}",
    ]


def main(arguments: Sequence[str]) -> int:
    """Print what the arguments ask for; returns the exit status."""
    command, requested = (*arguments, "", "")[:2]
    try:
        if command == "torch":
            print(torch_to_install(find_installed(), requested))
        elif command == "matching":
            print(*matching(find_installed(), requested))
        elif command == "table":
            print(markdown_table())
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
