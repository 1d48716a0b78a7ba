"""Answers requests from this folder. It needs torch, numpy and safetensors, and no process group.

`python serve.py` answers request.json, the first of the examples, and

- `python serve.py other.json` another request: the inputs by name, as request.json has them,
- `python serve.py --http 8080` requests that this machine sends by POST to this port,
- `python serve.py --check` compares answers to the examples with those of the trained module.

Where the folder has columns.json, a request is a row of raw values by column, or a list of rows. In
a program: `serve.Server(folder).answer({"name": tensor, ...})`, or `answer_plain(request)`. Tables
stay in their file, mapped into memory.
"""

import importlib.util
import json
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        self.encoder: Any = None
        """From raw values to inputs, where the module was trained on columns."""
        if (folder / "columns.json").exists():
            spec: Any = importlib.util.spec_from_file_location(
                "raw_values", folder / "raw_values.py"
            )
            raw_values = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(raw_values)
            self.encoder = raw_values.Encoder(json.loads((folder / "columns.json").read_text()))

    def answer(self, inputs: dict[str, torch.Tensor]) -> Any:
        """Return what predict_step returns. inputs: tensors by name."""
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
            integers = {
                name: ids
                for name, ids in order.items()
                if not ids.is_floating_point() and ids.numel()
            }
            ids = ", ".join(
                f"{int(ids.min())} to {int(ids.max())} in '{name}'"
                for name, ids in integers.items()
            )
            raise ValueError(f"{error}; there are {ids}") from error
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
        matches = [
            size is None or size == length
            for size, length in zip(sizes, tensor.shape, strict=False)
        ]
        if len(sizes) != tensor.dim() or not all(matches):
            shape = (
                " x ".join("any" if size is None else str(size) for size in sizes) or "one number"
            )
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
                listed = ", ".join(f"{len(inputs[name])} in '{name}'" for name in group)
                raise ValueError(
                    "inputs must have rows for as many examples as each other, and there are "
                    f"{listed}"
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
        if self.encoder is not None:
            return plain(
                self.answer(
                    self.inputs_of_rows([request] if isinstance(request, dict) else request)
                )
            )
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
            inputs[name] = (
                tensor if tensor.numel() or None in shape[1:] else tensor.reshape(0, *shape[1:])
            )
        return plain(self.answer(inputs))


MAX_REQUEST_BYTES = 2**26

KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "uint": (int,), "bool": (bool,)}
"""Names of torch's types without bits -> types of JSON for them; others take all numbers."""

LOOKUPS = {"aten.embedding": 1, "aten.embedding_bag": 1, "aten.index_select": 2}
"""Operators that read rows of a table -> which argument the ids are."""


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


def check(server: Server, folder: Path = FOLDER) -> float:
    """Return the largest difference from the trained module's answers to the examples; of integers,
    1 or 0."""
    stored = load_file(folder / "examples.safetensors")
    answers = leaves(
        server.answer({name: stored["inputs." + name] for name in server.about["inputs"]})
    )
    expected = [stored[f"answers.{number}"] for number in range(len(answers))]
    largest = 0.0
    for a, b in zip(answers, expected, strict=True):
        difference = torch.where(a == b, 0, (a - b).abs() if b.is_floating_point() else 1)
        largest = max(largest, float(difference.max())) if a.numel() else largest
    return largest


class HTTPServer(ThreadingHTTPServer):
    """A thread for each connection; as many connections wait for theirs as clients are likely to
    open at once."""

    request_queue_size = 1024


def http_server(server: Server, port: int) -> ThreadingHTTPServer:
    """Return a server of this machine's own port, for requests by POST; what does not fit is
    answered with 400."""
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = 60  # seconds without a byte, after which a connection ends
        error_content_type = "application/json"
        error_message_format = '{"error": "%(explain)s"}'

        def do_GET(self) -> None:  # noqa: N802  http.server's name
            """Answer /health, while a request is computed, too."""
            if self.path == "/health":
                self.send_json(200, {"status": "ok", "of": server.about["of"]})
            else:
                self.send_json(404, {"error": "send requests by POST, or GET /health"})

        def do_POST(self) -> None:  # noqa: N802  http.server's name
            try:
                length = int(self.headers.get("Content-Length", 0))
                if not 0 < length <= MAX_REQUEST_BYTES:
                    raise ValueError(
                        f"a request needs a Content-Length of 1 to {MAX_REQUEST_BYTES} bytes"
                    )
                request = json.loads(self.rfile.read(length))
                with turn:
                    status = 200
                    answer = server.answer_plain(request)
            except (ValueError, RecursionError) as error:
                status = 400
                answer = {"error": str(error)}
            except Exception as error:
                status = 500
                answer = {"error": f"{type(error).__name__}: {error}"}
            self.send_json(status, answer)

        def send_json(self, status: int, answer: Any) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Write no line for each request."""

    return HTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--http"] and len(sys.argv) == 3 and sys.argv[2].isdecimal():
        with http_server(Server(), int(sys.argv[2])) as http:
            print(f"http://127.0.0.1:{http.server_port}: send requests by POST", flush=True)
            http.serve_forever()
    elif sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
    elif sys.argv[1:] == ["--check"]:
        allowed = json.loads((FOLDER / "serving.json").read_text())["largest_difference"]
        difference = check(Server())
        print(
            f"largest difference from the trained module: {difference:.3g} ({allowed:.3g} when it "
            "was exported)"
        )
    else:
        request = Path(sys.argv[1]) if sys.argv[1:] else FOLDER / "request.json"
        try:
            print(json.dumps(Server().answer_plain(json.loads(request.read_text()))))
        except (OSError, ValueError) as error:
            sys.exit(f"serve.py: {request}: {error}.")
