"""The command line: one verb for each thing to do, flags made from signatures.

Exit codes: 0 done, 1 done in part, 2 asked wrongly or stopped by an error, 130 stopped by Ctrl-C.
"""

import os
import re
import sys
import warnings
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import docstring_parser
import torch
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from selfadapt import (
    METHODS,
    MODELS,
    Interface,
    __version__,
    create_method,
    create_model,
    open_model,
)
from selfadapt.bench import (
    COLUMNS,
    NETWORKS,
    SIZES,
    STEPS,
    as_cells,
    machine,
    run_bench,
    write_bench,
)
from selfadapt.checks import check_number
from selfadapt.data import DATASETS
from selfadapt.data.check import run_check
from selfadapt.demo import demo
from selfadapt.devices import find_device
from selfadapt.fast import Fast
from selfadapt.fast.graphs import RECORD_AT
from selfadapt.files import make_folder
from selfadapt.method import Method
from selfadapt.methods import Segments, check_method, settings_of
from selfadapt.models.families import adapted_parameters
from selfadapt.names import nearest
from selfadapt.norm import find_san
from selfadapt.predict import find_images, plan_outputs, predict
from selfadapt.protocol import EvaluateConfig, evaluate, read_results
from selfadapt.protocol.summary import print_summary
from selfadapt.recipes import Kind, find_recipe
from selfadapt.report import write_report
from selfadapt.train import TrainConfig, settings, train

USER_ERRORS = (ValueError, OSError, ModuleNotFoundError)
set_parsing_settings(docstring_parse_attribute_docstrings=True)

RECIPE_VERBS: dict[str, Kind] = {"train": "train", "evaluate": "evaluate", "tune": "evaluate"}
KINDS = {
    "list": "a list such as '[1, 2]'", "tuple": "a pair such as '[1, 2]'", "str": "text",
    "tuple with 2 elements": "a pair such as '[1, 2]'", "int": "a whole number",
    "float": "a number", "bool": "true or false", "dict": "names and values", "NoneType": "null",
    "list[str]": "a list of texts",
}  # fmt: skip
NOT_FLAGS = {"views", "interface", "compare"}
LISTS: dict[Any, type] = {Sequence[float]: float, Sequence[str] | None: str}


@dataclass(frozen=True)
class Verb:
    """A thing to do: what it is, how it is asked for, and the function that does it."""

    help: str
    example: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


class Parser(ArgumentParser):
    """Says in one line what was asked wrongly."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the line and exit with 2."""
        text = " ".join(message.split())
        if unknown := re.search(r"(?:Option|does not accept option) '(.+?)'", text):
            names = [*settings(), *(name.rpartition(".")[2] for name in settings())]
            text = f"there is no setting {unknown[1]!r};{nearest(unknown[1], names)}"
        elif wrong := re.match(r'Parser key "([^"]+)": (.+) (?:Got|Given) value: (.+)', text):
            setting, expected, value = wrong.groups()
            kinds = map(_kind, re.findall(r"Expected a (.+?)(?=\.$|\. | - | Given |$)", expected))
            text = f"{setting} must be {' or '.join(dict.fromkeys(kinds))}, got {value}"
        elif text.startswith("unrecognized arguments") and self.prog.endswith(tuple(RECIPE_VERBS)):
            text += "; a recipe comes right after the verb"
        if text.startswith("the following arguments are required"):
            text = re.sub(r"\b(" + "|".join(VERBS) + r")\.(?=\w)", "--", text)
        text = text.rstrip("; ")
        prog = self.prog.replace(" [options]", "") if "selfadapt" in self.prog else "selfadapt"
        print(f"error: {text}; see {prog} --help", file=sys.stderr)
        sys.exit(2)


