"""Proxies: what stands in the module tree while tables are sharded, with this rank's shards for
weights.

Everything that walks the tree (optimizers, weight averages, state_dict, DDP) finds the names that
it would find unsharded, and leaves that are this rank's shards. torchrec's sharded modules, which
hold the kernels, are not in it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.jit import is_tracing
from torchrec.distributed.types import ShardedModule, ShardedTensor
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_distrec._compat.torch import share_hooks
from lightning_distrec._compat.torchrec_modules import note_device
from lightning_distrec.chunks import refuse_module, refuse_pickling
from lightning_distrec.errors import IdsError, ShardedWeightError, ShardingError
from lightning_distrec.sharding.calls import FEATURE, bags_call, rows_call
from lightning_distrec.sharding.mapping.state import HoldsMappings
from lightning_distrec.sharding.weights.shard_access import refusal
from lightning_distrec.sharding.weights.shard_weight import ShardWeight


class _StateOfTable(ShardedTensor):
    """A table in a state_dict: torch's sharded tensor, whose errors name the table and what to call
    instead."""

    table_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except (RuntimeError, TypeError) as error:
            name = "a table"
            for value in reversed((*args, *(kwargs or {}).values())):
                name = getattr(value, "table_name", name)
            raise ShardingError(
                f"'{name}' in a state_dict is all ranks' shards of a table, and {func.__name__} "
                f"needs all of its rows. trainer.strategy.full_parameter('{name}') returns them on "
                "every rank, full_state_dict() all weights on rank 0."
            ) from error


class _RefusesQuantizing:
    """Refuses torch's quantization of modules, which gives every module that it looks at this
    attribute.

    It would take a sharded collection for a module that it does not know, and leave its tables as
    they are.
    """

    path: str

    @property
    def qconfig(self) -> Any:
        """What the unsharded module had."""
        if "qconfig" not in vars(self):
            raise AttributeError("qconfig")
        return vars(self)["qconfig"]

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        refuse_module("quantized", self.path)


class ShardedProxy(_RefusesQuantizing, HoldsMappings):
    """What all kinds have in common: attributes of the original, weights of the shards, no weight
    to read."""

    path: str
    """Of the collection or embedding in the LightningModule."""
    lookup: Callable[[Callable[[], Any]], Any]
    """The ShardedLookup, which is given what makes the features. Set with every run; it stays after
    the run's end."""
    prefetched: Any
    """The Prefetcher (prefetch/prefetcher.py) while a run that prefetches goes on, else None."""
    keys: dict[str, str]
    """Name of a weight in the unsharded module's state_dict -> its name in that of torchrec's
    module."""
    sharded_state_dict: Callable[[], Mapping[str, Any]]
    load: Callable[[str, Tensor], str]
    """Loads a table, by its name in the state_dict of torchrec's module; returns what is wrong, or
    ""."""

    def features(self, *args: Any) -> Any:
        """Return the KeyedJaggedTensor that a call with these arguments looks up."""
        return args[0]

    def output(self, looked_up: Any, *args: Any) -> Any:
        """Return what a call with these arguments returns, given what was looked up for them."""
        return looked_up

    def _call(self, *args: Any) -> Any:
        if is_exporting() or is_tracing():
            refuse_module("exported or traced", self.path)
        return self._look_up(*args)

    # Graphs of torch.compile end here: what is prefetched, and what other ranks send, cannot be in
    # one.
    @torch.compiler.disable
    def _look_up(self, *args: Any) -> Any:
        looked_up = None if self.prefetched is None else self.prefetched.take(self.path, args)
        if looked_up is None:
            # Features are made inside of the lookup, where other ranks wait: it sends them what
            # fails in making these.
            looked_up = self.lookup(partial(self._features_or_failure, *args))
        return self.output(looked_up, *args)

    def _features_or_failure(self, *args: Any) -> Any:
        if self.prefetched is not None:
            self.prefetched.differing.raise_in_lookup()
        return self.features(*args)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the tables as ShardedTensors, under the names that they have unsharded."""
        destination = {} if destination is None else destination
        # Not nn.Module's: it would save this rank's shards under the names of full tables.
        state = self.sharded_state_dict()
        for key, name in self.keys.items():
            value = state[name]  # of a data-parallel table, a plain tensor with all of it
            if isinstance(value, ShardedTensor):
                value.__class__ = _StateOfTable
                refuse_pickling(value, f"{self.path}.{key}").table_name = f"{self.path}.{key}"
            destination[f"{prefix}{key}"] = value
        self.put_mappings(destination, prefix)
        return destination

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_module("pickled", self.path)

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script, and Lightning's to_torchscript."""
        refuse_module("scripted", self.path)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local: Any,
        _: bool,
        missing: list[str],
        *problems: list[str],
    ) -> None:
        """Load this rank's shards from unsharded tables, or from what `state_dict` returned."""
        if local.get("assign_to_params_buffers"):
            raise replaced(
                f"weights of the sharded '{self.path}' (load_state_dict with assign=True)"
            )
        # nn.Module.load_state_dict calls this for each module. Children skip it, so that each table
        # is loaded once.
        *_unexpected, errors = problems
        for key, name in self.keys.items():
            full_key = f"{prefix}{key}"
            if full_key not in state_dict:
                missing.append(full_key)
                continue
            problem = self.load(name, state_dict[full_key])
            if problem:
                errors.append(f"{full_key}: {problem}")
        self.load_mappings(state_dict, prefix, missing, errors)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # No error yet: StochasticWeightAveraging copies the module at setup, whether or not it
        # calls the copy.
        return _WithoutRows(self.path)


