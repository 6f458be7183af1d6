"""The command line on several processes: one run, whatever happens to one of them.

The lies: two half runs that each write a result; a stop that only one process hears of; a kill that
leaves the others waiting for ever, or takes the checkpoints with it.
"""

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import multitower as mt
import places
from forks import Fork
from multitower.cli.starting.local_processes import run_local_processes, split_off_processes
from multitower.training.checkpoints.checkpoint import Checkpoints
from processes import clean_environment, free_port

# Compiled in a moment.
CIRCLE = str(places.CIRCLE)


def start(*words):
    return Fork("-m", "multitower", *words, env=clean_environment())


def run(*words, timeout_s=400):
    process = start(*words)
    try:
        out, errors = process.communicate(timeout=timeout_s)
    finally:
        process.terminate()  # the one that started the others passes it on
        process.wait()
    return process.returncode, out, errors


def run_alone(*words):
    """In one process, which ends well."""
    code, _, errors = run(*words)
    assert code == 0, errors


def start_two(*words, devices="2"):
    """Two processes as a cluster would start them."""
    flags = ["--simulate", devices, "--coordinator", f"127.0.0.1:{free_port()}"]
    flags += ["--num-processes", "2", "--process-id"]
    return [start(*words, *flags, str(number)) for number in range(2)]


def start_programs(directory, text, *words):
    """Two processes of a program of one's own: `python PROGRAM PORT NUMBER WORDS`."""
    program = directory / "program.py"
    program.write_text(text)
    port = str(free_port())
    return [Fork(program, port, number, *words, env=clean_environment()) for number in range(2)]


def end(running, timeout_s):
    """What each process wrote; they must end by themselves."""
    deadline = time.monotonic() + timeout_s
    try:
        return [p.communicate(timeout=max(deadline - time.monotonic(), 0.1)) for p in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def wait_for_steps(run_dir, count, timeout_s=400):
    """Until `metrics.jsonl` has `count` more lines."""
    file = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + timeout_s

    def lines():
        return len(file.read_text().splitlines()) if file.exists() else 0

    # A resumed run first drops the lines of steps that it makes again: begin with what is there.
    began = lines()
    while lines() < began + count:
        assert time.monotonic() < deadline, "the run makes no steps"
        time.sleep(0.05)


def result(run_dir):
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval", "d"], (None, ["eval", "d"])),
        (["eval", "d", "--simulate-processes", "2"], (2, ["eval", "d", "--simulate", "1"])),
        (["--simulate-processes=3", "--simulate", "2"], (3, ["--simulate", "2"])),
        (["--simulate_processes=3", "--simulate=2"], (3, ["--simulate=2"])),
        (["eval", "d", "--simulate_processes", "2"], (2, ["eval", "d", "--simulate", "1"])),
        (["eval", "__simulate_processes", "2"], (None, [])),
        (["train", "--simulate-processes", "--help"], (None, [])),
    ],
)
def test_simulate_processes_is_for_the_one_that_starts_them(words, expected):
    """Lie: one process where the flag is typed with _, as every other flag may be."""
    count, rest = split_off_processes(words)
    assert count == expected[0]
    assert rest == (expected[1] or words)


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_a_number_of_processes_that_is_none(value):
    with pytest.raises(mt.RunError, match="say how many"):
        split_off_processes(["train", "digits", "--simulate-processes", value])


@pytest.mark.parametrize("at", [0, 1])
def test_a_signal_while_processes_are_started(at, monkeypatch):
    """Lie: nobody has heard of it; or those that are there already are left behind."""
    sent = []

    class Started(subprocess.Popen):
        def __init__(self, command, **how):
            super().__init__(["sleep", "2"], **how)
            self.number = int(command[-1])
            if self.number == at:
                os.kill(os.getpid(), signal.SIGTERM)

        def send_signal(self, sig):
            if sig != signal.SIGKILL:  # which they get in the end
                sent.append((self.number, sig))
            super().send_signal(sig)

    monkeypatch.setattr(subprocess, "Popen", Started)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert run_local_processes(3, ["doctor"]) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sorted(sent) == [(number, signal.SIGTERM) for number in range(3)]


