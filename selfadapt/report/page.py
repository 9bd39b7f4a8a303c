"""The report: one HTML page that needs nothing else, and every table and figure as a file."""

import base64
import html
import io
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfadapt.files import file_name, make_folder, remove_partial_files
from selfadapt.protocol.folder import read_record
from selfadapt.protocol.results import read_results
from selfadapt.report.formats import Grid, to_csv, to_html, to_latex, to_markdown
from selfadapt.report.material import Exhibit, Material, Section
from selfadapt.report.sections import SECTIONS
from selfadapt.runs.store import read_json

SHOWN = {"file", "domain", "image", "kind", "method", "change"}
FORMATS: dict[str, Callable[[Grid], str]] = {"md": to_markdown, "tex": to_latex, "csv": to_csv}


def write_report(run: str | Path, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write the report of an evaluation.

    Args:
        run: The folder of the evaluation.
        folder: Where to write ``report.html``, ``tables/`` and ``figures/``.
        overwrite: Replace a report that is there.

    Returns:
        The page.
    """
    run, folder = Path(run), Path(folder)
    page = folder / "report.html"
    if (folder / "record.json").exists():
        raise ValueError(f"{folder} holds an evaluation or another run; give another folder")
    begun = any(folder.glob(".report.*.part"))  # by a process that was killed
    for present in (page, *(() if begun else (folder / "tables", folder / "figures"))):
        if present.exists() and not overwrite:
            raise FileExistsError(
                f"{present} would be replaced; choose another folder or --overwrite"
            )
    results, record = read_results(run), read_record(run)
    every = [results.scores(m, target) for m in results.methods for target in results.targets]
    if not any(scores.images for scores in every):
        failed = any(scores.errors for scores in every)
        reason = "all failed, see tables/failed.csv" if failed else "run selfadapt evaluate first"
        raise ValueError(f"no target of {run} has been segmented: {reason}")
    material = Material(results, record, _pictures(run))
    sections = [section for make in SECTIONS if (section := make(material)) is not None]
    _name_files(sections)
    files: dict[str, bytes] = {}
    body = "".join(_section(section, run, files) for section in sections)
    links = " ".join(f'<a href="#{_anchor(s)}">{html.escape(s.title)}</a>' for s in sections)
    content = PAGE.replace("LINKS", links).replace("SECTIONS", body)
    _replace_report(folder, {**files, page.name: content.encode()})
    return page


def _replace_report(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files aside; only then let them take the place of those of the report before."""
    make_folder(folder)
    aside = folder / f".report.{os.getpid()}.part"
    try:
        for name, content in files.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            with (aside / name).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise OSError(
            f"the report could not be written to {folder} ({error.strerror or error}); nothing "
            "there was changed"
        ) from error
    before = []
    for part, suffixes in (("tables", FORMATS), ("figures", ("png", "pdf"))):
        make_folder(folder / part)
        if (folder / "report.html").exists():
            before += [p for p in (folder / part).iterdir() if p.suffix[1:] in suffixes]
    for name in files:  # the page is the last
        (aside / name).replace(folder / name)
    for path in set(before) - {folder / name for name in files}:
        path.unlink()
    shutil.rmtree(aside)
    remove_partial_files(folder, "report")


def _pictures(run: Path) -> list[dict[str, Any]]:
    """Return what the run has pictures of."""
    index = run / "pictures" / "index.json"
    found = read_json(index) if index.exists() else []
    if not isinstance(found, list) or not all(map(_is_own, found)):
        raise ValueError(f"{index} is damaged; remove it, and run selfadapt evaluate again")
    if lost := [one["file"] for one in found if not (index.parent / one["file"]).is_file()]:
        raise FileNotFoundError(
            f"{index.parent} lacks {lost[0]}; run selfadapt evaluate again, and it is drawn anew"
        )
    return found


def _is_own(picture: Any) -> bool:
    """Say whether a picture is one of the run's own, and no file from elsewhere."""
    if not isinstance(picture, dict) or not picture.keys() >= SHOWN:
        return False
    file = picture["file"]
    return isinstance(file, str) and Path(file).name == file and file.endswith(".png")


def _name_files(sections: Sequence[Section]) -> None:
    """Give each exhibit a name that files can have, and none the name of another."""
    taken: set[str] = set()
    for exhibit in (exhibit for section in sections for exhibit in section.exhibits):
        name = base = file_name(exhibit.name)
        number = 2
        while name in taken:
            name, number = f"{base}_{number}", number + 1
        taken.add(name)
        exhibit.name = name


def _section(section: Section, run: Path, files: dict[str, bytes]) -> str:
    parts = [f'<h2 id="{_anchor(section)}">{html.escape(section.title)}</h2>']
    parts.append(f"<p>{html.escape(section.text)}</p>")
    parts += [_exhibit(exhibit, files) for exhibit in section.exhibits]
    parts += [_picture(picture, run) for picture in section.pictures]
    return f"<section>{''.join(parts)}</section>\n"


def _exhibit(exhibit: Exhibit, files: dict[str, bytes]) -> str:
    """Add the files of an exhibit to others, and return what stands on the page."""
    shown = ""
    if exhibit.grid is not None:
        for suffix, to_text in FORMATS.items():
            files[f"tables/{exhibit.name}.{suffix}"] = to_text(exhibit.grid).encode()
        shown += to_html(exhibit.grid)
    if exhibit.figure is not None:
        png, pdf = io.BytesIO(), io.BytesIO()
        exhibit.figure.savefig(png, format="png", dpi=130)
        exhibit.figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
        files[f"figures/{exhibit.name}.png"] = png.getvalue()
        files[f"figures/{exhibit.name}.pdf"] = pdf.getvalue()
        shown += _image(png.getvalue(), exhibit.caption, "figure")
    return f"<figure>{shown}<figcaption>{html.escape(exhibit.caption)}</figcaption></figure>"


def _picture(picture: dict[str, Any], run: Path) -> str:
    change = f"{100 * picture['change']:+.1f} points"
    caption = f"{picture['domain']}, {picture['image']}, {picture['kind']}: {change}"
    image = _image((run / "pictures" / picture["file"]).read_bytes(), caption, "picture")
    return f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _image(content: bytes, text: str, kind: str) -> str:
    data = base64.b64encode(content).decode()
    return f'<img class="{kind}" alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


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
