"""How a network is run for one image.

network.py        a private copy of the caller's network for one image: logits, gradients, steps
engine.py         runs what a method computes; falls back if a network fails with optimizations
settings.py       which optimizations run on a device, and why others do not
counting.py       pixels counted for metrics

The optimizations change how a result is computed, not what it is:

reuse.py          what is frozen is computed once for all steps, on any device
san_batchnorm.py  SaN by PyTorch's own BatchNorm kernels, on any device
graphs.py         all that an image takes, recorded on a GPU and replayed
kernels/          neighbouring operations in one pass over memory, on a GPU
"""

from selfadapt.engine.engine import Engine
from selfadapt.engine.graphs import RECORD_AT
from selfadapt.engine.network import Gradients, Network, described
from selfadapt.engine.settings import NO_OPTIMIZATIONS, Fast, as_fast

__all__ = [
    "NO_OPTIMIZATIONS", "RECORD_AT", "Engine", "Fast", "Gradients", "Network", "as_fast",
    "described",
]  # fmt: skip
