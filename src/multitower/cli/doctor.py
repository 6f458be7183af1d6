"""`multitower doctor`."""

import json
from typing import Annotated, Any

import multitower as mt
from multitower.cli.console import say
from multitower.cli.flags.shared import AsJson, WholeNumber, flag
from multitower.cli.starting.devices import start_devices
from multitower.cli.starting.together import ALONE, TOGETHER, Together
from multitower.processes.together import is_first
from multitower.runs.doctor import examine


def doctor(
    *,
    simulate: Annotated[
        WholeNumber,
        flag("N", "Examine N simulated CPU devices.", "all accelerators, or two simulated devices"),
    ] = None,
    as_json: AsJson = False,
    together: Annotated[Together, TOGETHER] = ALONE,
) -> None:
    """Show devices, memory, settings and versions; check that one device and all give same bits."""
    where = start_devices(None, simulate, None, together=together)
    findings = examine()
    if as_json and is_first():
        print(json.dumps(findings, indent=2))
    elif is_first():
        say(f"running on {where}")
        for line in _lines(findings):
            say(line)
    if False in (findings["same_bits"], findings["same_bits_in_stages"]):
        raise mt.DeviceError(
            "one device and all devices give different bits. Simulated devices need the same NPROC "
            "everywhere; GPUs must all be of one kind."
        )


def _lines(findings: dict[str, Any]) -> list[str]:
    lines = [
        f"  {one['name']}  {one['kind']}{_memory(one['bytes_in_use'], one['bytes_limit'])}"
        for one in findings["devices"]
    ]
    lines += [
        f"process {number} on {one['host']}: {', '.join(one['devices'])}"
        for number, one in enumerate(findings.get("processes", []))
    ]
    lines += [
        f"processes {one['processes'][0]} and {one['processes'][1]}: a number each way takes "
        f"{1e3 * one['seconds']:.2f} ms, a mebibyte {1e3 * one['mebibyte_seconds']:.2f} ms"
        for one in findings.get("exchanges", [])
    ]
    for title in ("environment", "host", "versions"):
        lines.append(title)
        lines.extend(
            f"  {name} {'not set' if value is None else value}"
            for name, value in findings[title].items()
        )
    for name, what in (("same_bits", "same bits"), ("same_bits_in_stages", "in two stages")):
        if findings[name] is not None:
            agree = "agree" if findings[name] else "DISAGREE"
            lines.append(f"{what}: one device and all of them {agree}")
    return lines


def _memory(used: int | None, limit: int | None) -> str:
    if used is None or limit is None:
        return ""
    return f"  {used / 2**30:.1f} of {limit / 2**30:.1f} GiB in use"