class _WithoutRows(_RefusesQuantizing, nn.Module):
    """What a deep copy of a module has in place of a proxy: one rank cannot copy rows that other
    ranks hold."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: Any, **options: Any) -> Any:
        raise ShardingError(
            "a copy of a module with sharded tables was called; its tables hold no rows. Call "
            "trainer.strategy.unshard() on every rank after the run, and copy the module then; or "
            "load a checkpoint into a new one."
        )


def replaced(subject: str) -> ShardedWeightError:
    """Return the error for what was put in the place of a shard, or of a module that has some."""
    return ShardedWeightError(
        f"another one is to take the place of the {subject}: no lookup would read it, and no "
        "optimizer train it. Copy rows into the weight, which is exact in every hook: 'with "
        "torch.no_grad(): embedding.weight.copy_(rows)', or 'embedding.weight.data = rows'. Or "
        "replace it in __init__, setup or configure_model."
    )


class _GuardedWeight(nn.Module):
    """Has a weight for optimizers, and for elementwise operations; reading it otherwise raises."""

    table: str

    def __getattr__(self, name: str) -> Any:
        # Parameters are not in `__dict__`, so that Python asks __getattr__ at every read of
        # `.weight`.
        weight = super().__getattr__(name)
        if name == "weight" and not (
            isinstance(weight, ShardWeight) and weight.place.table.has_single_shards
        ):
            raise refusal(self.table, "weight", ".weight")
        return weight

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not self.__dict__.get("_parameters", {}).get(name, value):
            self._refuse_to_replace(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._parameters:
            self._refuse_to_replace(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a shard, once. Raises ShardedWeightError: something is to take its place."""
        if param is not self._parameters.get(name, param):
            self._refuse_to_replace(name)
        super().register_parameter(name, param)

    def _refuse_to_replace(self, name: str) -> NoReturn:
        raise replaced(f"{name} of the sharded table '{self.table}'")

    def _load_from_state_dict(self, *_: Any) -> None:
        """Do nothing: the proxy around it loads its weight."""


class _ShardedBags(_GuardedWeight, nn.EmbeddingBag):
    """One table of an EmbeddingBagCollection, for what looks for embeddings and draws their
    weights."""


class _ShardedRows(_GuardedWeight, nn.Embedding):
    """One table of an EmbeddingCollection."""


class ShardedBagCollection(ShardedProxy, EmbeddingBagCollection):
    """Called as EmbeddingBagCollection; the bags come from the ranks that hold their rows."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Collective. Return the bags of `features` as the unsharded collection does."""
        return self._call(features)  # type: ignore[no-any-return]


class ShardedCollection(ShardedProxy, EmbeddingCollection):
    """Called as EmbeddingCollection; the rows come from the ranks that hold them."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Collective. Return the rows of `features` as the unsharded collection does."""
        return self._call(features)  # type: ignore[no-any-return]


class _PlainProxy(ShardedProxy, _GuardedWeight):
    """A proxy of an nn.Embedding or nn.EmbeddingBag."""

    weight_dtype: torch.dtype

    def _in_weight_dtype(self, looked_up: Tensor) -> Tensor:
        # The Trainer's precision decides about float32.
        return looked_up if self.weight_dtype == torch.float32 else looked_up.to(self.weight_dtype)


class ShardedEmbedding(_PlainProxy, nn.Embedding):
    """Called as nn.Embedding; the rows come from the ranks that hold them."""

    def forward(self, input: Tensor) -> Tensor:
        """Collective. Look up `input`, of any shape; returns (*input.shape, embedding_dim)."""
        return self._call(input)  # type: ignore[no-any-return]

    def features(self, input: Tensor) -> KeyedJaggedTensor:
        """Return the ids as one bag. Raises IdsError: they are no integers."""
        return rows_call(self.path, input)

    def output(self, looked_up: dict[str, JaggedTensor], input: Tensor) -> Tensor:
        """Return the rows in the shape of the ids."""
        rows = looked_up[FEATURE].values()
        if self.padding_idx is not None:  # its row is looked up and does not learn
            rows = torch.where(
                (input.flatten() == self.padding_idx).unsqueeze(1), rows.detach(), rows
            )
        return self._in_weight_dtype(rows.view(*input.shape, self.embedding_dim))


