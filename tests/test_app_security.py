"""Attacks on the web app: files of the server, files of other visitors, malformed requests."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("gradio", reason="needs the extra app")
from test_app import asking, png  # noqa: E402

from selfadapt.app.gate import MAX_PENDING  # noqa: E402
from selfadapt.app.page import EXAMPLE_SESSION  # noqa: E402
from serving import Served, served  # noqa: E402

JOIN, UPLOAD = "/gradio_api/queue/join", "/gradio_api/upload"
EVENTS = (
    "street", "street_1", "example", "check", "check_1", "check_2", "check_3",
    "select_method", "select_network", "adapt", "stop", "disconnect",
)  # fmt: skip
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        running.call("example", [])  # it is computed from the start on, and leaves a file
        yield running


@pytest.fixture(scope="module")
def folder(server: Served) -> Path:
    """Return the folder of uploads and results."""
    return Path(server.upload(png()).json()[0]).parents[1]


def file_data(path: object) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def contents(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def num_inputs(server: Served, event: str) -> int:
    return len(server.functions[event]["inputs"])


def join(server: Served, event: str, data: list[Any], **extra: Any) -> Any:
    body = {
        "data": data,
        "fn_index": server.function(event),
        "session_hash": f"s{id(server)}",
        **extra,
    }
    return server.browser.post(server.address + JOIN, content=json.dumps(body), headers=JSON)


def test_these_are_all_events_of_the_page(server: Served) -> None:
    config = server.browser.get(f"{server.address}/config").json()
    names = {d["api_name"] for d in config["dependencies"] if d["backend_fn"]}
    assert names == set(EVENTS)


@pytest.mark.parametrize("event", EVENTS)
def test_no_event_takes_a_file_of_the_server(
    server: Served, folder: Path, event: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(png())
    link = folder / f"{event}.png"
    link.symlink_to(secret)
    uploaded = server.upload(png()).json()[0]
    before = contents(folder)
    outside = [
        secret, tmp_path / "missing.png", tmp_path, "/etc/hostname", "relative.png", folder,
        f"{uploaded}/../../../{tmp_path.name}/secret.png", link, f"{uploaded}\0",
        "http://127.0.0.1:1/x.png", "file:///etc/hostname", "/" + "a" * 9000, "", 7, None,
        ["/etc/hostname"],
    ]  # fmt: skip
    number = num_inputs(server, event)
    answers = []
    for path in outside:
        file = file_data(str(path) if isinstance(path, Path) else path)
        for data, extra in (
            *(([None] * i + [file] + [None] * (number - i - 1), {}) for i in range(number)),
            ([[{"deep": [file]}]] + [None] * (number - 1) if number else [], {"event_data": file}),
        ):
            answers.append(join(server, event, data, **extra))
    assert {(a.status_code, a.text) for a in answers} == {
        (403, '{"detail": "this file does not exist any more; upload the image again"}')
    }
    assert contents(folder) == before
    link.unlink()


def test_visitors_cannot_name_or_read_each_others_files(server: Served) -> None:
    (file,) = server.upload(png(40, 50)).json()
    assert server.browser.get(f"{server.address}/gradio_api/file={file}").status_code == 200
    answer = server.call("adapt", asking(file))
    results = [answer["output"]["data"][3]["value"]["path"]]
    stranger = Served(server.address, server.model)
    stranger.upload(png(16, 16))
    for path in (file, *results):
        assert server.browser.get(f"{server.address}/gradio_api/file={path}").status_code == 200
        for browser in (stranger.browser, httpx):
            answer = browser.get(f"{server.address}/gradio_api/file={path}")
            assert answer.status_code == 403
    assert join(stranger, "adapt", asking(file)).status_code == 403


def test_visitors_cannot_join_read_or_cancel_each_others_sessions(server: Served) -> None:
    server.call("stop", [], "mine")
    stranger = Served(server.address, server.model)
    stranger.call("stop", [], "theirs")
    body = {"data": [], "fn_index": server.function("stop"), "session_hash": "mine"}
    answer = stranger.browser.post(server.address + JOIN, json=body)
    assert answer.status_code == 403
    assert answer.json() == {"detail": "this session belongs to another visitor"}
    for query in ("session_hash=mine", "session_hash=theirs&session_hash=mine"):
        url = f"{server.address}/gradio_api/queue/data?{query}"
        assert stranger.browser.get(url).status_code == 404
    body = {"session_hash": "mine", "fn_index": 0, "event_id": "x"}
    url = f"{server.address}/gradio_api/cancel"
    assert stranger.browser.post(url, json=body).status_code == 404
    assert server.browser.post(url, json=body).status_code == 200


def test_a_file_swapped_for_a_link_is_not_given_away(server: Served, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    file = Path(server.upload(png(18, 18), "secret.png").json()[0])
    url = f"{server.address}/gradio_api/file={file}"
    assert server.browser.get(url).status_code == 200
    file.unlink()
    file.symlink_to(tmp_path / "secret.png")
    assert server.browser.get(url).status_code == 403
    file.unlink()
    file.parent.rmdir()
    file.parent.symlink_to(tmp_path)
    assert server.browser.get(url).status_code == 403
    file.parent.unlink()


@pytest.mark.parametrize("ranges", ["0-3", "9999999-", "-1", ",".join(["0-1"] * 5000)])
def test_files_are_given_whole_whatever_range_is_asked_for(server: Served, ranges: str) -> None:
    (file,) = server.upload(png()).json()
    url = f"{server.address}/gradio_api/file={file}"
    answer = server.browser.get(url, headers={"range": f"bytes={ranges}"})
    assert (answer.status_code, answer.content) == (200, png())


def test_there_is_a_limit_to_the_number_of_files(
    server: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_files = sum(path.is_file() for path in folder.rglob("*"))
    monkeypatch.setattr("selfadapt.app.gate.MAX_FILES", num_files)
    answer = server.upload(png(19, 19))
    assert (answer.status_code, answer.text) == (507, "no space left for files; try again later")


def test_a_visitor_is_not_known_by_a_cookie_of_their_own_making(server: Served) -> None:
    for cookie in ("a", "x" * 5000, "../../etc", "a; b=c", "\xff"):
        headers = {"cookie": b"selfadapt-visitor=" + cookie.encode("latin-1")}
        answer = httpx.get(server.address, headers=headers)
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert "SameSite=Strict" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=../../../../etc/passwd",
        "/gradio_api/file=..%2f..%2f..%2fetc%2fpasswd",
        "/gradio_api/file=pyproject.toml",
        f"/gradio_api/file={Path(__file__)}",
        "/gradio_api/file=http://127.0.0.1:1/",
        "/gradio_api/file=file:///etc/passwd",
        "/gradio_api/file=%00",
        "/gradio_api/file=%ed%a0%80",
        "/gradio_api/file=" + "a" * 5000,
        "/gradio_api/proxy=http://127.0.0.1:1/",
        "/gradio_api/file/etc/passwd",
        "/gradio_api/run/adapt",
        "/gradio_api/openapi.json",
        "/gradio_api/call/adapt/1",
        "/gradio_api/component_server",
        "/gradio_api/stream/a/b/1/playlist.m3u8",
        "/gradio_api/deep_link",
        "/gradio_api/dev/reload",
        "/gradio_api/vibe-code",
        "/gradio_api/profiling/traces",
        "/gradio_api/run-history/records",
        "/gradio_api/queue/data",
        "/gradio_api/queue/data?session_hash=nobody",
        "/gradio_api/queue/data?session_hash=%00",
        "/gradio_api/heartbeat/" + "a" * 5000,
        "/gradio_api/upload_progress?upload_id=nothing",
        "/login/huggingface",
        "/login/callback?_target_url=http://evil.example",
        "/logout?_target_url=http://evil.example",
        "/custom_component/x/client/component/../../../../etc/passwd",
        "/svelte/../../etc/passwd",
        "/monitoring",
        "/docs",
        "/openapi.json",
        "/static/../../../../../../etc/passwd",
        "/static/..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/static//etc/passwd",
        "/static/%00",
        "/assets/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/assets/" + "a" * 5000,
    ],
)
def test_no_other_path_is_given_away(server: Served, path: str) -> None:
    answer = httpx.get(server.address + path)
    assert answer.status_code in (400, 403, 404)
    for leak in ("root:", "Traceback", ".py", str(Path.home()), os.sep + "tmp"):
        assert leak not in answer.text, leak
    assert answer.text


@pytest.mark.parametrize(
    "changed",
    [
        {"fn_index": -1}, {"fn_index": 10**30}, {"fn_index": None}, {"fn_index": "0"},
        {"fn_index": True}, {"data": None}, {"data": []}, {"data": {}}, {"session_hash": None},
        {"session_hash": {}}, {"session_hash": "x" * 65}, {"session_hash": "../x"},
        {"trigger_id": 10**30}, {"trigger_id": "x"}, {"trigger_id": -1}, {"batched": True},
        {"oauth_token": "x"}, {"simple_format": True}, {"event_id": "x"},
        {"data": ["\ud800"] * 9},
    ],
)  # fmt: skip
def test_malformed_events_are_refused_in_words(server: Served, changed: dict[str, Any]) -> None:
    body = {"data": [None] * 9, "fn_index": server.function("adapt"), "session_hash": "x"}
    content = json.dumps(body | changed)
    answer = server.browser.post(server.address + JOIN, content=content, headers=JSON)
    assert answer.status_code == 400
    assert "must be" in answer.text or "unknown keys" in answer.text


@pytest.mark.parametrize("path", [JOIN, "/gradio_api/cancel", "/gradio_api/reset"])
@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff", b"{}", b"[" * 100_000])
def test_malformed_bodies_are_refused(server: Served, path: str, body: bytes) -> None:
    answer = server.browser.post(server.address + path, content=body, headers=JSON)
    assert answer.status_code in (400, 422)
    assert answer.text


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        (None, b"x", 415),
        ("text/plain", b"x", 415),
        ("multipart/form-data", b"x", 415),
        ("multipart/form-data; boundary=", b"x", 400),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\n", 400),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="files"\r\n\r\nabc\r\n--b--\r\n',
            400,
        ),
    ],
)
def test_malformed_uploads_are_refused(
    server: Served, kind: str | None, body: bytes, status: int
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = server.browser.post(server.address + UPLOAD, content=body, headers=headers)
    assert answer.status_code == status
    assert answer.text


def test_uploads_stay_in_their_folder(server: Served, folder: Path) -> None:
    for name in ("../../up.png", "/etc/up.png", "a\0b.png", "\xe9.png", "a" * 300 + ".png"):
        (file,) = server.upload(png(), name).json()
        assert Path(file).resolve().is_relative_to(folder.resolve())
        assert Path(file).is_file()
    assert server.upload(png(), "..").status_code == 400


def test_too_large_a_body_is_refused_with_or_without_its_length(server: Served) -> None:
    assert server.upload(b"\0" * 60_000).status_code == 413
    assert server.upload(b"\0" * 500_000).status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(300):
            yield b" " * 4096

    assert httpx.post(server.address + JOIN, content=endless()).status_code == 413
    assert httpx.delete(server.address).status_code == 404


def raw_upload(server: Served, content: bytes, length: int, cookie: str = "") -> socket.socket:
    """Begin an upload over a connection that the caller closes."""
    host, _, port = server.address.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = (
        f"POST {UPLOAD} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {length}\r\n"
        f"Cookie: selfadapt-visitor={cookie}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    part = '--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    connection.sendall((head + part).encode() + content)
    return connection


def test_an_upload_that_is_cut_off_or_refused_leaves_no_file(server: Served, folder: Path) -> None:
    def files() -> set[Path]:
        return {path for path in contents(folder) if path.is_file()}

    before = files()
    for _ in range(2):
        raw_upload(server, b"x" * 20_000, 40_000).close()
    with raw_upload(server, b"x" * 20_000, 40_000) as connection:
        time.sleep(0.3)
        assert files() == before
        connection.shutdown(socket.SHUT_WR)
    assert server.upload(png(), "..").status_code == 400
    body = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\nabc'
    body += b'\r\n--b\r\nContent-Disposition: form-data; name="files"\r\n\r\nabc\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = server.browser.post(server.address + UPLOAD, content=body, headers=headers)
    assert answer.status_code == 400
    assert not list(folder.glob("tmp*"))
    time.sleep(0.3)
    assert files() - before <= {path for path in files() if path.read_bytes() == b"abc"}


def test_uploads_in_flight_take_room(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the room of one visitor is taken by each upload of the maximum size."""
    monkeypatch.setattr("selfadapt.app.gate.MAX_STORAGE_BYTES", 0)  # 8 such uploads for all
    monkeypatch.setattr("selfadapt.app.gate.stored", lambda folder: (0, 0))
    with served() as running:
        own = [raw_upload(running, b"", 40_000, "a" * 22) for _ in range(2)]
        time.sleep(0.3)
        mine = Served(running.address, running.model)
        mine.browser.cookies.set("selfadapt-visitor", "a" * 22)
        answer = mine.upload(png())
        assert (answer.status_code, "you have too many files" in answer.text) == (507, True)
        assert Served(running.address, running.model).upload(png()).status_code == 200
        others = [raw_upload(running, b"", 40_000, f"{i}" * 22) for i in range(6)]
        time.sleep(0.3)
        answer = Served(running.address, running.model).upload(png())
        assert (answer.status_code, "no space left" in answer.text) == (507, True)
        for connection in own + others:
            connection.close()
        time.sleep(0.3)
        assert mine.upload(png()).status_code == 200


