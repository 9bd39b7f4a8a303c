"""The output folder of ``predict``, where outputs may be mixed with files of the user.

predictions.csv       one row for each input file
classes.json          index, name and colour of each class; legend.png: the same as a picture
NAME_label.png ...    the outputs of a file
.predict/record.json  settings, network, and which outputs belong to which file
.predict/rows/        the journal: finished files, one journal for each share
.predict/frames/      masks of the frames of a video until all frames are done
.predict/tiles/       the tiles of a large image until all tiles are done

A name is reserved in ``record.json`` before anything is written under it. So even after a kill it
is known which files are outputs; other files are never touched.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from selfadapt.checks import first_few
from selfadapt.files import (
    close_after_fork,
    holds,
    lock,
    open_own,
    release_lock,
    replaced_path,
    would_be_replaced,
)
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import CLASSES, LEGEND, OUTPUTS, output_paths
from selfadapt.runs import WHOLE, RunStore, Shard
from selfadapt.runs.store import RECORD
from selfadapt.scenes.geotiff import categories_path
from selfadapt.version import __version__

TABLE = "predictions.csv"
SHARED_FILES = (TABLE, CLASSES, LEGEND)
"""Files that a folder has once, not for each input."""
MAX_NAME_BYTES = 240
"""Maximum length of an output's name: a file name has 255 bytes, some for a temporary suffix."""


class FileKey(NamedTuple):
    """Key of a journal row."""

    file: str
    stamp: str
    frame: int | None
    """Index of a frame; None: the whole file."""


