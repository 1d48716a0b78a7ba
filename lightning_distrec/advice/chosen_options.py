"""The options of the job's strategy that change what it needs, as its YAML has them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from lightning_distrec.option_values import as_options
from lightning_distrec.strategies.data_parallel.powersgd import PowerSGDOptions
from lightning_distrec.strategies.estimates.dense_options import DenseOptions
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.stages.stage_options import StageOptions

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ChosenOptions:
    """Those of one strategy; the others have their defaults."""

    dense: DenseOptions = field(default_factory=DenseOptions)
    stages: StageOptions = field(default_factory=StageOptions)
    note: str = ""
    """Whose options these are."""


def options_of(strategy: Any) -> ChosenOptions:
    """Return the options in `trainer.strategy` of a parsed YAML: a name, or an object with class_path and init_args.

    Raises ConfigError: a value cannot be.
    """
    kind = str(getattr(strategy, "class_path", "")).rpartition(".")[2]
    arguments = getattr(strategy, "init_args", None)
    given: dict[str, Any] = {} if arguments is None else dict(vars(arguments))
    note = f"options of {kind} are those of the YAML"
    if kind == "TunedDDPStrategy":
        powersgd = given.get("powersgd")
        dense = DenseOptions(
            comm_dtype=given.get("comm_dtype", "fp32"),
            powersgd=None if powersgd is None else as_options("powersgd", PowerSGDOptions, _plain(powersgd)),
            ddp_checkpointing=given.get("activation_checkpointing", False),
        )
        return ChosenOptions(dense=dense, note=note)
    if kind == "TunedFSDPStrategy":
        return ChosenOptions(dense=DenseOptions(fsdp=_made(FSDPOptions, given)), note=note)
    if kind == "PipelineParallelStrategy":
        ends = {name: tuple(given.get(name) or ()) for name in ("first_stage", "last_stage")}
        return ChosenOptions(stages=_made(StageOptions, given | ends), note=note)
    return ChosenOptions()


def _plain(value: Any) -> Any:
    return value if isinstance(value, (Mapping, PowerSGDOptions)) else vars(value)


def _made(options: type[T], given: Mapping[str, Any]) -> T:
    names = [each.name for each in fields(options)]  # type: ignore[arg-type]
    return options(**{name: given[name] for name in names if name in given})
