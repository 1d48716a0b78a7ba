"""Writes docs/exactness.md and two files next to it: how far sharded weights are from those of one
unsharded process.

    python -m tests.benchmarks.exactness [--out docs/exactness.md]

Exits with 1 where a difference is over its limit or something went wrong; the page shows it in
bold.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.benchmarks import exactness_text as text
from tests.benchmarks.exactness_cases import (
    FOR_PRECISION,
    OPTIMIZERS,
    PRECISIONS,
    RANKS,
    TRUE_DTYPES,
    WAYS,
    Case,
    Outcome,
    outcomes_of,
    reference_of,
)
from tests.benchmarks.exactness_refusals import NOTHING, refusals
from tests.benchmarks.exactness_runs import (
    NUMBERS_OF_RANKS,
    differences_by_ranks,
    differences_of_averages,
)
from tests.benchmarks.page import Cell, call, largest, listed, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
DENSE_LAYERS = ("first", "last")


@dataclass
class Measured:
    """The cells of every case, and what went wrong on the way."""

    cells: dict[Case, dict[str, Cell]] = field(default_factory=dict)
    """Case -> table, by "<form>_<cut>", or dense layer -> the larger difference of all numbers of
    ranks; or "" -> what was said in the place of numbers."""
    problems: dict[str, list[int]] = field(default_factory=dict)
    """What went wrong -> on how many ranks."""

    def of(self, case: Case, names: Iterable[str] | None = None) -> Cell:
        """Return the largest difference of the tables and dense layers of these names, or of all;
        or what was said."""
        actual = self.cells[case]
        if "" in actual:
            return actual[""]
        return largest([
            actual[name] for name in (actual if names is None else names) if name in actual
        ])

    def tables(self, case: Case) -> Cell:
        """Return the largest difference of all tables."""
        return self.of(case, [f"{form}_{cut}" for form, cuts in case.cuts.items() for cut in cuts])

    def note(self, problem: str, num_ranks: int) -> None:
        """Keep what went wrong."""
        self.problems.setdefault(problem, []).append(num_ranks)

    def add(self, case: Case, num_ranks: int, outcome: Outcome) -> None:
        """Compare an outcome with one unsharded process."""
        actual = self.cells.setdefault(case, {})
        title = f"{case.optimizer}, {case.update}, {case.way}, {case.precision or 'float32'}"
        if outcome.failed or outcome.refused:
            expected = bool(outcome.refused) and case.update == "fused"
            message = (
                "refused"
                if outcome.refused
                else outcome.failed.strip().splitlines()[-1].split(":")[0].strip()
            )
            actual[""] = Cell(message=message, wrong=not expected)
            if not expected:
                last = [
                    line
                    for line in outcome.failed.strip().splitlines()
                    if line and not line.startswith(" ")
                ]
                self.note(f"{title}: {outcome.refused or ' '.join(last[-1:])}", num_ranks)
            return
        reference = reference_of(case, num_ranks)
        for problem in _wrong_about(case, num_ranks, outcome):
            self.note(f"{title}: {problem}", num_ranks)
        for key, wanted in reference.state.items():
            local = outcome.state[key]
            difference = (
                float((local.float() - wanted.float()).abs().max())
                if local.shape == wanted.shape
                else torch.nan
            )
            name = _name_of(key)
            actual[name] = largest([actual.get(name, Cell()), Cell(difference, case.limit)])


def _name_of(key: str) -> str:
    return key.removesuffix(".weight").rsplit(".", 1)[-1]


def _wrong_about(case: Case, num_ranks: int, outcome: Outcome) -> list[str]:
    """Return what would make a comparison worthless, and what else the ranks should have done."""
    reference = reference_of(case, num_ranks)
    problems = []
    if outcome.state.keys() != reference.state.keys():
        problems.append(f"the state has {sorted(outcome.state)}, not {sorted(reference.state)}")
    for form, cuts in case.cuts.items():
        for cut in cuts:
            kind = f"{'dense' if cut == 'data_parallel' else case.update} {cut}"
            if outcome.kinds.get(f"{form}_{cut}") != kind:
                problems.append(
                    f"'{form}_{cut}' was updated {outcome.kinds.get(f'{form}_{cut}')}, not {kind}"
                )
    resting = DENSE_LAYERS if case.optimizer == "SparseAdam" and case.way != "manual" else ()
    for key, value in reference.state.items():
        moved = float((value.float() - reference.begun[key].float()).abs().max())
        if moved < 1e-4 and _name_of(key) not in resting:
            problems.append(f"{key} moved by {moved:.1e} only")
    # that steps as plain training does
    if case.way in WAYS[1:] and (case.way, case.update) != ("manual", "fused"):
        plain = reference_of(Case(case.optimizer, case.update, ""), num_ranks).state
        if (
            max(float((value - plain[key]).abs().max()) for key, value in reference.state.items())
            < 10 * case.limit
        ):
            problems.append("it makes no difference to plain training")
    if outcome.scale != reference.scale:
        problems.append(f"the loss scale ended at {outcome.scale}, not {reference.scale}")
    expected = (
        {str(TRUE_DTYPES[case.precision])} if case.precision in TRUE_DTYPES else outcome.dtypes
    )
    if outcome.dtypes != expected:
        problems.append(f"rows were looked up as {outcome.dtypes}, not {expected}")
    return problems


def _cases() -> list[Case]:
    cases = [
        Case(name, update, way)
        for name, (_, _, updates) in OPTIMIZERS.items()
        for update in updates
        for way in WAYS
    ]
    return cases + [
        Case(name, update, precision=precision)
        for name, (_, _, updates) in FOR_PRECISION.items()
        for update in updates
        for precision in PRECISIONS
    ]


def _by_sharding_type(measured: Measured) -> str:
    """Return every table's difference, as a CSV."""
    lines = ["tables,optimizer,update,sharding type,largest difference"]
    for name, (_, _, updates) in OPTIMIZERS.items():
        for case in (Case(name, update) for update in updates):
            optimizer, update = _titles(case)
            for form, title in text.FORMS.items():
                for cut in case.cuts.get(form, ()):
                    cells = (
                        title,
                        optimizer,
                        update,
                        cut,
                        str(measured.of(case, [f"{form}_{cut}"])),
                    )
                    lines.append(
                        ",".join(f'"{cell}"' if "," in cell else cell for cell in cells).replace(
                            "`", ""
                        )
                    )
    return "\n".join(lines) + "\n"


