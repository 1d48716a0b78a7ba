"""Finds the embedding tables of a module. What is done with each module of TorchRec that has to do
with embeddings:

- **Sharded**: `EmbeddingBagCollection`, `EmbeddingCollection`, `nn.EmbeddingBag`, `nn.Embedding`.
- **Their tables are sharded**, what is computed of rows is on every rank, and a `FeatureProcessor`
  learns: `FeatureProcessedEmbeddingBagCollection`, `EmbeddingTower`, `EmbeddingTowerCollection`,
  `PECEmbeddingCollection`.
- **Sharded with their mapping**: `ManagedCollisionEmbeddingBagCollection`,
  `ManagedCollisionEmbeddingCollection`, `McEmbeddingBagCollectionAdapter`,
  `McEmbeddingCollectionAdapter`. So are `HashZchManagedCollisionModule`,
  `MCHManagedCollisionModule` and `ManagedCollisionCollection` in them; elsewhere, and as subclasses
  (`ManagedCollisionModule`, `BaseManagedCollisionEmbeddingCollection`), an error on several ranks.
- **Refused**: `FusedEmbeddingBagCollection`, `FusedEmbeddingCollection`. Each rank would update its
  rows by itself: use the collection without `Fused`.
- **Replicated: unsharded, they prune nothing**: `ITEPEmbeddingBagCollection`,
  `ITEPEmbeddingCollection` (`GenericITEPModule`, `RowwiseShardedITEPModule`).
- **Replicated: buffers, of which every rank gets rank 0's values**: `TensorPool`,
  `KeyedJaggedTensorPool` (`ObjectPool`, `KeyedJaggedTensorPoolLookup`, `TensorPoolLookup`).
- **Replicated: they may compute something else**: `DebugEmbeddingBagCollection`,
  `DebugEmbeddingCollection`, subclasses of `EmbeddingBagCollection`, `EmbeddingCollection`,
  `EmbeddingBagCollectionInterface` and `EmbeddingCollectionInterface`.
- **Replicated: they are for inference**: modules of `torchrec.quant`, such as
  `QuantManagedCollisionEmbeddingCollection` and `QuantManagedCollisionEmbeddingBagCollection`.
- **Layers on every rank**, where weights of ids get their gradients: `PositionWeightedModule`,
  `PositionWeightedModuleCollection`, `PositionWeightedProcessor`, `FeatureProcessorsCollection`,
  `FeatureProcessorDictWrapper`, `BaseFeatureProcessor`, `BaseGroupedFeatureProcessor`,
  `KTRegroupAsDict`, `PermuteMultiEmbedding`, `ComputeKJTToJTDict`, interaction layers.
- **`KeyedJaggedTensor`** with `inverse_indices`: bags are expanded by them as unsharded, rows of an
  `EmbeddingCollection` are not. On GPUs each bag is sent once, where tables are table_wise or
  column_wise and updated by FBGEMM's SGD or row-wise Adagrad. Otherwise features are padded with
  empty bags to one batch size. Without `inverse_indices` unequal batch sizes are an error.
- **`TensorDict`**: taken as a `KeyedJaggedTensor` of its entries, in their order; its ids are not
  prefetched.
- **`quantize_embeddings`, `quantize_inference_model`**: an error while tables are sharded; call
  `trainer.strategy.unshard()` first.

What is replicated is on every rank as it is, and the start table says why.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule

from lightning_distrec._compat.torch import have_gradient_hooks
from lightning_distrec._compat.torchrec_modules import COLLISIONS, EMBEDDINGS, modules_of
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.mapping.spec import MappingSpec, specs_of
from lightning_distrec.sharding.mapping.state import finds_rows
from lightning_distrec.sharding.plain_embeddings import (
    NO_CONVERSION,
    WATCH,
    Conversion,
    PlainEmbeddings,
)
from lightning_distrec.sharding.proxies import ShardedProxy
from lightning_distrec.sharding.weights.shard_operations import words

CALLERS = words("""
    FeatureProcessedEmbeddingBagCollection EmbeddingTower EmbeddingTowerCollection
    PECEmbeddingCollection McEmbeddingCollectionAdapter McEmbeddingBagCollectionAdapter
