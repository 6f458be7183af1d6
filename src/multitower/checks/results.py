"""What the results of a tower's program show: which of them depend on how rows are cut."""

import itertools
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.checks.problems import (
    ADDED,
    APART,
    BESIDE,
    COUNTED,
    FIRST,
    HOLD_ALL,
    KEEP_A_MEAN,
    MEETINGS,
    MIXED,
    MIXED_WEIGHT,
    OF_ONE_TOWER,
    RATIO,
    SAME_IN_ALL,
    STATISTICS,
    STEADY,
    SUM_ALL,
    SUM_PARTS,
    TERMS,
    WHY_MIXED,
    WRITTEN,
    Problem,
    bent_state,
    held_in_state,
    summed,
    summed_state,
)
from multitower.checks.reading.counts import divides
from multitower.checks.reading.flow import Flow, line_at, operation_at
from multitower.checks.reading.row_flow import Reading

# State for the next step. The towers' states are averaged, which is right for statistics.
STATES = ("model", "model_state", "state")
# Kinds with problems of their own.
_ASIDE = (FIRST, TERMS, ADDED)


class _Result(NamedTuple):
    """A leaf of what a tower computes; `kind` is loss, aux, metrics, result, first or a state."""

    kind: str
    name: str
    flow: Flow
    has_rows: bool
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """Its number of axes."""
        return len(self.shape)

    def is_statistic(self, known: set[str]) -> bool:
        """Whether it is an array of means over rows, such as BatchNorm keeps.

        Args:
            known: the lines where other statistics come from: a network has several BatchNorms.
        """
        is_array = self.ndim > 0 and not self.has_rows and self.flow.word != "free"
        if self.kind in STATES:
            return is_array and not self.flow.bent
        is_mean = self.kind == "aux" and is_array and self.flow.is_mean
        return is_mean and {line_at(root) for root in self.flow.roots} <= known


