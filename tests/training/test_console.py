"""What a run shows by default: on stderr, in process 0, and only if there are no hooks."""

import io

import numpy as np
import optax
import pytest
from rich.console import Console

import multitower as mt
from multitower.training.console import live_line, plain_lines, shown_rows


def batches(first):
    return iter([np.ones(2, np.float32)] * 200)


def make_trainer(**options):
    return mt.Trainer(lambda w, x: (w - x) ** 2, optax.sgd(0.1), devices=1, **options)


def test_a_run_without_hooks_is_shown(capfd, monkeypatch):
    # The lie: nothing to see for hours; or lines beside those of the user's own hooks.
    make_trainer().fit(np.float32(0), batches, steps=120)
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert ["step 100/120" in line for line in lines] == [True, False]
    assert "step 120/120  loss 1.421e-14" in lines[1]
    told = []
    make_trainer(hooks=[]).fit(np.float32(0), batches, steps=1)
    make_trainer(hooks=[told.append]).fit(np.float32(0), batches, steps=1)
    assert len(told) == 1
    trainer = make_trainer()
    monkeypatch.setattr("multitower.training.trainer.is_first", lambda: False)
    trainer.fit(np.float32(0), batches, steps=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_the_reason_of_an_early_end_is_shown(capfd):
    trainer = make_trainer(early_stopping=mt.EarlyStopping("one", patience=1))
    rows = np.ones(2, np.float32)
    evaluate = lambda state: trainer.evaluate(lambda w, x: {"one": x}, state, rows, global_batch=2)
    trainer.fit(np.float32(0), batches, steps=9, evaluate=evaluate, evaluate_every=2)
    assert capfd.readouterr().err.splitlines()[-1] == trainer.stopped
    with pytest.raises(ZeroDivisionError):  # what was shown is put away
        make_trainer(hooks=None).fit(np.float32(0), batches, steps=2, evaluate=lambda _: 1 / 0,
                                     evaluate_every=1)  # fmt: skip


@pytest.mark.slow
def test_a_run_that_is_resumed_says_where_it_continues(tmp_path, capfd):
    # The lie: nothing tells a run that went on from one that began anew.
    for steps, said in ((2, False), (3, True)):
        make_trainer(run_dir=tmp_path).fit(np.float32(0), batches, steps=steps, resume=True)
        lines = capfd.readouterr().err.splitlines()
        assert (lines[0] == "continuing after step 2 of 3") is said
        assert len(lines) == 1 + said
    for _ in range(2):  # a finished run continues nowhere
        given = {"evaluate": lambda _: None, "evaluate_every": 3}
        make_trainer(run_dir=tmp_path).fit(np.float32(0), batches, steps=3, resume=True, **given)
        assert capfd.readouterr().err == ""


def test_lines_say_how_long_it_takes():
    # The lie: a remaining time that counts the compilation.
    said, seconds = [], iter([60.0, 159.0])
    show = plain_lines(said.append, lambda: next(seconds))
    for step in range(1, 201):
        show(mt.Progress("train", step, 4000, {"loss": 0.5}, 9.6, epoch=step / 100))
        if step == 150:
            break
    assert len(said) == 1
    assert said[0].endswith("step  100/4000  loss 0.5000  epoch 1.00  10 examples/s  1:05:00 left")


def test_rows_that_are_done_are_a_part_of_all(monkeypatch):
    # The lie: a line that is full after the first chunk.
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    monkeypatch.setattr("multitower.training.console._terminal", lambda: console)
    with shown_rows(np.zeros((4000, 2)), is_wanted=True) as show:
        assert show is not None
        show(1000)
    assert "1000/4000" in written.getvalue()


def test_a_terminal_has_a_live_line():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    with live_line(4, console) as display:
        display.show(mt.Progress("train", 3, 4, {"acc": 1.0, "loss": 0.5}, 9.6, epoch=1.5))
        display.show(mt.Progress("test", 3, 3, {"loss": 0.25}))
    shown = written.getvalue()
    assert "3/4" in shown
    assert "loss 0.5000  acc 1.0000  epoch 1.50  10 examples/s" in shown
    assert "test after step 3  loss 0.2500" in shown


def test_a_narrow_terminal_cuts_no_score_in_two():
    """The lie: a test phase's line is as long as it is, and the terminal cuts it anywhere."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=40)
    with live_line(300, console) as display:
        display.show(mt.Progress("test", 150, 150, {"bits_per_byte": 4.0551, "loss": 2.8108}))
    lines = [line.strip() for line in written.getvalue().splitlines()]
    assert any(line.endswith("loss") for line in lines)
    assert any(line.startswith("2.8108  bits_per_byte 4.0551") for line in lines)
