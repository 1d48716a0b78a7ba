"""Makes a wheel of fbgemm-gpu small enough to bring to a machine without a network.

    python -m tests.gpu.slim_wheel 9.0 fbgemm_gpu-1.8.0-*.whl SMALLER.whl

Blanks the code of all other GPUs, which then compresses to nothing. On a GPU of the compute
capability that is named the libraries load and run as before; on any other they have no kernels.
"""

import struct
import sys
import zipfile
from pathlib import Path

CONTAINER = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""How a container of code for several GPUs begins: a number by which it is known, a version, its
header's bytes."""
CUBIN = 2
"""An entry with machine code for one compute capability; the other kind, 1, is PTX."""


def blank_others(library: bytearray, capability: int) -> int:
    """Set the code for other GPUs to zeros, in place: sizes and places stay. Returns how many bytes
    of code are kept.

    library: of a shared library. capability: 90 for 9.0.
    """
    kept_bytes, place = 0, library.find(CONTAINER)
    while place >= 0:
        (size,) = struct.unpack_from("<Q", library, place + 8)
        begin = place + len(CONTAINER) + 8
        end = begin + size
        if end > len(library):  # these bytes occur by chance
            place = library.find(CONTAINER, begin)
            continue
        kept_bytes += _blank_entries(library, begin, end, capability)
        place = library.find(CONTAINER, end)
    return kept_bytes


def _blank_entries(library: bytearray, entry: int, end: int, capability: int) -> int:
    """Blank the entries of a container, which follow each other from `entry` to `end`."""
    kept_bytes = 0
    while entry < end:
        kind, _, header_bytes, code_bytes = struct.unpack_from("<HHIQ", library, entry)
        if kind not in (1, CUBIN) or not header_bytes:
            break
        (its_capability,) = struct.unpack_from("<I", library, entry + 28)
        code = entry + header_bytes
        if kind == CUBIN and its_capability == capability:
            kept_bytes += code_bytes
        else:
            library[code : code + code_bytes] = bytes(code_bytes)
        entry = code + code_bytes
    return kept_bytes


def slim_wheel(wheel: Path, smaller: Path, capability: int) -> int:
    """Write a wheel whose libraries have code for one capability alone; returns how many bytes of
    code are kept."""
    kept_bytes = 0
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            content = bytearray(source.read(name))
            if name.endswith(".so"):
                kept_bytes += blank_others(content, capability)
            target.writestr(name, bytes(content))
    return kept_bytes


def main(arguments: list[str]) -> int:
    """Write the wheel; returns the exit status."""
    if len(arguments) != 3:
        print(__doc__)
        return 2
    capability, wheel, smaller = arguments
    kept_bytes = slim_wheel(Path(wheel), Path(smaller), int(capability.replace(".", "")))
    if not kept_bytes:
        print(f"{wheel} has no code for compute capability {capability}.")
        return 1
    print(
        f"{smaller}: {Path(smaller).stat().st_size / 1e6:.0f} MB, with {kept_bytes / 1e6:.0f} MB of code."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
