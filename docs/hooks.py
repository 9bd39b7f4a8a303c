"""What mkdocs does beside: each notebook becomes a page of its texts and its code."""

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook, under the same name."""
    for notebook in sorted(Path(config.docs_dir).glob("notebooks/*.ipynb")):
        name = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, name, content=as_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to a notebook lead to its page; those on the page itself lead to the notebook."""
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
