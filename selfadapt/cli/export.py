"""``selfadapt export``: write a network with SaN as an ONNX file or torch.export program."""

import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from selfadapt.bench import parse_size
from selfadapt.cli.commands import Command
from selfadapt.cli.model_flags import model_arguments, open_models
from selfadapt.engine import described
from selfadapt.export.trace import CHECK_SIZES, check_exportable, trace
from selfadapt.export.writing import checked_path, write_onnx, write_program
from selfadapt.methods import check_method
from selfadapt.norm import Alpha, check_alpha

WRITERS = {"onnx": write_onnx, "pt2": write_program}


def _export_arguments(parser: ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument(
        "--method", default="san", metavar="NAME", help="One forward pass: san, source or p-bn."
    )
    parser.add_argument(
        "--alpha",
        type=Alpha,
        help="Weight of the image statistics in SaN, 0 to 1, or by name pattern. Only for san.",
    )
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="Write an ONNX file.")
    parser.add_argument("--pt2", type=Path, metavar="FILE", help="Write a torch.export program.")
    parser.add_argument(
        "--size", help="Fixed input size of the graph, such as 1024x512; by default any size."
    )
    parser.add_argument(
        "--batch", action="store_true", help="Take any number of images at a time, not only one."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace existing files.")


def _export(args: Namespace) -> int:
    paths = {kind: args[kind] for kind in WRITERS if args[kind] is not None}
    if not paths:
        raise ValueError("there is nothing to write: give --onnx FILE, --pt2 FILE or both")
    paths = {kind: checked_path(path, f".{kind}", args.overwrite) for kind, path in paths.items()}
    size = None if args.size is None else parse_size(args.size)
    _check(args)
    args.device = "cpu"
    (model,) = open_models(args)
    try:
        traced = trace(model, method=args.method, alpha=args.alpha, size=size, batch=args.batch)
    except TypeError as error:  # the network is no segmentation network
        raise ValueError(str(error)) from error
    except (RuntimeError, AssertionError, LookupError, AttributeError) as error:
        raise ValueError(f"the network failed: {described(error)}") from error
    for note in traced.notes:
        print(f"note: {note}", file=sys.stderr)
    for kind, path in paths.items():
        difference = WRITERS[kind](traced, path)
        sizes = f"{len(CHECK_SIZES)} sizes" if size is None else args.size
        print(f"{path} written; probabilities differ by at most {difference:.1e}, at {sizes}")
    return 0


def _check(args: Namespace) -> None:
    """Raise ValueError for flags that exclude each other, before a network is opened."""
    check_exportable(args.method)
    if args.alpha is not None:
        check_method(args.method, ["alpha"])
        check_alpha(args.alpha)
    if len(args.model) > 1:
        raise ValueError(f"one network is exported at a time, got {len(args.model)} --model")
    if args.device not in ("auto", "cpu"):
        raise ValueError(f"a graph is recorded on the CPU and runs anywhere, got {args.device}")


EXPORT = Command(
    "Write SaN as an ONNX file or torch.export program.",
    "selfadapt export --model net.safetensors --alpha 0.1 --onnx net.onnx",
    _export_arguments,
    _export,
)
