"""The differences of two checkpoints, for `lightning-distrec checkpoint diff`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.checkpoint.lazy_tensors import as_lazy
from lightning_distrec.checkpoint.plain_state import map_nested, plain_optimizer_state
from lightning_distrec.checkpoint.tools.contents import Contents, num_elements, read_blocks, read_contents, tensors_of
from lightning_distrec.checkpoint.tools.describe import Description, description_of, sharding_type_of
from lightning_distrec.chunks import LazyTensor
from lightning_distrec.units import format_ranks

NUM_LISTED = 40
"""Differences of one kind that are printed, at most."""
ELEMENTS_AT_ONCE = 2**20
"""Elements that are compared as 64-bit numbers at a time."""


@dataclass(frozen=True)
class Difference:
    """A value that differs between two checkpoints; None where one lacks it."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences of two checkpoints."""

    a: str
    b: str
    facts: list[Difference]
    """Step, epoch, ranks, versions, the plan; only those that both have."""
    tensors: list[Difference]
    """Shapes and types, by the path of the tensor in the checkpoint."""
    others: list[Difference]
    """Numbers and text in the checkpoint, by path."""
    num_compared: int | None
    """Number of tensors that were compared by value; None: values were not requested."""
    values: dict[str, float]
    """Path of a tensor with other values -> the largest absolute difference; NaN where only one of them is."""

    @property
    def is_same(self) -> bool:
        """Whether no difference was found."""
        return not (self.facts or self.tensors or self.others or self.values)

    def as_json(self) -> dict[str, Any]:
        """Return it in JSON's types; differences that are not finite become strings."""
        values = {name: value if math.isfinite(value) else str(value) for name, value in self.values.items()}
        return {"same": self.is_same, **dataclasses.asdict(self), "values": values}


def compare(a: Path, b: Path, *, values: bool) -> Comparison:
    """Return the differences of two checkpoints, folders or plain files. values: also read and compare their tensors.

    Raises CheckpointError: one of them cannot be read.
    """
    first, second = read_contents(a), read_contents(b)
    facts = _facts(description_of(a, first), description_of(b, second))
    of_a, of_b = _comparable(first, second)
    tensors_a, tensors_b = tensors_of(of_a), tensors_of(of_b)
    common = [name for name in tensors_a if name in tensors_b and tensors_a[name].shape == tensors_b[name].shape]
    differences = {name: largest_difference(tensors_a[name], tensors_b[name]) for name in common} if values else {}
    return Comparison(
        a=str(a),
        b=str(b),
        facts=facts,
        tensors=list(_differing(_in_words(tensors_a), _in_words(tensors_b))),
        others=list(_differing(_plain(of_a), _plain(of_b))),
        num_compared=len(common) if values else None,
        values={name: value for name, value in differences.items() if value},
    )


def _facts(a: Description, b: Description) -> list[Difference]:
    def facts_of(found: Description) -> dict[str, str]:
        facts = {name: getattr(found, name) for name in ("epoch", "step", "num_ranks", "versions", "lightning")}
        plan = {f"plan of {name}": _plan_in_words(of_table) for name, of_table in found.plan.items()}
        return {name: str(value) for name, value in facts.items() if value is not None} | plan

    facts_a, facts_b = facts_of(a), facts_of(b)
    both_planned = bool(a.plan and b.plan)
    return [
        difference
        for difference in _differing(facts_a, facts_b)
        if (difference.a is not None and difference.b is not None)
        or (both_planned and difference.name.startswith("plan of "))
    ]


def _plan_in_words(of_table: Mapping[str, Any]) -> str:
    return f"{sharding_type_of(of_table)}, {of_table.get('kernel')}, ranks {format_ranks(of_table.get('ranks', []))}"


