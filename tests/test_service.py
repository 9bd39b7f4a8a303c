"""The interface for programs: what it answers, what it refuses, and the queue it shares."""

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from conftest import assert_same, needs_data, random_image, snapshot
from selfadapt import create_method
from selfadapt.app.jobs import PROGRAMS, JobQueue, QueueFull
from selfadapt.app.limits import MAX_HEADER, MAX_QUEUE, Limits
from selfadapt.app.requests import QUERY_SETTINGS, defaults
from selfadapt.cli import main
from selfadapt.images import to_pil
from selfadapt.method import Method, Stopped
from selfadapt.result import Result

httpx = pytest.importorskip("httpx")
pytest.importorskip("gradio", reason="needs the extra app")
from test_app import asking, bomb, png  # noqa: E402

from selfadapt.app.answers import choose_format, headers_of, run_lengths  # noqa: E402
from selfadapt.app.asgi import Refused  # noqa: E402
from selfadapt.app.service import check_token  # noqa: E402
from serving import LIMITS, Served, served  # noqa: E402

TOKEN = "a-token-of-enough-length"
LEAKS = ("Traceback", ".py", "/tmp", "/home", "root:", "site-packages")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        running.call("example", [])  # it is computed from the start on
        yield running


def post(server: Served, content: Any = None, headers: Any = None, **query: Any) -> Any:
    """Send an image as a program does."""
    kind = {"content-type": "image/png"} | (headers or {})
    content = png() if content is None else content
    url = f"{server.address}/v1/segment"
    return httpx.post(url, content=content, headers=kind, params=query, timeout=60)


def get(server: Served, path: str, **headers: str) -> Any:
    return httpx.get(f"{server.address}/v1/{path}", headers=headers, timeout=60)


def expected(server: Served, content: bytes, method: str = "self-adapt", **settings: Any) -> Result:
    """Return the result of the library."""
    picture = PILImage.open(io.BytesIO(content))
    made = create_method(method, server.model, **settings)
    return made(picture)


def decoded(rle: dict[str, Any]) -> np.ndarray:
    """Decode a mask, pixel by pixel."""
    pixels: list[int] = []
    for index, count in enumerate(rle["counts"]):
        pixels += [index % 2] * count
    height, width = rle["size"]
    return np.array(pixels).reshape(width, height).T


