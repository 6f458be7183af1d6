"""What surrounds a call of this library: another call or transformation, a mesh, `disable_jit`."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from multitower.errors import ArgumentError, ConfigurationError, MultitowerError, is_inside
from multitower.towers.leaves import are_traced

# JAX traces a jitted function anew if this value differs. A function that was traced outside of a
# tower may do something else inside one, so its trace must not be used again.
_inside = jax.make_user_context(False)


@contextmanager
def inside_a_tower(tower_rows: int) -> Generator[None]:
    """Marks the tracing of a user's function in one tower; an error says how many rows it has."""
    try:
        with _inside(True):
            yield
    except (MultitowerError, KeyError, AttributeError, ImportError):
        raise  # what is missing has nothing to do with rows
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ArgumentError(
            "a collective in this function (lax.psum, axis_name= of a BatchNorm and the like) "
            f'names an axis that does not exist here ({error}). Inside a tower there is one: "'
            f'{_OWN[0]}". Write that, or drop the axis.'
        ) from error
    except Exception as error:
        note = _note_of(error, tower_rows)
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def _note_of(error: Exception, tower_rows: int) -> str:
    """What a user should know of an error of JAX or Python in a function of theirs."""
    said = str(error)
    notes = (
        (isinstance(error, _NEEDS_A_VALUE) or "concrete values" in said, _OF_A_TRACED_VALUE),
        (isinstance(error, jax.errors.UnexpectedTracerError), KEEPS_VALUES),
        ("PRNG key data" in said, _OF_A_KEY),
        (type(error).__name__ == "TraceContextError", _OF_A_MODULE),  # Flax's: it is not imported
        (any(part in said for part in _NAMES_A_RATIO), _OF_A_RATIO),
        (_is_of_arguments(error), _OF_ARGUMENTS),
        (any(part in said for part in _NAMES_A_MESH), _OF_A_MESH),
    )
    return next((note for holds, note in notes if holds), _OF_ROWS.format(tower_rows))


def _is_of_arguments(error: Exception) -> bool:
    """Whether a function takes other arguments than it got, or other containers in them."""
    if not isinstance(error, TypeError):
        return False
    if "positional argument" not in str(error) and "keyword-only argument" not in str(error):
        return any(part in str(error) for part in _OF_CONTAINERS)
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    # In the user's own file it is another call, inside of the function.
    return where is not None and is_inside(where.tb_frame.f_code.co_filename)


@contextmanager
def explaining() -> Generator[None]:
    """Says of two errors of JAX where they may come from.

    One is about a traced value that was kept, the other comes from a user's class.
    """
    try:
        yield
    except TypeError as error:
        is_kept = isinstance(error, jax.errors.UnexpectedTracerError)
        note = KEEPS_VALUES if is_kept else _OF_A_CLASS
        is_known = is_kept or "ShapeDtypeStruct" in str(error)
        if is_known and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def is_inside_a_tower() -> bool:
    """Whether a user's function is being traced for one tower."""
    return bool(_inside.value)


def refuse_inside_a_tower(name: str) -> None:
    """Refuses a call inside another one, which has cut the batch already.

    Raises:
        ArgumentError: the call is inside of a tower.
    """
    if _inside.value:
        raise ArgumentError(
            f"multitower.{name} is called inside a function that multitower has cut into towers "
            "already: it would average over one tower's rows. Use JAX's own function inside "
            f"({_PLAIN.get(name, 'without multitower')}), or call it outside."
        )


def refuse_a_mesh() -> None:
    """Refuses a user's own mesh, on which all arrays would have to lie.

    Raises:
        ConfigurationError: `jax.set_mesh(...)` is active, or the call is inside `jax.pmap` or
            `jax.shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes == _OWN:
        return
    if mesh.manual_axes:
        raise ConfigurationError(
            "multitower is called inside jax.pmap or jax.shard_map, which give each device a part "
            "of the rows, and it would cut that part once more. Call it in their place: with "
            "multitower a program needs neither."
        )
    raise ConfigurationError(
        f"jax.set_mesh is active, with the axes {mesh.axis_names}, and multitower puts arrays on "
        "devices itself. Call it outside of `with jax.set_mesh(...)`, or leave set_mesh out: with "
        "multitower a program needs no mesh."
    )


def refuse_traced(call: str, *trees: Any) -> None:
    """Refuses a call that needs the values of arrays inside another JAX transformation.

    Raises:
        ArgumentError: the arrays in `trees` have no values yet.
    """
    # JAX warns of an iterator of batches in a tree, unless it is said to be a leaf.
    if are_traced(jax.tree.leaves(trees, is_leaf=lambda x: isinstance(x, Iterator))):
        raise ArgumentError(
            f"{call} is called inside jax.jit, jax.vmap, jax.lax.scan or the like, where arrays "
            "have no values yet, and it needs them. Call it outside."
        )


def refuse_disabled_jit() -> None:
    """Refuses calls with towers=, which need compiled programs, inside of `jax.disable_jit()`.

    Raises:
        ConfigurationError: `jax.disable_jit()` is active.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigurationError(
            "jax.disable_jit() is active, and with towers= every tower runs a compiled program. "
            "To step through the loss call it by itself, or leave out towers=."
        )


