"""Times of answers by HTTP, beside calls of the program in this process.

    python -m tests.benchmarks.serving [--requests 400] [--clients 1 16]

The folder has a model of columns, 4 features. Each client sends a row of raw values, waits for the
answer, and sends the next. Clients, server and workers share the machine's cores.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the workers

from lightning_distrec.serving.answer import Server  # noqa: E402
from lightning_distrec.serving.artifact import RawRows, export_for_serving  # noqa: E402
from tests.support.column_models import ColumnModel, click_data, write_clicks  # noqa: E402
from tests.support.served_app import App, running_app  # noqa: E402

KINDS = {
    "1 worker": ("--workers", "1"),
    "2 workers": ("--workers", "2"),
    "1 worker, max_batch_size 16": ("--workers", "1", "--max_batch_size", "16"),
}


def write_folder(path: Path) -> Path:
    """Export a model that was not trained; return the folder."""
    file = write_clicks(path)
    data = click_data(file, predict=file)
    data.prepare_data()
    data.setup("predict")
    raw = RawRows(mapping=data.columns.to_plain(), rows=data.raw_rows())
    columns = {name: [row[name] for row in raw.rows] for name in raw.rows[0]}
    export_for_serving(ColumnModel(), data.columns(columns), path / "served", raw=raw)
    return path / "served"


def report(kind: str, clients: int, seconds: list[float], wall: float) -> None:
    """Print a row of a table."""
    cuts = statistics.quantiles(seconds, n=100)
    numbers = f"{1e3 * cuts[49]:.1f} | {1e3 * cuts[98]:.1f} | {len(seconds) / wall:.0f}"
    print(f"| {kind} | {clients} | {numbers} |", flush=True)


def measure(kind: str, num_clients: int, num_requests: int, ask: Callable[[int], None]) -> None:
    """Let clients send requests, as many in all, and print their times. ask: sends a client's."""
    seconds: list[float] = []

    def send(client: int) -> None:
        for _ in range(num_requests // num_clients):
            begin = time.perf_counter()
            ask(client)
            seconds.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=send, args=(client,)) for client in range(num_clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(kind, num_clients, seconds, time.perf_counter() - begin)


def measure_app(app: App, kind: str, num_clients: int, num_requests: int, body: bytes) -> None:
    """Measure clients that keep a connection each."""
    connections = [app.connection() for _ in range(num_clients)]

    def ask(client: int) -> None:
        headers = {"Content-Type": "application/json"}
        connections[client].request("POST", "/predict", body, headers)
        response = connections[client].getresponse()
        assert response.status == 200, response.read()
        response.read()

    measure(kind, num_clients, num_requests, ask)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = write_folder(Path(path))
        server = Server(folder)
        body = (folder / "request.json").read_bytes()
        print("| | clients | p50, ms | p99, ms | requests per second |")
        print("| --- | ---: | ---: | ---: | ---: |")
        call = "a call of the program"
        measure(call, 1, options.requests, lambda _: server.answer_plain(json.loads(body)))
        for kind, arguments in KINDS.items():
            with running_app(folder, *arguments) as app:
                for num_clients in options.clients:
                    measure_app(app, kind, num_clients, options.requests, body)


if __name__ == "__main__":
    main()
