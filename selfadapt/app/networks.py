"""The networks on offer: those the server was started with, and published ones to download."""

from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch
from torch import nn

from selfadapt.app.limits import MAX_FETCHED
from selfadapt.labels import Color, predicted_colors, predicted_names
from selfadapt.methods import METHODS, create_method
from selfadapt.models import open_model
from selfadapt.models.trained import TRAINED
from selfadapt.patterns import alternatives

HOSTS = {"torchvision": "https://download.pytorch.org", "hf": "https://huggingface.co"}
TIMEOUT_S = 5


class OfferedNetwork:
    """A network and the methods it supports.

    Args:
        model: The network.
        chosen: Settings tuned for it on a validation domain, by name.

    Raises:
        TypeError, ValueError: The model is not a segmentation network.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, Any] | None = None) -> None:
        self.model, self.chosen = model, dict(chosen or {})
        result = create_method("source", model, compare=False)(torch.rand(3, 64, 64))
        names = predicted_names(result.classes, result.num_classes)
        colors = predicted_colors(result.classes, len(names))
        self.classes: dict[str, Color] = dict(zip(names, colors, strict=True))
        """Names and colours of the classes, in the order of their ids."""
        self.methods = tuple(name for name in METHODS if self._supports(name))

    @property
    def trained_on(self) -> str:
        """Description of the training images; empty if unknown."""
        return str(getattr(getattr(self.model, "spec", None), "trained_on", ""))

    @property
    def device(self) -> str:
        """Type of the device that the network is on."""
        return next((value.device.type for value in self.model.parameters()), "cpu")

    def _supports(self, name: str) -> bool:
        if name == "ensemble":  # with a single network it equals SaN
            return False
        try:
            create_method(name, self.model, compare=False)
        except ValueError:  # for example MC-dropout without dropout layers
            return False
        return True


class Networks:
    """Networks by name. Names come from visitors, so only listed networks are ever opened.

    Args:
        loaded: The networks the server was started with.
        fetch: Also offer the published networks of ``TRAINED``.
    """

    def __init__(self, loaded: Mapping[str, OfferedNetwork], *, fetch: bool = True) -> None:
        self.loaded = dict(loaded)
        self.fetchable = [name for name in TRAINED if fetch and name not in loaded]
        self._fetched: dict[str, OfferedNetwork] = {}
        self._lock = Lock()

    def __iter__(self) -> Iterator[str]:
        yield from self.loaded
        yield from self.fetchable

    def get(self, name: object) -> OfferedNetwork:
        """Return a network; a published network is downloaded first unless it is cached.

        Raises:
            ValueError: The network is not listed or cannot be downloaded.
        """
        if not isinstance(name, str) or name not in [*self]:
            shown = str(name)[:40]
            raise ValueError(f"unknown network {shown!r}{alternatives(shown, self)}")
        if name in self.loaded:
            return self.loaded[name]
        with self._lock:
            if name not in self._fetched:
                while len(self._fetched) >= MAX_FETCHED:
                    del self._fetched[next(iter(self._fetched))]
                self._fetched[name] = self._fetch(name)
            return self._fetched[name]

    def _fetch(self, name: str) -> OfferedNetwork:
        check_online(HOSTS[name.partition(":")[0]])
        device = next(iter(self.loaded.values())).device
        try:
            return OfferedNetwork(open_model(name).to(device))
        except Exception as error:  # third-party libraries and servers raise anything
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{name} could not be downloaded: {reason}") from error


def check_online(address: str) -> None:
    """Raise ValueError if a server cannot be reached; libraries would retry for half a minute."""
    try:
        urlopen(address, timeout=TIMEOUT_S).close()  # respects the proxies of the environment
    except HTTPError:
        return  # the server answered
    except OSError as error:
        raise ValueError(
            f"{address.partition('//')[2]} cannot be reached from here, so the network cannot "
            "be downloaded. The networks this server was started with are available"
        ) from error
