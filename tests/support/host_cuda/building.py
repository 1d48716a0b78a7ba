"""Builds the device's library with g++, once for a version of torch and of the sources."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
UNITS = ("memory.cpp", "device.cpp", "fallback.cpp", "exchanges.cpp")


class CannotBuild(RuntimeError):
    """There is no compiler, or it failed; or torch has CUDA."""


def torch_folder() -> Path:
    """Return where torch lies, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuild("torch is not installed")
    return Path(spec.origin).parent


def library() -> Path:
    """Return the library, built once for a version of torch and of the sources. Raises
    CannotBuild."""
    torch = torch_folder()
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild(
            "this torch is built for CUDA; a CUDA device in host memory needs a CPU build"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "host_cuda"
    built = cache / f"libhostcuda-{_digest(torch, *UNITS)}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _build(torch, built)
    return built


def _digest(torch: Path, *units: str) -> str:
    parts = [
        torch / "version.py",
        *sorted(SOURCES.glob("*.h")),
        *(SOURCES / unit for unit in units),
    ]
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:16]


def _build(torch: Path, built: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuild(
            "a CUDA device in host memory needs a C++ compiler (Debian: apt-get install g++)"
        )
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]

    def compile_unit(unit: str) -> str:
        compiled = built.parent / f"{unit}-{_digest(torch, unit)}.o"
        if not compiled.exists():
            command = [
                compiler,
                "-O0",
                "-std=c++20",
                "-fPIC",
                *includes,
                "-c",
                str(SOURCES / unit),
                "-o",
            ]
            _run_whole(command, compiled)
        return str(compiled)

    with ThreadPoolExecutor() as pool:
        units = list(pool.map(compile_unit, UNITS))
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    _run_whole([compiler, "-shared", *units, *libraries, "-o"], built)


def _run_whole(command: list[str], output: Path) -> None:
    """Run a command that writes a file, which is whole or not there: several processes may
    build."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        written = f"{folder}/{output.name}"
        done = subprocess.run([*command, written], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuild(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        os.replace(written, output)
