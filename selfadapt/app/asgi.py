"""Pieces of ASGI applications: what checks a request, receives its body and changes its answer."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import IO, Any

from selfadapt.app.limits import BODY_BYTES_S, BODY_S

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
TOO_LARGE = "this is too large"
CHUNK = 2**18


class Refused(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def header(scope: Message, name: bytes) -> str:
    """Return a header of a request; an empty string if there is none."""
    return dict(scope["headers"]).get(name, b"").decode("latin-1")


def is_local_request(scope: Message) -> bool:
    """Return True if a request is to a loopback host name and from a page of this server."""
    host, origin = header(scope, b"host"), header(scope, b"origin")
    return LOCAL.fullmatch(host) is not None and origin in ("", f"http://{host}")


async def receive_body(
    receive: Receive, file: IO[bytes], max_bytes: int, too_large: str = TOO_LARGE
) -> None:
    """Write the whole body of a request to a file, and rewind it."""
    try:
        async with asyncio.timeout(BODY_S + max_bytes / BODY_BYTES_S):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the body is cut off")
                file.write(message.get("body", b""))
                if file.tell() > max_bytes:
                    raise Refused(413, too_large)
                more = message.get("more_body", False)
    except TimeoutError:
        raise Refused(408, "the body takes too long to arrive") from None
    file.seek(0)


def errors_after_body(receive: Receive, send: Send, max_bytes: int) -> tuple[Receive, Send]:
    """Return callables that receive the rest of a body before an error is sent.

    A client that is still sending when the connection is closed does not get to see the answer.
    """
    unread = True

    async def watched() -> Message:
        nonlocal unread
        message = await receive()
        unread = message.get("more_body", False)
        return message

    async def late(message: Message) -> None:
        if message.get("status", 200) >= 400 and unread:
            with suppress(TimeoutError):
                async with asyncio.timeout(BODY_S):
                    num_bytes = 0
                    while unread and num_bytes <= max_bytes:
                        num_bytes += len((await watched()).get("body", b""))
        await send(message)

    return watched, late


def replay(file: IO[bytes], receive: Receive) -> Receive:
    """Return a receive callable that gives a body that was already read, then what follows."""
    more = True

    async def replay() -> Message:
        nonlocal more
        if not more:
            return await receive()
        body = file.read(CHUNK)
        more = len(body) == CHUNK
        return {"type": "http.request", "body": body, "more_body": more}

    return replay


def with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return a send callable that adds headers and removes those for cross-origin access."""

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = {
                name.lower(): (name, value)
                for name, value in message.get("headers", ())
                if not name.lower().startswith(b"access-control-")
            }
            new = {
                name.encode(): (name.encode(), value.encode()) for name, value in headers.items()
            }
            message = {**message, "headers": [*(new | kept).values()]}
        await send(message)

    return add


async def refuse(send: Send, refused: Refused, *, as_json: bool) -> None:
    """Send a refusal; the page shows one of an event if it is the ``detail`` of JSON."""
    kind = b"application/json" if as_json else b"text/plain; charset=utf-8"
    body = json.dumps({"detail": str(refused)}) if as_json else str(refused)
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
