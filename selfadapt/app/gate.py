"""The request filter in front of Gradio: allowed routes, sizes and files.

Gradio answers many more requests than the page makes, some of which read files of the server or
fetch URLs. Anything not listed here is refused. Visitors are identified by a cookie and can only
name and read files that they uploaded or that were sent to them; a refusal does not reveal whether
a file exists.
"""

import asyncio
import io
import json
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from selfadapt.app.asgi import (
    TOO_LARGE,
    Application,
    Message,
    Receive,
    Refused,
    Send,
    header,
    is_local_request,
    receive_body,
    refuse,
    replay,
    with_headers,
)
from selfadapt.app.limits import (
    EXPIRY_S,
    MAX_DEPTH,
    MAX_FILES,
    MAX_JSON_BYTES,
    MAX_PENDING,
    MAX_QUEUE,
    MAX_SESSIONS,
    MAX_STORAGE_BYTES,
    MAX_VISITORS,
    SHARE,
    UPLOAD_OVERHEAD,
)

READ = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json)|/(assets|static)/[\w./@-]{1,200}"
    r"|/gradio_api/(info|startup-events|queue/data|upload_progress|theme\.css|app_id)"
    r"|/gradio_api/heartbeat/\w{1,64}"
)
"""Paths that may be read, besides files."""
FILE, UPLOAD = "/gradio_api/file=", "/gradio_api/upload"
JOIN, EVENTS = "/gradio_api/queue/join", "/gradio_api/queue/data"
SESSION = re.compile(r"\w{1,64}", re.ASCII)
COOKIE = "selfadapt-visitor"
NO_FILE = "this file does not exist any more; upload the image again"
NO_SESSION = "unknown session"
TICKET = "selfadapt.ticket"
"""Key of the scope of a request."""
HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass
class Visitor:
    """The files and sessions that belong to a visitor."""

    cookie: str
    files: set[str] = field(default_factory=set)
    sessions: dict[str, None] = field(default_factory=dict)
    """Session hashes of their pages, newest last."""


@dataclass(frozen=True)
class Event:
    """A function that the page calls."""

    name: str
    num_inputs: int


@dataclass(frozen=True, eq=False)
class Ticket:
    """An event that a visitor asked for."""

    visitor: str
    """Their cookie."""
    kind: str
    """A key of ``MAX_PENDING``."""


