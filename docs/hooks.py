"""Hooks of mkdocs: notebooks become pages, and the search works in pages opened from a folder."""

import json
import os
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

WORKER = "https://unpkg.com/iframe-worker/shim"
"""What mkdocs-material's offline plugin loads; offline.js does the same."""


def on_post_build(config: Any) -> None:
    """Let every page load offline.js from the site."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        text = page.read_text()
        if WORKER not in text:
            raise ValueError(f"{page.name} does not load {WORKER}: see what the plugin loads now")
        page.write_text(text.replace(WORKER, os.path.relpath(site / "offline.js", page.parent)))


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook, under the same name."""
    for notebook in sorted(Path(config.docs_dir).glob("notebooks/*.ipynb")):
        name = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, name, content=as_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to a notebook at its page; those on the page itself stay."""
    inside = page.file.src_uri.startswith("notebooks/")
    return markdown if inside else markdown.replace(".ipynb)", ".md)")


def as_page(notebook: Path) -> str:
    """Return the Markdown of a notebook, and where the notebook itself is."""
    cells = json.loads(notebook.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    parts = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    ]
    parts.insert(1, f"*This page is [a notebook]({notebook.name}): open it to run it.*")
    return "\n\n".join(parts)