def wait_for(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@contextmanager
def slow_network(server: Served, seconds: float) -> Iterator[None]:
    server.model.delay = seconds
    try:
        yield
    finally:
        server.model.delay = 0.0


# Answers

SETTINGS = [
    ("self-adapt", {"steps": "2", "alpha": "0.3"}, {"steps": 2, "alpha": 0.3}),
    ("self-adapt", {"steps": "1", "mode": "paper"}, {"steps": 1, "mode": "paper"}),
    ("self-adapt", {"steps": "1", "psi": "0.9", "lr": "0.01", "scales": "0.5,1.0"},
     {"steps": 1, "psi": 0.9, "lr": 0.01, "scales": (0.5, 1.0)}),
    ("san", {"alpha": "0.5"}, {"alpha": 0.5}),
    ("tta", {"scales": "1"}, {"scales": (1.0,)}),
    ("tent", {"steps": "2"}, {"steps": 2}),
    ("source", {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "query", "settings"), SETTINGS)
@pytest.mark.parametrize("size", [(32, 48), (100, 150)], ids=["small", "scaled down"])
def test_every_format_has_the_result_of_the_library(
    server: Served,
    method: str,
    query: dict[str, str],
    settings: dict[str, Any],
    size: tuple[int, int],
) -> None:
    content, before = png(*size), snapshot(server.model)
    if settings.get("mode") != "official":
        settings = settings | {"max_pixels": LIMITS.max_pixels}
    result = expected(server, content, method, **settings)
    label = result.label.numpy()

    answer = post(server, content, method=method, format="png", **query)
    assert answer.status_code == 200, answer.text
    picture = PILImage.open(io.BytesIO(answer.content))
    assert (picture.format, picture.mode, answer.headers["content-type"]) == (
        "PNG", "P", "image/png",
    )  # fmt: skip
    assert np.array_equal(np.asarray(picture), label)
    assert json.loads(answer.headers["selfadapt-notes"]) == list(result.notes)
    assert float(answer.headers["selfadapt-seconds"]) > 0
    has_quality = "selfadapt-quality" in answer.headers
    assert has_quality == (result.quality is not None)

    answer = post(server, content, method=method, format="npz", probs="true", **query)
    assert answer.headers["content-type"] == "application/x-npz"
    arrays = np.load(io.BytesIO(answer.content))
    assert np.array_equal(arrays["label"], label)
    assert arrays["label"].dtype == np.uint8
    assert np.array_equal(arrays["confidence"], result.confidence.numpy().astype(np.float16))
    assert np.array_equal(arrays["probs"], result.probs.numpy().astype(np.float16))
    assert arrays["classes"].tolist() == ["class 0", "class 1", "class 2"]

    content_of = post(server, content, method=method, format="json", **query).json()
    assert (content_of["height"], content_of["width"]) == size
    for entry in content_of["classes"]:
        assert np.array_equal(decoded(entry["rle"]), label == entry["id"])
        assert entry["share"] == pytest.approx((label == entry["id"]).mean(), abs=1e-6)
    assert content_of["losses"] == list(result.losses)
    assert content_of["quality"] == result.quality
    assert content_of["notes"] == list(result.notes)
    assert content_of["method"] == method
    assert {name: content_of["settings"][name] for name in query} == {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
        if name in query
    }
    assert_same(before, snapshot(server.model))


def test_official_mode_runs_within_the_servers_limit(server: Served) -> None:
    result = expected(server, png(), mode="official", steps=1)
    answer = post(server, mode="official", steps=1)
    assert np.array_equal(np.asarray(PILImage.open(io.BytesIO(answer.content))), result.label)
    answer = post(server, png(100, 150), mode="official")
    assert answer.status_code == 413
    assert "in official mode an image may have 6144 pixels here, this one has 15000" in answer.text


def test_an_image_may_come_as_a_form(server: Served) -> None:
    url = f"{server.address}/v1/segment?method=san"
    answer = httpx.post(url, files={"image": ("street.png", png())}, timeout=60)
    assert (answer.status_code, answer.content) == (200, post(server, method="san").content)


def test_a_method_has_what_was_tuned_for_the_network_unless_told_otherwise(server: Served) -> None:
    from selfadapt.app.networks import Networks, OfferedNetwork
    from selfadapt.app.requests import from_query

    tuned = Networks({"x": OfferedNetwork(server.model, {"alpha": 0.3, "lr": 0.07})}, fetch=False)

    def settings(*query: tuple[str, str]) -> dict[str, Any]:
        [found] = from_query(dict(query), tuned).methods.values()
        return found

    assert settings() == {"alpha": 0.3, "lr": 0.07}
    assert settings(("mode", "paper")) == {"mode": "paper", "alpha": 0.3}
    assert settings(("alpha", "0"), ("lr", "0.5")) == {"alpha": 0, "lr": 0.5}
    assert settings(("method", "san")) == {"alpha": 0.3}
    assert settings(("method", "source")) == {}


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "png"), ("*/*", "png"), ("image/*", "png"), ("image/png", "png"),
        ("application/*", "json"), ("Application/JSON", "json"), ("application/x-npz", "npz"),
        ("text/html, application/json;q=0.9, */*;q=0.1", "json"),
        ("image/png;q=0.5, application/x-npz;q=0.8", "npz"),
        ("image/png;q=x, application/json", "json"),
        ("image/png;q=0, application/json;q=0.1", "json"),
    ],
)  # fmt: skip
def test_the_format_is_the_best_of_those_accepted(accept: str, kind: str) -> None:
    assert choose_format(None, accept) == kind


@pytest.mark.parametrize("accept", ["text/html", "image/webp", "image/png;q=0", ",;,", "x" * 5000])
def test_nothing_else_is_sent_than_what_is_accepted(server: Served, accept: str) -> None:
    with pytest.raises(Refused, match="Accept must have one of image/png, application/json"):
        choose_format(None, accept)
    answer = post(server, headers={"accept": accept})
    assert answer.status_code == 406
    assert len(answer.text) < 400
    assert post(server, headers={"accept": accept}, format="json", method="san").json()


