"""On a Ray cluster and with files at addresses, runs come to what one process comes to."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from test_predict_run import pictures, table, wait_for, without_times

import selfadapt.ray
from conftest import random_image
from documents import ROOT, prepare, run_blocks
from evaluations import Place, make_place, small, tables_of
from runs import run_cli, start_cli, write_recipe
from selfadapt.addresses import find_files, is_address, path_of
from selfadapt.baselines import SaNOnly
from selfadapt.images import encode, to_pil
from selfadapt.methods import METHODS
from selfadapt.predict import remote

NET = ("--model", "streets", "--method", "san", "--device", "cpu")
ADAPT = ("--model", "streets", "--steps", "2", "--device", "cpu")

SYNC_OFTEN = """
import sys
from selfadapt.cli import main
from selfadapt.predict import remote
remote.SYNC_INTERVAL_S = 0.1
main(sys.argv[3:])  # after -m selfadapt
"""


@pytest.fixture(scope="module")
def storage() -> Iterator[str]:
    """A stand-in for S3, with an empty bucket."""
    pytest.importorskip("s3fs")
    pytest.importorskip("flask_cors")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "user")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


DEADLY = """
import os
from selfadapt.baselines import SaNOnly

class Deadly(SaNOnly):
    def compute(self, network, image):
        if image.shape[-1] == 66:
            os._exit(1)
        return super().compute(network, image)
"""


@pytest.fixture(scope="module")
def cluster(storage: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray cluster with two cores, which reaches the storage and a method that kills workers."""
    ray = pytest.importorskip("ray")
    code = tmp_path_factory.mktemp("code")
    (code / "deadly.py").write_text(DEADLY)
    sys.path.insert(0, str(code))  # workers have the working folder of this process on theirs
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(code)
        ray.init(
            num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", object_store_memory=100 * 2**20,
        )  # fmt: skip
    yield ray
    ray.shutdown()
    sys.path.remove(str(code))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(8):
        to_pil(random_image(48, 64, seed=number)).save(folder / f"{number}.png")
    (folder / "bad.png").write_text("no image")
    return folder