def main(args: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its code."""
    words = sys.argv[1:] if args is None else list(args)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_, **__: print(f"note: {text}", file=sys.stderr)
            parser = _parser()
            parsed = parser.instantiate(parser.parse_args(_with_recipe(words)))
            code = VERBS[parsed.verb].run(parsed[parsed.verb])
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except USER_ERRORS as error:
        print(f"selfadapt {words[0]}: {error}", file=sys.stderr)
        code = 2
    except torch.OutOfMemoryError as error:
        where = f" ({error})" if words[0] in ("evaluate", "tune") else ""
        smaller = {"train": "--batch or --augment.crop", "predict": "--max-pixels"}
        advice = smaller.get(words[0], "scale of the domains, or max_pixels among the settings")
        print(f"out of memory{where}: try a smaller {advice}, or the CPU", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("stopped; what has been written is complete", file=sys.stderr)
        if words[0] in RECIPE_VERBS:
            print("the same command goes on from there", file=sys.stderr)
        code = 130
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    if shared and code in (0, 1):
        torch.distributed.destroy_process_group()  # else its threads may abort the process
    sys.exit(code)


def _with_recipe(words: list[str]) -> list[str]:
    """Spell the recipe that follows a verb as a flag, which is what a file of settings is."""
    if len(words) < 2 or words[0] not in RECIPE_VERBS or words[1].startswith("-"):
        return words
    path = find_recipe(words[1], RECIPE_VERBS[words[0]])
    try:
        empty = not path.read_text().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"a recipe must be a YAML file, but {path} is no text") from error
    if empty:
        raise ValueError(f"the recipe {path} is empty")
    return [words[0], "--recipe", str(path), *words[2:]]


def _kind(name: str) -> str:
    """Return in words what the parser calls a type."""
    if choices := re.fullmatch(r"typing.Literal\[(.+)\]", name):
        return choices[1].replace("'", "").replace(", ", " or ")
    return KINDS.get(re.sub(r"<class '(\w+)'>", r"\1", name), name)


def _parser() -> Parser:
    parser = Parser(
        prog="selfadapt", description="Segmentation networks that adapt themselves to each image."
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subcommands(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        sub = Parser(description=verb.help, epilog=f"example: {verb.example}")
        verb.add_arguments(sub)
        verbs.add_subcommand(name, sub, help=verb.help)
    return parser


def _predict_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="Image files, or folders.")
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="MODEL",
        help="A file saved by save_model; or a name or address, see selfadapt models. Once more "
        "for each network of --method ensemble.",
    )
    parser.add_argument(
        "--weights", action="append", metavar="FILE", help="Weights, one for each --model by name."
    )
    parser.add_argument(
        "--classes", metavar="CLASSES", help="Their number, or the name of a class space."
    )
    parser.add_argument(
        "--trust", action="store_true", help="Run code of your own at --model MODULE:FUNCTION."
    )
    _output_arguments(parser)
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one."
    )
    parser.add_argument(
        "--method", default="self-adapt", metavar="NAME", help="See selfadapt methods."
    )
    group = parser.add_argument_group("settings of the method")
    for name, setting in _settings().items():
        group.add_argument(f"--{name.replace('_', '-')}", default=SUPPRESS, **setting)


def _settings() -> dict[str, dict[str, Any]]:
    """Return every setting of every method that can be given by flag, and how it is parsed."""
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        texts = _setting_texts(method)
        for name, parameter in settings_of(method).items():
            if name not in NOT_FLAGS | set(found):
                kind = parameter.annotation
                shape: dict[str, Any] = {"type": kind}
                if kind in LISTS:
                    shape = {"nargs": "+", "type": LISTS[kind]}
                elif kind in (bool, bool | Fast):
                    shape = {"nargs": "?", "const": True, "type": bool}
                owners = [other for other in METHODS if name in settings_of(other)]
                text = texts[name]
                if len(owners) < len(METHODS):
                    text += f" Of {', '.join(owners)}."
                found[name] = {**shape, "metavar": name.upper(), "help": text}
    return found


def _output_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="Folder to write to."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace files that are there.")


def _predict(args: Namespace) -> int:
    images = find_images(args.images)
    bases = plan_outputs(images, args.output, overwrite=args.overwrite)
    method, classes = _method(args)
    make_folder(args.output)
    failures, notes = [], dict.fromkeys(method.notes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        first = "preparing" if torch.cuda.is_available() else args.method
        task = progress.add_task(first, total=len(images))
        with closing(predict(method, images, bases, classes)) as results:
            for number, (path, result) in enumerate(results, start=1):
                if isinstance(result, Exception):
                    failures.append(
                        str(result) if str(path) in str(result) else f"{path}: {result}"
                    )
                else:
                    notes |= {f"{path}: {n}": None for n in result.notes if n not in method.notes}
                ready = number >= RECORD_AT or not torch.cuda.is_available()
                name = args.method if ready else "preparing"
                progress.update(task, advance=1, description=name)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for failure in failures:
        print(f"not done: {failure}", file=sys.stderr)
    print(f"{len(images) - len(failures)} of {len(images)} images segmented, see {args.output}")
    return 1 if failures else 0


def _method(args: Namespace) -> tuple[Segments, tuple[str, ...]]:
    """Return the method that is asked for, and the names of its network's classes."""
    given = {name: args[name] for name in _settings() if name in args}
    check_method(args.method, given)
    if len(args.model) > 1 and args.method != "ensemble":
        raise ValueError(f"--method {args.method} takes one --model, got {len(args.model)}")
    classes = args.classes
    if classes is not None and classes.isdigit():
        classes = int(classes)
    device = find_device(args.device)
    weights = args.weights or [None] * len(args.model)
    if len(weights) != len(args.model):
        raise ValueError(f"got {len(weights)} --weights for {len(args.model)} --model")
    models: list[Any] = []
    for place, file in zip(args.model, weights, strict=True):
        model = open_model(place, weights=file, classes=classes, trust=args.trust)
        try:
            models.append(model.to(device))
        except NotImplementedError as error:
            raise ValueError(f"{place} cannot be moved to {device}: {error}") from error
    network = models if args.method == "ensemble" else models[0]
    try:
        method = create_method(args.method, network, compare=False, **given)
    except TypeError as error:  # the network is no segmentation network, or a setting no number
        raise ValueError(str(error)) from error
    return method, models[0].spec.classes


def _methods_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="Show the settings of one.")


