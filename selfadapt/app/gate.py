"""The request filter in front of Gradio: allowed routes, sizes and files.

Gradio answers many more requests than the page makes, some of which read files of the server or
fetch URLs. Anything not listed here is refused. Visitors are identified by a cookie and can only
name and read files that they uploaded or that were sent to them; a refusal does not reveal whether
a file exists.
"""

import json
import re
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

READ = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json)|/(assets|static)/[\w./@-]{1,200}"
    r"|/gradio_api/(info|startup-events|queue/data|upload_progress|theme\.css|app_id)"
    r"|/gradio_api/heartbeat/\w{1,64}"
)
"""Paths that may be read, besides files."""
FILE, UPLOAD = "/gradio_api/file=", "/gradio_api/upload"
JOIN, EVENTS = "/gradio_api/queue/join", "/gradio_api/queue/data"
SESSION = re.compile(r"\w{1,64}", re.ASCII)
LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
COOKIE = "selfadapt-visitor"
NO_FILE = "this file does not exist any more; upload the image again"
NO_SESSION = "unknown session"
MAX_VISITORS = 10_000
"""Beyond this number, the least recently seen visitors must reload the page."""
MAX_SESSIONS = 100
"""Beyond this number of open pages, the oldest of a visitor are forgotten."""
MAX_JSON_BYTES = 2**18
MAX_STORAGE_BYTES = 2**31
MAX_FILES = 20_000
"""Limit for all visitors together."""
EXPIRY_S = 2 * 3600
"""Files not modified for this long are removed."""
UPLOAD_OVERHEAD = 2**16
"""Bytes that an upload may have in addition to the file."""
HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Refused(Exception):
    """A request that is not passed on to Gradio."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Visitor:
    """The files and sessions that belong to a visitor."""

    files: set[str] = field(default_factory=set)
    sessions: dict[str, None] = field(default_factory=dict)
    """Session hashes of their pages, newest last."""


class Gate:
    """ASGI middleware that passes a request on to an application or refuses it.

    Args:
        application: The wrapped ASGI application.
        events: The number of inputs of each event of the page, by event index.
        num_bytes: Maximum size of an uploaded file.
        folder: The folder of uploads and results.
        local: Answer only requests to loopback host names from the server's own page, so that
            no other web site can use the server through a visitor's browser.
    """

    def __init__(
        self,
        application: Application,
        events: Mapping[int, int],
        num_bytes: int,
        folder: Path,
        *,
        local: bool = True,
    ) -> None:
        self._application, self._events, self._local = application, events, local
        self._max_upload = num_bytes + UPLOAD_OVERHEAD
        self._folder = folder
        self._visitors: dict[str, Visitor] = {}
        """By cookie, most recently seen last."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":
            return None
        cookie = _cookie(scope)
        headers = dict(HEADERS)
        if cookie is None:
            cookie = secrets.token_urlsafe(16)
            headers["set-cookie"] = f"{COOKIE}={cookie}; HttpOnly; SameSite=Strict; Path=/"
        visitor = self._visitors[cookie] = self._visitors.pop(cookie, Visitor())
        while len(self._visitors) > MAX_VISITORS:
            del self._visitors[next(iter(self._visitors))]
        send = _with_headers(send, headers)
        try:
            receive = await self._checked_request(scope, receive, visitor)
            if scope["path"] in (UPLOAD, EVENTS):
                await self._application(scope, receive, _record_files(send, visitor))
            else:
                await self._application(scope, receive, send)
        except Refused as refused:
            await _refuse(send, refused)

    async def _checked_request(self, scope: Message, receive: Receive, visitor: Visitor) -> Receive:
        """Return the receive callable of an allowed request; raise Refused for all others."""
        method, path = scope["method"], scope["path"]
        if self._local and not _is_local(scope):
            raise Refused(403, "only pages served by this machine may send requests")
        if method in ("GET", "HEAD") and path.startswith(FILE):
            self._check_file(path.removeprefix(FILE), visitor)
            # The page only requests whole files. Many ranges would be slow or fail.
            scope["headers"] = [(k, v) for k, v in scope["headers"] if k != b"range"]
        elif method in ("GET", "HEAD") and READ.fullmatch(path):
            query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
            sessions = query.get("session_hash", ["-"])
            if path == EVENTS and not visitor.sessions.keys() >= set(sessions):
                raise Refused(404, NO_SESSION)
        elif method == "POST" and path == UPLOAD:
            return self._checked_upload(scope, receive, visitor)
        elif method == "POST" and path in (JOIN, "/gradio_api/cancel", "/gradio_api/reset"):
            body = await _body(receive, MAX_JSON_BYTES)
            return _replay(self._checked_json(body, visitor, joins=path == JOIN), receive)
        else:
            raise Refused(404, "not found")
        return receive

    def _checked_upload(self, scope: Message, receive: Receive, visitor: Visitor) -> Receive:
        if not _header(scope, b"content-type").startswith("multipart/form-data; boundary="):
            raise Refused(415, "a file must be sent as multipart/form-data")
        length = _header(scope, b"content-length")
        if length.isdecimal() and int(length) > self._max_upload:
            raise Refused(413, "this file is too large")
        if not has_room(self._folder):
            raise Refused(507, "no space left for files; try again later")
        visitor.files = {path for path in visitor.files if Path(path).exists()}
        return _limit(receive, self._max_upload)

    def _checked_json(self, body: bytes, visitor: Visitor, *, joins: bool) -> bytes:
        """Return the validated JSON, serialised again so that only this is passed on."""
        try:
            request = json.loads(body)
            checked = json.dumps(request, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise Refused(400, "the body must be JSON in UTF-8") from None
        if not isinstance(request, dict):
            raise Refused(400, "the body must be a JSON object")
        if joins:
            session = self._checked_session(request)
            if any(session in v.sessions for v in self._visitors.values() if v is not visitor):
                raise Refused(403, "this session belongs to another visitor")
            visitor.sessions[session] = None
            while len(visitor.sessions) > MAX_SESSIONS:
                del visitor.sessions[next(iter(visitor.sessions))]
        elif "session_hash" in request and request["session_hash"] not in [*visitor.sessions]:
            raise Refused(404, NO_SESSION)
        for path in _values(request, "path"):
            self._check_file(path, visitor)
        return checked

    def _checked_session(self, request: dict[str, Any]) -> str:
        """Return the session of an event; raise Refused unless the page has such an event."""
        index, data, session = (request.get(key) for key in ("fn_index", "data", "session_hash"))
        if isinstance(index, bool) or not isinstance(index, int) or index not in self._events:
            raise Refused(400, "fn_index must be the index of an event of this page")
        if not isinstance(data, list) or len(data) != self._events[index]:
            raise Refused(400, f"data must be a list of {self._events[index]} inputs")
        if not isinstance(session, str) or not SESSION.fullmatch(session):
            raise Refused(400, "session_hash must be letters and digits")
        if not set(request) <= {"data", "fn_index", "session_hash", "event_data", "trigger_id"}:
            raise Refused(400, "the body has unknown keys")
        trigger = request.get("trigger_id")
        if not (trigger is None or (isinstance(trigger, int) and 0 <= trigger < 2**31)):
            raise Refused(400, "trigger_id must be the number of a component")
        return session

    def _check_file(self, path: object, visitor: Visitor) -> None:
        """Raise Refused unless a path belongs to a visitor and is a file in the folder."""
        if not isinstance(path, str) or path not in visitor.files:
            raise Refused(403, NO_FILE)
        inside = Path(path).resolve().is_relative_to(self._folder.resolve())
        if not inside or Path(path).is_symlink() or not Path(path).is_file():
            raise Refused(403, NO_FILE)


def has_room(folder: Path) -> bool:
    """Remove expired files; return True if there is space for more."""
    total, count, now = 0, 0, time.time()
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if now - status.st_mtime > EXPIRY_S:
                path.unlink()
            else:
                total += status.st_size
                count += 1
        except FileNotFoundError:  # Gradio removes files as well
            continue
    return total < MAX_STORAGE_BYTES and count < MAX_FILES


def _record_files(send: Send, visitor: Visitor) -> Send:
    """Return a send callable that adds the files named in an answer to those of the visitor.

    A server error is turned into a refusal: Gradio fails on malformed uploads.
    """

    async def record(message: Message) -> None:
        if message.get("status", 200) >= 500:
            raise Refused(400, "the upload form is malformed")
        for line in message.get("body", b"").splitlines():
            try:
                answer = json.loads(line.removeprefix(b"data: "))
            except ValueError:
                continue
            paths = answer if isinstance(answer, list) else _values(answer, "path")
            visitor.files.update(path for path in paths if isinstance(path, str))
        await send(message)

    return record


def _values(content: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key in JSON, at any depth."""
    stack = [content]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if key in node:
                yield node[key]
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _header(scope: Message, name: bytes) -> str:
    return dict(scope["headers"]).get(name, b"").decode("latin-1")


def _cookie(scope: Message) -> str | None:
    """Return the visitor's cookie, or None for a new visitor."""
    try:
        visitor = SimpleCookie(_header(scope, b"cookie")).get(COOKIE)
    except CookieError:
        return None
    return visitor.value if visitor and re.fullmatch(r"[\w-]{22}", visitor.value) else None


def _is_local(scope: Message) -> bool:
    """Return True if a request is to a loopback host name and from a page of this server."""
    host, origin = _header(scope, b"host"), _header(scope, b"origin")
    return LOCAL.fullmatch(host) is not None and origin in ("", f"http://{host}")


async def _body(receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body of a request."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise Refused(413, f"the body must have at most {max_bytes} bytes")
        if not message.get("more_body"):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive callable that gives a body that was already read, then what follows."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _limit(receive: Receive, max_bytes: int) -> Receive:
    """Return a receive callable that disconnects once a body is too large."""
    num_bytes = 0

    async def limit() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        return {"type": "http.disconnect"} if num_bytes > max_bytes else message

    return limit


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
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


async def _refuse(send: Send, refused: Refused) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": str(refused).encode()})
