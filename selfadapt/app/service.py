"""The interface for programs: an image in, its label out, beside the page and in its queue.

POST /v1/segment    an image; its label as PNG, NPZ or JSON
GET  /v1/models     networks, classes, methods and settings
GET  /v1/health     version, device and queue
GET  /v1/docs       a description, also as /v1/openapi.json
"""

import asyncio
import hmac
import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from selfadapt.app.answers import FORMATS, as_json, as_npz, as_png, choose_format, headers_of
from selfadapt.app.asgi import (
    Message,
    Receive,
    Refused,
    Send,
    errors_after_body,
    header,
    is_local_request,
    receive_body,
    replay,
    with_headers,
)
from selfadapt.app.description import STYLE_HASH, offered_settings, page, segment_route
from selfadapt.app.jobs import PROGRAMS, Job, JobQueue, QueueFull
from selfadapt.app.limits import (
    MAX_PROBS_BYTES,
    MAX_QUEUE,
    MAX_TOKEN,
    MIN_TOKEN,
    UPLOAD_OVERHEAD,
    Limits,
)
from selfadapt.app.networks import Networks
from selfadapt.app.requests import Request, check_query, from_query
from selfadapt.app.run import reason, segment
from selfadapt.app.uploads import decode
from selfadapt.checks import shortened
from selfadapt.method import Stopped
from selfadapt.methods import summary_of
from selfadapt.modes import MAX_PIXELS
from selfadapt.version import __version__

PREFIX = "/v1/"
PUBLIC = ("/v1/docs", "/v1/openapi.json")
"""Paths that need no token: they are the same on every server."""
HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src '{STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
OFF = (
    "the interface for programs is off: this server can be reached from other machines and was "
    "started without a token; start it with SELFADAPT_TOKEN set"
)
NO_IMAGE = (
    "the body must be an image with content-type image/..., or multipart/form-data with a file in "
    "the field 'image' and nothing else"
)


