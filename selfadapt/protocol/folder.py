"""The output folder of an evaluation.

record.json   the recipe, fingerprints of networks and images, the machine
rows/         the journal, a file for each share
chosen.json   the settings tried on the validation domain, and those chosen
tables/       sums over the rows, as CSV files
pictures/     images before and after adaptation
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import torch

from selfadapt.files import holds
from selfadapt.journal import Row, drop_rows, iter_rows
from selfadapt.models.spec import fingerprint
from selfadapt.protocol.domains import Domain
from selfadapt.protocol.recipe import EvaluateConfig
from selfadapt.protocol.tune import Choice
from selfadapt.runs import RunStore
from selfadapt.version import __version__

TABLES = ("domains", "classes", "images", "sweeps", "tuning", "failed", "times")
"""Names of the CSV files in ``tables``."""


class EvaluationFolder(RunStore):
    """Output folder of an evaluation."""

    NAME: ClassVar[str] = "an evaluation"
    FORMAT: ClassVar[str] = "selfadapt evaluation 2"
    OUTPUTS: ClassVar[tuple[str, ...]] = (
        "rows/*.jsonl", "chosen.json", *(f"tables/{name}.csv" for name in TABLES),
        "pictures/*.png", "pictures/index.json",
    )  # fmt: skip

    def start(
        self,
        config: EvaluateConfig,
        models: Mapping[str, Any],
        domains: Sequence[Domain],
        device: str,
        *,
        overwrite: bool,
        retry: bool,
    ) -> None:
        """Open the folder for an evaluation of these networks on these images."""
        if retry and self.shard.total > 1:
            raise ValueError("a share cannot retry: leave out --shard, or --retry")
        identity = {
            "version": __version__,
            "recipe": config.identity(),
            "networks": {name: fingerprint(model) for name, model in models.items()},
            "images": {domain.label: domain.fingerprint() for domain in domains},
        }
        specs = {name: model.spec for name, model in models.items()}
        notes = [f"{domain.label}: {note}" for domain in domains for note in domain.data.notes]
        details = {
            "version": __version__,
            "recipe": asdict(config),
            "classes": config.space.names,
            "networks": {
                name: {"name": spec.name, "norm": spec.norm, "dropout": spec.dropout}
                for name, spec in specs.items()
            },
            "images": {domain.label: len(domain.data) for domain in domains},
            "notes": notes,
            "torch": torch.__version__,
            "device": device,
        }
        self.open(identity, details, overwrite=overwrite)
        has_changed = _change_test(domains)
        if retry:
            drop_rows(self.rows, lambda row: "error" in row or has_changed(row))
            for path in drawn_pictures(self.path):  # they may show images that have changed
                path.unlink()
        for row in iter_rows(self.rows):
            if has_changed(row):
                raise ValueError(
                    f"{row['image']} of {row['domain']} or its label has changed since its row in "
                    f"{self.path} was written: restore the file, use --retry to segment the new "
                    "one, give another folder, or use --overwrite to start again"
                )

    def outputs(self) -> Iterator[Path]:
        """Yield the existing files of the run except for the record; of pictures, those drawn."""
        others = set((self.path / "pictures").glob("*.png")) - drawn_pictures(self.path)
        yield from (path for path in super().outputs() if path not in others)

    def write_choices(self, choices: Mapping[str, Choice]) -> None:
        """Write the settings that were tried and chosen."""
        content = {label: asdict(choice) for label, choice in choices.items()}
        self.write_json(self.path / "chosen.json", content)


def is_picture_name(name: object) -> TypeGuard[str]:
    """Return True if the index of pictures may contain this name of a file."""
    return isinstance(name, str) and re.fullmatch(r"[\w.-]+\.png", name) is not None


def drawn_pictures(folder: Path) -> set[Path]:
    """Return the existing pictures that the index of an evaluation lists."""
    index = folder / "pictures" / "index.json"
    try:
        entries = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError):
        return set()
    if not isinstance(entries, list):
        return set()
    names = [entry.get("file") for entry in entries if isinstance(entry, dict)]
    paths = {index.parent / name for name in names if is_picture_name(name)}
    return {path for path in paths if path.is_file() and holds(folder, path)}


def _change_test(domains: Sequence[Domain]) -> Callable[[Row], bool]:
    """Return a function that returns True if the files of a row have changed since."""
    numbers = {
        (domain.label, name): (domain, number)
        for domain in domains
        for number, name in enumerate(domain.names)
    }

    @cache
    def file_sizes(image: tuple[Any, Any]) -> list[int] | None:
        domain, number = numbers[image]
        return domain.file_sizes(number)

    def has_changed(row: Row) -> bool:
        image, sizes = (row.get("domain"), row.get("image")), row.get("bytes")
        return sizes is not None and image in numbers and sizes != file_sizes(image)

    return has_changed


def read_record(folder: Path) -> dict[str, Any]:
    """Read and check the record of a run."""
    record, path = EvaluationFolder.read_record(folder), folder / "record.json"
    parts = ("recipe", "images", "notes", "classes", "networks", "torch", "device")
    if missing := [part for part in parts if part not in record]:
        raise ValueError(f"{path} is damaged, it lacks {', '.join(missing)}; evaluate again")
    for part in ("recipe", "images", "networks"):
        if not isinstance(record[part], dict):
            raise ValueError(f"{path} is damaged: {part} is not a mapping; evaluate again")
    return record