class PredictFolder(RunStore):
    """Output folder of ``predict``.

    Args:
        path: The folder.
        kinds: Kinds of output for each file, keys of ``OUTPUTS``.
        shard: The share of the files and frames that this process segments.
    """

    NAME: ClassVar[str] = "a run of predict"
    FORMAT: ClassVar[str] = "selfadapt predictions 3"
    WORK: ClassVar[str] = ".predict"

    def __init__(self, path: Path, kinds: Sequence[str], shard: Shard = WHOLE) -> None:
        super().__init__(path, shard)
        self.kinds = tuple(kinds)
        self.names: dict[str, str] = {}
        """Prefix of the output names of each file, in the order they were reserved."""
        self.rasters: set[str] = set()
        """Files whose label and confidence are georeferenced rasters."""

    def plan(self, inputs: Sequence[Input], *, overwrite: bool) -> list[Input]:
        """Choose names for the outputs of all inputs, such that no file is lost.

        Returns:
            The inputs without those that are outputs of an earlier run into this folder.
        """
        folders = {self.path / item.subfolder for item in inputs} | {self.path}
        # Listed before the record is read, which then names what other shares write after this.
        existing = self.existing(folders)
        record, outputs = self._reserved(overwrite=overwrite)
        reserved = record["names"]
        left = [
            item
            for item in inputs
            if item.explicit or not {Path(item.file), Path(item.file).parent} & outputs
        ]
        if not left:
            raise FileNotFoundError(
                f"there is nothing to segment: all {len(inputs)} images are outputs in {self.path}"
            )
        kept = {} if overwrite else reserved
        self.names = kept | choose_names(left, kept)
        self.rasters = {item.file for item in left if item.is_raster} | {
            file for file in record["rasters"] if file in kept
        }
        self._check_inputs(left)
        if not overwrite:  # nor are files replaced that no earlier run has written
            new = [item for item in left if item.file not in reserved]
            paths = [path for item in new for path in self.paths(item).values()]
            paths += [categories_path(path) for path in paths if path.suffix == ".tif"]
            if not (self.work / RECORD).exists():
                paths += [self.path / name for name in SHARED_FILES]
            if foreign := [path for path in paths if path in existing]:
                raise would_be_replaced(first_few(foreign, 1))
        return left

    def base(self, item: Input) -> Path:
        """Return the path prefix of the outputs of a file."""
        return self.path / self.names[item.file]

    def paths(self, item: Input) -> dict[str, Path]:
        """Return the output paths of a file by kind."""
        return output_paths(self.base(item), self.kinds, video=item.is_video, raster=item.is_raster)

    def target(self, item: Input) -> str:
        """Return the absolute path that the outputs of a file begin with."""
        return os.path.abspath(self.base(item))

    def exists(self, path: Path) -> bool:
        """Return True if an output exists."""
        return path.exists()

    def update(self) -> None:
        """List the files again, if they were listed."""

    def existing(self, folders: Iterable[Path]) -> set[Path]:
        """Return what is in some folders."""
        return {path for folder in folders if folder.is_dir() for path in folder.iterdir()}

    def shown(self, name: str) -> str:
        """Return the name in messages of a file in the folder."""
        return str(self.path / name)

    def frames(self, item: Input) -> Path:
        """Return the folder for the masks of a video's frames until all frames are done."""
        return self.work / "frames" / self.names[item.file]

    def tiles(self, item: Input) -> Path:
        """Return the folder for the tiles of a large image until all tiles are done."""
        return self.work / "tiles" / self.names[item.file]

    def start(
        self, identity: Mapping[str, Any], inputs: Sequence[Input], *, overwrite: bool
    ) -> None:
        """Open the folder for a run with these settings on these files."""
        identity = {"version": __version__, **identity}
        self.open(identity, self._reserves(), overwrite=overwrite)
        if self.shard.total > 1:
            self._reserve_names(identity, inputs)

    def outputs(self) -> Iterator[Path]:
        """Yield all files and folders that runs in this folder write, existing or not."""
        return iter(self._reserved(overwrite=True)[1])

    @classmethod
    def read_record(cls, folder: Path) -> dict[str, Any]:
        """Read and check the record of the run in a folder."""
        record = super().read_record(folder)
        if not _stays_inside(record):
            raise ValueError(
                f"{folder / cls.WORK / RECORD} is damaged, its names must be of outputs in "
                f"{folder}; use --overwrite to start again"
            )
        return record

    def _reserves(self) -> dict[str, Any]:
        return {"names": self.names, "rasters": sorted(self.rasters)}

    def _reserved(self, *, overwrite: bool) -> tuple[dict[str, Any], set[Path]]:
        """Return the record, and all files and folders that may be written under its names."""
        nothing: dict[str, Any] = {"names": {}, "rasters": []}
        try:
            record = self.read_record(self.path)
        except FileNotFoundError:
            return nothing, set()
        except ValueError:
            if overwrite:
                return nothing, set()
            raise
        return record, set(_outputs_of(self.path, record))

    def _reserve_names(self, identity: Mapping[str, Any], inputs: Sequence[Input]) -> None:
        """Reserve names for files without one, as other shares may do at the same time."""
        file = open_own(self.work / ".names", os.O_RDWR | os.O_CREAT)
        close_after_fork(file)
        try:
            while not lock(file):
                time.sleep(0.05)
            record = self.read_record(self.path)
            self.names = record["names"] | choose_names(inputs, record["names"])
            self.rasters |= set(record["rasters"])
            if self._reserves() != {name: record[name] for name in self._reserves()}:
                record = {"format": self.FORMAT, "identity": identity, **self._reserves()}
                self.write_json(self.work / RECORD, record)
        finally:
            release_lock(file)

    def _check_inputs(self, inputs: Sequence[Input]) -> None:
        outputs = {os.path.realpath(p) for item in inputs for p in self.paths(item).values()}
        outputs |= {os.path.realpath(self.path / name) for name in SHARED_FILES}
        for item in inputs:
            if os.path.realpath(item.path) in outputs:
                raise ValueError(f"the input {item.shown} would be replaced by an output")
            longest = max(len(os.fsencode(path.name)) for path in self.paths(item).values())
            if longest > MAX_NAME_BYTES:
                raise ValueError(
                    f"the name of {item.shown} is too long: the names of its outputs would have "
                    f"{longest} bytes, and at most {MAX_NAME_BYTES} are possible; rename it or "
                    "leave it out"
                )

    def _clear(self) -> None:
        for path in self.outputs():
            if holds(self.path, path):
                _remove(path)
        for folder in ("rows", "frames", "tiles"):
            shutil.rmtree(self.work / folder, ignore_errors=True)

    def remove_parts(self) -> None:
        """Remove temporary files that killed processes of this run have left."""
        super().remove_parts()
        bases = [Path(os.path.abspath(self.path / name)) for name in self.names.values()]
        labels = {base.with_name(f"{base.name}_label") for base in bases}
        folders = {base.parent for base in bases} | {path for path in labels if path.is_dir()}
        parts = [part for folder in folders for part in folder.glob(".*.part")]
        outputs = set(self.outputs()) if parts else set()
        for part in parts:
            path = replaced_path(part)
            if path and {path, path.parent} & outputs and holds(self.path, path):
                part.unlink(missing_ok=True)


