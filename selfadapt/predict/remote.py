"""Inputs at addresses, and an output folder at an address, such as ``s3://bucket/masks``.

A ``RemoteFolder`` works in a temporary folder on this machine, whose record, journal and tables are
uploaded every few seconds and at the end. Outputs are uploaded by who makes them, and have a row
in the journal after that. So what is at the address can always be continued, on any machine: a
process that is killed costs the images in flight, and those whose rows were not uploaded yet.

Storages of objects have no locks. Instead the owner of a folder rewrites an object every few
seconds; who finds one that changes leaves the folder alone, and who finds one that does not takes
the folder over.

``FileSegmenter`` segments files from and to addresses and paths, here and on the machines of a
cluster.
"""

import secrets
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from fsspec.core import url_to_fs

from selfadapt.addresses import (
    download,
    explained,
    find_files,
    is_address,
    is_pattern,
    is_web,
    path_of,
    upload,
)
from selfadapt.files import replaced_path
from selfadapt.images import Image
from selfadapt.labels import Classes
from selfadapt.methods import Segments
from selfadapt.predict.folder import PredictFolder
from selfadapt.predict.inputs import IMAGES, Input
from selfadapt.predict.outputs import output_paths
from selfadapt.predict.scene import LargeImages
from selfadapt.predict.stream import UnitOutcome, attempt, predict
from selfadapt.prefetch import prefetch
from selfadapt.result import Result
from selfadapt.runs.store import LOCK, RECORD

SYNC_INTERVAL_S = 5.0
"""Seconds between two uploads of the rows, and of the object that says who works there."""
TAKE_OVER_S = 4 * SYNC_INTERVAL_S
"""Seconds without a change after which the owner of a folder is taken for dead."""

NUM_THREADS = 4
"""Threads that read and write at addresses, and share the network."""


@dataclass(frozen=True)
class RemoteInput(Input):
    """A file at an address."""

    address: str = ""
    version: str = ""

    @property
    def file(self) -> str:
        """The address, which identifies the file in the journal."""
        return self.address

    @property
    def shown(self) -> str:
        """The address."""
        return self.address

    @property
    def is_raster(self) -> bool:
        """False: georeferenced files at addresses are refused when they are read."""
        return False

    def stamp(self) -> str:
        """Return a text that changes when the file does."""
        return self.version


def find_remote(addresses: Iterable[str]) -> list[Input]:
    """Return the images at addresses: files, patterns, and folders with a slash at their end."""
    inputs: dict[str, Input] = {}
    for address in addresses:
        is_file = not is_pattern(address) and not address.endswith("/")
        # The part of the pattern that is fixed; outputs keep the folders below it.
        parts = path_of(address).parts
        fixed = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
        matches: dict[str, Input] = {}
        for file, version in find_files(address).items():
            path = path_of(file)
            subfolder = Path(*path.parent.parts[fixed:]) if is_pattern(address) else Path()
            item = RemoteInput(Path(path), subfolder, is_file, file, version)
            if item.is_video:
                raise ValueError(f"{file} is a video, which must be on a disk; download it first")
            if is_file or path.suffix.lower() in IMAGES:
                matches[file] = item
        if not matches:
            raise FileNotFoundError(f"there is no image at {address}")
        inputs = {**matches, **inputs}
    return list(inputs.values())


class FileJob(NamedTuple):
    """An image to segment."""

    file: str
    """Its absolute path or address."""
    base: str
    """Path or address that its outputs begin with."""
    shown: str
    """Its name in messages."""
    stamp: str
    """Text that changes when the file does."""
    tiles: str
    """Folder for tiles, if its outputs are on a disk."""