KEEPS_VALUES = (
    "This function writes values into something outside of it and reads them at its next call, as "
    "metric.update_state(...) of Keras, self.total += loss or self.key, key = split(self.key) "
    "does. multitower compiles it, as jax.jit does, so that they would be lost. Return them as "
    "metrics or aux, and write them after the call; a key is an argument."
)
_OWN = ("towers",)
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,  # also of a condition
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_OF_A_TRACED_VALUE = (
    "multitower compiles this function, as jax.jit does, so its arguments have no value while it "
    "is traced, numbers among them. A number that Python needs, such as a size, must not be an "
    "argument: close over it, functools.partial(fn, n=3). For a condition on values write "
    "jnp.where, for NumPy's functions those of jax.numpy, and return what you want to see as a "
    "metric (aux) instead of calling float() or .item()."
)
_OF_A_KEY = (
    "A key of jax.random.PRNGKey counts as two rows if multitower finds no other rows in the call. "
    "Pass it beside the rows; or, for n draws, pass jax.random.split(key, n), and draw with "
    "jax.vmap(draw)(keys)."
)
_OF_A_MODULE = (
    "The function changes an NNX module, or draws from an nnx.Rngs, that it gets from outside, so "
    "that what one tower changes would be lost. For mt.train_step and mt.Trainer make it a part of "
    "the module that is the first argument, such as nnx.Dropout(0.5, rngs=rngs) in it; to "
    "mt.value_and_grad it may also be an argument of its own."
)
_OF_A_CLASS = (
    "A class that is registered as a pytree may convert or check what it is made of, such as by "
    "jnp.asarray in its __init__. JAX makes such objects of shapes and other stand-ins, too. Let "
    "its unflatten function put in what it gets as it is: object.__new__(cls), and then the leaves."
)
_NAMES_A_RATIO = ("multitower.functions.ratio.Ratio", "Output was Ratio(")
_OF_A_RATIO = (
    "Inside a tower mt.ratio(total, weight) has no value until the towers have met, so functions "
    "of jax.numpy, loops and jax.grad cannot take it. Return it as the loss or as a metric, and "
    "compute the rest with the result, such as a perplexity by np.exp(float(metrics['loss'])). For "
    "a gradient inside the loss take total.sum() / weight.sum() of a row; over all rows, divide "
    'the gradient of total.sum() by weight.sum(), each with jax.lax.psum(x, "towers") around it.'
)
_OF_CONTAINERS = (
    "is not subscriptable",
    "indices must be integers",
    "does not support string indexing",
)
_OF_ARGUMENTS = (
    "multitower passed this function the arguments of the call, in their order: to a loss first "
    "the parameters, then one batch, which may be a dict or a tuple. Each container is still what "
    "it was. If you have a training state, pass its parameters, state.params; if you have a list "
    "of rows, put them together, np.stack(rows)."
)
_OF_ROWS = (
    "multitower called this function with the rows of one tower, {} of the batch's. An array that "
    "it closes over is whole in every tower: if it has one entry per row, make it an argument, or "
    "name its variable too, as in in_axes={{'x': 0, 'y': 0}}. An argument that every tower needs "
    "whole, such as parameters beside argnums=1, gets None in in_axes. A number of rows that is "
    "written into the function, or more of them than a tower has (reshape, top_k), fails here: "
    "take it from the argument, x.shape[0], or use fewer towers. So does a state with one entry "
    "per row of the batch, such as an RNN's carry: make it an argument of mt.value_and_grad, and "
    "return it in aux. Of parameters with one entry per row take weights[mt.row_index(x)]."
)
_NAMES_A_MESH = (
    "AbstractMesh",
    "NamedSharding",
    "PartitionSpec",
    "set_mesh",
    "shard_map",
    "with_sharding_constraint",
)
_OF_A_MESH = (
    "multitower puts rows on devices itself, and a tower is on one of them. Leave meshes and "
    "shardings out of this function: jax.set_mesh, shard_map, with_sharding_constraint, reshard, "
    "out_sharding=. To split parameters, too, write mt.train_step(shard_params=True)."
)
_PLAIN = {
    "grad": "jax.grad",
    "value_and_grad": "jax.value_and_grad",
    "train_step": "jax.value_and_grad and the optimizer's update",
}
