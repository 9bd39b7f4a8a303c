import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import escape

from conftest import TinyNet, random_image, seeded
from selfadapt.cli import main
from selfadapt.demo import demo, demo_images
from selfadapt.demo.pictures import BROKEN, CHANGED, FIXED, UNCHANGED, change
from selfadapt.demo.run import STREETS_SETTINGS
from selfadapt.demo.tables import (
    MethodChange,
    MethodScore,
    change_table,
    change_verdict,
    mean_scores,
    score_chart,
    score_table,
    score_verdict,
)
from selfadapt.images import to_pil
from selfadapt.labels import STREETS_9
from selfadapt.methods import summary_of
from selfadapt.result import Result

CLASSES = ("road", "<b>car</b>", "sky")


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *map(str, words)])
    return int(str(caught.value.code))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "out"
    return demo(folder, looks=("haze", "rain"), scenes=1, steps=1)


def test_the_demo_shows_every_method_and_six_pictures_of_a_scene(report: Path) -> None:
    page = report.read_text()
    strip, scenes = page.split("</h1>")[1].split("<section>", 1)
    assert re.findall(r"<figcaption>(.*?)</figcaption>", strip) == [
        "image", "network as trained", "after self-adaptation", "ground truth",
    ]  # fmt: skip
    assert scenes.count("<figure>") == 2 * 6
    for text in ("image", "network as trained", "after self-adaptation", "ground truth"):
        assert scenes.count(f"<figcaption>{text}</figcaption>") == 2
    for method in STREETS_SETTINGS:
        assert page.count(f"<td>{method}</td>") == 2, "a table of each look"
        assert page.count(f"<b>{method}</b><p>{escape(summary_of(method))}</p>") == 1
    assert page.count("<li><span") == 9, "a class each"


def test_the_image_on_top_is_the_one_with_the_median_gain(report: Path) -> None:
    page = report.read_text()
    badge = re.findall(r'<b class="\w*">(\S+) mIoU</b>by self-adaptation on this image', page)
    gains = re.findall(r"<h3>.*: mIoU [\d.]+% to [\d.]+% \((\S+)\)</h3>", page)
    assert len(gains) == 2
    assert badge == [min(gains, key=float)], "the lower of two"


def test_bars_are_as_long_as_the_numbers_in_the_tables(report: Path) -> None:
    page = report.read_text()
    tables = [
        re.findall(r"<tr><td>([\w-]+)</td><td[^>]*>([\d.]+)%", t) for t in page.split("<table>")[1:]
    ]
    means = {m: (float(a) + float(b)) / 2 for (m, a), (_, b) in zip(*tables, strict=True)}
    bars = dict(re.findall(r'aria-label="([\w-]+): .*?\n<rect width="([\d.]+)%"', page))
    assert {name: float(width) for name, width in bars.items()} == pytest.approx(means, abs=0.11)


def test_the_demo_says_where_the_report_is_and_never_replaces_it(
    tmp_path: Path, capsys: Any
) -> None:
    words = ("--looks", "night", "--scenes", 1, "--steps", 0, "-o", tmp_path / "out")
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert f"the report is in {tmp_path / 'out' / 'report.html'}" in shown
    assert re.search(r"self-adapt +\d\d\.\d%", shown)
    page = (tmp_path / "out" / "report.html").read_bytes()
    assert run(*words) == 2
    assert "report.html would be replaced" in capsys.readouterr().err
    assert (tmp_path / "out" / "report.html").read_bytes() == page
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


