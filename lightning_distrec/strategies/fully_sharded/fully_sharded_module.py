"""A module, or its layers without tables, whose parameters FSDP2 shards: what a strategy does
around its steps."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_distrec._compat.torch import versions_of
from lightning_distrec._compat.torch_distributed import (
    draw_dtensors_with,
    reduces_gradients,
    sharded_and_unsharded_parameters,
    unsharded_parameter,
)
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import UnsupportedError
from lightning_distrec.optimizers.step_hooks import uniform_groups
from lightning_distrec.strategies.data_parallel.activations import CheckpointedLayers
from lightning_distrec.strategies.data_parallel.replicated_layers import (
    BroadcastSkipper,
    BufferBroadcaster,
    ReplicatedLayers,
)
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.shard_blocks import modules_in_step
from lightning_distrec.strategies.fully_sharded.shards import (
    draw_full,
    fsdp_modules,
    zero_unreduced_too,
)
from lightning_distrec.strategies.run.process_runs import PROCESS


class FullyShardedModule(ReplicatedLayers):
    """Runs the steps of a sharded module during one run. The module stays sharded between runs."""

    needs_losses = True

    def __init__(self, module: nn.Module, options: FSDPOptions, consensus: Consensus) -> None:
        self._module = module
        self._fsdp_modules = fsdp_modules(module)
        blocks: dict[str, Any] = {
            p: block for p, block in module.named_modules() if p and isinstance(block, FSDPModule)
        }
        self.activations = CheckpointedLayers(module, options.activation_checkpointing, blocks)
        self._replicated = [
            parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)
        ]
        self._gathered: list[Tensor] = []
        """The gathered forms of weights, which torch makes once, when they are gathered for the
        first time."""
        self._num_sharded = sum(isinstance(parameter, DTensor) for parameter in module.parameters())
        self._num_ungathered = self._num_sharded
        self._leaves_unreduced = False
        """Whether a backward of the strategy's has left gradients without reduction."""
        self._host_group: Any = None
        """Where ranks report what they have used: on the host, which would wait for backward on a
        GPU otherwise."""
        self._buffers: BufferBroadcaster | None = None
        self._broadcasts_buffers = self._syncs_gradients = True
        self._undo = ExitStack()
        self._undo.callback(self.activations.undo)
        for handle in _hooks_outside.pop(module, ()):
            handle.remove()
        if any(p.device.type == "cpu" for p in module.parameters() if isinstance(p, DTensor)):
            self._undo.callback(draw_dtensors_with(draw_full))

    def begin_training(
        self, optimizers: Iterable[Optimizer], consensus: Consensus
    ) -> BroadcastSkipper:
        """Broadcast rank 0's buffers before steps from now on; let zero_grad reach unreduced
        gradients."""
        self._buffers = BufferBroadcaster(self._module)
        self._host_group = consensus.group
        for optimizer in optimizers:
            self._undo.callback(
                zero_unreduced_too(optimizer, self._fsdp_modules, self._may_hold_unreduced)
            )
        return BroadcastSkipper(self._buffers, consensus.flags)

    def _may_hold_unreduced(self) -> bool:
        # By hand there may be backwards that the strategy does not see.
        return self._leaves_unreduced or not getattr(self._module, "automatic_optimization", False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of any kind. Collective where buffers are broadcast.

        Raises UnsupportedError: the step has written to weights while they were gathered.
        """
        self.reshard()  # weights may have changed since something else was computed with them
        if self._buffers is not None and self._broadcasts_buffers:
            self._buffers.broadcast()
        # As DistributedDataParallel's require_forward_param_sync: whether this step syncs gradients
        # decides whether the next one broadcasts buffers.
        self._broadcasts_buffers = torch.is_grad_enabled() and self._syncs_gradients
        if self._num_ungathered:
            # Listed once: a walk through all weights in every step would cost host time with every
            # further one.
            gathered = []
            for _, fsdp_parameter in self._fsdp_parameters():
                gathered.append(unsharded_parameter(fsdp_parameter))
            self._num_ungathered = self._num_sharded - len(gathered)
            # others have no versions
            self._gathered = [weight for weight in gathered if not weight.is_inference()]
        versions = versions_of(self._gathered)
        modules_in_step.add(self._module)
        try:
            with explained_errors(self._module):
                yield
        finally:
            modules_in_step.discard(self._module)
        self._refuse_writes(versions)
        if not torch.is_grad_enabled():
            self.reshard()

    def _refuse_writes(self, versions: list[int]) -> None:
        current = versions_of(self._gathered)
        if current == versions:
            return
        changes = [earlier != later for earlier, later in zip(versions, current, strict=True)]
        written = self._gathered[changes.index(True)]
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        name = names.get(id(written), "a weight")
        for shard, fsdp_parameter in self._fsdp_parameters():
            if unsharded_parameter(fsdp_parameter) is written:
                name = names.get(id(shard), name)
        raise UnsupportedError(
            f"a step has written to '{name}' while it was gathered (an average of weights, "
            "max_norm), and the write is lost. Write between steps, where each rank writes its "
            "shard, or use 'ddp_tuned'."
        )

    def _fsdp_parameters(self) -> Iterator[tuple[Any, Any]]:
        return itertools.chain.from_iterable(
            map(sharded_and_unsharded_parameters, self._fsdp_modules)
        )

    def reshard(self) -> None:
        """Free what is gathered, so that the module's parameters are the shards."""
        for module in self._fsdp_modules:
            module.reshard()

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around an optimizer's step, over sharded and replicated parameters; frees gathered ones,
        which are stale."""
        with uniform_groups(optimizer), explained_errors(self._module):
            yield
        self.reshard()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around backward. Collective, unless gradients accumulate: averages those of replicated
        parameters."""
        with explained_errors(self._module):
            yield
        # Asked of torch, since users may set it themselves. For good: each optimizer drops those of
        # its own parameters.
        self._leaves_unreduced |= not all(map(reduces_gradients, self._fsdp_modules))
        if self._syncs_gradients:
            self._average_replicated()

    def _average_replicated(self) -> None:
        # A parameter that any rank has used gets a gradient on all ranks; ranks that have not used
        # it count as 0.
        trained = [parameter for parameter in self._replicated if parameter.requires_grad]
        if not trained or dist.get_world_size() == 1:
            return
        used = torch.tensor(
            [parameter.grad is not None for parameter in trained], dtype=torch.int32
        )
        dist.all_reduce(used, group=self._host_group)
        for parameter in itertools.compress(trained, used.tolist()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(dist.get_world_size())
            dist.all_reduce(parameter.grad)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on each rank inside of the context."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, syncs: bool) -> None:
        self._syncs_gradients = syncs
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(syncs, recurse=False)

    def teardown(self) -> None:
        """Stop broadcasting buffers, restore the optimizers' zero_grad, and leave nothing
        gathered."""
        self._buffers = None
        self._undo.close()
        self.reshard()
        sharded = [
            (path, child)
            for path, child in self._module.named_modules()
            if issubclass(type(child), FSDPModule)
        ]
        _hooks_outside[self._module] = [
            # Before FSDP2's own hook, which gathers the block's weights.
            block.register_forward_pre_hook(
                _meeting_ranks(path or type(block).__name__), prepend=True
            )
            for path, block in sharded
        ]


_hooks_outside: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
"""Module -> what meets the other ranks when its blocks are called between runs."""


def _meeting_ranks(path: str) -> Callable[..., None]:
    # No partial: `undo_fully_shard` knows hooks of ours by their module, and TorchScript asks for
    # their names.
    def meet_ranks(*_: Any) -> None:
        PROCESS.calls_outside.meet(path)

    return meet_ranks


@contextmanager
def explained_errors(module: nn.Module) -> Iterator[None]:
    """Around a step, its backward and its update: explain torch's errors about sharded parameters,
    and what to do."""
    try:
        yield
    except RuntimeError as error:
        for words, explanation in EXPLANATIONS.items():
            if words in str(error):
                sharded = []
                for name, parameter in module.named_parameters():
                    if isinstance(parameter, DTensor):
                        sharded.append(name)
                names = f"Sharded are: {', '.join(sharded[:5])}{' ...' if sharded[5:] else ''}."
                raise UnsupportedError(f"{explanation} {names}") from error
        raise


OTHER_BLOCKS = "Name other blocks, wrap=[...]; wrap=[] gathers all for the whole step."
NO_DTENSORS = (
    "a step or an optimizer computes something over sharded parameters that torch's DTensor "
    "cannot. Use strategy='ddp_tuned', or another optimizer."
)
EXPLANATIONS = {
    "mixed torch.Tensor and DTensor": "a step uses the weights of a block without calling it "
    "(block.layer(x), block.weight, a sum over self.parameters()): they are gathered when the "
    f"block itself is called. To clip by hand, use self.clip_gradients. {OTHER_BLOCKS}",
    "requiring a storage size": "backward needs weights of a block that have been freed: backward "
    "ran twice (gradients of gradients), or the block returns tensors inside of an object that "
    f"torch cannot look into. {OTHER_BLOCKS}",
    "Sharding propagation failed": NO_DTENSORS,
    "require placement changes": NO_DTENSORS,
}
"""Words of torch's error -> what it means."""
