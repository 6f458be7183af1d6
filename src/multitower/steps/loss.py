"""The loss of a training step: which extras it takes, and what it returns."""

import functools
import inspect
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import ArgumentError, OutputError
from multitower.functions.outputs import check_arrays, check_metrics, metric_name
from multitower.functions.ratio import is_ratio
from multitower.models.modules import Model
from multitower.steps.precision import as_given, narrow, narrow_rows
from multitower.steps.state.fingerprint import fingerprint
from multitower.towers.leaves import is_key
from multitower.towers.rows import Tower


class LossOutput(NamedTuple):
    """A loss function's result, with empty metrics and the given model state where it has none."""

    loss: Any
    metrics: Any
    model_state: Any


@dataclass(frozen=True)
class LossFunction:
    """A user's loss, called with what it asks for.

    Attributes:
        fn: `fn(params, batch)`, optionally with keyword-only `rng` and `model_state`.
        takes_rng: whether it takes the tower's key.
        takes_model_state: whether it takes the model state, and returns a new one.
        model: how to build the NNX or Equinox module that it takes in place of parameters, without
            weights and state; None if it takes parameters.
        compute_dtype: what parameters and rows are cast to; None for no cast.
    """

    fn: Callable[..., Any]
    takes_rng: bool
    takes_model_state: bool
    model: Model | None = None
    compute_dtype: Any = None

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        what: str = "the loss",
        caller: str = "a step",
        by_name: Set[str] = frozenset({"rng", "model_state"}),
    ) -> "LossFunction":
        """Reads from the signature what the loss takes.

        Args:
            fn: the loss, or another function that is called like one.
            what: what it is, for messages.
            caller: what calls it, likewise.
            by_name: the keyword-only arguments that it may take.

        Raises:
            ArgumentError: `fn` is not a function, or not one of two positional arguments.
        """
        if not callable(fn):
            raise ArgumentError(
                f"{what} is {fn!r}: {caller} needs a function of two, fn(params, batch)."
            )
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # some builtins and C functions have no signature
            return cls(fn, takes_rng=False, takes_model_state=False)
        _check_arguments(fn, signature, what, caller, by_name)
        parameters = signature.parameters.values()
        names = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        return cls(fn, "rng" in names, "model_state" in names)

    def check_extras(self, model_state: Any, rng: Any, call: str = "step.init(params, ") -> None:
        """Refuses extras that are missing or not wanted.

        Args:
            model_state: the model state that the user gave, or None.
            rng: the key that the user gave, or None.
            call: how the user's call begins, for the message.

        Raises:
            ArgumentError: `rng` or `model_state` is missing or not taken by the loss; or `rng` is
                not a typed key.
        """
        given = {"rng": (rng, self.takes_rng), "model_state": (model_state, self.takes_model_state)}
        examples = {"rng": "jax.random.key(0)", "model_state": "{...}"}
        called = call.partition("(")[0].rpartition(".")[2]
        for name, (value, wanted) in given.items():
            if wanted and value is None:
                raise ArgumentError(
                    f"the loss takes {name}, and {called} got none. Write "
                    f"{call}{name}={examples[name]})."
                )
            if value is not None and not wanted:
                raise ArgumentError(
                    f"{called} got {name}, and the loss does not take it. Add it as a keyword-only "
                    f"argument: loss_fn(params, batch, *, {name})."
                )
        if rng is not None and not (is_key(rng) and rng.ndim == 0):
            raise ArgumentError(
                f"rng is {rng!r}: it must be one typed key, jax.random.key(seed), shape (). "
                "Turn a legacy key into a typed one with jax.random.wrap_key_data(key)."
            )

    def of_model(self, model: Model) -> "LossFunction":
        """This loss for parameters that are the weights of a module."""
        # On the host: arrays that never change become constants of the compiled programs.
        fixed = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), model.fixed)
        return replace(self, model=replace(model, weights=(), fixed=fixed, state=()))

    def in_tower(self, here: Tower) -> "LossFunction":
        """The loss for one tower: PRNG keys that its module holds differ between towers."""
        return self if self.model is None else replace(self, model=self.model.in_tower(here))

    def has_model_of(self, other: "LossFunction") -> bool:
        """Whether the modules of two losses are the same, except for weights and state."""
        mine, others = self.model, other.model
        if mine is None or others is None:
            return mine is others
        return mine.how == others.how and fingerprint(mine.fixed) == fingerprint(others.fixed)

    @property
    def keeps_model_state(self) -> bool:
        """Whether the model state is the module's own, which the loss changes in place."""
        return self.model is not None and self.model.how.changes_in_place

    def build(self, params: Any, model_state: Any) -> Any:
        """The first argument of the loss: the parameters, or a module made of them."""
        if self.model is None:
            return params
        return self._model(params, model_state).build()

    def __call__(self, params: Any, batch: Any, rng: Any, model_state: Any) -> LossOutput:
        """Calls the loss.

        Raises:
            OutputError: it returned a value of the wrong kind.
        """
        extras: dict[str, Any] = {}
        if self.takes_rng:
            extras["rng"] = rng
        if self.takes_model_state:
            extras["model_state"] = model_state
        if self.compute_dtype is not None:
            params = narrow(params, self.compute_dtype)
            batch = narrow_rows(batch, self.compute_dtype)
        first = self.build(params, model_state)
        output = self._complete(self.fn(first, batch, **extras), model_state)
        for name, returned in zip(("the loss", *output._fields[1:]), output, strict=True):
            check_arrays(returned, name)
        if self.keeps_model_state:
            state = self._model(params, model_state).state_after(first)
            output = output._replace(model_state=state)
        if self.compute_dtype is not None:
            output = output._replace(model_state=as_given(output.model_state, model_state))
        return output

    def _model(self, params: Any, model_state: Any) -> Model:
        assert self.model is not None
        state = model_state if self.keeps_model_state else []
        fixed = jax.tree.map(jnp.asarray, self.model.fixed)
        return replace(self.model, weights=params, fixed=fixed, state=state)

    def _complete(self, output: Any, model_state: Any) -> LossOutput:
        given: list[Any] = list(output) if isinstance(output, tuple) else [output]
        if self.takes_model_state and len(given) != 3:
            raise OutputError(
                f"the loss takes model_state, so it must return (loss, metrics, model_state); it "
                f"returned {len(given)} value(s). Return {{}} for no metrics."
            )
        if not self.takes_model_state and len(given) not in (1, 2):
            raise OutputError(
                f"the loss returned {len(given)} values: return loss or (loss, metrics). To return "
                "model state, take it as a keyword-only argument: loss_fn(params, batch, *, "
                "model_state)."
            )
        metrics = given[1] if len(given) > 1 else {}
        check_metrics(metrics)
        _refuse_equal_names(metrics)
        return LossOutput(given[0], metrics, given[-1] if len(given) == 3 else model_state)


