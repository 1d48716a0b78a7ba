"""What one batch tells: its samples, the bytes that a step keeps for its backward, and the lookups of tables."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_distrec.sharding.proxies import FEATURE


@dataclass(frozen=True)
class Lookups:
    """What one module with tables looks up for one rank's batch, by feature."""

    ids: Counter[str] = field(default_factory=Counter)
    """Numbers that go there: ids, and how many each bag of a collection has."""
    vectors: Counter[str] = field(default_factory=Counter)
    """Rows that come back: one for each id, or one for each bag."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What is known of one rank's batches."""

    batch_size: int | None = None
    activation_bytes: int | None = None
    """What a forward keeps for its backward, parameters aside; None: not measured."""
    lookups: dict[str, Lookups] = field(default_factory=dict)
    """Path of a module with tables -> what it looks up."""
    said: tuple[str, ...] = ()


def measure_step(module: LightningModule, batch: Any, batch_size: int | None, precision: str) -> Sample:
    """Return what a training step with this batch keeps for its backward, and looks up; gradients are thrown away.

    The module is used, on the device that it is on: its buffers may change. What cannot be measured is said.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return Sample(batch_size=batch_size, said=("activations are left out: the module is on the meta device",))
    lookups: dict[str, Lookups] = {}
    examples: list[int] = []
    autocast = torch.autocast(module.device.type, torch.bfloat16) if precision.endswith("-mixed") else nullcontext()
    try:
        with (
            _watched_lookups(module, lookups, examples),
            _kept_bytes(module) as kept,
            autocast,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # self.log without a Trainer
            loss = module.training_step(batch, 0)
            loss = loss["loss"] if isinstance(loss, dict) else loss
            activation_bytes = sum(kept.values())
            if isinstance(loss, Tensor):
                loss.backward()
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        said = f"activations are left out: training_step failed on a batch without a Trainer ({why})"
        return Sample(batch_size=batch_size, lookups=lookups, said=(said,))
    finally:
        module.zero_grad(set_to_none=True)
    if examples:  # a lookup knows better than the first tensor of a batch
        batch_size = examples[0]
    return Sample(batch_size=batch_size, activation_bytes=activation_bytes, lookups=lookups)


@contextmanager
def _kept_bytes(module: nn.Module) -> Iterator[dict[int, int]]:
    """Yield place of memory -> bytes of what autograd keeps inside of the context, parameters and buffers aside."""
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in own:
                kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@contextmanager
def _watched_lookups(module: nn.Module, lookups: dict[str, Lookups], examples: list[int]) -> Iterator[None]:
    """Count what every embedding and collection of the module looks up, and note for how many examples."""

    def watch(path: str) -> Any:
        def count(part: nn.Module, given: tuple[Any, ...], found: Any) -> None:
            told = lookups.setdefault(path, Lookups())
            if given and hasattr(given[0], "length_per_key"):
                examples.append(int(given[0].stride()))
            for feature, ids, vectors in _counted(given[0] if given else None, found):
                told.ids[feature] += ids
                told.vectors[feature] += vectors

        return count

    with ExitStack() as hooks:
        for path, part in module.named_modules():
            is_collection = hasattr(part, "embedding_bag_configs") or hasattr(part, "embedding_configs")
            if is_collection or isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                hooks.callback(part.register_forward_hook(watch(path)).remove)
        yield


def _counted(given: Any, found: Any) -> Iterator[tuple[str, int, int]]:
    """Yield feature, ids and rows of one lookup."""
    if isinstance(given, Tensor) and isinstance(found, Tensor):
        yield FEATURE, given.numel(), found.numel() // found.shape[-1]
    elif hasattr(given, "length_per_key"):  # a KeyedJaggedTensor
        is_pooled = hasattr(found, "length_per_key")  # a KeyedTensor: a row for each feature and sample
        for feature, ids in zip(given.keys(), given.length_per_key(), strict=True):
            yield feature, ids + given.stride(), given.stride() if is_pooled else ids
