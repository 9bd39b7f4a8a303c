"""Every way to segment an image, by name, under one contract.

    method = METHODS[name](model, **settings)
    result = method(image)

Each leaves the model bit-identical and returns a ``Result``. To add one, write a class that keeps
this contract, most easily on top of ``Method``, and give it a line here.
"""

import inspect
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

from selfadapt.adapt import SelfAdapt
from selfadapt.baselines import TTA, Ensemble, MCDropout, PredictionBN, SaNOnly, Source
from selfadapt.entropy import MEMO, EntropyMin, InTEnt, Tent
from selfadapt.images import Image
from selfadapt.method import Common, Method
from selfadapt.names import nearest
from selfadapt.result import Result


class Segments(Protocol):
    """Segments one image at a time, and leaves its network as it was."""

    notes: tuple[str, ...]

    def __call__(self, image: Image, *, normalized: bool = False) -> Result:
        """Segment an image."""


METHODS: dict[str, type[Method] | type[Ensemble]] = {
    "source": Source,
    "p-bn": PredictionBN,
    "san": SaNOnly,
    "tta": TTA,
    "mc-dropout": MCDropout,
    "tent": Tent,
    "entropy": EntropyMin,
    "memo": MEMO,
    "intent": InTEnt,
    "ensemble": Ensemble,
    "self-adapt": SelfAdapt,
}
"""Name -> class."""


def create_method(name: str, model: nn.Module | Iterable[nn.Module], **settings: Any) -> Segments:
    """Create a method by name.

    Args:
        name: A name in ``METHODS``.
        model: The network; for ``ensemble`` several.
        **settings: The method's settings; ``selfadapt methods`` lists them.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
        >>> create_method("tent", model, steps=2).steps
        2
    """
    check_method(name, settings)
    return METHODS[name](model, **settings)  # type: ignore[arg-type]


def check_method(name: str, settings: Iterable[str]) -> None:
    """Raise ValueError unless there is such a method and it has these settings."""
    known = settings_of(name)
    for setting in settings:
        if setting not in known:
            raise ValueError(
                f"the method {name!r} has no setting {setting!r};{nearest(str(setting), known)} "
                f"it has {', '.join(known)}"
            )


def summary_of(name: str) -> str:
    """Return in one line what a method does.

    Example:
        >>> summary_of("self-adapt")
        'Adapt the network to its own pseudo-label of the image (Bahmani et al., TMLR 2023).'
    """
    return (METHODS[name].__doc__ or "").split("\n")[0]


def settings_of(name: str) -> dict[str, inspect.Parameter]:
    """Return the settings of a method by name, its own first, then those every method has."""
    if name not in METHODS:
        raise ValueError(
            f"unknown method {name!r};{nearest(str(name), METHODS)} known: {', '.join(METHODS)}"
        )
    own = inspect.signature(METHODS[name]).parameters
    common = inspect.signature(Method).parameters
    settings = {n: p for n, p in own.items() if p.kind is p.KEYWORD_ONLY}
    return settings | {n: common[n] for n in Common.__annotations__ if n not in settings}
