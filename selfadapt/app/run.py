"""What methods give for an image; one step after the other, and no further once stopped.

Example:
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2))
    >>> request = Request(model="tiny", methods={"tent": {"steps": 1}})
    >>> [outcome] = run(Network(model), request, torch.rand(3, 32, 48))
    >>> outcome.method, tuple(outcome.label.shape), len(outcome.losses)
    ('tent', (32, 48), 1)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch
from torch import Tensor

from selfadapt.app.networks import Network
from selfadapt.app.requests import Request
from selfadapt.labels import STREETS_9, predicted_names
from selfadapt.method import Method, Stopped
from selfadapt.methods import create_method
from selfadapt.metrics import confusion_matrix, iou

Watch = Callable[[str, int, int, float | None], None]
"""Called with the method's name, the steps taken, their number, and the loss before the last."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a method gave for an image, on the CPU."""

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

    @property
    def changed(self) -> float | None:
        """Share of the pixels whose label is not what it was."""
        if self.source_label is None:
            return None
        return (self.label != self.source_label).float().mean().item()


@dataclass
class Stops:
    """Sessions that something is run for, and which of them want it stopped."""

    running: dict[str, Event] = field(default_factory=dict)
    ended: bool = False
    """The server ends: nothing is to be run any more."""

    def begin(self, session: str) -> Event:
        """Return an event that is set once a session wants no further step."""
        event = self.running[session] = Event()
        if self.ended:
            event.set()
        return event

    def stop(self, session: str) -> bool:
        """Stop what is run for a session at its next step; return True if there is something."""
        if (event := self.running.get(session)) is None:
            return False
        event.set()
        return True

    def stop_all(self) -> None:
        """Stop everything, and whatever may begin later."""
        self.ended = True
        for event in list(self.running.values()):
            event.set()

    def done(self, session: str) -> None:
        """Forget a session that nothing is run for any more."""
        self.running.pop(session, None)


def run(
    network: Network,
    request: Request,
    image: Tensor,
    watch: Watch = lambda *_: None,
    stop: Event | None = None,
) -> Iterator[Outcome]:
    """Run the methods one after the other.

    Args:
        network: The network that is asked for.
        request: The methods and their settings.
        image: A raw image ``(3, H, W)``.
        watch: Called before a method begins and after each of its steps.
        stop: Once it is set, no further step is taken.

    Raises:
        Stopped: ``stop`` was set.
    """
    for name, settings in request.methods.items():
        method = create_method(name, network.model, max_pixels=image[0].numel(), **settings)
        steps = getattr(method, "steps", 0)

        def on_step(number: int, loss: float | None, name: str = name, steps: int = steps) -> None:
            if stop is not None and stop.is_set():
                raise Stopped
            watch(name, number, steps, loss)

        on_step(0, None)
        if isinstance(method, Method):
            method.on_step = on_step
        result = method(image)
        source, pseudo = result.source_label, result.pseudo_label
        classes = getattr(getattr(network.model, "spec", None), "classes", None)
        yield Outcome(
            method=name,
            settings=settings,
            names=predicted_names(classes, result.num_classes),
            label=result.label.cpu(),
            confidence=result.confidence.float().cpu(),
            source_label=None if source is None else source.cpu(),
            pseudo_label=None if pseudo is None else pseudo.cpu(),
            losses=result.losses,
            seconds=result.seconds,
            notes=result.notes,
        )


def mean_iou(label: Tensor, exact: Tensor, names: tuple[str, ...]) -> float | None:
    """Return the mean IoU with a rendered street's labels, over the classes it shows.

    Args:
        label: Predicted classes ``(H, W)``.
        exact: Indices in ``STREETS_9`` of the same size.
        names: Names of the predicted classes. None comes back unless all of the street's are there.

    Example:
        >>> label, exact = torch.tensor([[1, 0, 0]]), torch.tensor([[0, 6, 0]])
        >>> mean_iou(label, exact, ("sky", *STREETS_9[:6], *STREETS_9[7:]))
        0.5
    """
    if not set(STREETS_9) <= set(names):
        return None
    index = torch.tensor([names.index(name) for name in STREETS_9])
    return iou(confusion_matrix(index[exact.long()], label, len(names))).nanmean().item()
