"""Recipe: a training program, without the options of a run such as devices and steps."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from multitower.errors import ArgumentError, whole_number


class DataSets(NamedTuple):
    """The examples of a recipe.

    Attributes:
        train: a pytree of NumPy arrays with one row per example on axis 0.
        test: the same, with examples that are not used in training.

    Example:
        >>> import numpy as np
        >>> from multitower.recipes import DataSets
        >>> rows = np.arange(10.0, dtype=np.float32)
        >>> sets = DataSets(train={"x": rows[:8]}, test={"x": rows[8:]})
        >>> sets.test["x"].tolist()
        [8.0, 9.0]
    """

    train: Any
    test: Any


_EXAMPLES = {
    "data": "lambda: DataSets(train=..., test=...)",
    "init": "lambda key: params",
    "loss": "loss(params, batch)",
    "metrics": "metrics(params, batch)",
    "optimizer": "lambda steps: optax.adam(1e-3)",
}

# The positional arguments that a run passes to these parts.
_CALLS = {"data": (), "init": ("key",), "optimizer": ("steps",)}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of which a run may report the learning rate, or lower the momentum.

    A recipe's `optimizer` may return one in place of an optax optimizer. A run that reports the
    learning rate, or corrects the momentum of asynchronous updates, makes it by
    `optax.inject_hyperparams`, which keeps the two in the optimizer's state. Other runs do not,
    so that their state holds nothing more.

    Attributes:
        make: `make(learning_rate)` or, with a momentum, `make(learning_rate, momentum)` makes the
            optax optimizer: for example `optax.sgd` or `optax.adam`.
        learning_rate: a number, or a function of the number of updates made before.
        momentum: a number, or None to keep none.

    Example:
        >>> import optax
        >>> from multitower.recipes import Optimizer
        >>> optimizer = Optimizer(optax.sgd, optax.cosine_decay_schedule(0.1, 100), momentum=0.9)
        >>> state = optimizer.build(keeps_rate=True).init({"w": 1.0})
        >>> round(float(state.hyperparams["learning_rate"]), 3)
        0.1
    """

    make: Callable[..., optax.GradientTransformation]
    learning_rate: float | Callable[[Any], Any]
    momentum: float | None = None

    def build(
        self, *, keeps_rate: bool = False, keeps_momentum: bool = False
    ) -> optax.GradientTransformation:
        """Makes the optax optimizer; the learning rate that its state keeps changes no update.

        Args:
            keeps_rate: whether its state holds the learning rate.
            keeps_momentum: whether its state holds the momentum, if it has one, and the rate.

        Returns:
            The optax optimizer.
        """
        own = () if self.momentum is None else (self.momentum,)

        # The state holds what these take, by the names of their arguments.
        def of_rate(learning_rate: Any) -> optax.GradientTransformation:
            return self.make(learning_rate, *own)

        def of_both(learning_rate: Any, momentum: Any) -> optax.GradientTransformation:
            return self.make(learning_rate, momentum)

        if keeps_momentum and own:
            return optax.inject_hyperparams(of_both)(self.learning_rate, *own)
        make = optax.inject_hyperparams(of_rate) if keeps_rate else of_rate
        return make(self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training program for `multitower train`.

    Attributes:
        name: the name, for results and directories.
        data: makes the data sets. They must not depend on the seed of a run.
        init: makes the first parameters from a typed key.
        loss: `loss(params, batch)`, as for `multitower.train_step`: the losses of the batch's
            rows, shape (rows,), or an `mt.ratio`; a pair of these and a dict of metrics; with model
            state these two and the new state. It may take keyword-only `rng`, drawn from the run's
            seed, and `model_state`.
        metrics: `metrics(params, batch)`, a dict with one number per row, shape (rows,), or an
            `mt.ratio`, for each name; a test set is scored by their means. It may take keyword-only
            `model_state`. The parameters are the moving average, if there is one.
        predict: `predict(params, batch)`, scores of the classes, shape (rows, classes); it may take
            keyword-only `model_state`. With it a report shows examples, if the data sets are dicts
            of `"image"`, shape (rows, height, width, 1 or 3), and `"label"`, integers.
        optimizer: `optimizer(steps)` makes the optax optimizer of a run, or an `Optimizer`, so that
            the learning rate can be a metric and asynchronous updates can lower the momentum. It
            may take keyword-only `steps_per_epoch`, a float.
        steps: updates of a run, by default.
        global_batch: rows of a step, over all towers, by default.
        distort: `distort(batch, generator)` returns a training batch with random changes, drawn
            from the NumPy generator alone; it may change the arrays in place. None for no changes.
        augment: the same on the devices, as for `multitower.augmented`. It is recommended, since
            the host has many devices to feed. The data sets must be dicts.
        model_state: makes what the loss takes as `model_state`.
        ema_decay: keep a moving average of the parameters, as for `multitower.train_step`.
        clip_norm: the global norm to clip gradients to, by default; None for no clipping.
        generate: `generate(params, prompt, num_bytes=, temperature=, seed=)` continues a text, for
            `multitower sample`. A report shows two continuations, if the data sets are dicts of
            `"tokens"`, integers, shape (rows, length); those below 256 are bytes.
        about_data: returns JSON values about the data set, which a result lists among its options.
        download: `download(progress)` fetches the data set to where `data` reads it. None if there
            is nothing to fetch.
        options: the options of the recipe, JSON values, for the result.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optax
        >>> from multitower.recipes import DataSets, Recipe
        >>> rows = {"x": np.arange(8.0, dtype=np.float32)}
        >>> errors = lambda w, batch: (w * batch["x"] - 3 * batch["x"]) ** 2
        >>> recipe = Recipe(
        ...     name="line",
        ...     data=lambda: DataSets(train=rows, test=rows),
        ...     init=lambda key: jax.random.normal(key),
        ...     loss=errors,
        ...     metrics=lambda w, batch: {"loss": errors(w, batch)},
        ...     optimizer=lambda steps: optax.adam(0.1),
        ...     steps=100,
        ...     global_batch=4,
        ... )
        >>> recipe.name
        'line'
    """

    name: str
    data: Callable[[], DataSets]
    init: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    metrics: Callable[..., dict[str, jax.Array]]
    optimizer: Callable[..., optax.GradientTransformation | Optimizer]
    steps: int
    global_batch: int
    predict: Callable[..., jax.Array] | None = None
    distort: Callable[[Any, np.random.Generator], Any] | None = None
    augment: Callable[[Any, jax.Array], Any] | None = None
    model_state: Callable[[], Any] | None = None
    ema_decay: float | Callable[[jax.Array], Any] | None = None
    clip_norm: float | None = None
    generate: Callable[..., str] | None = None
    about_data: Callable[[], Mapping[str, Any]] | None = None
    download: Callable[[Any], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Refuses parts of a wrong kind.

        Raises:
            ArgumentError: a part that must be a function is none, or takes other arguments, or a
                number is not a whole one.
        """
        for name in ("data", "init", "loss", "metrics", "optimizer"):
            part = getattr(self, name)
            if not callable(part):
                raise ArgumentError(
                    f"the recipe's {name} is {type(part).__name__}: it must be a function, such as "
                    f"{_EXAMPLES[name]}."
                )
        for name, given in _CALLS.items():  # a loss and metrics are checked where they are called
            _refuse_other_arguments(name, getattr(self, name), given)
        for name in ("steps", "global_batch"):
            value = getattr(self, name)
            try:
                whole_number(name, value, 1)
            except ArgumentError:  # its words are those of a flag, and no flag was given
                raise ArgumentError(
                    f"the recipe's {name} is {value!r}: it must be a whole number, 1 or more."
                ) from None

    def load(self) -> DataSets:
        """Makes the data sets: calls `data`, and looks at what it returns.

        Returns:
            The data sets.

        Raises:
            ArgumentError: it is no `DataSets`.
        """
        found = self.data()
        if not isinstance(found, DataSets):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"the recipe's data() returned {type(found).__name__}: it must return "
                "DataSets(train=..., test=...), from multitower.recipes."
            )
        return found

    def make_optimizer(
        self,
        steps: int,
        *,
        steps_per_epoch: float,
        keeps_rate: bool = False,
        keeps_momentum: bool = False,
    ) -> optax.GradientTransformation:
        """Makes the optimizer of a run.

        Args:
            steps: updates of the whole run.
            steps_per_epoch: updates in which every example is seen once.
            keeps_rate: whether the state of an `Optimizer` is to hold the learning rate.
            keeps_momentum: whether the state of an `Optimizer` is to hold the momentum.

        Returns:
            The result of `optimizer`, or what it builds.
        """
        takes_epoch = takes(self.optimizer, "steps_per_epoch")
        extras = {"steps_per_epoch": steps_per_epoch} if takes_epoch else {}
        found = self.optimizer(steps, **extras)
        if isinstance(found, Optimizer):
            return found.build(keeps_rate=keeps_rate, keeps_momentum=keeps_momentum)
        return found


def _refuse_other_arguments(name: str, part: Callable[..., Any], given: tuple[str, ...]) -> None:
    """Refuses a part of a recipe that cannot be called as a run calls it.

    Raises:
        ArgumentError: it takes other arguments; or it is an optimizer of optax itself, whose first
            argument is the learning rate: the number of steps would become that.
    """
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # some builtins and C functions have no signature
        return
    takes_epoch = name == "optimizer" and takes(part, "steps_per_epoch")
    extras = {"steps_per_epoch": None} if takes_epoch else {}
    try:
        bound = signature.bind(*given, **extras)
    except TypeError:
        fits = False
    else:
        fits = next(iter(bound.arguments), None) != "learning_rate"
    if not fits:
        raise ArgumentError(
            f"the recipe's {name} takes the arguments ({', '.join(signature.parameters)}), and a "
            f"run calls {name}({', '.join(given)}). Write {name}={_EXAMPLES[name]}."
        )


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function of a recipe has a keyword-only argument of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins and C functions have no signature
        return False
    return name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
