"""Files at addresses, such as ``s3://bucket/a.jpg`` or ``https://host/a.jpg``, by fsspec.

Only ``predict`` and ``selfadapt.ray`` read addresses, those that the user gives. Nothing else in
the package does: an address is no path, and no other function takes it as one.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs

VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "Last-Modified", "created")
"""What storages call the version of a file, the most precise first."""


def is_address(text: object) -> bool:
    """Return True if a text is an address, not a path.

    Example:
        >>> is_address("s3://bucket/a.jpg"), is_address("photos/a.jpg")
        (True, False)
    """
    return isinstance(text, str) and re.match(r"[a-zA-Z][\w+.-]*://", text) is not None


def is_pattern(address: str) -> bool:
    """Return True if an address has ``*`` or ``[``, or ``?`` where that begins no query."""
    return any(char in address for char in ("*[" if is_web(address) else "*?["))


def is_web(address: str) -> bool:
    """Return True for an address of the web, whose files are read only."""
    return address.lower().startswith(("http://", "https://"))


def path_of(address: str) -> PurePosixPath:
    """Return the path in an address, with the name of its bucket or host.

    Example:
        >>> path_of("https://host/photos/a.jpg?size=large").as_posix()
        'host/photos/a.jpg'
    """
    path = address.partition("://")[2]
    return PurePosixPath(re.split("[?#]", path)[0] if is_web(address) else path)


def find_files(address: str) -> dict[str, str]:
    """Return the addresses of files, sorted, each with a text that changes when the file does.

    Args:
        address: A file, a pattern, or a folder with a slash at its end.
    """
    with explained(address):
        files, path = url_to_fs(address)
        if is_pattern(address):
            infos = files.glob(path, detail=True)
        elif address.endswith("/"):
            infos = {info["name"]: info for info in files.ls(path, detail=True)}
        else:
            infos = {path: files.info(path)}
        # What fsspec has removed from the address: the scheme, of some storages also the host.
        start = address.rstrip("/").removesuffix(path.lstrip("/"))
        return {
            start + name.lstrip("/"): _version(info)
            for name, info in sorted(infos.items())
            if info["type"] == "file"
        }


def download(address: str, path: Path) -> None:
    """Write the file at an address to ``path``."""
    with explained(address):
        files, source = url_to_fs(address)
        files.get_file(source, str(path))


def upload(path: Path, address: str) -> None:
    """Write a file to an address, where it appears once it is complete."""
    with explained(address):
        files, target = url_to_fs(address)
        files.put_file(str(path), target)


@contextmanager
def explained(address: str) -> Iterator[None]:
    """Raise errors of storage libraries as errors that name the address."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file {address}") from error
    except ImportError as error:
        raise ModuleNotFoundError(f"{address} needs a library: {error}") from error
    except Exception as error:  # each library has its own
        raise OSError(f"{address}: {type(error).__name__}: {error}") from error


def _version(info: Mapping[str, Any]) -> str:
    version = next((info[name] for name in VERSIONS if info.get(name)), "")
    return f"{info.get('size')} {version}"
