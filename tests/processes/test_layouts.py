"""Several processes: everything is as in one process (laws L1, L2, L3, L7), in real processes.

The lies: bits that depend on how many processes share the devices; a gradient or a score of this
process's rows alone; rows that fill up and are counted; a result that only process 0 can read.
"""

import json
import socket

import jax
import numpy as np
import pytest

import multitower as mt
from forks import compiling_quickly
from places import PROGRAMS
from processes import run_fork, run_processes

PROGRAM = str(PROGRAMS / "layout_program.py")


def together(num_processes, num_devices, *whats, timeout_s=120, **settings):
    """What process 0 of PROCESSES, with DEVICES each, finds."""
    words = [PROGRAM, num_processes, num_devices, *whats]
    return json.loads(run_processes(*words, timeout_s=timeout_s, **settings))


# Every process compiles all of it. As users compile, `cli/test_processes` shows the same bits.
QUICKLY = {"timeout_s": 400, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **compiling_quickly()}


# Every day those whose lies are the nearest; what they share is compiled once. The others' steps
# and functions are among these, too, but for arrays of all processes, and what is refused.
EVERYDAY = ("same_bits", "some_functions", "own_rows", "texts")
OTHERS = (
    "fast", "functions", "global_arrays",
    "meeting", "local", "stages", "sharded", "shards", "negative_zeros", "unlike",
)  # fmt: skip
ONLY_TOGETHER = {"texts", "unlike"}


@pytest.fixture(scope="module")
def on_two_processes():
    return together(2, 1, *EVERYDAY, **QUICKLY)


@pytest.fixture(scope="module")
def alone():
    """One process with two devices."""
    whats = [what for what in EVERYDAY if what not in ONLY_TOGETHER]
    return json.loads(run_fork(PROGRAM, "0", "1", "0", "2", *whats, **QUICKLY))


@pytest.fixture(scope="module")
def others_on_two_processes():
    return together(2, 1, *OTHERS, **QUICKLY)


@pytest.fixture(scope="module")
def others_alone():
    whats = [what for what in OTHERS if what not in ONLY_TOGETHER]
    return json.loads(run_fork(PROGRAM, "0", "1", "0", "2", *whats, **QUICKLY))


def test_law_l3_same_bits_on_two_processes(on_two_processes, alone):
    assert on_two_processes["same_bits"] == alone["same_bits"]


@pytest.mark.slow
def test_fast_steps_on_two_processes_equal_one_process(others_on_two_processes, others_alone):
    params, loss = others_alone["fast"]
    np.testing.assert_allclose(others_on_two_processes["fast"][0], params, rtol=1e-5)
    assert others_on_two_processes["fast"][1] == pytest.approx(loss, rel=1e-5)


def test_laws_l1_l2_l7_on_two_processes(on_two_processes, alone):
    check_functions(on_two_processes["some_functions"], alone["some_functions"])


@pytest.mark.slow
def test_laws_l1_l2_l7_with_all_rows_and_towers(others_on_two_processes, others_alone):
    check_functions(others_on_two_processes["functions"], others_alone["functions"])


