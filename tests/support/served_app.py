"""Runs app.py of a served folder, in processes that can import neither this package nor torchrec."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from tests.support.environments import environment
from tests.support.ports import free_port
from tests.support.served_folder import ABSENT

START_SECONDS = 120
END_SECONDS = 20


class Answer(NamedTuple):
    """What a server has answered."""

    status: int
    content: Any
    step: str | None


class App:
    """A server that answers, and its first process."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.returncode = 0
        """With which it is to end."""

    def ask(self, method: str = "POST", path: str = "/predict", content: Any = None) -> Answer:
        """Send one request, on a connection of its own. content: bytes, or what becomes JSON."""
        return self.answer(self.sent(method, path, self.body(content)))

    def body(self, content: Any) -> bytes:
        """Return bytes as they are, and others as JSON."""
        return content if isinstance(content, bytes) else json.dumps(content).encode()

    def connection(self) -> HTTPConnection:
        """Return a new connection."""
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def sent(self, method: str, path: str, body: Any) -> HTTPConnection:
        """Return a connection on which a request was sent."""
        connection = self.connection()
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection

    def answer(self, connection: HTTPConnection) -> Answer:
        """Return what comes on a connection. NaN and infinity are no JSON."""
        response = connection.getresponse()
        text = response.read()
        connection.close()
        content = text.decode()
        if response.headers["Content-Type"] == "application/json":
            content = json.loads(text, parse_constant=_refuse)
        return Answer(response.status, content, response.headers["Step"])

    def processes(self) -> list[int]:
        """Return the server's processes that are there, by their session."""
        listed = subprocess.run(
            ["pgrep", "-g", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [*map(int, listed.stdout.split())]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@contextmanager
def running_app(folder: Path, *options: str, absent: Sequence[str] = ABSENT) -> Iterator[App]:
    """Yield a server that answers. At the end it must go at a signal, with all of its processes.

    absent: packages that it cannot import.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as path:
        code = f"import sys; sys.modules.update(dict.fromkeys({[*absent]}))\n"
        Path(path, "sitecustomize.py").write_text(code)
        process = subprocess.Popen(
            [sys.executable, str(folder / "app.py"), "--port", str(port), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(OMP_NUM_THREADS="1", PYTHONPATH=path),
            start_new_session=True,
        )
        app = App(process, port)
        try:
            _wait_until_ready(app)
            yield app
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate(timeout=60)
            assert process.returncode == app.returncode, printed
            assert "Traceback" not in printed, printed
            deadline = time.monotonic() + END_SECONDS
            while app.processes() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert app.processes() == []
        finally:
            if app.processes():
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(app: App) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urlopen(f"http://127.0.0.1:{app.port}/health", timeout=10):
                return
        except (URLError, OSError):
            assert app.process.poll() is None, app.process.communicate()[0]
            time.sleep(0.05)
    raise AssertionError(f"no answer within {START_SECONDS} s")
