"""What a verb of the command line is, how words are parsed, and flags that several verbs have."""

import os
import re
import sys
from argparse import Action
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import shtab
from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, Namespace

from selfadapt.patterns import nearest
from selfadapt.recipes import Kind
from selfadapt.train import settings

RECIPE_VERBS: dict[str, Kind] = {"train": "train", "evaluate": "evaluate", "tune": "evaluate"}
KINDS = {
    "list": "a list such as '[1, 2]'", "tuple": "a pair such as '[1, 2]'", "str": "text",
    "tuple with 2 elements": "a pair such as '[1, 2]'", "int": "a whole number",
    "float": "a number", "bool": "true or false", "dict": "names and values", "NoneType": "null",
    "list[str]": "a list of texts",
}  # fmt: skip


NAMED = {
    "validation": "{dataset: WORD}", "source": "{dataset: WORD}", "targets": "[{dataset: WORD}]",
    "methods": "[{method: WORD}]", "networks": "{NAME: {place: WORD}}", "model": "{name: WORD}",
}  # fmt: skip
"""How settings that have several values are written."""
NO_NAMES = (
    r'Parser key "(\w+)[^"]*": .*?(?:dot import path string: |Unable to load config \'|'
    r"class_path '|Importing '|import path format: )([^\s']+)"
)
"""What the parser says where one word stands in the place of names and values."""
WRONG_KIND = (
    r'Parser key "([^"]+)"(?: element \d+)?: (.+) (?:Got|Given) value: ?'
    r"(.*?)(?: Subclass types.*)?$"
)


@dataclass(frozen=True)
class Verb:
    """A thing to do: what it is, how it is asked for, and the function that does it."""

    help: str
    example: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


class Help(DefaultHelpFormatter):
    """Says in words what a setting may be."""

    def _get_type_str(self, action: Action) -> str | None:
        text = super()._get_type_str(action)
        return text and said_type(text)


def said_type(text: str) -> str:
    """Return in words what the parser says of a type.

    Example:
        >>> said_type("Union[int, Literal['auto'], null]")
        'int, auto or null'
    """
    text = re.sub(r"<class '(\w+)'>", lambda found: found[1].lower(), text)
    text = re.sub(r"Literal\[([^]]*)\]", lambda found: found[1].replace("'", ""), text)
    text = re.sub(r"Optional\[(.*)\]$", r"\1, null", text)
    text = re.sub(r"Union\[(.*)\]$", r"\1", text).replace(" | ", ", ").replace("Mapping", "dict")
    *first, last = re.split(r", (?![^[]*\])", text)
    return f"{', '.join(first)} or {last}" if first else last


class Parser(ArgumentParser):
    """Says in one line what was asked wrongly."""

    verbs: ClassVar[Mapping[str, Verb]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=Help, **kwargs)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return []  # a flag cut short would be taken for another one some day

    def get_completion_script(self, completion_type: str, **kwargs: Any) -> str:
        """Return what a shell completes words with; where there are none, it names files."""
        script = super().get_completion_script(completion_type, **kwargs)
        return script.replace("complete -o bashdefault", "complete -o bashdefault -o default")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the line and exit with 2."""
        text = " ".join(message.split())
        if unknown := re.search(r"(?:Option|does not accept option) '(.+?)'", text):
            names = [*settings(), *(name.rpartition(".")[2] for name in settings())]
            text = f"there is no setting {unknown[1]!r};{nearest(unknown[1], names)}"
        elif alone := re.match(NO_NAMES, text):
            key, word = alone.groups()
            how = NAMED.get(key, "{NAME: VALUE}").replace("WORD", word)
            text = f"{key} must be names and values such as {how}, got {word}"
        elif wrong := re.match(WRONG_KIND, text):
            setting, expected, value = wrong.groups()
            value = value or "nothing"
            kinds = map(_kind, re.findall(r"Expected a (.+?)(?=\.$|\. | - | Given |$)", expected))
            text = f"{setting} must be {' or '.join(dict.fromkeys(kinds))}, got {value}"
            if setting in NAMED:
                shape = NAMED[setting].replace("WORD", "...")
                text = f"{setting} must be names and values such as {shape}, got {value}"
            if os.path.exists(value):
                text += "; files come before the flags that take several words"
        elif missing := re.match(r'Parser key "config": File does not exist: (.+)', text):
            text = f"there is no file of settings {missing[1]}"
        elif text.startswith("unrecognized arguments: -"):
            flags = [flag for action in self._actions for flag in action.option_strings]
            text += f";{nearest(text.split()[2].partition('=')[0], flags)}"
        elif text.startswith("unrecognized arguments") and self.prog.endswith(tuple(RECIPE_VERBS)):
            text += "; a recipe comes right after the verb"
        elif text.startswith('expected "verb"') and text.endswith("not provided."):
            text = "say what is to be done"
        elif unknown := re.match(r"argument VERB: invalid choice: '(.*?)'", text):
            known = ", ".join(self.verbs)
            text = f"unknown verb {unknown[1]!r};{nearest(unknown[1], self.verbs)} known: {known}"
        prog = self.prog if "selfadapt" in self.prog else "selfadapt"
        key = rf"\b({'|'.join(self.verbs)})\.(?=\w)"
        if required := re.search(f"^the following arguments are required.*?{key}", text):
            prog = f"selfadapt {required[1]}"
            text = re.sub(key + "(?=run|dataset)", "", text)  # words, and no flags
            text = re.sub(key, "--", text)
            if required[1] in RECIPE_VERBS and text.split(": ")[1] != "--output":
                text += f"; most of them come from a RECIPE: {prog} RECIPE -o DIR"
        text = text.rstrip("; ")
        print(f"error: {text}; see {prog} --help", file=sys.stderr)
        sys.exit(2)


def _kind(name: str) -> str:
    """Return in words what the parser calls a type."""
    if choices := re.fullmatch(r"typing.Literal\[(.+)\]", name):
        return choices[1].replace("'", "").replace(", ", " or ")
    if "Mapping" in name:
        return KINDS["dict"]
    return KINDS.get(re.sub(r"<class '(\w+)'>", r"\1", name), name)


def output_arguments(parser: ArgumentParser) -> None:
    """Add the flags that say where to write."""
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="Folder to write to."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace files that are there.")


def names_files(action: Action) -> None:
    """Let shells complete file names for a flag or a word."""
    action.complete = shtab.FILE  # type: ignore[attr-defined]


def json_argument(parser: ArgumentParser) -> None:
    """Add the flag for programs that read what is printed."""
    parser.add_argument("--json", action="store_true", help="Print one JSON object, for programs.")


def shard_argument(parser: ArgumentParser) -> None:
    """Add the flag of a share of a run."""
    parser.add_argument(
        "--shard",
        default="1/1",
        metavar="I/N",
        help="Do the I-th of N shares of the images, in a process for each.",
    )


def recipe_argument(parser: ArgumentParser) -> None:
    """Add the flag of a file of settings."""
    parser.add_argument(
        "--recipe",
        action=ActionConfigFile,
        help="YAML file. The word RECIPE after the verb is short for this, and may be the name of "
        "a shipped recipe. Flags that follow change it.",
    )
