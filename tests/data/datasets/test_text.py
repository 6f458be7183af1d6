"""Text: all of it is there once, and what is held out is not trained on."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import multitower as mt
from multitower.data.datasets.text import hold_out, make_synthetic_text, read_text


def test_a_directory_is_read_file_by_file_in_the_order_of_names(tmp_path):
    for number in range(40):
        folder = tmp_path / f"{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.{('txt', 'md', 'py')[number % 3]}").write_text(f"text {number}\n")
    (tmp_path / "0" / "image.png").write_bytes(b"no text")
    (tmp_path / "0" / "data.txt").write_bytes(b"bin\0ary")
    (tmp_path / "0" / "empty.txt").write_bytes(b"")
    text = read_text(tmp_path)
    order = sorted(range(40), key=lambda number: (number % 3, number))
    documents = [b"text %d\n" % number for number in order]
    assert text.test == documents[19::20]
    assert text.train == documents[:19] + documents[20:39]


@given(documents=st.lists(st.binary(max_size=90).filter(lambda one: b"\0" not in one), max_size=50))
@example(documents=[b"a\n"])
@example(documents=[b"\n\n"])
def test_no_byte_is_lost_and_every_20th_document_is_held_out(documents):
    everything = b"".join(documents)
    one_line = len(everything) == 2 and everything.find(b"\n") == 1 and everything in documents
    if len(everything) < 2 or one_line:
        with pytest.raises(mt.DataError, match=r"holds no text|too little to train"):
            hold_out(documents, "here")
        return
    text = hold_out(documents, "here")
    together = [*text.train]
    place = min(20, len(text.train) + len(text.test)) - 1
    for number, document in enumerate(text.test):
        together.insert(place + 20 * number, document)
    assert b"".join(together) == everything
    assert all(together)
    assert text.train


def test_a_long_file_is_cut_at_ends_of_lines(tmp_path):
    lines = [b"line %d %s\n" % (n, b"x" * (n % 70)) for n in range(20_000)]
    (tmp_path / "one.txt").write_bytes(b"".join(lines))
    text = read_text(tmp_path / "one.txt")
    assert read_text(tmp_path) == text
    pieces = [*text.train, *text.test]
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert sum(16_384 <= len(piece) < 16_500 for piece in pieces) >= len(pieces) - 1
    assert sum(map(len, pieces)) == sum(map(len, lines))


def test_a_line_without_end_is_cut_too(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"a" * 4000)
    text = read_text(tmp_path / "one.txt")
    assert [len(piece) for piece in text.train] == [100] * 38
    assert text.test == [b"a" * 100] * 2


@pytest.mark.slow
def test_the_standard_library_without_its_tests():
    text = read_text()
    assert read_text() == text
    everything = b"".join([*text.train, *text.test])
    assert len(everything) > 5e6
    assert b"class JSONDecoder" in everything
    assert b"class TestDecode" not in everything


def test_made_up_text_is_always_the_same():
    text = make_synthetic_text()
    assert make_synthetic_text() == text
    assert (len(text.train), len(text.test)) == (380, 20)
    assert text.train[0].endswith(b".\n")
    assert text.train[0].count(b" ") == 99
    assert len(set(text.train)) == 380


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"missing\.txt does not exist\. Name a text file or a directory"),
        ("empty.txt", b"", r"empty\.txt holds no text\. Name a text file, or a directory"),
        ("binary.txt", b"\0\1\2", r"binary\.txt holds no text\."),
        ("short.txt", b"x", r"holds 1 bytes of text: that is too little"),
        ("images/one.png", b"abc", r"images holds no text: there is no file \*\.txt, \*\.md, \*\."),
    ],
)
def test_what_is_no_text_is_an_error_that_says_what_to_do(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(mt.DataError, match=message):
        read_text(path.parent if name.startswith("images/") else path)
