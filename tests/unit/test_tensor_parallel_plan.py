"""Which layers a plan of `tensor_parallel` splits, and what it refuses by name, before there are ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_distrec import FSDPOptions, TensorParallelOptions, TorchRecShardedStrategy, TunedFSDPStrategy
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.strategies.fully_sharded.tensor_parallel.plan import planned_layers


def _planned(module: nn.Module, plan: Any, size: int = 2, num_shards: int = 1) -> dict[str, str]:
    return planned_layers(module, TensorParallelOptions(size=size, plan=plan), num_shards)


def test_a_plan_names_layers_with_patterns_for_any_name() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
    module = nn.ModuleDict({"blocks": blocks, "other": nn.Linear(4, 4)})
    assert _planned(module, {"blocks.*.0": "colwise", "blocks.1.2": "rowwise"}) == {
        **{"blocks.0.0": "colwise", "blocks.1.0": "colwise", "blocks.1.2": "rowwise"}
    }


def test_pairs_of_layers_are_found() -> None:
    pair = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 8), nn.Linear(8, 4))
    apart = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    module = nn.Sequential(pair, apart, nn.TransformerEncoderLayer(4, 2, 8))
    assert _planned(module, "auto") == {
        **{"0.0": "colwise", "0.3": "rowwise", "2.linear1": "colwise", "2.linear2": "rowwise"}
    }


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.net[0].weight


def _in_box(layer: nn.Module) -> nn.Module:
    return nn.ModuleDict({"box": nn.Sequential(layer)})


def _compiled() -> nn.Module:
    module = _in_box(nn.Linear(4, 4))
    module["box"].compile(backend="eager")  # type: ignore[index]
    return module


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "unknown": (_in_box(nn.Linear(4, 4)), {"box.1": "colwise"}, ConfigError, r"no layer 'box.1'. Did you mean 'box.0'"),
    "both": (
        *(_in_box(nn.Linear(4, 4)), {"box.0": "colwise", "*.0": "rowwise"}, ConfigError),
        "both colwise and rowwise for 'box.0'. Keep one",
    ),
    "none": (_in_box(nn.Linear(4, 4)), "auto", ConfigError, "finds no pair of layers.*Name the layers"),
    "attention": (
        *(_in_box(nn.MultiheadAttention(4, 2)), {"box.0.out_proj": "rowwise"}, UnsupportedError),
        "nn.MultiheadAttention.*without calling the layers.*nn.Linear each for queries",
    ),
    "other layer": (_in_box(nn.LayerNorm(4)), {"box.0": "colwise"}, UnsupportedError, "LayerNorm, and torch splits"),
    "norms of rows": (
        *(_in_box(nn.Embedding(4, 4, max_norm=1.0)), {"box.0": "colwise"}, UnsupportedError),
        "max_norm or scale_grad_by_freq, which look at all rows",
    ),
    "parametrized": (
        *(_in_box(parametrizations.weight_norm(nn.Linear(4, 4))), {"box.0": "colwise"}, UnsupportedError),
        "computes its weight from others",
    ),
    "compiled": (_compiled(), {"box.0": "colwise"}, UnsupportedError, "torch.compile has compiled.*Remove"),
    "tied": (Tied(), {"net.0": "colwise"}, UnsupportedError, r"shares a weight with 'head' .*Leave both out of plan"),
    "at the root": (
        *(nn.ModuleList([nn.Linear(4, 4)]), {"0": "colwise"}, UnsupportedError),
        "called by the LightningModule itself.*colwise_gather_output.*nn.Sequential",
    ),
    "output": (_in_box(nn.Linear(4, 3)), {"box.0": "colwise"}, ConfigError, "3 output features.*evenly over 2 ranks"),
    "input": (_in_box(nn.Linear(3, 4)), {"box.0": "rowwise"}, ConfigError, "3 input features.*evenly over 2 ranks"),
    "rows": (_in_box(nn.Embedding(5, 4)), {"box.0": "rowwise"}, ConfigError, "5 rows, which cannot be divided evenly"),
    "columns": (_in_box(nn.Embedding(4, 5)), {"box.0": "colwise"}, ConfigError, "5 columns, which cannot be divided"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(case: str) -> None:
    module, plan, error, message = REFUSED[case]
    with pytest.raises(error, match=f"tensor_parallel: .*{message}"):
        _planned(module, plan)


def test_what_fsdp_cannot_shard_again_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 output features.*over 2 ranks, and over 2 more by FSDP"):
        _planned(_in_box(nn.Linear(4, 6)), {"box.0": "colwise"}, num_shards=2)
    assert _planned(_in_box(nn.Linear(4, 5)), {"box.0": "rowwise"}, num_shards=2)


def test_a_plain_module_in_a_compiled_one_is_refused() -> None:
    module = nn.ModuleDict({"box": torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")})
    with pytest.raises(UnsupportedError, match="torch.compile has compiled"):
        _planned(module, {"box._orig_mod.0": "colwise"})


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({"plan": "auto"}, "size=0 must be a number of ranks, at least 2"),
    "one rank": ({"size": 1}, "size=1 must be a number of ranks, at least 2"),
    "no plan": ({"size": 2, "plan": {}}, "must be 'auto', or map the paths of layers to colwise, rowwise"),
    "a style": ({"size": 2, "plan": {"net.0": "column"}}, "'column' for 'net.0', which is not known. Use one"),
    "an option": ({"size": 2, "plans": "auto"}, "plans is not known. It takes size and plan and compare_first_batch"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_are_checked(case: str) -> None:
    options, message = OPTIONS[case]
    with pytest.raises(ConfigError, match=f"tensor_parallel: .*{message}"):
        TunedFSDPStrategy(tensor_parallel=options)


def test_replicas_and_tables_next_to_split_layers_are_refused() -> None:
    split = TensorParallelOptions(size=2)
    with pytest.raises(ConfigError, match="replicas=2 with tensor_parallel: a mesh of three dims"):
        FSDPOptions(tensor_parallel=split, replicas=2)
    with pytest.raises(ConfigError, match="fsdp: tensor_parallel: all ranks exchange the rows of tables"):
        TorchRecShardedStrategy(dense="fsdp", fsdp=FSDPOptions(tensor_parallel=split))
