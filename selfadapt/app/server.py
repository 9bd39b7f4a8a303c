"""The server: the page and the interface for programs, on the loopback address by default."""

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from threading import Thread
from types import FrameType

import gradio as gr
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from selfadapt.app.asgi import Application, Message, Receive, Send
from selfadapt.app.gate import TICKET, Event, Gate, Ticket
from selfadapt.app.jobs import JobQueue
from selfadapt.app.limits import MAX_CONNECTIONS, REQUEST_S, Limits
from selfadapt.app.networks import Networks, OfferedNetwork
from selfadapt.app.page import Page
from selfadapt.app.service import PREFIX, Service
from selfadapt.app.viewer import WEB
from selfadapt.checks import check_number

LOOPBACK = "127.0.0.1"
FONT, FONT_MONO = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
"""System fonts, so that nothing is downloaded."""


@contextmanager
def application(
    networks: Mapping[str, OfferedNetwork],
    limits: Limits,
    queue: JobQueue,
    token: str | None = None,
    *,
    local: bool = True,
) -> Iterator[Application]:
    """Context manager of the application; uploads and results are deleted on exit.

    Args:
        networks: The networks to choose from, by name. If ``local``, published networks are
            offered as well.
        limits: Limits on the size of images.
        queue: The queue of images.
        token: What programs must send, if given.
        local: Answer only requests to loopback host names. If False, programs need a token.
    """
    with tempfile.TemporaryDirectory(prefix="selfadapt-") as name, _gradio_environment(Path(name)):
        offered = Networks(networks, fetch=local)
        page = Page(offered, limits, Path(name), queue)
        example = Thread(target=_prepare, args=(page,))  # before the first visitor
        example.start()
        blocks = page.build()
        app = gr.mount_gradio_app(
            FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
            blocks,
            path="/",
            max_file_size=limits.num_bytes,
            show_error=False,
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            theme=_theme(),
            css=(WEB / "page.css").read_text(),
        )
        # Until it is marked as launched, Gradio serves any file of the machine.
        blocks.has_launched = blocks.is_running = True
        events = {
            number: Event(str(event.api_name), len(event.inputs))
            for number, event in blocks.fns.items()
            if event.fn is not None
        }
        gate = Gate(
            app, events, partial(_pending, blocks), limits.num_bytes, Path(name), local=local
        )
        loaded = Networks(networks, fetch=False)
        service = Service(loaded, limits, queue, Path(name), token, local=local)

        async def dispatch(scope: Message, receive: Receive, send: Send) -> None:
            is_program = scope["type"] == "http" and scope["path"].startswith(PREFIX)
            await (service if is_program else gate)(scope, receive, send)

        try:
            yield dispatch
        finally:
            queue.stop_all()
            example.join()  # its files are in the folder


def _prepare(page: Page) -> None:
    with suppress(Exception):  # visitors get the error
        page.compute_example()


def _pending(blocks: gr.Blocks) -> tuple[set[Ticket], set[Ticket]]:
    """Return the tickets of the waiting and of the running events."""
    queue = blocks._queue
    waiting = [
        event for part in queue.event_queue_per_concurrency_id.values() for event in part.queue
    ]
    running = [event for job in queue.active_jobs for event in job or ()]
    tickets = [{event.request.scope[TICKET] for event in events} for events in (waiting, running)]
    return tickets[0], tickets[1]


def _theme() -> gr.themes.Base:
    theme = gr.themes.Default(
        primary_hue="teal", secondary_hue="teal", font=FONT, font_mono=FONT_MONO
    )
    return theme.set(
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
    )


@contextmanager
def _gradio_environment(folder: Path) -> Iterator[None]:
    """Set Gradio's environment: files go to ``folder``, analytics are off."""
    variables = {
        "GRADIO_TEMP_DIR": str(folder),
        "GRADIO_EXAMPLES_CACHE": str(folder / "examples"),
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def serve(
    networks: Mapping[str, OfferedNetwork],
    limits: Limits,
    host: str = LOOPBACK,
    port: int = 7860,
    token: str | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page and the interface for programs until Ctrl-C or SIGTERM.

    Args:
        networks: The networks to choose from, by name.
        limits: Limits on the size of images.
        host: Address to listen on.
        port: Port to listen on; 0: any free port.
        token: What programs must send. None: nothing; beyond this machine they are refused.
        ready: Called with the URL of the page once it can be reached.
    """
    queue, local = JobQueue(), is_local(host)
    with (
        bind_socket(host, port) as listener,
        application(networks, limits, queue, token, local=local) as app,
    ):
        config = server_config(app)
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listener.getsockname()[1]}")
        _Server(config, queue).run(sockets=[listener])


def server_config(app: Application, log_level: str = "error") -> uvicorn.Config:
    """Return the settings of the server of an application."""
    return uvicorn.Config(
        app,
        http=_Connection,
        log_level=log_level,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )


class _Connection(H11Protocol):
    """A connection that is closed if its first request does not arrive in time.

    uvicorn closes idle connections only after a request.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(REQUEST_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


class _Server(uvicorn.Server):
    """A uvicorn server that stops all runs on exit, so that ``serve`` can clean up.

    Args:
        config: Settings of the server.
        queue: The queue of images.
    """

    def __init__(self, config: uvicorn.Config, queue: JobQueue) -> None:
        super().__init__(config)
        self._queue = queue

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully; at once on the second signal."""
        self._queue.stop_all()
        self.force_exit, self.should_exit = self.should_exit, True
        logging.getLogger("uvicorn.error").disabled = True  # open pages are not an error


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket, or raise an OSError that names the reason."""
    check_number("port", port, 0, 65535, whole=True)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
        # Connections inherit it; without, each answer waits 40 ms for the delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise OSError(
            f"cannot listen on port {port} of {host} ({reason}); "
            "choose another with --port, or omit --host"
        ) from error


def is_local(host: str) -> bool:
    """Return True if a host name or address is a loopback address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
