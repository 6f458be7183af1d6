"""Finds why a function is not safe to run data parallel, by trying all rows and single towers."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from multitower.checks.first_look import Read, surely
from multitower.checks.problems import (
    COMPILED,
    COUNTED,
    GRADIENT,
    HIDDEN,
    MIXED,
    NOT_REPEATABLE,
    ROW_COUNT,
    STATISTICS,
    Kind,
    ParallelCheck,
    Problem,
    needed_whole,
    same_numbers,
    table,
)
from multitower.checks.reading.flow import Flow
from multitower.hardware.devices import devices
from multitower.towers.leaves import is_key, is_legacy_key
from multitower.trials.comparison import Compared, numbers_of
from multitower.trials.trial import Found, Towers, Trial, weights_of_ratio

# Problems that arise if an argument is cut that every tower needs whole.
_BY_A_TABLE: tuple[Kind, ...] = ("mixed rows", "row count", "gradient", "sum")
# Tolerances of gradients, relative to the sum of the towers' absolute gradients, since gradients
# may cancel each other; the second is for 16-bit floats. The third is relative to the loss: it
# covers rounding if all gradients are zero.
_TOLERANCE, _COARSE, _OF_LOSS = 1e-3, 2e-2, 1e-6
# How far other rows are from the given ones: a little, and enough to be outliers.
_SPREADS = 1, 6


def judge(trial: Trial, towers: int | None) -> ParallelCheck:
    """Tries a function on all rows and on those of every tower; see `check_parallel`."""
    num_rows = trial.parts.num_rows
    wanted = max(towers or len(devices()), 2)
    # Only full towers can be compared: the size of a tower for which their number is best.
    sizes = [
        min(max(size, 1), num_rows // 2) for size in (num_rows // wanted, -(-num_rows // wanted))
    ]
    tower_rows = min(sizes, key=lambda size: abs(num_rows // size - wanted))
    times, read = _reading(trial, tower_rows)
    problems = _values(trial, tower_rows, read, times)
    problems += same_numbers(read[0].draws if read else ())
    problems = _blame_tables(trial, tower_rows, read, problems)
    if read:
        again = lambda: trial.reading(times, again=True)
        kept = lambda _, results: [*results.kept_in_states(), *results.written_parameters()]
        problems += surely(kept, read, again)
        apart = surely(lambda _, results: results.ratios_apart(), read, again)
        # The sums of a ratio's total and weight look like other mistakes, with other advice.
        problems = [*apart, *(one for one in problems if not apart or one.kind not in _BY_A_TABLE)]
    return ParallelCheck(tuple(_once(problems)), num_rows, num_rows // tower_rows)


def _reading(trial: Trial, tower_rows: int) -> tuple[int, Read | None]:
    """What the program does with rows, and how many it needs together: whole groups of so many."""
    if (read := trial.reading()) is not None:
        return 1, read
    if (read := trial.reading(tower_rows)) is None:
        return 1, None
    divisors = (times for times in range(2, tower_rows) if tower_rows % times == 0)
    tried = ((times, trial.reading(times)) for times in divisors)
    return next((one for one in tried if one[1] is not None), (tower_rows, read))


def _values(
    trial: Trial,
    tower_rows: int,
    read: Read | None,
    group: int = 1,
    *,
    is_last: bool = False,
) -> list[Problem]:
    """Compares results on the whole batch with those of its towers, on the real inputs.

    Args:
        trial: the function, and its inputs.
        tower_rows: the number of rows of a tower.
        read: what the program does with rows; None if it is not known.
        group: how many neighbours belong together.
        is_last: compare these rows alone, and no gradients.
    """
    num_rows = trial.parts.num_rows // tower_rows * tower_rows
    everything = [trial.whole(num_rows)]
    (whole,), (again,) = (trial.run(everything) for _ in range(2))
    # Two ways to cut, since one may agree by chance. If towers exchange values, the order of rows
    # may have a meaning, such as neighbours that belong together, and is kept.
    both = (0, 0) if trial.meets else (0, group)
    ways = [trial.towers(tower_rows, strided=strided) for strided in both]
    try:
        cut, strided = (trial.run(way) for way in ways)
    except Exception as error:  # any error of the user's function on other shapes
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        message = ROW_COUNT.format(whole=num_rows, half=tower_rows, error=text[:200])
        return [Problem("row count", "the function", None, message)]
    flows = _flows(read) or [Flow()] * len(whole.names)
    problems: list[Problem] = []
    for number, (name, flow) in enumerate(zip(whole.names, flows, strict=True)):
        is_summed = trial.reduction == "sum" and whole.has_loss and not number
        of = Compared(name, flow, read, is_summed, num_rows, num_rows // tower_rows)
        value, repeated, *parts = (one.leaves[number] for one in (whole, again, *cut, *strided))
        if is_key(value) or (is_legacy_key(value) and flow.word == "free" and flow.varies):
            continue  # keys differ in every tower
        if flow.mixed and flow.is_drawn:
            problems.append(of.mixed(MIXED))
        elif flow.placed and flow.is_drawn:
            problems.append(Problem("row count", name, flow.placed, COUNTED))
        elif not _is_same(value, repeated):
            problems.append(Problem("not repeatable", name, None, NOT_REPEATABLE))
        elif not flow.is_drawn:
            problems.extend(of.problems(value, parts[: len(cut)], in_order=True))
            problems.extend(of.problems(value, parts[len(cut) :], in_order=False))
    if is_last:
        return problems
    if not problems and any(flow.mixed and not flow.is_drawn for flow in flows):
        problems = _hidden(trial, tower_rows, read, group)
    if problems or not whole.has_loss or flows[0].is_drawn:
        return problems
    found = [[whole], cut, strided]
    return _gradients(trial, [everything, *ways], found, flows[0])


def _hidden(trial: Trial, tower_rows: int, read: Read | None, group: int) -> list[Problem]:
    """What these rows hide and others show, such as a mean with a mask that keeps all of them."""
    for spread in _SPREADS:
        try:
            found = _values(trial.with_other_rows(spread), tower_rows, read, group, is_last=True)
        except Exception:  # rows that the function refuses
            continue
        mixed = [one for one in found if one.kind == "mixed rows"]
        if mixed and not any(one.kind == "not a number" for one in found):
            return [one._replace(message=f"{one.message} {HIDDEN}") for one in mixed]
    return []


def _gradients(
    trial: Trial, ways: Sequence[Towers], results: Sequence[list[Found]], flow: Flow
) -> list[Problem]:
    """Compares the gradients of a loss whose values agree.

    Args:
        trial: the function, and its inputs.
        ways: the towers of each way to cut the batch; the first is the whole batch, as one tower.
        results: what these towers returned, for each way.
        flow: what the program does with rows on the way to the loss.
    """
    (whole,), (here,) = results[0], ways[0]
    relative = _COARSE if trial.is_coarse(*here) else _TOLERANCE
    of_loss = _OF_LOSS * _largest(whole.leaves[0])
    weighted = [(way, weights_of_ratio(found)) for way, found in zip(ways, results, strict=True)]

    def parting(*, compiled: bool) -> str | None:
        wanted, *found = trial.gradients(weighted, compiled=compiled)
        return _parting(wanted, found, relative, of_loss)

    try:
        name = parting(compiled=True)
    except Exception:  # a loss that cannot be differentiated, such as one with a while loop
        return []
    if name is None:
        return []
    message = GRADIENT
    with contextlib.suppress(Exception):  # a program that works as a whole only
        message = GRADIENT if parting(compiled=False) else COMPILED
    output = f"{whole.names[0]}'s gradient with respect to {name}"
    place = flow.places[0] if flow.places else None
    return [Problem("gradient", output, place, message.format(num=len(ways[1])))]


def _parting(wanted: Any, found: Sequence[Any], relative: float, of_loss: float) -> str | None:
    """The name of a gradient that is not the wanted one in some way to cut the batch."""
    sizes = [_largest(sizes) for cut in found for _, sizes in cut.values()]
    tolerance = relative * max(sizes, default=0.0) + of_loss
    for cut in found:
        for name, (gradient, _) in cut.items():
            pair = numbers_of(gradient), numbers_of(wanted[name][0])
            if not np.allclose(*pair, rtol=0, atol=tolerance, equal_nan=True):
                return name
    return None


def _largest(value: Any) -> float:
    """The largest absolute value of the finite numbers of a result."""
    numbers = np.abs(numbers_of(value))
    return float(np.max(numbers, initial=0.0, where=np.isfinite(numbers)))


def _blame_tables(
    trial: Trial, tower_rows: int, read: Read | None, problems: list[Problem]
) -> list[Problem]:
    """Names an argument that was cut by mistake, in place of the problems that it caused."""
    kinds, split = trial.parts.split.kinds, trial.parts.split
    cut = [number for number, kind in enumerate(kinds) if isinstance(kind, int)]
    tables = read[0].tables if read else {}
    names = [
        (trial.arguments.of(path), trial.arguments.whole([path], trial.tree, trial.axes))
        for path in split.row_paths(trial.tree)
    ]
    if len(cut) > 1 and any(problem.kind in _BY_A_TABLE for problem in problems):
        rest = [problem for problem in problems if problem.kind not in _BY_A_TABLE]
        for n in sorted(range(len(cut)), key=lambda n: n not in tables):
            if _is_right_without_cutting(trial, cut[n], tower_rows, read):
                return [(table if n in tables else needed_whole)(*names[n], tables.get(n)), *rest]
    told = {*tables.values()}
    found = [table(*names[n], place) for n, place in tables.items()]
    return [*found, *(problem for problem in problems if problem.where not in told)]


def _is_right_without_cutting(trial: Trial, leaf: int, tower_rows: int, read: Read | None) -> bool:
    """Whether there is no problem if every tower gets this leaf whole, and still uses its rows."""
    whole, trial = trial, trial.sharing(leaf)
    shared = trial.reading()
    if shared is None:
        return False
    before = _flows(read) or [Flow("by row")]
    if any(
        a.word != "free" and b.word == "free" for a, b in zip(before, _flows(shared), strict=False)
    ):
        return False
    try:
        # With all rows in every tower, there would be a loss for each of them.
        if whole.has_loss(whole.parts.num_rows) and not trial.has_loss(tower_rows):
            return False
        return not _values(trial, tower_rows, shared)
    except Exception:  # the whole leaf does not fit the rows of other arguments
        return False


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """Keeps one problem per result, and one for BatchNorm over all results that depend on it."""
    seen: dict[Any, Problem] = {}
    for one in problems:
        is_batch_norm = one.message.startswith(STATISTICS[:40])
        seen.setdefault(STATISTICS if is_batch_norm else (one.kind, one.output), one)
    return list(seen.values())


def _flows(read: Read | None) -> list[Flow]:
    """The flows of the results, in their order."""
    leaves = read[1].leaves if read else []
    return [one.flow for kind in ("loss", "aux") for one in leaves if one.kind == kind]


def _is_same(value: Any, repeated: Any) -> bool:
    value, repeated = numbers_of(value), numbers_of(repeated)
    return np.array_equal(value, repeated, equal_nan=value.dtype.kind in "fc")