class FileSegmenter:
    """A method for several threads, which read and write while one of them runs the network.

    Args:
        method: The method.
        classes: Names of its classes, with colours if they are a mapping.
        outputs: Kinds of output, keys of ``OUTPUTS``.
        large: How large and georeferenced images are segmented.
    """

    def __init__(
        self,
        method: Segments,
        classes: Classes | None,
        outputs: Sequence[str],
        large: LargeImages,
    ) -> None:
        self.members = getattr(method, "members", (method,))
        self._method, self._classes, self._outputs, self._large = method, classes, outputs, large
        self._lock = threading.Lock()

    def __call__(self, image: Image) -> Result:
        """Segment an image."""
        with self._lock:
            return self._method(image)

    def segment_file(self, job: FileJob) -> UnitOutcome:
        """Segment a file and write its outputs."""
        with TemporaryDirectory(prefix="selfadapt-") as temporary:
            path, base, tiles = Path(job.file), Path(job.base), Path(job.tiles)
            if is_address(job.base):
                base, tiles = Path(temporary, "outputs", "output"), Path(temporary, "tiles")
            if is_address(job.file):
                path = Path(temporary, f"image{path_of(job.file).suffix}")
                try:
                    download(job.file, path)
                except OSError as error:  # of other storages it is none of this file
                    if isinstance(error, FileNotFoundError) or is_web(job.file):
                        return error
                    raise
            outcome = self._segment(Input(path), base, tiles, job)
            if isinstance(outcome, Exception):
                return ValueError(str(outcome).replace(str(path), job.shown))
            if is_address(job.base):
                for output in base.parent.iterdir():
                    upload(output, job.base + output.name.removeprefix(base.name))
            return outcome

    def _segment(self, item: Input, base: Path, tiles: Path, job: FileJob) -> UnitOutcome:
        """Segment a file that is on a disk by now."""
        if item.is_raster and is_address(job.file):
            return ValueError(f"{job.shown} is georeferenced or very large, download it first")
        if not self._large.is_scene(item):
            ((_, outcome),) = predict(self, [item.path], [base], self._classes, self._outputs)
            return outcome
        paths = output_paths(base, self._outputs, raster=item.is_raster)

        def segment() -> UnitOutcome:
            with self._lock:
                return self._large.segment(
                    item, paths, tiles, self._classes, job.stamp, lambda done, total: None
                )

        return attempt(segment)

    def segment_files(
        self, jobs: Sequence[FileJob]
    ) -> Generator[tuple[FileJob, UnitOutcome], None, None]:
        """Yield jobs with their outcomes."""
        yield from zip(jobs, prefetch(self.segment_file, jobs, NUM_THREADS), strict=True)


