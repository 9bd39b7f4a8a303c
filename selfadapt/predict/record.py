"""The folder that masks are written to, and what is remembered of it.

predictions.csv       one line for each file
classes.json          index, name and colour of each class; legend.png: the same to look at
NAME_label.png ...    what was made of it
.predict/record.json  settings, network, and which outputs belong to which file
.predict/rows/        the journal: what is done, a file for each process
.predict/frames/      what is kept of the frames of a video until all are there

A name is taken in ``record.json`` before anything is written under it. So whoever finds an output
knows whose it is, whenever the process that wrote it was killed; any other file is left alone.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from selfadapt.files import make_folder, written_whole
from selfadapt.journal import lock_rows
from selfadapt.predict.inputs import Input
from selfadapt.predict.outputs import CLASSES, LEGEND, OUTPUTS, output_paths
from selfadapt.recipes import differences
from selfadapt.version import __version__

FORMAT = "selfadapt predictions 1"
TABLE = "predictions.csv"
ONCE = (TABLE, CLASSES, LEGEND)
"""Files that a folder has once."""
WORK = ".predict"
PATIENCE = 60.0
"""Seconds to wait until what another process has written is seen here, too."""
LONGEST = 240
"""The most bytes the name of an output may have: a file name has 255, some for the file aside."""


class Key(NamedTuple):
    """What a row of the journal is about."""

    file: str
    stamp: str
    frame: int | None
    """The number of a frame; None: the file as a whole."""


class PredictFolder:
    """Where predictions are written, by one of the processes that share them."""

    def __init__(self, path: Path, outputs: Sequence[str], rank: int = 0, world: int = 1) -> None:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"the output must be a folder, but {path} is a file")
        self.path, self.outputs, self.rank, self.world = path, tuple(outputs), rank, world
        self.work = path / WORK
        self.rows = self.work / "rows"
        self.names: dict[str, str] = {}
        """The name that the outputs of each file start with, in the order they were taken."""

    def plan(self, inputs: Sequence[Input], *, overwrite: bool) -> list[Input]:
        """Choose names for the outputs of all inputs, refusing to lose any file.

        Returns:
            The inputs without those that are outputs of an earlier run into this folder.
        """
        if overwrite and self.world > 1:
            raise ValueError("several processes cannot start anew: start one with --overwrite")
        known, mine = self._known(overwrite=overwrite)
        left = [one for one in inputs if one.named or not _inside(Path(one.file), mine)]
        if not left:
            raise FileNotFoundError(
                f"there is nothing to segment: all {len(inputs)} images are outputs in {self.path}"
            )
        kept = {} if overwrite else known
        self.names = kept | choose_names(left, kept)
        self._check_inputs(left)
        if self.rank == 0 and not overwrite:
            self._check_foreign([one for one in left if one.file not in known])
        return left

    def base(self, one: Input) -> Path:
        """Return the path that the outputs of a file start with."""
        return self.path / self.names[one.file]

    def paths(self, one: Input) -> dict[str, Path]:
        """Return the outputs of a file, by what they show."""
        return output_paths(self.base(one), self.outputs, video=one.is_video)

    def frames(self, one: Input) -> Path:
        """Return the folder for what is kept of the frames of a video until all are there."""
        return self.work / "frames" / self.names[one.file]

    def open(
        self, identity: Mapping[str, Any], inputs: Sequence[Input], *, overwrite: bool
    ) -> None:
        """Make the folder, or make sure that what is in it was made as is asked for now."""
        identity = json.loads(json.dumps({"version": __version__, **identity}))
        there = (self.work / "record.json").exists()
        if there and not overwrite:
            self._compare(identity)
        if self.rank == 0:
            if overwrite and there:
                self._clear()
            make_folder(self.work)
            record = {"format": FORMAT, "identity": identity, "names": self.names}
            with written_whole(self.work / "record.json") as aside:
                aside.write_text(json.dumps(record, indent=1) + "\n")
        self._wait_for_names(identity, inputs)
        make_folder(self.rows)

    def sweep(self, inputs: Sequence[Input]) -> None:
        """Remove what processes that were killed have left behind, when all inputs are done."""
        mine = _outputs_of(self.path, {"names": self.names, "identity": {"outputs": self.outputs}})
        outputs = {*mine, Path(os.path.abspath(self.work / "record.json"))}
        for folder in {path.parent for path in outputs} | {p for p in outputs if p.is_dir()}:
            for aside in folder.glob(".*.part"):
                whole = aside.with_name(aside.name[1:].rsplit(".", 2)[0])
                if whole in outputs or folder in outputs:
                    aside.unlink(missing_ok=True)
        for one in inputs:
            if one.is_video:
                shutil.rmtree(self.frames(one), ignore_errors=True)

    def _known(self, *, overwrite: bool) -> tuple[dict[str, str], set[Path]]:
        """Return the names that are taken, and all files and folders written under them."""
        if not (self.work / "record.json").exists():
            return {}, set()
        try:
            record = read_record(self.path)
        except ValueError:
            if overwrite:
                return {}, set()
            raise
        return record["names"], set(_outputs_of(self.path, record))

    def _check_inputs(self, inputs: Sequence[Input]) -> None:
        outputs = {os.path.realpath(path) for one in inputs for path in self.paths(one).values()}
        outputs |= {os.path.realpath(self.path / name) for name in ONCE}
        for one in inputs:
            if os.path.realpath(one.path) in outputs:
                raise ValueError(f"the input {one.path} would be replaced by an output")
            longest = max(len(os.fsencode(path.name)) for path in self.paths(one).values())
            if longest > LONGEST:
                raise ValueError(
                    f"the name of {one.path} is too long for those of its outputs, which would "
                    f"have {longest} bytes, and {LONGEST} are the most; rename it or leave it out"
                )

    def _check_foreign(self, new: Iterable[Input]) -> None:
        """Refuse to write where there are files that no earlier run has written."""
        paths = [path for one in new for path in self.paths(one).values()]
        if not (self.work / "record.json").exists():
            paths += [self.path / name for name in ONCE]
        if present := [path for path in paths if path.exists()]:
            more = f" and {len(present) - 1} more" if len(present) > 1 else ""
            raise FileExistsError(
                f"{present[0]}{more} would be replaced; choose another folder or say --overwrite"
            )

    def _compare(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse to go on with what was made with other settings or another network."""
        record = read_record(self.path)
        if changed := differences(record["identity"], identity):
            raise ValueError(
                f"{self.path} holds predictions made otherwise ({'; '.join(changed[:5])}); give "
                "another folder, or use --overwrite to start anew"
            )
        return record

    def _wait_for_names(self, identity: Mapping[str, Any], inputs: Sequence[Input]) -> None:
        """Wait until the first process has taken a name for every file."""
        start = time.monotonic()
        while self.rank > 0:
            if (self.work / "record.json").exists():
                self.names = self._compare(identity)["names"]
                if all(one.file in self.names for one in inputs):
                    return
            if time.monotonic() - start > PATIENCE:
                raise ValueError(f"the first process has not made {self.path}: is it on a disk "
                                 "that all processes see, with the same files?")  # fmt: skip
            time.sleep(0.1)

    def _clear(self) -> None:
        """Remove what earlier runs have written, unless some process is still at it."""
        for path in sorted(self.rows.glob("*.jsonl")):
            os.close(lock_rows(path))
        for path in self._known(overwrite=True)[1]:
            _remove(path)
        shutil.rmtree(self.work)


