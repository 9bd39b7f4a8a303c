"""The command line: one verb for each thing to do, flags made from signatures.

Exit codes: 0 done, 1 done in part, 2 asked wrongly or stopped by an error, 130 stopped by Ctrl-C.
"""

import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jsonargparse import set_parsing_settings

from selfadapt import __version__
from selfadapt.cli.export import EXPORT
from selfadapt.cli.lists import LIST_METHODS, LIST_MODELS
from selfadapt.cli.look import BENCH, CHECK_DATA, DEMO
from selfadapt.cli.runs import EVALUATE, REPORT, TRAIN, TUNE
from selfadapt.cli.segment import PREDICT
from selfadapt.cli.serve import SERVE
from selfadapt.cli.verbs import RECIPE_VERBS, Parser
from selfadapt.cli.words import check_settings, file_of_settings, spelled
from selfadapt.methods import is_own_method, load_method
from selfadapt.optional import without_unsafe_advice
from selfadapt.recipes import find_recipe, shipped_recipes

USER_ERRORS = (ValueError, OSError, ModuleNotFoundError)
VERBS = {
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
Parser.verbs = VERBS
set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    add_print_completion_argument=True,
    instantiate_subclass_spec_in_any=False,
    import_path_denylist=["*"],  # settings name no code, which importing would run
    import_path_allowlist=["selfadapt"],
)


def main(args: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its code."""
    words = sys.argv[1:] if args is None else list(args)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            if "" in words:
                raise ValueError("a word is empty: is a variable of the shell not set?")
            _load_methods(words)
            parser = _parser()
            parsed = parser.instantiate(parser.parse_args(_with_recipe(spelled(words))))
            code = VERBS[parsed.verb].run(parsed[parsed.verb])
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except USER_ERRORS as error:
        tried = re.search(r"^Does not validate against any of .*?\n  - (.+?)\n", str(error), re.S)
        said = tried[1] if tried else str(error)  # by the parser, for each kind of value
        print(f"selfadapt {words[0]}: {_printable(without_unsafe_advice(said))}", file=sys.stderr)
        code = 2
    except (torch.OutOfMemoryError, MemoryError) as error:
        _say_out_of_memory(words[0], error)
        code = 1
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # of a CPU
            raise
        _say_out_of_memory(words[0], error)
        code = 1
    except KeyboardInterrupt:
        print("stopped; what has been written is complete", file=sys.stderr)
        if words[0] in (*RECIPE_VERBS, "predict"):
            anew = " without --overwrite" if "--overwrite" in words else ""
            print(f"the same command{anew} goes on from there", file=sys.stderr)
        code = 130
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    if shared and code in (0, 1):
        torch.distributed.destroy_process_group()  # else its threads may abort the process
    sys.exit(code)


def _load_methods(words: Sequence[str]) -> None:
    """Import the methods of the user's own that are named beside --trust: their settings are flags.

    Files of settings cannot say --trust, and what they name is imported with it alone.
    """
    if "--trust" not in words:
        return
    for flag, after in zip(words, [*words[1:], ""], strict=True):
        name, _, value = flag.partition("=")
        if name == "--method" and is_own_method(value or after):
            load_method(value or after)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if kept := without_unsafe_advice(str(message)):
        print(f"note: {kept}", file=sys.stderr)


def _printable(text: str) -> str:
    """Show signs that would steer a terminal, such as in the names of a foreign file."""
    return "".join(
        sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text
    )


def _say_out_of_memory(verb: str, error: BaseException) -> None:
    where = f" ({error})" if verb in ("evaluate", "tune") else ""
    smaller = {
        "train": "--batch or --augment.crop", "predict": "--max-pixels", "bench": "--sizes",
        "evaluate": "scale of the domains, or max_pixels among the settings",
    }  # fmt: skip
    advice = smaller.get(verb, smaller["evaluate"])
    print(f"out of memory{where}: try a smaller {advice}, or another device", file=sys.stderr)


def _with_recipe(words: list[str]) -> list[str]:
    """Spell the recipe that follows a verb as a flag, which is what a file of settings is."""
    if len(words) < 2 or words[0] not in RECIPE_VERBS:
        return words
    for flag, after in zip(words, [*words[1:], ""], strict=True):
        name, _, value = flag.partition("=")
        if name == "--recipe":
            check_settings(file_of_settings(value or after), "a recipe")
    if words[1].startswith("-"):
        return words
    path = find_recipe(words[1], RECIPE_VERBS[words[0]])
    check_settings(path, "a recipe")
    return [words[0], "--recipe", str(path), *words[2:]]


class _Front(Parser):
    """Says on one screen what there is to do."""

    def format_help(self, *_: object, **__: object) -> str:
        verbs = "\n".join(f"  {name:12}{verb.help}" for name, verb in self.verbs.items())
        return HELP.replace("VERBS", verbs)


HELP = """usage: selfadapt VERB ...

Segmentation networks that adapt themselves to each image.

VERBS

  selfadapt VERB --help      all about a verb, with an example
  --version                  the version
  --print_completion SHELL   words that SHELL completes, such as shtab-bash
"""


def _parser() -> Parser:
    parser = _Front(prog="selfadapt")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subcommands(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        usage, epilog = None, f"example: {verb.example}"
        if kind := RECIPE_VERBS.get(name):
            usage = f"selfadapt {name} RECIPE -o DIR [--SETTING VALUE ...]"
            epilog += f" -- recipes of the package: {', '.join(shipped_recipes(kind))}"
        sub = Parser(
            usage=usage, description=verb.help, epilog=epilog, print_config="--print-config"
        )
        verb.add_arguments(sub)
        verbs.add_subcommand(name, sub, help=verb.help)
        sub.prog = f"selfadapt {name}"
    return parser
