"""Which torch, fbgemm and torchrec belong together: the table, the check, and the installer that obeys it.

The three are compiled against each other, yet nothing in their metadata keeps them in step. This file needs only the
standard library, so that it can install everything else:

    python lightning_distrec/versions.py install    installs what is missing into this Python, in the order that works
    python lightning_distrec/versions.py table      prints the table as Markdown
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple


class Triple(NamedTuple):
    """Versions that belong together. A minor stands for all of its patch releases."""

    torch: str
    """The minor, such as "2.13"."""
    fbgemm: str
    """The version to install."""
    torchrec: str
    """The version to install."""


TRIPLES = (
    Triple("2.11", "1.6.0", "1.6.1"),  # torchrec 1.6.0 was never released
    Triple("2.12", "1.7.0", "1.7.0"),
    Triple("2.13", "1.8.0", "1.8.0"),
    Triple("2.14", "1.9.0", "1.9.0"),
)

DEFAULT_TORCH = "2.13.0"
"""What the installer takes where no torch is installed and none is asked for."""

FBGEMM_PACKAGES = ("fbgemm-gpu", "fbgemm-gpu-cpu")
"""fbgemm with and without CUDA. Both write the folder `fbgemm_gpu`, so only one can be installed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is installed; None is 'not installed'."""

    torch: str | None = None
    torch_build: str = "cpu"
    """"cpu", "cuda" or "rocm"; of no meaning without torch."""
    fbgemm_cuda: str | None = None
    """Version of the package `fbgemm-gpu`."""
    fbgemm_cpu: str | None = None
    """Version of the package `fbgemm-gpu-cpu`."""
    torchrec: str | None = None
    has_nvidia_driver: bool = False
    """Whether `fbgemm-gpu` could be loaded on this machine."""

    @property
    def fbgemms(self) -> dict[str, str]:
        """Installed fbgemm packages: name -> version."""
        both = zip(FBGEMM_PACKAGES, (self.fbgemm_cuda, self.fbgemm_cpu), strict=True)
        return {name: version for name, version in both if version is not None}

    def __str__(self) -> str:
        torch = f"torch {self.torch} ({self.torch_build.upper()} build)" if self.torch else "no torch"
        fbgemm = ", ".join(f"{name} {version}" for name, version in self.fbgemms.items()) or "no fbgemm"
        torchrec = f"torchrec {self.torchrec}" if self.torchrec else "no torchrec"
        return f"{torch}, {fbgemm}, {torchrec}"


# ------------------------------------------------------------------------------------------------------- the table


def triple_for(torch_version: str) -> Triple | None:
    """Return the table's row for a torch such as "2.13.1+cu130", or None if it has none."""
    return next((triple for triple in TRIPLES if triple.torch == minor(torch_version)), None)


def minor(version: str) -> str:
    """Return "2.13" of "2.13.1+cu130" or of "2.13.0.dev20260101"."""
    return ".".join(re.findall(r"\d+", version)[:2])


def supported() -> str:
    """Return the table as one line of prose."""
    return ", ".join(f"torch {t.torch} with fbgemm {minor(t.fbgemm)} and torchrec {minor(t.torchrec)}" for t in TRIPLES)


def markdown_table() -> str:
    """Return the table as docs/installing.md shows it."""
    rows = [f"| {t.torch} | {t.fbgemm} | {t.torchrec} |" for t in TRIPLES]
    return "\n".join(["| torch | fbgemm-gpu-cpu or fbgemm-gpu | torchrec |", "| --- | --- | --- |", *rows])


def fbgemm_for(found: Found) -> str:
    """Return the fbgemm package that fits the torch and this machine.

    `fbgemm-gpu` needs a CUDA build of torch and, merely to be imported, the NVIDIA driver. Where the driver is missing,
    the one that was already chosen stays: a login node or an image may be set up for machines that have it.
    """
    if found.torch_build == "cuda" and (found.has_nvidia_driver or list(found.fbgemms) == ["fbgemm-gpu"]):
        return "fbgemm-gpu"
    return "fbgemm-gpu-cpu"


# ------------------------------------------------------------------------------------------------------- the check


def require_matching_versions(*, on_cuda: bool = False) -> None:
    """Return if the installed torch, fbgemm and torchrec belong together; none of them is imported.

    on_cuda: the tables will live on a CUDA device.
    Raises VersionError: one is missing, or they do not match. It names what was found, what matches, and what to run.
    """
    problem = problem_with(find_installed(), on_cuda=on_cuda)
    if problem is not None:
        from lightning_distrec.errors import VersionError

        raise VersionError(problem)


