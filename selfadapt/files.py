"""Files that are whole or not there at all."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write a file aside and move it into place at the end, so that it is never half there."""
    check_output(path, overwrite=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error.strerror or error}); nothing of it was changed"
        ) from error
    finally:
        with suppress(OSError):  # on a disk that cannot be written to
            aside.unlink(missing_ok=True)


def remove_parts(folder: Path, *files: str) -> None:
    """Remove what processes that are gone have left half written; nobody may write there now.

    Args:
        folder: Where they wrote.
        files: What they wrote, as patterns relative to the folder; anything else stays.
    """
    for file in map(Path, files):
        for aside in folder.glob(str(file.parent / f".{file.name}.*.part")):
            if aside.name.split(".")[-2].isdecimal():
                shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)


def file_name(text: str) -> str:
    """Return a text as a file may be called, shortened to 100 bytes.

    Example:
        >>> file_name("night, san/1")
        'night_san_1'
    """
    return re.sub(r"[^\w.-]+", "_", text).encode()[:100].decode(errors="ignore")


def check_output(path: Path, *, overwrite: bool) -> None:
    """Say before the work, not after it, why a file cannot be written."""
    if path.is_dir():
        raise IsADirectoryError(f"a file is to be written, but {path} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} would be replaced; choose another name or say --overwrite "
            "(in Python: overwrite=True)"
        )


def lock(file: int, *, shared: bool = False) -> bool:
    """Keep other processes from locking an open file; return False where one has done so.

    A shared lock keeps them from one that is not. Where the system or the disk knows no locks there
    is nothing to keep them from it.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this disk knows none
        pass
    return True


_LOCKED: set[int] = set()
"""Open files that this process has locked, and forked processes close."""


def hold(file: int) -> None:
    """Keep a locked file from processes forked later: they would hold the lock while they live."""
    _LOCKED.add(file)


def release(file: int) -> None:
    """Close a file that is held: others may lock it."""
    _LOCKED.remove(file)
    os.close(file)


def _close_locked() -> None:
    while _LOCKED:
        os.close(_LOCKED.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locked)


def make_folder(path: Path) -> None:
    """Make a folder, and those it lies in, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"the folder {path} cannot be made ({error.strerror})") from error
