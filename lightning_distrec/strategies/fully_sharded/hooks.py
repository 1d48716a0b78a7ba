"""Lightning's hooks around a module, or the part of one without tables, that is fully sharded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec.strategies.fully_sharded.fully_sharded_module import FullyShardedModule, full_value
from lightning_distrec.strategies.fully_sharded.shard_blocks import reshard
from lightning_distrec.strategies.run.strategy import DistRecStrategy


class ShardedHooks(DistRecStrategy):
    """A strategy whose module, or its layers without tables, FSDP2 may shard."""

    _sharded: FullyShardedModule | None = None

    @contextmanager
    @override
    def around_step(self, args: tuple[Any, ...], has_backward: bool) -> Iterator[None]:
        with nullcontext() if self._sharded is None else self._sharded.step():
            yield

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync() if self._sharded is None else self._sharded.no_sync():
            yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with nullcontext() if self._sharded is None else self._sharded.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return super().reduce(full_value(tensor), *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with nullcontext() if self._sharded is None else self._sharded.optimizer_step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def end_sharded(self) -> None:
        """Undo what the run has changed around a sharded module, which stays sharded."""
        if self._sharded is not None:
            self._sharded.teardown()
        self._sharded = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.lightning_module is not None:
            reshard(self.lightning_module)
        return super().lightning_module_state_dict()

    @override
    def release(self) -> None:
        self._sharded = None
        super().release()
