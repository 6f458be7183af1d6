"""Mutation testing: do tests turn red when the code is wrong?

    make mutants MODULE=engines/reduction [ARGS="--number 40 --seed 0 --jobs 2"]

Cosmic Ray puts one small bug at a time into a copy of the repository. Of the places in the module
that it can change, `--number` are drawn, and for each place one of its changes. First all everyday
tests run once, to record which functions each of them runs (kept until a source or a test
changes). A mutant then meets tests that run its function: those of the module's own file, and then
others as they are drawn, for `--seconds` in all. A mutant that survives shows a missing test, or
changes nothing that anybody can see, or met too few tests. The exit code is 1 if more than a tenth
survive.
"""

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db

ROOT = Path(__file__).resolve().parents[1]
ENOUGH = 0.9


class Mutant(NamedTuple):
    """A module's source with one small bug, and the tests that it meets."""

    source: str
    tests: list[str]
    seconds: float


def main() -> int:
    """Makes, tries and counts the mutants of a module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="the interpreter that runs the tests")
    parser.add_argument("module", help="such as engines/reduction")
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20, help="of tests, for each mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    module = Path("src/multitower", options.module.removesuffix(".py") + ".py")
    if not (ROOT / module).exists():
        sys.exit(f"There is no {module}. Say MODULE=engines/reduction, for example.")
    source = (ROOT / module).read_text()
    record = record_of(options.python, options.jobs)
    mutants = [
        meet(module, source, code, record, options)
        for code in draw(module, source, options.number, options.seed)
    ]
    print(f"{module}: {len(mutants)} mutants", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        copies: Queue[Path] = Queue()
        for number in range(options.jobs):
            copies.put(copy_to(Path(directory, str(number))))

        def is_killed(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                (copy / module).write_text(mutant.source)
                # A mutant that hangs fills the memory.
                return not passes(options.python, copy, mutant.tests, 60 + 5 * mutant.seconds)
            finally:
                (copy / module).write_text(source)
                copies.put(copy)

        with ThreadPoolExecutor(options.jobs) as pool:
            killed = list(pool.map(is_killed, mutants))
    for mutant, is_dead in zip(mutants, killed, strict=True):
        if not is_dead:
            print(f"survives {len(mutant.tests)} tests of {mutant.seconds:.0f} s:")
            print(*changes(source, mutant.source), sep="\n")
    print(f"{module}: {sum(killed)} of {len(killed)} killed")
    return 0 if sum(killed) >= ENOUGH * len(killed) else 1


def changes(source: str, code: str) -> list[str]:
    """What a mutant changes, as a difference of lines."""
    lines = difflib.unified_diff(source.splitlines(), code.splitlines(), n=1, lineterm="")
    return [f"    {line}" for line in list(lines)[2:]]


def record_of(python: str, jobs: int) -> dict[str, dict[str, Any]]:
    """For each everyday test its seconds and the functions that it runs; see recorded_tests.py."""
    names = [name for name in tracked() if name.startswith(("src/", "tests/"))]
    contents = [name.encode() + (ROOT / name).read_bytes() for name in names]
    kept = Path(sys.prefix, f"record-{hashlib.sha256(b''.join(contents)).hexdigest()[:16]}.json")
    if not kept.exists():
        print("all everyday tests, once, to see what they run ...", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            watch = {"RECORD_OF": f"{ROOT}/src/multitower", "RECORD_TO": directory}
            options = ["-n", str(jobs), "-p", "recorded_tests"]
            if run_tests(python, ROOT, options, watch, None):
                sys.exit("They fail without any mutant (or this Python is older than 3.12).")
            parts = [json.loads(path.read_text()) for path in Path(directory).iterdir()]
        kept.write_text(json.dumps({test: seen for part in parts for test, seen in part.items()}))
    return json.loads(kept.read_text())


def meet(
    module: Path,
    source: str,
    code: str,
    record: dict[str, dict[str, Any]],
    options: argparse.Namespace,
) -> Mutant:
    """A mutant with the tests that run the function that it changes, for about `--seconds`."""
    inside = module.relative_to("src/multitower")
    line = 1 + next(
        n
        for n, (old, new) in enumerate(zip(source.splitlines(), code.splitlines(), strict=False))
        if old != new
    )
    function = f"{inside}:{first_line(source, line)}"
    tests = [test for test, seen in record.items() if function in seen["functions"]]
    if not tests:  # it is in no function, or only other processes run it
        of_module = f"{inside}:"
        runs = lambda seen: any(one.startswith(of_module) for one in seen["functions"])
        tests = [test for test, seen in record.items() if runs(seen)]
    random.Random(options.seed).shuffle(tests)
    own = f"tests/{inside.parent}/test_{inside.stem}.py::"
    chosen, seconds = [], 0.0
    for test in sorted(tests, key=lambda test: not test.startswith(own)):
        if not chosen or seconds + record[test]["seconds"] <= options.seconds:
            chosen.append(test)
            seconds += record[test]["seconds"]
    return Mutant(code, chosen, seconds)


def first_line(source: str, line: int) -> int:
    """The first line of the innermost function that a line is in; 0 if there is none."""
    return max(
        (
            min(one.lineno for one in (node, *node.decorator_list))
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
        ),
        default=0,
    )


def draw(module: Path, source: str, number: int, seed: int) -> list[str]:
    """The sources of mutants, one at each of `number` places."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        database = stack.enter_context(use_db(Path(directory, "db"), WorkDB.Mode.create))
        init([ROOT / module], database, {})
        found = [item.mutations[0] for item in database.work_items]
    # Types, options such as frozen=True, and zip(strict=True), an assertion of ours: no test can
    # tell, nor should it.
    unseen = [
        ((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset))
        for node in ast.walk(ast.parse(source))
        for one in (
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
            *getattr(node, "decorator_list", ()),
            node.value if isinstance(node, ast.keyword) and node.arg == "strict" else None,
            node if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING" else None,
        )
        if one is not None
    ]
    places: dict[tuple[int, int], list] = {}
    for mutation in found:
        is_unseen = any(start <= mutation.start_pos < end for start, end in unseen)
        if not is_unseen and "Decorator" not in mutation.operator_name:
            places.setdefault(mutation.start_pos, []).append(mutation)
    generator = random.Random(seed)
    order = sorted(places)
    generator.shuffle(order)
    drawn: dict[tuple[int, int], str] = {}
    for place in order:
        if len(drawn) == number:
            break
        m = generator.choice(places[place])
        code = mutate_code(source, get_operator(m.operator_name)(**m.operator_args), m.occurrence)
        if is_python(code):
            drawn[place] = code
    return [drawn[place] for place in sorted(drawn)]


def is_python(code: str) -> bool:
    """Cosmic Ray takes the star of a signature for a product."""
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def tracked() -> list[str]:
    """The files of the repository that git tracks and that are there."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [name for name in names.split("\0")[:-1] if (ROOT / name).exists()]


def copy_to(directory: Path) -> Path:
    """What git tracks, as it is now."""
    for name in tracked():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    return directory


def passes(python: str, copy: Path, tests: list[str], timeout_s: float) -> bool:
    """Whether all tests do; one that hangs does not, and where there are none, they all do."""
    try:
        return not tests or run_tests(python, copy, ["-x", *tests], {}, timeout_s) == 0
    except subprocess.TimeoutExpired:
        return False


def run_tests(
    python: str, root: Path, arguments: list[str], more: dict[str, str], timeout_s: float | None
) -> int:
    """The exit code of pytest."""
    path = f"{root}/src{os.pathsep}{root}/benchmarks"
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=timeout_s,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
