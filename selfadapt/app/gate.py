"""Which requests are let through: those the page makes, and no larger than an image may be.

Gradio answers many more, among them some that fetch addresses from elsewhere. None of them is
needed here, and what is not named here is refused.
"""

import json
import re
import stat
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

READ = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json)|/(assets|static)/.+"
    r"|/gradio_api/(info|startup-events|queue/data|upload_progress|theme\.css|app_id)"
    r"|/gradio_api/heartbeat/\w+|/gradio_api/file=(?![a-zA-Z][\w+.-]*:).+"
)
"""Paths that may be read; of files those without a protocol."""
ASKED = re.compile(r"/gradio_api/(queue/join|cancel|reset)")
"""Paths that take JSON."""
LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
UPLOADED = "/gradio_api/upload"
JSON_BYTES = 2**18
ROOM = 2**31
"""Bytes that all files of the app together may have."""
OLD = 2 * 3600
"""Seconds after which a file is nobody's."""
SLACK = 2**16
"""What an upload may have beside the file."""
HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Gate:
    """Lets requests through to an application, or refuses them in a few words.

    Args:
        application: What answers.
        num_bytes: The most bytes an uploaded file may have.
        folder: Where uploads are put; those that were broken off stay there.
        local: Answer only to names of this machine and to its own page, so that no page from
            elsewhere can use it through a visitor's browser.
    """

    def __init__(
        self, application: Application, num_bytes: int, folder: Path, *, local: bool = True
    ) -> None:
        self._application, self._num_bytes, self._local = application, num_bytes, local
        self._folder = folder

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":
            return None
        method, path = scope["method"], scope["path"]
        send = _with_headers(send)
        if self._local and not _from_here(scope):
            return await _refuse(send, 403, "this answers to pages of this machine alone")
        if method in ("GET", "HEAD") and READ.fullmatch(path):
            return await self._application(scope, receive, send)
        if method == "POST" and path == UPLOADED:
            receive = _counted(receive, self._num_bytes + SLACK)
            if _length(scope) > self._num_bytes + SLACK:
                return await _refuse(send, 413, "this file is too large")
            if not has_room(self._folder):
                return await _refuse(send, 507, "there is no room for files; try again later")
            return await self._application(scope, receive, send)
        if method == "POST" and ASKED.fullmatch(path):
            return await self._ask(scope, receive, send)
        return await _refuse(send, 404, "there is nothing here")

    async def _ask(self, scope: Message, receive: Receive, send: Send) -> None:
        """Read what is asked for as a whole; addresses of files elsewhere are not among it."""
        body = await _body(receive, JSON_BYTES)
        if body is None:
            return await _refuse(send, 413, "this is too much to ask for")
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return await _refuse(send, 400, "this is no JSON")
        if _names_an_address(asked):
            return await _refuse(send, 403, "files from elsewhere are not fetched")
        return await self._application(scope, _replayed(body, receive), send)


def has_room(folder: Path) -> bool:
    """Remove files that nobody has touched for long, and say whether more may come."""
    total, now = 0, time.time()
    for path in folder.rglob("*"):
        try:
            about = path.lstat()
            if not stat.S_ISREG(about.st_mode):
                continue
            if now - about.st_mtime > OLD:
                path.unlink()
            else:
                total += about.st_size
        except FileNotFoundError:  # somebody else was faster
            continue
    return total < ROOM


def _names_an_address(asked: Any) -> bool:
    """Say whether a file is meant that lies elsewhere."""
    waiting = [asked]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if "://" in str(part.get("path")):
                return True
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return False


def _header(scope: Message, name: bytes) -> str:
    return dict(scope["headers"]).get(name, b"").decode("latin-1")


def _from_here(scope: Message) -> bool:
    """Say whether a request is to a name of this machine, and by a page that it has served."""
    host, origin = _header(scope, b"host"), _header(scope, b"origin")
    return LOCAL.fullmatch(host) is not None and origin in ("", f"http://{host}")


def _length(scope: Message) -> int:
    stated = _header(scope, b"content-length")
    return int(stated) if stated.isdecimal() else 0


async def _body(receive: Receive, most: int) -> bytes | None:
    """Return all that is sent, or None where it is more than it may be."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body"):
            return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read already, then whatever comes."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _counted(receive: Receive, most: int) -> Receive:
    """Return what breaks off once too much has come."""
    num_bytes = 0

    async def count() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        return {"type": "http.disconnect"} if num_bytes > most else message

    return count


def _with_headers(send: Send) -> Send:
    """Return what adds the headers that keep a page to itself."""

    async def added(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", ())}
            new = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in given]
            message = {**message, "headers": [*message.get("headers", ()), *new]}
        await send(message)

    return added


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