def test_the_page_needs_no_other_file(report: Path) -> None:
    page = report.read_text()
    addresses = re.findall(r'(?:src|href)="(.{5})', page)
    assert set(addresses) == {"data:"}
    assert "url(" not in page
    assert "@import" not in page


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(report: Path, scheme: str) -> None:
    browser_of = pytest.importorskip("playwright.sync_api").sync_playwright
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a browser")
    with browser_of() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(report.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        tables = "[...document.querySelectorAll('.wide')]"
        assert page.evaluate(f"{tables}.every(t => t.scrollWidth <= t.clientWidth)")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        page.click("figure img")
        assert page.is_visible("dialog img")
        browser.close()
    assert troubles == []


def test_images_of_ones_own_are_compared_without_ground_truth(tmp_path: Path, capsys: Any) -> None:
    to_pil(random_image(40, 56)).save(tmp_path / "a&b.png")
    model = seeded(TinyNet)
    report, _ = demo_images(tmp_path / "out", [tmp_path / "a&b.png"], model, CLASSES, steps=1)
    page = report.read_text()
    assert page.count("<figure>") == 4 + 5
    assert "ground truth</figcaption>" not in page
    assert "<h2>a&amp;b.png</h2>" in page
    assert "<b>car" not in page
    assert "changed" in capsys.readouterr().out


def test_without_a_network_own_images_go_through_that_of_the_package(
    tmp_path: Path, capsys: Any
) -> None:
    to_pil(random_image(48, 64)).save(tmp_path / "a.png")
    assert run("--image", tmp_path / "a.png", "--steps", 0, "-o", tmp_path / "out") == 0
    page = (tmp_path / "out" / "report.html").read_text()
    named = set(re.findall(r"</span>([^<]+)</li>", page))
    assert named
    assert named <= set(STREETS_9)
    assert "a.png" in capsys.readouterr().out


def test_images_that_cannot_be_read_are_left_out_and_named(tmp_path: Path, capsys: Any) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    to_pil(random_image(24, 32)).save(photos / "a.png")
    (photos / "b.png").write_text("no image")
    assert run("--image", photos, "--steps", 0, "-o", tmp_path / "out") == 1
    assert "not done: " in capsys.readouterr().err
    assert "<h2>a.png</h2>" in (tmp_path / "out" / "report.html").read_text()


def test_a_large_image_is_shrunk(tmp_path: Path) -> None:
    to_pil(random_image(16, 2048)).save(tmp_path / "wide.png")
    seen = []

    class Watching(TinyNet):
        def forward(self, x: torch.Tensor) -> Any:
            seen.append(x.shape[-1])
            return super().forward(x)

    demo_images(tmp_path / "out", [tmp_path / "wide.png"], seeded(Watching), CLASSES, steps=0)
    assert max(seen) == 1024


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--looks", "fog"], "unknown target look 'fog'"),
        (["--scenes", "0"], "scenes must be a whole number, 1 or more, got 0"),
        (["--steps", "-1"], "steps must be a whole number, 0 or more, got -1"),
        (["--model", "net.safetensors"], "needs an --image"),
        (["--image", "nowhere.jpg"], "there is no image file nowhere.jpg"),
        (["--image", "text.jpg"], "text.jpg is not an image file"),
        (["--image", "a.png", "--model", "a", "--model", "b"], "takes one --model, got 2"),
        (["--image", "a.png", "--model", "deeplabv1_resnet50"], "comes without weights"),
        (["--image", "a.png", "-o", "text.jpg"], "the output must be a folder"),
        (["--image", "a.png", "--looks", "rain"], "--looks are of the built-in streets"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jpg").write_text("no image")
    to_pil(random_image(24, 32)).save("a.png")
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not Path("demo").exists()


def test_change_is_painted_by_what_it_is_good_for() -> None:
    before = torch.tensor([[0, 0, 1, 2, 0]])
    after = torch.tensor([[0, 1, 2, 1, 1]])
    label = torch.tensor([[0, 1, 1, 0, 255]])
    painted = change(before, after, label)
    assert [painted.getpixel((x, 0)) for x in range(5)] == [
        UNCHANGED,
        FIXED,
        BROKEN,
        CHANGED,
        CHANGED,
    ]
    painted = change(before, after)
    assert [painted.getpixel((x, 0)) for x in range(5)] == [UNCHANGED, *[CHANGED] * 4]


ROWS = [
    MethodScore("source", 0.5, 0.1, 200),
    MethodScore("san", 0.6, 0.05, 240),
    MethodScore("self-adapt", 0.7, 0.2, 4800),
]


def test_tables_mark_the_best_the_gains_and_the_losses() -> None:
    rows = [*ROWS[:2], MethodScore("b", 0.4, 0.3, 9)]
    cells = score_table("night", rows).rows
    assert [row[1].tone for row in cells] == ["", "best", ""]
    assert [row[2].tone for row in cells] == ["", "good", "bad"]
    assert [row[3].tone for row in cells] == ["", "best", ""]


def test_a_gain_too_small_to_be_written_is_none() -> None:
    rows = [MethodScore("source", 0.5, 0.1, 9), MethodScore("a", 0.4999, 0.2, 9)]
    cell = score_table("night", rows).rows[1][2]
    assert cell == ("+0.0", "")


def test_the_mean_is_that_of_the_looks() -> None:
    looks = {"haze": ROWS, "rain": [MethodScore("source", 0.3, 0.3, 100), *ROWS[1:]]}
    assert mean_scores(looks)[0] == pytest.approx(("source", 0.4, 0.2, 150))


def test_the_chart_marks_where_the_source_network_is() -> None:
    chart = score_chart(ROWS)
    assert chart.mark == 0.5
    assert [bar.length for bar in chart.bars] == [0.5, 0.6, 0.7]
    assert [bar.change.text for bar in chart.bars] == ["", "+10.0", "+20.0"]
    assert [bar.best for bar in chart.bars] == [False, False, True]


def test_the_verdict_is_computed_from_the_run() -> None:
    text = score_verdict(ROWS)
    for part in (
        "24 times", "4.8 s instead of 200 ms", "+20.0 points", "1.2 times", "+10.0 points",
        "50% of the gain", "san is best calibrated here (ECE 5.0%, self-adaptation 20.0%)",
    ):  # fmt: skip
        assert part in text
    worse = [*ROWS[:2], ROWS[2]._replace(miou=0.55)]
    assert "SaN is enough" in score_verdict(worse)
    useless = [ROWS[0], ROWS[1]._replace(miou=0.45), ROWS[2]._replace(miou=0.4)]
    assert "the network as trained is the best choice" in score_verdict(useless)
    sans_san = [ROWS[0], ROWS[1]._replace(miou=0.45), ROWS[2]]
    assert "of the gain" not in score_verdict(sans_san)


def test_changes_are_the_share_of_other_labels() -> None:
    source = Result(probs=torch.eye(2).reshape(2, 1, 2))
    other = Result(probs=torch.tensor([[1.0, 0.75], [0.0, 0.25]]).reshape(2, 1, 2))
    change = MethodChange.of("self-adapt", other, source)
    assert (change.changed, change.confidence) == (0.5, 0.875)
    same = MethodChange.of("source", source, source)
    rows = [[cell.text for cell in row] for row in change_table("x", [same, change]).rows]
    assert rows == [["source", "", "100.0%", "0 ms"], ["self-adapt", "50.0%", "87.5%", "0 ms"]]


def test_without_labels_the_verdict_says_what_was_changed_and_not_what_is_right() -> None:
    rows = [MethodChange("source", 0, 0.8, 200), MethodChange("san", 0.05, 0.8, 240),
            MethodChange("self-adapt", 0.123, 0.9, 4800)]  # fmt: skip
    text = change_verdict(rows)
    for part in ("24 times", "12.3% of the pixels", "SaN took 1.2 times", "no number says"):
        assert part in text
    assert "SaN took" not in change_verdict([rows[0], rows[2]]), "of networks that have none"


def test_a_note_on_every_image_is_shown_once(tmp_path: Path) -> None:
    for name in "ab":
        to_pil(random_image(24, 32)).save(tmp_path / f"{name}.png")
    images = [tmp_path / "a.png", tmp_path / "b.png"]
    model = seeded(TinyNet)
    model.interface = None  # so that how its input is normalised is assumed, and noted
    report, _ = demo_images(tmp_path / "out", images, model, CLASSES, steps=1)
    notes = re.findall(r'<p class="note">Note: (.*?)</p>', report.read_text())
    assert any("mean" in note for note in notes)
    assert len(notes) == len(set(notes))


def test_a_network_with_one_output_is_shown_as_two_classes(tmp_path: Path) -> None:
    to_pil(random_image(24, 32)).save(tmp_path / "street.png")
    model = seeded(lambda: TinyNet(1))
    report, _ = demo_images(tmp_path / "out", [tmp_path / "street.png"], model, ["crack"], steps=1)
    assert "crack" in report.read_text()
