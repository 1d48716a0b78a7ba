"""app.py answers many clients at once, each as `Server.answer_plain` does."""

import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_distrec.serving import answer, app
from tests.support.console import finished
from tests.support.served_app import App, running_app
from tests.unit.serving.test_served_items import ROWS, NextItem, exported

SMALL = {"history": [[1, 2, 3]]}
LARGE: dict[str, Any] = {"history": [[1, 2, 3]] * 20_000}
"""A request that takes seconds."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[App, answer.Server, Path]]:
    folder = tmp_path_factory.mktemp("app") / "served"
    server = exported(folder, NextItem(), published={"step": 12})
    with running_app(folder) as app:
        yield app, server, folder


def _ask_at_once(app: App, server: answer.Server, count: int) -> None:
    """Open all connections, send a row on each, and compare the answers."""
    requests = []
    connections = []
    for number in range(count):
        history = [number % ROWS, number * 7 % ROWS, number * 31 % ROWS]
        requests.append({"history": [history], "k": 1 + number % 5, "exclude": [[number % ROWS]]})
        connections.append(app.connection())
        connections[-1].connect()
    for request, connection in zip(requests, connections, strict=True):
        body = app.body(request)
        connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
    for request, connection in zip(requests, connections, strict=True):
        assert app.answer(connection) == (200, server.answer_plain(request), "12")


def test_200_clients_at_once_get_the_answers_to_their_rows(
    served: tuple[App, answer.Server, Path],
) -> None:
    _ask_at_once(*served[:2], 200)


@pytest.mark.slow
def test_1000_clients_at_once_get_the_answers_to_their_rows(
    served: tuple[App, answer.Server, Path],
) -> None:
    _ask_at_once(*served[:2], 1000)


def test_what_cannot_be_answered_is_told_by_name(served: tuple[App, answer.Server, Path]) -> None:
    app = served[0]
    for method, path, content, status, message in (
        ("POST", "/predict", {"history": [[1, 2]]}, 400, "'history' must have the shape any x 3"),
        ("POST", "/predict", {"history": [["a", 1, 2]]}, 400, "'history' must be lists of int64"),
        ("POST", "/predict", SMALL | {"k": 0}, 400, f"k must be 1 to {ROWS}, and is 0"),
        ("POST", "/predict", SMALL | {"exclude": [[ROWS]]}, 400, f"there is no item {ROWS}"),
        ("POST", "/predict", [1], 400, "a request is a dict of inputs by name"),
        ("POST", "/predict", b"{", 422, "Expecting property name"),
        ("POST", "/predict", b"[" * 100_000, 400, "error parsing the body"),
        ("POST", "/predict", b" " * (2**26 + 1), 413, "too large"),
        ("GET", "/predict", None, 405, "Not Allowed"),
        ("GET", "/elsewhere", None, 404, "Not Found"),
    ):
        answered = app.ask(method, path, content)
        assert (answered.status, message in str(answered.content)) == (status, True), answered
    assert app.ask("GET", "/health")[:2] == (200, "ok")
    assert "/predict" in app.ask("GET", "/openapi.json").content["paths"]


def test_a_long_request_does_not_stop_others(served: tuple[App, answer.Server, Path]) -> None:
    app = served[0]
    answered: list[Any] = []
    long = threading.Thread(target=lambda: answered.append(app.ask(content=LARGE)))
    long.start()
    time.sleep(0.2)
    for _ in range(5):
        assert app.ask(content=SMALL).status == 200
    assert not answered
    long.join()
    assert answered[0].status == 200
    assert len(answered[0].content["items"]) == len(LARGE["history"])


@pytest.mark.slow
def test_a_request_that_waits_too_long_is_told_and_the_server_ends_whole(
    served: tuple[App, answer.Server, Path],
) -> None:
    with running_app(served[2], "--workers", "1", "--timeout", "0.5") as app:
        # 5: fast machines answer LARGE before the other request has waited long enough.
        long = app.sent("POST", "/predict", app.body({"history": LARGE["history"] * 5}))
        time.sleep(0.3)
        assert app.ask(content=SMALL)[:2] == (504, {"detail": "Request timed out"})
        assert app.answer(long).status == 200
        (worker,) = [pid for pid in app.processes() if _is_worker(pid)]
        os.kill(worker, signal.SIGKILL)
        app.process.wait(timeout=60)
        app.returncode = 1
    with running_app(served[2]) as app:
        app.process.kill()
        app.returncode = -signal.SIGKILL


@pytest.mark.slow
def test_clients_that_do_not_send_their_whole_request_do_not_hold_up_the_end(
    served: tuple[App, answer.Server, Path],
) -> None:
    with running_app(served[2]) as app:
        for _ in range(4):
            connection = app.connection()
            connection.putrequest("POST", "/predict")
            connection.putheader("Content-Length", "100")
            connection.endheaders(b"{")
        time.sleep(0.5)
        begin = time.monotonic()
    assert time.monotonic() - begin < 2 * 20


def _is_worker(pid: int) -> bool:
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_requests_by_name_are_not_joined(
    served: tuple[App, answer.Server, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "FOLDER", served[2])
    api = app.API("", max_batch_size=2)
    api._server = served[1]
    with pytest.raises(ValueError, match="--max_batch_size: only raw rows can be joined"):
        api._check_joining(answer)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "no.such.host.invalid"])
def test_a_place_that_cannot_be_is_told_before_anything_is_loaded(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.create_server((host.replace("no.such.host.invalid", ""), 0), family=family) as used:
        port = used.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["app.py", "--host", host, "--port", str(port)])
        with pytest.raises(SystemExit):
            app.main()
    expected = "Name or service" if "invalid" in host else "Address already in use"
    assert f"error: --host {host} --port {port}: " in (error := capsys.readouterr().err)
    assert expected in error or "resolution" in error


def test_the_script_names_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", "--http", "8080"])
    with pytest.raises(SystemExit, match="app.py answers by HTTP: python app.py --port 8000"):
        runpy.run_path(answer.__file__, run_name="__main__")


def test_without_litserve_it_says_what_to_install(served: tuple[App, answer.Server, Path]) -> None:
    code = "import sys, runpy; sys.modules['litserve'] = None; runpy.run_path('app.py', run_name='__main__')"
    done = finished([sys.executable, "-c", code], served[2])
    assert (done.returncode, done.stderr) == (
        1,
        "app.py needs the package litserve, which is not installed: pip install litserve.\n",
    )
