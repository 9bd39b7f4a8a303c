"""The web app without a browser: what it shows, what it refuses, what it lets through."""

import base64
import io
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from torch import Tensor, nn

from conftest import TinyNet, assert_same, random_image, seeded, snapshot
from selfadapt import SelfAdapt
from selfadapt.app import charts, viewer
from selfadapt.app.jobs import JobQueue
from selfadapt.app.limits import MAX_FETCHED, Limits
from selfadapt.app.masks import masks_zip
from selfadapt.app.networks import Networks, OfferedNetwork, check_online
from selfadapt.app.page import Page
from selfadapt.app.requests import SETTINGS, Request, defaults, validated
from selfadapt.app.run import Outcome, mean_iou, run
from selfadapt.app.uploads import Upload, read_upload
from selfadapt.cli import main
from selfadapt.cost import Estimate
from selfadapt.images import to_pil
from selfadapt.labels import STREETS_9
from selfadapt.method import UNLIKE, Method, Stopped
from selfadapt.models import open_model
from selfadapt.models.trained import TRAINED
from selfadapt.streets import render

httpx = pytest.importorskip("httpx")
pytest.importorskip("gradio", reason="needs the extra app")
from serving import LIMITS, Served, served  # noqa: E402

OFFERED = ("source", "san", "tta", "tent", "memo", "self-adapt")
GOOD = {"alpha": 0.3, "psi": 0.7, "lr": 0.05, "steps": 3, "scales": [0.5, 0.25]}
NAMES = ("road", "car", "sky")


def png(height: int = 32, width: int = 48) -> bytes:
    file = io.BytesIO()
    to_pil(random_image(height, width)).save(file, "PNG")
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that says it is huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def outcome(**given: Any) -> Outcome:
    label = torch.tensor([[0, 0, 1], [0, 2, 2]])
    fields: dict[str, Any] = {
        "method": "self-adapt", "settings": {"alpha": 0.3, "scales": (0.25, 0.5)}, "names": NAMES,
        "label": label, "confidence": torch.full((2, 3), 0.5), "pseudo_label": None,
        "source_label": torch.tensor([[0, 0, 1], [0, 0, 2]]), "losses": (0.5, 0.25),
        "seconds": 1.5, "notes": (),
    }  # fmt: skip
    return Outcome(**fields | given)


# What may come in


