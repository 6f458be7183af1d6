"""ratio: a quotient of two sums over all towers, such as the mean over tokens that are not masked.

A mean of the towers' own quotients would give every tower the same weight, however many tokens it
has. So inside a tower a ratio stays in two parts, totals and weights, until the towers have met.
"""

import functools
import math
import operator
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Never

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from multitower.checks.problems import WEIGHT
from multitower.errors import OutputError
from multitower.functions.outputs import row_sum, wide
from multitower.towers.rows import Tower

# Part of the key of JAX's traces: a jitted loss that was called outside of a tower is traced anew.
_are_kept = jax.make_user_context(default_value=False)


def ratio(total: Any, weight: Any) -> Any:
    """Divides the sum of `total` by the sum of `weight`, over the rows of all towers.

    Use it for a loss or metric that is a mean over tokens, padded sequences or weighted rows. On
    one device, and outside of towers, it is `jnp.sum(total) / jnp.sum(weight)`. You can add a ratio
    to other ratios, to numbers such as a penalty, and to losses with one entry per row, whose mean
    counts. You can multiply or divide it by numbers.

    The towers' weights are added up before gradients are computed, so that the gradients are those
    of one device, also with a `jax.custom_vjp` that is not linear. That costs a small program and
    one more exchange between devices.

    Args:
        total: the values to add up, shape (rows,) or (rows, ...). Or shape (), the sum over the
            rows of one tower; the rows must then fill all towers evenly.
        weight: the weights to add up, such as a padding mask, of the same kinds of shapes. They may
            depend on the batch and on random numbers, not on the parameters.

    Returns:
        A scalar, float32 or wider. Inside the loss of `value_and_grad`, `grad` or `train_step`, and
        inside metrics, an object that stands for the scalar until all towers are added up.

    Raises:
        OutputError: inside a tower, the weight depends on the parameters; the ratio is used for
            anything but sums, and products and quotients with numbers; or it is taken for each row
            by `jax.vmap` or a loop.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> def loss(w, tokens, mask):
        ...     return mt.ratio((w * tokens - 1) ** 2 * mask, mask)
        >>> tokens, mask = jnp.arange(6.0).reshape(3, 2), jnp.array([[1, 1], [1, 0], [0, 0]])
        >>> value, gradient = mt.value_and_grad(loss)(1.0, tokens, mask)
        >>> round(float(value), 4), round(float(gradient), 4)
        (0.6667, 1.3333)
        >>> round(float(loss(1.0, tokens, mask)), 4)
        0.6667
    """
    total, weight = wide(total), wide(weight)
    if not _are_kept.value:
        return total.sum() / weight.sum()
    return Ratio(((total, _independent(weight)),), None)


@contextmanager
def keeping_ratios() -> Generator[None]:
    """Inside this block, `ratio` returns a `Ratio`, with totals and weights apart."""
    with _are_kept(True):
        yield


