"""Atomic writes, file locks, output paths and cells of CSV files."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write, which replaces ``path`` at the end of the block."""
    check_output(path, overwrite=True)
    temporary = temporary_path(path)
    try:
        temporary.open("xb").close()
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error.strerror or error}); nothing of it was changed"
        ) from error
    finally:
        with suppress(OSError):  # on a disk that cannot be written to
            temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Return a new path beside ``path`` for what will replace it.

    It is random, as processes of different machines and containers may have the same number.

    Example:
        >>> path = temporary_path(Path("out/a.png"))  # such as out/.a.png.5f0c93be.part
        >>> replaced_path(path).as_posix()
        'out/a.png'
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def replaced_path(path: Path) -> Path | None:
    """Return the path that a temporary path was to replace; None if it is not temporary."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.part", path.name)
    return path.with_name(match[1]) if match else None


def remove_partial_files(folder: Path, *files: str) -> None:
    """Remove temporary files of killed processes; no other process may write to the folder.

    Args:
        folder: The folder.
        files: Patterns of the written files, relative to the folder.
    """
    for file in map(Path, files):
        for temporary in folder.glob(str(file.parent / f".{file.name}.*.part")):
            if replaced_path(temporary) and holds(folder, temporary):
                if temporary.is_dir() and not temporary.is_symlink():
                    shutil.rmtree(temporary)
                else:
                    temporary.unlink(missing_ok=True)


def holds(folder: Path, path: Path) -> bool:
    """Return True if a file is in a folder, even if one of the folders between them is a link."""
    return Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder))


def file_name(text: str) -> str:
    """Return a text as a valid file name of at most 100 bytes.

    Example:
        >>> file_name("night, san/1")
        'night_san_1'
    """
    return re.sub(r"[^\w.-]+", "_", text).encode()[:100].decode(errors="ignore")


FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")
"""Prefixes of cells that spreadsheets run as formulas."""


def csv_cell(value: object) -> object:
    """Return a value for a CSV file; a text that would be a formula gets a leading '.

    Example:
        >>> csv_cell("=1+1"), csv_cell("road"), csv_cell(-0.5)
        ("'=1+1", 'road', -0.5)
    """
    is_formula = isinstance(value, str) and value.startswith(FORMULA_PREFIXES)
    return f"'{value}" if is_formula else value


def check_output(path: Path, *, overwrite: bool) -> None:
    """Raise an error before a computation if its output file cannot be written."""
    if path.is_dir():
        raise IsADirectoryError(f"the output must be a file, but {path} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
    if path.exists() and not overwrite:
        raise would_be_replaced(path)


def would_be_replaced(path: object) -> FileExistsError:
    """Return the error about an output that exists, if overwriting is not allowed."""
    return FileExistsError(
        f"{path} would be replaced; choose another name or folder, or use --overwrite "
        "(in Python: overwrite=True)"
    )


def open_own(path: Path, flags: int) -> int:
    """Open a file of ours to write to; refuse a link, which could lead to a file of others."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        reason = "it is a link; remove it" if path.is_symlink() else error.strerror
        raise type(error)(f"{path} cannot be written to ({reason})") from error


def lock(file: int, *, shared: bool = False) -> bool:
    """Lock an open file; return False if another process has locked it.

    A shared lock only excludes exclusive locks. On systems and disks without locks, nothing is
    locked and the result is True.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this disk does not support locks
        pass
    return True


_LOCKED: set[int] = set()
"""Locked files of this process, which forked processes close."""


def close_after_fork(file: int) -> None:
    """Close a locked file in forked processes, which would otherwise hold the lock as well."""
    _LOCKED.add(file)


def release_lock(file: int) -> None:
    """Close a locked file, so that other processes may lock it."""
    _LOCKED.remove(file)
    os.close(file)


def _close_locked() -> None:
    while _LOCKED:
        os.close(_LOCKED.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locked)


def make_folder(path: Path) -> None:
    """Create a folder and its parents unless they exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"the folder {path} cannot be made ({error.strerror})") from error