def _methods(args: Namespace) -> int:
    if args.name is None:
        for name, method in METHODS.items():
            print(f"{name:12} {_summary(method)}")
        return 0
    check_method(args.name, {})
    print(f"{args.name}: {_summary(METHODS[args.name])}")
    texts = _setting_texts(args.name)
    for name, parameter in settings_of(args.name).items():
        python = " In Python only." if name in NOT_FLAGS else ""
        print(f"  {name:12} {parameter.default!r:20} {texts[name]}{python}")
    return 0


def _setting_texts(method: str) -> dict[str, str]:
    """Return what each setting of a method means, from the docstrings of the classes."""
    texts = {}
    for owner in (Method, METHODS[method]):
        for parameter in docstring_parser.parse(owner.__doc__ or "").params:
            text = " ".join((parameter.description or "").split())
            texts[parameter.arg_name] = text.replace("``", "")
    return {setting: texts[setting] for setting in settings_of(method)}


def _summary(method: type) -> str:
    """Return the first line of what a method says about itself."""
    return (method.__doc__ or "").split("\n")[0]


def _models(args: Namespace) -> int:
    for name, architecture in MODELS.items():
        try:
            with torch.device("meta"):
                model = create_model(name)
        except ModuleNotFoundError as error:
            print(f"{name}: {error}\n")
            continue
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        interface = architecture.interface or Interface()
        print(f"{name}: output stride {architecture.stride}")
        print(f"  input       RGB, mean {interface.mean}, std {interface.std}")
        print(
            f"  parameters  {millions:.2f} M with 19 classes; published: {architecture.published}"
        )
        print(f"  adapts      {adapted_parameters(model).reason}")
        print(f"  SaN         {find_san(model, 0.1)}")
        for option, values in architecture.options.items():
            print(f"  {option:11} {' | '.join(values)}")
        print()
    print(ADDRESSES)
    return 0


def _bench_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="Names of networks.")
    parser.add_argument(
        "--sizes", nargs="+", default=list(SIZES), help="Widths and heights, such as 1280x720."
    )
    parser.add_argument(
        "--steps", nargs="+", type=int, default=list(STEPS), help="Numbers of steps."
    )
    parser.add_argument(
        "--adapt", nargs="+", help="Name patterns of the layers to adapt, if not the default."
    )
    parser.add_argument("--repeats", type=int, default=10, help="Runs of each, once prepared.")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one."
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="Write bench.md, .csv, .json and .png."
    )


def _bench(args: Namespace) -> int:
    for name in args.networks:
        if name not in MODELS:
            known = ", ".join(MODELS)
            raise ValueError(f"unknown network {name!r};{nearest(name, MODELS)} known: {known}")
    for number in (args.repeats, *args.steps):
        check_number("steps and repeats", number, 1, whole=True)
    device = find_device(args.device)
    if args.output:
        make_folder(args.output)
    rows = run_bench(
        args.networks, args.sizes, args.steps, device=device, adapt=args.adapt,
        repeats=args.repeats,
    )  # fmt: skip
    table = Table(*COLUMNS, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*as_cells(row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if args.output:
        write_bench(rows, machine(device), args.output)
        print(f"written to {args.output}")
    return 0


def _check_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help=f"One of {', '.join(DATASETS)}.")
    parser.add_argument("root", nargs="?", metavar="ROOT", help="The folder it lies in.")
    parser.add_argument("--split", help="Check this split only.")
    parser.add_argument(
        "--classes", nargs="+", help="Of folder: the name of a class space, or the classes by id."
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PNG", help="Write pictures with their labels."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace the PNG if it is there.")


def _check_data(args: Namespace) -> int:
    classes = args.classes
    if classes is not None and len(classes) == 1:
        classes = classes[0]
    return run_check(
        args.dataset, args.root, split=args.split, classes=classes, output=args.output,
        overwrite=args.overwrite,
    )  # fmt: skip


def _recipe_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--recipe",
        action=ActionConfigFile,
        help="YAML file. The word RECIPE after the verb is short for this, and may be the name of "
        "a shipped recipe. Flags that follow change it.",
    )


