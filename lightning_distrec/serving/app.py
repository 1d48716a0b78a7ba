"""Serves this folder by HTTP, with LitServe. It needs litserve, and what serve.py needs.

`python app.py --port 8000` answers at /predict what is sent by POST, as serve.py answers it; /docs
has the API, and /health says whether all workers are ready. With `--max_batch_size 32`, requests of
raw rows that wait beside each other become one.
"""

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
from itertools import chain
from typing import Annotated, Any

try:
    from fastapi import Body
    from litserve import LitAPI, LitServer, Response
except ImportError:
    if __name__ != "__main__":
        raise
    sys.exit("app.py needs the package litserve, which is not installed: pip install litserve.")

MAX_REQUEST_BYTES = 2**26
END_SECONDS = 10
"""In which requests are still answered after a signal."""
OPTIONS = (
    ("--port", 8000, "from 1024 on"),
    ("--host", "127.0.0.1", "0.0.0.0 or :: for other machines"),
    ("--workers", 2, "processes that answer"),
    ("--timeout", 30.0, "seconds that a request may wait for a worker"),
    ("--max_batch_size", 1, "requests that become one"),
    ("--batch_timeout", 0.002, "seconds in which they gather"),
    ("--follow", "", "where PublishRows publishes"),
)
PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT
SIGNALS: list[int] = []
"""The first one that has ended the server."""


class API(LitAPI):
    """Answers requests as `Server.answer_plain` does, in a process of its own."""

    def __init__(self, follow: str, **options: Any) -> None:
        """options: LitServe's."""
        super().__init__(**options)
        self._follow = follow

    def setup(self, device: str) -> None:
        """Load the folder. Raises ValueError: it is damaged, or its requests cannot be joined."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the first process ends all
        end_with_parent()
        serve = importlib.import_module("serve")
        self._server = serve.Server()
        if self._follow:
            self._server.follower(self._follow).run()
        if self.max_batch_size > 1:
            self._check_joining(serve)

    def _check_joining(self, serve: Any) -> None:
        """Raise ValueError unless the first example is answered alone as among all of them."""
        server = self._server
        alone = []
        if server.encoder is not None:
            rows = json.loads((serve.FOLDER / "request.json").read_text())
            alone = serve.leaves(server.answer(server.inputs_of_rows(rows)))
        among_all = serve.leaves(server.answer(serve.examples(server, serve.FOLDER)[0]))
        is_joinable = bool(alone)
        for first, rows in zip(alone, among_all, strict=False):
            has_row_each = len(first) == 1 < len(rows)
            is_same = has_row_each and serve.torch.allclose(first, rows[:1], 1e-4, 1e-5, True)
            is_joinable &= is_same
        if not is_joinable:
            raise ValueError(
                "--max_batch_size: only raw rows can be joined whose answers do not depend on the "
                "rows beside them, and this folder takes or gives others. Leave it out."
            )

    def _joined_answers(self, requests: list[Any]) -> list[Any]:
        """Return the answers to requests of raw rows, by one call of the program."""
        lists = [[request] if isinstance(request, dict) else request for request in requests]
        answer = self._server.answer(self._server.inputs_of_rows([*chain.from_iterable(lists)]))
        answers = []
        first = 0
        for rows in lists:
            if not rows:
                raise ValueError("a request has no rows")
            answers.append(self._server.plain_answer(rows_of(answer, first, len(rows))))
            first += len(rows)
        return answers

    def decode_request(self, request: Annotated[Any, Body()]) -> Any:
        """Return a request as it is; its annotation lets FastAPI read it."""
        return request

    def predict(self, requests: Any) -> Any:
        """Return the response to a request; to each of several, where they are joined."""
        with self._server.lock:  # all by the same numbers
            if self.max_batch_size == 1:
                return self._response(requests)
            try:
                return [self._sent(200, answer) for answer in self._joined_answers(requests)]
            except Exception:  # because of one of them: each alone
                return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Response:
        try:
            if isinstance(request, bytes):  # sent as another content type, as urllib does
                request = json.loads(request)
            return self._sent(200, self._server.answer_plain(request))
        except Exception as error:
            is_bad_request = isinstance(error, (ValueError, RecursionError))
            return self._sent(400 if is_bad_request else 500, {"detail": str(error)})

    def _sent(self, status: int, content: Any) -> Response:
        """Return a response, with the step of training by whose weights it is."""
        step = self._server.published.get("step")
        headers = {} if step is None else {"Step": str(step)}
        return Response(
            json.dumps(content),
            status,
            headers,
            "application/json",
        )


def rows_of(answer: Any, first: int, count: int) -> Any:
    """Return some rows of all tensors of an answer."""
    if isinstance(answer, dict):
        return {name: rows_of(value, first, count) for name, value in answer.items()}
    if isinstance(answer, (list, tuple)):
        return [rows_of(value, first, count) for value in answer]
    return answer[first : first + count]


def end_with_parent() -> None:
    """Let this process be killed with the one that has started it; it would keep the port."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end(signum: int, frame: Any) -> None:
    """End the server at a signal, or when one of its processes has ended."""
    if multiprocessing.parent_process() is not None:
        sys.exit(0)
    # It only looks; children that are stopped send SIGCHLD, too.
    if signum == signal.SIGCHLD and os.waitid(os.P_ALL, 0, PEEK) is None:
        return
    if not SIGNALS or signum == signal.SIGALRM:
        SIGNALS.append(signum)
        # LitServe waits half a minute for each of its processes, as long as a client is not served.
        signal.alarm(END_SECONDS)
        # At any other exception LitServe waits for a connection that is in use.
        raise KeyboardInterrupt


def main() -> None:
    """Serve until a signal, or until a process of the server has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, text in OPTIONS:
        parser.add_argument(
            name,
            type=type(default),
            default=default,
            help=text,
        )
    options = parser.parse_args()
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        socket.create_server((options.host, options.port), family=family).close()
    except (OSError, OverflowError) as error:  # before workers load the folder
        parser.error(f"--host {options.host} --port {options.port}: {error}")
    # Each worker would take all cores.
    threads = max(1, (os.cpu_count() or 1) // max(1, options.workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, end)
    os.register_at_fork(after_in_child=end_with_parent)
    batches = {name: vars(options)[name] for name in ("max_batch_size", "batch_timeout")}
    try:
        server = LitServer(
            API(options.follow, **batches),
            accelerator="cpu",
            workers_per_device=options.workers,
            timeout=options.timeout,
            max_payload_size=MAX_REQUEST_BYTES,
        )
        server.run(
            options.host,
            options.port,
            log_level="warning",
            generate_client_file=False,
        )
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:  # a worker has reported why
        sys.exit(f"app.py: {error}.")
    except KeyboardInterrupt:  # while it starts
        pass
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            child.kill()
    if signal.SIGCHLD in SIGNALS:
        sys.exit("app.py: a process of the server has ended, and so it ends.")


if __name__ == "__main__":
    main()
