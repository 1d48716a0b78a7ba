"""What a step does besides computing: it draws at random, and logs. Both must be alike on all ranks
of a pipeline."""

import copy
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_distrec import gpu
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import UnsupportedError

LogCall = dict[str, Any]
"""The arguments of self.log."""
METRIC = "metric of the module"
"""In place of a Metric: the key under which its path is sent."""


class StepDraws:
    """Seeds what a step draws, and leaves the rank's own generators as they were.

    Every rank runs the user's step up to the chain, and the last one runs it to its end: they must
    draw the same there. Samplers, which draw between steps, must not differ because one stage has
    more dropout than another. A step's seed is made of its number and of torch's generator, whose
    state checkpoints hold, so that a resumed run draws the same.
    """

    def __init__(self, messages: Consensus) -> None:
        self._messages = messages
        self._is_first = True
        self.seed = 0
        """That of the step."""

    def begin_step(self, *number: int) -> None:
        """Collective for the first step. Begin a step."""
        state = torch.get_rng_state()
        if self._is_first:  # a job that does not seed itself has a different state on each rank
            self._is_first = False
            state = self._messages.all_gather(state)[0]
            torch.set_rng_state(state)
        # A checksum, as Python's hash of bytes and strings differs between processes.
        self.seed = crc32(state.numpy().tobytes(), crc32(repr(number).encode()))

    @contextmanager
    def seeded(self, part: int) -> Iterator[Callable[[], bool]]:
        """Seed a part of a step. Yields a function to call at its end, which returns whether the
        part has drawn.

        part: 0 and up: the user's step of a micro-batch; below 0: the blocks of a rank.
        """
        # The hash of integers is the same in all processes; numpy takes seeds of 32 bits.
        seed = hash((self.seed, part)) % 2**32

        def has_drawn() -> bool:
            states = _generator_states()
            _seed_generators(seed)
            return states != _generator_states()

        with isolate_rng():
            _seed_generators(seed)
            yield has_drawn


def _seed_generators(seed: int) -> None:
    # torch.manual_seed formats the stack for each kind of device that has not begun.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def _generator_states() -> tuple[Any, ...]:
    on_device = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b""
    return (
        on_device,
        torch.get_rng_state().numpy().tobytes(),
        repr(numpy.random.get_state()),
        random.getstate(),
    )


