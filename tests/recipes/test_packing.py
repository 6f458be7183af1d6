"""Packed rows: no byte is lost, and every byte is predicted once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from multitower.recipes.packing import SEPARATOR, pack, take_tokens


@given(
    documents=st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=12),
    length=st.integers(1, 20),
)
def test_every_byte_is_in_its_row_and_is_predicted_once(documents, length):
    rows = pack(documents, length)
    assert rows.dtype == np.uint16
    assert rows.shape[1] == length + 1
    np.testing.assert_array_equal(rows[:-1, -1], rows[1:, 0])
    stream = [rows[0, 0], *rows[:, 1:].ravel()]
    assert bytes(token for token in stream if token != SEPARATOR) == b"".join(documents)
    # One separator before each document, and after the last one only what fills the row up.
    assert stream.count(SEPARATOR) - len(documents) == len(stream) - sum(
        len(document) + 1 for document in documents
    )
    assert len(rows) * length < sum(len(document) + 1 for document in documents) + length


def test_segments_and_what_counts_are_those_of_a_loop():
    documents = [b"abc", b"d", b"efghijklm", b"n"]
    rows = pack(documents, 4)
    inputs, segments, targets, counts = map(np.asarray, take_tokens(rows))
    predicted = b""
    for row, row_inputs, row_segments, row_targets, row_counts in zip(
        rows, inputs, segments, targets, counts, strict=True
    ):
        np.testing.assert_array_equal(row_inputs, row[:-1])
        np.testing.assert_array_equal(row_targets, row[1:])
        segment = 0
        for place, token in enumerate(row[:-1]):
            segment += int(token == SEPARATOR)
            assert row_segments[place] == segment
            assert row_counts[place] == (row[place + 1] != SEPARATOR)
        predicted += bytes(row_targets[row_counts].tolist())
    assert predicted == b"".join(documents)
