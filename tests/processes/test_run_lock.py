"""One run at a time in a directory."""

import errno
import os
import threading

import pytest

import multitower as mt
from multitower.processes.run_lock import held_run_directory
from processes import run_python

WITHOUT_LOCKS = """
import itertools, os, sys
import jax.numpy as jnp, numpy as np, optax
sys.modules["fcntl"] = None
for name in ("register_at_fork", "O_CLOEXEC", "getuid"):
    delattr(os, name)
import multitower as mt
trainer = mt.Trainer(lambda w, x: (w - x) ** 2, optax.sgd(0.5), run_dir=sys.argv[1], hooks=[])
trainer.fit(jnp.float32(0.0), lambda first: itertools.repeat(np.ones(8)), steps=2)
assert int(trainer.restore(jnp.float32(0.0)).step) == 2
"""


def test_two_runs_cannot_train_in_one_directory(tmp_path):
    """Lie: a job that a cluster starts again while its old processes still write checkpoints."""
    with (
        held_run_directory(tmp_path),
        pytest.raises(mt.RunError, match=f"another run trains .* .process {os.getpid()} on"),
        held_run_directory(tmp_path, wait_s=0.1),
    ):
        pass
    with held_run_directory(tmp_path):
        pass


def test_a_run_waits_for_the_end_of_the_one_before(tmp_path):
    ended = threading.Event()

    def before():
        with held_run_directory(tmp_path):
            begun.set()
            ended.wait(30)

    begun = threading.Event()
    thread = threading.Thread(target=before)
    thread.start()
    assert begun.wait(30)
    threading.Timer(0.1, ended.set).start()
    with held_run_directory(tmp_path, wait_s=30):
        assert ended.is_set()
    thread.join()


def test_a_run_inside_a_run_needs_no_second_lock_and_gives_none_back(tmp_path):
    """Lie: a trainer that ends gives back what the command line still holds."""
    with held_run_directory(tmp_path):
        with held_run_directory(tmp_path / "." / "", nested=True):
            pass
        refused = pytest.raises(mt.RunError, match="another run trains")
        with refused, held_run_directory(tmp_path):
            pass


def test_another_thread_is_another_run(tmp_path):
    said = []

    def other():
        try:
            with held_run_directory(tmp_path, nested=True):
                said.append("held")
        except mt.RunError as error:
            said.append(str(error))

    with held_run_directory(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert said
    assert "another run trains" in said[0]


@pytest.mark.slow
def test_a_system_without_file_locks_trains(tmp_path):
    """Lie: `import multitower` fails on Windows, where Python has no fcntl and cannot fork."""
    run_python("-c", WITHOUT_LOCKS, str(tmp_path))


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("multitower.processes.run_lock.fcntl.flock", refuse)
    with held_run_directory(tmp_path):
        pass
