"""A signal: the run finishes its step, saves, and goes on later as if it had not been stopped."""

import os
import signal
import subprocess
import sys

import pytest

import multitower as mt
from multitower.training.fitting.interruption import noted_signals
from trainers import PARAMS, batches, make_trainer


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_trap_a_resume_on_another_permutation_of_the_data(tmp_path, number, undisturbed):
    """accelerate#2823, and lightning#9123: refused on another device count; laws L4 and L5.

    A signal finishes the step, saves, and says how to resume.
    """
    seen = []

    def stop_at_20(progress):
        seen.append(progress.step)
        if progress.step == 20:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(mt.Interrupted, match=r"step 21 of 60, which is saved in .*resume=True"):
        make_trainer(2, run_dir=tmp_path, hooks=[stop_at_20]).fit(PARAMS, batches, steps=60)
    assert signal.getsignal(number) == before
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[stop_at_20])
    state = trainer.fit(PARAMS, batches, steps=60, resume=True)
    assert mt.fingerprint(state) == undisturbed
    assert seen == list(range(1, 61))  # every step told once


def test_a_signal_that_is_ignored_stops_no_run():
    # The lie: a background job of a script, for which Ctrl-C is not meant, stops at it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hook = lambda progress: os.kill(os.getpid(), signal.SIGINT)
        assert make_trainer(1, hooks=[hook]).fit(PARAMS, batches, steps=2).step == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_signal_of_another_kind_acts_at_once():
    # The lie: Ctrl-C after a SIGTERM waits for the end of a step that never ends.
    with noted_signals() as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert caught == [signal.SIGTERM]


def test_a_handler_that_python_did_not_install_stays(monkeypatch):
    """Lie: a run inside of a program in C that fails at its end, when all work is done."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with noted_signals() as caught:
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGTERM) == before
        assert caught == []


@pytest.mark.slow
def test_a_worker_that_a_loader_forked_can_be_stopped():
    """Lie: it notes the signal as the run does, and the loader waits for its end for ever."""
    child = """
import os, signal, sys, time
from multitower.training.fitting.interruption import noted_signals
with noted_signals() as caught:
    worker = os.fork()
    if not worker:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(worker, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    assert not caught
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", child], check=True, timeout=40)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_a_signal_in_a_run_with_a_run_in_its_test_phase(tmp_path, inside):
    # The lies: ValueError in place of Interrupted; or the outer run's steps are lost.
    def stop(progress):
        if progress.phase == "train" and progress.step == (2 if inside else 6):
            os.kill(os.getpid(), signal.SIGTERM)

    probe = make_trainer(1, hooks=[stop] if inside else [])
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[] if inside else [stop])
    test = lambda state: probe.fit(PARAMS, batches, steps=4)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(mt.Interrupted, match="3 of 4" if inside else "7 of 9") as caught:
        trainer.fit(PARAMS, batches, steps=9, evaluate=test, evaluate_every=4)
    assert signal.getsignal(signal.SIGTERM) == before
    assert mt.Checkpoints(tmp_path / "checkpoints").steps() == ([4] if inside else [7])
    assert ("step 4 is saved" in "".join(getattr(caught.value, "__notes__", ""))) == inside


@pytest.mark.slow
def test_a_signal_in_the_last_test_phase_is_heard(tmp_path):
    # The lie: Ctrl-C ends the first of many runs, and the next one begins.
    tested = []

    def evaluate(state):
        tested.append(int(state.step))
        os.kill(os.getpid(), signal.SIGINT)

    trainer = make_trainer(1, run_dir=tmp_path)
    given = {"steps": 2, "evaluate": evaluate, "evaluate_every": 2, "resume": True}
    with pytest.raises(mt.Interrupted, match="SIGINT: stopped after step 2 of 2, which is saved"):
        trainer.fit(PARAMS, batches, **given)
    assert trainer.fit(PARAMS, batches, **given).step == 2
    assert tested == [2]
