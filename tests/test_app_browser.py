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
WAIT_MS = 60_000
expect = playwright.expect
expect.set_options(timeout=WAIT_MS)


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
        page.set_default_timeout(WAIT_MS)
        page.on("request", watch)
        page.on("pageerror", lambda error: complaints.append(f"error {error}"))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        page.goto(server.address)
        expect(page.locator(".viewer .side.right")).to_have_text("self-adapt")
        expect(page.locator("#image img")).to_be_visible()
        return page

    yield opened
    for context in contexts:
        context.close()
    expected = "413"  # browsers report a refused upload in their console
    assert [text for text in complaints if expected not in text] == []


def give(page: Any, content: bytes, name: str = "street.png", kind: str = "image/png") -> None:
    """Choose a file in the place of the image that is there."""
    if page.locator("#image").get_by_label("Remove Image").is_visible():
        page.locator("#image").get_by_label("Remove Image").click()
        expect(page.locator("#status")).to_contain_text("Drop an image")
    page.locator("#image input[type=file]").set_input_files(
        {"name": name, "mimeType": kind, "buffer": content}
    )


def give_image(page: Any) -> None:
    give(page, png())
    expect(page.locator("#status")).to_contain_text("48x32 pixels. It will take")


def open_advanced(page: Any) -> None:
    if not page.locator("#method input").is_visible():
        page.locator("#advanced").get_by_text("Advanced").click()


def set_steps(page: Any, number: int) -> None:
    open_advanced(page)
    field = page.locator("#steps input[type=number]")
    page.wait_for_timeout(300)  # a field that has just appeared still sets its value
    field.fill(str(number))
    field.blur()


def title(page: Any) -> Any:
    return page.locator(".viewer .title")


def adapt(page: Any) -> None:
    for _ in range(4):
        page.click("#start")
        try:
            return expect(title(page)).to_have_text("48x32 pixels", timeout=15_000)
        except AssertionError:  # a click may be lost while the page changes
            continue
    raise AssertionError("four clicks changed nothing")


def pixel(page: Any, x: float, y: float) -> list[int]:
    """Return the colour of the viewer at a place, 0 to 1 from the left and from the top."""
    script = """([canvas, x, y]) => [...canvas.getContext('2d').getImageData(
        Math.floor(x * canvas.width), Math.floor(y * canvas.height), 1, 1).data].slice(0, 3)"""
    canvas = page.locator(".viewer canvas").element_handle()
    return page.evaluate(script, [canvas, x, y])