class RemoteFolder(PredictFolder):
    """Output folder of ``predict`` at an address.

    Args:
        address: The address.
        kinds: Kinds of output for each file, keys of ``OUTPUTS``.
    """

    def __init__(self, address: str, kinds: Sequence[str]) -> None:
        if is_web(address):
            raise ValueError(f"{address} can only be read; give a folder, or s3:// or gs://")
        self.address = address.rstrip("/")
        self._temporary = TemporaryDirectory(prefix="selfadapt-")
        super().__init__(Path(self._temporary.name), kinds)
        self._token = secrets.token_hex(8)
        self._lock_address = self.shown(f"{self.WORK}/{LOCK}")
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._closing = threading.Event()
        self._uploads: threading.Thread | None = None
        self.update()
        self._download()

    def shown(self, name: str) -> str:
        """Return the address of a file in the folder."""
        return f"{self.address}/{name}"

    def target(self, item: Input) -> str:
        """Return the address that the outputs of a file begin with."""
        return self.shown(self.names[item.file])

    def exists(self, path: Path) -> bool:
        """Return True if an output existed at the last ``update``."""
        return path in self._files

    def existing(self, folders: Iterable[Path]) -> set[Path]:
        """Return the files of the folder at the last ``update``."""
        return self._files

    def update(self) -> None:
        """List the files at the address."""
        with explained(self.address):
            files, root = url_to_fs(self.address)
            files.invalidate_cache()
            names = (name[len(root) :].lstrip("/") for name in files.find(root))
            self._files = {self.path / name for name in names}

    def plan(self, inputs: Sequence[Input], *, overwrite: bool) -> list[Input]:
        """Choose names for the outputs of all inputs, such that no file is lost."""
        with self._named():
            outputs = {self._address(path) for path in self.outputs()}
            left = [item for item in inputs if item.explicit or item.file not in outputs]
            left = super().plan(left, overwrite=overwrite)
        outputs = {self._address(path) for item in left for path in self.paths(item).values()}
        for item in left:
            if item.file in outputs:
                raise ValueError(f"the input {item.file} would be replaced by an output")
        return left

    def open(
        self,
        identity: Mapping[str, Any],
        details: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Open the folder and upload its record, rows and tables every few seconds."""
        with self._named():
            self.check(identity, overwrite=overwrite)
            self._take_over()
            super().open(identity, details, overwrite=overwrite)
        self._upload()
        self._uploads = threading.Thread(target=self._keep_uploading, daemon=True)
        self._uploads.start()

    def close(self) -> None:
        """Upload what has changed, and let other processes work here."""
        if self._uploads is not None:
            self._closing.set()
            self._uploads.join()
            self._uploads = None
            self._upload()
            with explained(self.address):
                files, path = url_to_fs(self._lock_address)
                files.rm_file(path)
        super().close()
        self._temporary.cleanup()

    def _address(self, path: Path) -> str:
        return self.shown(path.relative_to(self.path).as_posix())

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the address in errors, not the temporary folder."""
        try:
            yield
        except (ValueError, OSError) as error:
            raise type(error)(str(error).replace(str(self.path), self.address)) from error

    def _download(self) -> None:
        for path in self._files:
            if path == self.work / RECORD or path.parent == self.rows:
                path.parent.mkdir(parents=True, exist_ok=True)
                download(self._address(path), path)

    def _upload(self) -> None:
        """Upload the files that have changed since the last time."""
        for path in (self.work / RECORD, *self.rows.glob("*"), *self.path.glob("*")):
            if path.is_file() and replaced_path(path) is None:
                status = path.stat()
                stamp = status.st_size, status.st_mtime_ns
                if self._uploaded.get(path) != stamp:
                    upload(path, self._address(path))
                    self._uploaded[path] = stamp

    def _keep_uploading(self) -> None:
        while not self._closing.wait(SYNC_INTERVAL_S):
            with suppress(OSError):  # tried again, and raised at the end
                self._sign()
                self._upload()

    def _sign(self) -> None:
        with explained(self.address):
            files, path = url_to_fs(self._lock_address)
            files.pipe_file(path, f"{self._token} {time.time()}".encode())

    def _signature(self) -> bytes | None:
        with suppress(FileNotFoundError), explained(self.address):
            files, path = url_to_fs(self._lock_address)
            return bytes(files.cat_file(path))
        return None

    def _take_over(self) -> None:
        """Sign the folder once no other process works in it."""
        signature = self._signature()
        if signature is not None:
            warnings.warn(
                f"another process may work in {self.address}, or was killed there; waiting up to "
                f"{TAKE_OVER_S:.0f} s to see",
                stacklevel=2,
            )
            end = time.monotonic() + TAKE_OVER_S
            while (now := self._signature()) == signature and time.monotonic() < end:
                time.sleep(SYNC_INTERVAL_S / 5)
            if now not in (signature, None):
                raise ValueError(
                    f"another process works in {self.path}; wait for it, or give another folder"
                )
            self.update()
            self._download()
        self._sign()

    def _clear(self) -> None:
        with explained(self.address):
            files, _ = url_to_fs(self.address)
            removed = [path for path in self.outputs() if path in self._files]
            removed += [path for path in self._files if path.parent == self.rows]
            for path in removed:
                files.rm_file(url_to_fs(self._address(path))[1])
        super()._clear()
        self._files.difference_update(removed)
