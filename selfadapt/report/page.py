"""The report: a self-contained HTML page, and every table and figure as a file."""

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfadapt.files import (
    atomic_write,
    file_name,
    holds,
    make_folder,
    remove_partial_files,
    temporary_path,
    would_be_replaced,
)
from selfadapt.images import data_uri
from selfadapt.pages import render
from selfadapt.protocol.folder import is_picture_name, read_record
from selfadapt.protocol.results import read_results
from selfadapt.report.context import ReportContext, Section
from selfadapt.report.formats import Grid, to_csv, to_latex, to_markdown
from selfadapt.report.sections import SECTIONS
from selfadapt.runs.store import read_json

PICTURE_KEYS = {"file", "domain", "image", "kind", "method", "change"}
PARTS = ("tables", "figures")
FILES = ".report.json"
"""The files that a report has written, of which the next one removes those that it replaces."""
FORMATS: dict[str, Callable[[Grid], str]] = {"md": to_markdown, "tex": to_latex, "csv": to_csv}
FIGURE_FORMATS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 130},
    "pdf": {"metadata": {"CreationDate": None}},
}


def write_report(run: str | Path, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write the report of an evaluation.

    Args:
        run: The folder of the evaluation.
        folder: Where to write ``report.html``, ``tables/`` and ``figures/``.
        overwrite: Replace an existing report.

    Returns:
        Path of the page.
    """
    run, folder = Path(run), Path(folder)
    page = folder / "report.html"
    if (folder / "record.json").exists():
        raise ValueError(f"{folder} holds an evaluation or another run; give another folder")
    interrupted = any(folder.glob(".report.*.part"))  # left by a killed process
    for present in (page, *(() if interrupted else (folder / part for part in PARTS))):
        if present.exists() and not overwrite:
            raise would_be_replaced(present)
    results, record = read_results(run), read_record(run)
    all_scores = [results.scores(m, target) for m in results.methods for target in results.targets]
    if not any(scores.images for scores in all_scores):
        failed = any(scores.errors for scores in all_scores)
        reason = "all failed, see tables/failed.csv" if failed else "run selfadapt evaluate first"
        raise ValueError(f"no target of {run} has been segmented: {reason}")
    context = ReportContext(results, record, _read_pictures(run))
    sections = [section for make in SECTIONS if (section := make(context)) is not None]
    _set_file_names(sections)
    files: dict[str, bytes] = {}
    for item in (item for section in sections for item in section.items):
        if item.grid is not None:
            for suffix, to_text in FORMATS.items():
                files[f"tables/{item.name}.{suffix}"] = to_text(item.grid).encode()
        if item.figure is not None:
            for suffix, options in FIGURE_FORMATS.items():
                file = io.BytesIO()
                item.figure.savefig(file, format=suffix, **options)
                files[f"figures/{item.name}.{suffix}"] = file.getvalue()

    def image(name: str) -> str:
        return data_uri(files[name] if name in files else (run / name).read_bytes(), "PNG")

    content = render("report.html", title="Evaluation", sections=sections, image=image, footer="")
    _replace_report(folder, {**files, page.name: content.encode()})
    return page


def _replace_report(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files to a temporary folder, then move them over those of the previous report."""
    make_folder(folder)
    temporary = temporary_path(folder / "report")
    previous = _written_files(folder)
    try:
        temporary.mkdir()
        for name, content in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            with (temporary / name).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
        _list_files(folder, {*previous, *files})  # so that all are known if it is killed
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise OSError(
            f"the report could not be written to {folder} ({error.strerror or error}); nothing "
            "was changed"
        ) from error
    for part in PARTS:
        make_folder(folder / part)
    for name in files:  # the page comes last
        (temporary / name).replace(folder / name)
    for name in previous - files.keys():
        (folder / name).unlink(missing_ok=True)
    _list_files(folder, files)
    shutil.rmtree(temporary)
    remove_partial_files(folder, "report", FILES)


def _list_files(folder: Path, names: Iterable[str]) -> None:
    with atomic_write(folder / FILES) as temporary:
        temporary.write_text(json.dumps(sorted(names), indent=1) + "\n")


def _written_files(folder: Path) -> set[str]:
    """Return the tables and figures that earlier reports have listed; nothing outside of them."""
    try:
        names = json.loads((folder / FILES).read_text())
    except (OSError, ValueError, RecursionError):  # of a version that wrote no list
        return set()
    return {
        name
        for name in (names if isinstance(names, list) else ())
        if isinstance(name, str) and re.fullmatch(rf"({'|'.join(PARTS)})/[\w.-]+", name)
        and holds(folder, folder / name) and not (folder / name).is_dir()
    }  # fmt: skip


def _read_pictures(run: Path) -> list[dict[str, Any]]:
    """Read the index of the run's pictures and check that the files exist."""
    index = run / "pictures" / "index.json"
    pictures = read_json(index) if index.exists() else []
    if not isinstance(pictures, list) or not all(map(_is_valid_entry, pictures)):
        raise ValueError(f"{index} is damaged; remove it, and run selfadapt evaluate again")
    if missing := [p["file"] for p in pictures if not (index.parent / p["file"]).is_file()]:
        raise FileNotFoundError(
            f"{index.parent / missing[0]} is missing; run selfadapt evaluate again to draw it"
        )
    return pictures


def _is_valid_entry(picture: Any) -> bool:
    """Return True if an entry of the index is complete and names a file of its folder."""
    if not isinstance(picture, dict) or not picture.keys() >= PICTURE_KEYS:
        return False
    return is_picture_name(picture["file"])


def _set_file_names(sections: Sequence[Section]) -> None:
    """Make the names of the items valid and unique file names."""
    taken: set[str] = set()
    for item in (item for section in sections for item in section.items):
        name = base = file_name(item.name)
        number = 2
        while name in taken:
            name, number = f"{base}_{number}", number + 1
        taken.add(name)
        item.name = name