def test_run_lengths_give_every_mask_again() -> None:
    generator = np.random.default_rng(0)
    labels = [generator.integers(0, 3, (7, 5)), np.zeros((3, 4), int), np.ones((1, 1), int)]
    for label in labels:
        for index, counts in enumerate(run_lengths(label, 4)):
            assert all(count > 0 for count in counts[1:])
            assert np.array_equal(decoded({"size": label.shape, "counts": counts}), label == index)


def test_many_classes_have_room_in_a_label() -> None:
    from selfadapt.app.answers import as_npz, as_png

    probs = torch.zeros(300, 4, 4)
    probs[299] = 1
    result, classes = Result(probs=probs), {f"c{i}": (0, 0, 0) for i in range(300)}
    arrays = np.load(io.BytesIO(as_npz(result, classes)))
    assert (arrays["label"].dtype, int(arrays["label"].max())) == (np.int32, 299)
    assert int(np.asarray(PILImage.open(io.BytesIO(as_png(result, classes)))).max()) == 299


def test_headers_are_ascii_and_short() -> None:
    notes = ("größer\r\nset-cookie: x=1", "x" * 10_000, *["\N{SNOWMAN}" * 300] * 9)
    headers = headers_of(Result(probs=torch.rand(2, 3, 3), notes=notes, quality=0.25))
    text = headers["selfadapt-notes"]
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= MAX_HEADER
    assert json.loads(text)[0] == notes[0]
    assert headers["selfadapt-quality"] == "0.250"


def test_the_models_have_what_is_needed_to_ask_for_them(server: Served) -> None:
    [model] = get(server, "models").json()["models"]
    assert model["name"] == "tiny"
    assert [entry["name"] for entry in model["classes"]] == ["class 0", "class 1", "class 2"]
    assert model["default_method"] == "self-adapt"
    assert list(model["methods"]["san"]["settings"]) == ["mode", "alpha"]
    settings = model["methods"]["self-adapt"]["settings"]
    assert list(settings) == list(QUERY_SETTINGS)
    assert settings["steps"]["minimum"] == 0
    assert settings["steps"]["maximum"] == 50
    assert settings["mode"]["default"] == "auto"
    for name, value in defaults("self-adapt", {}).items():
        assert settings[name]["default"] == (list(value) if isinstance(value, tuple) else value)
    given = {name: setting["default"] for name, setting in settings.items()}
    given["scales"] = ",".join(map(str, given["scales"]))
    explicit = post(server, model="tiny", method="self-adapt", **given)
    assert explicit.content == post(server).content


def test_the_health_has_the_queue(server: Served) -> None:
    answer = get(server, "health").json()
    assert answer["ok"]
    assert (answer["running"], answer["waiting"], answer["capacity"]) == (0, 0, MAX_QUEUE)
    assert answer["seconds_per_image"] > 0


def test_the_description_loads_nothing_and_names_every_parameter(server: Served) -> None:
    page = get(server, "docs")
    assert "http:" not in page.text
    assert "https:" not in page.text
    assert "src=" not in page.text
    assert "<script" not in page.text
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    schema = get(server, "openapi.json").json()
    assert set(schema["paths"]) == {"/v1/segment", "/v1/models", "/v1/health"}
    parameters = schema["paths"]["/v1/segment"]["post"]["parameters"]
    names = [parameter["name"] for parameter in parameters]
    assert names == ["model", "method", *QUERY_SETTINGS, "format", "probs"]
    for name in names:
        assert f"<code>{name}</code>" in page.text
    assert "http" not in json.dumps(schema)


