"""What the command line sets of a recipe."""

import dataclasses
from pathlib import Path

import pytest

import multitower as mt
from multitower.cli.flags.settings import collect_settings, download_data
from multitower.recipes.catalog import find_recipe


def test_flags_and_pairs_become_one_dict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert collect_settings(["a=1", "b=x=y", "c="], None, synthetic=False) == {
        "a": "1",
        "b": "x=y",
        "c": "",
    }
    # Absolute, so that a resume from another directory reads the same files.
    assert collect_settings(["data=here"], None, synthetic=False)["data"] == str(tmp_path / "here")
    assert collect_settings([], Path("here"), synthetic=True) == {
        "data": str(tmp_path / "here"),
        "synthetic": "true",
    }


@pytest.mark.parametrize("pairs", [["a"], ["=1"], ["a=1", "a=1"], ["data=x"]])
def test_what_is_no_pair_or_comes_twice_is_an_error(pairs):
    with pytest.raises(mt.RunError, match=r"say NAME=VALUE|is set twice"):
        collect_settings(pairs, Path("y"), synthetic=False)


def test_a_download_tells_every_tenth_once(capsys):
    def download(progress):
        for done in range(0, 2_000_001, 1000):
            progress("a.bin", done, 2_000_000)

    download_data(dataclasses.replace(find_recipe("digits"), download=download))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "downloading a.bin: 2.0 of 2.0 MB"