def test_a_process_that_cannot_be_started_ends_the_others(monkeypatch):
    """Lie: the first one trains on, alone."""
    started, start_process = [], subprocess.Popen

    def start_one(_, **how):
        if started:
            raise OSError("no more processes")
        started.append(start_process(["sleep", "2"], **how))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(OSError, match="no more"):
        run_local_processes(2, ["doctor"])
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.slow
def test_two_processes_make_one_run(tmp_path, monkeypatch):
    """Law L3 on the command line; one result, one report, one set of event files."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")  # compiled as users compile
    words = ["train", CIRCLE, "--steps", "2", "--batch-size", "17", "--towers", "2"]
    together, alone = tmp_path / "together", tmp_path / "alone"
    code, out, errors = run(*words, "--simulate-processes", "2", "--run-dir", str(together))
    assert code == 0, errors
    assert "training circle on 2 processes (0, 1 on" in out
    assert "with 1 simulated CPU device each" in out
    assert out.count("step 2/2") == 1
    assert "[Gloo]" not in out + errors
    run_alone(*words, "--simulate", "2", "--run-dir", str(alone))
    found, expected = result(together), result(alone)
    for name in ("fingerprint", "test_accuracy", "test_loss", "towers", "devices"):
        assert found[name] == expected[name], name
    assert found["processes"] == 2
    assert len(list((together / "events" / "train").iterdir())) == 1
    assert len((together / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_an_error_of_all_processes_ends_all_of_them(tmp_path):
    code, out, errors = run(
        *("train", "digits", "--steps", "0", "--simulate-processes", "2"),
        *("--run-dir", str(tmp_path / "none")),
    )
    assert (code, out) == (2, "")
    assert "multitower: --steps 0: it must be a whole number, 1 or more." in errors


@pytest.mark.slow
def test_law_l4_stopped_killed_and_resumed_on_other_layouts(tmp_path):
    """Laws L4 and L9: from 2 processes x 2 devices to 4 x 1, and through a kill to 1 x 1."""
    words = ["train", CIRCLE, "--steps", "160", "--batch-size", "33", "--towers", "4"]
    words += ["--checkpoint-every", "30"]
    run_alone(*words, "--simulate", "1", "--run-dir", str(tmp_path / "whole"))
    run_dir = tmp_path / "broken"

    running = start_two(*words, "--run-dir", str(run_dir))
    wait_for_steps(run_dir, 20)
    running[1].send_signal(signal.SIGTERM)  # to one of them; both stop after the same step
    said = [errors for _, errors in end(running, 120)]
    assert [process.returncode for process in running] == [143, 143], said
    stopped = [text[text.index("SIGTERM: stopped after step") :] for text in said]
    assert stopped[0].splitlines()[0] == stopped[1].splitlines()[0]
    before = (run_dir / "metrics.jsonl").read_text().splitlines()

    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(run_dir, elsewhere)
    four = ["--simulate-processes", "4", "--simulate", "1"]
    code, _, errors = run("resume", str(elsewhere), *four, timeout_s=300)
    assert code == 0, errors
    assert result(elsewhere)["fingerprint"] == result(tmp_path / "whole")["fingerprint"]
    # Each with its own speed: a run that begins anew comes to the same bits, and to other lines.
    lines = (elsewhere / "metrics.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before, "it began anew"

    running = start_two("resume", str(run_dir))
    wait_for_steps(run_dir, 20)
    running[1].kill()
    began = time.monotonic()
    (_, errors), _ = end(running, 120)
    assert time.monotonic() - began < 90  # 45 on a machine that has nothing else to do
    assert running[0].returncode == -signal.SIGABRT
    assert f"multitower: missing: process 1 on {socket.gethostname()}. It was killed" in errors

    run_alone("resume", str(run_dir), "--simulate", "1")
    assert result(run_dir)["fingerprint"] == result(tmp_path / "whole")["fingerprint"]
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before, "it began anew"
    assert [json.loads(line)["step"] for line in lines] == [
        *range(1, 161),
        160,
    ]  # every step once, then the test phase

    code, out, errors = run("eval", str(run_dir), "--simulate-processes", "2")
    assert code == 0, errors
    assert json.loads(out)["fingerprint"] == result(run_dir)["fingerprint"]
    assert json.loads(out)["test_accuracy"] == result(run_dir)["test_accuracy"]


@pytest.mark.slow
def test_law_l4_stages_killed_on_two_processes_and_resumed_on_one_device(tmp_path):
    """Lies: a checkpoint with the stages of one process; a stage that begins anew elsewhere."""
    words = ["train", CIRCLE, "--steps", "100", "--batch-size", "33", "--towers", "4"]
    words += ["--stages", "2", "--checkpoint-every", "20"]
    run_alone(*words, "--simulate", "1", "--run-dir", str(tmp_path / "whole"))
    run_dir = tmp_path / "broken"
    running = start_two(*words, "--layout", "2x2", "--run-dir", str(run_dir))
    wait_for_steps(run_dir, 20)
    saved = run_dir / "checkpoints" / "20" / "commit_success.txt"  # it is saved beside the steps
    while not saved.exists() and not (run_dir / "result.json").exists():
        time.sleep(0.01)
    for process in running:
        process.kill()  # SIGKILL, in the middle of a step
    end(running, 60)
    assert not (run_dir / "result.json").exists(), "it has ended already"
    before = (run_dir / "metrics.jsonl").read_text().splitlines()[:20]

    run_alone("resume", str(run_dir), "--simulate", "1")
    assert result(run_dir)["fingerprint"] == result(tmp_path / "whole")["fingerprint"]
    # Each with its own speed: a run that begins anew comes to the same bits, and to other lines.
    assert (run_dir / "metrics.jsonl").read_text().splitlines()[:20] == before, "it began anew"


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_what_a_process_raises_is_seen_and_ends_the_others(tmp_path, culprit):
    """Lie: a traceback of the others, who only waited, or a hang until somebody looks."""
    file = tmp_path / "recipe.py"
    check = f"    if jax.process_index() == {culprit}: raise KeyError('no such file')\n"
    file.write_text(Path(CIRCLE).read_text().replace("def load():", f"def load():\n{check}#"))
    began = time.monotonic()
    code, _, errors = run(
        *("train", str(file), "--simulate-processes", "2", "--run-dir", str(tmp_path / "run"))
    )
    assert code == 1
    assert f"[process {culprit}] KeyError: 'no such file'" in errors
    assert errors.count("Traceback") == 1
    assert time.monotonic() - began < 90


@pytest.mark.slow
def test_a_process_that_is_killed_while_all_save(tmp_path):
    """Lie: "a checkpoint could not be written: make room", of a disk that has done nothing."""
    file = tmp_path / "recipe.py"
    kill = (
        "import os, signal\nfrom multitower.training.checkpoints.checkpoint import Checkpoints\n"
        "def killed(*_, **how): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def load():\n    if jax.process_index() == 1: Checkpoints.save = killed\n"
    )
    file.write_text(Path(CIRCLE).read_text().replace("def load():", kill))
    words = ["train", str(file), "--towers", "2", "--checkpoint-every", "20"]
    running = start_two(*words, "--run-dir", str(tmp_path / "run"), devices="1")
    began = time.monotonic()
    (_, errors), _ = end(running, 120)
    assert time.monotonic() - began < 90
    assert [process.returncode for process in running] == [-signal.SIGABRT, -signal.SIGKILL], errors
    assert "multitower: process 0 has lost the connection to another process (" in errors
    assert f"multitower: missing: process 1 on {socket.gethostname()}. It was killed" in errors
    assert "make room" not in errors.lower()


@pytest.mark.slow
def test_a_process_that_is_stopped_ends_the_others(tmp_path):
    """Lie: all wait for ever, as its connections are still open."""
    words = ["train", CIRCLE, "--steps", "100000", "--towers", "2"]
    words += ["--checkpoint-every", "20", "--run-dir", str(tmp_path / "run")]
    running = start_two(*words, devices="1")
    wait_for_steps(tmp_path / "run", 50)
    running[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        [(_, errors)] = end(running[:1], 90)
    finally:
        running[1].kill()
        running[1].communicate()
    assert time.monotonic() - began < 60
    assert running[0].returncode == -signal.SIGABRT
    assert f"multitower: missing: process 1 on {socket.gethostname()}. It was killed" in errors
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert max(checkpoints.steps()) >= 40


@pytest.mark.slow
def test_trap_no_abort_after_a_finished_run(tmp_path):
    """marin#8295: one that is still at work, half a minute after the others, took them all down."""
    running = start_programs(tmp_path, LATE)
    end(running, 120)
    assert [process.returncode for process in running] == [0, 0]