# Refusals


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("model=nothing", "unknown network 'nothing'; known: tiny"),
        ("model=", "unknown network ''"),
        ("model=/etc/passwd", "unknown network"),
        ("model=file:///etc/passwd", "unknown network"),
        ("model=hf:someone/something", "unknown network"),
        (f"model={'x' * 5000}", "unknown network 'x{40}'"),
        ("model=tiny&model=tiny", "model must be given once, got it 2 times"),
        ("method=self-adpt", "unknown method 'self-adpt'.* did you mean 'self-adapt'"),
        ("method=ensemble", "unknown method 'ensemble'"),
        ("method=os:system", "unknown method 'os:system'"),
        ("method=", "unknown method ''"),
        ("alfa=0.3", "unknown parameter 'alfa'; did you mean 'alpha'"),
        ("image=http://127.0.0.1/x.png", "unknown parameter 'image'"),
        ("url=file:///etc/passwd", "unknown parameter 'url'"),
        ("max_pixels=10", "unknown parameter 'max_pixels'"),
        ("fast=false", "unknown parameter 'fast'"),
        ("views=x", "unknown parameter 'views'"),
        (f"{'y' * 5000}=1", "unknown parameter 'y{40}'"),
        ("alpha=1.5", "alpha must be a number, 0 to 1, got 1.5"),
        ("alpha=nan", "alpha must be a number, 0 to 1, got nan"),
        ("alpha=-1", "alpha must be"),
        ("alpha=", "alpha must be a number, 0 to 1, got ''"),
        ("alpha=high", "alpha must be a number, 0 to 1, got 'high'"),
        ("alpha=true", "alpha must be"),
        ("alpha={}", "alpha must be"),
        ("alpha=0.1&alpha=0.2", "alpha must be given once"),
        ("psi=2", "psi must be a number, 0 to 1, got 2"),
        ("lr=0", "lr must be a number, 1e-06 to 1.0, got 0"),
        ("lr=inf", "lr must be"),
        ("lr=1e999", "lr must be"),
        ("steps=51", "steps must be a whole number, 0 to 50, got 51"),
        ("steps=2.5", "steps must be a whole number, 0 to 50, got 2.5"),
        ("steps=-1", "steps must be"),
        (f"steps={'9' * 6000}", "steps must be"),
        ("steps=1e1", "steps must be a whole number"),
        ("scales=", "each scale must be a number, 0.25 to 1.5, got ''"),
        ("scales=0.5,", "each scale must be"),
        ("scales=0.5,9", "each scale must be a number, 0.25 to 1.5, got 9"),
        ("scales=" + ",".join(["0.5"] * 100), "scales must be a list of 1 to 6 numbers"),
        ("mode=fast", "unknown mode 'fast'; known: auto, paper, official"),
        (f"mode={'x' * 5000}", "unknown mode 'x{40}'"),
        ("method=san&steps=3", "the method 'san' has no setting 'steps'; it has mode, alpha"),
        ("method=tent&psi=0.5", "the method 'tent' has no setting 'psi'"),
        ("format=gif", "unknown format 'gif'; known: png, json, npz"),
        ("format=", "unknown format ''"),
        (f"format={'x' * 5000}", "unknown format 'x{40}'"),
        ("format=png&format=png", "format must be given once"),
        ("probs=true", "probs come with format=npz only, got format=png"),
        ("format=json&probs=true", "with format=npz only, got format=json"),
        ("format=npz&probs=1", "probs must be true or false, got '1'"),
        ("probs=", "probs must be true or false, got ''"),
        (f"probs={'x' * 5000}", "probs must be true or false, got 'x{39}"),
    ],
)
def test_parameters_are_refused_in_words(server: Served, query: str, words: str) -> None:
    url = f"{server.address}/v1/segment?{query}"
    answer = httpx.post(url, content=png(), headers={"content-type": "image/png"})
    assert answer.status_code == 400, answer.text
    with pytest.raises(ValueError, match=words):
        raise ValueError(answer.json()["detail"])
    assert len(answer.text) < 900
    assert not [leak for leak in LEAKS if leak in answer.text]


def jpeg_of_many_scans() -> bytes:
    file = io.BytesIO()
    to_pil(random_image(32, 48)).save(file, "JPEG", progressive=True)
    start, _, scans = file.getvalue().partition(b"\xff\xda")
    return start + (b"\xff\xda" + scans.removesuffix(b"\xff\xd9")) * 60 + b"\xff\xd9"


def tiff_with_huge_tiles() -> bytes:
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    file, tags = io.BytesIO(), ImageFileDirectory_v2()
    to_pil(random_image(32, 48)).save(file, "TIFF", tiffinfo=tags)
    content = file.getvalue()
    entry = (322).to_bytes(2, "little") + (4).to_bytes(2, "little") + (1).to_bytes(4, "little")
    other = content.find((278).to_bytes(2, "little") + (4).to_bytes(2, "little"))
    if other < 0:
        other = content.find((278).to_bytes(2, "little") + (3).to_bytes(2, "little"))
    return content[:other] + entry + (2**30).to_bytes(4, "little") + content[other + 12 :]


def big(width: int, height: int) -> bytes:
    file = io.BytesIO()
    PILImage.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