class Service:
    """ASGI application of the paths below ``PREFIX``.

    Args:
        networks: The networks to choose from; the first is the default.
        limits: Limits on the size of images.
        queue: The queue of images, shared with the page.
        folder: Folder of temporary files.
        token: If given, requests must have it.
        local: Answer only requests to loopback host names. If False, nothing is answered without
            a token.
    """

    def __init__(
        self,
        networks: Networks,
        limits: Limits,
        queue: JobQueue,
        folder: Path,
        token: str | None = None,
        *,
        local: bool = True,
    ) -> None:
        self._networks, self._limits, self._queue = networks, limits, queue
        self._folder, self._token, self._local = folder, token, local
        app = FastAPI(
            title="selfadapt",
            version=__version__,
            description="Segment images with networks that adapt themselves to each image. Where "
            "the server has a token, send it in the header 'Authorization: Bearer TOKEN'.",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            openapi_url=f"{PREFIX}openapi.json",
        )
        app.post(f"{PREFIX}segment", **segment_route())(self.segment)
        app.get(f"{PREFIX}models")(self.models)
        app.get(f"{PREFIX}health")(self.health)

        @app.get(f"{PREFIX}docs", include_in_schema=False)
        async def docs() -> HTMLResponse:
            return HTMLResponse(page(app.openapi()))

        @app.exception_handler(HTTPException)
        async def no_such_request(request: HttpRequest, error: HTTPException) -> Response:
            asked = f"{request.method} {request.url.path[:80]}"
            text = f"there is no {asked}; see {PREFIX}docs"
            return _error(error.status_code, text, error.headers)

        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        max_bytes = self._limits.num_bytes + UPLOAD_OVERHEAD
        receive, send = errors_after_body(receive, with_headers(send, HEADERS), max_bytes)
        try:
            self._check(scope)
        except Refused as refused:
            headers = {"www-authenticate": "Bearer"} if refused.status == 401 else {}
            await _error(refused.status, str(refused), headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Message) -> None:
        """Raise Refused for requests of other web sites, and for those without the token."""
        origin, site = header(scope, b"origin"), header(scope, b"sec-fetch-site")
        host = header(scope, b"host")
        is_same_origin = origin == "" or origin.partition("://")[2] == host
        if not is_same_origin or site not in ("", "none", "same-origin"):
            raise Refused(403, "requests of other web sites are not answered")
        if self._local and not is_local_request(scope):
            raise Refused(403, "the header Host must be a loopback name, such as localhost")
        if not self._local and self._token is None:
            raise Refused(403, OFF)
        if self._token is None or scope["path"] in PUBLIC:
            return
        scheme, _, token = header(scope, b"authorization").partition(" ")
        is_right = hmac.compare_digest(token.encode("latin-1"), self._token.encode())
        if scheme.lower() != "bearer" or not is_right:
            came = "another" if scheme else "none"
            raise Refused(
                401,
                "the header Authorization must be 'Bearer TOKEN' with the token of this server, "
                f"got {came}",
            )

    async def models(self) -> dict[str, Any]:
        """List the networks with their classes, methods, settings and limits."""
        limits = self._limits
        return {
            "models": [
                {
                    "name": name,
                    "trained_on": network.trained_on,
                    "classes": [
                        {"id": index, "name": class_name, "color": color}
                        for index, (class_name, color) in enumerate(network.classes.items())
                    ],
                    "default_method": network.methods[-1],
                    "methods": {
                        method: {
                            "summary": summary_of(method),
                            "settings": offered_settings(method, network.chosen),
                        }
                        for method in network.methods
                    },
                }
                for name, network in self._networks.loaded.items()
            ],
            "limits": {
                "megabytes": limits.megabytes,
                "megapixels": limits.megapixels,
                "max_pixels": limits.max_pixels,
            },
        }

    async def health(self) -> dict[str, Any]:
        """Return version and device, and how many images are running and waiting."""
        return {
            "ok": True,
            "version": __version__,
            "device": next(iter(self._networks.loaded.values())).device,
            "running": self._queue.num_running,
            "waiting": self._queue.num_waiting,
            "capacity": MAX_QUEUE,
            "seconds_per_image": round(self._queue.seconds, 3),
        }

    async def segment(self, http: HttpRequest) -> Response:
        """Segment the image in the body: a file of type image/..., or a form with field image."""
        try:
            query = check_query(http.query_params.multi_items())
            request = from_query(query, self._networks)
            form = choose_format(query.get("format"), http.headers.get("accept", ""))
            probs = query.get("probs", "false")
            if probs not in ("true", "false"):
                raise ValueError(f"probs must be true or false, got {shortened(probs, 40)}")
            if probs == "true" and form != "npz":
                raise ValueError(f"probs come with format=npz only, got format={form}")
            with self._queue.job(PROGRAMS) as job:
                async with self._received_image(http) as file, self._stopped_if_gone(http, job):
                    await asyncio.wrap_future(self._queue.enqueue(job))
                    return await run_in_threadpool(
                        self._answer, request, file, job, form, probs=probs == "true"
                    )
        except QueueFull as full:
            return _error(429, str(full), {"retry-after": str(full.seconds)})
        except Stopped:
            return _error(503, "stopped: the client has left, or the server is shutting down")
        except Refused as refused:
            return _error(refused.status, str(refused))
        except Exception as error:
            return _error(400 if isinstance(error, ValueError) else 500, reason(error))

    def _answer(
        self, request: Request, file: IO[bytes], job: Job, form: str, *, probs: bool
    ) -> Response:
        """Decode an image, run the method and encode the result; one image at a time."""
        network = self._networks.get(request.model)
        [(method, settings)] = request.methods.items()
        image, _ = decode(file, self._limits)
        num_pixels = image[0].numel()
        num_bytes = 2 * len(network.classes) * num_pixels
        if probs and num_bytes > MAX_PROBS_BYTES:
            raise Refused(
                413,
                f"probs of an image may have {MAX_PROBS_BYTES / 2**20:.0f} MB, this one's would "
                f"have {num_bytes / 2**20:.0f}; send a smaller image",
            )
        max_pixels = self._limits.max_pixels
        if settings.get("mode") != "official":
            settings = settings | {"max_pixels": max_pixels}
        elif max_pixels < min(num_pixels, MAX_PIXELS):  # official mode has a limit of its own
            raise Refused(
                413,
                f"in official mode an image may have {max_pixels} pixels here, this one has "
                f"{num_pixels}; send a smaller one, or use another mode",
            )
        result = segment(network, method, settings | {"compare": False}, image, stop=job.stop)
        if form == "json":
            content = as_json(result, network.classes, request)
        elif form == "npz":
            content = as_npz(result, network.classes, probs=probs)
        else:
            content = as_png(result, network.classes)
        headers = {} if form == "json" else headers_of(result)
        return Response(content, media_type=FORMATS[form], headers=headers)

    @asynccontextmanager
    async def _received_image(self, http: HttpRequest) -> AsyncIterator[IO[bytes]]:
        """Receive the image file of a request."""
        kind = http.headers.get("content-type", "").lower()
        if not kind.startswith(("image/", "multipart/form-data")):
            raise Refused(415, f"{NO_IMAGE}, got {kind[:80] or 'no content-type'}")
        too_large = f"an image file may have {self._limits.megabytes:g} MB; send a smaller one"
        max_bytes = self._limits.num_bytes + UPLOAD_OVERHEAD
        length = http.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise Refused(413, too_large)
        with tempfile.TemporaryFile(dir=self._folder) as body:
            await receive_body(http.receive, body, max_bytes, too_large)
            if kind.startswith("image/"):
                yield body
                return
            parsed = HttpRequest(http.scope, replay(body, http.receive))
            try:
                async with parsed.form(max_files=1, max_fields=0) as form:
                    part = form.get("image")
                    if not isinstance(part, UploadFile):
                        raise Refused(400, NO_IMAGE)
                    yield part.file
            except HTTPException as error:
                raise Refused(400, NO_IMAGE) from error

    @asynccontextmanager
    async def _stopped_if_gone(self, http: HttpRequest, job: Job) -> AsyncIterator[None]:
        """Context manager in which a job is stopped once its client has closed the connection."""

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            self._queue.stop(job)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


def check_token(token: str) -> None:
    """Raise ValueError unless a token is long enough, and can be sent in a header."""
    if not re.fullmatch(rf"[!-~]{{{MIN_TOKEN},{MAX_TOKEN}}}", token):
        raise ValueError(
            f"a token must have {MIN_TOKEN} to {MAX_TOKEN} ASCII characters without spaces, got "
            f"{len(token)}; this prints one: python -c 'import secrets; "
            "print(secrets.token_urlsafe())'"
        )


def _error(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail}, status, headers)
