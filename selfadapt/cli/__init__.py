"""The command line: subcommands whose flags are made from signatures.

Exit codes: 0 success, 1 partly done, 2 wrong usage or an error, 130 stopped by Ctrl-C.
"""

import os
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from PIL import Image as PILImage

from selfadapt import __version__
from selfadapt.cli.arguments import expand_recipe, load_trusted, normalize_switches
from selfadapt.cli.commands import RECIPE_COMMANDS, Parser
from selfadapt.cli.export import EXPORT
from selfadapt.cli.lists import LIST_METHODS, LIST_MODELS
from selfadapt.cli.look import BENCH, CHECK_DATA, DEMO
from selfadapt.cli.predict import PREDICT
from selfadapt.cli.runs import EVALUATE, REPORT, TRAIN, TUNE
from selfadapt.cli.serve import SERVE
from selfadapt.optional import without_unsafe_advice
from selfadapt.recipes import shipped_recipes

USER_ERRORS = (ArgumentError, ValueError, OSError, ModuleNotFoundError)
COMMANDS = {
    "predict": PREDICT,
    "serve": SERVE,
    "export": EXPORT,
    "train": TRAIN,
    "tune": TUNE,
    "evaluate": EVALUATE,
    "report": REPORT,
    "check-data": CHECK_DATA,
    "methods": LIST_METHODS,
    "models": LIST_MODELS,
    "bench": BENCH,
    "demo": DEMO,
}
HELP = """usage: selfadapt COMMAND ...

Segmentation networks that adapt themselves to each image.

COMMANDS

  selfadapt COMMAND --help   all flags of a command, with an example
  --version                  the version
  --print_completion SHELL   a completion script for SHELL, such as shtab-bash
"""
set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    add_print_completion_argument=True,
    instantiate_subclass_spec_in_any=False,
    import_path_denylist=["*"],  # settings must not import code, which would run it
    import_path_allowlist=["selfadapt"],
)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    args = sys.argv[1:] if args is None else list(args)
    command = args[0] if args and args[0] in COMMANDS else ""
    program = f"selfadapt {command}".rstrip()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # What may be decoded is checked when it is read.
            warnings.simplefilter("ignore", PILImage.DecompressionBombWarning)
            if "" in args:
                raise ValueError("an argument is empty: is a shell variable not set?")
            load_trusted(args)
            parser = make_parser()
            parsed = parser.parse_args(expand_recipe(normalize_switches(args)))
            parsed = parser.instantiate(parsed)
            code = COMMANDS[parsed.command].run(parsed[parsed.command])
    except BrokenPipeError:  # the reader of the output has closed it, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except USER_ERRORS as error:
        message = _printable(without_unsafe_advice(str(error)))
        print(f"{program}: {message}", file=sys.stderr)
        if isinstance(error, ArgumentError):
            print(f"see {program} --help", file=sys.stderr)
        code = 2
    except (torch.OutOfMemoryError, MemoryError) as error:
        _print_out_of_memory(command, error)
        code = 1
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # PyTorch's CPU allocator
            raise
        _print_out_of_memory(command, error)
        code = 1
    except KeyboardInterrupt:
        print("stopped; all written files are complete", file=sys.stderr)
        if command in (*RECIPE_COMMANDS, "predict"):
            without = " without --overwrite" if "--overwrite" in args else ""
            print(f"run the same command{without} to continue", file=sys.stderr)
        code = 130
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and code in (0, 1):
        torch.distributed.destroy_process_group()  # else its threads may abort the process
    sys.exit(code)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if text := without_unsafe_advice(str(message)):
        print(f"note: {text}", file=sys.stderr)


def _printable(text: str) -> str:
    """Escape control characters, which could steer a terminal, such as those in file names."""
    return "".join(
        char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text
    )


def _print_out_of_memory(command: str, error: BaseException) -> None:
    details = f" ({error})" if command in ("evaluate", "tune") else ""
    smaller = {
        "train": "--batch or --augment.crop", "predict": "--max-pixels", "bench": "--sizes",
        "evaluate": "scale of the domains, or max_pixels in the settings",
    }  # fmt: skip
    advice = smaller.get(command, smaller["evaluate"])
    print(f"out of memory{details}: try a smaller {advice}, or another device", file=sys.stderr)


class _MainParser(Parser):
    """Prints a help text that lists the commands on one screen."""

    def format_help(self, *_: object, **__: object) -> str:
        commands = "\n".join(f"  {name:12}{command.help}" for name, command in COMMANDS.items())
        return HELP.replace("COMMANDS", commands)


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = _MainParser(prog="selfadapt")
    parser.add_argument("--version", action="version", version=__version__)
    subcommands = parser.add_subcommands(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        usage, epilog = None, f"example: {command.example}"
        if kind := RECIPE_COMMANDS.get(name):
            usage = f"selfadapt {name} RECIPE -o DIR [--SETTING VALUE ...]"
            epilog += f" -- shipped recipes: {', '.join(shipped_recipes(kind))}"
        subparser = Parser(
            usage=usage, description=command.help, epilog=epilog, print_config="--print-config"
        )
        command.add_arguments(subparser)
        subcommands.add_subcommand(name, subparser, help=command.help)
        subparser.prog = f"selfadapt {name}"
    return parser
