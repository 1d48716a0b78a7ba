"""Gloo's groups with one thread for the sockets of all, and its all-to-all using both directions of
a link at once.

Source of the latter: gloo/alltoallv.cc, which posts the send to a rank before the receive from it.
The second of two ranks to arrive finds the first one ready and fills the socket; its own word that
it is ready then waits behind what it sends, and the first rank sends only after that. On a link of
200 Mbit/s 0.5 MB each way take 39 ms; with receives posted first, 21 ms. Can go when gloo posts
receives first.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, distributed_c10d

from lightning_distrec._compat.patches import Patches

_FIRST_TAG = 1 << 20  # beyond the tags of people's own messages


@contextlib.contextmanager
def one_socket_thread() -> Iterator[None]:
    """Let one thread serve the sockets of all gloo groups that are made meanwhile, and of those
    made in here before.

    torch starts one for each group; on busy cores the main thread waits longer the more there are.
    A default group that the program has made lends its own, so that its exchanges are served too.
    For groups in which each rank exchanges with each: they connect when they are made, whatever
    TORCH_GLOO_LAZY_INIT says. Groups that connect later mix up their ranks in such a thread, and
    hang.
    """
    with Patches() as patches:
        patches.replace(distributed_c10d, "ProcessGroupGloo", _SharedThread)
        yield


def _lent_devices() -> list[Any]:
    """Return the devices of the default group; [] where it is not gloo's, or connects late."""
    if not dist.is_initialized() or os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0":
        return []
    with contextlib.suppress(RuntimeError):  # a group for GPUs alone
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        if isinstance(backend, ProcessGroupGloo):
            return backend.options._devices  # type: ignore[no-any-return,attr-defined]
    return []


@functools.cache
def _devices(interfaces: str, process_id: int) -> list[Any]:
    """Return gloo's devices, each with a thread, of some network interfaces, by name, or of the
    default one.

    process_id: a process that is forked has no threads of the one before.
    """
    if not interfaces:
        return [ProcessGroupGloo.create_default_device(lazy_init=False)]
    return [
        ProcessGroupGloo.create_device(interface=name, lazy_init=False)
        for name in interfaces.split(",")
    ]


class _Constructor(type):
    """The type of a name that stands for ProcessGroupGloo, and makes one of its own objects."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)

    def __call__(
        cls, store: Any, rank: int, size: int, timeout: timedelta, **other_options: Any
    ) -> Any:
        gloo: Any = ProcessGroupGloo  # torch's stubs have other names
        options = gloo._Options()
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        options._devices = _lent_devices() or _devices(interfaces, os.getpid())
        options._timeout = timeout
        options._threads = 2 * len(options._devices)  # as torch has it
        for name, value in other_options.items():  # enable_reconfigure, from torch 2.14 on
            setattr(options, name, value)
        return gloo(store, rank, size, options)


class _SharedThread(metaclass=_Constructor):
    """See `one_socket_thread`."""


class _Exchange:
    """An all-to-all as messages between pairs of ranks; to be waited for as torch's work is."""

    def __init__(self, works: list[Any], sent: Sequence[Tensor]) -> None:
        self._works = works
        self._sent = sent

    def wait(self) -> bool:
        """Wait for what is sent and received. Raises RuntimeError: a rank is gone, or the group's
        limit has passed."""
        for work in self._works:
            work.wait()
        self._works = []
        self._sent = ()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` has returned."""
        return not self._works


class _Group:
    """The all-to-alls of one group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank = group.rank()
        size = group.size()
        # Each rank begins with another one, or all would send to rank 0 first.
        self._sources = [(self._rank - distance) % size for distance in range(1, size)]
        self._targets = [(self._rank + distance) % size for distance in range(1, size)]
        self._tags = itertools.count(_FIRST_TAG)
        # Until it is waited for, gloo reads and writes its memory; after an error that may be
        # never.
        self._running: list[_Exchange] = []

    def start(
        self, output: Tensor, sent: Tensor, output_sizes: list[int], sent_sizes: list[int]
    ) -> _Exchange:
        """Collective. Start to exchange chunks along dim 0."""
        group = self._group
        tag = next(self._tags)
        with torch.no_grad():
            outputs = output.split(output_sizes)
            chunks = sent.split(sent_sizes)
            # Both ends know of chunks without elements, and leave them out.
            works = [
                group.recv([outputs[rank]], rank, tag)
                for rank in self._sources
                if output_sizes[rank]
            ]
            works += [
                group.send([chunks[rank]], rank, tag) for rank in self._targets if sent_sizes[rank]
            ]
            # torchrec's empty output of a rank without rows has no columns either
            if output_sizes[self._rank]:
                outputs[self._rank].copy_(chunks[self._rank])
        exchange = _Exchange(works, (*outputs, *chunks))
        self._running = [running for running in self._running if not running.is_completed()] + [
            exchange
        ]
        return exchange


tables_dist: Any = ModuleType("torch.distributed")
"""What tables exchange by: our modules, and torchrec's during a run over several nodes. These have
another function in it, while the user's calls have torch's: that takes what no table sends, and its
work can be polled."""
vars(tables_dist).update(vars(dist))


def receive_first(node_of_rank: Sequence[int], modules: Iterable[ModuleType] = ()) -> Patches:
    """Replace tables' `all_to_all_single` with sizes, of CPU tensors over gloo, in groups of
    several nodes.

    The same bits. node_of_rank: of all ranks. modules: of torchrec, that call torch.distributed as
    `dist`.
    Within a node there is nothing to gain: its ranks wait for the cores, not for a link.
    """
    original = dist.all_to_all_single
    groups: dict[Any, _Group | None] = {}

    def find_group(group: Any) -> _Group | None:
        if group not in groups:
            nodes = {node_of_rank[rank] for rank in dist.get_process_group_ranks(group)}
            over_gloo = "cpu:gloo" in str(dist.get_backend_config(group))
            groups[group] = _Group(group) if len(nodes) > 1 and over_gloo else None
        return groups[group]

    @functools.wraps(original)
    def all_to_all_single(
        output: Tensor,
        input: Tensor,  # noqa: A002  torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if output_split_sizes and input_split_sizes and output.is_cpu:
            exchanges = find_group(dist.group.WORLD if group is None else group)
            if exchanges is not None:
                exchange = exchanges.start(output, input, output_split_sizes, input_split_sizes)
                if async_op:
                    return exchange
                exchange.wait()
                return None
        return original(
            output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op
        )

    patches = Patches()
    patches.replace(tables_dist, "all_to_all_single", all_to_all_single)
    for module in modules:
        patches.replace(module, "dist", tables_dist)
    return patches
