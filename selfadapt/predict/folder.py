"""The folder that masks are written to: a run whose outputs lie among files of the user.

predictions.csv       one line for each file
classes.json          index, name and colour of each class; legend.png: the same to look at
NAME_label.png ...    the outputs of a file
.predict/record.json  settings, network, and which outputs belong to which file
.predict/rows/        the journal: what is done, a file for each share
.predict/frames/      what is kept of the frames of a video until all are there

A name is taken in ``record.json`` before anything is written under it. So it is known whose an
output is, whenever the process that wrote it was killed; any other file is left alone.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from selfadapt.files import close_after_fork, lock, release_lock
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import CLASSES, LEGEND, OUTPUTS, output_paths
from selfadapt.runs import WHOLE, RunStore, Shard
from selfadapt.runs.store import RECORD
from selfadapt.version import __version__

TABLE = "predictions.csv"
ONCE = (TABLE, CLASSES, LEGEND)
"""Files that a folder has once."""
LONGEST = 240
"""The most bytes the name of an output may have: a file name has 255, some for the file aside."""


class Key(NamedTuple):
    """What a row of the journal is about."""

    file: str
    stamp: str
    frame: int | None
    """The number of a frame; None: the file as a whole."""


class PredictFolder(RunStore):
    """Where predictions are written.

    Args:
        path: The folder.
        kinds: What is written of each file, of ``OUTPUTS``.
        shard: The share of the files and frames that this process segments.
    """

    NAME: ClassVar[str] = "a run of predict"
    FORMAT: ClassVar[str] = "selfadapt predictions 2"
    WORK: ClassVar[str] = ".predict"

    def __init__(self, path: Path, kinds: Sequence[str], shard: Shard = WHOLE) -> None:
        super().__init__(path, shard)
        self.kinds = tuple(kinds)
        self.names: dict[str, str] = {}
        """The name that the outputs of each file start with, in the order they were taken."""

    def plan(self, inputs: Sequence[Input], *, overwrite: bool) -> list[Input]:
        """Choose names for the outputs of all inputs, refusing to lose any file.

        Returns:
            The inputs without those that are outputs of an earlier run into this folder.
        """
        present = self._present(inputs)
        taken, outputs = self._taken(overwrite=overwrite)
        left = [item for item in inputs if item.named or not _inside(Path(item.file), outputs)]
        if not left:
            raise FileNotFoundError(
                f"there is nothing to segment: all {len(inputs)} images are outputs in {self.path}"
            )
        kept = {} if overwrite else taken
        self.names = kept | choose_names(left, kept)
        self._check_inputs(left)
        if not overwrite:
            self._check_foreign([item for item in left if item.file not in taken], present)
        return left

    def base(self, item: Input) -> Path:
        """Return the path that the outputs of a file start with."""
        return self.path / self.names[item.file]

    def paths(self, item: Input) -> dict[str, Path]:
        """Return the outputs of a file, by what they show."""
        return output_paths(self.base(item), self.kinds, video=item.is_video)

    def frames(self, item: Input) -> Path:
        """Return the folder for what is kept of the frames of a video until all are there."""
        return self.work / "frames" / self.names[item.file]

    def start(
        self, identity: Mapping[str, Any], inputs: Sequence[Input], *, overwrite: bool
    ) -> None:
        """Open the folder for a run of these settings on these files."""
        identity = {"version": __version__, **identity}
        self.open(identity, {"names": self.names}, overwrite=overwrite)
        if self.shard.total > 1:
            self._take_names(identity, inputs)

    def outputs(self) -> Iterator[Path]:
        """Yield all files and folders that the runs of this folder write, there or not."""
        return iter(self._taken(overwrite=True)[1])

    @classmethod
    def read_record(cls, folder: Path) -> dict[str, Any]:
        """Read what the run in a folder is of."""
        record = super().read_record(folder)
        if not _stays_inside(record):
            raise ValueError(
                f"{folder / cls.WORK / RECORD} is damaged, its names must be of outputs in "
                f"{folder}; use --overwrite to start anew"
            )
        return record

    def _taken(self, *, overwrite: bool) -> tuple[dict[str, str], set[Path]]:
        """Return the names that are taken, and all files and folders written under them."""
        try:
            record = self.read_record(self.path)
        except FileNotFoundError:
            return {}, set()
        except ValueError:
            if overwrite:
                return {}, set()
            raise
        return record["names"], set(_outputs_of(self.path, record))

    def _take_names(self, identity: Mapping[str, Any], inputs: Sequence[Input]) -> None:
        """Take names for files that have none yet, as other shares may do at the same time."""
        file = os.open(self.work / ".names", os.O_RDWR | os.O_CREAT, 0o666)
        close_after_fork(file)
        try:
            while not lock(file):
                time.sleep(0.05)
            taken = self.read_record(self.path)["names"]
            self.names = taken | choose_names(inputs, taken)
            if self.names != taken:
                record = {"format": self.FORMAT, "identity": identity, "names": self.names}
                self.write_json(self.work / RECORD, record)
        finally:
            release_lock(file)

    def _present(self, inputs: Sequence[Input]) -> set[Path]:
        """Return the files that are in the way of outputs, be they of earlier runs or not.

        This is found out before the record is read: what another share writes after that has a
        name in the record.
        """
        places = {self.path / item.place for item in inputs} | {self.path}
        return {path for place in places if place.is_dir() for path in place.iterdir()}

    def _check_inputs(self, inputs: Sequence[Input]) -> None:
        outputs = {os.path.realpath(p) for item in inputs for p in self.paths(item).values()}
        outputs |= {os.path.realpath(self.path / name) for name in ONCE}
        for item in inputs:
            if os.path.realpath(item.path) in outputs:
                raise ValueError(f"the input {item.path} would be replaced by an output")
            longest = max(len(os.fsencode(path.name)) for path in self.paths(item).values())
            if longest > LONGEST:
                raise ValueError(
                    f"the name of {item.path} is too long for those of its outputs, which would "
                    f"have {longest} bytes, and {LONGEST} are the most; rename it or leave it out"
                )

    def _check_foreign(self, new: Iterable[Input], present: set[Path]) -> None:
        """Refuse to write where there are files that no earlier run has written."""
        paths = [path for item in new for path in self.paths(item).values()]
        if not (self.work / RECORD).exists():
            paths += [self.path / name for name in ONCE]
        if foreign := [path for path in paths if path in present]:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise FileExistsError(
                f"{foreign[0]}{more} would be replaced; choose another folder or say --overwrite"
            )

    def _clear(self) -> None:
        for path in self.outputs():
            _remove(path)
        for folder in ("rows", "frames"):
            shutil.rmtree(self.work / folder, ignore_errors=True)

    def _remove_parts(self) -> None:
        """Remove what killed processes have left half written, of this run alone."""
        super()._remove_parts()
        bases = [Path(os.path.abspath(self.path / name)) for name in self.names.values()]
        labels = {base.with_name(f"{base.name}_label") for base in bases}
        folders = {base.parent for base in bases} | {path for path in labels if path.is_dir()}
        parts = [aside for folder in folders for aside in folder.glob(".*.part")]
        outputs = set(self.outputs()) if parts else set()
        for aside in parts:
            if {aside.with_name(aside.name[1:].rsplit(".", 2)[0]), aside.parent} & outputs:
                aside.unlink(missing_ok=True)


def choose_names(inputs: Sequence[Input], taken: Mapping[str, str]) -> dict[str, str]:
    """Return for each file the name its outputs start with; one that has a name keeps it.

    Example:
        >>> from pathlib import Path
        >>> files = [Input(Path("/a.jpg")), Input(Path("/a.png")), Input(Path("/b.png"))]
        >>> choose_names(files, {"/a.png": "a"})
        {'/a.jpg': 'a_jpg', '/a.png': 'a', '/b.png': 'b'}
    """
    stems = Counter(item.place / item.path.stem for item in inputs)
    owners = {name: file for file, name in taken.items()}
    names = {}
    for item in inputs:
        name = (item.place / item.path.stem).as_posix()
        if stems[item.place / item.path.stem] > 1 or owners.get(name, item.file) != item.file:
            name = (item.place / item.path.name.replace(".", "_")).as_posix()  # a_jpg beside a_png
        name = taken.get(item.file, name)
        if owners.setdefault(name, item.file) != item.file:
            raise ValueError(
                f"{owners[name]} and {item.path} would be written to the same files; segment them "
                "into two folders, or give a pattern with **, which keeps the folders they are in"
            )
        names[item.file] = name
    return names


def _stays_inside(record: Mapping[str, Any]) -> bool:
    """Return True if all that a record names lies in its folder: what it names may be removed."""
    names, kinds = record.get("names"), record["identity"].get("outputs")
    if not isinstance(names, dict) or not isinstance(kinds, list) or set(kinds) - set(OUTPUTS):
        return False
    paths = [Path(name) for name in names.values() if isinstance(name, str)]
    inside = all(p.parts and ".." not in p.parts and not p.is_absolute() for p in paths)
    return inside and len(paths) == len(names)


def _outputs_of(folder: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """Yield all files and folders that the runs of a record write, in full."""
    folder = Path(os.path.abspath(folder))
    yield from (folder / name for name in ONCE)
    for file, name in record["names"].items():
        video = Input(Path(file)).is_video
        yield from output_paths(folder / name, record["identity"]["outputs"], video=video).values()


def _inside(path: Path, places: set[Path]) -> bool:
    return path in places or path.parent in places


def _remove(path: Path) -> None:
    """Remove an output; of the labels of a video what is ours, and the folder if that was all."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for pattern in ("[0-9]*.png", ".[0-9]*.png.*.part"):
        for file in path.glob(pattern):
            file.unlink()
    if not any(path.iterdir()):
        path.rmdir()