def _train_arguments(parser: ArgumentParser) -> None:
    _recipe_argument(parser)
    _output_arguments(parser)
    parser.add_class_arguments(TrainConfig)


def _train(args: Namespace) -> int:
    names = (f.name for f in fields(TrainConfig))
    config = TrainConfig(**{name: args[name] for name in names})
    train(config, args.output, overwrite=args.overwrite)
    return 0


def _evaluate_arguments(parser: ArgumentParser) -> None:
    _recipe_argument(parser)
    _output_arguments(parser)
    parser.add_argument(
        "--retry", action="store_true", help="Try images again that could not be segmented."
    )
    parser.add_class_arguments(EvaluateConfig)


def _evaluate(args: Namespace, *, only_tune: bool = False) -> int:
    config = EvaluateConfig(**{f.name: args[f.name] for f in fields(EvaluateConfig)})
    folder = evaluate(
        config, args.output, overwrite=args.overwrite, retry=args.retry, only_tune=only_tune
    )
    if int(os.environ.get("RANK", 0)) > 0:
        return 0
    return print_summary(read_results(folder), folder, only_tune=only_tune)


def _tune(args: Namespace) -> int:
    return _evaluate(args, only_tune=True)


def _report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="Folder of an evaluation.")
    _output_arguments(parser)


def _report(args: Namespace) -> int:
    page = write_report(args.run, args.output, overwrite=args.overwrite)
    print(f"the report is in {page}")
    return 0


def _demo(args: Namespace) -> int:
    demo(args.output, overwrite=args.overwrite)
    return 0


ADDRESSES = """any other network, by address:
  torchvision:deeplabv3_resnet50    a segmentation network of torchvision
  smp:Unet/resnet34                 any of segmentation-models-pytorch; timm's encoders are tu-NAME
  smp:FOLDER                        what its save_pretrained wrote
  hf:OWNER/NAME or hf:FOLDER        a network on the Hugging Face hub, or in a folder
  my_module:my_function             code of your own on the Python path; needs --trust"""

VERBS = {
    "predict": Verb(
        "Segment images, by self-adaptation or another method.",
        "selfadapt predict street.jpg --model net.safetensors -o masks",
        _predict_arguments,
        _predict,
    ),
    "train": Verb(
        "Train a network on a source domain, or go on with it.",
        "selfadapt train streets-quick -o run",
        _train_arguments,
        _train,
    ),
    "tune": Verb(
        "Choose the settings of methods on a validation domain.",
        "selfadapt tune streets-quick -o run",
        _evaluate_arguments,
        _tune,
    ),
    "evaluate": Verb(
        "Tune on a validation domain, then score the targets.",
        "selfadapt evaluate streets-quick -o run",
        _evaluate_arguments,
        _evaluate,
    ),
    "report": Verb(
        "Write the page, tables and figures of an evaluation.",
        "selfadapt report run -o report",
        _report_arguments,
        _report,
    ),
    "check-data": Verb(
        "Look through a dataset for what is missing or broken.",
        "selfadapt check-data cityscapes /data/cityscapes -o sheet.png",
        _check_arguments,
        _check_data,
    ),
    "methods": Verb(
        "List the methods, or the settings of one.",
        "selfadapt methods tent",
        _methods_arguments,
        _methods,
    ),
    "models": Verb(
        "List the networks by name, and how to address others.",
        "selfadapt models",
        lambda parser: None,
        _models,
    ),
    "bench": Verb(
        "Measure what networks and methods take here.",
        "selfadapt bench --sizes 1280x720 -o bench",
        _bench_arguments,
        _bench,
    ),
    "demo": Verb(
        "See a small network adapt to streets it does not know.",
        "selfadapt demo -o demo",
        _output_arguments,
        _demo,
    ),
}