MULTIPART = {"content-type": "multipart/form-data; boundary=b"}


def part(name: str, content: bytes, filename: str | None = "a.png") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + content + b"\r\n"


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b"", {}, 400, "not an image file that can be read; send PNG, JPEG"),
        (b"text", {}, 400, "not an image file"),
        (b"file:///etc/passwd", {}, 400, "not an image file"),
        (b"http://127.0.0.1:1/x.png", {}, 400, "not an image file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", {}, 400, "not an image file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", {}, 400, "not an image file"),
        (png()[:200], {}, 400, "cut off or damaged"),
        (png()[:30], {}, 400, "not an image file|cut off or damaged"),
        (bomb(100_000, 100_000), {}, 400, "an image may have 0.02 million pixels"),
        (bomb(0, 0), {}, 400, "an image|not an image"),
        (big(200, 200), {}, 400, "0.02 million pixels, this one has 200x200"),
        (big(8, 8), {}, 400, "at least 16 pixels wide and high, got 8x8"),
        (big(16, 1200), {}, 400, "too narrow"),
        (jpeg_of_many_scans(), {}, 400, "this JPEG has 600 scans, it may have 100"),
        (tiff_with_huge_tiles(), {}, 400, "tiles of this TIFF|cut off or damaged"),
        (b"\0" * 52_500, {}, 400, "an image file may have 0.05 MB, this one has 0.1"),
        (b"\0" * 500_000, {}, 413, "an image file may have 0.05 MB; send a smaller one"),
        (png(), {"content-type": ""}, 415, "the body must be an image.*got no content-type"),
        (png(), {"content-type": "text/plain"}, 415, "got text/plain"),
        (png(), {"content-type": "application/json"}, 415, "got application/json"),
        (png(), {"content-type": "x" * 4000}, 415, "got x{80}$"),
        (png(), {"content-type": "multipart/form-data"}, 400, "field 'image'"),
        (png(), MULTIPART, 400, "field 'image'"),
        (b"", MULTIPART, 400, "field 'image'"),
        (part("image", png()), MULTIPART, 400, "field 'image'|not an image file"),
        (part("file", png()) + b"--b--\r\n", MULTIPART, 400, "field 'image' and nothing else"),
        (part("image", png(), None) + b"--b--\r\n", MULTIPART, 400, "field 'image'"),
        (part("image", b"text") + b"--b--\r\n", MULTIPART, 400, "not an image file"),
        (part("image", b"") + b"--b--\r\n", MULTIPART, 400, "not an image file"),
        (2 * part("image", png()) + b"--b--\r\n", MULTIPART, 400, "nothing else"),
        (part("image", png()) + part("alpha", b"1", None) + b"--b--\r\n", MULTIPART, 400,
         "nothing else"),
        (b"--b\r\n\r\n", MULTIPART, 400, "field 'image'"),
        (b"--b\r\n" + b"x" * 30_000, MULTIPART, 400, "field 'image'"),
    ],
)  # fmt: skip
def test_bodies_are_refused_in_words(
    server: Served, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answer = post(server, content, headers)
    assert answer.status_code == status, answer.text
    with pytest.raises(ValueError, match=words):
        raise ValueError(answer.json()["detail"])
    assert not [leak for leak in LEAKS if leak in answer.text]
    assert get(server, "health").json()["waiting"] == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "nothing", 404), ("GET", "", 404), ("GET", "segment", 405), ("PUT", "segment", 405),
        ("POST", "health", 405), ("GET", "../etc/passwd", 404), ("GET", "docs/oauth2", 404),
        ("GET", "%00", 404), ("DELETE", "models", 405), ("GET", "x" * 5000, 404),
    ],
)  # fmt: skip
def test_other_paths_are_refused(server: Served, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, f"{server.address}/v1/{path}")
    assert answer.status_code == status
    assert len(answer.text) < 300
    assert not [leak for leak in LEAKS if leak in answer.text]


