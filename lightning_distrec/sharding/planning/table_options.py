"""What a user may say about one table."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.sharding.sharding_types import KERNELS, SHARDING_TYPES

EmbeddingUpdate = Literal["auto", "fused", "sparse", "dense", "fused_lazy"]
EMBEDDING_UPDATES: tuple[str, ...] = ("auto", "fused", "sparse", "dense", "fused_lazy")
DEVICES: tuple[str, ...] = ("cpu", "cuda")
DTYPES: tuple[str, ...] = ("fp32", "fp16")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What may be said about one table. None means: as the strategy says for all tables."""

    embedding_update: EmbeddingUpdate | None = None
    """How the optimizer's update reaches the table: auto, fused, sparse, dense or fused_lazy."""

    sharding_types: list[str] | None = None
    """The ways in which the table may be cut, for example ["row_wise"]."""

    compute_kernels: list[str] | None = None
    """The kernels that may look the table up, which say where its rows lie: "fused", in the device's memory;
    "fused_uvm", in the host's, on CUDA only; "fused_uvm_caching", there too, with a cache on the GPU; "dense", for
    data_parallel only."""

    min_partition: int | None = None
    """Least number of columns of a column-wise shard; a multiple of 4."""

    pooling_factor: float | None = None
    """Ids looked up per example and feature, on average; the planner's measure of load."""

    batch_size: int | None = None
    """Examples per rank and step of the table's features, for the planner, where they differ from other tables'."""

    cache_load_factor: float | None = None
    """Share of the rows that the GPU's cache of a fused_uvm_caching table holds; between 0 and 1."""

    device_group: Literal["cpu", "cuda"] | None = None
    """The kind of device that the table must be on; an error where the run's is another."""

    dtype: Literal["fp32", "fp16"] | None = None
    """The type of its rows; an error where the module has made it with another."""

    keep_whole: bool | None = None
    """Whether every rank holds the whole table, whose gradient is averaged, like a dense layer's."""

    def __post_init__(self) -> None:
        if self.embedding_update is not None:
            check_embedding_update(self.embedding_update)
        if self.sharding_types is not None:
            check_sharding_types(self.sharding_types)
        if self.compute_kernels is not None:
            _check_names("compute_kernels", self.compute_kernels, KERNELS, "one kernel")
        if self.min_partition is not None and (self.min_partition < 4 or self.min_partition % 4):
            raise ConfigError(f"min_partition={self.min_partition}: FBGEMM's rows come in multiples of 4 columns.")
        if self.pooling_factor is not None and self.pooling_factor <= 0:
            raise ConfigError(f"pooling_factor={self.pooling_factor}: must be above 0.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: must be at least 1.")
        self._check_cache()
        _check_name("device_group", self.device_group, DEVICES)
        _check_name("dtype", self.dtype, DTYPES)
        if self.keep_whole and (others := [name for name in self.said() if name != "keep_whole"]):
            raise ConfigError(
                f"keep_whole=True: a table that every rank holds whole is not planned, and {' and '.join(others)} "
                f"would change nothing. Leave {'it' if len(others) == 1 else 'them'} out, or set keep_whole=False."
            )

    def _check_cache(self) -> None:
        if self.cache_load_factor is None:
            return
        if not 0 < self.cache_load_factor < 1:
            raise ConfigError(
                f"cache_load_factor={self.cache_load_factor}: must be a share of the rows, between 0 and 1. For all "
                'rows on the GPU set compute_kernels=["fused"], for none compute_kernels=["fused_uvm"].'
            )
        if self.compute_kernels is not None and "fused_uvm_caching" not in self.compute_kernels:
            raise ConfigError(
                f"cache_load_factor={self.cache_load_factor}: only a fused_uvm_caching table has a cache, and "
                f"compute_kernels={self.compute_kernels} leaves that out. Add it, or leave cache_load_factor out."
            )

    def said(self) -> dict[str, Any]:
        """Return the options that were set, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def check_embedding_update(value: str) -> None:
    """Raise ConfigError where `value` is no way to update a table."""
    _check_name("embedding_update", value, EMBEDDING_UPDATES)


def check_sharding_types(values: Iterable[str]) -> None:
    """Raise ConfigError where one of `values` is no way to cut a table, or where there is none."""
    _check_names("sharding_types", values, SHARDING_TYPES, "one way to cut the table")


def _check_name(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        near = did_you_mean(str(value), known)
        raise ConfigError(f"{option}={value!r} is not known{near} Use one of {', '.join(known)}.")


def _check_names(option: str, values: Iterable[str], known: tuple[str, ...], least: str) -> None:
    if isinstance(values, str):
        raise ConfigError(f"{option}={values!r}: a list is needed. Write [{values!r}].")
    values = list(values)
    if not values:
        raise ConfigError(f"{option}=[]: at least {least} must be allowed.")
    for value in values:
        if value not in known:
            near = did_you_mean(str(value), known)
            raise ConfigError(f"{option}: {value!r} is not known{near} Use some of {', '.join(known)}.")
