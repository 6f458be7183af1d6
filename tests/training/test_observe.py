"""Observers: what is written is what was reported, once per step, and others can read it."""

import errno
import json
import os
import time
from contextlib import suppress

import numpy as np
import pytest

import multitower as mt
from events import events_of
from multitower.training.observe import EventFiles, MetricsFile


def report(hook, steps, phase="train", **more):
    for step in steps:
        hook(mt.Progress(phase, step, 9, {"loss": 1 / step}, **more))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_step_also_after_a_resume(tmp_path):
    # The lie: a resumed run that tells some steps twice, or loses those before it.
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as hook:
        report(hook, [1, 2, 3])
    with path.open("a") as file:
        file.write('{"phase": "train", "st')  # killed in the middle of a line
    with MetricsFile(path) as hook:
        report(hook, [3, 4], examples_per_s=1234.56)
    lines = read_lines(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1] == {"phase": "train", "step": 4, "loss": 0.25, "examples_per_s": 1234.6}


@pytest.mark.parametrize(
    "make", [lambda: MetricsFile("metrics.jsonl"), lambda: EventFiles("events")]
)
def test_a_hook_that_was_made_here_writes_here(make, tmp_path, monkeypatch):
    # The lie: the points of one run in two directories, after the loader has changed to another.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with make() as hook:
        monkeypatch.chdir(tmp_path / "other")
        report(hook, [1])
    assert len([*tmp_path.iterdir()]) == 2
    assert not [*(tmp_path / "other").iterdir()]


def test_a_run_that_ended_before_its_test_phase_keeps_its_last_step(tmp_path):
    """Lie: a run that was killed between its last checkpoint and its result loses a line."""
    path, phases = tmp_path / "metrics.jsonl", []
    for phase, steps in [("train", [1, 2, 3]), ("test", [3]), ("test", [3]), ("train", [3])]:
        with MetricsFile(path) as hook:
            report(hook, steps, phase=phase)
        phases.append([(line["phase"], line["step"]) for line in read_lines(path)])
    train = [("train", step) for step in (1, 2, 3)]
    assert phases == [train, [*train, ("test", 3)], [*train, ("test", 3)], train]


def test_an_evaluation_of_an_earlier_state_cuts_nothing(tmp_path):
    """Lie: who looks at the state of step 2 loses the lines of all steps after it."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as hook:
        report(hook, [1, 2])
        report(hook, [2], phase="test")
        report(hook, [3, 4])
        report(hook, [4], phase="test")
    before = read_lines(path)
    with MetricsFile(path) as hook:
        report(hook, [2], phase="test")
    assert sorted(map(str, read_lines(path))) == sorted(map(str, before))
    with MetricsFile(path) as hook:  # of other data, under other names
        hook(mt.Progress("test", 4, 9, {"error": 0.5}))
    assert [line["step"] for line in read_lines(path)].count(4) == 3
    with MetricsFile(path) as hook:
        report(hook, [2], phase="test")
        report(hook, [3])
    assert [line["step"] for line in read_lines(path)] == [1, 2, 2, 3]


def test_steps_that_the_same_hook_is_told_again_have_one_line(tmp_path):
    """Lie: two lines of the steps that a second `fit` makes again, after an error in the first."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as hook:
        report(hook, [1, 2, 3, 4])
        report(hook, [4], phase="test")
        report(hook, [3, 4, 5])
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "damaged", [b"\xff\xfe", b"[]", b"null", b"{}", b'{"phase": 1, "step": 1}']
)
def test_a_damaged_line_is_no_traceback_of_a_resume(damaged, tmp_path):
    """Lie: a broken disk keeps a run from going on, because of a file that it only writes."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as hook:
        report(hook, [1, 2])
    path.write_bytes(damaged + b"\n" + path.read_bytes())
    with MetricsFile(path) as hook:
        report(hook, [3])
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_a_nan_is_null(tmp_path):
    # The lie: a line that only Python takes for JSON.
    with MetricsFile(tmp_path / "m") as hook:
        hook(mt.Progress("train", 1, 1, {"loss": float("nan")}))
    assert read_lines(tmp_path / "m") == [{"phase": "train", "step": 1, "loss": None}]


def test_a_nan_is_a_point_and_no_line_on_the_terminal(tmp_path, caplog):
    """Lie: a warning of a library at every step, under which the run's own lines are lost."""
    with EventFiles(tmp_path) as hook:
        hook(mt.Progress("train", 1, 1, {"loss": float("nan")}))
    assert np.isnan(events_of(tmp_path / "train").Scalars("loss")[0].value)
    assert caplog.records == []