def test_a_visitor_with_many_files_makes_no_more(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor = Served(server.address, server.model)
    visitor.upload(png(21, 21))
    monkeypatch.setattr("selfadapt.app.gate.MAX_FILES", 4)
    answer = join(visitor, "street", ["night", 1])
    assert (answer.status_code, "too many files" in answer.json()["detail"]) == (507, True)
    assert join(visitor, "stop", []).status_code == 200


def test_a_visitor_has_two_runs_in_the_queue_and_can_always_stop() -> None:
    with served() as running:
        running.model.delay = 0.1
        visitors = [Served(running.address, running.model) for _ in range(12)]
        codes = []
        for visitor in visitors:
            (file,) = visitor.upload(png()).json()
            codes += [join(visitor, "adapt", asking(file)).status_code for _ in range(3)]
        assert codes[:3] == [200, 200, 429]
        assert codes[-1] == 503
        assert set(codes) == {200, 429, 503}
        assert 20 <= codes.count(200) <= 22  # one or two have begun
        assert join(visitors[-1], "stop", []).status_code == 200
        running.model.delay = 0


def test_a_visitor_cannot_ask_for_everything_at_once(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_PENDING, "other", 0)
    answer = join(server, "check", [None] * num_inputs(server, "check"))
    assert answer.status_code == 429
    assert "waiting or running" in answer.json()["detail"]


def test_no_visitor_has_the_session_of_the_example(server: Served) -> None:
    assert join(server, "stop", [], session_hash=EXAMPLE_SESSION).status_code == 400
    answer = httpx.get(f"{server.address}/gradio_api/heartbeat/{EXAMPLE_SESSION}")
    assert answer.status_code == 404


@pytest.mark.parametrize("depth", [18, 200, 900])
def test_deep_json_is_refused(server: Served, depth: int) -> None:
    deep: Any = None
    for _ in range(depth):
        deep = [deep]
    data = [deep] + [None] * (num_inputs(server, "check") - 1)
    answer = join(server, "check", data)
    assert answer.status_code == 400
    assert "at most 20 levels" in answer.json()["detail"]


def test_files_of_visitors_who_left_are_forgotten(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfadapt.app.gate.MAX_VISITORS", 2)
    visitors = [Served(server.address, server.model) for _ in range(3)]
    urls = []
    for visitor in visitors:
        (file,) = visitor.upload(png(20, 20)).json()
        urls.append(f"{server.address}/gradio_api/file={file}")
    answers = [v.browser.get(url) for v, url in zip(visitors, urls, strict=True)]
    assert [answer.status_code for answer in answers] == [403, 200, 200]


def test_visitors_without_files_do_not_displace_others(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfadapt.app.gate.MAX_VISITORS", 2)
    first = Served(server.address, server.model)
    (file,) = first.upload(png(20, 20)).json()
    others = [Served(server.address, server.model) for _ in range(3)]
    for other in others:
        assert httpx.get(server.address).status_code == 200
        assert join(other, "stop", []).status_code == 200
    assert first.browser.get(f"{server.address}/gradio_api/file={file}").status_code == 200


# What was published of Gradio's weaknesses: each is tried against the page


@pytest.mark.parametrize("event", EVENTS)
def test_a_path_in_the_place_of_a_value_is_no_file(
    server: Served, folder: Path, event: str
) -> None:
    before = contents(folder)
    number = num_inputs(server, event)
    for position in range(number):
        data: list[Any] = [None] * number
        data[position] = "/etc/hostname"
        answer = server.call(event, data)
        shown = str(answer["output"].get("data"))
        assert not answer["success"] or 'class="refused"' in shown or "Drop an image" in shown
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("page.html", b"<script>alert(1)</script>"),
        ("page.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
        ("page.js", b"alert(1)"),
        ("page.xhtml", b"<html xmlns='http://www.w3.org/1999/xhtml'/>"),
    ],
)
def test_an_upload_never_runs_as_a_page(server: Served, name: str, content: bytes) -> None:
    (file,) = server.upload(content, name).json()
    answer = server.browser.get(f"{server.address}/gradio_api/file={file}")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_long_boundary_takes_no_time(server: Served) -> None:
    boundary = "-" * 60
    body = b"--" + boundary.encode() + b"\r\n" + b"-" * 90_000
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    answer = httpx.post(server.address + UPLOAD, content=body, headers=headers, timeout=5)
    assert answer.status_code in (400, 413)


def test_headers_of_one_visitor_do_not_reach_the_next(server: Served) -> None:
    headers = {"x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}
    httpx.get(server.address, headers=headers)
    assert "evil.example" not in httpx.get(server.address).text
    assert "evil.example" not in httpx.get(f"{server.address}/config").text


def test_pages_from_elsewhere_may_read_nothing_of_a_server_for_others() -> None:
    with served(local=False) as running:
        for origin in ("http://evil.example", "null", "http://localhost:1"):
            answer = httpx.get(f"{running.address}/config", headers={"origin": origin})
            assert "access-control-allow-origin" not in answer.headers


def test_silent_connections_are_closed_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfadapt.app.server.REQUEST_S", 1)
    monkeypatch.setattr("selfadapt.app.server.MAX_CONNECTIONS", 4)
    with served() as running:
        host, _, port = running.address.removeprefix("http://").partition(":")
        silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(4)]
        silent[0].sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert httpx.get(running.address).status_code == 503
        assert [connection.recv(1) for connection in silent] == [b""] * 4
        assert httpx.get(running.address).status_code == 200
        for connection in silent:
            connection.close()
