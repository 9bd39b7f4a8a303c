"""Export of a network with SaN: as ONNX, or as a program of ``torch.export``.

SaN only changes the forward pass, so a network with SaN is exported like any other:

    image (1, C, H, W) in [0, 1]  ->  probs (1, classes, H, W), label (1, H, W)

or, with ``batch``, of any number of images, each normalised with its own statistics. Normalisation
of the input, padding or resizing, and resizing back to the size of the image are part of the graph.
H and W are dynamic unless a size is given. Every file is run on several images before it is moved
to its path, and is only kept if its output agrees with the method.
"""

from selfadapt.export.writing import export_onnx, export_program

__all__ = ["export_onnx", "export_program"]
