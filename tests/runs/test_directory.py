"""A run's directory: nothing is overwritten unasked, nothing is written by halves."""

import json
import os
import signal

import pytest

import multitower as mt
from multitower.cli.main import main
from multitower.processes.run_lock import held_run_directory
from multitower.runs.directory import (
    fresh_run_directory,
    make_run_directory,
    read_config,
    write_config,
    write_result,
)


def test_a_result_is_written_whole(tmp_path):
    path = write_result(tmp_path, {"steps": 3})
    assert json.loads(path.read_text()) == {"steps": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_what_cannot_be_written_leaves_the_old_result_alone(tmp_path):
    write_result(tmp_path, {"steps": 3})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(tmp_path, {"test_loss": float("nan")})
    assert json.loads((tmp_path / "result.json").read_text()) == {"steps": 3}
    assert len(list(tmp_path.iterdir())) == 1


def test_the_result_of_another_run_is_not_overwritten(tmp_path):
    write_result(tmp_path, {"steps": 3})
    with pytest.raises(mt.RunError, match="--force"):
        make_run_directory(tmp_path)
    assert (tmp_path / "result.json").exists()


def test_overwriting_removes_the_old_result_at_once(tmp_path):
    # The lie: a run that fails, and an old result in its directory.
    write_result(tmp_path, {"steps": 3})
    assert make_run_directory(tmp_path, overwrite=True) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_overwriting_removes_whatever_is_there(tmp_path):
    """Lies: checkpoints of the old run that stay behind a link; a file that stands in the way."""
    elsewhere = tmp_path / "large disk"
    (elsewhere / "3").mkdir(parents=True)
    run_dir = make_run_directory(tmp_path / "run")
    write_config(run_dir, {})
    (run_dir / "checkpoints").symlink_to(elsewhere)
    (run_dir / "best").touch()
    (run_dir / "metrics.jsonl").mkdir()
    make_run_directory(run_dir, overwrite=True)
    left = {path.name for path in run_dir.iterdir()} - {".lock", "config.json"}
    assert left == {"checkpoints"}
    assert not list(elsewhere.iterdir())


def test_directories_are_made_with_their_parents_and_may_exist(tmp_path):
    assert make_run_directory(tmp_path / "a" / "b").is_dir()
    assert make_run_directory(tmp_path / "a" / "b").is_dir()


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(mt.RunError, match="cannot be used"):
        make_run_directory(tmp_path / "file")
    with pytest.raises(mt.RunError, match="is a file, and runs"):
        fresh_run_directory(tmp_path / "file", "digits")


def test_two_runs_of_the_same_second_have_two_directories(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    paths = [fresh_run_directory(tmp_path / "runs", "digits").name for _ in range(3)]
    first = "digits-20260101-000000"
    assert paths == [first, f"{first}-2", f"{first}-3"]


def test_a_recipe_with_a_slash_in_its_name_has_a_directory(tmp_path):
    assert fresh_run_directory(tmp_path, "resnet/50").name.startswith("resnet-50-")


def test_a_run_that_is_refused_leaves_the_configuration_of_the_other(tmp_path):
    """Lie: it is overwritten first, and the other run is resumed as what it was not."""
    config = {"recipe": "digits", "options": {"seed": 1}}
    write_config(tmp_path, config)
    with held_run_directory(tmp_path):
        assert main(["train", "digits", "--steps", "1", "--run-dir", str(tmp_path)]) == 2
    assert read_config(tmp_path) == config


def test_a_run_that_trains_cannot_be_thrown_away(tmp_path):
    """Lie: --force deletes first, and then says that another run trains there."""
    directory = make_run_directory(tmp_path / "run")
    (directory / "checkpoints").mkdir()
    with held_run_directory(directory), pytest.raises(mt.RunError, match="another run trains"):
        make_run_directory(directory, overwrite=True)
    assert (directory / "checkpoints").exists()
    make_run_directory(directory, overwrite=True)
    assert not (directory / "checkpoints").exists()


def test_overwriting_leaves_what_belongs_to_no_run(tmp_path):
    """Lie: --run-dir . --force in a project deletes the user's own checkpoints."""
    own = tmp_path / "checkpoints" / "weights"
    own.mkdir(parents=True)
    with pytest.raises(mt.RunError, match=r"holds checkpoints, and none of config.json"):
        make_run_directory(tmp_path, overwrite=True)
    assert own.exists()


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_process_forked_from_a_run_does_not_keep_its_lock(tmp_path):
    """Lie: a killed run whose loader's processes live on: "another run trains there"."""
    reading, writing = os.pipe()
    with held_run_directory(tmp_path):
        child = os.fork()
        if not child:
            os.write(writing, b"here")
            signal.pause()
            os._exit(0)
        os.read(reading, 4)
    try:
        with held_run_directory(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
