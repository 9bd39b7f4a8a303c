"""Networks, and what methods give for an image; one step after the other, and no further if told.

Example:
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2))
    >>> wish = Wish(model="tiny", methods={"tent": {"steps": 1}})
    >>> [outcome] = run(Network(model), wish, torch.rand(3, 32, 48))
    >>> outcome.method, tuple(outcome.label.shape), len(outcome.losses)
    ('tent', (32, 48), 1)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from torch import Tensor, nn

from selfadapt.app.wishes import Wish
from selfadapt.method import Method, Stopped
from selfadapt.methods import METHODS, create_method
from selfadapt.predict import masks_of

Watch = Callable[[str, int, int, float | None], None]
"""Told the method's name, its steps taken, their number, and the loss before the last."""


class Network:
    """A network the server was started with.

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

    def _takes(self, name: str) -> bool:
        if name == "ensemble":  # of one network it is SaN
            return False
        try:
            create_method(name, self.model, compare=False)
        except ValueError:  # as MC-dropout's without dropout
            return False
        return True


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
    def changed(self) -> Tensor | None:
        """Where the label is not what it was ``(H, W)``."""
        return None if self.source_label is None else self.label != self.source_label


@dataclass
class Stops:
    """Who has asked for an end of what is run for them."""

    running: dict[str, Event] = field(default_factory=dict)
    ended: bool = False
    """Nothing is to be run any more."""

    def begin(self, session: str) -> Event:
        """Return what says from now on whether a session wants an end."""
        event = self.running[session] = Event()
        if self.ended:
            event.set()
        return event

    def stop(self, session: str) -> bool:
        """End what is run for a session at its next step; say whether there is something."""
        if (event := self.running.get(session)) is None:
            return False
        event.set()
        return True

    def stop_all(self) -> None:
        """End all that is run, and what may come."""
        self.ended = True
        for event in list(self.running.values()):
            event.set()

    def done(self, session: str) -> None:
        """Forget a session that nothing is run for any more."""
        self.running.pop(session, None)


def run(
    network: Network,
    wish: Wish,
    image: Tensor,
    watch: Watch = lambda *_: None,
    stop: Event | None = None,
) -> Iterator[Outcome]:
    """Run the methods one after the other.

    Args:
        network: The network that is wished for.
        wish: The methods and their settings.
        image: A raw image ``(3, H, W)``.
        watch: Called before a method begins and after each of its steps.
        stop: Once it is set, no further step is taken.

    Raises:
        Stopped: ``stop`` was set.
    """
    for name, settings in wish.methods.items():
        method = create_method(name, network.model, max_pixels=image[0].numel(), **settings)
        steps = getattr(method, "steps", 0)

        def told(number: int, loss: float | None, name: str = name, steps: int = steps) -> None:
            if stop is not None and stop.is_set():
                raise Stopped
            watch(name, number, steps, loss)

        told(0, None)
        if isinstance(method, Method):
            method.on_step = told
        yield _outcome(name, settings, method(image), network)


def _outcome(name: str, settings: dict[str, Any], result: Any, network: Network) -> Outcome:
    spec = getattr(network.model, "spec", None)
    masks = masks_of(result, getattr(spec, "classes", None))
    source, pseudo = result.source_probs, result.pseudo_label
    return Outcome(
        method=name,
        settings=settings,
        names=masks.names,
        label=masks.label.long(),
        confidence=masks.confidence / 255,
        source_label=None if source is None else source.argmax(dim=0).cpu(),
        pseudo_label=None if pseudo is None else pseudo.cpu(),
        losses=result.losses,
        seconds=result.seconds,
        notes=result.notes,
    )