def problem_with(found: Found, *, on_cuda: bool = False) -> str | None:
    """Return what is wrong with the installed versions and how to mend it, or None if they belong together."""
    triple = triple_for(found.torch or "")
    if triple is None:
        why = f"torch must be one of: {supported()}"
        return _problem(found, why, f"python -m pip install torch=={DEFAULT_TORCH}")
    if found.torch_build == "rocm":
        why = "fbgemm is released for CPU and CUDA builds of torch only"
        return _problem(found, why, f"python -m pip uninstall -y torch && python -m pip install torch=={DEFAULT_TORCH}")

    fbgemm = fbgemm_for(found)
    if len(found.fbgemms) > 1:
        other = next(name for name in FBGEMM_PACKAGES if name != fbgemm)
        why = f"both fbgemm packages write the folder fbgemm_gpu and break each other, so {other} has to go"
    elif found.fbgemm_cuda and found.torch_build == "cpu":
        why = "fbgemm-gpu needs a CUDA build of torch and cannot be loaded beside a CPU build"
    elif found.fbgemm_cuda and not found.has_nvidia_driver:
        fbgemm = "fbgemm-gpu-cpu"
        why = "fbgemm-gpu cannot be loaded without the NVIDIA driver (libnvidia-ml.so.1), which this machine has not"
    elif found.fbgemm_cpu and on_cuda:
        fbgemm = "fbgemm-gpu"
        why = "fbgemm-gpu-cpu has no CUDA kernels, and the tables are to be on a CUDA device"
    elif not found.fbgemms:
        why = "fbgemm is missing"
    elif minor(next(iter(found.fbgemms.values()))) != minor(triple.fbgemm):
        fbgemm = next(iter(found.fbgemms))
        why = "this fbgemm was made for another torch"
    elif found.torchrec is None:
        why = "torchrec is missing"
    elif minor(found.torchrec) != minor(triple.torchrec):
        why = "this torchrec was made for another torch"
    else:
        return None

    matching = f"Torch {triple.torch} goes with {fbgemm} {minor(triple.fbgemm)} and torchrec {minor(triple.torchrec)}"
    mend = f"python -m pip install --no-deps {fbgemm}=={triple.fbgemm} torchrec=={triple.torchrec}"
    if set(found.fbgemms) - {fbgemm}:
        # The one that goes takes files of the other along, so both go before the right one comes.
        mend = f"python -m pip uninstall -y {' '.join(found.fbgemms)} && {mend}"
    return _problem(found, f"{why}. {matching}", mend)


def _problem(found: Found, why: str, mend: str) -> str:
    return f"Installed: {found}. These do not work together: {why}. To mend it, run:\n\n    {mend}\n"


# ------------------------------------------------------------------------------------------------------- looking


def find_installed() -> Found:
    """Read the versions from the packages' metadata; nothing of theirs is executed."""
    torch = _version_of("torch")
    return Found(
        torch=torch,
        torch_build=build_of(torch, _torch_version_file()) if torch else "cpu",
        fbgemm_cuda=_version_of("fbgemm-gpu"),
        fbgemm_cpu=_version_of("fbgemm-gpu-cpu"),
        torchrec=_version_of("torchrec"),
        has_nvidia_driver=_has_nvidia_driver(),
    )


def build_of(torch_version: str, version_file: str) -> str:
    """Return "cpu", "cuda" or "rocm", from torch's version and, where that is silent, the text of torch/version.py."""
    local = torch_version.partition("+")[2]
    for prefix, build in (("cpu", "cpu"), ("cu", "cuda"), ("rocm", "rocm")):
        if local.startswith(prefix):
            return build
    for name, build in (("cuda", "cuda"), ("hip", "rocm")):
        match = re.search(rf"^{name}\b[^=\n]*=\s*(.+)$", version_file, re.MULTILINE)
        if match and match[1].strip() != "None":
            return build
    return "cpu"


def _torch_version_file() -> str:
    spec = util.find_spec("torch")  # finds the folder, does not run torch
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder, "version.py")
        if file.is_file():
            return file.read_text("utf-8")
    return ""


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # fbgemm-gpu is linked against it, so this asks just what the import will ask
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- installing

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "recipes,test"


class Step(NamedTuple):
    """One call of pip, and what the user reads while it runs."""

    says: str
    pip: tuple[str, ...]


