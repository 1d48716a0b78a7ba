"""What a checkpoint holds, who wrote it, whether it is complete: for `lightning-distrec checkpoint
inspect`."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.checkpoint.difference import read_mark
from lightning_distrec.checkpoint.lazy_tensors import collect_tensors
from lightning_distrec.checkpoint.load import Loaded
from lightning_distrec.checkpoint.save import PLAN_FILE
from lightning_distrec.chunks import LazyTensor, num_bytes
from lightning_distrec.errors import CheckpointError, MissingCheckpointError
from lightning_distrec.units import format_bytes, format_ranks, quantity

NUM_LISTED = 20
"""Tensors that are listed unless all are requested."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One of the weights. For a sharded table, with its sharding type, its kernel, and the ranks
    that held it."""

    name: str
    shape: list[int]
    dtype: str
    num_bytes: int
    sharding_type: str | None = None
    kernel: str | None = None
    ranks: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """The state of one optimizer. optimizer: its class, where that is known."""

    optimizer: str | None
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is known of a checkpoint without reading its tensors; None is 'unknown'."""

    path: str
    kind: str
    bytes_on_disk: int
    problem: str | None = None
    """Why it cannot be loaded; the fields below are empty then."""
    step: int | None = None
    epoch: int | None = None
    num_ranks: int | None = None
    versions: str | None = None
    lightning: str | None = None
    base: str | None = None
    changed_rows: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of a difference to `base`: full name of a table -> rows that it has; other tables are in it
    in full."""
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Name of a table -> its sharding type, kernel and ranks."""
    plan_file: bool = False
    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    """Sharded tables first, then the others; the largest first."""
    optimizers: list[OptimizerState] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return it in JSON's types."""
        return {"complete": self.problem is None, **dataclasses.asdict(self)}


def describe(path: Path) -> Description:
    """Return what a checkpoint's folder or a plain file holds. Raises CheckpointError: the path
    does not exist."""
    if not path.exists():
        raise MissingCheckpointError(f"there is no checkpoint {path}.")
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    try:
        return _describe_contents(path, read_contents(path), size)
    except CheckpointError as error:
        kind = "folder" if path.is_dir() else "file"
        return Description(
            path=str(path),
            kind=kind,
            bytes_on_disk=size,
            problem=str(error),
        )


def _describe_contents(path: Path, contents: Loaded, bytes_on_disk: int) -> Description:
    checkpoint = contents.checkpoint
    marker = contents.marker or {}
    plan = marker.get("plan", {})
    mark = read_mark(path, marker)
    tables = {key: table_plan for name, table_plan in plan.items() for key in _weight_keys(name)}
    weights = collect_tensors(checkpoint.get("state_dict"))
    tensors = [_tensor(name, lazy, tables.get(name, {})) for name, lazy in weights.items()]
    kind = "safetensors file" if path.suffix == ".safetensors" else "state_dict"
    if contents.marker is not None or "pytorch-lightning_version" in checkpoint:
        kind = (
            "Lightning checkpoint"
            if contents.marker is None
            else ("checkpoint of lightning_distrec")
        )
    return Description(
        path=str(path),
        kind=kind,
        bytes_on_disk=bytes_on_disk,
        step=checkpoint.get("global_step"),
        epoch=checkpoint.get("epoch"),
        num_ranks=marker.get("num_ranks"),
        versions=marker.get("versions"),
        lightning=checkpoint.get("pytorch-lightning_version"),
        base=(mark.base_name or None) if mark else None,
        changed_rows=mark.changed if mark else {},
        plan=plan,
        plan_file=PLAN_FILE in marker.get("files", {}),
        tensors=sorted(
            tensors,
            key=lambda tensor: (tensor.sharding_type is None, -tensor.num_bytes, tensor.name),
        ),
        optimizers=list(map(_optimizer_state, checkpoint.get("optimizer_states") or [])),
    )


