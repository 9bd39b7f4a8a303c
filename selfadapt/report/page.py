"""The report: a self-contained HTML page, and every table and figure as a file."""

import html
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
from selfadapt.protocol.folder import is_picture_name, read_record
from selfadapt.protocol.results import read_results
from selfadapt.report.context import ReportContext, ReportItem, Section
from selfadapt.report.formats import Grid, to_csv, to_html, to_latex, to_markdown
from selfadapt.report.sections import SECTIONS
from selfadapt.runs.store import read_json

PICTURE_KEYS = {"file", "domain", "image", "kind", "method", "change"}
PARTS = ("tables", "figures")
FILES = ".report.json"
"""The files that a report has written, of which the next one removes those that it replaces."""
FORMATS: dict[str, Callable[[Grid], str]] = {"md": to_markdown, "tex": to_latex, "csv": to_csv}


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
    body = "".join(_section_html(section, run, files) for section in sections)
    links = " ".join(f'<a href="#{_anchor(s)}">{html.escape(s.title)}</a>' for s in sections)
    content = PAGE.replace("LINKS", links).replace("SECTIONS", body)
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


def _section_html(section: Section, run: Path, files: dict[str, bytes]) -> str:
    parts = [f'<h2 id="{_anchor(section)}">{html.escape(section.title)}</h2>']
    parts.append(f"<p>{html.escape(section.text)}</p>")
    parts += [_item_html(item, files) for item in section.items]
    parts += [_picture_html(picture, run) for picture in section.pictures]
    return f"<section>{''.join(parts)}</section>\n"


def _item_html(item: ReportItem, files: dict[str, bytes]) -> str:
    """Return the HTML of an item, and add its files to ``files``."""
    content = ""
    if item.grid is not None:
        for suffix, to_text in FORMATS.items():
            files[f"tables/{item.name}.{suffix}"] = to_text(item.grid).encode()
        content += to_html(item.grid)
    if item.figure is not None:
        png, pdf = io.BytesIO(), io.BytesIO()
        item.figure.savefig(png, format="png", dpi=130)
        item.figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
        files[f"figures/{item.name}.png"] = png.getvalue()
        files[f"figures/{item.name}.pdf"] = pdf.getvalue()
        content += _image_html(png.getvalue(), item.caption, "figure")
    return f"<figure>{content}<figcaption>{html.escape(item.caption)}</figcaption></figure>"


def _picture_html(picture: dict[str, Any], run: Path) -> str:
    change = f"{100 * picture['change']:+.1f} points"
    caption = f"{picture['domain']}, {picture['image']}, {picture['kind']}: {change}"
    image = _image_html((run / "pictures" / picture["file"]).read_bytes(), caption, "picture")
    return f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _image_html(content: bytes, text: str, kind: str) -> str:
    return f'<img class="{kind}" alt="{html.escape(text)}" src="{data_uri(content, "PNG")}">'


def _anchor(section: Section) -> str:
    return section.title.lower().replace(" ", "-")


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>selfadapt report</title>
<link rel="icon" href="data:,">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin-bottom: 2rem }
section { margin-bottom: 3rem }
figure { margin: 1rem 0 }
figcaption { color: #555; font-size: .9rem }
img { max-width: 100% } img.figure { max-height: 34rem } img.picture { width: 100% }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
tr:first-child th { border-bottom: 1px solid #888 }
</style>
<h1>Evaluation</h1>
<nav>LINKS</nav>
SECTIONS
</html>
"""
