"""Executions in a trace: of CPU devices by their numbers, of GPUs by the operations that follow."""

import gzip
import json
from types import SimpleNamespace

import jax

from multitower.runs.pipeline import describe_pipeline, traced_pipeline
from multitower.stages.layout import lay_out
from multitower.stages.order import Segments
from multitower.training.trace import Execution, read_executions


def write(directory, events):
    path = directory / "plugins" / "profile" / "2026" / "perfetto_trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def ran(start, length, module, op, pid=1, tid=1, **args):
    """An operation, in microseconds."""
    args = {"hlo_module": module, "hlo_op": op, **args}
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length, "name": op, "args": args}


def named(what, name, **where):
    return {"ph": "M", "name": what, "args": {"name": name}, **where}


def on_cpu(start, length, module, device, run):
    return ran(start, length, module, "dot", device_ordinal=str(device), run_id=str(run))


def test_a_gpu_has_a_process_and_its_streams_are_threads(tmp_path):
    # The lies: two executions taken for one; one of a viewer's lines, or a copy, taken for another.
    streams = [named("thread_name", "Stream #13(Compute)", pid=2, tid=1)]
    streams += [named("thread_name", "XLA Modules", pid=2, tid=2)]
    write(tmp_path, [
        named("process_name", "/device:GPU:1 NVIDIA", pid=2),
        *streams,
        ran(0, 2, "jit_forward", "fusion", pid=2),
        ran(3, 2, "jit_forward", "dot", pid=2),
        ran(9, 2, "jit_forward", "dot.2", pid=2),
        ran(12, 2, "jit_forward", "fusion", pid=2),
        ran(15, 1, "jit_backward", "fusion", pid=2),
        ran(0, 30, "jit_forward", "jit_forward", pid=2, tid=2),
        {"ph": "X", "pid": 2, "tid": 1, "ts": 5, "dur": 1, "name": "MemcpyD2D", "args": {}},
        ran(20, 1, "jit_forward", "on the host", pid=701),
    ])  # fmt: skip
    micro = lambda *times: [round(1e-6 * one, 9) for one in times]
    found = read_executions(tmp_path)
    assert found.keys() == {1}
    rounded = [(one.module, *(round(t, 9) for t in one[1:])) for one in found[1]]
    assert rounded == [
        ("jit_forward", *micro(0, 11)),
        ("jit_forward", *micro(12, 14)),
        ("jit_backward", *micro(15, 16)),
    ]


def test_no_trace_is_none(tmp_path):
    assert read_executions(tmp_path) == {}


PROGRAMS = [("jit_forward", 0), ("jit_backward", 0), ("jit_backward", 1)]


def pipeline_of(layout):
    segments = Segments((0, 1), (0, 0), (1, 1), (True, False))
    return describe_pipeline(layout, segments)


def test_the_last_step_of_a_trace_is_the_pipeline(tmp_path):
    # The lies: the first step, which the profiler has delayed; a tower that is another; a bubble
    # of equal work.
    layout = lay_out(jax.devices()[:2], 2, 2, (1, 2))
    events = []
    for start, slow in ((0, 50), (1000, 0)):
        events += [
            on_cpu(start + 0, 10, "jit_forward", 0, 1 + start),
            on_cpu(start + 10, 10, "jit_forward", 0, 2 + start),
            on_cpu(start + 12, 20, "jit_backward", 1, 3 + start),
            on_cpu(start + 33 + slow, 20, "jit_backward", 1, 4 + start),
            on_cpu(start + 35, 20, "jit_backward", 0, 5 + start),
            on_cpu(start + 60 + slow, 20, "jit_backward", 0, 6 + start),
            on_cpu(start + 90 + slow, 5, "jit_add_sums", 0, 7 + start),
        ]
    write(tmp_path, events)
    found = traced_pipeline(pipeline_of(layout), layout, tmp_path)
    places = [tuple(slot[:5]) for slot in found["timeline"]]
    assert places == [
        (0, 0, 0, 0, "forward"),
        (0, 0, 0, 1, "forward"),
        (1, 1, 0, 0, "backward"),
        (1, 1, 0, 1, "backward"),
        (0, 0, 0, 0, "backward"),
        (0, 0, 0, 1, "backward"),
    ]
    ends = [round(1e6 * slot[-1]) for slot in found["timeline"]]
    assert ends == [10, 20, 32, 53, 55, 80]
    assert found["bubble"] == round(1 - (60 + 40) / (2 * 80), 4)


