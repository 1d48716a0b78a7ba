"""Plain arguments of the strategy: what each does to the process, and what they cannot be."""

import re
from collections.abc import Iterator
from typing import Any

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

from lightning_distrec import (
    CheckpointOptions,
    PrefetchOptions,
    TableOptions,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
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


Sharded, Ddp, Fsdp = TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
CONSTRAINTS = {"a": ParameterConstraints()}
INT8 = QCommsConfig(forward_precision=CommType.INT8)
SCALED = QCommsConfig(CommType.FP16, backward_loss_scale=2.0)
OFFLOADED = {"dense": "fsdp", "fsdp": {"offload": True}}
BY_LIST = "checkpointing='Layer': must be true or false, or a list: write ['Layer']"
CANNOT_BE: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32_matmul_precision='tf32' is not known. Use one of 'highest'": (
        Sharded,
        {"float32_matmul_precision": "tf32"},
    ),
    "process_group_backend='mpi' is not known. Use one of 'gloo', 'nccl'": (
        Sharded,
        {"process_group_backend": "mpi"},
    ),
    "start_seconds=0: must be a number of seconds above 0": (Sharded, {"start_seconds": 0}),
    "watchdog_seconds=-1: must be at least 0, which disables": (Sharded, {"watchdog_seconds": -1}),
    "deadlock_seconds=-1: must be at least 0, which disables": (Sharded, {"deadlock_seconds": -1}),
    "timeout_seconds=0: must be a number of seconds above 0": (Sharded, {"timeout_seconds": 0}),
    "comm_dtype='fp8' is not known ... Use one of 'fp32', 'bf16', 'fp16'": (
        Ddp,
        {"comm_dtype": "fp8"},
    ),
    "bucket_cap_mb=0: must be above 0 MiB": (Ddp, {"bucket_cap_mb": 0}),
    "sparse_grads='rows' is not known. Use one of 'sparse', 'dense'": (
        Ddp,
        {"sparse_grads": "rows"},
    ),
    f"activation_{BY_LIST}": (Ddp, {"activation_checkpointing": "Layer"}),
    BY_LIST: (Fsdp, {"activation_checkpointing": "Layer"}),
    "powersgd: matrix_rank=0 must be at least 1": (Ddp, {"powersgd": {"matrix_rank": 0}}),
    "powersgd: start_step=-1 must be at least 0": (Ddp, {"powersgd": {"start_step": -1}}),
    "there is no option 'rank' ... Use some of matrix_rank, start": (
        Ddp,
        {"powersgd": {"rank": 2}},
    ),
    "powersgd and comm_dtype='bf16' both say how gradients are sent": (
        Ddp,
        {"powersgd": {}, "comm_dtype": "bf16"},
    ),
    "powersgd with static_graph=True: DDP would order gradients again": (
        Ddp,
        {"powersgd": {}, "static_graph": True},
    ),
    "wrap='Linear': must be 'auto', or a list: write ['Linear']": (Fsdp, {"wrap": "Linear"}),
    "min_num_parameters=0: must be at least 1": (Fsdp, {"min_num_parameters": 0}),
    "replicas=0: must be 'nodes', or at least 1": (Fsdp, {"replicas": 0}),
    "replicas='node': must be a whole number, or 'nodes'": (Fsdp, {"replicas": "node"}),
    "reshard_after_forward='never': must be 'auto', or true or false": (
        Fsdp,
        {"reshard_after_forward": "never"},
    ),
    "param_dtype='float16' is not known ... Use one of 'fp32', 'bf16', 'fp16'": (
        Fsdp,
        {"param_dtype": "float16"},
    ),
    "dense='zero' is not known. Use one of 'ddp', 'fsdp'": (Sharded, {"dense": "zero"}),
    "is for dense='fsdp', and dense is 'ddp'": (Sharded, {"fsdp": {"wrap": []}}),
    "only fsdp_tuned offloads": (Sharded, OFFLOADED),
    # What a value is not
    "CheckpointOptions: pickles='false': must be true or false, not a text": (
        CheckpointOptions,
        {"pickles": "false"},
    ),
    "distributed={'a': 1}: must be true or false": (CheckpointOptions, {"distributed": {"a": 1}}),
    "computed_ids=[1, 'a']: must be true or false": (PrefetchOptions, {"computed_ids": [1, "a"]}),
    "static_graph=1: must be true or false": (Ddp, {"static_graph": 1}),
    "timeout_seconds=True: must be a number": (Ddp, {"timeout_seconds": True}),
    "pickles='false': must be true or false": (Ddp, {"checkpoint": {"pickles": "false"}}),
    # What others call it
    "ddp_comm_hook= is no option of ddp_tuned. Use comm_dtype='bf16'": (
        Ddp,
        {"ddp_comm_hook": print},
    ),
    "Use offload=True of fsdp_tuned": (Ddp, {"cpu_offload": True}),
    "watchdog_second= ... did you mean 'watchdog_seconds'": (Ddp, {"watchdog_second": 3}),
    "planner= is no option of torchrec_sharded. Use planning": (Sharded, {"planner": None}),
    "plan= ... Use planning={'plan_file'": (
        Sharded,
        {"plan": ShardingPlan({})},
    ),
    "topology= ... Use memory_bytes_per_rank and planning={'bandwidths'": (
        Sharded,
        {"topology": None},
    ),
    "constraints= ... Use tables, which takes the same dict": (
        Sharded,
        {"constraints": CONSTRAINTS},
    ),
    "sharders= ... Use tables and quantized_comms": (Sharded, {"sharders": []}),
    "fused_params= ... Use configure_optimizers or table_optimizer": (
        Sharded,
        {"fused_params": {}},
    ),
    "qcomm_codecs_registry= ... Use quantized_comms, which takes a QCommsConfig": (
        Sharded,
        {"qcomm_codecs_registry": {}},
    ),
    "planning= ... options are needed, some of ... plan_file": (
        Sharded,
        {"planning": ShardingPlan({})},
    ),
    "forward='int8' is not known. Use one of ... bf16": (Sharded, {"quantized_comms": INT8}),
    "backward_loss_scale=2.0. Leave it out: there is no option that does the same": (
        Sharded,
        {"quantized_comms": SCALED},
    ),
    "sharding_types= ... must be a list": (Sharded, {"sharding_types": ShardingType.ROW_WISE}),
    "sharding_types='grid_shards' is not known": (Sharded, {"sharding_types": ["grid_shards"]}),
}


@pytest.mark.parametrize("words", CANNOT_BE)
def test_what_an_argument_cannot_be(words: str) -> None:
    kind, arguments = CANNOT_BE[words]
    pattern = ".*".join(re.escape(part.strip()) for part in words.split("... "))
    with pytest.raises(ConfigError, match=pattern):
        kind(**arguments)


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