def _refused(what: str) -> Callable[..., Never]:
    """A method that is refused."""

    def method(self: "Ratio", *_: Any) -> Never:
        raise _refuse(what)

    return method


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Ratio:
    """A sum of ratios and a number: `sum(total / weight for total, weight in terms) + offset`.

    Attributes:
        terms: pairs of totals and weights, of a tower's rows.
        offset: the number that was added, shape (), or None.
    """

    terms: tuple[tuple[Any, Any], ...]
    offset: Any

    __array_ufunc__ = None  # so that NumPy's numbers leave the arithmetic to this class

    def __add__(self, other: Any) -> "Ratio":
        """Adds a ratio, a number, or losses of rows, whose mean over all rows counts."""
        if isinstance(other, Ratio):
            added = self + other.offset if other.offset is not None else self
            return Ratio((*added.terms, *other.terms), added.offset)
        other = _float(other, "+")
        if other.ndim == 1:
            losses = wide(other)
            return self + Ratio(((losses, jnp.ones_like(losses)),), None)
        other = wide(_number(other, "+"))
        return Ratio(self.terms, other if self.offset is None else self.offset + other)

    def __mul__(self, other: Any) -> "Ratio":
        """Multiplies by a number."""
        factor = _number(other, "*")
        terms = tuple((total * factor, weight) for total, weight in self.terms)
        return Ratio(terms, None if self.offset is None else self.offset * factor)

    def __truediv__(self, other: Any) -> "Ratio":
        """Divides by a number."""
        return self * (1 / _number(other, "/"))

    def __neg__(self) -> "Ratio":
        """Changes the sign."""
        return self * -1.0

    def __pos__(self) -> "Ratio":
        """Returns the ratio itself."""
        return self

    def __sub__(self, other: Any) -> "Ratio":
        """Subtracts a ratio, a number, or losses of rows."""
        return self + (-other)

    def __rsub__(self, other: Any) -> "Ratio":
        """A number, or losses of rows, minus this."""
        return -self + other

    def __rtruediv__(self, other: Any) -> "Ratio":
        """Refused, because the result is not a sum of ratios."""
        raise _refuse("a number divided by it")

    __radd__ = __add__
    __rmul__ = __mul__
    __pow__ = __rpow__ = _refused("a power")
    __float__ = __int__ = __abs__ = _refused("its value")
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refused("a comparison")

    def __getattr__(self, name: str) -> Never:
        """Refused with an explanation: a ratio has no attributes of an array."""
        raise AttributeError(str(_refuse(f".{name}")))

    def tree_flatten(self) -> tuple[tuple[Any, Any], "_Ranks"]:
        """For JAX's pytrees."""
        children = self.terms, self.offset
        return children, _Ranks.of(children)

    @classmethod
    def tree_unflatten(cls, ranks: "_Ranks", children: tuple[Any, Any]) -> "Ratio":
        """For JAX's pytrees.

        Raises:
            OutputError: `jax.vmap` or a loop has stacked many ratios, each a quotient of its own.
        """
        pairs = zip(ranks, _Ranks.of(children), strict=False)
        if any(rank is not None and now is not None and now > rank for rank, now in pairs):
            raise OutputError(
                "mt.ratio(total, weight) is called inside jax.vmap, jax.lax.map or jax.lax.scan. "
                "That makes many ratios, and towers would add up all totals and weights and divide "
                "once. For one mean over all rows return total and weight from the mapped "
                "function, and take mt.ratio of both outside of it. For a mean within each row "
                "return total.sum() / weight.sum()."
            )
        return cls(*children)


class _Ranks(tuple[int | None, ...]):
    """The numbers of dimensions of a ratio's arrays; it does not tell two trees apart."""

    __slots__ = ()

    @classmethod
    def of(cls, children: Any) -> "_Ranks":
        """Those of all leaves; None for what is no array, as JAX puts there for a while."""
        return cls(getattr(leaf, "ndim", None) for leaf in jax.tree.leaves(children))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ranks)

    def __hash__(self) -> int:
        return hash(_Ranks)


class RatioSums(NamedTuple):
    """What a tower returns of a ratio, to be added up.

    Attributes:
        totals: for each term the sum of its totals, shape ().
        weights: for each term the sum of its weights, shape ().
        share: this tower's share of the offset, shape ().
    """

    totals: list[jax.Array]
    weights: list[jax.Array]
    share: jax.Array


@jax.tree_util.register_static
@dataclass(frozen=True)
class RatioHole:
    """Where a ratio stood in a tree."""

    number: int


def is_ratio(value: Any) -> bool:
    """Whether a value is a ratio inside a tower."""
    return isinstance(value, Ratio)


def take_ratios(tree: Any) -> tuple[Any, list[Ratio]]:
    """A tree with holes in place of its ratios, and the ratios."""
    found: list[Ratio] = []

    def take(value: Any) -> Any:
        if not is_ratio(value):
            return value
        found.append(value)
        return RatioHole(len(found) - 1)

    return jax.tree.map(take, tree, is_leaf=is_ratio), found


def terms_in(*trees: Any) -> list[tuple[Any, Any]]:
    """The totals and weights of all ratios in some trees."""
    return [term for one in take_ratios(trees)[1] for term in one.terms]


def fill_ratios(tree: Any, values: Sequence[Any]) -> Any:
    """The tree again, with values in place of its ratios."""
    return jax.tree.map(
        lambda x: values[x.number] if isinstance(x, RatioHole) else x,
        tree,
        is_leaf=lambda x: isinstance(x, RatioHole),
    )