LATE = """
import sys, time
import multitower as mt, numpy as np
port, number = sys.argv[1], int(sys.argv[2])
where = dict(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=number)
mt.configure(simulated_devices=1, distributed=True, **where)
assert len(mt.make_parallel(lambda x: x + 1, towers=2)(np.ones(2))) == 2
time.sleep(40 * number)
"""


@pytest.mark.slow
def test_doctor_times_an_exchange_between_each_pair():
    code, out, errors = run("doctor", "--simulate-processes", "3", "--json")
    assert code == 0, errors
    found = json.loads(out)
    assert [one["host"] for one in found["processes"]] == [socket.gethostname()] * 3
    assert [one["processes"] for one in found["exchanges"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(min(one["seconds"], one["mebibyte_seconds"]) > 0 for one in found["exchanges"])


@pytest.mark.slow
def test_a_process_without_memory_is_seen_and_ends_the_others(tmp_path):
    """In the middle of a run, in the thread that makes batches."""
    file = tmp_path / "recipe.py"
    check = "if jax.process_index() == 1 and seen.append(1) is None and len(seen) > 60:"
    distort = (
        f"def greedy(batch, generator):\n    {check}\n        np.ones(1 << 50)\n    return batch\n"
    )
    text = Path(CIRCLE).read_text().replace("def load():", f"seen = []\n{distort}\ndef load():")
    file.write_text(text.replace("steps=300", "distort=greedy, steps=300"))
    began = time.monotonic()
    words = ["--steps", "3000", "--checkpoint-every", "25", "--run-dir", str(tmp_path / "run")]
    code, _, errors = run("train", str(file), "--simulate-processes", "2", *words)
    assert code == 1
    assert re.search(r"\[process 1\] .*MemoryError: Unable to allocate", errors)
    assert time.monotonic() - began < 90
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "25",
        "50",
    ]


@pytest.mark.slow
def test_the_best_state_of_two_processes(tmp_path):
    words = ["train", CIRCLE, "--steps", "40", "--batch-size", "33", "--towers", "4"]
    words += ["--keep-best", "accuracy", "--evaluate-every", "20"]
    together, alone = tmp_path / "together", tmp_path / "alone"
    two = ["--simulate-processes", "2", "--simulate", "2"]
    code, _, errors = run(*words, *two, "--run-dir", str(together))
    assert code == 0, errors
    run_alone(*words, "--simulate", "1", "--run-dir", str(alone))
    assert result(together)["fingerprint"] == result(alone)["fingerprint"]
    assert result(together)["best"] == result(alone)["best"]
    assert (together / "best").is_dir()


@pytest.mark.slow
def test_two_directories_of_checkpoints_at_once(tmp_path):
    """Lie: the end of one save meets the beginning of the other, "Barrier is already ongoing"."""
    running = start_programs(tmp_path, TWO_DIRECTORIES, str(tmp_path))
    ends = end(running, 120)
    assert [process.returncode for process in running] == [0, 0], ends
    for name in ("one", "two"):
        with Checkpoints(tmp_path / name, read_only=True) as checkpoints:
            assert checkpoints.steps() == [2, 3, 4]


TWO_DIRECTORIES = """
import os, sys, time
from pathlib import Path
import jax.numpy as jnp, multitower as mt, optax
port, number, where = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])

def slow(rename):
    def renamed(*words, **flags):
        time.sleep(0.3)  # process 0 is at its end of a save for longer than the others
        return rename(*words, **flags)
    return renamed

os.rename, os.replace = slow(os.rename), slow(os.replace)
them = dict(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=number)
mt.configure(simulated_devices=1, distributed=True, **them)
step = mt.train_step(lambda w, x: (w - x) ** 2, optax.sgd(0.1))
state = step.init(jnp.zeros(50))
with mt.Checkpoints(where / "one") as one, mt.Checkpoints(where / "two") as two:
    for k in range(5):
        one.save(k, state, {})
        two.save(k, state, {})
"""


@pytest.mark.slow
def test_a_disk_that_is_full_ends_all_processes(tmp_path):
    """Lie: all wait for one another, as the failed save never comes to the end of its barrier."""
    began = time.monotonic()
    running = start_programs(tmp_path, FULL, str(tmp_path / "run"))
    (_, errors), (_, others) = end(running, 120)
    assert time.monotonic() - began < 100
    assert [process.returncode for process in running] == [1, -signal.SIGABRT], errors + others
    assert "CheckpointError: a checkpoint could not be written to" in errors
    assert "File too large" in errors
    assert "multitower: missing: process 0 on" in others
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps()[0] == 5


FULL = """
import itertools, resource, sys
import multitower as mt, numpy as np, optax
port, number, run_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
where = dict(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=number)
mt.configure(simulated_devices=1, distributed=True, **where)

def fill(progress):
    if progress.step == 12:  # from now on no file may be longer
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))

def batches(first):
    return itertools.repeat(np.ones((4, 200), np.float32))

params = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float32)
trainer = mt.Trainer(
    lambda w, x: (x @ w).sum(1), optax.sgd(1e-6), run_dir=run_dir, towers=2,
    checkpoint_every=5, hooks=[fill],
)
trainer.fit(params, batches, steps=100_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_one_that_started_the_others_before_they_train(tmp_path, number, code):
    """Lie: JAX has noted it, or the launcher has kept it, and the run goes on to its end."""
    file = tmp_path / "recipe.py"
    wait = f"def load():\n    open('{tmp_path}/' + str(jax.process_index()), 'w').close()\n"
    wait += "    import time\n    time.sleep(30)\n"
    file.write_text(Path(CIRCLE).read_text().replace("def load():", wait))
    process = start("train", str(file), "--simulate-processes", "2", "--run-dir", str(tmp_path))
    while process.poll() is None and not all((tmp_path / name).exists() for name in "01"):
        time.sleep(0.1)
    process.send_signal(number)
    [(_, errors)] = end([process], 25)
    assert process.returncode == code, errors


IN_FOREGROUND = """
import os, sys
os.open(sys.argv[1], os.O_RDWR)  # a session without a terminal takes it for its own
from multitower.cli.starting.local_processes import _in_foreground
print(_in_foreground())
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_terminal_sends_ctrl_c_wherever_stdin_comes_from(has_terminal):
    """Lie: stdin is no terminal, so nobody has sent Ctrl-C to the others; they get it twice."""
    reader, terminal = pty.openpty()
    place = os.ttyname(terminal) if has_terminal else os.devnull
    words = [sys.executable, "-c", IN_FOREGROUND, place]
    how = {"stdin": subprocess.DEVNULL, "start_new_session": True, "text": True}
    assert subprocess.check_output(words, **how) == f"{has_terminal}\n"
    os.close(reader)
    os.close(terminal)


@pytest.mark.slow
def test_processes_with_unequal_devices_are_told_so(tmp_path):
    running = start_programs(tmp_path, UNEQUAL)
    for _, errors in end(running, 60):
        assert "all must have equally many" in errors
    assert [process.returncode for process in running] == [1, 1]


UNEQUAL = """
import itertools, sys
import multitower as mt, numpy as np, optax
port, number = sys.argv[1], int(sys.argv[2])
where = dict(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=number)
mt.configure(simulated_devices=2 - number, distributed=True, **where)
trainer = mt.Trainer(lambda w, x: w * x, optax.sgd(0.1), devices=1, towers=2)
trainer.fit(np.float32(1), lambda first: itertools.repeat(np.ones(4)), steps=2)
"""