def check_functions(found, expected):
    """What parallel functions return on two processes is what they return on one."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.startswith("evaluate"):
            assert found[name] == value == {"x": 100.0}
        elif name.startswith("rows") or "None" in name:
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
        else:
            assert found[name] == value, name


def test_a_process_reads_only_the_rows_of_its_towers(on_two_processes, alone):
    """Process 0 of 2 has towers 0 to 3 of 8, and the first of 2 devices."""
    read, params, scored = on_two_processes["own_rows"]
    first = list(range(16))
    assert read[:2] == [first, [*range(13), 0, 1, 2]]  # the 13 rows fill three towers, and one more
    assert read[2] == first
    assert read[3] == list(range(13))  # which one tower a device cannot share evenly
    assert scored == [*range(12), *range(24, 36)]
    _, expected, _ = alone["own_rows"]
    assert params[0] == expected[0]
    np.testing.assert_allclose(params[1], expected[1], rtol=1e-5)


@pytest.mark.slow
def test_arrays_of_all_processes_are_arguments(others_on_two_processes, others_alone):
    found = dict(others_on_two_processes["global_arrays"])
    assert "none of its devices has all of them" in found.pop("error")
    assert "none of them has all of its rows" in found.pop("other towers")
    expected = others_alone["global_arrays"]
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_what_processes_do_not_pass_alike_is_told(others_on_two_processes):
    """Lies: rows that nobody trains on, as with a DistributedSampler; two models in one run.

    And a hang: a process that makes more steps, in a call or in all, or that scores more rows than
    another, waits for it.
    """
    found = others_on_two_processes["unlike"]
    for said in found["batches of a call"]:  # in each process
        assert "4 towers; 3 batches of 24, 24, 24 rows, and process 1 " in said
        assert "4 towers; 2 batches of 24, 24 rows. All processes make the same calls" in said
    assert "process 1 passes other values than process 0" in found["a part of the batch"]
    assert "process 0 passes float32[24, 6], float32[24]" in found["fewer rows"]
    assert "and process 1 float32[16, 6], float32[16]" in found["fewer rows"]
    assert "state.params['in'] than the first device of process 0" in found["parameters"]
    assert "5 towers" in found["towers"]
    assert "the host of process 1 holds other bits in state.params['in']" in found["stages"]
    assert "Use layout=(2, 1)" in found["one replica over processes"]
    assert "process 1 passes other values" in found["an argument"]
    assert found["alike"] == ""
    assert """ "['loss'] float32[6]" in process 0, and """ in found["metrics"]
    assert "['metrics']['more'] float32[6]\" in process 1" in found["metrics"]
    assert "the loss: process 1 has traced another program" in found["code"]
    for said in found["steps"]:
        assert said.startswith("fit: steps is 2 in process 0, and 3 in process 1. All processes")
    assert "fit: optimizer is 'one with the numbers 0.1" in found["learning rate"]
    for said in found["rows to score"]:
        assert "evaluate: the number of rows is 24 in process 0, and 16 in process 1" in said


def test_texts_of_other_lengths_arrive_whole(on_two_processes):
    degree = "\N{DEGREE SIGN}"
    assert on_two_processes["texts"] == [degree, degree * 5001]


@pytest.mark.slow
def test_law_l3_towers_meet_across_two_processes(others_on_two_processes, others_alone):
    assert others_on_two_processes["meeting"] == others_alone["meeting"]


@pytest.mark.slow
def test_law_l3_with_local_updates_on_two_processes(others_on_two_processes, others_alone):
    """Lie: a meeting of one process's towers; a state in which each process sees its own alone."""
    assert others_on_two_processes["local"] == others_alone["local"]


@pytest.mark.slow
def test_law_l3_with_stages_on_two_processes(others_on_two_processes, others_alone):
    """Lies: gradients of one process's replicas alone; a norm, or a weight, of one process."""
    assert others_on_two_processes["stages"] == others_alone["stages"]


@pytest.mark.slow
def test_law_l3_with_blocks_of_the_optimizers_state_on_two_processes(
    others_on_two_processes, others_alone
):
    """Lie: a state in which each process sees its own blocks alone."""
    assert others_on_two_processes["sharded"] == others_alone["sharded"]


@pytest.mark.slow
def test_shards_of_a_state_on_two_processes_equal_one_process(
    others_on_two_processes, others_alone
):
    # The lie: parts of devices that this process does not drive.
    expected = others_alone["shards"]
    for found, wanted in zip(others_on_two_processes["shards"], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_law_l3_keeps_the_signs_of_zeros_on_two_processes(others_on_two_processes, others_alone):
    """Lie: rows that are gathered as a sum of what each device has of them: -0.0 + 0.0 is 0.0."""
    assert others_on_two_processes["negative_zeros"] == others_alone["negative_zeros"]


@pytest.fixture(scope="module")
def calls_on_two_processes():
    return together(2, 1, "local_calls", "local_run", **QUICKLY)


@pytest.mark.slow
def test_between_meetings_no_program_spans_processes(calls_on_two_processes, others_alone):
    """Process 0 makes its steps before process 1 begins; then all bits are those of one process.

    The lie: metrics, or anything else, that wait for the other process in every step.
    """
    expected = others_alone["local"]
    assert calls_on_two_processes["local_calls"] == [expected[1], expected[3]]


@pytest.mark.slow
def test_a_run_with_local_updates_makes_calls_that_end_where_towers_meet(calls_on_two_processes):
    """Lies: metrics that are exchanged in every step; hooks that miss some; one process's rows."""
    found = dict(calls_on_two_processes["local_run"])
    alone = json.loads(run_fork(PROGRAM, "0", "1", "0", "2", "local_run", **QUICKLY))
    expected = dict(alone["local_run"])
    assert found.pop("sizes") == [2, 1, 1, 2]  # one more ends where devices are compared
    assert expected.pop("sizes") == [None] * 6
    assert found == expected


@pytest.fixture(scope="module")
def on_one_device():
    whats = ["same_bits", "sharded", "meeting", "local", "stages_elsewhere", "stages_that_meet"]
    found = json.loads(run_fork(PROGRAM, "0", "1", "0", "1", *whats, "float16", **QUICKLY))
    assert found["float16"][:3] == [0, 1, 0]  # else the step that is skipped would not be tried
    return found | {"local_calls": [found["local"][1], found["local"][3]]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "whats"),
    [
        # Processes of several devices, and processes with unequal numbers of towers.
        ((2, 3), ["same_bits", "meeting"]),
        ((3, 1), ["same_bits", "sharded", "local", "stages_elsewhere"]),
        ((2, 2), ["same_bits", "local_calls", "stages_that_meet", "float16"]),
    ],
    ids=str,
)
def test_law_l3_same_bits_on_layouts(layout, whats, on_one_device):
    found = together(*layout, *whats, **QUICKLY)
    assert found == {what: on_one_device[what] for what in whats}