def test_a_network_that_fails_is_told_of_without_its_details(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("selfadapt.app.service.segment", fail)
    answer = post(server)
    assert answer.status_code == 500
    assert answer.json() == {"detail": "internal error; see the log of the server"}

    def exhaust(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("secret detail")

    monkeypatch.setattr("selfadapt.app.service.segment", exhaust)
    assert "out of memory: try a smaller image" in post(server).text
    assert server.queue.num_running == 0


def test_probabilities_have_a_limit(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfadapt.app.service.MAX_PROBS_BYTES", 2**13)
    answer = post(server, format="npz", probs="true")
    assert answer.status_code == 413
    assert "probs of an image may have 0 MB" in answer.text
    assert post(server, format="npz", method="san").status_code == 200


# Doors


@pytest.mark.parametrize("path", ["health", "models", "docs", "openapi.json", "segment"])
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_web_sites_are_refused(server: Served, path: str, headers: dict[str, str]) -> None:
    answer = get(server, path, **headers)
    assert answer.status_code == 403
    assert answer.json()["detail"]
    assert "access-control-allow-origin" not in answer.headers
    if path == "segment":
        assert post(server, headers=headers).status_code == 403


def test_the_own_page_and_programs_are_answered(server: Served) -> None:
    local = server.address.replace("127.0.0.1", "localhost")[7:]
    for headers in (
        {"origin": server.address}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"},
        {"host": local}, {"host": local, "origin": f"http://{local}"},
    ):  # fmt: skip
        assert get(server, "health", **headers).status_code == 200
    answer = get(server, "health")
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_token_is_required_where_there_is_one() -> None:
    with served(token=TOKEN) as running:
        assert get(running, "docs").status_code == 200
        assert get(running, "openapi.json").status_code == 200
        wrong = [
            {}, {"authorization": ""}, {"authorization": TOKEN}, {"authorization": "Bearer"},
            {"authorization": f"Bearer {TOKEN[:-1]}"}, {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": f"Bearer  {TOKEN}"}, {"authorization": f"Basic {TOKEN}"},
            {"authorization": "Bearer \xe9"}, {"cookie": f"token={TOKEN}"},
        ]  # fmt: skip
        for headers in wrong:
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            for answer in (
                httpx.get(f"{running.address}/v1/health", headers=encoded),
                httpx.get(f"{running.address}/v1/models?token={TOKEN}", headers=encoded),
                post(running, headers=encoded),
            ):
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "Authorization must be 'Bearer TOKEN'" in answer.json()["detail"]
                assert TOKEN not in answer.text
        right = {"authorization": f"Bearer {TOKEN}"}
        assert get(running, "health", **right).status_code == 200
        assert get(running, "health", authorization=f"bearer {TOKEN}").status_code == 200
        assert post(running, headers=right, method="san").status_code == 200
        assert running.browser.get(running.address).status_code == 200  # the page has no accounts


def test_beyond_this_machine_programs_need_a_token() -> None:
    with served(local=False) as running:
        for path in ("health", "models", "docs", "openapi.json"):
            answer = get(running, path)
            assert answer.status_code == 403
            assert "the interface for programs is off" in answer.json()["detail"]
        assert post(running).status_code == 403
        assert running.browser.get(running.address).status_code == 200
    with served(token=TOKEN, local=False) as running:
        right = {"authorization": f"Bearer {TOKEN}", "host": "segment.example"}
        assert get(running, "health", host="segment.example").status_code == 401
        assert get(running, "health", **right).status_code == 200
        assert get(running, "health", **right, origin="https://evil.example").status_code == 403
        assert post(running, headers=right, method="san").status_code == 200


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "x" * 257, "a b" * 8, "\xe9" * 20, "x" * 20 + "\n"]
)
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"a token must have 16 to 256 ASCII characters"):
        check_token(token)
    monkeypatch.setattr("selfadapt.app.server.uvicorn", None)
    monkeypatch.setenv("SELFADAPT_TOKEN", token)
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--host", "0.0.0.0"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "a token must have 16 to 256 ASCII characters" in error
    assert "secrets.token_urlsafe()" in error
    assert not token or token not in error


def test_a_flag_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("selfadapt.app.server.serve", lambda *values: given.append(values[4]))
    main_codes = []
    for words in ([], ["--token", "b" * 20]):
        monkeypatch.setenv("SELFADAPT_TOKEN", TOKEN)
        with pytest.raises(SystemExit) as caught:
            main(["serve", "--host", "0.0.0.0", *words])
        main_codes.append(caught.value.code)
    assert (main_codes, given) == ([0, 0], [TOKEN, "b" * 20])
    assert "interface for programs is off" not in capsys.readouterr().err


# The queue


def test_a_full_queue_says_when_to_try_again(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfadapt.app.jobs.MAX_QUEUE", 2)
    monkeypatch.setattr(server.queue, "seconds", 2.5)
    with ThreadPoolExecutor(3) as pool, slow_network(server, 0.05):
        accepted = [pool.submit(post, server) for _ in range(3)]
        wait_for(lambda: (server.queue.num_running, server.queue.num_waiting) == (1, 2))
        answer = post(server)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "8"  # three of 2.5 s
        assert answer.json()["detail"].endswith("try again in 8 s")
        server.model.delay = 0.0
        assert [done.result().status_code for done in accepted] == [200] * 3
    assert post(server).status_code == 200


def test_a_client_that_is_still_sending_gets_to_see_the_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("selfadapt.app.jobs.MAX_QUEUE", 0)
    with served(Limits(megabytes=20)) as running:
        host, _, port = running.address.removeprefix("http://").partition(":")
        for content, status in ((bytes(10**7), 429), (bytes(22 * 10**6), 429)):
            connection = http.client.HTTPConnection(host, int(port), timeout=60)
            connection.request("POST", "/v1/segment", content, {"Content-Type": "image/png"})
            assert connection.getresponse().status == status
            connection.close()


def raw(server: Served, content: bytes, length: int | None = None) -> socket.socket:
    """Send an image over a connection that the caller closes."""
    host, _, port = server.address.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    length = len(content) if length is None else length
    head = (
        f"POST /v1/segment?steps=50 HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: image/png\r\nContent-Length: {length}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def test_a_client_that_leaves_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with served() as running:
        running.call("example", [])
        files = sorted(tmp_path.rglob("*"))
        with slow_network(running, 0.05):
            clients = [raw(running, png()) for _ in range(3)]
            wait_for(lambda: (running.queue.num_running, running.queue.num_waiting) == (1, 2))
            clients[1].close()  # waiting
            wait_for(lambda: running.queue.num_waiting == 1)
            assert running.queue.num_running == 1
            clients[0].close()  # running: 50 steps would take 5 s and more
            start = time.monotonic()
            wait_for(lambda: running.queue.num_waiting == 0)
            assert time.monotonic() - start < 2
            clients[2].close()
            cut_off = raw(running, png()[:100], 5000)  # it is still sending
            wait_for(lambda: running.queue.num_waiting == 1)
            cut_off.close()
            wait_for(lambda: running.queue.num_running + running.queue.num_waiting == 0)
        assert sorted(tmp_path.rglob("*")) == files
        assert post(running).status_code == 200
        assert sorted(tmp_path.rglob("*")) == files


def test_twenty_clients_at_once_get_their_own_masks(server: Served) -> None:
    contents = [png(20 + i, 40 - i) for i in range(20)]
    labels = [expected(server, content, steps=1).label.numpy() for content in contents]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda content: post(server, content, steps=1), contents))
    for answer, label in zip(answers, labels, strict=True):
        assert answer.status_code == 200, answer.text
        assert np.array_equal(np.asarray(PILImage.open(io.BytesIO(answer.content))), label)
    assert len({answer.content for answer in answers}) == 20


def test_the_page_and_programs_never_run_at_the_same_time(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, calls = set(), [], []
    plain = Method.__call__

    def watched(self: Method, *args: Any, **kwargs: Any) -> Result:
        running.add(threading.get_ident())
        most.append(len(running))
        calls.append(self)
        try:
            time.sleep(0.02)
            return plain(self, *args, **kwargs)
        finally:
            running.remove(threading.get_ident())

    monkeypatch.setattr(Method, "__call__", watched)
    with ThreadPoolExecutor(12) as pool:
        programs = [pool.submit(post, server, steps=2) for _ in range(6)]
        visitors = [Served(server.address, server.model) for _ in range(3)]
        files = [visitor.upload(png()).json()[0] for visitor in visitors]
        pages = [
            pool.submit(visitor.call, "adapt", asking(file, steps=2))
            for visitor, file in zip(visitors, files, strict=True)
        ]
        assert [done.result().status_code for done in programs] == [200] * 6
        assert all(done.result()["success"] for done in pages)
    assert len(calls) == 9
    assert set(most) == {1}


def test_the_page_and_programs_take_turns() -> None:
    queue, order = JobQueue(), []

    def wait(session: str) -> None:
        with queue.job(session) as job:
            queue.enqueue(job).result(30)
            order.append(session)

    threads = []
    with queue.job(PROGRAMS) as first:
        queue.enqueue(first).result(0)
        for session in (PROGRAMS, PROGRAMS, PROGRAMS, "a", "b"):
            threads.append(threading.Thread(target=wait, args=(session,)))
            threads[-1].start()
            wait_for(lambda: queue.num_waiting == len(threads))
    for thread in threads:
        thread.join(30)
    assert order == ["a", PROGRAMS, "b", PROGRAMS, PROGRAMS]


def test_a_job_that_waits_is_stopped_at_once() -> None:
    queue = JobQueue()
    with queue.job("a") as running, queue.job("b") as waiting, queue.job("b") as receiving:
        queue.enqueue(running).result(0)
        turn = queue.enqueue(waiting)
        assert not turn.done()
        assert queue.stop_session("b")
        for stopped in (turn, queue.enqueue(receiving)):
            with pytest.raises(Stopped):
                stopped.result(0)
        assert not running.stop.is_set()
    assert (queue.num_running, queue.num_waiting) == (0, 0)
    with queue.job("c") as late:
        queue.stop_all()
        with pytest.raises(Stopped):
            queue.enqueue(late).result(0)
    with queue.job("d") as later, pytest.raises(Stopped):
        queue.enqueue(later).result(0)


def test_a_job_that_fails_makes_room_and_is_not_measured() -> None:
    queue = JobQueue()
    before = queue.seconds
    with suppress(ValueError), queue.job("a") as job:
        queue.enqueue(job).result(0)
        raise ValueError("damaged")
    assert queue.seconds == before
    with queue.job("b") as job:
        queue.enqueue(job).result(0)
    assert queue.seconds < before
    held = [queue.job(PROGRAMS) for _ in range(MAX_QUEUE)]
    for entered in held:
        entered.__enter__()
    with pytest.raises(QueueFull, match=f"{MAX_QUEUE} images are waiting"):
        queue.job(PROGRAMS).__enter__()
    with queue.job("the page has its own limit"):
        pass
    for entered in held:
        entered.__exit__(None, None, None)


def test_a_server_that_shuts_down_stops_its_programs() -> None:
    with served() as running, ThreadPoolExecutor(2) as pool, slow_network(running, 0.05):
        jobs = [pool.submit(post, running, steps=50) for _ in range(2)]
        wait_for(lambda: running.queue.num_waiting == 1)
        running.queue.stop_all()
        answers = [job.result() for job in jobs]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "shutting down" in answers[0].text


@pytest.mark.slow
def test_ctrl_c_ends_a_server_cleanly_while_programs_wait(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "selfadapt", "serve", "--port", "0", "--device", "cpu"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = re.search(r"http://[\d.:]+", process.stdout.readline())[0]
        url, headers = f"{address}/v1/segment?steps=50", {"content-type": "image/png"}
        with ThreadPoolExecutor(3) as pool:
            sent = [
                pool.submit(httpx.post, url, content=png(200, 300), headers=headers, timeout=60)
                for _ in range(3)
            ]
            health = f"{address}/v1/health"
            wait_for(lambda: httpx.get(health, timeout=60).json()["waiting"] >= 2, 60)
            process.send_signal(signal.SIGINT)
            err = process.communicate(timeout=60)[1]
        for answer in sent:
            assert answer.exception() or answer.result().status_code == 503
    finally:
        process.kill()
    assert process.returncode == 0
    assert err.splitlines() == ["stopped"]
    assert list(tmp_path.glob("selfadapt-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("world", "domain"), [("street", "camvid"), ("vessels", "drive")])
def test_photographs_come_back_at_their_size_with_the_librarys_label(
    world: str, domain: str
) -> None:
    with served(Limits()) as running:
        files = sorted((needs_data(world, domain) / "images").iterdir())[:4]
        for file in files:
            content = file.read_bytes()
            result = expected(running, content, steps=1, max_pixels=Limits().max_pixels)
            answer = post(running, content, steps=1)
            label = np.asarray(PILImage.open(io.BytesIO(answer.content)))
            assert np.array_equal(label, result.label.numpy()), file.name