class Gate:
    """ASGI middleware that passes a request on to an application or refuses it.

    Args:
        application: The wrapped ASGI application.
        events: The events of the page, by index.
        pending: Returns the tickets of the waiting and of the running events. The ticket of an
            event is ``scope[TICKET]`` of its request.
        num_bytes: Maximum size of an uploaded file.
        folder: The folder of uploads and results.
        local: Answer only requests to loopback host names from the server's own page, so that
            no other web site can use the server through a visitor's browser.
    """

    def __init__(
        self,
        application: Application,
        events: Mapping[int, Event],
        pending: Callable[[], tuple[set[Ticket], set[Ticket]]],
        num_bytes: int,
        folder: Path,
        *,
        local: bool = True,
    ) -> None:
        self._application, self._events, self._local = application, events, local
        self._pending = pending
        self._joining: set[Ticket] = set()
        """Tickets of requests that may not be in the queue yet."""
        self._max_upload = num_bytes + UPLOAD_OVERHEAD
        self._max_stored = max(MAX_STORAGE_BYTES, 2 * SHARE * self._max_upload)
        self._folder = folder
        self._uploading: list[str] = []
        """The cookie of each upload that has not ended."""
        self._upload_lock = asyncio.Lock()
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
        if cookie in self._visitors:
            self._remember(self._visitors[cookie])
        send = with_headers(send, headers)
        try:
            await self._answer(scope, receive, send, cookie)
        except Refused as refused:
            await refuse(send, refused, as_json=scope["path"] == JOIN)

    def _visitor(self, cookie: str) -> Visitor:
        """Return a visitor who is remembered, else a new one."""
        return self._visitors.get(cookie) or Visitor(cookie)

    def _remember(self, visitor: Visitor) -> None:
        """Note that a visitor was seen; forget the one seen longest ago, if possible without files.

        Visitors who only read are not remembered: they would displace those who use the page.
        """
        self._visitors.pop(visitor.cookie, None)
        while len(self._visitors) >= MAX_VISITORS:
            without = (cookie for cookie, other in self._visitors.items() if not other.files)
            del self._visitors[next(without, None) or next(iter(self._visitors))]
        self._visitors[visitor.cookie] = visitor

    async def _answer(self, scope: Message, receive: Receive, send: Send, cookie: str) -> None:
        """Pass on an allowed request; raise Refused for all others."""
        method, path, visitor = scope["method"], scope["path"], self._visitor(cookie)
        if self._local and not is_local_request(scope):
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
            if path == EVENTS:
                send = _record_files(send, visitor)
        elif method == "POST" and path == UPLOAD:
            await self._upload(scope, receive, send, visitor)
            return
        elif method == "POST" and path in (JOIN, "/gradio_api/cancel", "/gradio_api/reset"):
            with tempfile.SpooledTemporaryFile(MAX_JSON_BYTES) as file:
                await receive_body(receive, file, MAX_JSON_BYTES)
                request = _json(file.read())
            visitor = self._visitor(cookie)  # may have been remembered meanwhile
            if path == JOIN:
                await self._join(request, scope, receive, send, visitor)
                return
            if "session_hash" in request and request["session_hash"] not in [*visitor.sessions]:
                raise Refused(404, NO_SESSION)
            receive = self._replay_json(request, receive, visitor)
        else:
            raise Refused(404, "not found")
        await self._application(scope, receive, send)

    async def _upload(self, scope: Message, receive: Receive, send: Send, visitor: Visitor) -> None:
        """Receive a whole upload, then pass it on.

        Gradio leaves its temporary file behind if an upload is cut off or malformed.
        """
        if not header(scope, b"content-type").startswith("multipart/form-data; boundary="):
            raise Refused(415, "a file must be sent as multipart/form-data")
        length = header(scope, b"content-length")
        if length.isdecimal() and int(length) > self._max_upload:
            raise Refused(413, TOO_LARGE)
        self._check_room()
        self._check_share(visitor, self._uploading.count(visitor.cookie) + 1)
        self._remember(visitor)
        self._uploading.append(visitor.cookie)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                await receive_body(receive, file, self._max_upload)
                answer: list[Message] = []
                record = _record_files(_append_to(answer), visitor)
                async with self._upload_lock:
                    try:
                        await self._application(scope, replay(file, receive), record)
                    finally:
                        # Files that were uploaded are moved to folders of their own.
                        for left in self._folder.glob("tmp*"):
                            left.unlink(missing_ok=True)
        finally:
            self._uploading.remove(visitor.cookie)
        for message in answer:
            await send(message)

    def _check_room(self) -> None:
        """Raise Refused unless there is room for one more upload of the maximum size."""
        num_bytes, count = stored(self._folder)
        num_bytes += (len(self._uploading) + 1) * self._max_upload
        if num_bytes > self._max_stored or count >= MAX_FILES:
            raise Refused(507, "no space left for files; try again later")

    def _check_share(self, visitor: Visitor, num_uploads: int) -> None:
        """Raise Refused if a visitor has too many files, with uploads of the maximum size."""
        sizes = {path: Path(path).stat().st_size for path in visitor.files if Path(path).is_file()}
        visitor.files = {*sizes}
        num_bytes = sum(sizes.values()) + num_uploads * self._max_upload
        if num_bytes > self._max_stored // SHARE or len(sizes) >= MAX_FILES // SHARE:
            raise Refused(507, "you have too many files here; try again in an hour")

    async def _join(
        self,
        request: dict[str, Any],
        scope: Message,
        receive: Receive,
        send: Send,
        visitor: Visitor,
    ) -> None:
        """Pass on an event for the queue."""
        session = self._checked_session(request)
        if any(session in v.sessions for v in self._visitors.values() if v is not visitor):
            raise Refused(403, "this session belongs to another visitor")
        receive = self._replay_json(request, receive, visitor)
        ticket = scope[TICKET] = self._ticket(request["fn_index"], visitor)
        if ticket.kind != "stop":
            self._check_share(visitor, self._uploading.count(visitor.cookie))
        self._remember(visitor)
        visitor.sessions[session] = None
        while len(visitor.sessions) > MAX_SESSIONS:
            del visitor.sessions[next(iter(visitor.sessions))]
        self._joining.add(ticket)
        try:
            await self._application(scope, receive, send)
        finally:
            self._joining.remove(ticket)

    def _ticket(self, index: int, visitor: Visitor) -> Ticket:
        """Return a ticket for an event; raise Refused if too many are waiting."""
        name = self._events[index].name
        ticket = Ticket(visitor.cookie, name if name in MAX_PENDING else "other")
        waiting, running = self._pending()
        waiting |= self._joining - running
        own = [t for t in waiting | running if (t.visitor, t.kind) == (visitor.cookie, ticket.kind)]
        if len(own) >= MAX_PENDING[ticket.kind]:
            raise Refused(429, f"{len(own)} of your requests are waiting or running; wait for them")
        if ticket.kind != "stop" and len(waiting) >= MAX_QUEUE:
            raise Refused(503, "too many requests are waiting; try again later")
        return ticket

    def _replay_json(self, request: dict[str, Any], receive: Receive, visitor: Visitor) -> Receive:
        """Return a receive callable that gives checked JSON, so that only this is passed on."""
        for path in _values(request, "path"):
            self._check_file(path, visitor)
        return replay(io.BytesIO(json.dumps(request, ensure_ascii=False).encode()), receive)

    def _checked_session(self, request: dict[str, Any]) -> str:
        """Return the session of an event; raise Refused unless the page has such an event."""
        index, data, session = (request.get(key) for key in ("fn_index", "data", "session_hash"))
        if isinstance(index, bool) or not isinstance(index, int) or index not in self._events:
            raise Refused(400, "fn_index must be the index of an event of this page")
        if not isinstance(data, list) or len(data) != self._events[index].num_inputs:
            number = self._events[index].num_inputs
            raise Refused(400, f"data must be a list of {number} inputs")
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


