"""Archives: read whole or refused whole, and nothing ever lands on the disk."""

import gzip
import tarfile

import numpy as np
import pytest

import multitower as mt
from dataset_files import write_tar
from multitower.data.datasets import archives
from multitower.data.datasets.archives import read_file, read_members

NOISE = np.random.default_rng(0).bytes(50_000)  # does not compress: truncation hits the contents
FILES = {"batches/a.bin": NOISE, "batches/b.bin": b"second"}


def member(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info, b""


def refused(path, *message):
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(mt.DataError) as caught:
        read_members(path, FILES)
    for words in (str(path), *message):
        assert words in str(caught.value)
    assert sorted(path.parent.rglob("*")) == before, "something was unpacked"


def test_members_come_back_byte_for_byte(tmp_path):
    path = write_tar(tmp_path / "a.tar.gz", {**FILES, "batches/readme.html": b"more"})
    assert read_members(path, FILES) == FILES


def test_a_leading_dot_is_the_same_name(tmp_path):
    path = write_tar(tmp_path / "a.tar.gz", {f"./{name}": x for name, x in FILES.items()})
    assert read_members(path, FILES) == FILES


@pytest.mark.parametrize(
    "unsafe",
    [
        member("../escaped"),
        member("batches/../../escaped"),
        member("/tmp/escaped"),
        member("batches\\..\\..\\escaped"),
        member("C:escaped"),
        member("batches/a", tarfile.SYMTYPE, "/etc/passwd"),
        member("batches/a", tarfile.LNKTYPE, "../escaped"),
        member("batches/a", tarfile.CHRTYPE),
        member("batches/a", tarfile.FIFOTYPE),
    ],
    ids=lambda pair: pair[0].name + pair[0].type.decode(),
)
def test_a_member_that_leads_out_is_refused_with_all_the_others(tmp_path, unsafe):
    # The lie: an archive that is half read before its trap is seen.
    refused(write_tar(tmp_path / "a.tar.gz", FILES, unsafe), "is not safe", "Nothing was unpacked")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_archive_is_an_error(tmp_path, share):
    path = write_tar(tmp_path / "a.tar.gz", FILES)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refused(path)


def test_a_flipped_bit_anywhere_is_an_error(tmp_path):
    path = write_tar(tmp_path / "a.tar.gz", FILES)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(path, "damaged")


def test_a_wrong_checksum_at_the_end_is_seen(tmp_path):
    # The lie: reading stops with the last member, and gzip's checksum is never looked at.
    path = write_tar(tmp_path / "a.tar.gz", FILES)
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    refused(path, "damaged")


def test_a_missing_member_is_named(tmp_path):
    refused(write_tar(tmp_path / "a.tar.gz", {"batches/a.bin": NOISE}), "'batches/b.bin'")


def test_a_member_twice_is_refused(tmp_path):
    refused(write_tar(tmp_path / "a.tar.gz", FILES, member("batches/a.bin")), "twice")


def test_no_gzip_file_and_no_file_are_errors(tmp_path):
    path = tmp_path / "a.tar.gz"
    with pytest.raises(mt.DataError, match="cannot be read: No such file"):
        read_members(path, FILES)
    path.write_bytes(b"<html>404</html>")
    refused(path, "damaged")


def test_files_are_read_packed_and_plain(tmp_path):
    for name, content in {"plain": NOISE, "packed": gzip.compress(NOISE)}.items():
        (tmp_path / name).write_bytes(content)
        assert read_file(tmp_path / name) == NOISE


def test_a_truncated_or_missing_file_is_an_error(tmp_path):
    with pytest.raises(mt.DataError, match="No such file"):
        read_file(tmp_path / "none.gz")
    (tmp_path / "a.gz").write_bytes(gzip.compress(NOISE)[:-9])
    with pytest.raises(mt.DataError, match="truncated or damaged"):
        read_file(tmp_path / "a.gz")


def test_an_archive_made_to_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_LARGEST_BYTES", 10_000)
    refused(write_tar(tmp_path / "a.tar.gz", FILES), "claims 50000 bytes")
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(10_001)))
    with pytest.raises(mt.DataError, match="more than 10000 bytes"):
        read_file(tmp_path / "a.gz")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_name_made_to_fill_the_memory_is_refused(tmp_path, monkeypatch, kind):
    # The lie: the limit is that of contents, and names are read whole before they are looked at.
    path = tmp_path / "a.tar.gz"
    info = tarfile.TarInfo("long")
    info.type, info.size = kind, 50_000
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT) + bytes(50_000 + 2 * 512))
    monkeypatch.setattr(archives, "_LARGEST_BYTES", 20_000)
    refused(path, "a name in it claims 50", "Nothing was unpacked")