def point_at(page: Any, x: float, y: float) -> None:
    """Move the mouse over a place of the viewer."""
    canvas = page.locator(".viewer canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


def slide(page: Any, name: str, value: int) -> None:
    page.locator(f".viewer .{name}").fill(str(value))


@pytest.mark.parametrize("size", SIZES)
def test_a_result_is_there_before_anything_is_done(visit: Callable[..., Any], size: str) -> None:
    page = visit(size)
    expect(title(page)).to_contain_text("Rendered street: night")
    expect(page.locator(".viewer canvas")).to_be_visible()
    expect(page.locator(".viewer .side.left")).to_have_text("as trained")
    expect(page.locator(".viewer .side.right")).to_have_text("self-adapt")
    expect(page.locator("#about")).to_contain_text("trained on")
    expect(page.locator(".viewer.stale")).to_have_count(0)


@pytest.mark.parametrize("size", SIZES)
def test_an_image_is_dropped_and_adapted_to(visit: Callable[..., Any], size: str) -> None:
    page = visit(size)
    give_image(page)
    set_steps(page, 2)
    adapt(page)
    expect(page.locator(".legend")).to_contain_text("class 0")
    expect(page.locator(".curve circle")).to_have_count(2)
    with page.expect_download() as download:
        page.click("#download")
    with zipfile.ZipFile(download.value.path()) as archive:
        assert "self-adapt_label.png" in archive.namelist()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= SIZES[size][0], "the page is wider than the window"


def test_the_button_is_right_under_the_image_on_a_phone(visit: Callable[..., Any]) -> None:
    page = visit("phone")
    image, start, canvas = (
        page.locator(name).bounding_box() for name in ("#image", "#start", ".viewer canvas")
    )
    assert 0 <= start["y"] - image["y"] - image["height"] < 40
    assert start["y"] + start["height"] < SIZES["phone"][1], "one must scroll to it"
    assert start["x"] + start["width"] < SIZES["phone"][0]
    assert start["y"] < canvas["y"] < page.locator("#advanced").bounding_box()["y"]
    expect(page.locator("#alpha")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0]


def test_the_photo_lies_under_masks_of_any_opacity(visit: Callable[..., Any]) -> None:
    page = visit()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    slide(page, "opacity", 0)
    photo = [pixel(page, x, 0.5) for x in (0.2, 0.8)]
    slide(page, "opacity", 100)
    masks = [pixel(page, x, 0.5) for x in (0.2, 0.8)]
    slide(page, "opacity", 50)
    both = [pixel(page, x, 0.5) for x in (0.2, 0.8)]
    for low, high, mixed in zip(photo, masks, both, strict=True):
        assert low != high
        for a, b, c in zip(low, high, mixed, strict=True):
            assert abs((a + b) / 2 - c) <= 2
    page.locator(".viewer .left-layer").select_option("photo")
    assert pixel(page, 0.2, 0.5) == photo[0]
    assert requests == []


def test_the_line_is_dragged_and_divides_before_from_after(visit: Callable[..., Any]) -> None:
    page = visit()
    slide(page, "opacity", 100)
    page.locator(".viewer .left-layer").select_option("photo")
    slide(page, "wipe", 0)
    mask = pixel(page, 0.4, 0.5)
    slide(page, "wipe", 1000)
    photo = pixel(page, 0.4, 0.5)
    assert mask != photo
    point_at(page, 0.9, 0.5)
    page.mouse.down()
    point_at(page, 0.2, 0.5)
    page.mouse.up()
    assert pixel(page, 0.4, 0.5) == mask
    assert abs(float(page.locator(".viewer .wipe").input_value()) - 200) < 5


@pytest.mark.parametrize("size", [(32, 48), (60, 40)])
def test_the_class_under_the_pointer_is_named(
    visit: Callable[..., Any], size: tuple[int, int]
) -> None:
    page = visit()
    give(page, png(*size))
    expect(page.locator("#status")).to_contain_text("It will take")
    page.click("#start")
    expect(title(page)).to_have_text(f"{size[1]}x{size[0]} pixels")
    slide(page, "opacity", 100)
    slide(page, "wipe", 0)
    colors = {
        row.locator("td").first.inner_text().strip(): row.locator("i").evaluate(
            "swatch => getComputedStyle(swatch).backgroundColor"
        )
        for row in page.locator(".legend tr:has(i)").all()
    }
    for x, y in ((0.1, 0.1), (0.3, 0.6), (0.7, 0.4), (0.95, 0.95)):
        point_at(page, x, y)
        expect(page.locator(".viewer .tip")).to_be_visible()
        name = re.search(r"(class \d) \d+ %$", page.locator(".viewer .tip").inner_text())[1]
        color = [int(number) for number in re.findall(r"\d+", colors[name])]
        assert pixel(page, x, y) == color
    page.mouse.move(1, 1)
    expect(page.locator(".viewer .tip")).to_be_hidden()


def test_an_old_result_is_marked_until_the_next(visit: Callable[..., Any]) -> None:
    page = visit()
    note = page.locator(".viewer .stale-note")
    expect(note).to_be_hidden()
    give_image(page)
    expect(note).to_be_visible()
    assert float(page.locator("#report").evaluate("e => getComputedStyle(e).opacity")) < 1
    page.click("#start")
    expect(title(page)).to_have_text("48x32 pixels")
    expect(note).to_be_hidden()
    assert float(page.locator("#report").evaluate("e => getComputedStyle(e).opacity")) == 1
    set_steps(page, 2)
    expect(note).to_be_visible()


def test_methods_run_side_by_side_with_their_own_controls(visit: Callable[..., Any]) -> None:
    page = visit()
    give_image(page)
    open_advanced(page)
    page.locator("#method input").click()
    page.get_by_role("option", name="tent", exact=True).click()
    expect(page.locator("#psi")).to_be_hidden()
    expect(page.locator("#lr input")).to_have_value("0.01")
    set_steps(page, 1)
    page.locator("#others").get_by_label("san", exact=True).check()
    page.click("#start")
    expect(page.locator("#report .method")).to_have_count(2)
    expect(title(page)).to_have_text("48x32 pixels")
    expect(page.get_by_text("No gradient steps were taken.")).to_be_visible()
    choices = page.locator(".viewer .left-layer option").all_inner_texts()
    assert choices[:4] == ["photo", "as trained", "tent", "san"]
    assert "changes by san" in choices
    for choice in choices:
        page.locator(".viewer .left-layer").select_option(choice)
        expect(page.locator(".viewer .side.left")).to_have_text(choice)


def test_a_street_is_taken_in_the_dark(visit: Callable[..., Any]) -> None:
    page = visit(color_scheme="dark")
    before = page.locator("#image img").get_attribute("src")
    page.locator("#streets").get_by_text("rendered street").click()
    page.locator("#look").get_by_label("rain", exact=True).check()
    expect(page.locator("#image img")).not_to_have_attribute("src", before)
    expect(page.locator("#status")).to_contain_text("It will take")
    expect(page.locator(".viewer .stale-note")).to_be_visible()
    page.click("#start")
    expect(title(page)).to_contain_text("Rendered street: rain")
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", color)[:3])) < 150


def test_a_tiff_is_shown(visit: Callable[..., Any]) -> None:
    page, file = visit(), io.BytesIO()
    to_pil(random_image(32, 48)).save(file, "TIFF")
    give(page, file.getvalue(), "street.tif", "image/tiff")
    expect(page.locator("#image img")).to_have_attribute("src", re.compile(r"image\.png"))
    script = "image => image.decode().then(() => image.naturalWidth)"
    assert page.locator("#image img").evaluate(script) == 48
    expect(page.locator("#status")).to_contain_text("48x32 pixels")


def test_real_networks_are_offered_and_told_to_need_the_internet(
    visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfadapt.app.networks.HOSTS", {"hf": "http://127.0.0.1:1"})
    page = visit()
    page.locator("#networks").get_by_text("Other networks").click()
    offer = page.locator("#model label").filter(has_text="segformer-b0-finetuned-cityscapes")
    expect(offer).to_contain_text("Licence: NVIDIA Source Code License")
    offer.click()
    expect(page.locator("#about")).to_contain_text("cannot be reached from here")
    expect(page.locator("#about")).to_contain_text("Network: tiny")
    expect(page.locator("#model").get_by_label("tiny", exact=True)).to_be_checked()


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
    expect(first.locator(".toast-wrap").get_by_text("Error")).to_have_count(0)
    server.model.delay = 0.0
    expect(title(second)).to_have_text("48x32 pixels", timeout=20_000)
    expect(title(first)).to_contain_text("Rendered street")
    set_steps(first, 1)
    adapt(first)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"not an image at all", "not an image file", id="text"),
        pytest.param(png()[:200], "cut off or damaged", id="cut off"),
        pytest.param(png(150, 150), "0.02 million pixels", id="too many pixels"),
        pytest.param(b"\0" * 60_000, "maximum allowed size", id="too many bytes"),
    ],
)
def test_what_cannot_be_read_is_refused_as_it_is_dropped(
    visit: Callable[..., Any], content: bytes, words: str
) -> None:
    page = visit()
    give(page, content)
    expect(page.get_by_text(words).first).to_be_visible()
    expect(page.locator("#image img")).to_have_count(0)
    expect(title(page)).to_contain_text("Rendered street")