""")
"""Modules of torchrec.modules that do no more with their collections than call them."""
_OF_TORCHREC = "torchrec.modules."
FUSED = ("FusedEmbeddingBagCollection", "FusedEmbeddingCollection")
"""Those that update tables of their own inside of backward."""
_POOL = (
    "is made of buffers, of which every rank gets rank 0's values: what other ranks write to it is "
    "lost"
)
_PRUNES = (
    "prunes rows inside of TorchRec's own sharded module only, on a GPU; here it looks up and "
    "prunes nothing"
)
UNSHARDED = {
    **dict.fromkeys(("TensorPool", "KeyedJaggedTensorPool"), _POOL),
    **dict.fromkeys(("ITEPEmbeddingBagCollection", "ITEPEmbeddingCollection"), _PRUNES),
}
"""Those for which TorchRec has a sharder, and that stay on every rank, and why. A contract test
looks for others."""

Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection

MANAGED = (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)
MAPS_IDS = (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionCollection,
    ManagedCollisionModule,
)
"""What maps ids to rows by itself while it is unsharded."""

_NOT_TRAINED = {
    "num_embeddings_post_pruning": "It counts when TorchRec quantizes for inference; a table is "
    "trained with all its rows. Leave it out, and set it in the configuration that you quantize.",
    "use_virtual_table": "TorchRec trains such tables in its own key-value kernels only, and "
    "unsharded as any other. Leave it out; for ids of any range set ids='dynamic' for the table, "
    "or use a ManagedCollisionEmbeddingCollection.",
}
"""Settings of a table that its training cannot follow, and what to do."""
SMALL_ROWS = 2**31
"""Ids are sent as 32-bit numbers where no table of the collection has more rows."""


@dataclass(frozen=True)
class Table:
    """One embedding table of an unsharded module."""

    collection: str
    """Path of the collection in the LightningModule, for example "model.ebc"."""
    config: BaseEmbeddingConfig
    module: Collection
    plain: nn.Embedding | nn.EmbeddingBag | None = None
    """The user's own module where it is no collection; `module` then is a collection around its
    weight."""
    mapping: MappingSpec | None = None
    """How ids get rows; None: an id is the number of its row."""
    collisions: nn.Module | None = None
    """torchrec's ManagedCollisionCollection that maps the ids while the table is unsharded."""

    @property
    def original(self) -> nn.Module:
        """The module that the user's module tree holds while the table is unsharded."""
        return self.module if self.plain is None else self.plain

    @property
    def name(self) -> str:
        """The name in the table's config; unique within its collection."""
        return self.config.name

    @property
    def full_name(self) -> str:
        """Collection and name, or the path of a plain embedding; unique within the
        LightningModule."""
        return f"{self.collection}.{self.name}" if self.plain is None else self.collection

    @property
    def num_ids(self) -> int:
        """Ids are below it."""
        return self.config.num_embeddings if self.mapping is None else self.mapping.limit

    @property
    def pooled(self) -> bool:
        """Whether the table returns one vector per bag (EmbeddingBagCollection) or one per id."""
        return isinstance(self.module, EmbeddingBagCollection)

    @property
    def local_key(self) -> str:
        """Name of the weight in the collection's own state_dict."""
        return f"{'embedding_bags' if self.pooled else 'embeddings'}.{self.name}.weight"

    @property
    def original_key(self) -> str:
        """Name of the weight in the state_dict of `original`."""
        return self.local_key if self.plain is None else "weight"

    @property
    def key(self) -> str:
        """Name of the weight in the LightningModule's state_dict."""
        return f"{self.collection}.{self.original_key}"

    @property
    def parameter(self) -> nn.Parameter:
        """The unsharded weight, (num_rows, dim)."""
        return self.module.get_parameter(self.local_key)


@dataclass(frozen=True)
class FoundTables:
    """The tables of a module, and the modules that were left alone."""

    tables: list[Table]
    left_alone: dict[str, str]
    """Path -> reason, for modules that hold tables and are not sharded."""
    odd_tables: list[Table] = field(default_factory=list)
    """The tables of collections in `left_alone` that FBGEMM has no rows for; see `odd_dim`."""


