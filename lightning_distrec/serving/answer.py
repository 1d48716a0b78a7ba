"""Answers requests from this folder. It needs torch, numpy and safetensors, and no process group.

`python serve.py` answers request.json, the first of the examples, and

- `python serve.py other.json` another request: the inputs by name, as request.json has them,
- `python serve.py --follow FOLDER` the same, with what PublishRows has published there,
- `python serve.py --check` compares answers to the examples with those of the trained module,
- `python serve.py --index HNSW32` adds an index of faiss to a folder that answers with items.

Where the folder has columns.json, a request is a row of raw values by column, or a list of rows.
Where it answers with items, a request may have `k`, how many, and `exclude`, a list for each query;
several rows of columns are its `rows` then. In a program: `serve.Server(folder).answer({"name":
tensor, ...})`, or `answer_plain(request)`; by HTTP: app.py. Tables stay in their file, mapped into
memory.
"""

import argparse
import importlib.util
import json
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import torch

try:
    from safetensors.torch import load_file
except ImportError:
    if __name__ != "__main__":
        raise
    sys.exit(
        "serve.py needs the package safetensors, which is not installed. Run pip install "
        "safetensors."
    )

FOLDER = Path(__file__).resolve().parent


class Server:
    """The trained module, as `lightning-distrec export` wrote it."""

    def __init__(self, folder: str | Path = FOLDER, verify: bool = True) -> None:
        """Load the program, and map the tables. verify: whether to read all bytes first;
        ValueError: damaged."""
        folder = Path(folder)
        self.about = json.loads((folder / "serving.json").read_text())
        for name, checksum in self.about.get("crc32", {}).items() if verify else ():
            if file_crc32(folder / name) != checksum:
                raise ValueError(
                    f"{folder / name} is damaged: it does not match its checksum. Export it again."
                )
        for package in self.about["needs"]:
            # Registers operators, which torch.export.load looks up by name.
            importlib.import_module(package)
        self.tables = load_file(folder / "tables.safetensors")
        self.program = torch.export.load(folder / "program.pt2").module()
        add_id_checks(self.program)
        self.published: dict[str, Any] = {**self.about.get("published", {}), "is_export": True}
        """What it answers by: `step`, and of a publication `sequence`, `run` and `job`."""
        self.lock = threading.RLock()
        """Held while a request is answered, and while a publication is taken over."""
        self._folder = folder
        self._followers: dict[str, Any] = {}
        self.encoder: Any = None
        """From raw values to inputs, where the module was trained on columns."""
        if (folder / "columns.json").exists():
            mapping = json.loads((folder / "columns.json").read_text())
            self.encoder = script(folder / "raw_values.py").Encoder(mapping)
        self.items: Any = None
        """The table whose best rows are the answer, where the module's are."""
        if "top_k" in self.about:
            about = self.about["top_k"]
            nearest_rows = script(folder / "nearest_rows.py")
            table = self.tables[about["table"]]
            self.items = nearest_rows.Items(
                folder,
                about,
                table,
                self.encoder,
            )

    def apply(self, folder: str) -> int:
        """Take over what PublishRows has published in a folder since the last call, in order;
        return how many publications. Raises ValueError: one is damaged, does not go on from what is
        served, or is of another model."""
        taken: int = self.follower(folder).take()
        return taken

    def follower(self, folder: str) -> Any:
        """Return what takes publications over, once by `take()`, or in a thread from `run()` on."""
        if folder not in self._followers:
            self._followers[folder] = script(self._folder / "follow.py").Follower(self, folder)
        return self._followers[folder]

    def answer(
        self,
        inputs: dict[str, torch.Tensor],
        k: int | None = None,
        exclude: list[list[Any]] | None = None,
    ) -> Any:
        """Return what predict_step returns; where the folder answers with items, "items" and
        "scores".

        inputs: tensors by name. k: how many items. exclude: for each query, items that do not
        count. Raises ValueError: one of these does not fit.
        """
        if self.items is None and (k is not None or exclude is not None):
            raise ValueError("the folder answers with no items, and takes no k and no exclude")
        with self.lock:
            output = self.output(inputs)
            return output if self.items is None else self.items.answer(output, k, exclude)

    def output(self, inputs: dict[str, torch.Tensor]) -> Any:
        """Return what the program returns: where the folder answers with items, queries."""
        missing = self.about["inputs"].keys() - inputs.keys()
        if missing:
            raise ValueError(f"the request lacks {sorted(missing)}")
        # The program refuses keys that it was not exported with, and a request may have more.
        order = {name: inputs[name] for name in self.about["inputs"]}
        for name, tensor in order.items():
            self._check_input(name, tensor, order)
        self._check_sizes(order)
        try:
            with torch.no_grad():
                return self.program(self.tables, order)
        except IdError as error:
            ranges = []
            for name, ids in order.items():
                if not ids.is_floating_point() and ids.numel():
                    ranges.append(f"{int(ids.min())} to {int(ids.max())} in '{name}'")
            raise ValueError(f"{error}; there are {', '.join(ranges)}") from error
        # torch.export's guards on sizes, and operators' own
        except (AssertionError, RuntimeError) as error:
            raise ValueError(
                f"the inputs do not fit each other: {str(error).splitlines()[0]}"
            ) from error

    def _check_input(
        self, name: str, tensor: torch.Tensor, inputs: dict[str, torch.Tensor]
    ) -> None:
        """Raise ValueError where an input has another type or shape, or lengths do not divide their
        values."""
        about = self.about["inputs"][name]
        dtype = about["dtype"]
        sizes = about["shape"]
        actual = getattr(tensor, "dtype", type(tensor).__name__)
        if str(actual) != f"torch.{dtype}":
            raise ValueError(f"'{name}' must be a tensor of {dtype}, not {actual}")
        pairs = zip(sizes, tensor.shape, strict=False)
        free = [None if size is None else length for size, length in pairs]
        if len(sizes) != tensor.dim() or free != sizes:
            shape = " x ".join(map(str, sizes)).replace("None", "any") or "one number"
            raise ValueError(
                f"'{name}' must have the shape {shape}, not {' x '.join(map(str, tensor.shape))}"
            )
        values = about.get("lengths_of")
        if values in inputs:
            if tensor.numel() and int(tensor.min()) < 0:
                raise ValueError(f"'{name}' has the length {int(tensor.min())}")
            total = int(tensor.sum(dtype=torch.float64))  # integers of 64 bits would wrap around
            if total != len(inputs[values]):
                raise ValueError(
                    f"'{name}' sum up to {total}, and '{values}' has {len(inputs[values])}"
                )

    def _check_sizes(self, inputs: dict[str, torch.Tensor]) -> None:
        """Raise ValueError where inputs that grow with the number of examples are of unequal
        numbers of them."""
        shares: dict[str, dict[str, float]] = {}
        for name, tensor in inputs.items():
            rows = self.about["inputs"][name].get("rows")
            if rows and all(rows):
                # Of two batches: inputs whose rows grew alike have a fixed number for each example.
                growth = rows if rows[0] == rows[1] else rows[0] / rows[1]
                shares.setdefault(str(growth), {})[name] = len(tensor) / rows[0]
        for group in shares.values():
            if len(set(group.values())) > 1:
                sizes = ", ".join(f"{len(inputs[name])} in '{name}'" for name in group)
                raise ValueError(
                    "inputs must have rows for as many examples as each other, and there are "
                    f"{sizes}"
                )

    def inputs_of_rows(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the inputs of raw rows. Raises ValueError: a column is unknown, or a value of
        another type."""
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise ValueError(
                "a request is a row of values by column, or a list of rows, one or more"
            )
        arrays = self.encoder.arrays_of_rows(rows)
        tensors = {}
        for name, array in arrays.items():
            if name in self.about["inputs"]:
                tensors[name] = torch.from_numpy(array)
        return tensors

    def answer_plain(self, request: Any) -> Any:
        """Return the answer as lists and dicts. request: lists by name; with columns.json, a row or
        a list of rows."""
        options = {}
        if self.items is not None and isinstance(request, dict):
            options = {name: request[name] for name in ITEM_OPTIONS if name in request}
            request = {name: request[name] for name in request if name not in options}
            request = request.get("rows", request)
        if self.encoder is None:
            inputs = self.inputs_of_lists(request)
        else:
            inputs = self.inputs_of_rows([request] if isinstance(request, dict) else request)
        return self.plain_answer(self.answer(inputs, **options))

    def plain_answer(self, answer: Any) -> Any:
        """Return what `answer` returns as lists and dicts."""
        return plain(answer if self.items is None else self.items.plain(answer))

    def inputs_of_lists(self, request: Any) -> dict[str, torch.Tensor]:
        """Return the inputs of lists by name. Raises ValueError: a name is unknown, or a list of
        another type."""
        if not isinstance(request, dict):
            raise ValueError("a request is a dict of inputs by name")
        inputs_by_name = self.about["inputs"]
        unknown = request.keys() - inputs_by_name.keys()
        if unknown:
            raise ValueError(
                f"the request has {sorted(unknown)}, and the inputs are {sorted(inputs_by_name)}"
            )
        inputs = {}
        for name, values in request.items():
            shape = inputs_by_name[name]["shape"]
            dtype = inputs_by_name[name]["dtype"]
            kind = dtype.rstrip("0123456789")
            # torch would make 1 of 1.7 and of true.
            allowed = KINDS.get(kind, (int, float))
            for leaf in plain_leaves(values):
                if type(leaf) not in allowed:
                    raise ValueError(f"'{name}' must be lists of {dtype}, and has {leaf!r}")
            try:
                tensor = torch.tensor(values, dtype=getattr(torch, dtype))
            except (OverflowError, TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"'{name}' must be lists of {dtype} in equal lengths: {error}"
                ) from error
            # Lists without examples do not show their inner sizes; these come from the export.
            if not tensor.numel() and None not in shape[1:]:
                tensor = tensor.reshape(0, *shape[1:])
            inputs[name] = tensor
        return inputs


ITEM_OPTIONS = ("k", "exclude")
"""What a request may have beside its inputs, where the folder answers with items."""

KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "uint": (int,), "bool": (bool,)}
"""Names of torch's types without bits -> types of JSON for them; others take all numbers."""

LOOKUPS = {"aten.embedding": 1, "aten.embedding_bag": 1, "aten.index_select": 2}
"""Operators that read rows of a table -> which argument the ids are."""


def script(path: Path) -> Any:
    """Return a file of the folder as a module."""
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class IdError(ValueError):
    """An id has no row in its table."""


def check_ids(ids: torch.Tensor, table: torch.Tensor) -> None:
    """Raise IdError where an id has no row."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
        raise IdError(f"an id has no row in its table of {len(table)} rows")


def add_id_checks(program: Any) -> None:
    """Check ids before a program's lookups: operators differ in what they say, and in what they
    read."""
    for node in list(program.graph.nodes):
        position = LOOKUPS.get(str(node.target).rpartition(".")[0])
        if position is not None and node.args[0].op == "placeholder":
            with program.graph.inserting_before(node):
                program.graph.call_function(check_ids, (node.args[position], node.args[0]))
    program.recompile()


def plain_leaves(value: Any) -> Any:
    """Yield what is no list, in nested lists."""
    if isinstance(value, list):
        for item in value:
            yield from plain_leaves(item)
    else:
        yield value


def file_crc32(path: Path) -> int:
    """Return the checksum of a file."""
    checksum = 0
    with open(path, "rb", buffering=0) as file:
        for content in iter(lambda: file.read(2**20), b""):
            checksum = zlib.crc32(content, checksum)
    return checksum


def plain(value: Any) -> Any:
    """Return nested tensors as nested lists, with None for what is no finite number: JSON has no
    such numbers."""
    if isinstance(value, torch.Tensor):
        if value.isfinite().all():
            return value.tolist()
        value = list(value) if value.dim() else None
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else value


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    tensors = []
    for item in value if isinstance(value, (list, tuple)) else ():
        tensors += leaves(item)
    return tensors


def add_index(folder: Path, factory: str) -> float:
    """Add an index of its items to a folder; return the share of the exact answers to the examples
    that it finds. Raises ValueError: see `Items.add_index`."""
    server = Server(folder, verify=False)
    if server.items is None:
        raise ValueError("the folder answers with no items: export it with --queries and --items")
    queries = server.output(examples(server, folder)[0])
    recall: float = server.items.add_index(folder, factory, queries)
    server.about["crc32"]["items.faiss"] = file_crc32(folder / "items.faiss")
    (folder / "serving.json").write_text(json.dumps(server.about) + "\n")
    return recall


def examples(server: Server, folder: Path) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the inputs of the examples, and the trained module's answers."""
    stored = load_file(folder / "examples.safetensors")
    inputs = {name: stored.pop("inputs." + name) for name in server.about["inputs"]}
    return inputs, [stored[f"answers.{number}"] for number in range(len(stored))]


def check(server: Server, folder: Path = FOLDER) -> float:
    """Return the largest difference from the trained module's answers to the examples; of integers,
    1 or 0. Without an index."""
    if server.items is not None:
        server.items.index = None
    inputs, expected = examples(server, folder)
    fractions, integers = differences(leaves(server.answer(inputs)), expected)
    return max(float(fractions.max()), float(integers.any()))


def differences(
    answers: list[torch.Tensor], expected: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the absolute differences of fractions, and a 0, and where integers differ."""
    fractions = [torch.zeros(1).double()]
    differs = [torch.zeros(0).bool()]
    for a, b in zip(answers, expected, strict=True):
        # Infinities, of scores that are masked, are equal where their difference is no number.
        if b.is_floating_point():
            fractions.append(torch.where(a == b, 0, (a - b).abs()).double().flatten())
        else:
            differs.append((a != b).flatten())
    return torch.cat(fractions), torch.cat(differs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "request",
        nargs="?",
        type=Path,
        default=FOLDER / "request.json",
    )
    for option in ("--follow", "--index", "--http"):
        parser.add_argument(option)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        if options.http:
            raise ValueError("app.py answers by HTTP: python app.py --port 8000")
        if options.index:
            print(f"finds {add_index(FOLDER, options.index):.2%} of the exact answers")
        elif options.check:
            server = Server()
            allowed = server.about["largest_difference"]
            print(
                f"largest difference from the trained module: {check(server):.3g} ({allowed:.3g} "
                "when it was exported)"
            )
        else:
            server = Server()
            if options.follow:
                server.apply(options.follow)
            request = json.loads(options.request.read_text())
            print(json.dumps(server.answer_plain(request)))
    except (OSError, ValueError) as error:
        sys.exit(f"serve.py: {error}.")