def choose_names(inputs: Sequence[Input], known: Mapping[str, str]) -> dict[str, str]:
    """Return for each file the name its outputs start with; one that has a name keeps it.

    Example:
        >>> from pathlib import Path
        >>> files = [Input(Path("/a.jpg")), Input(Path("/a.png")), Input(Path("/b.png"))]
        >>> choose_names(files, {"/a.png": "a"})
        {'/a.jpg': 'a_jpg', '/a.png': 'a', '/b.png': 'b'}
    """
    stems = Counter(one.place / one.path.stem for one in inputs)
    owners = {name: file for file, name in known.items()}
    names = {}
    for one in inputs:
        name = (one.place / one.path.stem).as_posix()
        if stems[one.place / one.path.stem] > 1 or owners.get(name, one.file) != one.file:
            name = (one.place / one.path.name.replace(".", "_")).as_posix()  # a_jpg beside a_png
        name = known.get(one.file, name)
        if owners.setdefault(name, one.file) != one.file:
            raise ValueError(
                f"{owners[name]} and {one.path} would be written to the same files; segment them "
                "into two folders, or give a pattern with **, which keeps the folders they are in"
            )
        names[one.file] = name
    return names


def read_record(folder: Path) -> dict[str, Any]:
    """Read what a folder of predictions is of."""
    path = folder / WORK / "record.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); use --overwrite to start anew") from error
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{path} must be of the format {FORMAT!r}, got {found!r}; use --overwrite to start anew"
        )
    if lacking := [part for part in ("identity", "names") if part not in record]:
        raise ValueError(
            f"{path} is damaged, it lacks {', '.join(lacking)}; use --overwrite to start anew"
        )
    if not _stays_inside(record):
        raise ValueError(f"{path} is damaged, its names must be of outputs in {folder}")
    return record


def _stays_inside(record: Mapping[str, Any]) -> bool:
    """Say whether all that a record names lies in its folder: what it names may be removed."""
    names, identity = record["names"], record["identity"]
    if not isinstance(names, dict) or not isinstance(identity, dict):
        return False
    parts = [Path(name).parts for name in names.values() if isinstance(name, str)]
    known = set(identity.get("outputs", [])) <= set(OUTPUTS)
    inside = all(found and ".." not in found and not Path(*found).is_absolute() for found in parts)
    return known and inside and len(parts) == len(names)


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