def plan_install(
    found: Found, wanted_torch: str | None, wanted_fbgemm: str | None = None, *, project_is_current: bool = False
) -> list[Step]:
    """Return the calls of pip that lead from `found` to a matching set.

    wanted_torch: "torch==2.14.0", or None where any torch of the table will do.
    wanted_fbgemm: one of FBGEMM_PACKAGES, or None for the one that fits.
    project_is_current: this package and its dependencies were installed from the pyproject.toml that is here now.
    If torch is to be installed, that is the only step: the others depend on its build, so plan again after it.
    Raises ValueError: no step leads there; the text says why and what to do.
    """
    wanted = _parse_wanted_torch(wanted_torch)
    if found.torch is None or wanted not in (None, found.torch, found.torch.partition("+")[0]):
        version = wanted or DEFAULT_TORCH
        chosen = "the one TORCH asks for" if wanted else "TORCH=torch==X.Y.Z chooses another"
        says = f"Installing torch {version} ({chosen}). A CUDA build downloads several GB."
        return [Step(says, ("install", f"torch=={version}"))]
    triple = triple_for(found.torch)
    if triple is None or found.torch_build == "rocm":
        raise ValueError(problem_with(found))
    fbgemm = _parse_wanted_fbgemm(wanted_fbgemm, found) or fbgemm_for(found)

    steps = []
    unwanted = sorted(set(found.fbgemms) - {fbgemm})
    if unwanted:
        says = f"Uninstalling {' and '.join(found.fbgemms)}: {fbgemm} is to be the only fbgemm."
        steps.append(Step(says, ("uninstall", "-y", *found.fbgemms)))
    if not project_is_current:
        if found.torchrec:
            # torchrec's metadata pins torchmetrics==1.0.3 and asks for fbgemm-gpu by name. It works without either, but
            # while it is installed every pip call that resolves dependencies reports both as conflicts, in red.
            steps.append(Step("Taking torchrec out while the others come in.", ("uninstall", "-y", "torchrec")))
        says = f"Installing lightning_distrec and what it needs (extras: {EXTRAS.replace(',', ', ')})."
        # Naming the torch that is there keeps pip from replacing it.
        steps.append(Step(says, ("install", "-e", f".[{EXTRAS}]", f"torch=={found.torch}")))

    missing = []
    if unwanted or minor(found.fbgemms.get(fbgemm, "")) != minor(triple.fbgemm):
        missing.append(f"{fbgemm}=={triple.fbgemm}")
    if not project_is_current or minor(found.torchrec or "") != minor(triple.torchrec):
        missing.append(f"torchrec=={triple.torchrec}")
    if missing:
        says = f"Installing {' and '.join(missing).replace('==', ' ')}, {_reason_for(fbgemm, found)}."
        steps.append(Step(says, ("install", "--no-deps", *missing)))
    return steps


def install() -> int:
    """Carry out `plan_install` on this Python; returns the exit status."""
    wanted = os.environ.get("TORCH") or None, os.environ.get("FBGEMM") or None
    stamp_file = Path(sys.prefix, "lightning_distrec.json")
    while True:
        before = find_installed()
        try:
            steps = plan_install(before, *wanted, project_is_current=_read(stamp_file) == _stamp(before))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        for step in steps:
            print(step.says, flush=True)
            if _run_pip(step.pip) != 0:
                print(f"Stopped: 'pip {' '.join(step.pip)}' failed; its reason is above.", file=sys.stderr)
                return 1
        importlib.invalidate_caches()
        found = find_installed()
        if found.torch == before.torch:
            break  # else a new torch is there, and what goes with it is planned now
    stamp_file.write_text(json.dumps(_stamp(found), indent=2) + "\n")
    print(f"Installed: {found}." if steps else f"Nothing to install, all is here: {found}.")
    return 0


def _run_pip(arguments: Sequence[str]) -> int:
    """Run pip, silent but for errors, and say every half minute that it is still at work; returns its exit status."""
    silent = ("-qq", "--disable-pip-version-check", "--no-input")
    process = subprocess.Popen([sys.executable, "-m", "pip", *arguments, *silent], cwd=ROOT)
    start = time.monotonic()
    while True:
        try:
            return process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            print(f"  still at it after {time.monotonic() - start:.0f} s", flush=True)


def _stamp(found: Found) -> dict[str, str]:
    """Return what the installed project depends on: while this is the same, it need not be installed again."""
    pyproject = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    return {"root": str(ROOT), "pyproject_sha256": pyproject, "torch": found.torch or ""}


def _read(stamp_file: Path) -> object:
    try:
        return json.loads(stamp_file.read_text())
    except (OSError, ValueError):
        return None


def _parse_wanted_torch(wanted: str | None) -> str | None:
    if wanted is None:
        return None
    match = re.fullmatch(r"torch==(\d+\.\d+\.\d+\S*)", wanted.strip())
    if match is None:
        raise ValueError(f"TORCH={wanted!r} names no single version. Write it like TORCH=torch=={DEFAULT_TORCH}.")
    if triple_for(match[1]) is None:
        raise ValueError(f"TORCH={wanted!r}: nothing is known to go with it. Take one of: {supported()}.")
    return match[1]


def _parse_wanted_fbgemm(wanted: str | None, found: Found) -> str | None:
    if wanted not in (None, *FBGEMM_PACKAGES):
        raise ValueError(f"FBGEMM={wanted!r} is no fbgemm package. Take one of: {', '.join(FBGEMM_PACKAGES)}.")
    if wanted == "fbgemm-gpu" and found.torch_build == "cpu":
        raise ValueError(
            f"FBGEMM={wanted!r} cannot be loaded beside torch {found.torch}, which is a CPU build. "
            "Install a CUDA build of torch first, or leave FBGEMM unset."
        )
    return wanted


def _reason_for(fbgemm: str, found: Found) -> str:
    reason = f"made for torch {found.torch}, which is a {found.torch_build.upper()} build"
    if fbgemm == "fbgemm-gpu-cpu" and found.torch_build == "cuda" and not found.has_nvidia_driver:
        reason += ". There is no NVIDIA driver here, so this fbgemm runs on CPU only; for GPUs set FBGEMM=fbgemm-gpu"
    return reason


def main(arguments: Sequence[str]) -> int:
    """Run `install` or `table`; returns the exit status."""
    if list(arguments) == ["table"]:
        print(markdown_table())
        return 0
    if list(arguments) == ["install"]:
        return install()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
