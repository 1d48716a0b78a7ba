"""Emulates CUDA streams on a CPU, to find what would go wrong on a GPU, where kernels run as their stream allows.

Each stream has a vector clock. A dispatch mode notes for every operation on which stream it runs, what memory it reads
and what it writes. Three things are hazards:

    unordered    memory is read or written on a stream that has not waited for who wrote or read it before
    freed early  memory of one stream was used on another and freed without `record_stream`; its own stream, which gets
                 it again, does something while that use may still run
    blocking     the host waits for a stream: what it waits for is listed, and is a hazard where a test says so

Memory that existed before is taken as ready. A tensor comes to the "GPU" by `to(device)`, from the host's memory.
Operations inside of one kernel, and what C++ code of collectives does, count as operations of the stream that is
current. So this shows races that are there; that it shows none is no proof.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = (
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "_coalesce",
)
"""Operations for whose result the host waits."""


class Stream:
    """A stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("cpu")
        self.clock: dict[Stream, int] = {}

    def wait_event(self, event: "Event") -> None:
        """What comes after this runs after what the event has seen."""
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def wait_stream(self, other: "Stream") -> None:
        """The same, after all that the other stream has now."""
        self.wait_event(other.record_event())

    def record_event(self, event: Any = None) -> "Event":
        """Return an event of all that the stream has now."""
        return Event(dict(self.clock))

    def has_seen(self, stream: "Stream", time: int) -> bool:
        """Whether what the stream does next comes after this time of another."""
        return stream is self or self.clock.get(stream, 0) >= time


@dataclass
class Event:
    """In the place of torch.cuda.Event."""

    clock: dict[Stream, int]

    def synchronize(self) -> None:
        """Wait on the host, for what was queued before the event only: no wait for the stream."""

    def query(self) -> bool:
        """Whether what was queued before it is done."""
        return True


@dataclass
class Memory:
    """What is known of one storage."""

    reference: StorageWeakRef
    stream: Stream | None = None
    """On which it was allocated; None: before, or on the host."""
    written: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)
    made_at: str = ""


@dataclass
class Found:
    """What was observed."""

    hazards: list[str] = field(default_factory=list)
    waits: list[tuple[str, str, str]] = field(default_factory=list)
    """Of the host: the stream's name, the operation, and where; and the marks of tests among them."""


