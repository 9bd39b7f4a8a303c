"""The parts of a subcommand, its parser, and flags shared by several subcommands."""

from argparse import Action
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shtab
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from selfadapt.ray import Cluster
from selfadapt.recipes import Kind

NEAREST = "nearest"
"""Value of ``--ray`` without an address."""
RECIPE_COMMANDS: dict[str, Kind] = {"train": "train", "evaluate": "evaluate", "tune": "evaluate"}


@dataclass(frozen=True)
class Command:
    """A subcommand: its help, an example, its flags and the function that runs it."""

    help: str
    example: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


class Parser(ArgumentParser):
    """A parser that raises ``ArgumentError``, which ``main`` prints, and takes whole flags only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"exit_on_error": False, "allow_abbrev": False, **kwargs})

    def get_completion_script(self, completion_type: str, **kwargs: Any) -> str:
        """Return the completion script of a shell, with bash completing file names by default."""
        script = super().get_completion_script(completion_type, **kwargs)
        return script.replace("complete -o bashdefault", "complete -o bashdefault -o default")


def output_arguments(parser: ArgumentParser, kind: type = Path) -> None:
    """Add the flags for the output folder."""
    parser.add_argument(
        "-o", "--output", type=kind, required=True, metavar="DIR", help="Output folder."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace existing files.")


def complete_files(action: Action) -> None:
    """Let shells complete file names for an argument."""
    action.complete = shtab.FILE  # type: ignore[attr-defined]


def json_argument(parser: ArgumentParser) -> None:
    """Add the flag for machine-readable output."""
    parser.add_argument("--json", action="store_true", help="Print one JSON object, for programs.")


def shard_argument(parser: ArgumentParser) -> None:
    """Add the flag that splits a run over several processes."""
    parser.add_argument(
        "--shard",
        default="1/1",
        metavar="I/N",
        help="Process the I-th of N shares of the images; start one process for each share.",
    )


def ray_argument(parser: ArgumentParser) -> None:
    """Add the flag that runs a command on a Ray cluster."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const=NEAREST,
        metavar="ADDRESS",
        help="Let the workers of a Ray cluster process the images; without ADDRESS on the cluster "
        "of RAY_ADDRESS or of this machine, which is started if there is none.",
    )


def ray_cluster(
    args: Namespace, device: str, threads: int
) -> AbstractContextManager[Cluster | None]:
    """Return the cluster that ``--ray`` asks for; None without it."""
    if args.ray is None:
        return nullcontext()
    if args.shard != "1/1":
        raise ValueError("the workers of --ray take what they can: leave out --shard")
    return Cluster(None if args.ray == NEAREST else args.ray, device, threads)


def recipe_argument(parser: ArgumentParser) -> None:
    """Add the flag for a recipe file."""
    parser.add_argument(
        "--recipe",
        action=ActionConfigFile,
        help="YAML file. RECIPE right after the command is short for this, and may be the name of "
        "a shipped recipe. Flags after it override its settings.",
    )
