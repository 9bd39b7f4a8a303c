"""GPU kernels, written in Triton.

triton_kernels.py  the kernels
launch.py          the kernels as differentiable functions
fused.py           finds which of a network's operations can be fused, and fuses them
counting.py        counts pixels for metrics
"""