def test_an_upload_is_read_and_scaled_down(tmp_path: Path) -> None:
    path = tmp_path / "street.png"
    path.write_bytes(png(100, 150))
    whole = read_upload(path, Limits(max_pixels=100 * 150))
    assert torch.equal(whole.image, random_image(100, 150))
    small = read_upload(path, Limits(max_pixels=60 * 80))
    assert small.size == (100, 150)
    assert small.image.shape[1] * small.image.shape[2] <= 60 * 80
    assert small.image.shape[1:] == (56, 84)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an image file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image file"),
        (b"GIF89a" + b"\1" * 40, "not an image file"),
        (png()[:200], "cut off or damaged"),
        (png(8, 48), "at least 16 pixels"),
        (png(150, 160), "may have 0.02 million pixels, this one has 160x150"),
        (b"\0" * 60_000, r"may have 0.05 MB, this one has 0\.1"),
        (png(16, 1200), "too narrow"),
    ],
)
def test_an_upload_that_cannot_be_used_is_refused(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "street.png"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_upload(path, LIMITS)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("side", [1_000, 20_000, 2_000_000])
def test_a_bomb_is_refused_before_it_is_decoded(
    side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(PILImage.Image, "load", load)
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb(side, side))
    with pytest.raises(ValueError, match="million pixels"):
        read_upload(path, LIMITS)


def jpeg_of_scans(number: int) -> bytes:
    """Return a JPEG with a thumbnail of scans of its own, whose last scan is repeated."""
    file = io.BytesIO()
    to_pil(random_image(32, 48)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last = content[content.rfind(b"\xff\xda") : -2]
    thumbnail = b"\xff\xd8" + b"\xff\xda" * 200
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    repeated = last * (number - content.count(b"\xff\xda"))
    return content[:2] + segment + content[2:-2] + repeated + content[-2:]


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "street.jpg"
    for content in (jpeg_of_scans(100), jpeg_of_scans(100) + b"\xff\xda" * 200):
        path.write_bytes(content)
        assert read_upload(path, LIMITS).size == (32, 48)
    path.write_bytes(jpeg_of_scans(101))
    with pytest.raises(ValueError, match="this JPEG has 101 scans, it may have 100"):
        read_upload(path, LIMITS)
    path.write_bytes(b"\xff\xd8" + b"\xff\xe0\0\2" * 10_000)
    with pytest.raises(ValueError, match="cut off or damaged"):
        read_upload(path, LIMITS)


def tiff(width: int, height: int, tags: dict[int, int], offsets: int, number: int = 1) -> bytes:
    """Return a black TIFF whose tiles or strips are all the same bytes."""
    data = zlib.compress(bytes(64 * 64)) if tags[259] == 8 else bytes(64 * 64)
    data += bytes(len(data) % 2)
    pointers = struct.pack("<I", 8) * number + struct.pack("<I", len(data)) * number
    start = 8 + len(data)
    values = {256: width, 257: height, 258: 8, 262: 1, 277: 1} | tags
    entries = [(tag, 1, value) for tag, value in values.items()]
    lengths = {273: 279, 324: 325}[offsets]
    entries += [
        (offsets, number, start if number > 1 else 8),
        (lengths, number, start + 4 * number if number > 1 else len(data)),
    ]
    directory = b"".join(struct.pack("<HHII", tag, 4, n, v) for tag, n, v in sorted(entries))
    header = b"II*\0" + struct.pack("<I", start + len(pointers))
    return header + data + pointers + struct.pack("<H", len(entries)) + directory + bytes(4)


@pytest.mark.parametrize(
    ("tags", "offsets", "number"),
    [
        ({259: 8, 322: 32768, 323: 32768}, 324, 1),  # one huge tile
        ({259: 8, 322: 16, 323: 2**22}, 324, 3),  # several
        ({259: 1, 278: 31}, 273, 500),  # strips over the same pixels
        ({259: 1, 322: 1, 323: 1}, 324, 32 * 48 + 1),
    ],
)
def test_a_tiff_with_more_pixels_in_its_tiles_is_refused(
    tags: dict[int, int], offsets: int, number: int, tmp_path: Path
) -> None:
    path = tmp_path / "street.tif"
    path.write_bytes(tiff(48, 32, tags, offsets, number))
    with pytest.raises(ValueError, match="the tiles of this TIFF have many more pixels"):
        read_upload(path, LIMITS)


@pytest.mark.parametrize(
    ("tags", "offsets"),
    [({259: 8, 322: 64, 323: 64}, 324), ({259: 8}, 273), ({259: 1, 278: 2**32 - 1}, 273)],
)
def test_a_tiff_may_have_tiles_that_reach_over_its_edges(
    tags: dict[int, int], offsets: int, tmp_path: Path
) -> None:
    path = tmp_path / "street.tif"
    path.write_bytes(tiff(48, 32, tags, offsets))
    assert read_upload(path, LIMITS).size == (32, 48)


def test_an_image_that_is_too_narrow_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(PILImage.Image, "load", load)
    path = tmp_path / "narrow.png"
    path.write_bytes(bomb(16, 1200))
    with pytest.raises(ValueError, match="too narrow"):
        read_upload(path, LIMITS)


@pytest.mark.parametrize("wrong", [{"megabytes": 0}, {"megapixels": -1}, {"max_pixels": 3}])
def test_limits_are_numbers_that_make_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a"):
        Limits(**wrong)


# What may be asked for


def test_the_first_method_has_the_settings_and_others_share_some() -> None:
    request = validated("tiny", OFFERED, "self-adapt", ["tent", "san", "memo"], GOOD)
    assert request.methods == {
        "self-adapt": {"alpha": 0.3, "psi": 0.7, "lr": 0.05, "steps": 3, "scales": (0.25, 0.5)},
        "tent": {"alpha": 0.3},
        "san": {"alpha": 0.3},
        "memo": {"alpha": 0.3, "scales": (0.25, 0.5)},
    }
    empty = GOOD | {"lr": None, "scales": None}  # fields that are not seen
    assert validated("tiny", OFFERED, "san", ["san"], empty).methods == {"san": {"alpha": 0.3}}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"method": "ensemble"}, "unknown method 'ensemble'"),
        ({"method": "self-adpt"}, "did you mean 'self-adapt'"),
        ({"method": 3}, "unknown method '3'"),
        ({"method": "x" * 10_000}, "unknown method 'x{40}'"),
        ({"others": "tent"}, "must be a list"),
        ({"others": None}, "must be a list"),
        ({"others": ["tent", "p-bn"]}, "unknown method 'p-bn'"),
        ({"others": ["source", "san", "tta", "tent"]}, "4 methods can be run at once, got 5"),
        ({"alpha": 1.5}, "alpha must be a number, 0 to 1, got 1.5"),
        ({"alpha": math.nan}, "alpha must be"),
        ({"alpha": "0.3"}, "alpha must be"),
        ({"alpha": None}, "alpha must be"),
        ({"alpha": {"layer1": 0.3}}, "alpha must be"),
        ({"psi": -0.1}, "psi must be"),
        ({"lr": 0}, "lr must be"),
        ({"lr": math.inf}, "lr must be"),
        ({"steps": 51}, "steps must be a whole number, 0 to 50, got 51"),
        ({"steps": 2.5}, "steps must be"),
        ({"steps": True}, "steps must be"),
        ({"scales": []}, "scales must be"),
        ({"scales": 0.5}, "scales must be"),
        ({"scales": [0.5] * 100}, "scales must be"),
        ({"scales": [100]}, "each scale must be a number, 0.25 to 1.5"),
        ({"scales": ["0.5"]}, "each scale must be"),
        ({"scales": [[0.5]]}, "each scale must be"),
    ],
)
def test_what_is_not_on_offer_is_refused(changed: dict[str, Any], words: str) -> None:
    asked = {"method": "self-adapt", "others": [], **GOOD} | changed
    settings = {name: asked[name] for name in SETTINGS}
    with pytest.raises(ValueError, match=words) as caught:
        validated("tiny", OFFERED, asked["method"], asked["others"], settings)
    assert len(str(caught.value)) < 700


