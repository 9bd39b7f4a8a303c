"""The server: the page behind its gate, on this machine alone unless told otherwise."""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

import gradio as gr
import uvicorn
from fastapi import FastAPI

from selfadapt.app.gate import Gate
from selfadapt.app.networks import Network, Networks
from selfadapt.app.page import Page
from selfadapt.app.run import Stops
from selfadapt.app.uploads import Limits
from selfadapt.app.viewer import WEB
from selfadapt.checks import check_number

LOOPBACK = "127.0.0.1"
FONT, FONT_MONO = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
"""Fonts that are there already; nothing is fetched."""


@contextmanager
def application(
    networks: Mapping[str, Network], limits: Limits, stops: Stops, *, local: bool = True
) -> Iterator[Gate]:
    """Lend the application; what was uploaded and made is gone on leaving.

    Args:
        networks: The networks to choose from, by name. Where ``local``, published ones are
            offered as well.
        limits: How large images may be.
        stops: Who has asked for an end of what is run for them.
        local: Answer only to names of this machine.
    """
    with tempfile.TemporaryDirectory(prefix="selfadapt-") as name, _kept_in(Path(name)):
        offered = Networks(networks, fetch=local)
        blocks = Page(offered, limits, Path(name), stops).build()
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
        # Unless it counts as launched, Gradio takes files from anywhere on the server.
        blocks.has_launched = blocks.is_running = True
        events = {
            number: len(event.inputs)
            for number, event in blocks.fns.items()
            if event.fn is not None
        }
        yield Gate(app, events, limits.num_bytes, Path(name), local=local)


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
def _kept_in(folder: Path) -> Iterator[None]:
    """Let Gradio put its files into a folder, and tell nobody about us."""
    wanted = {
        "GRADIO_TEMP_DIR": str(folder),
        "GRADIO_EXAMPLES_CACHE": str(folder / "examples"),
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def serve(
    networks: Mapping[str, Network],
    limits: Limits,
    host: str = LOOPBACK,
    port: int = 7860,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until it is told to end, by Ctrl-C or SIGTERM.

    Args:
        networks: The networks to choose from, by name.
        limits: How large images may be.
        host: Address to listen at.
        port: Port to listen at; 0: any that is free.
        ready: Told the page's address once it can be reached.
    """
    stops, local = Stops(), is_local(host)
    with bound(host, port) as listening, application(networks, limits, stops, local=local) as app:
        config = uvicorn.Config(
            app, log_level="error", server_header=False, timeout_graceful_shutdown=1
        )
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listening.getsockname()[1]}")
        _Server(config, stops).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends what is run when it ends, and returns, so that there is time to clean up.

    Args:
        config: Its settings.
        stops: Told of the end.
    """

    def __init__(self, config: uvicorn.Config, stops: Stops) -> None:
        super().__init__(config)
        self._stops = stops

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End soon; told so twice, at once."""
        self._stops.stop_all()
        self.force_exit, self.should_exit = self.should_exit, True
        logging.getLogger("uvicorn.error").disabled = True  # pages that are open are no error


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or say why there is none."""
    check_number("port", port, 0, 65535, whole=True)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise OSError(
            f"cannot listen on port {port} at {host} ({reason}); "
            "choose another with --port, or leave --host out"
        ) from error


def is_local(host: str) -> bool:
    """Return True if an address reaches this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
