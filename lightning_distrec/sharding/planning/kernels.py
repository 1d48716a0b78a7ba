"""Where a table's rows lie: on which device, in what type, and which of torchrec's kernels look them up."""

from collections.abc import Iterable

from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import DataType

from lightning_distrec.errors import ConfigError, PlanError
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.sharding_types import HOST_KERNELS, KERNELS
from lightning_distrec.sharding.tables import Table


def allowed_kernels(
    table: Table, types: Iterable[str], options: TableOptions, kept_gradient: bool, device: str
) -> tuple[str, ...]:
    """Return the kernels that may look up `table` if it is cut in one of `types`.

    kept_gradient: whether the user's own optimizer updates it, with a gradient that is kept. device: "cpu" or "cuda".
    Raises PlanError: nothing that the user allowed is left, with the reasons; a cache for a table that cannot have one.
    """
    types = list(types)
    wanted = options.compute_kernels or KERNELS
    reasons = {kernel: _why_not(kernel, types, kept_gradient, device) for kernel in wanted}
    kernels = tuple(kernel for kernel, reason in reasons.items() if not reason)
    if not kernels:
        raise PlanError(
            f"table '{table.full_name}': compute_kernels={list(wanted)}: "
            f"{'; '.join(f'{kernel}: {why}' for kernel, why in reasons.items())}."
        )
    if options.cache_load_factor is not None and "fused_uvm_caching" not in kernels:
        raise PlanError(
            f"table '{table.full_name}': cache_load_factor={options.cache_load_factor} is for a fused_uvm_caching "
            f"table, which this one cannot be: {_why_not('fused_uvm_caching', types, kept_gradient, device)}. Leave "
            "cache_load_factor out."
        )
    return kernels


def _why_not(kernel: str, types: list[str], kept_gradient: bool, device: str) -> str:
    if kernel == "dense":
        return "" if "data_parallel" in types else "is for tables whose sharding_types are data_parallel; allow fused"
    if types == ["data_parallel"]:
        return "a data_parallel table has the dense kernel; allow dense"
    if kernel in HOST_KERNELS and device != "cuda":
        return f"on {device} rows lie in the host's memory already; allow fused"
    if kernel in HOST_KERNELS and kept_gradient:
        return "the optimizer steps on the rows itself, which needs them in the device's memory; allow fused"
    return ""


def cache_share(sharding: ParameterSharding) -> float | None:
    """Return the cache_load_factor that a table was planned with."""
    return None if sharding.cache_params is None else sharding.cache_params.load_factor


def refuse_other_storage(table: Table, options: TableOptions, device: str) -> None:
    """Raise ConfigError where the user wants the table's rows on a device, or in a type, that they do not have.

    torchrec's planner would leave out a table of another device without a word. device: "cpu" or "cuda".
    """
    if options.device_group not in (None, device):
        raise ConfigError(
            f"table '{table.full_name}': device_group='{options.device_group}', but this run is on {device}, and all "
            f"sharded tables are. Set Trainer(accelerator='{_accelerator(options.device_group)}'), or leave "
            "device_group out."
        )
    has = "fp16" if table.config.data_type == DataType.FP16 else "fp32"
    if options.dtype not in (None, has):
        raise ConfigError(
            f"table '{table.full_name}': dtype='{options.dtype}', but the module has made it with rows of {has}, and "
            f"rows of another type are another model. {_other_type(table, str(options.dtype))}, or leave dtype out."
        )


def _accelerator(device: str | None) -> str:
    return "gpu" if device == "cuda" else "cpu"


def _other_type(table: Table, dtype: str) -> str:
    if table.plain is None:
        kind = "EmbeddingBagConfig" if table.pooled else "EmbeddingConfig"
        return f"Set data_type=DataType.{dtype.upper()} in its {kind}"
    return f"Give {type(table.plain).__name__} dtype=torch.{'float16' if dtype == 'fp16' else 'float32'}"