def test_what_cannot_be_written_anew_leaves_the_lines_that_there_were(tmp_path, monkeypatch):
    """Lie: a disk that is full at a resume, or a kill there, takes the lines of the whole run."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as hook:
        report(hook, [1, 2])

    def full(partial, text):
        with partial.open("w"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(path), "write_text", full)
    with pytest.raises(mt.RunError, match="No space left"):
        report(MetricsFile(path), [3])
    assert list(tmp_path.iterdir()) == [path]
    assert [line["step"] for line in read_lines(path)] == [1, 2]


@pytest.mark.parametrize("name", ["phase", "step", "examples_per_s"])
def test_a_metric_by_the_name_of_what_a_line_has_is_refused(name, tmp_path):
    """Lie: the metric in the place of the step, so that a resume drops other lines."""
    with pytest.raises(mt.RunError, match=f"the metrics hold '{name}'.*Rename"):
        MetricsFile(tmp_path / "m")(mt.Progress("train", 1, 1, {"loss": 1.0, name: 5.0}))


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(mt.RunError, match="cannot be written"):
        report(MetricsFile(tmp_path / "no" / "m"), [1])


def steps_of(directory):
    """The steps of the points that TensorBoard shows."""
    return [event.step for event in events_of(directory).Scalars("loss")]


def test_tensorboard_reads_one_point_per_step_and_tag(tmp_path):
    import optax

    state = mt.train_step(lambda w, x: (w["a"] - x) ** 2, optax.sgd(0.1), devices=1).init(
        {"a": np.float32(3)}
    )
    images = np.zeros((2, 8, 8, 3), np.uint8)
    with EventFiles(tmp_path, {"configuration": "towers: 4"}) as hook:
        report(hook, [1, 2, 3], tower_losses=(0.5, 0.25))
        hook.add_images("inputs", images, 3)
        report(hook, [3], phase="test", state=state)
    train, test = events_of(tmp_path / "train"), events_of(tmp_path / "test")
    assert [(e.step, e.value) for e in train.Scalars("loss")] == [
        (step, pytest.approx(1 / step)) for step in (1, 2, 3)
    ]
    assert len(train.Scalars("tower_losses/1")) == 3
    assert [event.step for event in train.Images("inputs")] == [3]
    assert any("configuration" in tag for tag in train.Tags()["tensors"])
    assert [event.step for event in test.Scalars("loss")] == [3]
    assert [event.step for event in test.Histograms("params/a")] == [3]


def test_tensorboard_hides_what_is_made_again_and_nothing_else(tmp_path):
    """Lies: a look at an earlier state hides later points; a second fit shows its steps twice."""
    with EventFiles(tmp_path) as hook:
        for _ in range(2):  # the same hook is told the same steps again
            report(hook, [1, 2])
            report(hook, [2], phase="test")
            report(hook, [3, 4])
            report(hook, [4], phase="test")
    with EventFiles(tmp_path) as hook:
        report(hook, [2], phase="test")  # a mere evaluation
    assert steps_of(tmp_path / "train") == [1, 2, 3, 4]
    assert steps_of(tmp_path / "test") == [2, 4, 2]
    with EventFiles(tmp_path) as hook:
        report(hook, [4], phase="test")
        report(hook, [3])
        report(hook, [3], phase="test")
    assert steps_of(tmp_path / "train") == [1, 2, 3]
    assert steps_of(tmp_path / "test") == [2, 2, 3]


def test_a_second_file_of_the_same_second_leaves_the_first(tmp_path):
    """Lie: the points of a run that is resumed at once are those of its second part alone."""
    for step in (1, 2, 3):
        with EventFiles(tmp_path) as hook:
            report(hook, [step])
    assert steps_of(tmp_path / "train") == [1, 2, 3]


def test_weights_that_diverge_are_no_traceback(tmp_path):
    """Lie: a run that has made all its steps, and ends in an error of its histograms."""
    import optax

    step = mt.train_step(lambda w, x: (w["a"] - x) ** 2, optax.sgd(0.1), devices=1)
    for number, values in enumerate(([1e30, -1e30], [np.nan, np.nan], [np.nan, 2.0])):
        with EventFiles(tmp_path / str(number)) as hook:
            state = step.init({"a": np.float32(values)})
            report(hook, [3], phase="test", state=state)
        found = events_of(tmp_path / str(number) / "test").Tags()["histograms"]
        assert found == ([] if number == 1 else ["params/a"])


def test_complex_weights_are_shown_by_their_size(tmp_path):
    """Lie: a histogram of real parts, with a warning of NumPy that weights are lost."""
    import optax

    step = mt.train_step(lambda w, x: abs(w - x) ** 2, optax.sgd(0.1), devices=1)
    with EventFiles(tmp_path) as hook:
        report(hook, [3], phase="test", state=step.init(np.complex64([3 + 4j, 5j])))
    (shown,) = events_of(tmp_path / "test").Histograms("params/")
    assert (shown.histogram_value.min, shown.histogram_value.max) == (5, 5)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_full_disk_is_one_error_and_not_a_page_of_lines(tmp_path, capfd):
    """Lie: a run that trains on and writes nothing down; or tracebacks of a library's thread."""
    full, said = os.open("/dev/full", os.O_WRONLY), "cannot be written: No space left on device"
    metrics = MetricsFile(tmp_path / "m")
    report(metrics, [1])
    os.dup2(full, metrics._file.fileno())
    with pytest.raises(mt.RunError, match=f"m {said}"):
        report(metrics, [2])
    with pytest.raises(mt.RunError, match=f"m {said}"):
        metrics.close()
    events = EventFiles(tmp_path)
    report(events, [1])
    ((_, file),) = events._writers.values()
    os.dup2(full, file._descriptor)
    with suppress(mt.RunError):  # it writes in a thread, which may be as quick as that
        report(events, [2])
    wait_until(lambda: file.error is not None)
    for act in (lambda: report(events, [3]), events.flush, events.close):
        with pytest.raises(mt.RunError, match=f"train/events.* {said}"):
            act()
    os.close(full)
    assert capfd.readouterr().err == ""


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
