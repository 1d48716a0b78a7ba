"""Builds the device's library with g++, once for a version of torch and of the sources."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent


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
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / f"libhostcuda-{_digest(torch)}.so"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may want it at once
        if not built.exists():
            _build(torch, built)
    return built


def _digest(torch: Path) -> str:
    parts = [torch / "version.py", *sorted(SOURCES.glob("*.h")), *sorted(SOURCES.glob("*.cpp"))]
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:16]


def _build(torch: Path, built: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuild(
            "a CUDA device in host memory needs a C++ compiler (Debian: apt-get install g++)"
        )
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    sources = ["-O0", "-std=c++20", "-fPIC", "-shared", *includes, str(SOURCES / "library.cpp")]
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        written = f"{folder}/{built.name}"
        command = [compiler, *sources, *libraries, "-o", written]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuild(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        os.replace(written, built)  # whole, or not there
