"""The gate in front of the page: which requests reach Gradio, how large, and about which files.

Gradio answers many more requests than the page makes, among them some that read files of the server
or fetch addresses from elsewhere. What is not listed here is refused. A visitor, who is known by a
cookie, can name and read the files that they uploaded or were sent, and no others; what is refused
does not depend on whether a file exists.
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
"""Paths that may be read, beside files."""
FILE, UPLOAD = "/gradio_api/file=", "/gradio_api/upload"
JOIN, EVENTS = "/gradio_api/queue/join", "/gradio_api/queue/data"
SESSION = re.compile(r"\w{1,64}", re.ASCII)
LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
COOKIE = "selfadapt-visitor"
NO_FILE = "this file is not here, or not any more; drop the image again"
NO_SESSION = "there is no such session"
MAX_VISITORS = 10_000
"""After so many, those who have not been here for longest must load the page again."""
MAX_SESSIONS = 100
"""After so many pages of a visitor, the oldest are forgotten."""
MAX_JSON_BYTES = 2**18
MAX_STORAGE_BYTES = 2**31
MAX_FILES = 20_000
"""Of all visitors together."""
EXPIRY_S = 2 * 3600
"""Files that nobody has touched for so long are removed."""
UPLOAD_OVERHEAD = 2**16
"""Bytes that an upload may have beside the file."""
HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Refused(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Visitor:
    """What a visitor may name."""

    files: set[str] = field(default_factory=set)
    sessions: dict[str, None] = field(default_factory=dict)
    """Pages by the names that they gave themselves, the newest at the end."""


class Gate:
    """Passes requests on to an application, or refuses them in a few words.

    Args:
        application: What answers.
        events: The events of the page by number, and how many inputs each takes.
        num_bytes: The most bytes an uploaded file may have.
        folder: Where the application keeps uploads and results.
        local: Answer only to names of this machine and to its own page, so that no page from
            elsewhere can use it through a visitor's browser.
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
        """By cookie, those who were here last at the end."""

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
            receive = await self._checked(scope, receive, visitor)
            if scope["path"] in (UPLOAD, EVENTS):
                await self._application(scope, receive, _noting_files(send, visitor))
            else:
                await self._application(scope, receive, send)
        except Refused as refused:
            await _refuse(send, refused)

    async def _checked(self, scope: Message, receive: Receive, visitor: Visitor) -> Receive:
        """Return what gives the body of a request that may pass; raise Refused for all others."""
        method, path = scope["method"], scope["path"]
        if self._local and not _is_from_here(scope):
            raise Refused(403, "this answers to pages of this machine alone")
        if method in ("GET", "HEAD") and path.startswith(FILE):
            self._check_file(path.removeprefix(FILE), visitor)
            # The page asks for whole files. Many ranges would take long, or fail.
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
            return _replayed(self._checked_json(body, visitor, joins=path == JOIN), receive)
        else:
            raise Refused(404, "there is nothing here")
        return receive

    def _checked_upload(self, scope: Message, receive: Receive, visitor: Visitor) -> Receive:
        if not _header(scope, b"content-type").startswith("multipart/form-data; boundary="):
            raise Refused(415, "a file must be sent as multipart/form-data")
        stated = _header(scope, b"content-length")
        if stated.isdecimal() and int(stated) > self._max_upload:
            raise Refused(413, "this file is too large")
        if not has_room(self._folder):
            raise Refused(507, "there is no room for files; try again later")
        visitor.files = {path for path in visitor.files if Path(path).exists()}
        return _limited(receive, self._max_upload)

    def _checked_json(self, body: bytes, visitor: Visitor, *, joins: bool) -> bytes:
        """Return the JSON to pass on: what was checked, and not what was sent."""
        try:
            request = json.loads(body)
            passed_on = json.dumps(request, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise Refused(400, "the body must be JSON in UTF-8") from None
        if not isinstance(request, dict):
            raise Refused(400, "the body must be a JSON object")
        if joins:
            session = self._checked_session(request)
            if any(session in v.sessions for v in self._visitors.values() if v is not visitor):
                raise Refused(403, "this session is another visitor's")
            visitor.sessions[session] = None
            while len(visitor.sessions) > MAX_SESSIONS:
                del visitor.sessions[next(iter(visitor.sessions))]
        elif "session_hash" in request and request["session_hash"] not in [*visitor.sessions]:
            raise Refused(404, NO_SESSION)
        for path in _values(request, "path"):
            self._check_file(path, visitor)
        return passed_on

    def _checked_session(self, request: dict[str, Any]) -> str:
        """Return the session that an event is for; raise Refused unless it is one of the page."""
        number, data, session = (request.get(k) for k in ("fn_index", "data", "session_hash"))
        if isinstance(number, bool) or not isinstance(number, int) or number not in self._events:
            raise Refused(400, "fn_index must be the number of an event of this page")
        if not isinstance(data, list) or len(data) != self._events[number]:
            raise Refused(400, f"data must be a list of {self._events[number]} inputs")
        if not isinstance(session, str) or not SESSION.fullmatch(session):
            raise Refused(400, "session_hash must be letters and digits")
        if not set(request) <= {"data", "fn_index", "session_hash", "event_data", "trigger_id"}:
            raise Refused(400, "the body has parts that no event of this page has")
        trigger = request.get("trigger_id")
        if not (trigger is None or (isinstance(trigger, int) and 0 <= trigger < 2**31)):
            raise Refused(400, "trigger_id must be the number of a component")
        return session

    def _check_file(self, path: object, visitor: Visitor) -> None:
        """Raise Refused unless a visitor may name a path, and it is a file of this folder."""
        if not isinstance(path, str) or path not in visitor.files:
            raise Refused(403, NO_FILE)
        inside = Path(path).resolve().is_relative_to(self._folder.resolve())
        if not inside or Path(path).is_symlink() or not Path(path).is_file():
            raise Refused(403, NO_FILE)


def has_room(folder: Path) -> bool:
    """Remove files that expired, and return True if there is room for more."""
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


def _noting_files(send: Send, visitor: Visitor) -> Send:
    """Return what sends an answer, and lets the visitor name the files in it.

    What Gradio cannot make anything of is refused: it would answer with an error of the server.
    """

    async def note(message: Message) -> None:
        if message.get("status", 200) >= 500:
            raise Refused(400, "a file must be sent as a form that browsers send")
        for line in message.get("body", b"").splitlines():
            try:
                answer = json.loads(line.removeprefix(b"data: "))
            except ValueError:
                continue
            paths = answer if isinstance(answer, list) else _values(answer, "path")
            visitor.files.update(path for path in paths if isinstance(path, str))
        await send(message)

    return note


def _values(content: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key in JSON, at any depth."""
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if key in part:
                yield part[key]
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _header(scope: Message, name: bytes) -> str:
    return dict(scope["headers"]).get(name, b"").decode("latin-1")


def _cookie(scope: Message) -> str | None:
    """Return who a request is from, or None for a new visitor."""
    try:
        visitor = SimpleCookie(_header(scope, b"cookie")).get(COOKIE)
    except CookieError:
        return None
    return visitor.value if visitor and re.fullmatch(r"[\w-]{22}", visitor.value) else None


def _is_from_here(scope: Message) -> bool:
    """Return True if a request is to a name of this machine, and by a page that it has served."""
    host, origin = _header(scope, b"host"), _header(scope, b"origin")
    return LOCAL.fullmatch(host) is not None and origin in ("", f"http://{host}")


async def _body(receive: Receive, most: int) -> bytes:
    """Return the whole body of a request."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > most:
            raise Refused(413, f"the body must have at most {most} bytes")
        if not message.get("more_body"):
            return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read already, then whatever comes."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _limited(receive: Receive, most: int) -> Receive:
    """Return what ends the connection once a body has more bytes than it may have."""
    num_bytes = 0

    async def limit() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        return {"type": "http.disconnect"} if num_bytes > most else message

    return limit


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return what sends an answer with further headers, and none that other sites may read."""

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