def takes_model_state(fn: Callable[..., Any], what: str, caller: str) -> bool:
    """Whether a function of parameters and a batch also takes `model_state`.

    Args:
        fn: the function.
        what: what it is, for messages.
        caller: what calls it, likewise.

    Raises:
        ArgumentError: as for `LossFunction.of`.
    """
    return LossFunction.of(fn, what, caller, frozenset({"model_state"})).takes_model_state


def model_state_for(fn: Callable[..., Any], model_state: Any, what: str, caller: str) -> Any:
    """The model state that such a function is called with; None if it takes none.

    Args:
        fn: as for `takes_model_state`.
        model_state: what the user gave, or None.
        what: as for `takes_model_state`.
        caller: likewise.

    Raises:
        ArgumentError: as for `LossFunction.of`; or `fn` needs a model state, and there is none.
    """
    if not takes_model_state(fn, what, caller):
        return None
    parameter = inspect.signature(fn).parameters["model_state"]
    if model_state is None and parameter.default is inspect.Parameter.empty:
        raise ArgumentError(
            f"{what} takes model_state, and {caller} got none. Pass mt.{caller}(..., "
            "model_state=state.model_state); if the model has no state, remove the argument."
        )
    return model_state


def _refuse_equal_names(metrics: Any) -> None:
    """Refuses metrics that would have the same name in logs and tables.

    Raises:
        OutputError: two have the same name.
    """
    known: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(metrics, is_leaf=is_ratio)[0]:
        name, place = metric_name(path), f"metrics{jax.tree_util.keystr(path)}"
        if name in known:
            raise OutputError(
                f"the loss returned {known[name]} and {place}: both are called {name!r} where "
                "metrics are shown. Rename one of them."
            )
        known[name] = place


def _check_arguments(
    fn: Callable[..., Any], signature: inspect.Signature, what: str, caller: str, by_name: Set[str]
) -> None:
    """Refuses a function that cannot be called with parameters and one batch.

    Raises:
        ArgumentError: it takes fewer or more positional arguments than two, or needs another by
            name.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    all_of = list(signature.parameters.values())
    names = [p.name for p in all_of if p.kind in kinds]
    needed = [p for p in all_of if p.default is inspect.Parameter.empty]
    required = [p for p in needed if p.kind in kinds]
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in all_of)
    given = getattr(fn, "__name__", type(fn).__name__)
    name = given if given.isidentifier() else "loss"
    unknown = [p.name for p in needed if p.kind is p.KEYWORD_ONLY and p.name not in by_name]
    if len(required) <= 2 and (takes_any or len(names) >= 2):
        if not unknown:
            return
        raise ArgumentError(
            f"{what} {given}{signature} needs {', '.join(unknown)} by name, and {caller} passes "
            f"{' and '.join(sorted(by_name, reverse=True)) or 'nothing'} by name. Rename it, give "
            f"it a default, or bind it: functools.partial({name}, {unknown[0]}=...)."
        )
    _check_partial(fn, names, what, caller)
    body = f"{', '.join(names[1:])} = batch" if len(names) > 2 else "..."
    extras = names[2:]
    if extras and {*extras} <= by_name:
        raise ArgumentError(
            f"{what} {given}({', '.join(names)}) takes {' and '.join(extras)} by position, "
            f"which {caller} passes by name. Add a star: "
            f"def {name}({', '.join([*names[:2], '*', *extras])}): ..."
        )
    count = "1 argument" if len(names) == 1 else f"{len(names)} arguments"
    raise ArgumentError(
        f"{what} {given}({', '.join(names)}) takes {count}, and {caller} calls it with two: "
        "the parameters and one batch, a pytree of arrays. Write "
        f"def {name}({names[0] if names else 'params'}, batch): {body}"
    )


def _check_partial(fn: Callable[..., Any], names: list[str], what: str, caller: str) -> None:
    """Refuses a `functools.partial` that binds by name an argument before the batch.

    Raises:
        ArgumentError: it does, so that the batch cannot be passed by position.
    """
    if not isinstance(fn, functools.partial) or len(names) > 1:
        return
    whole = list(inspect.signature(fn.func).parameters)
    before = [name for name in whole[len(fn.args) :][:2] if name in fn.keywords]
    if before:
        bound = ", ".join(before)
        raise ArgumentError(
            f"{what} is a functools.partial that binds {bound} by name. It stands before the "
            f"batch, which {caller} passes by position. Write lambda params, batch: "
            f"{getattr(fn.func, '__name__', 'loss')}(...) with the arguments in their order, or "
            f"define the function with {bound} after the batch."
        )
