"""The pages of docs/: what they show is run, and the site of them is whole by itself."""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from documents import ADDRESS, ROOT, blocks, prepare, run_blocks, run_commands
from selfadapt import METHODS
from selfadapt.recipes import shipped_recipes
from selfadapt.report.published import published

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PROGRAMS = DOCS / "service.md"
"""Its requests need a server."""
CLUSTER = DOCS / "cluster.md"
"""Its code needs a cluster, see ``test_cluster.py``."""
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
LOADING = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}
"""Tags that load something, and where they say what."""


class Links(HTMLParser):
    """Collects what a page loads, what it leads to, and places in it to lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.led: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in LOADING and LOADING[tag] in given:
            self.loaded.append(given[LOADING[tag]])
        if tag == "a" and "href" in given:
            self.led.append(given["href"])
        self.places |= {given[name] for name in ("id", "name") if name in given}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    made = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        for address in Links(page).loaded:
            assert not urlsplit(address).netloc, f"{page.name} loads {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text())


@pytest.mark.slow
def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    found = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    for page, links in found.items():
        for address in (*links.led, *links.loaded):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.name} leads to {address}"
            if parts.fragment and target in found and parts.fragment != "__skip":
                assert unquote(parts.fragment) in found[target].places, f"{page.name}: {address}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["index.html", "notebooks/one_image.html"])
def test_the_search_works_in_pages_opened_from_a_folder(site: Path, page: str) -> None:
    browser_of = pytest.importorskip("playwright.sync_api").sync_playwright
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a browser")
    with browser_of() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        requests: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto((site / page).as_uri())
        tab.keyboard.press("/")
        tab.keyboard.type("bootstrap", delay=20)
        links = tab.locator(".md-search-result__link")
        links.first.wait_for()
        assert "protocol.html" in str(links.first.get_attribute("href"))
        browser.close()
    assert not [address for address in requests if address.startswith("http")]


@pytest.mark.slow
def test_the_reference_has_the_docstrings(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in ("SelfAdapt", "create_method", "san", "pseudo_label", "open_model", "Interface"):
        assert f'id="selfadapt.{name}"' in text
    assert "Confidence threshold of the pseudo-label" in text


@pytest.mark.slow
def test_what_the_page_on_programs_shows_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio", reason="needs the extra app")
    from serving import served

    monkeypatch.chdir(tmp_path)
    prepare()
    with served() as server:
        names = run_blocks(PROGRAMS, server.address)
        assert set(names["arrays"]) == {"label", "confidence", "classes"}
        lines = "".join(blocks(PROGRAMS, "console")).splitlines()
        requests = [line for line in lines if line.startswith(f"$ curl -fsS {ADDRESS}")]
        requests += [line for line in lines if line.startswith(f"$ curl -fsS '{ADDRESS}")]
        assert len(requests) == 2
        if shutil.which("curl") is None:
            pytest.skip("needs curl")
        for line in requests:
            command = line.removeprefix("$ ").replace(ADDRESS, server.address)
            subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL)
        assert Image.open("label.png").size == Image.open("street.jpg").size


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p not in (PROGRAMS, CLUSTER)], ids=lambda page: page.stem
)
def test_what_a_page_shows_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not blocks(page, "python") and not blocks(page, "sh"):
        return
    monkeypatch.chdir(tmp_path)
    prepare()
    with patch.dict(METHODS):
        run_blocks(page)
    run_commands(page)


def test_what_is_not_run_has_a_prompt() -> None:
    for page in PAGES:
        for block in blocks(page, "console"):
            assert block.startswith("$ "), page.name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_without_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    NotebookClient(book, timeout=300, kernel_name="python3").execute()
    assert any(cell.outputs for cell in code)


def test_the_papers_page_names_every_recipe_and_no_other() -> None:
    text = (DOCS / "paper.md").read_text()
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|", text[text.index("| paper |") :], re.M)
    named = set(re.findall(r"`([\w-]+)`", " ".join(rows) + text[text.index("## The same") :]))
    shipped = set(shipped_recipes("evaluate")) - {"carla"}
    assert named == shipped


def test_the_papers_page_says_what_disk_time_and_memory_a_recipe_needs() -> None:
    text = (DOCS / "paper.md").read_text()
    on_disk = re.findall(r"^\|.*\| \d+ GB \| `([\w-]+)` \|$", text, re.M)
    assert sorted(on_disk) == [
        "acdc", "bdd", "cityscapes", "gta", "idd", "mapillary", "synthia", "wilddash",
    ]  # fmt: skip
    rows = re.findall(r"^\| (`.*`) \| .*\d.* \| \d.* GB.* \|$", text, re.M)
    patterns = re.findall(r"`([\w*-]+)`", " ".join(rows))
    small = {"carla", "streets", "streets-quick"}
    for recipe in set(shipped_recipes("evaluate")) - small:
        assert any(fnmatch(recipe, pattern) for pattern in patterns), recipe


def test_the_papers_page_has_numbers_that_were_published() -> None:
    values = {f"{number.value:.2f}" for number in published()}
    values |= {f"{number.value:.1f}" for number in published()}
    rows = re.findall(r"^\|.*\|.*\| (.+) \|$", (DOCS / "paper.md").read_text(), re.M)
    numbers = re.findall(r"\b\d\d\.\d{1,2}\b", " ".join(rows))
    assert len(numbers) > 50
    assert set(numbers) <= values