def sums_of(value: Ratio, here: Tower, tower_rows: int) -> RatioSums:
    """A tower's sums of a ratio, over its real rows.

    Raises:
        OutputError: a total or a weight that has neither rows nor the shape ().
    """
    sums = [[_sum(part, here, tower_rows) for part in term] for term in value.terms]
    offset = jnp.float32(0) if value.offset is None else wide(value.offset)
    share = here.num_rows.astype(offset.dtype) / here.all_rows.astype(offset.dtype)
    return RatioSums([total for total, _ in sums], [weight for _, weight in sums], offset * share)


def join_ratio(sums: RatioSums, weights: Sequence[jax.Array] | None = None) -> jax.Array:
    """The value, from sums over towers; or a tower's share, from its sums and all weights."""
    weights = sums.weights if weights is None else weights
    with jax.numpy_dtype_promotion("standard"):  # the share has 32 bits where terms may have 64
        quotients = [total / weight for total, weight in zip(sums.totals, weights, strict=True)]
        return functools.reduce(operator.add, quotients, sums.share)


def lacks_rows(value: Ratio, tower_rows: int) -> bool:
    """Whether one of its totals or weights is a sum already, in which padding rows would count."""
    return any(_sums_itself(part, tower_rows) for term in value.terms for part in term)


def _sum(part: jax.Array, here: Tower, tower_rows: int) -> jax.Array:
    return part if _sums_itself(part, tower_rows) else row_sum(part, here).sum()


def _sums_itself(part: Any, tower_rows: int) -> bool:
    if not part.shape:
        return True
    if part.shape[0] != tower_rows:
        raise OutputError(
            f"a total or a weight of mt.ratio has shape {tuple(part.shape)} for {tower_rows} rows: "
            f"give one entry for every row on axis 0, ({tower_rows}, ...), or the sum, shape ()."
        )
    return False


def by_row(part: jax.Array, num_rows: int) -> jax.Array:
    """The sum over the entries of each row, shape (rows,).

    Raises:
        OutputError: the part is a sum already, or has another number of rows.
    """
    if _sums_itself(part, num_rows):
        raise OutputError(
            "a metric is mt.ratio of sums: batches of an evaluation are filled up with rows that "
            "must not count, so give totals and weights with one entry for every row."
        )
    return part.reshape(num_rows, math.prod(part.shape[1:])).sum(1)


def _number(value: Any, sign: str) -> Any:
    if isinstance(value, Ratio):
        raise _refuse(f"a product or quotient of two of them ({sign})")
    value = _float(value, sign)
    if value.shape:
        raise _refuse(f"{sign} with {value.dtype}{list(value.shape)}")
    return value


def _float(value: Any, sign: str) -> Any:
    value = jnp.asarray(value)
    if not jnp.issubdtype(wide(value).dtype, jnp.floating):
        raise _refuse(f"{sign} with {value.dtype}{list(value.shape)}")
    return value


def _refuse(what: str) -> OutputError:
    return OutputError(
        f"{what} was asked of mt.ratio(total, weight) inside a tower, where its value is not known "
        "until the towers have met: it can be added to ratios, to scalars and to losses of shape "
        "(rows,), and be multiplied and divided by scalars. Return it as the loss or as a metric, "
        "and compute the rest with the result, such as a perplexity by "
        "np.exp(float(metrics['loss']))."
    )


@jax.custom_jvp
def _independent(weight: jax.Array) -> jax.Array:
    return checkpoint_name(weight, WEIGHT)


@functools.partial(_independent.defjvp, symbolic_zeros=True)
def _refuse_tangent(primals: Any, tangents: Any) -> Any:
    (weight,), (tangent,) = primals, tangents
    if not isinstance(tangent, SymbolicZero):
        raise OutputError(
            "the weight of mt.ratio(total, weight) depends on the parameters: towers add up their "
            "weights before they differentiate. If it is meant as a constant, say "
            "jax.lax.stop_gradient(weight); if not, as in a Dice loss over the batch, divide the "
            "sums of all rows, mt.all_rows(total).sum() / mt.all_rows(weight).sum()."
        )
    return weight, jnp.zeros_like(weight)