def find_tables(module: nn.Module, conversion: Conversion = NO_CONVERSION) -> FoundTables:
    """Return every table below `module` that can be sharded, in the order of `named_modules`.

    conversion: which nn.Embedding and nn.EmbeddingBag are taken too; see plain_embeddings.py.
    EmbeddingBagCollection and EmbeddingCollection are taken by exact type: a subclass may compute
    something else. Modules of torchrec.modules that wrap such collections are left alone where they
    do more than call them, and so are collections with a dim that is no multiple of 4.
    Raises ShardingError: two tables that share one weight; a table whose data type FBGEMM cannot
    train, or that another kind of collection updates by itself.
    """
    tables: list[Table] = []
    odd_tables: list[Table] = []
    left_alone: dict[str, str] = {}
    skipped: list[str] = []
    plain = PlainEmbeddings(module, conversion)
    # named_modules yields a collection with several names once, under the first one.
    for path, child in module.named_modules():
        if any(map(path.startswith, skipped)):
            continue
        if finds_rows(child):
            raise ShardingError(
                f"'{path}' has ids: dynamic, and was made an ordinary module after a run: new ids "
                "would get no rows. Load the run's checkpoint into a new module."
            )
        if isinstance(child, ShardedProxy):
            skipped.append(f"{path}.")
        elif type(child) in MANAGED:
            # At the root the prefix is empty, so that nothing else is looked at.
            skipped.append(f"{path}." if path else "")
            managed = _managed_tables(path, child)
            if isinstance(managed, str):
                left_alone[path] = managed
            else:
                tables += managed
        elif isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            table = plain.take(path, child)
            if isinstance(table, str):
                left_alone[path] = table
            elif table is not None:
                tables.append(Table(path, _configs(table)[0], table, child))
        elif type(child) in (EmbeddingBagCollection, EmbeddingCollection):
            collection_tables = [Table(path, config, child) for config in _configs(child)]
            skipped.append(f"{path}.")
            odd = odd_dim(_configs(child))
            if odd:
                left_alone[path] = odd
                odd_tables += collection_tables
            else:
                tables += collection_tables
        # By name: looking for the class would import its module in every run.
        elif type(child).__name__ in FUSED and type(child).__module__.startswith(_OF_TORCHREC):
            raise ShardingError(
                f"'{path}' is a {type(child).__name__}, which updates its tables inside of "
                "backward, on each rank by itself. Use "
                f"{type(child).__name__.removeprefix('Fused')}: its update is fused where that is "
                "exact."
            )
        else:
            reason = _sharding_obstacle(child)
            if reason:
                left_alone[path] = reason
                skipped.append(f"{path}.")
    plain.check_names()
    _refuse_shared_weights(tables, odd_tables)
    _check(tables)
    return FoundTables(tables, left_alone, odd_tables)


def _managed_tables(path: str, managed: nn.Module) -> list[Table] | str:
    """Return the tables of a managed collision collection, none where they are sharded; or why they
    stay unsharded."""
    inner = managed.get_submodule(EMBEDDINGS)
    if isinstance(inner, ShardedProxy):
        return []
    if type(inner) not in (EmbeddingBagCollection, EmbeddingCollection):
        return f"its {type(inner).__name__} may compute something else"
    specs = specs_of(managed)
    if isinstance(specs, str):
        return specs
    odd = odd_dim(_configs(inner))
    if odd:
        return odd
    inner_path = f"{path}.{EMBEDDINGS}" if path else EMBEDDINGS
    collisions = managed.get_submodule(COLLISIONS)
    return [
        Table(inner_path, config, inner, mapping=specs[config.name], collisions=collisions)
        for config in _configs(inner)
    ]


def managed_module(table: Table) -> nn.Module | None:
    """Return torchrec's module that maps the ids of `table` while it is unsharded."""
    return None if table.collisions is None else modules_of(table.collisions)[table.name]


def odd_dim(configs: Iterable[BaseEmbeddingConfig]) -> str | None:
    """Return why a collection of these tables cannot be sharded: which dim is no multiple of 4;
    None where all are."""
    for config in configs:
        dim = config.embedding_dim % 4 and config.embedding_dim
        if dim:
            return (
                f"table '{config.name}' has embedding_dim={dim}, but FBGEMM's rows come in "
                f"multiples of 4 columns, so that only embedding_dim={dim + 4 - dim % 4} would be "
                "sharded"
            )
    return None


