"""The networks of the page: those the server was started with, and published ones it may fetch."""

from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from torch import nn

from selfadapt.methods import METHODS, create_method
from selfadapt.models import open_model
from selfadapt.models.trained import TRAINED
from selfadapt.patterns import nearest

MAX_FETCHED = 2
"""Fetched networks that are kept in memory; others are opened again from the disk."""
HOSTS = {"torchvision": "https://download.pytorch.org", "hf": "https://huggingface.co"}
TIMEOUT_S = 5


class Network:
    """A network and the methods that can be run with it.

    Args:
        model: The network.
        chosen: Settings that were chosen for it on a validation domain, by name.

    Raises:
        TypeError, ValueError: It is no segmentation network.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, Any] | None = None) -> None:
        self.model, self.chosen = model, dict(chosen or {})
        create_method("source", model)
        self.methods = tuple(name for name in METHODS if self._takes(name))

    @property
    def trained_on(self) -> str:
        """The images it was trained on, in words; empty: not known."""
        return str(getattr(getattr(self.model, "spec", None), "trained_on", ""))

    @property
    def device(self) -> str:
        """Kind of the device that it computes on."""
        return next((value.device.type for value in self.model.parameters()), "cpu")

    def _takes(self, name: str) -> bool:
        if name == "ensemble":  # of one network it is SaN
            return False
        try:
            create_method(name, self.model, compare=False)
        except ValueError:  # as MC-dropout's without dropout
            return False
        return True


class Networks:
    """Networks by name. Names come from visitors: only those listed here are ever opened.

    Args:
        loaded: Those the server was started with.
        fetch: Also offer the published networks of ``TRAINED``.
    """

    def __init__(self, loaded: Mapping[str, Network], *, fetch: bool = True) -> None:
        self.loaded = dict(loaded)
        self.fetchable = [name for name in TRAINED if fetch and name not in loaded]
        self._fetched: dict[str, Network] = {}
        self._lock = Lock()

    def __iter__(self) -> Iterator[str]:
        yield from self.loaded
        yield from self.fetchable

    def get(self, name: object) -> Network:
        """Return a network; a published one is fetched first, where it is not on the disk.

        Raises:
            ValueError: It is not on offer, or cannot be fetched.
        """
        if not isinstance(name, str) or name not in [*self]:
            shown = str(name)[:40]
            raise ValueError(
                f"unknown network {shown!r};{nearest(shown, self)} there are {', '.join(self)} here"
            )
        if name in self.loaded:
            return self.loaded[name]
        with self._lock:
            if name not in self._fetched:
                while len(self._fetched) >= MAX_FETCHED:
                    del self._fetched[next(iter(self._fetched))]
                self._fetched[name] = self._fetch(name)
            return self._fetched[name]

    def _fetch(self, name: str) -> Network:
        check_online(HOSTS[name.partition(":")[0]])
        device = next(iter(self.loaded.values())).device
        try:
            return Network(open_model(name).to(device))
        except Exception as error:  # servers and libraries of others fail in any way
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{name} could not be fetched: {reason}") from error


def check_online(address: str) -> None:
    """Raise ValueError unless a server can be reached; libraries try for half a minute to."""
    try:
        urlopen(address, timeout=TIMEOUT_S).close()  # proxies of the environment count
    except HTTPError:
        return  # it was reached
    except OSError as error:
        raise ValueError(
            f"{address.partition('//')[2]} cannot be reached from here: networks are fetched over "
            "the internet. Those this server was started with are at hand"
        ) from error
