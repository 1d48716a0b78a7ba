"""Every module for which TorchRec has a sharder is sharded, stays on every rank with a reason, or
is refused."""

import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torchrec.distributed
import torchrec.modules
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.tensor_pool import TensorPool

import lightning_distrec.sharding.tables
from lightning_distrec.sharding.tables import (
    CALLERS,
    FUSED,
    MANAGED,
    MAPS_IDS,
    UNSHARDED,
    find_tables,
)
from tests.support.click_model import bag_configs
from tests.support.mapped_models import ManagedModel

TABLES = {EmbeddingBagCollection, EmbeddingCollection, nn.EmbeddingBag, nn.Embedding, *MANAGED}


def _modules_of_torchrec() -> Iterator[Any]:
    for package in (torchrec.distributed, torchrec.modules):
        for result in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not re.search(r"\.(tests|test_utils|benchmark)\b", result.name):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    yield importlib.import_module(result.name)


def _sharded_by_torchrec() -> set[type]:
    """Return the modules for which TorchRec has a sharder."""
    actual, waiting = set(), [ModuleSharder]
    assert len(list(_modules_of_torchrec())) > 50
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("torchrec.") and not inspect.isabstract(kind):
            actual.add(kind.module_type.fget(object.__new__(kind)))
    return actual


def _group_of(kind: type) -> str:
    groups = {
        "sharded": kind in TABLES
        or (kind.__name__ in CALLERS and kind.__module__.startswith("torchrec.modules.")),
        "with its collection": issubclass(kind, MAPS_IDS) and kind not in MANAGED,
        "unsharded": kind.__name__ in UNSHARDED,
        "refused": kind.__name__ in FUSED,
        "inference": kind.__module__.startswith("torchrec.quant."),
    }
    return ", ".join(name for name, holds in groups.items() if holds)


def test_every_module_with_a_sharder_is_in_one_group() -> None:
    groups = {kind: _group_of(kind) for kind in _sharded_by_torchrec()}
    assert len(groups) >= 18
    assert {kind for kind, group in groups.items() if not group or "," in group} == set()
    assert {kind.__name__ for kind, group in groups.items() if group == "unsharded"} == set(
        UNSHARDED
    )
    assert {kind.__name__ for kind, group in groups.items() if group == "refused"} == set(FUSED)


def test_the_reference_names_every_module_with_tables() -> None:
    text = lightning_distrec.sharding.tables.__doc__
    kinds = _sharded_by_torchrec()
    for module in _modules_of_torchrec():
        for name, kind in vars(module).items():
            if (
                inspect.isclass(kind)
                and issubclass(kind, nn.Module)
                and kind.__module__ == module.__name__
            ):
                holds = re.search(
                    "Embedding|Pool$|Collision|ITEP|Processor|PositionWeighted|Regroup", name
                )
                if (
                    holds
                    and module.__name__.startswith("torchrec.modules.")
                    and not name.startswith("_")
                ):
                    kinds.add(kind)
    missing = {kind.__name__ for kind in kinds if not re.search(rf"`(nn\.)?{kind.__name__}`", text)}
    assert missing == set()


class Own(ManagedCollisionEmbeddingBagCollection):
    """A user's subclass."""


def test_what_stays_on_every_rank_says_why() -> None:
    root = nn.Module()
    root.pool = TensorPool(4, 2, torch.float, torch.device("cpu"))
    root.jagged = KeyedJaggedTensorPool(4, {"f": 2}, device=torch.device("cpu"))
    tables = EmbeddingBagCollection(tables=bag_configs())
    root.pruned = ITEPEmbeddingBagCollection(tables, GenericITEPModule({"wide": 60}))
    managed = ManagedModel().mc
    root.own = Own(managed._embedding_module, managed._managed_collision_collection)
    root.by_hand = nn.Sequential(ManagedModel().mc._managed_collision_collection)
    actual = find_tables(root)
    assert actual.tables == []
    reasons = {"pool": "rank 0's values", "jagged": "rank 0's values", "pruned": "prunes nothing"}
    reasons |= {
        "own": "Own is a subclass and may map ids",
        "by_hand.0": "is used outside of a ManagedCollision",
    }
    assert actual.left_alone.keys() == reasons.keys()
    for path, reason in reasons.items():
        assert reason in actual.left_alone[path]
