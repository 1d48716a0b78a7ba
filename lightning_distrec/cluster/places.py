"""Where a rank's main thread is, and whether it waits for other ranks, as far as Python sees."""

import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import DistError

from lightning_distrec.errors import RankError

NETWORK_ERROR = re.compile(
    "gloo|nccl|closed by peer|pair closure|connection reset|connection refused|broken pipe|timed "
    "out|failed to recv"
)
"""Words in the plain RuntimeErrors that torch raises when another rank is gone or late."""
# The last is this package, which an editable install keeps outside of site-packages.
LIBRARY = str(Path(os.__file__).parent)
PACKAGE = str(Path(__file__).parents[1])
OTHERS = ["<", "site-packages", "dist-packages", LIBRARY, PACKAGE]
IS_NOT_USERS = re.compile("|".join(map(re.escape, OTHERS)))
"""Files of code that is not the user's."""
# Files in which a thread waits for other ranks, or starts what does: `backward`. Not those of
# checkpoints, where it waits for a disk.
EXCHANGES = re.compile(
    r"/(torch/(distributed/(?!checkpoint)|nn/parallel/dist|autograd/(?!prof))"
    r"|torchrec/distributed/)"
)
# Waits known by what lines end with: those for a GPU take a whole processor, as work does.
ARGUMENTS = r"\(([^()]|\([^()]*\))*\)[])}:,]*$"
WAIT = re.compile(r"\.wait" + ARGUMENTS)
WAIT_FOR_GPU = re.compile(r"\.(item|cpu|tolist|to|nonzero|\w*synchronize)" + ARGUMENTS)
PAGES_PER_PLACE = 1000
"""A thread that has taken this many pages of memory is at another place: it copies."""


def is_waiting(thread: int) -> bool:
    """Whether a thread, the main one, waits for other ranks, or for a GPU that may."""
    frames = _frames_of_others()
    frame = frames.pop(thread, None)
    if frame is None:
        return False
    frames_of_torch: list[FrameType] = []
    # On GPUs it runs on threads that torch starts: hooks compute there, and what is compiled on
    # first use.
    if frame.f_code.co_name == "_engine_run_backward":
        for other in frames.values():
            *_, (outermost, _) = traceback.walk_stack(other)
            if outermost.f_code.co_filename != threading.__file__:
                frames_of_torch.append(other)
    return all(map(is_wait, frames_of_torch or [frame]))


def _frames_of_others() -> dict[int, FrameType]:
    """Return the innermost frame of each thread but this one."""
    frames = sys._current_frames()  # noqa: SLF001  documented in spite of its name
    # It would be in a cycle with the dict, which would hold what all functions that run now do,
    # tensors for example, until the next search for garbage.
    del frames[threading.get_ident()]
    return frames


def find_place(thread: int) -> int:
    """Return a number that stays while a thread stays in one call, and computes and copies
    nothing."""
    frame = _frames_of_others().get(thread)
    place: list[object] = [count_work(thread)]
    while frame is not None:
        place.append(id(frame.f_code))
        place.append(frame.f_lasti)
        frame = frame.f_back
    return hash(tuple(place))


def is_wait(frame: FrameType) -> bool:
    """Whether a thread in a frame waits in a call of C that waits for ranks or GPUs, or may."""
    # What calls an operation of torch by its name, such as a collective's wait_tensor.
    while frame.f_code.co_filename.endswith("/torch/_ops.py"):
        if frame.f_back is None:
            break
        frame = frame.f_back
    # A frame has no line while it is entered.
    if frame.f_lineno is None:
        return False
    # Waits of exchanges call into C; others, of threads and processes, are functions of Python with
    # other lines.
    file = frame.f_code.co_filename
    line = linecache.getline(file, frame.f_lineno).rstrip()
    if torch.cuda.is_initialized() and WAIT_FOR_GPU.search(line):
        return True
    return bool(WAIT.search(line) or EXCHANGES.search(file))


def count_work(thread: int) -> tuple[int, int]:
    """Return counts that grow while a process computes on GPUs, or a thread copies; without GPUs,
    while it computes."""
    if not torch.cuda.is_initialized():
        thread_clock = time.pthread_getcpuclockid(thread)
        return int(time.clock_gettime(thread_clock)), 0
    # Waits for a GPU take a processor, too. What computes there takes memory there.
    allocated = 0
    for device in range(torch.cuda.device_count()):
        allocated += torch.cuda.memory_stats(device)["allocation.all.allocated"]
    # Source: man 5 proc, from minflt to cmajflt.
    main = threading.main_thread().native_id
    status = Path(f"/proc/self/task/{main}/stat").read_text()
    fields = status.rpartition(")")[2].split()
    pages = sum(map(int, fields[7:11]))
    return allocated, pages // PAGES_PER_PLACE


def locate_thread(thread: int) -> str:
    """Return where a thread is now, as `find_location` does."""
    frames = _frames_of_others()
    if thread not in frames:
        return ""
    return find_location(traceback.walk_stack(frames[thread]))


def find_location(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return where a thread is: the innermost line of the user's code, and what it has called
    there.

    frames: with their lines, innermost first, as `traceback.walk_stack` returns them.
    """
    calls = list(frames)
    innermost, _ = calls[0]
    user, line = calls[0]
    for frame, frame_line in calls:
        if not IS_NOT_USERS.search(frame.f_code.co_filename):
            user = frame
            line = frame_line
            break
    code = user.f_code
    location = f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
    if user is innermost:
        return location
    return f"{location} ({innermost.f_code.co_name})"


def is_network_failure(failure: BaseException) -> bool:
    """Whether another rank may have caused an exception. torch and gloo have no classes for that,
    only texts."""
    # It is a RuntimeError with its reason already, whose text may hold some of these words.
    if isinstance(failure, RankError):
        return False
    if isinstance(failure, DistError | ConnectionError):
        return True
    if not isinstance(failure, RuntimeError):
        return False
    text = str(failure).lower()
    return NETWORK_ERROR.search(text) is not None
