"""Runs what a method computes, with the optimizations that network and device allow."""

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from selfadapt.computed import Computed, ComputedBatch
from selfadapt.dropout import seeded
from selfadapt.engine.graphs import Compute, Graphs, Values, has_hooks
from selfadapt.engine.network import Network, OnStep, OnStepError, described
from selfadapt.engine.settings import NO_OPTIMIZATIONS, Fast, Plan
from selfadapt.models.interface import Interface
from selfadapt.norm import SaNReport
from selfadapt.views import Size


class Engine:
    """Runs the computations of one method on one network.

    Args:
        model: The network, which is never modified.
        interface: What it takes and gives.
        fast: The optimizations to use.
        is_random: The network draws random numbers in evaluation.
    """

    def __init__(
        self, model: nn.Module, interface: Interface, fast: Fast, is_random: bool = False
    ) -> None:
        self.model, self.interface, self.is_random = model, interface, is_random
        self.fast = fast
        """The optimizations to use; none once a network has failed with them."""
        self.notes: tuple[str, ...] = ()
        """Notes on optimizations that were switched off."""
        self.fallbacks: dict[str, str] = {}
        """Why optimizations were given up in the middle of an image, by name."""
        self.max_batch: int | None = None
        """How many images are computed at a time at most; None: not tried yet."""
        self.on_step: OnStep | None = None
        self.graphs = Graphs(model)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters(), torch.empty(0)).device

    def plan(self) -> Plan:
        """Return the optimizations that run, and why the others do not."""
        kind = self.device.type
        chosen = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
        random = "the network draws random numbers" if self.is_random else ""
        hooked = "the network has hooks, which must see every run" if has_hooks(self.model) else ""
        watched = "on_step is called after each step" if self.on_step is not None else ""
        return self.fast.plan(
            self.device,
            reuse=random or hooked,
            graphs=random or hooked or watched or self.graphs.trouble,
            precision="the caller's autocast decides" if chosen else "",
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
        self.fallbacks = {}  # each network tries again
        return Network(self.model, self.interface, san, tuned, self.plan(), on_step, self.fallbacks)

    def run(
        self, compute: Compute[Computed], image: Tensor, size: Size, variant: Hashable
    ) -> Computed:
        """Return what ``compute`` gives for an image, for a result of the given size.

        If a network fails with optimizations, they are switched off from then on.

        Args:
            compute: The computation.
            image: The image.
            size: Height and width of the result.
            variant: What the computation depends on beside the image. None: it is not recorded.
        """
        fast = self.fast
        try:
            return self._run(compute, image, size, variant)
        except OnStepError as carrier:
            raise carrier.error from None
        except (torch.OutOfMemoryError, ValueError):
            raise
        except Exception as error:
            is_network_error = not image.is_cuda and isinstance(error, RuntimeError)
            if fast == NO_OPTIMIZATIONS or is_network_error:
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._set_fast(NO_OPTIMIZATIONS)
        try:
            computed = self._run(compute, image, size, variant)
        except Exception as error:
            self._set_fast(fast)
            raise error.error if isinstance(error, OnStepError) else error from None
        self.notes = (f"no optimizations: this network fails with them ({reason})",)
        return computed

    def run_batch(
        self, compute: Compute[ComputedBatch], images: Tensor, size: Size, variant: Hashable
    ) -> ComputedBatch | None:
        """Return what ``compute`` gives for several images of one size; see ``run``.

        None: it fails, and ``max_batch`` is lower from then on.
        """
        try:
            return self._run(compute, images, size, variant)
        except torch.OutOfMemoryError:
            reason = f"there is not enough memory for {len(images)}"
        except Exception as error:  # larger batches than were tried may be too large for it
            reason = f"the network fails on {len(images)} ({described(error)})"
        self.limit_batch(len(images) // 2, reason)
        return None

    def limit_batch(self, max_batch: int, reason: str) -> None:
        """Take no more images at a time than ``max_batch`` from now on."""
        self.max_batch = max_batch
        taken = f"at most {max_batch} at a time" if max_batch > 1 else "one by one"
        self.notes += (f"images are computed {taken}: {reason}",)

    def avoid_fp16(self) -> bool:
        """Use bf16 instead of fp16 from now on; return False if fp16 is not used."""
        if self.plan().predict != torch.float16:
            return False
        self._set_fast(replace(self.fast, precision="bf16"))
        self.notes += ("this network's activations overflow in fp16: bf16 is used",)
        return True

    def _run(
        self, compute: Compute[Values], image: Tensor, size: Size, variant: Hashable
    ) -> Values:
        is_random = seeded(0, image.device) if self.is_random else nullcontext()
        with torch.cuda.device_of(image), is_random:  # kernels start on the current device
            if variant is not None and self.plan().runs("graphs"):
                return self.graphs(compute, image, size, variant)
            return compute(image).finish(size, copy=False)

    def _set_fast(self, fast: Fast) -> None:
        self.fast = fast
        self.graphs = Graphs(self.model)