def _configs(collection: Collection) -> list[BaseEmbeddingConfig]:
    is_pooled = isinstance(collection, EmbeddingBagCollection)
    configs: Any = (
        collection.embedding_bag_configs() if is_pooled else collection.embedding_configs()
    )
    for config in configs:  # torch refuses numpy's numbers in the size of a ShardedTensor
        config.num_embeddings = int(config.num_embeddings)
        config.embedding_dim = int(config.embedding_dim)
    return list(configs)


def _sharding_obstacle(module: nn.Module) -> str | None:
    kind = type(module)
    if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
        return f"{kind.__name__} is a subclass and may compute something else"
    if isinstance(module, BaseManagedCollisionEmbeddingCollection):
        return f"{kind.__name__} is a subclass and may map ids in another way"
    if isinstance(module, MAPS_IDS):
        return (
            f"{kind.__name__} is used outside of a ManagedCollisionEmbeddingCollection, or one of "
            "bags"
        )
    if kind.__module__.startswith("torchrec.quant."):
        return f"{kind.__name__} is for inference"
    if not kind.__module__.startswith(_OF_TORCHREC):
        return None
    if kind.__name__ in UNSHARDED:
        return f"{kind.__name__} {UNSHARDED[kind.__name__]}"
    # They only call their collection, which is then found below them and sharded.
    if kind.__name__ in CALLERS:
        return None
    for child in module.modules():
        if isinstance(child, (EmbeddingBagCollection, EmbeddingCollection)):
            return f"{kind.__name__} does more than look up rows"
    return None


def _refuse_shared_weights(tables: list[Table], odd_tables: list[Table]) -> None:
    """Refuse a weight that is in a sharded table and in another table, sharded or not."""
    # By id: a shared weight is one Parameter object in several modules.
    first_with = {id(table.parameter): table.full_name for table in odd_tables}
    for table in tables:
        other = first_with.setdefault(id(table.parameter), table.full_name)
        if other != table.full_name:
            raise ShardingError(
                f"tables '{other}' and '{table.full_name}' share one weight, which cannot live in "
                "two sharded tables. Use one table and list both features in its feature_names."
            )


def _check(tables: list[Table]) -> None:
    for table in tables:
        if have_gradient_hooks([table.parameter]):
            raise ShardingError(
                f"the weight of table '{table.full_name}' has gradient hooks, which would see only "
                f"this rank's shard of the gradient. {WATCH}."
            )
        if table.parameter.dtype not in (torch.float32, torch.float16):
            raise ShardingError(
                f"table '{table.full_name}' holds {table.parameter.dtype}, which FBGEMM cannot "
                "train. Leave tables in float32 (no module.double() or .bfloat16() over them)."
            )
        if table.config.data_type not in (DataType.FP32, DataType.FP16):
            raise ShardingError(
                f"table '{table.full_name}': data_type={table.config.data_type.value} cannot be "
                "trained exactly here. Use FP32 or FP16."
            )
        for setting, advice in _NOT_TRAINED.items():
            value = getattr(table.config, setting)
            if value:
                raise ShardingError(f"table '{table.full_name}' has {setting}={value}. {advice}")


def feature_names(tables: Iterable[Table]) -> list[str]:
    """Return the features that the tables of one collection look up, each once, in the tables'
    order."""
    return list(
        dict.fromkeys(feature for table in tables for feature in table.config.feature_names)
    )


def output_names(tables: Iterable[Table]) -> list[str]:
    """Return the keys of the unsharded collection's output in its order; "feature@table" for shared
    features."""
    configs: list[Any] = [table.config for table in tables]
    names_by_table = get_embedding_names_by_table(configs)
    return [name for names in names_by_table for name in names]


def smallest_tables(tables: list[Table]) -> dict[str, Table]:
    """Return feature -> the smallest of the tables that it looks up: its ids must be in range of
    all of them."""
    smallest: dict[str, Table] = {}
    for table in tables:
        for feature in table.config.feature_names:
            if feature not in smallest or table.num_ids < smallest[feature].num_ids:
                smallest[feature] = table
    return smallest
