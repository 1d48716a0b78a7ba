"""Plain arguments of the strategy: what each does to the process, and what they cannot be."""

from collections.abc import Iterator

import pytest
import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    ShardingPlan,
    ShardingType,
)

from lightning_distrec import TableOptions, TorchRecShardedStrategy, TunedDDPStrategy
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.planning.table_options import options_by_table
from lightning_distrec.sharding.sharders import QuantizedComms, as_table_options


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def test_the_precision_of_products_is_set_for_the_process_and_otherwise_left() -> None:
    torch.set_float32_matmul_precision("medium")
    TorchRecShardedStrategy()
    assert torch.get_float32_matmul_precision() == "medium"
    TorchRecShardedStrategy(float32_matmul_precision="high")
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"float32_matmul_precision": "tf32"},
            "float32_matmul_precision='tf32' is not known. Use one of 'highest'",
        ),
        (
            {"process_group_backend": "mpi"},
            "process_group_backend='mpi' is not known. Use one of 'gloo', 'nccl'",
        ),
        ({"start_seconds": 0}, "start_seconds=0: must be a number of seconds above 0"),
        ({"watchdog_seconds": -1}, "watchdog_seconds=-1: must be at least 0, which disables it"),
        ({"deadlock_seconds": -1}, "deadlock_seconds=-1: must be at least 0, which disables it"),
        ({"timeout_seconds": 0}, "timeout_seconds=0: must be a number of seconds above 0"),
    ],
)
def test_what_an_argument_cannot_be(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchRecShardedStrategy(**arguments)


def test_the_variable_of_torcheasyrec_sets_the_timeout_where_the_argument_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(**arguments: float) -> float:
        return TunedDDPStrategy(**arguments)._timeout.total_seconds()

    monkeypatch.delenv("PROCESS_GROUP_TIMEOUT_SECONDS", raising=False)
    assert seconds() == 1800
    monkeypatch.setenv("PROCESS_GROUP_TIMEOUT_SECONDS", "90")
    assert seconds() == 90
    assert seconds(timeout_seconds=45.5) == 45.5
    for value in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("PROCESS_GROUP_TIMEOUT_SECONDS", value)
        with pytest.raises(
            ConfigError, match=f"PROCESS_GROUP_TIMEOUT_SECONDS={value}: must be a number of seconds"
        ):
            seconds()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": None}, "planner= is no option of torchrec_sharded. Use planning"),
        (
            {"plan": ShardingPlan({})},
            "plan= is no option of .* Use planning={'plan_file': ...}, which takes a Shard",
        ),
        (
            {"topology": None},
            "topology= .* Use memory_bytes_per_rank and planning={'bandwidths': ...}",
        ),
        (
            {"constraints": {"a": ParameterConstraints()}},
            "constraints= .* Use tables, which takes the same dict",
        ),
        ({"sharders": []}, "sharders= .* Use tables and quantized_comms"),
        ({"fused_params": {}}, "fused_params= .* Use configure_optimizers or table_optimizer"),
        (
            {"qcomm_codecs_registry": {}},
            "qcomm_codecs_registry= .* Use quantized_comms, which takes a QCommsConfig",
        ),
        ({"planning": ShardingPlan({})}, "planning=.*: options are needed, some of .*plan_file"),
        (
            {"quantized_comms": QCommsConfig(forward_precision=CommType.INT8)},
            "forward='int8' is not known. Use one of .*bf16",
        ),
        (
            {"quantized_comms": QCommsConfig(CommType.FP16, backward_loss_scale=2.0)},
            "QCommsConfig has backward_loss_scale=2.0. Leave it out: there is no option that does "
            "the same",
        ),
        ({"sharding_types": ShardingType.ROW_WISE}, "sharding_types=.*: must be a list"),
        ({"sharding_types": ["grid_shards"]}, "sharding_types='grid_shards' is not known"),
    ],
)
def test_what_torchrec_calls_otherwise(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchRecShardedStrategy(**arguments)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (
            {"bounds_check_mode": BoundsCheckMode.WARNING},
            "bounds_check_mode=.* Leave it out: set check_ids of the",
        ),
        (
            {"stochastic_rounding": False},
            "stochastic_rounding=False. Leave it out: there is no option",
        ),
        ({"pooling_factors": [1.0, 3.0]}, "one pooling_factor is for all features of a table"),
        (
            {"cache_params": CacheParams(algorithm=CacheAlgorithm.LFU)},
            "CacheParams has algorithm=.*Leave it out",
        ),
        ({"compute_kernels": ["key_value"]}, "compute_kernels='key_value' is not known"),
    ],
)
def test_what_a_constraint_of_torchrecs_cannot_be(constraints: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"tables\['a'\]: .*{message}"):
        options_by_table([], TableOptions(), {"a": ParameterConstraints(**constraints)})


def test_torchrecs_objects_become_plain_options() -> None:
    strategy = TorchRecShardedStrategy(
        sharding_types=[ShardingType.ROW_WISE],
        quantized_comms=QCommsConfig(CommType.FP16, CommType.BF16),
    )
    assert strategy.table_settings.default_options.sharding_types == ["row_wise"]
    assert strategy.table_settings.comms == QuantizedComms(forward="fp16", backward="bf16")
    constraints = ParameterConstraints(
        sharding_types=[ShardingType.COLUMN_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED_UVM_CACHING.value],
        min_partition=32,
        pooling_factors=[4.0, 4.0],
        cache_params=CacheParams(load_factor=0.2),
    )
    assert TableOptions(**as_table_options(constraints)) == TableOptions(
        sharding_types=["column_wise"],
        compute_kernels=["fused_uvm_caching"],
        min_partition=32,
        pooling_factor=4.0,
        cache_load_factor=0.2,
    )
    assert not TableOptions(**as_table_options(ParameterConstraints())).explicit_options()