def choose_names(inputs: Sequence[Input], reserved: Mapping[str, str]) -> dict[str, str]:
    """Return the prefix of the output names of each file; reserved ones are kept.

    Example:
        >>> from pathlib import Path
        >>> files = [Input(Path("/a.jpg")), Input(Path("/a.png")), Input(Path("/b.png"))]
        >>> choose_names(files, {"/a.png": "a"})
        {'/a.jpg': 'a_jpg', '/a.png': 'a', '/b.png': 'b'}
    """
    stems = Counter(item.subfolder / item.path.stem for item in inputs)
    owners = {name: file for file, name in reserved.items()}
    names = {}
    for item in inputs:
        name = (item.subfolder / item.path.stem).as_posix()
        if stems[item.subfolder / item.path.stem] > 1 or owners.get(name, item.file) != item.file:
            name = (
                item.subfolder / item.path.name.replace(".", "_")
            ).as_posix()  # a_jpg beside a_png
        name = reserved.get(item.file, name)
        if owners.setdefault(name, item.file) != item.file:
            raise ValueError(
                f"{owners[name]} and {item.shown} would be written to the same files; segment them "
                "into two folders, or give a pattern with **, which keeps their subfolders"
            )
        names[item.file] = name
    return names


def _stays_inside(record: Mapping[str, Any]) -> bool:
    """Return True if all names of a record are inside its folder: those files may be removed."""
    names, kinds = record.get("names"), record["identity"].get("outputs")
    if not isinstance(names, dict) or not isinstance(record.get("rasters"), list):
        return False
    if not isinstance(kinds, list) or set(kinds) - set(OUTPUTS):
        return False
    paths = [Path(name) for name in names.values() if isinstance(name, str)]
    inside = all(p.parts and ".." not in p.parts and not p.is_absolute() for p in paths)
    return inside and len(paths) == len(names)


def _outputs_of(folder: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the absolute paths of all files and folders that the run of a record writes."""
    folder = Path(os.path.abspath(folder))
    yield from (folder / name for name in SHARED_FILES)
    for file, name in record["names"].items():
        video, kinds = Input(Path(file)).is_video, record["identity"]["outputs"]
        yield from output_paths(folder / name, kinds, video=video).values()
        if file in record["rasters"]:
            paths = output_paths(folder / name, kinds, raster=True)
            yield from paths.values()
            yield from (categories_path(path) for kind, path in paths.items() if kind == "label")


def _remove(path: Path) -> None:
    """Remove an output; of a label folder only our files, and the folder if it is then empty."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for pattern in ("[0-9]*.png", ".[0-9]*.png.*.part"):
        for file in path.glob(pattern):
            file.unlink()
    if not any(path.iterdir()):
        path.rmdir()
