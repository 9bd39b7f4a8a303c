"""Every way to segment an image, by name, under one contract.

    method = METHODS[name](model, **settings)
    result = method(image)

Each leaves the model bit-identical and returns a ``Result``. To add one, write a class on top of
``Method`` and give it a line here, or name it ``MODULE:CLASS``.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Unpack

from torch import nn

from selfadapt.adapt import SelfAdapt
from selfadapt.baselines import TTA, Ensemble, MCDropout, PredictionBN, SaNOnly, Source
from selfadapt.entropy import MEMO, EntropyMin, InTEnt, Tent
from selfadapt.explain import Explanation
from selfadapt.images import Image
from selfadapt.losses import LOSSES
from selfadapt.method import Common, Method
from selfadapt.own import import_own, is_own, not_trusted
from selfadapt.patterns import nearest
from selfadapt.result import Result
from selfadapt.steps import STEP_RULES


class Segments(Protocol):
    """Segments one image at a time, without modifying its network."""

    notes: tuple[str, ...]

    def __call__(self, image: Image, *, normalized: bool = False) -> Result:
        """Segment an image."""

    def map(self, images: Iterable[Image], batch_size: int = 1) -> Iterator[Result]:
        """Segment many images, and yield their results in order."""

    def explain(self) -> Explanation:
        """Return the decisions made for the network and its device, and why."""


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
    return find_method(name)(model, **settings)  # type: ignore[arg-type]


def load_own(name: str, kind: str = "method") -> None:
    """Import the user's own method, loss or step rule, ``MODULE:NAME``, to be used by that name.

    This runs the code of the module.
    """
    value = import_own(name)
    if kind != "method":
        names: dict[str, Any] = {"loss": LOSSES, "step": STEP_RULES}[kind]  # type: ignore[assignment]
        names[name] = value
    elif isinstance(value, type) and issubclass(value, Method):
        METHODS[name] = value
    else:
        raise ValueError(f"{name} is not a method: that is a class on top of selfadapt.Method")


def find_method(name: str) -> type[Method] | type[Ensemble]:
    """Return the class of a method by name."""
    if name in METHODS:
        return METHODS[name]
    if is_own(name):
        raise not_trusted(name)
    raise ValueError(
        f"unknown method {name!r};{nearest(str(name), METHODS)} known: {', '.join(METHODS)}"
    )


def check_method(name: str, settings: Iterable[str]) -> None:
    """Raise ValueError unless there is such a method and it has these settings."""
    parameters = settings_of(name)
    for setting in settings:
        if setting not in parameters:
            raise ValueError(
                f"the method {name!r} has no setting {setting!r};"
                f"{nearest(str(setting), parameters)} it has {', '.join(parameters)}"
            )


def summary_of(name: str) -> str:
    """Return in one line what a method does.

    Example:
        >>> summary_of("self-adapt")
        'Adapt the network to its own pseudo-label of the image (Bahmani et al., TMLR 2023).'
    """
    return (find_method(name).__doc__ or "").split("\n")[0]


def settings_of(name: str) -> dict[str, inspect.Parameter]:
    """Return the settings of a method by name, its own first, then those every method has."""
    method = find_method(name)
    settings: dict[str, inspect.Parameter] = {}
    for base in method.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base).parameters
        own = {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        settings |= {n: p for n, p in own.items() if n not in settings}
        rest = [p.annotation for p in parameters.values() if p.kind is p.VAR_KEYWORD]
        if not rest or rest == [Unpack[Common]]:  # else it passes on what its base takes
            break
    common = inspect.signature(Method).parameters
    others = {n: p for n, p in settings.items() if n not in Common.__annotations__}
    return others | {n: settings.get(n, common[n]) for n in Common.__annotations__}
