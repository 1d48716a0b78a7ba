"""Answers requests that this machine sends by POST. Served folders get this file."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_REQUEST_BYTES = 2**26


class HTTPServer(ThreadingHTTPServer):
    """A thread for each connection; as many connections wait for theirs as clients are likely to
    open at once."""

    request_queue_size = 1024


def http_server(server: Any, port: int) -> ThreadingHTTPServer:
    """Return a server of this machine's own port, for requests by POST; what does not fit is
    answered with 400. server: a `Server` of serve.py."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 60  # seconds without a byte, after which a connection ends
        error_content_type = "application/json"
        error_message_format = '{"error": "%(explain)s"}'

        def do_GET(self) -> None:  # noqa: N802  http.server's name
            """Answer /health, while a request is computed, too."""
            if self.path == "/health":
                published = {name: server.published.get(name) for name in ("step", "sequence")}
                self.send_json(200, {"status": "ok", "of": server.about["of"], **published})
            else:
                self.send_json(404, {"error": "send requests by POST, or GET /health"})

        def do_POST(self) -> None:  # noqa: N802  http.server's name
            step = None
            try:
                length = int(self.headers.get("Content-Length", 0))
                if not 0 < length <= MAX_REQUEST_BYTES:
                    raise ValueError(
                        f"a request needs a Content-Length of 1 to {MAX_REQUEST_BYTES} bytes"
                    )
                request = json.loads(self.rfile.read(length))
                with server.lock:
                    status = 200
                    answer = server.answer_plain(request)
                    step = server.published.get("step")
            except (ValueError, RecursionError) as error:
                status = 400
                answer = {"error": str(error)}
            except Exception as error:
                status = 500
                answer = {"error": f"{type(error).__name__}: {error}"}
            self.send_json(status, answer, step)

        def send_json(self, status: int, answer: Any, step: int | None = None) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if step is not None:
                self.send_header("Step", str(step))  # of training, by whose weights it is
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Write no line for each request."""

    return HTTPServer(("127.0.0.1", port), Handler)
