"""``selfadapt demo``, ``check-data`` and ``bench``: try the methods, check data, measure time."""

import json
import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from selfadapt import MODELS, open_model
from selfadapt.bench import (
    COLUMNS,
    NETWORKS,
    SIZES,
    STEPS,
    Timing,
    as_cells,
    describe_machine,
    draw_bench,
    run_bench,
    write_bench,
)
from selfadapt.checks import check_number
from selfadapt.cli.commands import Command, complete_files, json_argument
from selfadapt.cli.model_flags import (
    as_list,
    device_argument,
    model_arguments,
    open_models,
    parse_classes,
)
from selfadapt.data import DATASETS
from selfadapt.data.check import Report, run_check
from selfadapt.demo import demo, demo_images
from selfadapt.demo.run import DEFAULT_SETTINGS, STREETS_SETTINGS
from selfadapt.devices import find_device
from selfadapt.files import make_folder, would_be_replaced
from selfadapt.labels import class_names
from selfadapt.methods import check_method
from selfadapt.models.create import SHIPPED
from selfadapt.streets import TARGETS


def _demo_arguments(parser: ArgumentParser) -> None:
    image = parser.add_argument(
        "--image", nargs="+", metavar="IMAGE", help="Your own images, or folders of them."
    )
    complete_files(image)
    parser.add_argument(
        "--looks", nargs="+", default=list(TARGETS), help=f"Without --image: {', '.join(TARGETS)}."
    )
    parser.add_argument("--scenes", type=int, default=2, help="Scenes per look.")
    parser.add_argument("--steps", type=int, default=10, help="Gradient steps per image.")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("demo"), metavar="DIR", help="Output folder."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing page.")
    model_arguments(parser, default=SHIPPED)


def _demo(args: Namespace) -> int:
    check_number("steps", args.steps, 0, whole=True)
    if not args.image:
        model_flags = ("model", "weights", "classes", "channels", "mean", "std")
        if any(args[name] for name in model_flags):
            raise ValueError("the built-in streets are segmented by their own network; your own "
                             "--model needs an --image")  # fmt: skip
        demo(
            args.output, looks=args.looks, scenes=args.scenes, steps=args.steps,
            device=find_device(args.device), overwrite=args.overwrite,
        )  # fmt: skip
        return 0
    args.model = args.model or [SHIPPED]
    if len(args.model) > 1:
        raise ValueError(f"the demo takes one --model, got {len(args.model)}")
    if list(args.looks) != list(TARGETS):
        raise ValueError("--looks are of the built-in streets, and --image is for your own images; "
                         "give only one of them")  # fmt: skip
    (model,) = open_models(args)
    settings = STREETS_SETTINGS if args.model == [SHIPPED] else DEFAULT_SETTINGS
    _, failures = demo_images(
        args.output, args.image, model, model.spec.classes, settings=settings, steps=args.steps,
        overwrite=args.overwrite,
    )  # fmt: skip
    for reason in failures.values():
        print(f"not done: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _check_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help=f"One of {', '.join(DATASETS)}.")
    root = parser.add_argument("root", nargs="?", metavar="ROOT", help="Folder of the dataset.")
    complete_files(root)
    parser.add_argument("--split", help="Check only this split.")
    parser.add_argument(
        "--classes",
        nargs="+",
        help="For folder: the name of a class space, or the class names in order of their ids.",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PNG",
        help="Write a sheet of images with their labels.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing PNG.")
    json_argument(parser)


def _check_data(args: Namespace) -> int:
    given = parse_classes(as_list(args.classes))
    classes = class_names(given) if isinstance(given, int | dict) else given
    return run_check(
        args.dataset, args.root, split=args.split, classes=classes, output=args.output,
        overwrite=args.overwrite, show=_print_json if args.json else None,
    )  # fmt: skip


def _print_json(report: Report) -> None:
    content = {
        "pairs": {split.dataset.name: len(split.listing.pairs) for split in report.splits},
        "problems": report.problems,
        "notes": report.notes,
        "shares": report.frequencies,
    }
    print(json.dumps(content))


def _bench_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--networks", nargs="+", default=list(NETWORKS),
        help="Names of networks, or what --model takes elsewhere: files, streets, addresses.",
    )  # fmt: skip
    parser.add_argument("--method", metavar="NAME", help="Time another method as well.")
    parser.add_argument("--trust", action="store_true", help="Run your own code, MODULE:NAME.")
    parser.add_argument(
        "--sizes", nargs="+", default=list(SIZES), help="Widths and heights, such as 1280x720."
    )
    parser.add_argument(
        "--steps", nargs="+", type=int, default=list(STEPS), help="Numbers of steps."
    )
    parser.add_argument(
        "--adapt",
        nargs="+",
        help="Name patterns of the layers to adapt; by default those of the network.",
    )
    parser.add_argument(
        "--repeats", type=int, default=10, help="Timed runs of each, after warm-up."
    )
    device_argument(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="Write bench.md, .csv, .json and .png."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace existing results.")


def _bench(args: Namespace) -> int:
    if args.method is not None:
        check_method(args.method, {})
    for name in set(args.networks) - set(MODELS):
        open_model(name, trust=args.trust)  # errors come before the run
    for number in (args.repeats, *args.steps):
        check_number("steps and repeats", number, 1, whole=True)
    device = find_device(args.device)
    if args.output:
        path = args.output / "bench.json"
        if path.exists() and not args.overwrite:
            raise would_be_replaced(path)
        make_folder(args.output)

    def save(rows: list[Timing]) -> None:
        if args.output:
            write_bench(rows, describe_machine(device), args.output)

    rows = run_bench(
        args.networks, args.sizes, args.steps, device=device, adapt=args.adapt,
        method=args.method, trust=args.trust, repeats=args.repeats, keep=save,
    )  # fmt: skip
    table = Table(*COLUMNS, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*as_cells(row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if args.output and rows:
        draw_bench(rows, args.output / "bench.png")
        print(f"written to {args.output}")
    return 0


DEMO = Command(
    "Compare methods side by side, on built-in or your images.",
    "selfadapt demo --image street.jpg --model net.safetensors -o demo",
    _demo_arguments,
    _demo,
)
CHECK_DATA = Command(
    "Check a dataset for missing and broken files.",
    "selfadapt check-data cityscapes /data/cityscapes -o sheet.png",
    _check_arguments,
    _check_data,
)
BENCH = Command(
    "Measure the time of networks and methods here.",
    "selfadapt bench --sizes 1280x720 -o bench",
    _bench_arguments,
    _bench,
)
