"""The command line: one verb for each thing to do, flags made from signatures.

Exit codes: 0 done, 1 done in part, 2 asked wrongly.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from selfadapt import SelfAdapt, __version__, load_model
from selfadapt.demo import demo
from selfadapt.predict import find_images, plan_outputs, predict
from selfadapt.views import SCALES

USER_ERRORS = (ValueError, OSError)
NOT_FLAGS = {"model", "views", "interface", "compare"}
OWN_FLAGS = {"scales", "adapt", "max_pixels"}


@dataclass(frozen=True)
class Verb:
    """A thing to do: what it is, how it is asked for, and the function that does it."""

    help: str
    example: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def main(args: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its code."""
    parsed = _parser().parse_args(None if args is None else list(args))
    try:
        code = VERBS[parsed.verb].run(parsed[parsed.verb])
    except USER_ERRORS as error:
        print(f"selfadapt {parsed.verb}: {error}", file=sys.stderr)
        code = 2
    except torch.OutOfMemoryError:
        print("out of memory: try a smaller --max-pixels, or --device cpu", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("stopped; what has been written is complete", file=sys.stderr)
        code = 130
    sys.exit(code)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="selfadapt", description="Segmentation networks that adapt themselves to each image."
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subcommands(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        sub = ArgumentParser(description=verb.help, epilog=f"example: {verb.example}")
        verb.add_arguments(sub)
        verbs.add_subcommand(name, sub, help=verb.help)
    return parser


def _predict_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="Image files, or folders.")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="FILE", help="Network saved by save_model."
    )
    _output_arguments(parser)
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one."
    )
    parser.add_class_arguments(SelfAdapt, skip=NOT_FLAGS | OWN_FLAGS)
    parser.add_argument(
        "--scales", nargs="+", type=float, default=list(SCALES), help="Scales of the views."
    )
    parser.add_argument(
        "--adapt", nargs="+", type=str, metavar="NAME", help="Layers to adapt, such as layer4."
    )
    parser.add_argument(
        "--max-pixels", type=int, metavar="N", help="Scale larger images down to N pixels."
    )


def _output_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="Folder to write to."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace files that are there.")


def _predict(args: Namespace) -> int:
    images = find_images(args.images)
    bases = plan_outputs(images, args.output, overwrite=args.overwrite)
    model: Any = load_model(args.model).to(_device(args.device))
    shared = ("images", "model", "output", "overwrite", "device")
    settings = {name: value for name, value in vars(args).items() if name not in shared}
    method = SelfAdapt(model, compare=False, **settings)
    args.output.mkdir(parents=True, exist_ok=True)
    failures, notes = [], dict.fromkeys(method.notes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("adapting", total=len(images))
        for path, result in predict(method, images, bases, model.spec.classes):
            if isinstance(result, Exception):
                failures.append(str(result) if str(path) in str(result) else f"{path}: {result}")
            else:
                notes |= {f"{path}: {n}": None for n in result.notes if n not in method.notes}
            progress.advance(task)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for failure in failures:
        print(f"not done: {failure}", file=sys.stderr)
    print(f"{len(images) - len(failures)} of {len(images)} images segmented, see {args.output}")
    return 1 if failures else 0


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name).device
        if device.type == "meta":
            raise RuntimeError("the meta device holds no numbers")
        return device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"there is no device {name!r} here, use --device cpu") from error


def _demo(args: Namespace) -> int:
    demo(args.output, overwrite=args.overwrite)
    return 0


VERBS = {
    "predict": Verb(
        "Segment images with a network that adapts itself to each.",
        "selfadapt predict street.jpg --model net.safetensors -o masks",
        _predict_arguments,
        _predict,
    ),
    "demo": Verb(
        "Train a small network on one look of a drawn world, and adapt it to another.",
        "selfadapt demo -o demo",
        _output_arguments,
        _demo,
    ),
}