@pytest.mark.slow
def test_exchanges_wait_for_programs_with_one_device_of_each_process():
    """Lie: two programs that send to the same processes at once, and read each other's messages."""
    what = "texts_after_a_late_program"
    texts, (first, second) = together(2, 2, what, **QUICKLY)[what]
    assert texts == ["process 0 of two", "process 1 of two"]
    assert first == 1
    assert 1.9 < second < 2  # the fixed point of sin(z) + 1


# ---------------------------------------------------------------- joining, before JAX starts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coordinator": "a:1"}, "are for distributed=True"),
        ({"distributed": True, "num_processes": 2}, "give all three, or none"),
        (
            {"distributed": True, "coordinator": "a", "num_processes": 2, "process_id": 0},
            "must be HOST:PORT",
        ),
        (
            {"distributed": True, "coordinator": "a:1", "num_processes": 2, "process_id": 2},
            "process_id is 0 to N-1",
        ),
    ],
)
def test_configure_refuses_half_a_cluster(given, message, monkeypatch):
    monkeypatch.setattr("multitower.hardware.configuration._started", lambda: False)
    with pytest.raises(mt.ConfigurationError, match=message):
        mt.configure(**given)


def test_configure_says_when_no_cluster_is_found(monkeypatch):
    """Lie: one process that trains alone although the user asked for a cluster."""
    monkeypatch.setattr("multitower.hardware.configuration._started", lambda: False)

    def initialize(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    # It would take pytest's stderr.
    monkeypatch.setattr("multitower.processes.joining.start_verdict", lambda _: None)
    with pytest.raises(mt.ConfigurationError, match=r"--coordinator HOST:PORT --num-processes N"):
        mt.configure(distributed=True)


def test_configure_joins_too_late():
    jax.devices()  # JAX has started, whichever test this worker begins with
    with pytest.raises(mt.ConfigurationError, match="came too late"):
        mt.configure(distributed=True)


@pytest.mark.parametrize("has_started", [True, False])
def test_configure_joins_another_cluster(monkeypatch, has_started):
    # The lie: the second cluster is accepted, and noted as the one that was joined.
    applied = {"distributed": True, "coordinator": "a:1", "num_processes": 2, "process_id": 0}
    monkeypatch.setattr("multitower.hardware.configuration._applied", dict(applied))
    monkeypatch.setattr("multitower.hardware.configuration._started", lambda: has_started)
    mt.configure(**applied)
    with pytest.raises(mt.ConfigurationError, match=r"configure\(num_processes=7\) came too late"):
        mt.configure(**{**applied, "num_processes": 7})


def test_another_run_listens_at_the_coordinator(monkeypatch):
    """Lie: JAX listens beside it, and one run's process joins the other's."""
    monkeypatch.setattr("multitower.hardware.configuration._started", lambda: False)
    monkeypatch.setattr("multitower.processes.joining.FREE_S", 0)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        here = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(mt.ConfigurationError, match="Another run uses that port"):
            mt.configure(distributed=True, coordinator=here, num_processes=2, process_id=0)


def test_nobody_answers_at_the_coordinator(monkeypatch):
    """Lie: JAX's abort without an exception, after five minutes."""
    monkeypatch.setattr("multitower.hardware.configuration._started", lambda: False)
    monkeypatch.setattr("multitower.processes.joining.JOIN_S", 0)
    with pytest.raises(mt.ConfigurationError, match="has not answered"):
        mt.configure(distributed=True, coordinator="127.0.0.1:1", num_processes=2, process_id=1)
