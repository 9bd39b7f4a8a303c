"""The page of the demo: one HTML file that needs nothing else, on any screen, light or dark."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from selfadapt.demo.pictures import Picture
from selfadapt.version import __version__


class Section(NamedTuple):
    """A part of the page: a table, and some scenes of several pictures each."""

    title: str
    table: str
    scenes: Sequence[Sequence[Picture]]
    notes: Sequence[str] = ()


def page(
    title: str,
    text: str,
    legend: Sequence[tuple[str, tuple[int, int, int]]],
    summary: str,
    sections: Sequence[Section],
) -> str:
    """Return the page.

    Args:
        title: Its heading.
        text: What it is about.
        legend: Classes and their colours.
        summary: The table that stands first, as HTML.
        sections: All that follows; its first scene is the one that can be wiped.
    """
    parts = {
        "TITLE": html.escape(title),
        "TEXT": html.escape(text),
        "LEGEND": "".join(_entry(*entry) for entry in legend),
        "SUMMARY": f"<h2>Mean over the looks</h2>{summary}" if summary else "",
        "WIPE": _wipe(sections[0].scenes[0]),
        "SECTIONS": "\n".join(map(_section, sections)),
        "VERSION": __version__,
    }
    content = PAGE
    for place, part in parts.items():
        content = content.replace(f"[{place}]", part)
    return content


def _entry(name: str, color: tuple[int, int, int]) -> str:
    return f'<li><span style="background: rgb{color}"></span>{html.escape(name)}</li>'


def _wipe(scene: Sequence[Picture]) -> str:
    """Return the predictions before and after on top of each other, with a slider between."""
    _, before, after, *_ = scene
    return f"""<div class="wipe"><img alt="{after.text}" src="{after.source}"><img
alt="{before.text}" src="{before.source}"><input type="range" value="50" aria-label="before, after"
oninput="this.parentElement.style.setProperty('--at', this.value + '%')"></div>
<p class="ends"><span>{before.text}</span><span>{after.text}</span></p>"""


def _section(section: Section) -> str:
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in section.notes)
    scenes = "".join(f'<div class="scene">{_scene(scene)}</div>\n' for scene in section.scenes)
    return f"<section><h2>{html.escape(section.title)}</h2>{section.table}{notes}{scenes}</section>"


def _scene(scene: Sequence[Picture]) -> str:
    return "".join(
        f'<figure><img alt="{picture.text}" src="{picture.source}">'
        f"<figcaption>{picture.text}</figcaption></figure>"
        for picture in scene
    )


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>selfadapt demo</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --text: #1c2024; --soft: #5c6670; --line: #d9dee3; --ground: #fff;
  --card: #f6f8fa; --good: #1a7f37; --bad: #c93c37; --best: #0b62c4 }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --soft: #9aa4ae; --line: #343b43;
  --ground: #14171a; --card: #1d2125; --good: #4cc26a; --bad: #ff7b72; --best: #6cb2ff } }
* { box-sizing: border-box }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--ground);
  max-width: 1180px; margin: 0 auto; padding: 1.5rem 1rem 3rem }
h1 { font-size: clamp(1.4rem, 4.5vw, 2.1rem); line-height: 1.2; margin: .5rem 0 }
h2 { font-size: 1.25rem; margin: 0 0 .6rem }
p { max-width: 46rem } .note, footer { color: var(--soft); font-size: .9rem }
ul { display: flex; flex-wrap: wrap; gap: .3rem 1rem; list-style: none; padding: 0;
  font-size: .9rem }
li span { display: inline-block; width: .9em; height: .9em; border-radius: .2em; margin-right: .4em;
  vertical-align: -.08em; border: 1px solid var(--line) }
section, .summary { background: var(--card); border: 1px solid var(--line); border-radius: .7rem;
  padding: 1rem; margin: 1.2rem 0 }
.summary:empty { display: none }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .22rem 0 .22rem 1.6rem; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left; padding-left: 0 }
th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line) }
.good { color: var(--good) } .bad { color: var(--bad) }
.best { color: var(--best); font-weight: 650 }
@media (max-width: 30rem) { table { font-size: .92rem } td, th { padding-left: .7rem }
  section, .summary { padding: .8rem } }
.scene { display: grid; grid-template-columns: repeat(3, 1fr); gap: .6rem; margin-top: 1.1rem }
@media (max-width: 40rem) { .scene { grid-template-columns: repeat(2, 1fr) } }
figure { margin: 0 } figcaption { color: var(--soft); font-size: .82rem; line-height: 1.3 }
img { display: block; width: 100%; border-radius: .35rem } figure img { cursor: zoom-in }
.wipe { position: relative; --at: 50% } .wipe img + img { position: absolute; inset: 0;
  clip-path: inset(0 calc(100% - var(--at)) 0 0) }
.wipe::after { content: ""; position: absolute; top: 0; bottom: 0; left: var(--at); width: 3px;
  margin-left: -1.5px; background: #fff; box-shadow: 0 0 4px #000; pointer-events: none }
.wipe input { position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; opacity: 0;
  cursor: ew-resize }
.wipe:focus-within { outline: 2px solid var(--best) }
.ends { display: flex; justify-content: space-between; max-width: none; margin: .3rem 0;
  color: var(--soft); font-size: .9rem }
dialog { border: 0; padding: 0; max-width: 100vw; background: none; cursor: zoom-out }
dialog img { width: min(96vw, 180vh) } dialog::backdrop { background: rgb(0 0 0 / .8) }
</style>
<h1>[TITLE]</h1>
<p>[TEXT]</p>
[WIPE]
<ul>[LEGEND]</ul>
<div class="summary">[SUMMARY]</div>
[SECTIONS]
<footer>Made by selfadapt [VERSION]. mIoU: overlap of prediction and ground truth, mean over the
classes; ECE: how far confidence and accuracy are apart; ms: one image, here.</footer>
<dialog onclick="this.close()"><img alt=""></dialog>
<script>
const large = document.querySelector("dialog");
document.querySelectorAll("figure img").forEach(picture => picture.onclick = () => {
  large.firstElementChild.src = picture.src;
  large.showModal();
});
</script>
</html>
"""
