"""Run methods on an image, with progress after each step and a way to stop.

Example:
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2))
    >>> request = Request(model="tiny", methods={"tent": {"steps": 1}})
    >>> [outcome] = run(OfferedNetwork(model), request, torch.rand(3, 32, 48))
    >>> outcome.method, tuple(outcome.label.shape), len(outcome.losses)
    ('tent', (32, 48), 1)
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from torch import Tensor

from selfadapt.app.networks import OfferedNetwork
from selfadapt.app.requests import Request
from selfadapt.labels import STREETS_9, predicted_names
from selfadapt.method import Method, Stopped
from selfadapt.methods import create_method
from selfadapt.metrics import confusion_matrix, iou
from selfadapt.result import Result

LOG = logging.getLogger(__name__)
Watch = Callable[[str, int, int, float | None], None]
"""Called with the method's name, the steps taken, the number of steps and the last loss."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a method for an image, on the CPU."""

    method: str
    settings: dict[str, Any]
    names: tuple[str, ...]
    """Names of the classes."""
    label: Tensor
    confidence: Tensor
    source_label: Tensor | None
    """Label of the network as trained; None where its prediction is not finite."""
    pseudo_label: Tensor | None
    losses: tuple[float, ...]
    seconds: float
    notes: tuple[str, ...]
    quality: float | None = None

    @property
    def changed(self) -> float | None:
        """Share of the pixels whose label differs from the network as trained."""
        if self.source_label is None:
            return None
        return (self.label != self.source_label).float().mean().item()


def run(
    network: OfferedNetwork,
    request: Request,
    image: Tensor,
    watch: Watch = lambda *_: None,
    stop: Event | None = None,
) -> Iterator[Outcome]:
    """Run the requested methods one after the other.

    Args:
        network: The network.
        request: The methods and their settings.
        image: A raw image ``(3, H, W)``.
        watch: Called before a method begins and after each of its steps.
        stop: When set, no further step is taken.

    Raises:
        Stopped: ``stop`` was set.
    """
    for name, settings in request.methods.items():
        size = {"max_pixels": image[0].numel()}
        result = segment(network, name, settings | size, image, watch, stop)
        source, pseudo = result.source_label, result.pseudo_label
        yield Outcome(
            method=name,
            settings=settings,
            names=predicted_names(result.classes, result.num_classes),
            label=result.label.cpu(),
            confidence=result.confidence.float().cpu(),
            source_label=None if source is None else source.cpu(),
            pseudo_label=None if pseudo is None else pseudo.cpu(),
            losses=result.losses,
            seconds=result.seconds,
            quality=result.quality,
            notes=result.notes,
        )


def segment(
    network: OfferedNetwork,
    name: str,
    settings: Mapping[str, Any],
    image: Tensor,
    watch: Watch = lambda *_: None,
    stop: Event | None = None,
) -> Result:
    """Run a method on an image; see ``run``."""
    method = create_method(name, network.model, **settings)
    steps = getattr(method, "steps", 0)

    def on_step(number: int, loss: float | None) -> None:
        if stop is not None and stop.is_set():
            raise Stopped
        watch(name, number, steps, loss)

    on_step(0, None)
    if isinstance(method, Method):
        method.on_step = on_step
    return method(image)


def reason(error: Exception) -> str:
    """Return what visitors and programs are told of an error; the details are logged."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        LOG.warning("out of memory: %s", error)
        return "the server is out of memory: try a smaller image"
    LOG.error("a request failed", exc_info=error)
    return "internal error; see the log of the server"


def mean_iou(label: Tensor, ground_truth: Tensor, names: tuple[str, ...]) -> float | None:
    """Return the mean IoU with the labels of a rendered street, over the classes it contains.

    Args:
        label: Predicted classes ``(H, W)``.
        ground_truth: Indices in ``STREETS_9`` of the same size.
        names: Names of the predicted classes.

    Returns:
        The mean IoU; None unless ``names`` has all classes of ``STREETS_9``.

    Example:
        >>> label, ground_truth = torch.tensor([[1, 0, 0]]), torch.tensor([[0, 6, 0]])
        >>> mean_iou(label, ground_truth, ("sky", *STREETS_9[:6], *STREETS_9[7:]))
        0.5
    """
    target = remap_street_label(ground_truth, names)
    if target is None:
        return None
    return iou(confusion_matrix(target, label, len(names))).nanmean().item()


def remap_street_label(label: Tensor, names: Sequence[str]) -> Tensor | None:
    """Convert indices in ``STREETS_9`` to indices in ``names``; None if a class is missing."""
    if not set(STREETS_9) <= set(names):
        return None
    return torch.tensor([names.index(name) for name in STREETS_9])[label.long()]