def _titles(case: Case) -> list[str]:
    kind, options, _ = case.made_of
    return [call(kind, options), case.update]


def _ways(measured: Measured) -> list[str]:
    rows = []
    for name, (_, _, updates) in OPTIMIZERS.items():
        for update in updates:
            cases = [Case(name, update, way) for way in WAYS]
            rows.append([*_titles(cases[0]), *(measured.of(case) for case in cases)])
    return [text.WAYS, table(["optimizer", "update", *text.NAMES_OF_WAYS.values()], rows, 2)]


def _precisions(measured: Measured) -> list[str]:
    rows = []
    for name, (_, _, updates) in FOR_PRECISION.items():
        for update in updates:
            cases = [Case(name, update, precision=precision) for precision in PRECISIONS]
            rows.append([*_titles(cases[0]), *(_both(measured, case) for case in cases)])
    header = [f"`{p}`" if "table" not in p else p for p in PRECISIONS]
    return [text.PRECISIONS, table(["optimizer", "update", *header], rows, 2)]


def _both(measured: Measured, case: Case) -> str:
    tables, dense = measured.tables(case), measured.of(case, DENSE_LAYERS)
    return str(tables) if tables.value is None else f"{tables} / {dense}"


def main() -> int:
    """Measure everything and write the page; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PAGE, help="where the page goes")
    out = parser.parse_args().out
    torch.set_num_threads(1)  # as on the ranks, so that sums have one order
    began, measured, cases = time.monotonic(), Measured(), _cases()
    for num_ranks in RANKS:
        for case, outcome in zip(cases, outcomes_of(cases, num_ranks, _tell), strict=True):
            measured.add(case, num_ranks, outcome)
    averages = {
        name: Cell(value, limit) for name, (value, limit) in differences_of_averages().items()
    }
    per_ranks = [
        [name, f"{label}", *(Cell(actual[n][i], limit) for n in NUMBERS_OF_RANKS)]
        for name, (actual, limit) in differences_by_ranks().items()
        for i, label in enumerate(("losses", "weights"))
    ]
    message = refusals()
    for case in [
        case
        for heading_values in message.values()
        for case, message in heading_values.items()
        if message == NOTHING
    ]:
        measured.note(f"what is refused, {case}: {NOTHING}", 2)
    summary = _summary(measured, averages, per_ranks)
    parts = [
        text.head(table(["", "largest difference", "allowed"], summary), torch.cuda.is_available()),
        *_problems(measured),
        *_ways(measured),
        *_precisions(measured),
        text.AVERAGES,
        table(["average", "difference"], list(averages.items())),
        text.BY_RANKS,
        table(["model", "what", *map(text.ranks, NUMBERS_OF_RANKS)], per_ranks, 2),
        text.REFUSED,
    ]
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    out.with_name(text.DETAILS).write_text(_by_sharding_type(measured), encoding="utf-8")
    refused = [f"{heading}\n\n{listed(messages)}" for heading, messages in message.items()]
    out.with_name(text.REFUSALS).write_text("\n\n".join(refused) + "\n", encoding="utf-8")
    bad = [cell for row in summary for cell in row if isinstance(cell, Cell) and cell.bad]
    _tell(
        f"{out}: {time.monotonic() - began:.0f} s, {len(bad)} lines over their limit, "
        f"{len(measured.problems)} problems"
    )
    for problem in measured.problems:
        _tell(problem)
    return int(bool(bad or measured.problems))


def _problems(measured: Measured) -> list[str]:
    if not measured.problems:
        return []
    lines = [
        f"- **{problem}** ({' and '.join(map(str, device))} ranks)"
        for problem, device in measured.problems.items()
    ]
    return ["What went wrong:", "\n".join(lines)]


def _summary(
    measured: Measured, averages: dict[str, Cell], per_ranks: list[list[object]]
) -> list[list[object]]:
    groups: dict[str, list[Cell]] = {}
    for case in measured.cells:
        kind = (
            "16-bit arithmetic"
            if case.limit == 1e-3
            else "SGD"
            if case.limit == 1e-6
            else "other optimizers"
        )
        groups.setdefault(kind, []).append(measured.of(case))
    groups["averages of weights"] = list(averages.values())
    groups["1 to 4 ranks"] = [cell for row in per_ranks for cell in row if isinstance(cell, Cell)]
    limits = {name: max(cell.limit for cell in cells) for name, cells in groups.items()}
    return [[name, largest(cells), f"{limits[name]:.0e}"] for name, cells in groups.items()]


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
