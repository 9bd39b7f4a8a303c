"""A server of the web app, in a thread of its own, with a tiny network."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx
import uvicorn
from torch import Tensor

from conftest import TinyNet, seeded
from selfadapt.app.jobs import JobQueue
from selfadapt.app.limits import Limits
from selfadapt.app.networks import OfferedNetwork
from selfadapt.app.server import application, bind_socket, server_config

LIMITS = Limits(megabytes=0.05, megapixels=0.02, max_pixels=64 * 96)


class Paced(TinyNet):
    """A tiny network that takes as long as it is told."""

    delay = 0.0

    def forward(self, x: Tensor) -> Any:
        time.sleep(self.delay)
        return super().forward(x)


@dataclass
class Served:
    """A server that runs, its network, and a visitor's browser."""

    address: str
    model: Any
    queue: JobQueue = field(default_factory=JobQueue)
    browser: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    @cached_property
    def functions(self) -> dict[str, dict[str, Any]]:
        """The functions that the page calls, by name."""
        config = httpx.get(f"{self.address}/config", timeout=30).json()
        return {event["api_name"]: event for event in config["dependencies"]}

    def function(self, name: str) -> int:
        """Return the number by which the page calls one of its functions."""
        return self.functions[name]["id"]

    def call(self, name: str, data: list[Any], session: str | None = None) -> dict[str, Any]:
        """Call a function as the page does; return what it is answered at the end."""
        session = session or f"page{id(self)}"
        body = {"data": data, "fn_index": self.function(name), "session_hash": session}
        joined = self.browser.post(f"{self.address}/gradio_api/queue/join", json=body)
        assert joined.status_code == 200, joined.text
        query = {"session_hash": session}
        url = f"{self.address}/gradio_api/queue/data"
        with self.browser.stream("GET", url, params=query) as answer:
            for line in answer.iter_lines():
                message = json.loads(line.removeprefix("data:")) if line else {}
                if message.get("msg") == "process_completed":
                    return message
        raise AssertionError("the server said nothing")

    def upload(self, content: bytes, name: str = "street.png") -> httpx.Response:
        """Upload a file as the page does."""
        files = {"files": (name, content)}
        return self.browser.post(f"{self.address}/gradio_api/upload", files=files)


@contextmanager
def served(
    limits: Limits = LIMITS, token: str | None = None, *, local: bool = True
) -> Iterator[Served]:
    """Run a server."""
    model = seeded(Paced, seed=7)  # SaN changes what it sees, so it is adapted
    networks = {"tiny": OfferedNetwork(model)}
    queue = JobQueue()
    with (
        bind_socket("127.0.0.1", 0) as listening,
        application(networks, limits, queue, token, local=local) as app,
    ):
        server = uvicorn.Server(server_config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", model, queue)
        finally:
            server.should_exit = True
            thread.join(30)