def test_defaults_are_the_methods_with_what_was_chosen_for_the_network() -> None:
    chosen = {"alpha": 0.3, "lr": 0.05}
    ours = defaults("self-adapt", chosen)
    assert (ours["alpha"], ours["lr"], ours["steps"], ours["psi"]) == (0.3, 0.05, 5, 0.7)
    assert defaults("self-adapt", {})["lr"] == 0.08
    assert defaults("tent", chosen) == {"alpha": 0.3, "lr": 0.01, "steps": 10}
    assert defaults("source", chosen) == {}


# Networks on offer


def test_no_network_is_opened_that_is_not_listed(tiny: nn.Module) -> None:
    networks = Networks({"tiny": OfferedNetwork(tiny)})
    assert networks.get("tiny").model is tiny
    unlisted = ("/etc/passwd", "hf:someone/something", "streets", None, ["tiny"], {"path": "x"}, 3)
    for name in unlisted:
        with pytest.raises(ValueError, match="unknown network"):
            networks.get(name)
    listed = next(iter(TRAINED))
    assert [*networks] == ["tiny", *TRAINED]
    with pytest.raises(ValueError, match="unknown network"):
        Networks({"tiny": OfferedNetwork(tiny)}, fetch=False).get(listed)


def test_a_listed_network_is_fetched_once_and_few_are_kept(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def opening(name: str) -> nn.Module:
        opened.append(name)
        return tiny

    monkeypatch.setattr("selfadapt.app.networks.check_online", lambda address: None)
    monkeypatch.setattr("selfadapt.app.networks.open_model", opening)
    networks, names = Networks({"tiny": OfferedNetwork(tiny)}), [*TRAINED][: MAX_FETCHED + 1]
    for name in (names[0], *names):
        assert "self-adapt" in networks.get(name).methods
    assert opened == names
    networks.get(names[-1])
    networks.get(names[0])
    assert opened == [*names, names[0]]


def test_what_cannot_be_fetched_is_refused_in_words(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise OSError("the disk is full\nTraceback ...")

    networks, name = Networks({"tiny": OfferedNetwork(tiny)}), next(iter(TRAINED))
    monkeypatch.setattr("selfadapt.app.networks.HOSTS", {"torchvision": "http://127.0.0.1:1"})
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1 cannot be reached from here"):
        networks.get(name)
    monkeypatch.setattr("selfadapt.app.networks.check_online", lambda address: None)
    monkeypatch.setattr("selfadapt.app.networks.open_model", fail)
    with pytest.raises(ValueError, match=r"could not be downloaded: the disk is full$"):
        networks.get(name)


def test_a_server_that_answers_anything_is_reached(server: Served) -> None:
    check_online(server.address)
    check_online(f"{server.address}/nothing")


# What is run


def test_methods_are_run_one_after_the_other_and_told_of(image: Tensor) -> None:
    tiny = seeded(TinyNet, seed=3)  # SaN changes what it sees, so it is adapted
    before, calls = snapshot(tiny), []
    methods = {"self-adapt": {"steps": 2, "alpha": 0.3}, "san": {"alpha": 0.3}}
    request = Request(model="tiny", methods=methods)
    outcomes = list(run(OfferedNetwork(tiny), request, image, lambda *told: calls.append(told)))
    assert [(name, step, steps) for name, step, steps, _ in calls] == [
        ("self-adapt", 0, 2), ("self-adapt", 1, 2), ("self-adapt", 2, 2), ("san", 0, 0),
    ]  # fmt: skip
    expected = SelfAdapt(tiny, steps=2, alpha=0.3)(image)
    assert torch.equal(outcomes[0].label, expected.label)
    assert outcomes[0].losses == expected.losses == tuple(loss for *_, loss in calls[1:3])
    assert outcomes[0].pseudo_label is not None
    assert outcomes[1].pseudo_label is None
    assert outcomes[0].names == ("class 0", "class 1", "class 2")
    assert_same(before, snapshot(tiny))


def test_a_stop_ends_at_the_next_step_and_leaves_no_trace(image: Tensor) -> None:
    tiny = seeded(TinyNet, seed=3)
    queue, before, taken = JobQueue(), snapshot(tiny), []

    def watch(name: str, step: int, steps: int, loss: float | None) -> None:
        taken.append(step)
        if step == 2:
            assert queue.stop_session("me")

    request = Request(model="tiny", methods={"self-adapt": {"steps": 9, "alpha": 0.5}, "tent": {}})
    with queue.job("me") as job:
        queue.enqueue(job).result(0)
        assert not queue.stop_session("somebody else")
        with pytest.raises(Stopped):
            list(run(OfferedNetwork(tiny), request, image, watch, job.stop))
    assert taken == [0, 1, 2]
    assert_same(before, snapshot(tiny))
    assert not queue.stop_session("me")
    with queue.job("me") as job:
        assert not job.stop.is_set()


def test_a_network_offers_the_methods_it_takes(tiny: nn.Module) -> None:
    assert "self-adapt" in OfferedNetwork(tiny).methods
    assert "ensemble" not in OfferedNetwork(tiny).methods
    plain = nn.Conv2d(3, 2, 1)
    assert "tent" not in OfferedNetwork(plain).methods
    assert "source" in OfferedNetwork(plain).methods
    with pytest.raises(TypeError, match="model must be a"):
        OfferedNetwork("streets")


# What is shown


def unpacked(layer: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(layer["ids"])), "<u2")


def test_the_viewer_is_given_the_photo_and_masks_as_numbers() -> None:
    pseudo = torch.tensor([[0, 255, 1], [0, -1, 2]])
    result = outcome(pseudo_label=pseudo, confidence=torch.tensor([[0.5, 0.25, 1]] * 2))
    given = viewer.viewer_data(Upload(torch.rand(3, 2, 3), (4, 6)), [result], "six pixels")
    layers = {layer["name"]: layer for layer in given["layers"]}
    assert [*layers] == ["as trained", "self-adapt", "pseudo-label of self-adapt"]
    assert unpacked(layers["as trained"]).tolist() == [0, 0, 1, 0, 0, 2]
    assert unpacked(layers["self-adapt"]).tolist() == [0, 0, 1, 0, 2, 2]
    none = viewer.NO_CLASS
    assert unpacked(layers["pseudo-label of self-adapt"]).tolist() == [0, none, 1, 0, none, 2]
    percent = zlib.decompress(base64.b64decode(layers["self-adapt"]["confidence"]))
    assert list(percent) == [50, 25, 100] * 2
    photo = base64.b64decode(given["photo"].removeprefix("data:image/jpeg;base64,"))
    assert PILImage.open(io.BytesIO(photo)).size == (given["width"], given["height"]) == (3, 2)
    json.dumps(given)


def test_large_maps_are_thinned_out_for_the_page() -> None:
    label = torch.arange(3)[None, :, None].expand(1, 3, 1000).reshape(1, 3000).repeat(2, 1)
    result = outcome(label=label, confidence=torch.rand(2, 3000), source_label=None)
    given = viewer.viewer_data(Upload(torch.rand(3, 2, 3000), (2, 3000)), [result], "wide")
    assert (given["width"], given["height"]) == (1600, 1)
    (layer,) = given["layers"]
    assert np.bincount(unpacked(layer)).tolist() == [533, 534, 533]


def test_a_rendered_street_is_scored_against_its_exact_labels() -> None:
    exact = torch.tensor([[0, 6, 8, 8]])
    names = ("sky", "wall", *STREETS_9[:6], *STREETS_9[7:])
    index = {name: number for number, name in enumerate(names)}
    label = torch.tensor([[index["road"], index["wall"], index["car"], index["road"]]])
    assert mean_iou(label, exact, names) == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert mean_iou(label, exact, names[1:]) is None
    right = torch.tensor([[index["road"], index["sky"], index["car"], index["car"]]])
    result = outcome(label=right, source_label=label, names=names)
    assert "33.3 &rarr; 100.0 % mIoU" in charts.summary(result, exact)
    assert "mIoU" not in charts.summary(result)


def test_an_image_unlike_the_training_images_is_warned_of() -> None:
    text = charts.summary(outcome(notes=(UNLIKE, "another")))
    assert '<p class="warning">this image looks unlike' in text
    assert text.count("unlike") == 1
    assert "<li>another</li>" in text
    assert "warning" not in charts.summary(outcome())


def test_the_legend_leaves_out_classes_of_a_few_pixels_that_stay() -> None:
    before, after = torch.zeros(100, 100).long(), torch.zeros(100, 100).long()
    before[0, :30], after[0, :28] = 1, 1  # 0.3 % before and after
    before[1, :10], after[1, :49] = 2, 2  # 0.1 % and 0.5 %
    specks = outcome(names=("road", "pole", "sign"), label=after, source_label=before)
    table = charts.legend(specks)
    assert "pole" not in table
    assert "<td>0.1%</td><td>0.5%</td><td>+0.4</td>" in table
    two = outcome(names=("background", "lesion"), label=after.clamp(max=1), source_label=before)
    assert "lesion" in charts.legend(replace(two, source_label=before.clamp(max=1)))


def test_the_legend_says_what_classes_had_and_have() -> None:
    table = charts.legend(outcome())
    assert "road</td><td>66.7%</td><td>50.0%</td><td>-16.7</td>" in table
    assert "rgb(128, 64, 128)" in table
    unseen = outcome(label=torch.zeros(2, 3).long(), source_label=None)
    assert "car" not in charts.legend(unseen)
    assert "<td>-</td><td>100.0%</td><td></td>" in charts.legend(unseen)
    assert "<script" not in charts.legend(outcome(names=("<script>", "b", "c")))


def test_facts_are_in_words() -> None:
    text = charts.summary(outcome(notes=("a < b",)))
    assert "alpha 0.3, scales 0.25/0.5" in text
    assert "16.7% of the pixels changed" in text
    assert "<li>a &lt; b</li>" in text


@pytest.mark.parametrize("losses", [(1.0,), (0.0, 0.0), (3.0, 1.0, 2.0), (-1.0, -2.0)])
def test_the_curve_has_a_dot_for_each_step_within_the_picture(losses: tuple[float, ...]) -> None:
    picture = charts.curve(losses)
    assert picture.count("<circle") == len(losses)
    for y in (float(part.split('"')[0]) for part in picture.split('cy="')[1:]):
        assert 0 <= y <= charts.HEIGHT


def test_there_is_no_curve_without_losses() -> None:
    assert "No gradient steps" in charts.curve(())
    assert "not finite" in charts.curve((1.0, math.inf))


def test_masks_come_at_the_size_of_the_image() -> None:
    content = masks_zip("tiny", [outcome(losses=(1.0, math.nan)), outcome(method="san")], (4, 6))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert sorted(archive.namelist()) == [
            "about.json", "san_color.png", "san_label.png", "self-adapt_color.png",
            "self-adapt_label.png", "source_color.png", "source_label.png",
        ]  # fmt: skip
        label = np.array(PILImage.open(archive.open("self-adapt_label.png")))
        color = np.array(PILImage.open(archive.open("self-adapt_color.png")))
        about = json.loads(archive.read("about.json"))
    assert label.dtype == np.uint8
    assert np.array_equal(label, np.kron([[0, 0, 1], [0, 2, 2]], np.ones((2, 2))))
    assert tuple(color[0, 0]) == (128, 64, 128)
    assert about["classes"][1] == {"id": 1, "name": "car", "color": [0, 0, 142]}
    assert about["methods"][0]["losses"] == [1.0, None]


# What the server lets through


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def asking(file: str, **changed: Any) -> list[Any]:
    """Return what the page sends to have an image adapted to."""
    asked = {
        "image": {"path": file, "meta": {"_type": "gradio.FileData"}},
        "model": "tiny", "method": "self-adapt", "others": [], **GOOD,
    }  # fmt: skip
    return list((asked | changed).values())


def test_an_uploaded_image_is_adapted_to_over_http(server: Served) -> None:
    before = snapshot(server.model)
    (file,) = server.upload(png()).json()
    answer = server.call("adapt", asking(file, others=["san"]))
    assert answer["success"], answer
    status, shown, report, download = answer["output"]["data"]
    assert "Done in" in status
    assert shown["title"] == "48x32 pixels"
    assert [layer["name"] for layer in shown["layers"][:3]] == ["as trained", "self-adapt", "san"]
    assert report.count('class="method"') == 2
    masks = server.browser.get(download["value"]["url"])
    with zipfile.ZipFile(io.BytesIO(masks.content)) as archive:
        assert "san_label.png" in archive.namelist()
    assert_same(before, snapshot(server.model))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"image": None}, "there is no image yet"),
        ({"image": "street.png"}, None),
        ({"model": "hf:someone/something"}, "unknown network"),
        ({"method": "ensemble"}, "unknown method"),
        ({"steps": 10**9}, "steps must be"),
        ({"scales": [0.001]}, "each scale must be"),
        ({"alpha": {"x": 1}}, "alpha must be"),
    ],
)
def test_what_a_client_makes_up_is_refused_over_http(
    server: Served, changed: dict[str, Any], words: str | None
) -> None:
    (file,) = server.upload(png()).json()
    answer = server.call("adapt", asking(file, **changed))
    assert not answer["success"]
    assert words is None or words in answer["output"]["error"]
    for leak in ("Traceback", ".py", os.sep + "tmp", "root:"):
        assert leak not in str(answer), leak