def _comparable(a: Contents, b: Contents) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is compared besides facts. If one has an optimizer's state by number, both get it so."""
    checkpoints = [
        {k: v for k, v in found.checkpoint.items() if k not in ("epoch", "global_step", "pytorch-lightning_version")}
        for found in (a, b)
    ]
    states = [checkpoint.get("optimizer_states") or [] for checkpoint in checkpoints]
    if any("optimizer" not in state for of_one in states for state in of_one):
        for checkpoint, of_one in zip(checkpoints, states, strict=True):
            if of_one:
                plain = [plain_optimizer_state(state) if "optimizer" in state else state for state in of_one]
                checkpoint["optimizer_states"] = plain
    return checkpoints[0], checkpoints[1]


def _in_words(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    return {
        name: f"{' x '.join(map(str, lazy.shape)) or 'scalar'} {str(lazy.dtype).removeprefix('torch.')}"
        for name, lazy in tensors.items()
    }


def _plain(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return all values but tensors and containers, as text by path."""
    found: dict[str, str] = {}

    def look(item: Any, path: str) -> Any:
        if type(item) not in (dict, list, tuple) and not isinstance(item, Mapping) and as_lazy(item) is None:
            found[path] = repr(item)
        return map_nested(item, path, look)

    look(checkpoint, "")
    return found


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for name in {**a, **b}:
        if a.get(name) != b.get(name):
            yield Difference(name, a.get(name), b.get(name))


def largest_difference(a: LazyTensor, b: LazyTensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; a NaN equals a NaN.

    The difference is NaN where only one of them has a NaN.
    """
    if not num_elements(a):
        return 0.0
    largest = 0.0
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    for block_a, block_b in zip(read_blocks(a, itemsize), read_blocks(b, itemsize), strict=True):
        flat_a, flat_b = block_a.reshape(-1), block_b.reshape(-1)
        for x, y in zip(flat_a.split(ELEMENTS_AT_ONCE), flat_b.split(ELEMENTS_AT_ONCE), strict=True):
            found = _largest(x, y)
            if math.isnan(found):
                return found
            largest = max(largest, found)
    return largest


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    same_dtype = a.dtype == b.dtype
    if same_dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    found = float((x - y).abs().masked_fill(same, 0.0).max())
    is_integer = not (a.is_floating_point() or a.is_complex())
    # Large integers may differ by less than the resolution of 64-bit floating point.
    return 1.0 if same_dtype and is_integer and not found else found


# ------------------------------------------------------------------------------------------------------- text


def print_comparison(found: Comparison, console: Console) -> None:
    """Print the differences as tables."""
    if found.is_same:
        what = "shapes and types" if found.num_compared is None else f"all values of {found.num_compared:,} tensors"
        also = "; --values compares the tensors' values" if found.num_compared is None else ""
        console.print(f"no difference: facts, numbers and {what} are the same{also}", soft_wrap=True)
        return
    console.print(f"A: {found.a}\nB: {found.b}", soft_wrap=True)
    listed = found.facts + found.tensors[:NUM_LISTED] + found.others[:NUM_LISTED]
    if listed:
        console.print(_table(("differs", "A", "B"), [(d.name, _shortened(d.a), _shortened(d.b)) for d in listed]))
        _print_rest(len(found.facts + found.tensors + found.others) - len(listed), console)
    if found.values:
        largest = sorted(found.values.items(), key=lambda item: (not math.isnan(item[1]), -item[1]))[:NUM_LISTED]
        rows = [(name, f"{value:.3g}") for name, value in largest]
        console.print(_table(("other values", "largest difference"), rows))
        _print_rest(len(found.values) - len(largest), console)
    if found.num_compared is not None:
        console.print(f"{found.num_compared - len(found.values):,} of {found.num_compared:,} tensors are equal")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> TextTable:
    text = TextTable(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in text.columns:
        column.overflow = "fold"
    for row in rows:
        text.add_row(*row)
    return text


def _print_rest(count: int, console: Console) -> None:
    if count:
        console.print(f"and {count:,} more; --json lists them")


def _shortened(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= 60 else f"{text[:57]}..."
