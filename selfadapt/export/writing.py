"""Write traces as files, checked before they are moved to their path."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from selfadapt.export.forward import adaptive_pool
from selfadapt.export.trace import (
    ExportSettings,
    Trace,
    exporter_errors,
    hint,
    size_text,
    trace,
)
from selfadapt.files import atomic_write, check_output
from selfadapt.optional import import_optional
from selfadapt.views import size_of

TOLERANCE = 1e-4
"""Maximum difference of probabilities between a file and the method."""
OPSET = 18
ADAPTIVE_POOL = torch.ops.aten.adaptive_avg_pool2d.default
MAX_WEIGHT_BYTES = 2**31 - 2**24
"""Limit on the weights of an ONNX file: it holds 2 GB, including the graph."""
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
Run = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Runs a file: an image in, probabilities and labels out."""


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    overwrite: bool = False,
    **settings: Unpack[ExportSettings],
) -> float:
    """Export a network with SaN as an ONNX file and check it with onnxruntime.

    Args:
        model: Any segmentation network. It is not modified.
        path: The file; its name must end in ``.onnx``.
        overwrite: Replace an existing file.
        **settings: See ``trace``.

    Returns:
        The largest difference between probabilities of the file and of the method.
    """
    path = checked_path(path, ".onnx", overwrite)
    return write_onnx(trace(model, **settings), path)


def export_program(
    model: nn.Module,
    path: str | Path,
    *,
    overwrite: bool = False,
    **settings: Unpack[ExportSettings],
) -> float:
    """Export a network with SaN as a program of ``torch.export`` and check it.

    Args:
        model: Any segmentation network. It is not modified.
        path: The file; its name must end in ``.pt2``.
        overwrite: Replace an existing file.
        **settings: See ``trace``.

    Returns:
        The largest difference between probabilities of the file and of the method.
    """
    path = checked_path(path, ".pt2", overwrite)
    return write_program(trace(model, **settings), path)


def checked_path(path: str | Path, suffix: str, overwrite: bool) -> Path:
    """Return the path of a file; raise an error if it or its library is unsuitable."""
    path = Path(path)
    if path.suffix != suffix:
        raise ValueError(f"the name of the file must end in {suffix}, got {path}")
    check_output(path, overwrite=overwrite)
    if suffix == ".onnx":
        for library in LIBRARIES:
            import_optional(library, "onnx")
    return path


def write_onnx(traced: Trace, path: Path) -> float:
    """Write a trace as an ONNX file; return its largest difference from the method."""
    num_bytes = sum(value.nbytes for value in traced.program.state_dict.values())
    if num_bytes >= MAX_WEIGHT_BYTES:
        raise ValueError(
            f"an ONNX file holds less than 2 GB, but the weights are {num_bytes / 1e9:.1f} GB; "
            "write a .pt2 file"
        )
    with exporter_errors(traced.size, traced.batch):
        program = traced.program
        graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule)]
        if any(node.target is ADAPTIVE_POOL for graph in graphs for node in graph.nodes):
            program = program.run_decompositions({ADAPTIVE_POOL: adaptive_pool})
        graph: Any = torch.onnx.export(
            program, (traced.images[0],), dynamo=True, opset_version=OPSET, verbose=False,
            input_names=["image"], output_names=["probs", "label"],
        )  # fmt: skip
    for key, value in traced.metadata.items():
        graph.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
    size = traced.size or ("height", "width")  # readable names of the dynamic dimensions
    image, (probs, label) = graph.model.graph.inputs[0], graph.model.graph.outputs
    shape = type(image.shape)
    number = "batch" if traced.batch else 1
    image.shape = shape((number, traced.images[0].shape[1], *size))
    probs.shape = shape((number, traced.probs[0].shape[1], *size))
    label.shape = shape((number, *size))
    with atomic_write(path) as temporary:
        with exporter_errors(traced.size, traced.batch):
            graph.save(temporary, external_data=False)
            run = _run_onnx(temporary)
        return _check(traced, path, run)


def write_program(traced: Trace, path: Path) -> float:
    """Write a trace as a program; return its largest difference from the method."""
    file = io.BytesIO()  # torch aborts the process if the disk is full
    with exporter_errors(traced.size, traced.batch):
        torch.export.save(
            traced.program, file, extra_files={"selfadapt.json": json.dumps(traced.metadata)}
        )
        file.seek(0)
        run: Any = torch.export.load(file).module()
    difference = _check(traced, path, run)
    with atomic_write(path) as temporary:
        temporary.write_bytes(file.getbuffer())
    return difference


def _run_onnx(path: Path) -> Run:
    onnxruntime = import_optional("onnxruntime", "onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(image: Tensor) -> tuple[Tensor, Tensor]:
        probs, label = session.run(["probs", "label"], {"image": image.numpy()})
        return torch.from_numpy(probs), torch.from_numpy(label)

    return run


def _check(traced: Trace, path: Path, run: Run) -> float:
    """Return the largest difference of a file from the method; raise ValueError if too large."""
    worst = 0.0
    for image, expected in zip(traced.images, traced.probs, strict=True):
        with exporter_errors(traced.size, traced.batch, image), torch.no_grad():
            probs, label = run(image)
            at_label = probs.gather(1, label[:, None])[:, 0]
            difference = float((probs - expected).abs().max())
        if not difference <= TOLERANCE or not torch.equal(at_label, probs.amax(dim=1)):
            raise ValueError(
                f"for an image of {size_text(size_of(image))} the graph's probabilities differ by "
                f"{difference:.2g} from the network's, more than {TOLERANCE:g}; {path} is not "
                f"written{hint(traced.size, traced.batch)}"
            )
        worst = max(worst, difference)
    return worst