class EmulatedStreams(TorchDispatchMode):
    """Follows operations while it is the dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = Found()
        self.default = self.current = Stream("step")
        self._streams = [self.default]
        self._idle: dict[Stream, int] = {}
        self._memory: dict[int, Memory] = {}
        self._shared: set[int] = set()
        self._freed: dict[Stream, list[tuple[Stream, int, str]]] = {}
        """Stream -> who may still use its memory that is free, until when, and what that would be."""
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returns = func._schema.returns
        if any(argument.alias_info is not None and not argument.alias_info.is_write for argument in returns):
            return result  # a view: nothing runs
        written = [
            _tensors(value)
            for argument, value in _with_values(func._schema.arguments, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        outputs = [tensor for tensors in written for tensor in tensors]
        self.run(func.__name__, _tensors([args, kwargs]), [*outputs, *_tensors(result)])
        pinned = args and getattr(args[0], "emulated_pinned", False)
        if (func._schema.name.rpartition("::")[2] in WAITS or _has_unknown_size(func, args, kwargs)) and not pinned:
            self.host_waits(func.__name__)
        return result

    def run(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Run an operation on the current stream."""
        self._free()
        self._count += 1
        if self._count % 2_000 == 0:  # most memory lives for a moment
            gone = [k for k, memory in self._memory.items() if memory.reference.expired() and k not in self._shared]
            for key in gone:
                del self._memory[key]
        stream = self.current
        tick = stream.clock[stream] = stream.clock.get(stream, 0) + 1
        for user, time, text in self._freed.pop(stream, ()):
            if not stream.has_seen(user, time):
                self._hazard(text)
        for tensor in inputs:
            memory = self.memory_of(tensor)
            if memory.written is not None and not stream.has_seen(*memory.written):
                self._hazard(f"unordered: {name} on '{stream.name}' reads what '{memory.written[0].name}' writes")
            self._use(memory, stream, tick)
        for tensor in outputs:
            memory = self.memory_of(tensor, made_on=stream)
            for reader, time in memory.read.items():
                if not stream.has_seen(reader, time):
                    self._hazard(f"unordered: {name} on '{stream.name}' overwrites what '{reader.name}' reads")
            memory.written = stream, tick
            self._use(memory, stream, tick)

    def _use(self, memory: Memory, stream: Stream, tick: int) -> None:
        memory.read[stream] = tick
        if memory.stream not in (None, stream):
            self._shared.add(memory.reference.cdata)

    def memory_of(self, tensor: torch.Tensor, made_on: Stream | None = None) -> Memory:
        """Return what is known of a tensor's memory; made_on: the stream, where it is new."""
        reference = StorageWeakRef(tensor.untyped_storage())
        memory = self._memory.get(reference.cdata)
        if memory is None or memory.reference.expired():
            memory = self._memory[reference.cdata] = Memory(reference, made_on)
            if made_on is not None and made_on is not self.default:
                memory.made_at = _place()
        return memory

    def _free(self) -> None:
        for key in [key for key in self._shared if self._memory[key].reference.expired()]:
            self._shared.discard(key)
            memory = self._memory.pop(key)
            for user, time in memory.read.items():
                owner = memory.stream
                assert owner is not None
                if user is not owner and user not in memory.recorded and not owner.has_seen(user, time):
                    text = f"freed early: memory of '{owner.name}' was used on '{user.name}' and is free; made at "
                    self._freed.setdefault(owner, []).append((user, time, text + memory.made_at))

    def _hazard(self, text: str) -> None:
        self.reports.hazards.append(f"{text}, at {_place()}")

    def host_waits(self, event: str) -> None:
        """Note that the host waits for the current stream."""
        self.reports.waits.append((self.current.name, event, _place()))

    def synchronize(self, *_: Any) -> None:
        """All streams are idle: each comes after all others."""
        latest = {stream: stream.clock.get(stream, 0) for stream in self._streams}
        self._idle = latest
        for stream in self._streams:
            stream.clock |= latest
        self.reports.waits.append(("all", "synchronize", _place()))

    def make_stream(self, device: Any = None, priority: int = 0) -> Stream:
        """In the place of torch.cuda.Stream."""
        self._streams.append(Stream(f"stream {len(self._streams)}"))
        self._streams[-1].clock |= self._idle
        return self._streams[-1]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """In the place of torch.cuda.stream, which does nothing for None."""
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """In the place of Tensor.record_stream."""
        if tensor.layout != torch.strided:
            raise NotImplementedError(f"record_stream of a tensor of layout {tensor.layout}")
        self.memory_of(tensor).recorded.add(stream)

    def to(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """In the place of Tensor.to: what is on the host is copied to the device."""
        device = args[0] if args else kwargs.get("device")
        if isinstance(device, torch.device) and tensor.layout == torch.strided and self.is_on_host(tensor):
            copied = tensor.clone()
            self.memory_of(copied)
            if not kwargs.get("non_blocking", False) or not getattr(tensor, "emulated_pinned", False):
                self.host_waits("to(device)")
            tensor = copied
        return original(tensor, *args, **kwargs)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the place of Tensor.cpu."""
        if self.is_on_host(tensor):
            return tensor
        self.host_waits("cpu")
        with torch.utils._python_dispatch._disable_current_modes():
            return tensor.clone()

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has not been copied to the device, nor made there."""
        if getattr(tensor, "emulated_pinned", False):
            return True
        memory = self._memory.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return memory is None or memory.reference.expired()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the place of Tensor.pin_memory."""
        if tensor.layout != torch.strided:
            raise RuntimeError("cannot pin a tensor that is not dense")
        with torch.utils._python_dispatch._disable_current_modes():
            copied = tensor.clone()
        copied.emulated_pinned = True  # type: ignore[attr-defined]
        return copied


@contextmanager
def emulated_streams() -> Iterator[EmulatedStreams]:
    """Inside of the context this CPU behaves as a GPU with streams."""
    mode = EmulatedStreams()
    tensor_to, tolist, empty, build_ddp = torch.Tensor.to, torch.Tensor.tolist, torch.empty, DDPStrategy._setup_model

    def tolist_and_wait(tensor: torch.Tensor) -> Any:
        if not getattr(tensor, "emulated_pinned", False):
            mode.host_waits("tolist")
        return tolist(tensor)

    def build_ddp_beside(strategy: DDPStrategy, module: torch.nn.Module) -> Any:
        with mode.on(mode.make_stream()):  # as where it has device_ids
            return build_ddp(strategy, module)

    def empty_or_pinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        if pin_memory:
            made.emulated_pinned = True  # type: ignore[attr-defined]
        return made

    patches = {
        "torch.cuda.Stream": mode.make_stream,
        "torch.cuda.stream": mode.on,
        "torch.cuda.current_stream": lambda device=None: mode.current,
        "torch.cuda.synchronize": mode.synchronize,
        "torch.Tensor.record_stream": lambda tensor, stream: mode.record(tensor, stream),
        "torch.Tensor.pin_memory": lambda tensor, device=None: mode.pin(tensor),
        "torch.Tensor.to": functools.partialmethod(lambda tensor, *a, **k: mode.to(tensor_to, tensor, *a, **k)),
        "torch.Tensor.tolist": tolist_and_wait,
        "torch.Tensor.cpu": lambda tensor: mode.to_host(tensor),
        "torch.empty": empty_or_pinned,
        "lightning.pytorch.strategies.ddp.DDPStrategy._setup_model": build_ddp_beside,
        "lightning.fabric.utilities.apply_func._BLOCKING_DEVICE_TYPES": ("mps",),
        "lightning_distrec.gpu.is_gpu": lambda device: True,
        "lightning_distrec.gpu.is_on_gpu": lambda tensor: not mode.is_on_host(tensor),
    }
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(mode)
        yield mode


def _with_values(arguments: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(arguments):
        if i < len(args) and not argument.kwarg_only:
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _has_unknown_size(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether how large the result is depends on values: of a mask, or of how often each row is repeated."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values] if values.layout == torch.strided and not values.is_meta else []
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return [tensor for value in values.values() for tensor in _tensors(value)] if isinstance(values, dict) else []


def _place() -> str:
    """Return the innermost lines of ours that led here."""
    frame, frames = sys._getframe(2), []
    while frame is not None and len(frames) < 3:
        if "/lightning_distrec/" in frame.f_code.co_filename:
            frames.append(
                f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
            )
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(frames) or "the user's code"
