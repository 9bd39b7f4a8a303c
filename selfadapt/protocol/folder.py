"""The folder of an evaluation.

record.json   what is evaluated: the recipe, fingerprints of networks and images, the machine
rows/         the journal, a file for each process
chosen.json   what was tried on the validation domain, and what was chosen
tables/       the rows added up, as CSV files
pictures/     images before and after
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from selfadapt.files import make_folder, remove_parts, written_whole
from selfadapt.journal import Row, drop_rows, each_row, lock_rows
from selfadapt.models.spec import fingerprint
from selfadapt.protocol.domains import Domain
from selfadapt.protocol.recipe import EvaluateConfig
from selfadapt.protocol.tune import Choice
from selfadapt.recipes import differences
from selfadapt.version import __version__

FORMAT = "selfadapt evaluation 1"
WRITTEN = ("rows", "chosen.json", "tables", "pictures", "record.json")
"""What there is to remove, in this order: with the record, the folder is that of a run."""
PATIENCE = 60.0
"""Seconds to wait for the first process to make the folder."""


class RunFolder:
    """Where an evaluation is written."""

    def __init__(self, path: Path, rank: int = 0, world: int = 1) -> None:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"an evaluation needs a folder, but {path} is a file")
        self.path, self.rank, self.world = path, rank, world
        self.rows = path / "rows"

    def open(
        self,
        config: EvaluateConfig,
        models: Mapping[str, Any],
        domains: Sequence[Domain],
        device: torch.device,
        *,
        overwrite: bool,
        retry: bool,
    ) -> None:
        """Make the folder, or make sure that the run in it is of this recipe and these networks."""
        if overwrite and self.world > 1:
            raise ValueError(f"several processes cannot start anew: remove {self.path} first")
        if retry and self.world > 1:
            raise ValueError("several processes cannot retry together: start one with --retry")
        identity = {
            "version": __version__,
            "recipe": config.identity(),
            "networks": {name: fingerprint(model) for name, model in models.items()},
            "images": {domain.label: domain.fingerprint() for domain in domains},
        }
        there = (self.path / "record.json").exists()
        if self.rank == 0 and not there and self._content():
            raise FileExistsError(
                f"{self.path} holds other files and no evaluation; give an empty or new folder"
            )
        if overwrite and there:
            self._clear()
        elif there:
            self._compare(identity)
            if retry:
                self._drop_rows(domains)
            self._compare_files(domains)
        if self.rank == 0:
            make_folder(self.path)
            remove_parts(self.path, "record.json", "chosen.json")
            remove_parts(self.path / "tables", "*.csv")
            remove_parts(self.path / "pictures", "*.png", "index.json")
            self._write_json("record.json", _record(config, identity, models, domains, device))
        self._compare(identity)
        make_folder(self.rows)

    def _compare(self, identity: Mapping[str, Any]) -> None:
        """Refuse to go on with a run of another recipe, network or list of images."""
        if changed := differences(self._record()["identity"], identity):
            raise ValueError(
                f"{self.path} holds an evaluation that differs ({'; '.join(changed[:5])}); give "
                "another folder, or use --overwrite to start anew"
            )

    def _compare_files(self, domains: Sequence[Domain]) -> None:
        """Refuse to go on with other files under the names of those that there are rows of."""
        is_of_another_file = _comparison(domains)
        for row in each_row(self.rows):
            if is_of_another_file(row):
                raise ValueError(
                    f"{row['image']} of {row['domain']} or its label is another file than the one "
                    f"that {self.path} has a row of: put it back, use --retry to segment it as it "
                    "is now, give another folder, or use --overwrite to start anew"
                )

    def _drop_rows(self, domains: Sequence[Domain]) -> None:
        """Remove the rows of what failed and of other files, and pictures, which may show them."""
        is_of_another_file = _comparison(domains)
        drop_rows(self.rows, lambda row: "error" in row or is_of_another_file(row))
        for path in (self.path / "pictures").glob("*.png"):
            path.unlink()

    def write_choices(self, choices: Mapping[str, Choice]) -> None:
        """Write down what was tried and chosen."""
        content = {label: asdict(choice) for label, choice in choices.items()}
        self._write_json("chosen.json", content)

    def wait_for_choices(self) -> None:
        """Wait until the first process has written down what was chosen."""
        while not (self.path / "chosen.json").exists():
            time.sleep(0.1)

    def _record(self) -> dict[str, Any]:
        start = time.monotonic()
        while not (self.path / "record.json").exists():
            if time.monotonic() - start > PATIENCE:
                raise ValueError(f"the first process has not made {self.path}: is it on a disk "
                                 "that all processes see?")  # fmt: skip
            time.sleep(0.1)
        return read_record(self.path)

    def _clear(self) -> None:
        """Remove the run that is here, unless some process is still at it."""
        for path in sorted(self.rows.glob("*.jsonl")):
            os.close(lock_rows(path))
        for name in WRITTEN:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _content(self) -> list[str]:
        """Return the names of what is in the folder, but hidden files."""
        names = (path.name for path in self.path.iterdir()) if self.path.is_dir() else ()
        return [name for name in names if not name.startswith(".")]

    def _write_json(self, name: str, content: object) -> None:
        with written_whole(self.path / name) as aside:
            aside.write_text(json.dumps(content, indent=1) + "\n")


def _comparison(domains: Sequence[Domain]) -> Callable[[Row], bool]:
    """Return a function that tells whether a row is of another file than there is now."""
    places = {
        (domain.label, name): (domain, number)
        for domain in domains
        for number, name in enumerate(domain.names)
    }

    @cache
    def file_sizes(image: tuple[Any, Any]) -> list[int] | None:
        domain, number = places[image]
        return domain.file_sizes(number)

    def is_of_another_file(row: Row) -> bool:
        image, sizes = (row.get("domain"), row.get("image")), row.get("bytes")
        return sizes is not None and image in places and sizes != file_sizes(image)

    return is_of_another_file


def _record(
    config: EvaluateConfig,
    identity: Mapping[str, Any],
    models: Mapping[str, Any],
    domains: Sequence[Domain],
    device: torch.device,
) -> dict[str, Any]:
    """Return all that is to be known of a run beside its rows."""
    specs = {name: model.spec for name, model in models.items()}
    return {
        "format": FORMAT,
        "version": __version__,
        "identity": identity,
        "recipe": asdict(config),
        "classes": config.space.names,
        "networks": {
            name: {"name": spec.name, "norm": spec.norm, "dropout": spec.dropout}
            for name, spec in specs.items()
        },
        "images": {domain.label: len(domain.data) for domain in domains},
        "notes": [f"{domain.label}: {note}" for domain in domains for note in domain.data.notes],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def read_record(folder: Path) -> dict[str, Any]:
    """Read what a run is of."""
    path = folder / "record.json"
    try:
        record = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no evaluation in {folder}") from None
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{path} must be of the format {FORMAT!r}, got {found!r}; use --overwrite to start anew"
        )
    parts = ("identity", "recipe", "images", "notes", "classes", "networks", "torch", "device")
    if lacking := [part for part in parts if part not in record]:
        raise ValueError(f"{path} is damaged, it lacks {', '.join(lacking)}; evaluate anew")
    for part in ("identity", "recipe", "images", "networks"):
        if not isinstance(record[part], dict):
            raise ValueError(f"{path} is damaged: {part} holds no names and values; evaluate anew")
    return record


def read_json(path: Path) -> Any:
    """Read a file of a run."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); use --overwrite to start anew") from error
