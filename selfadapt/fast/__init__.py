"""The same results sooner. Nothing in here changes what a method computes, only how.

reuse.py    what is frozen is computed once for all steps, on any device
fused.py    neighbouring operations in one pass over memory; kernels.py, launch.py
graphs.py   all that an image takes, recorded once and replayed
"""

from selfadapt.fast.settings import PLAIN, Fast

__all__ = ["PLAIN", "Fast"]
