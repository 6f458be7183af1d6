"""Downloading a file: only when asked, checked before it gets its name, or not at all."""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from multitower.errors import DataError

Progress = Callable[[str, int, int], None]

_BLOCK_BYTES = 1024**2
_TIMEOUT_S = 30


@dataclass(frozen=True)
class RemoteFile:
    """A file on the web.

    Attributes:
        url: its address.
        num_bytes: its size.
        sha256: of its contents, 64 hexadecimal digits.
    """

    url: str
    num_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]


def cache_directory(name: str) -> Path:
    """Where downloads go that are given no directory.

    Args:
        name: of the data set.

    Returns:
        `$XDG_CACHE_HOME/multitower/<name>`, or `~/.cache/multitower/<name>`. It need not exist.

    Example:
        >>> from multitower.data.datasets.download import cache_directory
        >>> cache_directory("mnist").name
        'mnist'
    """
    chosen = os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "multitower" / name


def download(file: RemoteFile, directory: Path, progress: Progress | None = None) -> Path:
    """Downloads a file, unless it is there.

    It gets its name when it is complete and its checksum is right, so that a file of that name is
    always the right one; a download that fails leaves nothing behind.

    Args:
        file: which one.
        directory: where to put it; made if need be.
        progress: `progress(name, done, total)`, called as bytes come in.

    Returns:
        The path.

    Raises:
        DataError: the file cannot be fetched or written, or is another one than it should be. The
            message names it and says where to put it by hand.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.data.datasets.download import RemoteFile, download
        >>> with tempfile.TemporaryDirectory() as here:
        ...     _ = (Path(here) / "a.bin").write_bytes(b"there already")
        ...     download(RemoteFile("https://example.org/a.bin", 13, ""), Path(here)).name
        'a.bin'
    """
    target = directory / file.name
    if target.exists():
        return target
    partial = directory / f".{file.name}.{os.getpid()}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            found = _fetch(file, out.write, progress)
        if found != file.sha256:
            raise DataError(
                f"{file.url} brought another file than it should: its SHA-256 is {found}, and "
                f"{file.sha256} was expected. {_by_hand(file, directory)}"
            )
        os.replace(partial, target)  # readers see no file or the whole file
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the connection, too
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise DataError(
            f"{file.url} could not be downloaded to {target}: {reason}. {_by_hand(file, directory)}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return target


def where_to_get(files: Sequence[RemoteFile], directory: Path) -> str:
    """Explains how to get the files: `--download`, or by hand."""
    addresses = ", ".join(file.url for file in files)
    return f"Download with --download, or by hand: {addresses} into {directory}."


def _by_hand(file: RemoteFile, directory: Path) -> str:
    return f"By hand: download {file.url} and put it into {directory}."


def _fetch(file: RemoteFile, write: Callable[[bytes], object], progress: Progress | None) -> str:
    """Writes the contents block by block; returns their SHA-256."""
    if not file.url.startswith(("https://", "http://")):
        raise DataError(f"{file.url} is not a web address: it must begin with http:// or https://.")
    digest = hashlib.sha256()
    done = 0
    with urllib.request.urlopen(file.url, timeout=_TIMEOUT_S) as response:
        while block := response.read(_BLOCK_BYTES):
            done += len(block)
            if done > file.num_bytes:
                raise DataError(
                    f"{file.url} brings more than the {file.num_bytes} bytes that it should have: "
                    "it is another file."
                )
            write(block)
            digest.update(block)
            if progress is not None:
                progress(file.name, done, file.num_bytes)
    if done < file.num_bytes:
        raise OSError(f"it ended after {done} of {file.num_bytes} bytes")
    return digest.hexdigest()