def test_a_trace_that_lacks_a_program_is_not_shown(tmp_path):
    # The lie: a picture in which every tower after the missing one is another.
    layout = lay_out(jax.devices()[:2], 2, 2, (1, 2))
    of_first = [on_cpu(n, 1, "jit_forward", 0, n) for n in range(2)]
    of_first += [on_cpu(10 + n, 1, "jit_backward", 0, 10 + n) for n in range(2)]
    write(tmp_path, [*of_first, on_cpu(5, 1, "jit_backward", 1, 5)])
    assert traced_pipeline(pipeline_of(layout), layout, tmp_path) is None
    assert traced_pipeline(pipeline_of(layout), layout, tmp_path / "none") is None
    of_last = [on_cpu(20 + n, 1, "jit_backward", 1, 20 + n) for n in range(2)]
    more = [on_cpu(n, 1, kind, device, n) for n, (kind, device) in enumerate(PROGRAMS, 40)]
    write(tmp_path / "more", [*of_first, *of_last, *more])
    assert traced_pipeline(pipeline_of(layout), layout, tmp_path / "more") is None
    write(tmp_path / "all", [*of_first, *of_last])
    assert traced_pipeline(pipeline_of(layout), layout, tmp_path / "all") is not None
    assert traced_pipeline({"stages": 2}, layout, tmp_path) is None


def test_of_several_processes_it_is_the_replica_of_this_one(tmp_path):
    # The lie: what ran here is drawn as the towers of another process.
    devices = [
        SimpleNamespace(process_index=p, local_hardware_id=n) for p in (0, 1) for n in (0, 1)
    ]
    programs = [("jit_forward", 0)] * 2 + [("jit_backward", 0)] * 2 + [("jit_backward", 1)] * 2
    write(tmp_path, [on_cpu(n, 1, kind, d, n) for n, (kind, d) in enumerate(programs)])
    layout = lay_out(devices, 4, 2, (2, 2))
    assert {slot[3] for slot in pipeline_of(layout)["timeline"]} == {2, 3}
    found = traced_pipeline(pipeline_of(layout), layout, tmp_path)
    assert [slot[3] for slot in found["timeline"]] == [0, 1] * 3
    layout = lay_out(devices, 3, 2, (2, 2))  # one tower passes through the last replica
    assert traced_pipeline(pipeline_of(layout), layout, tmp_path) is None


def test_programs_of_one_execution_are_one(tmp_path):
    # On a CPU it may go from thread to thread.
    write(tmp_path, [
        ran(start, length, "jit_f", "a", tid=tid, device_ordinal="0", run_id="-7")
        for start, length, tid in ((0, 1, 1), (5, 2, 2))
    ])  # fmt: skip
    ((one,),) = read_executions(tmp_path).values()
    assert one == Execution("jit_f", 0.0, 1e-6 * 7)


def test_a_trace_that_is_cut_off_is_none(tmp_path):
    """Lie: a run that was killed while it wrote one, and that no resume can end."""
    write(tmp_path, [on_cpu(0, 1, "jit_f", 0, 1)])
    (path,) = tmp_path.rglob("*.gz")
    path.write_bytes(path.read_bytes()[:-9])
    assert read_executions(tmp_path) == {}
    path.write_bytes(b"")
    assert read_executions(tmp_path) == {}
