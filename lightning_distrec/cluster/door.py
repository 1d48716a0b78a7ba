"""Ports at which ranks listen for each other, and what keeps strangers out: proofs and bounds.

Whoever has not proved to have a key has a bounded line, a bounded time, and a place among a bounded
number. The standard library only: the watchdog's process has nothing else.
"""

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

GREETING_SECONDS = 2.0
"""How long whoever has connected may take to prove that it has the key."""
MAX_STRANGERS = 128
"""Connections without a proof: for each one more, the oldest is closed. So a rank is let in that
proves it at once."""
# A rank's state has a failure of 500 characters, its location and how far its run is.
MAX_LINE_BYTES = 1 << 14
BACKLOG = 1024

Greeting = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]
Admission = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def sign(secret: bytes, *words: object) -> str:
    """Return what only those who have the secret can return for these words."""
    # As JSON, so that a word which a stranger has chosen cannot pass as several.
    return hmac.digest(secret, json.dumps([str(word) for word in words]).encode(), "sha256").hex()


def is_signed(secret: bytes, signature: object, *words: object) -> bool:
    """Return whether `signature` is what `sign` returns for these words."""
    # As bytes: for texts beyond ASCII, which a stranger may send, compare_digest raises TypeError.
    is_text = isinstance(signature, str) and signature.isascii()
    return is_text and hmac.compare_digest(str(signature).encode(), sign(secret, *words).encode())


def encode_fields(fields: Mapping[str, Any]) -> bytes:
    """Return fields as a line of JSON."""
    return json.dumps(fields).encode() + b"\n"


def parse_fields(line: bytes) -> dict[str, Any]:
    """Return the fields of a line of JSON: texts and numbers by name. Raises ValueError: it has
    something else."""
    try:
        fields = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict) or any(
        isinstance(value, dict | list) for value in fields.values()
    ):
        raise ValueError("not texts and numbers by name")
    return fields


async def read_fields(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the fields of the next line. Raises ValueError: it is too long, or has something
    else."""
    return parse_fields(await reader.readline())


async def open_door(
    listener: socket.socket, greet: Greeting, admit: Admission | None = None
) -> asyncio.Server:
    """Listen for ranks, and return the server.

    greet: asks whoever connects for a proof. Returns None without one; what it raises for malformed
    lines counts as that. admit: called with what `greet` returns otherwise, without a limit of
    time.
    """
    strangers: dict[asyncio.Task[Any], None] = {}  # in the order in which they came

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = asyncio.ensure_future(greet(reader, writer))
        strangers[greeting] = None
        if len(strangers) > MAX_STRANGERS:
            oldest = next(iter(strangers))
            del strangers[oldest]
            oldest.cancel()
        # Cancelled also with the server's loop, at its end.
        with suppress(OSError, ValueError, asyncio.TimeoutError, asyncio.CancelledError):
            try:
                admitted = await asyncio.wait_for(greeting, GREETING_SECONDS)
            finally:
                strangers.pop(greeting, None)
            if admitted is not None and admit is not None:
                await admit(admitted, reader, writer)
        writer.close()

    # The backlog is also the number of connections that asyncio accepts before it runs what handles
    # them.
    server = await asyncio.start_server(
        receive, sock=listener, limit=MAX_LINE_BYTES, backlog=MAX_STRANGERS
    )
    listener.listen(BACKLOG)
    return server
