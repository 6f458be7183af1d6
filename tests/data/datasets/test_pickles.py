"""Pickles: arrays and plain containers, and not one call of anything else."""

import collections
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import multitower as mt
from dataset_files import python2_pickle
from multitower.data.datasets.pickles import read_pickled_dict

BATCH = {
    "data": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "labels": [1, 2, 9],
    "filenames": ["a.png"],
}


class Runs:
    """A pickle that calls something when it is read."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "f4"])
def test_arrays_of_every_protocol_come_back(protocol, order, dtype):
    array = np.arange(12, dtype=dtype).reshape(3, 4, order=order)
    found = read_pickled_dict(pickle.dumps({"data": array, b"n": 1}, protocol), "here")
    np.testing.assert_array_equal(found["data"], array)
    assert found["data"].dtype == array.dtype
    assert found["n"] == 1


def test_pickles_of_python_2_come_back():
    content = python2_pickle(BATCH)
    assert b"numpy.core.multiarray" in content
    found = read_pickled_dict(content, "here")
    np.testing.assert_array_equal(found.pop("data"), BATCH["data"])
    assert found == {"labels": [1, 2, 9], "filenames": ["a.png"]}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_code_is_refused_before_it_runs(tmp_path, protocol):
    marker = tmp_path / "marker"
    trap = Runs(os.system, f"touch {marker}")
    content = pickle.dumps({**BATCH, "trap": trap}, protocol)
    with pytest.raises(mt.DataError, match=r"here asks for (posix|nt)\.system.*not executed"):
        read_pickled_dict(content, "here")
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the trap is none, so the test proves nothing"


@pytest.mark.parametrize(
    "value",
    [
        Runs(eval, "1"),
        Runs(getattr, 1, "real"),
        Runs(np.fromfile, "/etc/passwd"),
        Runs(np.load, "x.npy"),
        np.array([print], dtype=object),
        np.zeros(2, [("a", "u1")]),
        np.array(["text"]),
        np.ma.array([1]),
        collections.Counter("a"),
        Runs(os.path.join, "a"),
    ],
)
def test_nothing_but_plain_arrays_is_made(value):
    with pytest.raises(mt.DataError, match="here "):
        read_pickled_dict(pickle.dumps({"data": value}), "here")


def test_arrays_cannot_be_called_into_being_with_invented_memory():
    # numpy.ndarray(shape, dtype, buffer) would look at chosen bytes as objects.
    content = b"\x80\x02cnumpy\nndarray\nK\x01\x85X\x01\x00\x00\x00O\x86R."
    with pytest.raises(mt.DataError, match="damaged pickle"):
        read_pickled_dict(content, "here")


@pytest.mark.parametrize("value", [[1], 3, "text", np.zeros(2)])
def test_what_is_no_dict_is_an_error(value):
    with pytest.raises(mt.DataError, match="not of a dict"):
        read_pickled_dict(pickle.dumps(value), "here")


class Unset:
    """An array whose contents never come."""

    def __reduce__(self):
        return np.zeros(2).__reduce__()[:2]


def test_an_array_without_contents_is_an_error():
    with pytest.raises(mt.DataError, match="here is a damaged pickle"):
        read_pickled_dict(pickle.dumps({"data": Unset()}), "here")


@given(cut=st.floats(0, 1, exclude_max=True), flip=st.binary(max_size=20))
def test_damaged_pickles_are_errors_of_ours(cut, flip):
    content = python2_pickle(BATCH)
    with pytest.raises(mt.DataError):
        read_pickled_dict(content[: int(len(content) * cut)] + flip.replace(b".", b""), "here")