def test_a_bad_image_is_refused_as_it_is_dropped(server: Served) -> None:
    for content, words in ((b"text", "not an image file"), (png()[:200], "cut off or damaged")):
        (file,) = server.upload(content).json()
        image, status = server.call("check", asking(file))["output"]["data"]
        assert image is None
        assert words in status
        assert os.sep + "tmp" not in status


def test_an_image_is_told_how_long_it_will_take(server: Served) -> None:
    (file,) = server.upload(png()).json()
    image, status = server.call("check", asking(file, steps=3))["output"]["data"]
    assert image == {"__type__": "update"}
    assert re.search(r"48x32 pixels. It will take <b>(less than a second|about [\d.]+ s)<", status)
    image, status = server.call("check", asking(file, steps=99))["output"]["data"]
    assert image == {"__type__": "update"}
    assert "steps must be a whole number, 0 to 50, got 99" in status


def test_the_page_says_what_would_be_faster_where_it_takes_long(
    tiny: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    estimate = Estimate(seconds=60, plain_seconds=1, step_seconds=5, num_bytes=0)
    monkeypatch.setattr(Method, "estimate", lambda *_: estimate)
    page = Page(Networks({"tiny": OfferedNetwork(tiny)}), LIMITS, tmp_path, JobQueue())
    upload = Upload(random_image(32, 48), (32, 48))
    request = validated("tiny", OFFERED, "self-adapt", [], GOOD | {"steps": 10})
    text = page._estimate(upload, request)
    assert "about 60 s</b> here. With 5 steps about 35 s, with the method san about 2.0 s" in text
    request = validated("tiny", OFFERED, "san", [], GOOD)
    assert "With" not in page._estimate(upload, request)


def test_a_tiff_becomes_a_png_that_browsers_show(server: Served) -> None:
    file = io.BytesIO()
    to_pil(random_image(32, 48)).save(file, "TIFF")
    (uploaded,) = server.upload(file.getvalue(), "street.tif").json()
    image, status = server.call("check", asking(uploaded))["output"]["data"]
    assert "48x32 pixels" in status
    shown = server.browser.get(image["url"]).content
    with PILImage.open(io.BytesIO(shown)) as picture:
        assert picture.format == "PNG"
        assert np.array_equal(np.array(picture), np.array(to_pil(random_image(32, 48))))
    assert server.call("adapt", asking(image["path"]))["success"]


def test_the_page_begins_with_a_street_that_was_adapted_to(server: Served) -> None:
    for _ in range(2):
        shown, report, _ = server.call("example", [])["output"]["data"]
        assert shown["title"].startswith("Rendered street: night, number")
        assert shown["right"] == "self-adapt"
        assert "No gradient steps" not in report


def test_a_rendered_street_is_recognised_and_scored(tmp_path: Path) -> None:
    page = Page(
        Networks({"streets": OfferedNetwork(open_model("streets"))}),
        LIMITS,
        tmp_path,
        JobQueue(),
    )
    file = Path(page.street("rain", 3))
    upload = read_upload(file, LIMITS)
    request = Request(model="streets", methods={"san": {"alpha": 0.3}})
    (result,) = run(page.networks.get("streets"), request, upload.image)
    shown, report, _ = page._results(request, upload, [result])
    exact = torch.from_numpy(render("rain", 3, *upload.size)[1])
    score = 100 * mean_iou(result.label, exact, result.names)
    assert f"&rarr; {score:.1f} % mIoU" in report
    assert shown["layers"][-1]["name"] == "exact labels"
    assert np.array_equal(unpacked(shown["layers"][-1]), exact.flatten())
    photo = Upload(random_image(*upload.size), upload.size)
    shown, report, _ = page._results(request, photo, [result])
    assert "mIoU" not in report
    assert shown["layers"][-1]["name"] == "san"


def test_a_network_that_cannot_be_fetched_leaves_the_first(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfadapt.app.networks.HOSTS", {"hf": "http://127.0.0.1:1"})
    name = next(name for name in TRAINED if name.startswith("hf:"))
    model, about, _, method, *_ = server.call("select_network", [name])["output"]["data"]
    assert model["value"] == "tiny"
    assert "cannot be reached from here" in about
    assert method["value"] == "self-adapt"
    assert name not in about
    for name in ("hf:someone/something", "/etc/passwd", None, 7, {"a": 1}):
        _, about, *_ = server.call("select_network", [name])["output"]["data"]
        assert "unknown network" in about


def test_networks_are_fetched_for_this_machine_alone() -> None:
    with served(local=False) as running:
        config = running.browser.get(f"{running.address}/config").text
    assert next(iter(TRAINED)) not in config


def test_other_names_and_pages_from_elsewhere_are_refused(server: Served) -> None:
    for headers in (
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ):
        assert httpx.get(server.address, headers=headers).status_code == 403
    assert httpx.get(server.address, headers={"origin": server.address}).status_code == 200
    local = server.address.replace("127.0.0.1", "localhost")
    assert httpx.get(server.address, headers={"host": local[7:]}).status_code == 200


def test_the_page_keeps_to_itself(server: Served) -> None:
    answer = httpx.get(server.address)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "fonts.googleapis" not in answer.text
    config = httpx.get(f"{server.address}/config").json()
    assert not config["analytics_enabled"]
    assert str(Path.home()) not in json.dumps(config["layout"])


def test_files_are_gone_when_the_server_ends() -> None:
    before = os.environ.get("GRADIO_TEMP_DIR")
    with served() as running:
        (file,) = running.upload(png()).json()
        assert Path(file).is_file()
        folder = Path(file).parents[1]
        running.call("adapt", asking(file))
        assert folder.name.startswith("selfadapt-")
    assert not folder.exists()
    assert os.environ.get("GRADIO_TEMP_DIR") == before


def test_a_network_that_fails_is_told_of_without_its_details(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("secret detail")

    (file,) = server.upload(png()).json()
    monkeypatch.setattr("selfadapt.app.page.run", fail)
    answer = server.call("adapt", asking(file))
    assert answer["output"]["error"] == "internal error; see the log of the server"
    assert "secret" not in str(answer)


# The verb


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nothing.safetensors"], "there is no file nothing.safetensors"),
        (["--model", "deeplabv1_resnet50"], "comes without weights"),
        (["--port", "70000"], "port must be a whole number, 0 to 65535, got 70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on port"),
        (["--max-mb", "0"], "max_mb must be a number, 0.01 to 1024, got 0.0"),
        (["--max-megapixels", "nan"], "max_megapixels"),
        (["--max-pixels", "0"], "max_pixels must be a whole number, 256 or more, got 0"),
        (["--max-pixels", "-5"], "max_pixels must be a whole number, 256 or more, got -5"),
        (["--device", "abacus"], "there is no device 'abacus'"),
    ],
)
def test_serving_with_wrong_words_ends_with_one_line(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("selfadapt.app.server.uvicorn", None)
    with pytest.raises(SystemExit) as caught:
        main(["serve", *words])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_port_that_is_taken_is_said_so(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    port = server.address.rpartition(":")[2]
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--port", port])
    assert caught.value.code == 2
    assert "already in use); choose another with --port" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_a_server_cleanly_while_a_page_is_open(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "selfadapt", "serve", "--port", "0", "--host", "0.0.0.0"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said = process.stdout.readline()
        address = re.search(r"http://0\.0\.0\.0:\d+", said)[0].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(address, timeout=60).status_code == 200
        assert len(list(tmp_path.glob("selfadapt-*"))) == 1
        with httpx.stream("GET", f"{address}/gradio_api/heartbeat/abc", timeout=60) as page:
            next(page.iter_lines())
            process.send_signal(signal.SIGINT)
            err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 0
    assert err.splitlines() == [
        "note: everyone who can reach 0.0.0.0 can use the app",
        "note: the interface for programs is off, it needs a token: set SELFADAPT_TOKEN",
        "stopped",
    ]
    assert list(tmp_path.glob("selfadapt-*")) == []