@pytest.fixture
def memory(photos: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The photos at addresses in the memory of this process."""
    monkeypatch.setattr(remote, "SYNC_INTERVAL_S", 0.05)
    monkeypatch.setattr(remote, "TAKE_OVER_S", 0.5)
    files = fsspec.filesystem("memory")
    files.put(str(photos) + "/", "/bucket/photos/", recursive=True)
    yield "memory://bucket"
    files.rm("/bucket", recursive=True)


def downloaded(address: str, to: Path) -> Path:
    """Return a folder with the files at an address."""
    files, path = fsspec.url_to_fs(address)
    files.invalidate_cache()
    files.get(path + "/", str(to) + "/", recursive=True)
    return to


def lines_of(folder: Path) -> list[str]:
    """Return the table without times, and without where the images are."""
    return [re.sub(r"[^,]*/photos/", "", line) for line in without_times(folder)]


def assert_same(one: Path, other: Path) -> None:
    assert pictures(one) == pictures(other)
    for name in ("classes.json", "legend.png"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert lines_of(one) == lines_of(other)


def kill_a_worker(when: Any) -> threading.Thread:
    """Kill a worker of this process with -9 once ``when()`` is true; return the thread."""

    def kill() -> None:
        while not when():
            time.sleep(0.01)
        os.kill(workers()[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def workers() -> list[int]:
    """Return the processes of workers, children of the raylet that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            process, parent = stat.parent, parent_of(stat.parent.name)
            is_worker = b"ray::_Actor.run" in (process / "cmdline").read_bytes()
            if is_worker and parent_of(parent) == str(os.getpid()):
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def parent_of(process: str) -> str:
    return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[1]


# addresses


def test_addresses_are_told_from_paths() -> None:
    assert is_address("s3://bucket/a.jpg")
    assert not any(map(is_address, ("a.jpg", "C:/a.jpg", "/a/s3://b", Path("s3://b"), 3)))
    assert path_of("https://host/a/b.jpg?c=d.png#e").as_posix() == "host/a/b.jpg"
    assert path_of("s3://bucket/a?b.jpg").name == "a?b.jpg"


def test_a_file_has_another_version_when_it_changes(memory: str) -> None:
    address = f"{memory}/photos/0.png"
    before = find_files(address)
    assert before == find_files(address) != {}
    fsspec.filesystem("memory").pipe_file(address, b"another")
    assert find_files(address).keys() == before.keys()
    assert find_files(address) != before


def test_images_at_addresses_to_masks_at_an_address(
    memory: str, photos: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("predict", f"{memory}/photos/*.png", *NET, "-o", f"{memory}/masks")
    assert run_cli(*command) == 1
    said = capsys.readouterr()
    assert f"8 of 9 images segmented, see {memory}/masks" in said.out
    assert "not done: memory://bucket/photos/bad.png is not an image file" in said.err
    assert run_cli("predict", photos, *NET, "-o", tmp_path / "alone") == 1
    assert_same(downloaded(f"{memory}/masks", tmp_path / "masks"), tmp_path / "alone")
    assert not fsspec.filesystem("memory").exists("/bucket/masks/.predict/.lock")


def test_addresses_and_paths_mix(memory: str, photos: Path, tmp_path: Path) -> None:
    command = ("predict", photos / "0.png", f"{memory}/photos/1.png", *NET, "--outputs", "label")
    assert run_cli(*command, "-o", tmp_path / "out") == 0
    assert run_cli(*command, "-o", f"{memory}/out") == 0
    assert sorted(pictures(tmp_path / "out")) == ["0_label.png", "1_label.png"]
    assert_same(downloaded(f"{memory}/out", tmp_path / "copy"), tmp_path / "out")


def test_large_images_come_to_what_they_come_to_on_a_disk(
    memory: str, photos: Path, tmp_path: Path
) -> None:
    large = photos / "large.png"
    to_pil(random_image(256, 256)).save(large)
    fsspec.filesystem("memory").put_file(large, "/bucket/photos/large.png")
    words = (*NET, "--large", "tiles", "--max-pixels", "20000", "--outputs", "label", "color")
    assert run_cli("predict", large, *words, "-o", tmp_path / "alone") == 0
    assert run_cli("predict", f"{memory}/photos/large.png", *words, "-o", f"{memory}/out") == 0
    assert_same(downloaded(f"{memory}/out", tmp_path / "out"), tmp_path / "alone")
    assert "tiles" in table(tmp_path / "out")["large.png"]["notes"]


def test_georeferenced_images_are_read_from_disks_and_written_anywhere(
    memory: str, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    rasterio = pytest.importorskip("rasterio")
    levels = np.asarray(Image.open(photos / "0.png").convert("RGB")).transpose(2, 0, 1)
    with rasterio.open(
        tmp_path / "a.tif", "w", driver="GTiff", count=3, dtype="uint8", width=64, height=48,
        transform=rasterio.Affine(1, 0, 500, 0, -1, 900),
    ) as file:  # fmt: skip
        file.write(levels)
    words = (*NET, "--outputs", "label", "color")
    assert run_cli("predict", tmp_path / "a.tif", *words, "-o", tmp_path / "alone") == 0
    assert run_cli("predict", tmp_path / "a.tif", *words, "-o", f"{memory}/out") == 0
    written = pictures(downloaded(f"{memory}/out", tmp_path / "out"))
    assert "a_label.tif" in written
    assert written == pictures(tmp_path / "alone")
    fsspec.filesystem("memory").put_file(tmp_path / "a.tif", "/bucket/a.tif")
    capsys.readouterr()
    assert run_cli("predict", f"{memory}/a.tif", *words, "-o", tmp_path / "other") == 1
    assert f"{memory}/a.tif is georeferenced or very large" in capsys.readouterr().err


def test_patterns_keep_folders_and_outputs_are_no_inputs(memory: str, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    files.copy("/bucket/photos/0.png", "/bucket/photos/night/0.png")
    files.rm_file("/bucket/photos/bad.png")
    command = ("predict", f"{memory}/photos/**/*.png", *NET, "-o", f"{memory}/photos")
    assert run_cli(*command) == 0
    before = set(files.find("/bucket"))
    assert "/bucket/photos/night/0_label.png" in before
    assert run_cli(*command) == 0
    assert set(files.find("/bucket")) == before
    folder = downloaded(f"{memory}/photos", tmp_path / "out")
    assert len(table(folder)) == 8  # two are called 0.png
    assert len((folder / "predictions.csv").read_text().splitlines()) == 10


def test_images_of_the_web(photos: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("aiohttp")
    handler = partial(SimpleHTTPRequestHandler, directory=str(photos))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = f"http://127.0.0.1:{server.server_port}"
        command = ("predict", f"{web}/0.png?size=large", *NET, "-o", tmp_path / "out")
        assert run_cli(*command) == 0
        assert run_cli(*command) == 0
        assert "1 of 1 images segmented (1 before)" in capsys.readouterr().out
        assert run_cli("predict", f"{web}/none.png", *NET, "-o", tmp_path / "other") == 2
        assert f"there is no file {web}/none.png" in capsys.readouterr().err
        server.shutdown()
    assert run_cli("predict", photos / "0.png", *NET, "-o", tmp_path / "alone") == 0
    assert pictures(tmp_path / "out") == pictures(tmp_path / "alone")


def test_only_predict_and_ray_read_addresses(memory: str, photos: Path) -> None:
    with pytest.raises(FileNotFoundError):
        selfadapt.create_method("san", selfadapt.open_model("streets"))(f"{memory}/photos/0.png")
    root = Path(selfadapt.ray.__file__).parent
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"import fsspec|from fsspec|selfadapt.addresses import", path.read_text())
    }
    assert readers == {"addresses.py", "ray.py", "cli/predict.py", "predict/remote.py"}


def test_only_what_is_missing_or_has_changed_is_done_again(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    real = SaNOnly.compute
    monkeypatch.setattr(SaNOnly, "compute", lambda *args: seen.append(args) or real(*args))
    files = fsspec.filesystem("memory")
    files.rm_file("/bucket/photos/bad.png")
    command = ("predict", f"{memory}/photos/*.png", *NET, "-o", f"{memory}/masks")
    assert run_cli(*command) == 0
    assert len(seen) == 8
    assert run_cli(*command) == 0
    assert len(seen) == 8
    files.rm_file("/bucket/masks/0_label.png")
    files.copy("/bucket/photos/2.png", "/bucket/photos/1.png")
    files.copy("/bucket/photos/2.png", "/bucket/photos/8.png")
    assert run_cli(*command) == 0
    assert len(seen) == 11
    assert files.exists("/bucket/masks/0_label.png")


def test_what_is_refused_at_an_address(
    memory: str, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    files = fsspec.filesystem("memory")
    command = ("predict", f"{memory}/photos/0.png", *NET, "-o")

    def assert_refused(*words: Any, why: str) -> None:
        before = {name: files.cat_file(name) for name in files.find("/bucket")}
        assert run_cli(*words) == 2
        assert why in capsys.readouterr().err
        assert {name: files.cat_file(name) for name in files.find("/bucket")} == before

    assert run_cli(*command, f"{memory}/out") == 0
    assert_refused(*command, f"{memory}/out", "--alpha", "0.3", why=f"{memory}/out holds a run")
    files.pipe_file("/bucket/other/0_label.png", b"of a user")
    why = f"{memory}/other/0_label.png would be replaced"
    assert_refused(*command, f"{memory}/other", why=why)
    assert_refused(*command, f"{memory}/out", "--shard", "1/2", why="needs a folder on a disk")
    assert_refused(*command, "https://host/masks", why="can only be read")
    files.pipe_file("/bucket/a.mp4", b"")
    video = ("predict", f"{memory}/a.mp4", *NET, "-o", tmp_path / "out")
    assert_refused(*video, why="download it first")
    missing = ("predict", f"{memory}/none.png", *NET, "-o", tmp_path / "out")
    assert_refused(*missing, why=f"there is no file {memory}/none.png")
    missing = ("predict", f"{memory}/none/*.png", *NET, "-o", tmp_path / "out")
    assert_refused(*missing, why=f"there is no image at {memory}/none/*.png")
    evaluation = ("evaluate", "streets-quick", "-o", f"{memory}/run")
    assert_refused(*evaluation, why="an evaluation needs a folder on a disk")
    unknown = ("predict", "no-such://a.png", *NET, "-o", tmp_path / "out")
    assert_refused(*unknown, why="no-such://a.png: ValueError: Protocol not known")


def test_overwrite_removes_the_outputs_of_the_earlier_run_alone(memory: str) -> None:
    files = fsspec.filesystem("memory")
    command = ("predict", f"{memory}/photos/[0-3].png", *NET, "-o", f"{memory}/out")
    assert run_cli(*command) == 0
    files.pipe_file("/bucket/out/mine_label.png", b"of a user")
    command = ("predict", f"{memory}/photos/0.png", *NET, "-o", f"{memory}/out")
    assert run_cli(*command, "--alpha", "0.3", "--outputs", "label", "--overwrite") == 0
    names = {name.removeprefix("/bucket/out/") for name in files.find("/bucket/out")}
    assert names == {
        "0_label.png", "mine_label.png", "predictions.csv", "classes.json", "legend.png",
        ".predict/record.json", ".predict/rows/0000.jsonl",
    }  # fmt: skip


def test_two_processes_do_not_work_at_one_address(memory: str, capsys: Any) -> None:
    files = fsspec.filesystem("memory")
    command = ("predict", f"{memory}/photos/0.png", *NET, "-o", f"{memory}/out")
    folder = remote.RemoteFolder(f"{memory}/out", ["label"])
    folder.open({"a": 1})
    assert run_cli(*command, "--overwrite") == 2
    assert f"another process works in {memory}/out" in capsys.readouterr().err
    folder.close()
    files.pipe_file("/bucket/out/.predict/.lock", b"of a process that was killed")
    assert run_cli(*command, "--overwrite") == 0


@pytest.mark.slow
def test_killed_at_any_moment_a_run_at_an_address_goes_on(
    storage: str, photos: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "bad.png").unlink()
    for number in range(8, 20):
        to_pil(random_image(96, 128, seed=number)).save(photos / f"{number}.png")
    command = ("predict", photos, *ADAPT, "-o", f"{storage}/killed", "--outputs", "label")
    files = fsspec.filesystem("s3", use_listings_cache=False)

    def num_rows() -> int:
        path = "bucket/killed/.predict/rows/0000.jsonl"
        return files.cat_file(path).count(b"\n") if files.exists(path) else 0

    process = start_cli(*command, launcher=("-c", SYNC_OFTEN))
    wait_for(lambda: num_rows() > 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = num_rows()
    assert done < 20, "it was done before it was killed"
    monkeypatch.setattr(remote, "TAKE_OVER_S", 1.0)
    assert run_cli(*command) == 0
    assert f"20 of 20 images segmented ({done} before)" in capsys.readouterr().out
    assert run_cli(*command[:-4], "-o", tmp_path / "alone", "--outputs", "label") == 0
    assert_same(downloaded(f"{storage}/killed", tmp_path / "masks"), tmp_path / "alone")


# Ray


@pytest.mark.slow
def test_workers_come_to_what_one_process_comes_to_and_may_be_killed(
    cluster: Any, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    command = ("predict", photos, *ADAPT)
    killer = kill_a_worker(lambda: len(list(out.glob("*_label.png"))) > 1)
    assert run_cli(*command, "-o", out, "--ray") == 1
    assert "8 of 9 images segmented" in capsys.readouterr().out
    assert not killer.is_alive()
    assert run_cli(*command, "-o", tmp_path / "alone") == 1
    assert_same(out, tmp_path / "alone")
    assert not list(out.rglob("*.part"))
    assert run_cli(*command, "-o", out) == 1  # a run with Ray goes on without it
    assert "8 of 9 images segmented (8 before)" in capsys.readouterr().out


@pytest.mark.slow
def test_an_image_with_which_workers_die_is_a_failure(
    cluster: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(selfadapt.ray, "MAX_ATTEMPTS", 1)
    monkeypatch.setitem(METHODS, "deadly:Deadly", SaNOnly)  # taken out at the end
    (photos / "bad.png").unlink()
    to_pil(random_image(48, 66)).save(photos / "deadly.png")
    words = ("--model", "streets", "--method", "deadly:Deadly", "--trust", "--device", "cpu")
    assert run_cli("predict", photos, *words, "-o", tmp_path / "out", "--ray") == 1
    assert "workers have died" in capsys.readouterr().err
    failed = {name for name, row in table(tmp_path / "out").items() if row["status"] == "failed"}
    assert "deadly.png" in failed
    assert len(failed) <= 2, "the worker had two images"


@pytest.mark.slow
def test_workers_read_and_write_at_addresses(
    cluster: Any, storage: str, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    fsspec.filesystem("s3").put(str(photos) + "/", "bucket/photos/", recursive=True)
    command = ("predict", f"{storage}/photos/*.png", *NET, "-o", f"{storage}/masks")
    assert run_cli(*command, "--ray") == 1
    assert run_cli("predict", photos, *NET, "-o", tmp_path / "alone") == 1
    assert_same(downloaded(f"{storage}/masks", tmp_path / "masks"), tmp_path / "alone")
    capsys.readouterr()
    assert run_cli(*command) == 1
    assert "8 of 9 images segmented (8 before)" in capsys.readouterr().out


@pytest.mark.slow
def test_an_evaluation_by_workers_has_the_same_tables(
    cluster: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    place: Place = make_place(tmp_path_factory.mktemp("place"))
    recipe = write_recipe(tmp_path / "recipe.yaml", small(place, pictures=1))
    run = tmp_path / "run"
    killer = kill_a_worker(lambda: any(p.stat().st_size for p in run.glob("rows/*.jsonl")))
    assert run_cli("evaluate", recipe, "-o", run, "--ray") == 0
    assert not killer.is_alive()
    assert run_cli("evaluate", recipe, "-o", tmp_path / "alone") == 0
    assert tables_of(run) == tables_of(tmp_path / "alone")
    for path in (tmp_path / "alone").glob("pictures/*"):
        assert (run / "pictures" / path.name).read_bytes() == path.read_bytes()
    assert (run / "chosen.json").read_bytes() == (tmp_path / "alone/chosen.json").read_bytes()


@pytest.mark.slow
def test_the_page_shows_a_segmenter_in_map_batches(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    prepare()
    row: Any = run_blocks(ROOT / "docs" / "cluster.md")["row"]
    assert "/photos/a.png (24, 32) 0." in capsys.readouterr().out
    result = selfadapt.SelfAdapt(selfadapt.open_model("streets"), steps=3)("photos/a.png")
    assert np.array_equal(row["label"], result.label.numpy())
    assert row["confidence"].dtype == np.uint8


def test_a_segmenter_takes_arrays_bytes_and_paths_of_any_size(memory: str, photos: Path) -> None:
    segmenter = selfadapt.ray.Segmenter("streets", "san", device="cpu")
    picture = Image.open(photos / "0.png").convert("RGB")
    small = encode(picture.resize((40, 32)), "PNG")
    values = [np.asarray(picture), (photos / "0.png").read_bytes(), small,
              str(photos / "0.png"), f"{memory}/photos/0.png"]  # fmt: skip
    column = np.empty(len(values), object)
    column[:] = values
    batch = segmenter({"image": column, "id": np.arange(5)})
    label = segmenter.method(photos / "0.png").label.numpy()
    assert [np.array_equal(part, label) for part in batch["label"]] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert batch["label"][2].shape == (32, 40)
    assert [*batch["id"]] == [0, 1, 2, 3, 4]
    assert np.isnan(batch["quality"]).all()
    adapted = selfadapt.ray.Segmenter(segmenter.method.model, steps=1)
    assert 0 <= adapted({"image": [picture_array(picture)]})["quality"][0] <= 1


def picture_array(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture)


@pytest.mark.slow
def test_what_is_refused_with_ray(cluster: Any, photos: Path, tmp_path: Path, capsys: Any) -> None:
    command = ("predict", photos, *NET, "-o", tmp_path / "out", "--ray")
    assert run_cli(*command, "--shard", "1/2") == 2
    assert "leave out --shard" in capsys.readouterr().err
    assert run_cli(*command, "--device", "cuda") == 2
    assert "the Ray cluster has no GPU" in capsys.readouterr().err
    assert run_cli(*command, "--device", "cuda:1") == 2
    assert "--ray takes --device auto, cpu or cuda" in capsys.readouterr().err
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert run_cli(*command) == 2
    torch.set_num_threads(threads)
    assert "no machine of the Ray cluster has 3 cores" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