class ShardedEmbeddingBag(_PlainProxy, nn.EmbeddingBag):
    """Called as nn.EmbeddingBag; the bags come from the ranks that hold their rows."""

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Collective. Look up bags: `input` (num_bags, bag_size), or (num_ids,) with `offsets`;
        (num_bags, dim)."""
        return self._call(input, offsets, per_sample_weights)  # type: ignore[no-any-return]

    def features(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Return the bags without ids that are padding. Raises IdsError: shapes or types do not
        fit."""
        if per_sample_weights is not None and self.mode != "sum":
            raise IdsError(
                f"'{self.path}' was called with per_sample_weights; they need mode='sum', not "
                f"'{self.mode}'."
            )
        return bags_call(
            self.path,
            input,
            offsets,
            per_sample_weights,
            self.padding_idx,
            self.include_last_offset,
        )

    def output(self, looked_up: KeyedTensor, *_: Tensor | None) -> Tensor:
        """Return the bags, (num_bags, dim)."""
        return self._in_weight_dtype(looked_up.values())


KINDS: dict[type[nn.Module], type[ShardedProxy]] = {
    EmbeddingBagCollection: ShardedBagCollection,
    EmbeddingCollection: ShardedCollection,
    nn.Embedding: ShardedEmbedding,
    nn.EmbeddingBag: ShardedEmbeddingBag,
}


def _kind_of(original: type[nn.Module]) -> type[ShardedProxy]:
    """Return the class of a proxy; it inherits from a subclass of nn.Embedding, whose methods are
    then there."""
    kind = next(KINDS[base] for base in original.__mro__ if base in KINDS)
    if original in KINDS:
        return kind
    # isinstance finds the user's class, and our methods come first in the order of resolution.
    return type(original.__name__, (kind, original), {"__module__": original.__module__})


@dataclass(frozen=True)
class ProxyWeight:
    """What a proxy has in the place of one weight."""

    table: str
    sharded_key: str
    """The weight's name in the state_dict of torchrec's module."""
    shards: list[nn.Parameter]
    """This rank's shards, which are registered as "weight", "weight_1", ..."""


def make_proxy(
    original: nn.Module,
    path: str,
    sharded: ShardedModule,
    weights: Mapping[str, ProxyWeight],
    load: Callable[[str, Tensor], str],
) -> ShardedProxy:
    """Return the module that is called as `original` was; its `lookup` is still to be set.

    path: where `original` is in the LightningModule. weights: by their names in the state_dict of
    `original`.
    load: loads one table, by its name in the state_dict of `sharded`; returns what is wrong, or "".
    """
    proxy: Any = _with_attributes(_kind_of(type(original)), original)
    share_hooks(original, proxy)
    # Only the bound method of torchrec's module is kept: the module itself would become a child,
    # and its parameters would be found by optimizers and DDP.
    proxy.path = path
    proxy.load = load
    proxy.sharded_state_dict = sharded.state_dict
    proxy.keys = {key: weight.sharded_key for key, weight in weights.items()}
    proxy.prefetched = None
    proxy.mappings = {}
    if isinstance(proxy, _PlainProxy):
        proxy.weight_dtype = original.weight.dtype  # type: ignore[assignment, union-attr]
    for key, weight in weights.items():
        _register(proxy, original, key, weight)
    if not isinstance(proxy, _PlainProxy):
        note_device(proxy)
    return proxy  # type: ignore[no-any-return]


def _with_attributes(kind: type[nn.Module], original: nn.Module) -> nn.Module:
    """Return a module of a class with the attributes of `original`, without its parameters and
    children."""
    # Not by the constructor of its class, which would build a table. Attributes are copied past
    # nn.Module's __setattr__, since the user's own may be anything; nn.Module's registries
    # (parameters, children) are not.
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    registries = set(vars(module))
    for name, value in vars(original).items():
        if name not in registries:
            module.__dict__[name] = value
    module.training = original.training
    return module


def _register(module: nn.Module, original: nn.Module, key: str, weight: ProxyWeight) -> None:
    # The same path of modules as unsharded, so that names in state_dicts and param groups stay.
    *path, name = key.split(".")  # "weight", or "embedding_bags.<table>.weight"
    for depth, child in enumerate(path):
        original = original.get_submodule(child)
        kind = _ShardedBags if isinstance(original, nn.EmbeddingBag) else _ShardedRows
        if child not in dict(module.named_children()):
            new = nn.ModuleDict() if depth == 0 else _with_attributes(kind, original)
            module.add_module(child, new)
        module = module.get_submodule(child)
    if isinstance(module, _GuardedWeight):
        module.table = weight.table
    for i, shard in enumerate(weight.shards):
        module.register_parameter(name if i == 0 else f"{name}_{i}", shard)


def replace_modules(root: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put each value wherever its key is in `root`: a collection with several names keeps them
    all."""
    # A list, since the loop changes the tree that named_modules walks through.
    for path, module in list(root.named_modules(remove_duplicate=False)):
        if module in new:
            parent, _, name = path.rpartition(".")
            setattr(root.get_submodule(parent), name, new[module])