class LoggedValues:
    """Records calls of a module's `log`, and repeats them."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        # Of the class: on the instance `recorded` puts a function that takes any arguments.
        self._signature = inspect.signature(type(module).log)
        if any(isinstance(submodule, Metric) for submodule in module.modules()):
            # The last stage alone updates them; the others add states without any update, as they
            # should.
            warnings.filterwarnings(
                "ignore", "The ``compute`` method of metric .* was called before", UserWarning
            )

    @contextmanager
    def recorded(self) -> Iterator[list[LogCall]]:
        """Record what the module logs inside of the context, instead of logging it."""
        calls: list[LogCall] = []

        def record(*args: Any, **kwargs: Any) -> None:
            arguments = self._signature.bind(self._module, *args, **kwargs).arguments
            calls.append({name: value for name, value in arguments.items() if name != "self"})

        # On the instance, so that log_dict, which calls self.log, is recorded too; deleting it
        # uncovers the method.
        self._module.log = record  # type: ignore[method-assign]
        try:
            yield calls
        finally:
            del self._module.log

    @contextmanager
    def metrics_unchanged(self) -> Iterator[None]:
        """Set the module's Metrics back after the context, in which a step runs once more."""
        metrics = []
        for submodule in self._module.modules():
            if isinstance(submodule, Metric):
                metrics.append(submodule)
        # In its __dict__: a Metric's update and compute are wrapped on the instance, and are no
        # state.
        states = []
        for metric in metrics:
            values = {name: value for name, value in vars(metric).items() if not callable(value)}
            states.append({name: copy.deepcopy(value) for name, value in values.items()})
        try:
            yield
        finally:
            for metric, state in zip(metrics, states, strict=True):
                vars(metric).update(state)

    def mean_calls(self, per_part_calls: Sequence[Sequence[LogCall]]) -> list[LogCall]:
        """Return the calls of a step: the mean over its micro-batches, which are of one size, on
        the values' device.

        Raises UnsupportedError: they have logged different names, or a call has an argument that is
        no plain value.
        """
        names = [call["name"] for call in per_part_calls[0]]
        for calls in per_part_calls:
            if [call["name"] for call in calls] != names:
                raise UnsupportedError(
                    "training_step logs different names in different micro-batches. Log the same, "
                    "or use schedule='gpipe'."
                )
        return list(map(self._mean_call, zip(*per_part_calls, strict=True)))

    def _mean_call(self, calls: Sequence[LogCall]) -> LogCall:
        first = calls[0]
        value = first["value"]
        plain = {key: argument for key, argument in first.items() if key != "value"}
        for key, argument in plain.items():
            if argument is not None and not isinstance(argument, (bool, int, float, str)):
                call = f"self.log({first['name']!r}, {key}={argument!r})"
                raise UnsupportedError(
                    f"{call}: the stages are sent plain values. Leave {key} out, or give a string."
                )
        # A Metric cannot be sent. Every rank has its own at the same path, and Lightning computes
        # it over all ranks.
        if isinstance(value, Metric):
            path = next(
                (path for path, submodule in self._module.named_modules() if submodule is value),
                None,
            )
            if path is None:
                name = first["name"]
                raise UnsupportedError(
                    f"self.log({name!r}) of a Metric that is not in the module. Make it an "
                    "attribute."
                )
            return {**plain, METRIC: path}
        # In float64: sums of integers and of 16-bit values would lose digits.
        values = torch.stack([torch.as_tensor(call["value"]).detach().double() for call in calls])
        dtype = torch.as_tensor(value).dtype
        return {
            **plain,
            "value": values.mean(0).to(dtype if dtype.is_floating_point else torch.float32),
        }

    def repeat(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Log on this rank what the last stage has recorded."""
        # Lightning keeps values where they are, and sync_dist reduces them there, which NCCL does
        # on GPUs only.
        for arguments in to_device(list(map(dict, calls)), self._module.device):
            if METRIC in arguments:
                arguments["value"] = self._module.get_submodule(arguments.pop(METRIC))
            self._module.log(**arguments)


def on_host(value: Any) -> Any:
    """Return a value with its tensors on the host, detached; those on a GPU come in one copy, for
    which this waits."""
    return _move_as_bytes(value, gpu.is_on_gpu, Tensor.cpu)


def to_device(
    value: Any, device: torch.device, selects: Callable[[Tensor], bool] = lambda _: True
) -> Any:
    """Return a value with its tensors on the host on `device`; a GPU gets them in one copy, for
    which nothing waits."""
    if gpu.is_gpu(device):
        return _move_as_bytes(
            value, selects, lambda data: data.pin_memory().to(device, non_blocking=True)
        )
    return apply_to_collection(
        value, Tensor, lambda tensor: tensor.to(device) if selects(tensor) else tensor
    )


def _move_as_bytes(
    value: Any, selects: Callable[[Tensor], bool], move: Callable[[Tensor], Tensor]
) -> Any:
    """Return a value with the selected tensors moved as one tensor of bytes; all are detached."""
    tensors: list[Tensor] = []
    apply_to_collection(
        value, Tensor, lambda tensor: tensors.append(tensor) if selects(tensor) else None
    )
    # so that each begins at a multiple of its elements' size
    tensors.sort(key=Tensor.element_size, reverse=True)
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    moved = move(torch.cat(parts)).split(list(map(len, parts))) if parts else ()
    copies = {}
    for old, new in zip(tensors, moved, strict=True):
        copies[id(old)] = new.view(old.dtype).view(old.shape)
    return apply_to_collection(
        value, Tensor, lambda tensor: copies.get(id(tensor), tensor.detach())
    )
