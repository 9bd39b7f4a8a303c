"""SaN as a file that other programs run: ONNX, or a program of ``torch.export``.

SaN is forward arithmetic alone, so one pass of a network with it is a graph like any other:

    image (1, C, H, W) in [0, 1]  ->  probs (1, classes, H, W), label (1, H, W)

Normalisation of the input, size rules and the way back to the image's own size are inside, and H
and W are free unless a size is given. Every file is run on several images before it gets its name,
and is only kept if it gives what the method gives here.
"""

from selfadapt.export.writing import export_onnx, export_program

__all__ = ["export_onnx", "export_program"]
