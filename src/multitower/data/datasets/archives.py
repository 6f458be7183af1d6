"""Reads untrusted archives in memory, and takes only plain files from them.

Nothing is unpacked to a disk, so no path in an archive can reach other files. An archive with
links, devices or absolute paths is refused as a whole.
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from multitower.errors import DataError

# Far above the largest file of any data set that is read here (CIFAR-10: 31 MB, MNIST: 47 MB),
# and so low that an archive which is made to fill the memory cannot do so.
_LARGEST_BYTES = 256 * 1024**2
_BLOCK_BYTES = 1024**2
_DAMAGED = (EOFError, gzip.BadGzipFile, tarfile.TarError, zlib.error)


def read_file(path: Path) -> bytes:
    """Reads a file, decompressed if it is a gzip file by its first bytes.

    Args:
        path: the path of the file.

    Returns:
        Its contents.

    Raises:
        DataError: the file cannot be read, is truncated or damaged, or has more than 256 MiB.

    Example:
        >>> import gzip, tempfile
        >>> from pathlib import Path
        >>> from multitower.data.datasets.archives import read_file
        >>> with tempfile.TemporaryDirectory() as here:
        ...     path = Path(here) / "file.gz"
        ...     _ = path.write_bytes(gzip.compress(b"pixels"))
        ...     read_file(path)
        b'pixels'
    """
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not is_gzip:
                return _read_at_most(file, path)
            with gzip.open(file) as unpacked:
                return _read_at_most(unpacked, path)
    except _DAMAGED as error:
        raise _damaged(path, error) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def read_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Reads files from a `.tar.gz` archive, all of them or none.

    The archive is read to its end, so that gzip's own checksum is checked too.

    Args:
        path: the path of the archive.
        wanted: the names of files in it.

    Returns:
        Name to contents, for each of them.

    Raises:
        DataError: the archive cannot be read, is truncated or damaged, lacks one of the files,
            or has a member that is not safe to read: a path that leads out of it, a link, a
            device, or more than 256 MiB; or it has one of the files twice.

    Example:
        >>> import io, tarfile, tempfile
        >>> from pathlib import Path
        >>> from multitower.data.datasets.archives import read_members
        >>> with tempfile.TemporaryDirectory() as here:
        ...     path = Path(here) / "a.tar.gz"
        ...     with tarfile.open(path, "w:gz") as tar:
        ...         member = tarfile.TarInfo("batches/one.bin")
        ...         member.size = 6
        ...         tar.addfile(member, io.BytesIO(b"pixels"))
        ...     read_members(path, ["batches/one.bin"])
        {'batches/one.bin': b'pixels'}
    """
    found: dict[str, bytes] = {}
    try:
        with (
            gzip.open(path) as stream,
            tarfile.open(fileobj=_Bounded(stream, path), mode="r:") as tar,
        ):
            for member in tar:
                name = _safe_name(member, path)
                if name not in wanted:
                    continue
                if name in found:
                    raise DataError(f"{path} holds {name!r} twice. Download the archive again.")
                content = tar.extractfile(member)
                assert content is not None
                found[name] = content.read()
            while stream.read(_BLOCK_BYTES):
                pass  # gzip compares its checksum at the end only
    except _DAMAGED as error:
        raise _damaged(path, error) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(
            f"{path} does not hold {missing[0]!r}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}: it is another "
            "archive, or a damaged one. Download it again."
        )
    return found


class _Bounded(io.RawIOBase):
    """A file from which not more is read at once than a data file has, names of members too."""

    def __init__(self, file: gzip.GzipFile, path: Path) -> None:
        self._file, self._path = file, path

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LARGEST_BYTES:
            raise DataError(
                f"{self._path} is not safe to read: a name in it claims {size} bytes. Nothing was "
                "unpacked. Get the archive from its origin."
            )
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _safe_name(member: tarfile.TarInfo, path: Path) -> str:
    """The member's name, if it is a plain file or a directory within the archive."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or ":" in member.name:
        reason = "its path leads out of the archive"
    elif not (member.isreg() or member.isdir()) or member.issparse():
        reason = "it is a link or a device, not a plain file"
    elif member.size > _LARGEST_BYTES:
        reason = f"it claims {member.size} bytes, and the limit is {_LARGEST_BYTES}"
    else:
        return str(name)
    raise DataError(
        f"{path} is not safe to read: the member {member.name!r} is refused, since {reason}. "
        "Nothing was unpacked. Get the archive from its origin."
    )


def _read_at_most(file: BinaryIO | gzip.GzipFile, path: Path) -> bytes:
    content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise DataError(f"{path} holds more than {_LARGEST_BYTES} bytes: it is not a data file.")
    return content


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is truncated or damaged ({error}). Delete it and download it again.")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}.")
