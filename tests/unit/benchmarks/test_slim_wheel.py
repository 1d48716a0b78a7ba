"""A wheel with the code of one GPU keeps that code, and all other bytes where they were."""

import struct
import zipfile
from pathlib import Path

from tests.gpu.slim_wheel import CONTAINER, main

CODE = {(2, 80): b"eighty", (2, 90): b"ninety", (1, 90): b"ptx"}


def _library(blank: set[tuple[int, int]]) -> bytes:
    entries = b""
    for (kind, capability), code in CODE.items():
        content = bytes(len(code)) if (kind, capability) in blank else code
        entries += struct.pack("<HHIQ12xI", kind, 0, 32, len(code), capability) + content
    # A second time by chance, with a size beyond the file.
    return (
        b"head"
        + CONTAINER
        + struct.pack("<Q", len(entries))
        + entries
        + CONTAINER
        + struct.pack("<Q", 1 << 40)
    )


def test_only_the_code_for_one_gpu_is_kept(tmp_path: Path) -> None:
    wheel, smaller = tmp_path / "a.whl", tmp_path / "b.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("fbgemm_gpu/lib.so", _library(set()))
        file.writestr("fbgemm_gpu/__init__.py", _library(set()))
    assert main(["9.0", str(wheel), str(smaller)]) == 0
    with zipfile.ZipFile(smaller) as file:
        assert file.read("fbgemm_gpu/lib.so") == _library({(2, 80), (1, 90)})
        assert file.read("fbgemm_gpu/__init__.py") == _library(set())
    assert main(["10.0", str(wheel), str(smaller)]) == 1
