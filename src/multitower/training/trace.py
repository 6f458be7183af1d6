"""Traces of JAX's profiler: which compiled program ran on which device, and when."""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_GPU = re.compile(r"/device:GPU:(\d+)")


class Execution(NamedTuple):
    """One execution of a program on a device.

    Attributes:
        module: the name of the program in XLA, such as "jit_backward".
        start: when its first operation began, in seconds.
        end: when its last operation ended, in seconds.
    """

    module: str
    start: float
    end: float


def newest_trace(directory: Path) -> Path | None:
    """The file of the newest trace that `Profile` has written to a directory."""
    paths = sorted(directory.glob("plugins/profile/*/perfetto_trace.json.gz"))
    return paths[-1] if paths else None


def read_executions(directory: Path) -> dict[int, list[Execution]]:
    """The executions in the newest trace of a directory, for each local device in order of start.

    Every operation in a trace names its program. On CPU devices it also names the device and the
    execution. A GPU is a process in the trace, and its streams are threads. There an execution ends
    when another program follows, or when one of its operations is repeated. So on GPUs each
    iteration of a loop in a program counts as an execution.

    Args:
        directory: a directory that `Profile` has written to.

    Returns:
        The executions by number of the device; empty if there is no trace, or it cannot be read.
    """
    path = newest_trace(directory)
    if path is None:
        return {}
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        return {}  # the process was killed while it wrote this
    spans: dict[tuple[int, str, Any], tuple[float, float]] = {}
    for device, run, one in _operations(events):
        key = (device, one["args"]["hlo_module"], run)
        start, end = 1e-6 * one["ts"], 1e-6 * (one["ts"] + one.get("dur", 0))
        before = spans.get(key, (start, end))
        spans[key] = (min(before[0], start), max(before[1], end))
    found: dict[int, list[Execution]] = defaultdict(list)
    for (device, module, _), span in sorted(spans.items(), key=lambda item: item[1]):
        found[device].append(Execution(module, *span))
    return dict(found)


def _operations(events: Iterable[Mapping[str, Any]]) -> Iterable[tuple[int, Any, Any]]:
    """All operations of programs, each with its device and a key of its execution."""
    named = [one for one in events if one.get("ph") == "M"]
    gpus = {
        one["pid"]: int(found[1])
        for one in named
        if one["name"] == "process_name" and (found := _GPU.match(one["args"]["name"]))
    }
    streams = {
        (one["pid"], one["tid"])
        for one in named
        if one["name"] == "thread_name" and one["args"]["name"].startswith("Stream")
    }
    operations = [
        one for one in events if one.get("ph") == "X" and "hlo_module" in one.get("args", {})
    ]
    seen: dict[int, tuple[str, set[str], int]] = {}
    for one in sorted(operations, key=lambda one: one["ts"]):
        args = one["args"]
        if one["pid"] not in gpus:
            if "device_ordinal" in args and "run_id" in args:
                yield int(args["device_ordinal"]), args["run_id"], one
        elif (one["pid"], one["tid"]) in streams:
            device, name = gpus[one["pid"]], args.get("hlo_op", one["name"])
            module, names, number = seen.get(device, ("", set[str](), 0))
            if module != args["hlo_module"] or name in names:
                module, names, number = args["hlo_module"], set[str](), number + 1
            names.add(name)
            seen[device] = (module, names, number)
            yield device, number, one
