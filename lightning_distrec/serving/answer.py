"""Answers requests from this folder. It needs torch, numpy and safetensors, and no process group.

    python serve.py                  answers request.json, the first of the examples
    python serve.py other.json       answers another request: the inputs by name, as request.json has them
    python serve.py --check          compares answers to the examples with those of the trained module

In a program: `serve.Server(folder).answer({"name": tensor, ...})`. Tables stay in their file, mapped into memory.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

try:
    from safetensors.torch import load_file
except ImportError:
    if __name__ != "__main__":
        raise
    sys.exit("serve.py needs the package safetensors, which is not installed. Run pip install safetensors.")

HERE = Path(__file__).resolve().parent


class Server:
    """The trained module, as `lightning-distrec export` wrote it."""

    def __init__(self, folder: str | Path = HERE) -> None:
        """Load the program, and map the tables."""
        folder = Path(folder)
        self.about = json.loads((folder / "serving.json").read_text())
        for package in self.about["needs"]:
            # Registers operators, which torch.export.load looks up by name.
            importlib.import_module(package)
        self.tables = load_file(folder / "tables.safetensors")
        self.program = torch.export.load(folder / "program.pt2").module()

    def answer(self, inputs: dict[str, torch.Tensor]) -> Any:
        """Return what predict_step returns. inputs: tensors by name."""
        missing = self.about["inputs"].keys() - inputs.keys()
        if missing:
            raise ValueError(f"the request lacks {sorted(missing)}")
        # The program refuses keys that it was not exported with, and a request may have more.
        order = {name: inputs[name] for name in self.about["inputs"]}
        self._check_sizes(order)
        try:
            with torch.no_grad():
                return self.program(self.tables, order)
        except AssertionError as error:  # torch.export's guards on sizes
            raise ValueError(f"the inputs do not fit each other: {str(error).splitlines()[0]}") from error
        except (IndexError, RuntimeError) as error:
            if "out of range" not in str(error) and "not in the valid range" not in str(error):
                raise
            largest = {name: int(ids.max()) for name, ids in order.items() if not ids.is_floating_point() and len(ids)}
            ids = ", ".join(f"{number} in '{name}'" for name, number in largest.items())
            raise ValueError(f"an id has no row in its table; the largest are {ids}") from error

    def _check_sizes(self, inputs: dict[str, torch.Tensor]) -> None:
        """Raise ValueError where inputs that have one row for each example have unequal numbers of rows."""
        sizes: dict[str, dict[str, int]] = {}
        for name, tensor in inputs.items():
            if rows := self.about["inputs"][name].get("rows"):
                sizes.setdefault(str(rows), {})[name] = len(tensor)
        for lengths in sizes.values():
            if len(set(lengths.values())) > 1:
                listed = ", ".join(f"{length} in '{name}'" for name, length in lengths.items())
                raise ValueError(f"inputs must have as many rows as each other, and there are {listed}")

    def answer_plain(self, request: dict[str, Any]) -> Any:
        """Return the answer as lists and dicts. request: lists by name."""
        inputs_by_name = self.about["inputs"]
        unknown = request.keys() - inputs_by_name.keys()
        if unknown:
            raise ValueError(f"the request has {sorted(unknown)}, and the inputs are {sorted(inputs_by_name)}")
        inputs = {}
        for name, values in request.items():
            # Lists without examples do not show their inner sizes; these come from the export.
            item_shape = inputs_by_name[name]["shape"][1:]
            dtype = inputs_by_name[name]["dtype"]
            try:
                values = torch.tensor(values, dtype=getattr(torch, dtype))
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"'{name}' must be lists of {dtype} in equal lengths: {error}") from error
            inputs[name] = values.reshape(-1, *item_shape) if None not in item_shape and item_shape else values
        return plain(self.answer(inputs))


def plain(value: Any) -> Any:
    """Return nested tensors as nested lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [leaf for item in items for leaf in leaves(item)]


def check(server: Server, folder: Path = HERE) -> float:
    """Return the largest difference from the trained module's answers to the examples; of integers, 1 or 0."""
    stored = load_file(folder / "examples.safetensors")
    answers = leaves(server.answer({name: stored["inputs." + name] for name in server.about["inputs"]}))
    expected = [stored[f"answers.{number}"] for number in range(len(answers))]
    largest = 0.0
    for a, b in zip(answers, expected, strict=True):
        difference = torch.where(a == b, 0, (a - b).abs() if b.is_floating_point() else 1)
        largest = max(largest, float(difference.max())) if a.numel() else largest
    return largest


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
    elif sys.argv[1:] == ["--check"]:
        allowed = json.loads((HERE / "serving.json").read_text())["largest_difference"]
        difference = check(Server())
        print(f"largest difference from the trained module: {difference:.3g} ({allowed:.3g} when it was exported)")
    else:
        request = Path(sys.argv[1]) if sys.argv[1:] else HERE / "request.json"
        try:
            print(json.dumps(Server().answer_plain(json.loads(request.read_text()))))
        except (OSError, ValueError) as error:
            sys.exit(f"serve.py: {request}: {error}.")
