"""Downloads a file on request, and gives it its name only after checking it."""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
import uuid
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
        num_bytes: its size in bytes.
        sha256: the SHA-256 checksum of its contents, 64 hexadecimal digits.
    """

    url: str
    num_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]


def cache_directory(name: str) -> Path:
    """The default directory for downloads of a data set.

    Args:
        name: the name of the data set.

    Returns:
        `$XDG_CACHE_HOME/multitower/<name>`, or `~/.cache/multitower/<name>`. It may not exist yet.

    Example:
        >>> from multitower.data.datasets.download import cache_directory
        >>> cache_directory("mnist").name
        'mnist'
    """
    chosen = os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "multitower" / name


def download(file: RemoteFile, directory: Path, progress: Progress | None = None) -> Path:
    """Downloads a file, unless the directory already has a file of that name.

    The file gets its name when it is complete and its checksum is right. So a file that this
    function has downloaded is always the right one. A download that fails leaves no file behind.

    Args:
        file: the file to download.
        directory: where to put it; it is made if it does not exist.
        progress: `progress(name, done, total)`, in bytes, called as they arrive.

    Returns:
        The path of the file.

    Raises:
        DataError: the file cannot be fetched or written, or is not the expected one. The message
            names it and says where to put it by hand.

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
    # Machines that share a disk may have processes of one number.
    partial = directory / f".{file.name}.{os.getpid()}-{uuid.uuid4().hex}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            found = _fetch(file, out.write, progress)
        if found != file.sha256:
            raise DataError(
                f"{file.url} is not the expected file: its SHA-256 is {found}, and "
                f"{file.sha256} was expected. {_by_hand(file, directory)}"
            )
        os.replace(partial, target)  # so other programs see the whole file or none
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # this closes the connection
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise DataError(
            f"{file.url} could not be downloaded to {target}: {reason}. {_by_hand(file, directory)}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return target


def where_to_get(files: Sequence[RemoteFile], directory: Path) -> str:
    """Explains how to get the files: with `--download`, or by hand."""
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
