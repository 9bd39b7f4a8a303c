"""Real photographs through the page: none is refused, and masks come at the photograph's size."""

import io
import zipfile
from collections.abc import Iterator

import pytest
from PIL import Image as PILImage

from conftest import needs_data

pytest.importorskip("httpx")
pytest.importorskip("gradio", reason="needs the extra app")
from test_app import asking

from selfadapt.app.limits import Limits
from serving import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Limits()) as running:
        yield running


@pytest.mark.parametrize(
    ("world", "domain", "number", "scale"),
    [
        ("street", "camvid", 12, 1),
        ("street", "wild", 12, 1),
        ("street", "cityscapes", 12, 2),
        ("vessels", "drive", 1, 1),
    ],
)
def test_photographs_go_through_the_page(
    server: Served, world: str, domain: str, number: int, scale: int
) -> None:
    for index, file in enumerate(sorted((needs_data(world, domain) / "images").iterdir())[:number]):
        content, name, size = file.read_bytes(), file.name, PILImage.open(file).size
        if scale != 1:
            size = scale * size[0], scale * size[1]
            larger, name = io.BytesIO(), "large.jpg"
            PILImage.open(file).convert("RGB").resize(size).save(larger, "JPEG")
            content = larger.getvalue()
        (uploaded,) = server.upload(content, name).json()
        _, status = server.call("check", asking(uploaded))["output"]["data"]
        assert f"{size[0]}x{size[1]} pixels" in status
        assert "It will take" in status
        method = "self-adapt" if index == 0 else "san"
        answer = server.call("adapt", asking(uploaded, method=method, steps=1))
        assert answer["success"], (file, answer)
        url = answer["output"]["data"][3]["value"]["url"]
        with zipfile.ZipFile(io.BytesIO(server.browser.get(url).content)) as archive:
            label = PILImage.open(archive.open(f"{method}_label.png"))
        assert label.size == size
