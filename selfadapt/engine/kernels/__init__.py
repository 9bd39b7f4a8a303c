"""GPU kernels, written in Triton.

triton_kernels.py  the kernels
launch.py          the kernels as functions that can be differentiated
fused.py           finds where a network's operations can be joined, and joins them
counting.py        counts pixels for metrics
"""
