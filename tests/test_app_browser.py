"""The page in a browser: what users do, on a desktop and on a phone."""

import io
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import random_image
from selfadapt.images import to_pil

pytest.importorskip("gradio", reason="needs the extra app")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
from serving import Served, served  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome"),
]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
PATIENCE = 60_000
expect = playwright.expect
expect.set_options(timeout=PATIENCE)


def png(height: int = 32, width: int = 48) -> bytes:
    file = io.BytesIO()
    to_pil(random_image(height, width)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(server: Served, browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the page; at the end, nothing may have gone wrong in it or have left for elsewhere."""
    server.model.delay = 0.0
    complaints, contexts = [], []

    def watch(request: Any) -> None:
        if not request.url.startswith((server.address, "data:", "blob:")):
            complaints.append(f"request to {request.url}")

    def opened(size: str = "desktop", color_scheme: str = "light") -> Any:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=color_scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", watch)
        page.on("pageerror", lambda error: complaints.append(f"error {error}"))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        page.goto(server.address)
        page.locator("#start").wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    expected = "413"  # browsers report a refused upload in their console
    assert [text for text in complaints if expected not in text] == []


def give(page: Any, content: bytes, name: str = "street.png") -> None:
    """Choose a file in the place of the image that is there."""
    page.locator("#image").get_by_label("Remove Image").click()
    page.locator("#image input[type=file]").set_input_files(
        {"name": name, "mimeType": "image/png", "buffer": content}
    )


def give_image(page: Any) -> None:
    give(page, png())
    expect(page.locator("#image img")).to_have_attribute("src", re.compile("street"))


def set_steps(page: Any, number: int) -> None:
    field = page.locator("#steps input[type=number]")
    field.fill(str(number))
    field.blur()


@pytest.mark.parametrize("size", SIZES)
def test_an_image_is_dropped_and_adapted_to(visit: Callable[..., Any], size: str) -> None:
    page = visit(size)
    give_image(page)
    set_steps(page, 2)
    page.click("#start")
    expect(page.locator("#status")).to_contain_text("48x32 pixels")
    tab = page.get_by_role("tabpanel").filter(visible=True)
    expect(tab.locator(".before-after img").first).to_be_visible()
    assert tab.locator(".before-after img").count() == 2
    for name in ("pseudo-label", "confidence", "changes"):
        expect(tab.locator(f".{name} img")).to_be_visible()
    expect(tab.locator(".legend")).to_contain_text("class 0")
    assert tab.locator(".curve circle").count() == 2
    with page.expect_download() as download:
        page.click("#download")
    with zipfile.ZipFile(download.value.path()) as archive:
        assert "self-adapt_label.png" in archive.namelist()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= SIZES[size][0], "the page is wider than the window"


def test_methods_run_side_by_side_with_their_own_controls(visit: Callable[..., Any]) -> None:
    page = visit()
    give_image(page)
    page.locator("#method input").click()
    page.get_by_role("option", name="tent", exact=True).click()
    expect(page.locator("#psi")).to_be_hidden()
    expect(page.locator("#lr input")).to_have_value("0.01")
    set_steps(page, 1)
    page.locator("#beside").get_by_label("san", exact=True).check()
    page.click("#start")
    expect(page.locator("#gallery img")).to_have_count(4)
    expect(page.get_by_role("tab")).to_have_text(["tent", "san"])
    page.get_by_role("tab", name="san").click()
    expect(page.get_by_text("No gradient steps were taken.")).to_be_visible()


def test_a_street_is_taken_in_the_dark(visit: Callable[..., Any]) -> None:
    page = visit(color_scheme="dark")
    before = page.locator("#image img").get_attribute("src")
    page.locator("#look input").click()
    page.get_by_role("option", name="rain", exact=True).click()
    page.click("#take")
    expect(page.locator("#image img")).not_to_have_attribute("src", before)
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", color)[:3])) < 150


def test_a_user_stops_and_another_waits_for_it(visit: Callable[..., Any], server: Served) -> None:
    first, second = visit(), visit("phone")
    for page in (first, second):
        give_image(page)
    set_steps(first, 50)
    set_steps(second, 1)
    server.model.delay = 0.15
    first.click("#start")
    expect(first.locator("#status")).to_contain_text(re.compile("step [1-9] of 50"))
    server.model.delay = 0.6  # the other steps would take longer than anything below waits
    second.click("#start")
    expect(second.locator("#status")).to_contain_text("queue", timeout=20_000)
    first.click("#stop")
    expect(first.locator("#status")).to_contain_text("Stopped", timeout=20_000)
    server.model.delay = 0.0
    expect(second.locator("#status")).to_contain_text("48x32 pixels", timeout=20_000)
    expect(first.locator(".before-after img")).to_have_count(0)
    set_steps(first, 1)
    first.click("#start")
    expect(first.locator("#status")).to_contain_text("48x32 pixels")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"not an image at all", "not an image file", id="text"),
        pytest.param(png()[:200], "cut off or damaged", id="cut off"),
        pytest.param(png(150, 150), "0.02 million pixels", id="too many pixels"),
        pytest.param(b"\0" * 60_000, "maximum allowed size", id="too many bytes"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(
    visit: Callable[..., Any], content: bytes, words: str
) -> None:
    page = visit()
    give(page, content)
    page.wait_for_timeout(500)
    page.click("#start")
    expect(page.get_by_text(words).first).to_be_visible()
    expect(page.locator(".before-after img")).to_have_count(0)