def stored(folder: Path) -> tuple[int, int]:
    """Remove expired files; return the bytes and the number of the others."""
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
    return total, count


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
        if isinstance(node, dict) and key in node:
            yield node[key]
        stack += _children(node)


def _children(node: Any) -> Iterable[Any]:
    """Return the members of a JSON array or object; none for anything else."""
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _append_to(messages: list[Message]) -> Send:
    """Return a send callable that keeps an answer, to be sent later."""

    async def append(message: Message) -> None:
        messages.append(message)

    return append


def _cookie(scope: Message) -> str | None:
    """Return the visitor's cookie, or None for a new visitor."""
    try:
        visitor = SimpleCookie(header(scope, b"cookie")).get(COOKIE)
    except CookieError:
        return None
    return visitor.value if visitor and re.fullmatch(r"[\w-]{22}", visitor.value) else None


def _json(body: bytes) -> dict[str, Any]:
    """Return a JSON object; raise Refused for anything else."""
    try:
        request = json.loads(body)
        json.dumps(request, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Refused(400, "the body must be JSON in UTF-8") from None
    if not isinstance(request, dict):
        raise Refused(400, "the body must be a JSON object")
    level: list[Any] = [request]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
    if level:
        raise Refused(400, f"the body must have at most {MAX_DEPTH} levels of JSON")
    return request