class Results(NamedTuple):
    """All results, and the lines where returned statistics come from.

    A function that returns such statistics is meant to have some for each tower, so these lines
    cause no warning; anything else that mixes rows does.
    """

    leaves: list[_Result]
    known_lines: set[str]
    num_rows: int
    counts: Set[float] = frozenset()
    written: Sequence[tuple[str, str | None]] = ()
    of_weights: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        reading: Reading,
        tree: dict[str, Any],
        num_rows: int,
        written: Sequence[tuple[str, str | None]] = (),
        of_weights: Sequence[str] = (),
    ) -> "Results":
        """From what a program does with rows, and the tree of what it returns, by kind.

        Args:
            reading: of the program. It may have more outputs than the tree.
            tree: what the program returns, by kind.
            num_rows: the number of rows that it was read with.
            written: the parameters of modules that it writes into, and where.
            of_weights: what each output has of the weights of ratios; see `weights`.
        """
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [
            _Result(str(path[0].key), _name(path), flow, leaf.shape[:1] == (num_rows,), leaf.shape)
            for (path, leaf), flow in zip(flat, reading.outputs[: len(flat)], strict=True)
        ]
        known: set[str] = set()
        for _ in leaves:  # the statistics of a layer depend on those of the layers before
            found = [one.flow.last for one in leaves if one.is_statistic(known)]
            before, known = known, {line_at(root) for roots in found for root in roots}
            if known == before:
                break
        counts = frozenset(itertools.chain(*reading.made))
        return cls(leaves, known, num_rows, counts, written, of_weights)

    def has_state_by_row(self) -> bool:
        """Whether a state has one entry per row: a short queue, if it was read with many rows."""
        return any(one.kind in STATES and one.has_rows for one in self.leaves)

    def are_statistics(self, flow: Flow) -> bool:
        """Whether rows are brought together by nothing but returned statistics."""
        of_known = {line_at(root) for root in flow.roots} <= self.known_lines
        return bool(flow.mixed) and of_known and not flow.no_norm

    def mixed_or_summed(self, averages: bool, told: set[str]) -> list[Problem]:
        """A problem for each result that mixes rows, is a sum of rows, or counts them.

        Args:
            averages: whether results without rows are averaged over towers.
            told: the places where rows were mixed that have been told of already.
        """
        problems: list[Problem] = []
        for one in self.leaves:
            if one.kind in (*STATES, *_ASIDE) or not (averages or one.has_rows):
                continue
            flow = one.flow
            unknown = {line_at(root) for root in flow.roots} - self.known_lines
            if flow.mixed and not self.are_statistics(flow):
                if not told & set(flow.mixed):
                    tells = (
                        p
                        for p in flow.mixed
                        if line_at(p) in unknown or operation_at(p) in MEETINGS
                    )
                    place = next(tells, flow.no_norm or flow.mixed[0])
                    why = WHY_MIXED.get(operation_at(place), MIXED)
                    problems.append(Problem("mixed rows", one.name, place, why))
            elif one.has_rows and flow.word == "linear" and flow.is_mean:  # jnp.full(n, x.mean())
                problems.append(Problem("mixed rows", one.name, flow.origin, MIXED))
            elif flow.is_sum:
                problems.append(summed(one.name, flow.origin, is_loss=one.kind == "loss"))
            elif flow.beside_mean:
                problems.append(Problem("sum", one.name, flow.beside_mean, BESIDE))
            elif (where := flow.placed or self._counted(one)) or self._is_count(one):
                problems.append(Problem("row count", one.name, where, COUNTED))
        return problems

    def _counted(self, one: _Result) -> str | None:
        """Where a result was divided by the number of rows; not if both terms of its ratio were."""
        terms = [term.flow.is_mean for term in self.leaves if term.kind == TERMS]
        return None if one.kind == "loss" and terms and all(terms) else one.flow.counted

    def _is_count(self, one: _Result) -> bool:
        """Whether it is the number of rows, or a number that is made of it alone."""
        number = 0.0 if one.ndim or one.flow.value is None else float(np.real(one.flow.value))
        if not number:
            return False
        is_own = any(divides(self.num_rows, x, exact=True) for x in (number, 1 / number))
        return is_own or number in self.counts

    def statistics(self, num_towers: int) -> list[Problem]:
        """A problem for each result that depends on statistics of a tower's rows."""
        return [
            Problem("mixed rows", one.name, one.flow.mixed[0], STATISTICS.format(num=num_towers))
            for one in self.leaves
            if one.kind not in (*STATES, TERMS, ADDED) and self.are_statistics(one.flow)
        ]

    def kept_in_states(self, *, exchange: bool = True) -> list[Problem]:
        """A problem for each state that is no mean over rows: a sum, rows, a quotient, or a count.

        Args:
            exchange: whether towers may exchange values.
        """
        states = [one for one in self.leaves if one.kind in STATES]
        # A median for each feature is meant, as the variances of BatchNorm are.
        is_meant = lambda one: one.ndim > 0 and operation_at(one.flow.held) == "gather"
        keep = (KEEP_A_MEAN, KEEP_A_MEAN, KEEP_A_MEAN)
        of_sums, of_rows, of_parts = (SUM_ALL, HOLD_ALL, SUM_PARTS) if exchange else keep
        return [
            *(summed_state(x.name, x.flow.a_sum, of_sums) for x in states if x.flow.a_sum),
            *(
                held_in_state(one.name, one.flow.held, of_rows)
                for one in states
                if one.flow.held and not is_meant(one)
            ),
            *(
                bent_state(one.name, one.flow.bent, of_parts)
                for one in states
                if one.flow.bent and not (one.flow.a_sum or one.flow.held or one.has_rows)
            ),
            *(
                Problem("row count", one.name, one.flow.placed or one.flow.counted, COUNTED)
                for one in states
                if (one.flow.placed or one.flow.counted or self._is_count(one))
                and not (one.flow.mixed or one.flow.is_sum or one.has_rows)
            ),
        ]

    def of_no_row(self, real_rows: int) -> list[str]:
        """The names of losses with as many entries as a real tower has rows, for other rows too.

        Args:
            real_rows: the number of rows of a real tower.
        """
        named = {"loss": "the loss", TERMS: "a total or a weight of mt.ratio"}
        return [
            named[one.kind]
            for one in self.leaves
            if one.kind in named and not one.has_rows and one.shape[:1] == (real_rows,)
        ]

    def counting_copies(self) -> list[str]:
        """The results in which the copies that fill up a tower count: means over all its rows."""
        return [
            one.name
            for one in self.leaves
            if (one.kind in STATES and one.flow.word != "free")
            or (one.kind not in _ASIDE and self.are_statistics(one.flow))
        ]

    def written_parameters(self) -> list[Problem]:
        """A problem if parameters are written into: one for all, a layer may write many."""
        if not self.written:
            return []
        (name, place), *others = self.written
        more = f" and {len(others)} more" if others else ""
        return [Problem("written", f"{name}{more}", place, WRITTEN)]

    def of_one_tower(self) -> list[Problem]:
        """A problem for each result that is the first tower's alone and depends on rows."""
        return [
            Problem("mixed rows", one.name, next(iter(one.flow.places), None), OF_ONE_TOWER)
            for one in self.leaves
            if one.kind == FIRST and (one.flow.word != "free" or one.has_rows)
        ]

    def same_in_all(self) -> list[Problem]:
        """A problem if a loss is the same in every tower, and towers add it up."""
        return [
            Problem("sum", "loss", None, SAME_IN_ALL)
            for one in self.leaves
            if one.kind == ADDED and one.flow.word == "free" and not one.flow.varies
        ]

    def wrong_terms(self) -> list[Problem]:
        """A problem for each ratio whose terms are no sums over rows, or not two of one kind."""
        terms = [one for one in self.leaves if one.kind == TERMS]
        problems: list[Problem] = []
        for total, weight in zip(terms[::2], terms[1::2], strict=True):
            place = total.flow.origin or weight.flow.origin
            if weight.flow.mixed and not self.are_statistics(weight.flow):
                problems.append(
                    Problem("mixed rows", "mt.ratio", weight.flow.mixed[0], MIXED_WEIGHT)
                )
            elif self._is_steady(total) != self._is_steady(weight):
                problems.append(Problem("sum", "mt.ratio", place, STEADY))
            elif total.flow.is_mean != weight.flow.is_mean:
                problems.append(Problem("sum", "mt.ratio", place, RATIO))
        places = self._beside_terms(terms)
        return [*problems, *(Problem("sum", "mt.ratio", place, BESIDE) for place in places)]

    def ratios_apart(self) -> list[Problem]:
        """A problem for each result that is made of the leaves of a ratio; one for all ratios."""
        pairs = list(zip(self.leaves, self.of_weights, strict=False))
        weights = [use for one, use in pairs if one.kind == TERMS][1::2]
        # `evaluate` and `predict` return weights as results.
        others = (TERMS, FIRST, "result")
        names = [one.name for one, use in pairs if one.kind not in others and use]
        names += ["mt.ratio"] if "made of" in weights else []
        return [Problem("sum", name, None, APART) for name in names]

    def _beside_terms(self, terms: list[_Result]) -> list[str]:
        """Where such a number was added, each place once, if `mixed_or_summed` does not tell."""
        told = {one.flow.beside_mean for one in self.leaves if one.kind != TERMS}
        places = dict.fromkeys(one.flow.added for one in terms)
        return [place for place in places if place and place not in told]

    def _is_steady(self, one: _Result) -> bool:
        """Whether it is one number, the same in every tower, and not a number of its rows."""
        flow = one.flow
        if one.ndim or flow.word != "free" or flow.varies or flow.is_drawn or flow.placed:
            return False
        return flow.value is None or bool(float(np.real(flow.value)) % self.num_rows)


def _name(path: tuple[Any, ...]) -> str:
    first, *rest = path
    if first.key == "model":  # its leaves are known by their numbers alone
        return "the state of the module"
    kind = "result" if first.key == FIRST else first.key
    return f"{kind}{jax.tree_util.keystr(tuple(rest))}"
