"""Runs what a method computes: with shortcuts, and without those a network cannot take."""

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from selfadapt.computed import Computed
from selfadapt.dropout import seeded
from selfadapt.engine.graphs import Compute, Graphs, has_hooks
from selfadapt.engine.network import Network, OnStep, OnStepError
from selfadapt.engine.settings import NO_SHORTCUTS, Fast, Plan
from selfadapt.models.interface import Interface
from selfadapt.norm import SaNReport
from selfadapt.views import Size


class Engine:
    """Runs the computations of one method on one network.

    Args:
        model: The network, which is never written to.
        interface: How to talk to it.
        fast: The shortcuts to take.
        is_random: The network draws random numbers in evaluation.
    """

    def __init__(
        self, model: nn.Module, interface: Interface, fast: Fast, is_random: bool = False
    ) -> None:
        self.model, self.interface, self.is_random = model, interface, is_random
        self.fast = fast
        """The shortcuts to take; fewer than were asked for once a network has failed with them."""
        self.notes: tuple[str, ...] = ()
        """What came of shortcuts that a network could not take."""
        self.gave_up: dict[str, str] = {}
        """Why shortcuts were given up in the middle of an image, by their names."""
        self.on_step: OnStep | None = None
        self.graphs = Graphs(model)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters(), torch.empty(0)).device

    def plan(self) -> Plan:
        """Return the shortcuts that run, and why the others do not."""
        kind = self.device.type
        chosen = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
        random = "the network draws random numbers" if self.is_random else ""
        hooked = "hooks on the network watch every run" if has_hooks(self.model) else ""
        watched = "on_step is told of each step" if self.on_step is not None else ""
        return self.fast.plan(
            self.device,
            reuse=random or hooked,
            graphs=random or hooked or watched or self.graphs.trouble,
            precision="the caller's autocast counts" if chosen else "",
        )

    def network(
        self, san: SaNReport, tuned: tuple[str, ...] = (), on_step: OnStep | None = None
    ) -> Network:
        """Return a private copy of the network.

        Args:
            san: The layers that mix in the image's statistics.
            tuned: Names of the parameters to tune.
            on_step: Called after each step.
        """
        return Network(self.model, self.interface, san, tuned, self.plan(), on_step, self.gave_up)

    def run(self, compute: Compute, image: Tensor, size: Size, variant: Hashable) -> Computed:
        """Return what ``compute`` gives for an image, for a result of the given size.

        A shortcut that a network fails with is not taken again.

        Args:
            compute: The computation.
            image: The image.
            size: Height and width of the result.
            variant: What the computation depends on beside the image.
        """
        fast = self.fast
        try:
            return self._run(compute, image, size, variant)
        except OnStepError as carrier:
            raise carrier.error from None
        except (torch.OutOfMemoryError, ValueError):
            raise
        except Exception as error:
            is_networks_own = not image.is_cuda and isinstance(error, RuntimeError)
            if fast == NO_SHORTCUTS or is_networks_own:
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._set_fast(NO_SHORTCUTS)
        try:
            computed = self._run(compute, image, size, variant)
        except Exception as error:
            self._set_fast(fast)
            raise error.error if isinstance(error, OnStepError) else error from None
        self.notes = (f"no shortcuts, this network fails with them ({reason})",)
        return computed

    def avoid_fp16(self) -> bool:
        """Take bf16 from now on in the place of fp16; return False where fp16 is not taken."""
        if self.plan().predict != torch.float16:
            return False
        self._set_fast(replace(self.fast, precision="bf16"))
        self.notes += ("this network's numbers are too large for fp16: bf16 is taken",)
        return True

    def _run(self, compute: Compute, image: Tensor, size: Size, variant: Hashable) -> Computed:
        is_random = seeded(0, image.device) if self.is_random else nullcontext()
        with torch.cuda.device_of(image), is_random:  # kernels start on the current device
            if self.plan().runs("graphs"):
                return self.graphs(compute, image, size, variant)
            return compute(image).finish(size, copy=False)

    def _set_fast(self, fast: Fast) -> None:
        self.fast = fast
        self.graphs = Graphs(self.model)