def _weight_keys(table: str) -> list[str]:
    """Return the names that a table's weight may have: of an nn.Embedding, and in torchrec's two
    collections."""
    collection, _, name = table.rpartition(".")
    in_collections = []
    for kind in ("embedding_bags", "embeddings"):
        in_collections.append(f"{collection}.{kind}.{name}.weight")
    return [f"{table}.weight", *(key.removeprefix(".") for key in in_collections)]


def _tensor(name: str, lazy: LazyTensor, table_plan: Mapping[str, Any]) -> Tensor:
    return Tensor(
        name=name,
        shape=list(lazy.shape),
        dtype=str(lazy.dtype).removeprefix("torch."),
        num_bytes=num_bytes(lazy),
        **{key: table_plan.get(key) for key in ("sharding_type", "kernel", "ranks")},
    )


def _optimizer_state(state: Mapping[str, Any]) -> OptimizerState:
    sizes = list(map(num_bytes, collect_tensors(state.get("state", {})).values()))
    return OptimizerState(
        optimizer=state.get("optimizer"), num_tensors=len(sizes), num_bytes=sum(sizes)
    )


def print_description(description: Description, console: Console, show_all: bool) -> None:
    """Print the description. show_all: list all tensors, not only the largest."""
    state = "complete" if description.problem is None else "CANNOT BE LOADED"
    console.print(
        f"{description.path}: {description.kind}, {state}, "
        f"{format_bytes(description.bytes_on_disk)} on disk",
        soft_wrap=True,
    )
    if description.problem is not None:
        return
    versions = [
        description.versions,
        description.lightning and f"lightning {description.lightning}",
    ]
    facts = {
        "epoch": description.epoch,
        "step": description.step,
        "written by": None
        if description.num_ranks is None
        else quantity(description.num_ranks, "rank"),
        "with": ", ".join(filter(None, versions)) or None,
        "plan": f"{PLAN_FILE}, for planning={{'plan_file': {description.path!r}}}"
        if description.plan_file
        else None,
    }
    for name, value in facts.items():
        if value is not None:
            console.print(f"{name:<11}{value}", soft_wrap=True)
    if description.base is not None:
        rows = (
            ", ".join(f"{name} {count:,}" for name, count in description.changed_rows.items())
            or "none"
        )
        console.print(
            f"difference to {description.base}, which it needs; changed rows: {rows}",
            soft_wrap=True,
        )
    listed = description.tensors if show_all else description.tensors[:NUM_LISTED]
    console.print(_table(listed, with_plan=any(tensor.sharding_type for tensor in listed)))
    unlisted = description.tensors[len(listed) :]
    if unlisted:
        size = format_bytes(sum(tensor.num_bytes for tensor in unlisted))
        console.print(
            f"and {quantity(len(unlisted), 'smaller tensor')}, {size} in all; --all lists them"
        )
    for number, state_of in enumerate(description.optimizers):
        optimizer = f", {state_of.optimizer}" if state_of.optimizer else ""
        tensors = quantity(state_of.num_tensors, "tensor")
        console.print(
            f"optimizer {number}{optimizer}: {tensors}, {format_bytes(state_of.num_bytes)}",
            soft_wrap=True,
        )


def _table(tensors: Sequence[Tensor], with_plan: bool) -> TextTable:
    text = TextTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    text.add_column("weights", overflow="fold")
    for heading in ("shape", "type", "size"):
        text.add_column(heading, justify="left" if heading == "type" else "right", no_wrap=True)
    for heading in ("sharding type", "kernel", "ranks") if with_plan else ():
        text.add_column(heading, no_wrap=True)
    for tensor in tensors:
        shape = " x ".join(f"{size:,}" for size in tensor.shape) or "scalar"
        plan = (
            (tensor.sharding_type or "", tensor.kernel or "", format_ranks(tensor.ranks or []))
            if with_plan
            else ()
        )
        text.add_row(
            tensor.name,
            shape,
            tensor.dtype,
            format_bytes(tensor.num_bytes),
            *plan,
        )
    return text
