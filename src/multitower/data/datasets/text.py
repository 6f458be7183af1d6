"""Text as documents of bytes: a file, a directory, Python's standard library, or synthetic."""

import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from multitower.errors import DataError

SUFFIXES = (".txt", ".md", ".py")

_HELD_OUT_EVERY = 20
_FEW = 20  # documents; fewer are cut into pieces, and pieces are held out
_PIECES = 40
_LARGEST_PIECE_BYTES = 16_384
_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3")
_SEED = 21
_NUM_WORDS = 200


class Text(NamedTuple):
    """Documents for training, and others for testing.

    Attributes:
        train: the training documents; none is empty.
        test: the documents that are held out for testing.
    """

    train: list[bytes]
    test: list[bytes]


def read_text(path: Path | None = None) -> Text:
    """Reads text, and holds out every 20th document for testing.

    A document is a file; files are sorted by their paths. Fewer than 20 files are cut at ends of
    lines into about 40 pieces, or into pieces of 16 KiB if these are smaller. Each piece is then a
    document.

    Args:
        path: a text file, or a directory with files `*.txt`, `*.md` and `*.py`, also in its
            subdirectories; files with a zero byte do not count as text. None for the sources of
            Python's standard library without its tests, which depend on the version of Python.

    Returns:
        The documents.

    Raises:
        DataError: the path does not exist or cannot be read, or it has no text or too little.

    Example:
        >>> from multitower.data.datasets.text import read_text
        >>> text = read_text()
        >>> len(text.train) // len(text.test)
        19
    """
    if path is None:
        where = Path(sysconfig.get_paths()["stdlib"])
        files = _files_in(where, (".py",), left_out=_LEFT_OUT)
    else:
        where = path
        files = _files_in(path, SUFFIXES) if path.is_dir() else [path]
    return hold_out([_read(file) for file in files], str(where))


def hold_out(documents: Iterable[bytes], where: str) -> Text:
    """Holds out every 20th document; of fewer than 20 documents, every 20th piece.

    Args:
        documents: the documents, in order; empty ones and those with a zero byte are left out.
        where: what they were read from, for messages.

    Returns:
        The documents.

    Raises:
        DataError: no text, or too little.
    """
    found = [document for document in documents if document and b"\0" not in document]
    if not found:
        raise DataError(
            f"{where} holds no text. Name a text file, or a directory with "
            f"{', '.join(f'*{suffix}' for suffix in SUFFIXES)} files that are not empty."
        )
    if len(found) < _FEW:
        size = min(_LARGEST_PIECE_BYTES, max(1, sum(map(len, found)) // _PIECES))
        found = [piece for document in found for piece in _pieces(document, size)]
    place = min(_HELD_OUT_EVERY, len(found)) - 1  # the last one, if there are fewer than 20
    test = found[place::_HELD_OUT_EVERY]
    train = [one for n, one in enumerate(found) if n % _HELD_OUT_EVERY != place]
    if not train:
        raise DataError(
            f"{where} holds {sum(map(len, found))} bytes of text: that is too little to train on "
            "one part and test on another. Use a longer text."
        )
    return Text(train, test)


def make_synthetic_text(num_documents: int = 400) -> Text:
    """Makes documents of synthetic words, the same ones on every machine.

    Args:
        num_documents: the number of documents, 20 or more; each has 100 words.

    Returns:
        The documents.

    Example:
        >>> from multitower.data.datasets.text import make_synthetic_text
        >>> text = make_synthetic_text(40)
        >>> len(text.train), len(text.test)
        (38, 2)
    """
    bits = np.random.Philox(np.random.SeedSequence([_SEED]))
    letters = (bits.random_raw(_NUM_WORDS * 6) % 26 + ord("a")).astype(np.uint8).tobytes()
    lengths = bits.random_raw(_NUM_WORDS) % 5 + 2
    words = [letters[6 * n : 6 * n + int(size)] for n, size in enumerate(lengths)]
    # The product of two uniform draws: some words are frequent, most are rare, as in a language.
    first, second = bits.random_raw(2 * num_documents * 100).reshape(2, num_documents, 100)
    places = (first % _NUM_WORDS) * (second % _NUM_WORDS) // _NUM_WORDS
    return hold_out((b" ".join(words[n] for n in row) + b".\n" for row in places), "made-up text")


def _files_in(directory: Path, suffixes: Sequence[str], left_out: Sequence[str] = ()) -> list[Path]:
    """The files below a directory with these suffixes, sorted by their paths."""
    named = [
        (path.relative_to(directory).parts, path)
        for path in directory.rglob("*")
        if path.suffix in suffixes and path.is_file()
    ]
    kept = [(parts, path) for parts, path in named if not set(parts[:-1]) & set(left_out)]
    if not kept:
        raise DataError(
            f"{directory} holds no text: there is no file "
            f"{', '.join(f'*{suffix}' for suffix in suffixes)} in it. Name a text file, or a "
            "directory with such files."
        )
    return [path for _, path in sorted(kept)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist. Name a text file or a directory of them; without --data the "
            "text is Python's standard library."
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _pieces(document: bytes, size: int) -> list[bytes]:
    """A document cut at ends of lines into pieces of about `size` bytes."""
    found: list[bytes] = []
    start = 0
    while start < len(document):
        end = document.find(b"\n", start + size - 1, start + 2 * size) + 1
        end = end or start + size  # a long line is cut where it is
        found.append(document[start:end])
        start = end
    return found
