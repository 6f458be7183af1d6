"""The first look: every entry point warns once of what no tower should do, and of nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import multitower as mt
from looking import ENTRIES, W, X, look_at, look_at_call, look_at_step, losses, total
from multitower.checks import first_look
from told import ours


def centred(w, x):
    z = x @ w
    return (z - z.mean()) ** 2


def one_mask(w, x):
    return losses(w, x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape))


WRONG = {
    total: r"loss \(reduce_sum .*\): it is a sum over rows.*check_parallel",
    centred: r"loss \(reduce_sum .*z.mean\(\)\) \*\* 2\): rows are brought together",
    one_mask: r"random numbers \(random_bits .*\): they come from a key that is the same in every",
}


@pytest.mark.parametrize(
    ("entry", "loss"),
    [
        ("value_and_grad", total),
        ("train_step", centred),
        ("same bits", one_mask),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((entry, total) for entry in ENTRIES if entry != "value_and_grad"),
                ("value_and_grad", centred),
                ("towers", one_mask),
                ("under jit", one_mask),
            )
        ),
    ],
)
def test_each_entry_point_warns_once(entry, loss):
    # The lie: training that goes on, of something else, and nobody is told.
    said = WRONG[loss]
    run = ENTRIES[entry](loss)
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        run(W, X)
    assert len(ours(told)) == 1
    if entry in ("value_and_grad", "towers", "under jit"):
        run(W, X)  # warnings are errors here: a second one would fail


@pytest.mark.parametrize(
    "loss", [centred, *(pytest.param(loss, marks=pytest.mark.slow) for loss in (total, one_mask))]
)
def test_nothing_is_said_if_the_user_says_that_there_is_one_tower(loss):
    # The lie: it is warned of what differs from one device's, in a result that does not.
    found, _ = mt.value_and_grad(loss, devices=1, towers=1)(W, X)
    np.testing.assert_allclose(found, jax.jit(loss)(W, X).mean(), rtol=1e-6)
    with pytest.warns(mt.MultitowerWarning):
        look_at_step(loss, towers=1, global_batch=9)  # a copy of a row fills up its tower
    with pytest.warns(mt.MultitowerWarning):
        look_at(mt.value_and_grad(loss, devices=1), X)  # the same code elsewhere has several


def test_one_warning_for_all_results_of_one_line():
    # The lie: four long warnings, and one line to change.
    def loss(w, x):
        advantage = x - x.mean(0)
        each = advantage @ w
        return (each**2).mean(), {"first": each.mean(), "second": (each**4).mean()}

    with pytest.warns(mt.MultitowerWarning, match=r"aux.*, aux.* and loss") as told:
        look_at(mt.value_and_grad(loss, has_aux=True, devices=2), X)
    assert len(ours(told)) == 1


def test_a_loss_of_fixed_rows_is_told_where_it_is_wrong_or_right():
    # The lie: a loss that cannot be read brings no rows together.
    alike = jnp.eye(8)  # for a batch of eight rows
    loss = lambda w, x: -(alike[mt.row_index(x)] * ((x * w) @ mt.all_rows(x).T)).sum(1) + x.std()
    with pytest.warns(mt.MultitowerWarning, match="without a look.*takes the 4 rows of a tower"):
        look_at(mt.grad(loss, devices=2), X)
    with pytest.raises(TypeError):  # a mistake is told once
        mt.grad(lambda w, x: losses(w, x) + jnp.ones(7), devices=2)(W, X)


LOOPS = (
    lambda x: [x[n] for n in range(len(x))],
    jnp.unstack,
    list,
    lambda x: [x[-n : len(x) - n + 1][0] for n in range(len(x), 0, -1)],
    lambda x: [one[0] for one in jnp.split(x, len(x))],
)


@pytest.mark.parametrize(
    "taken", [LOOPS[0], *(pytest.param(taken, marks=pytest.mark.slow) for taken in LOOPS[1:])]
)
def test_a_loop_over_the_rows_in_python_is_named(taken):
    # The lie: it takes a part of the rows; or: nothing is wrong with it.
    loss = lambda w, x: sum(losses(w, row[None])[0] for row in taken(x))
    with pytest.warns(mt.MultitowerWarning) as told:
        look_at(mt.grad(jax.jit(lambda w, x: loss(w, x) / len(x)), devices=2), X)
    (one,) = told
    assert "goes through its rows one by one in Python (test_first_look.py:" in str(one.message)


@pytest.mark.slow
@pytest.mark.parametrize("taken", LOOPS)
def test_a_loop_over_the_rows_in_python_may_be_tried(taken):
    # The lie: a loop that a look cannot read is wrong; or a sum is right because it is a loop.
    loss = lambda w, x: sum(losses(w, row[None])[0] for row in taken(x))
    assert mt.check_parallel(lambda w, x: loss(w, x) / len(x), W, X[:4])
    assert not mt.check_parallel(loss, W, X[:4])


def test_a_fault_of_the_look_ends_no_training(monkeypatch):
    # The lie: the function takes no other number of rows than its own.
    def fail(*args, **kwargs):
        raise KeyError("an operation")

    monkeypatch.setattr(first_look, "read", fail)
    with pytest.warns(mt.MultitowerWarning) as told:
        assert mt.grad(losses, devices=2)(W, X).shape == W.shape
    (one,) = told
    assert "which failed: KeyError: 'an operation'. Please report it" in str(one.message)


def test_a_loop_over_the_rows_in_python_is_traced_once():
    # The lie: a loop that takes a second to trace costs five at the first call.
    traced = []

    def loss(w, x):
        traced.append(len(x))
        return sum(losses(w, row[None])[0] for row in x) / len(x)

    with pytest.warns(mt.MultitowerWarning, match="one by one"):
        look_at(mt.grad(loss, devices=2), X)
    assert len([rows for rows in traced if rows > len(X)]) == 1


def test_make_parallel_warns_of_rows_that_meet():
    with pytest.warns(mt.MultitowerWarning, match=r"result \(reduce_max .*\): rows are brought"):
        mt.make_parallel(lambda x: x - x.max(0), devices=2)(X)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: (x, x.sum()), r"result\[1\] \(reduce_sum .*\): it depends on the rows.*psum"),
        (lambda x: (x, {"rows": x}), r"result\[1\]\['rows'\]: it depends on the rows"),
    ],
)
def test_make_parallel_warns_of_a_result_that_is_one_tower_s(fn, said):
    # The lie: the sum of a batch is that of the first tower's rows.
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at_call(mt.make_parallel(fn, out_axes=(0, None), devices=2), X)


def test_make_parallel_warns_of_rows_on_any_axis():
    with pytest.warns(mt.MultitowerWarning, match=r"result \(reduce_max .*\): rows are brought"):
        look_at_call(mt.make_parallel(lambda x: x - x.max(1, keepdims=True), 1, 1, devices=2), X.T)


def test_nothing_is_said_of_a_result_that_towers_share():
    def fn(key, x):
        whole = jax.lax.psum(x.sum(), "towers"), mt.all_rows(x).max(0)
        return x, (*whole, jnp.ones(3), jax.random.split(key))

    run = mt.make_parallel(fn, out_axes=(0, None), devices=2)
    look_at_call(run, jax.random.key(0), X)  # warnings are errors


def in_a_buffer(w, x):
    z = x * w
    buffer = jnp.zeros((16, 3)).at[: len(x)].set(z - z.mean(0))
    return buffer[: len(x)].sum(1) ** 2


def with_labels(w, x):
    z = x * w
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(16)[: len(x)])


@pytest.mark.parametrize("loss", [in_a_buffer, with_labels])
def test_what_takes_no_more_rows_than_a_batch_has_is_looked_at(loss):
    # The lie: 1.27 becomes 0.53, and nobody is told, because a buffer has the size of a batch.
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2), X)
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at_step(loss, devices=2, towers=None)


def test_a_callback_without_a_result_keeps_no_loss_from_being_looked_at():
    """Lie: a counter of rows in a loss, and nothing is said of the mean beside it."""

    def loss(w, x):
        io_callback(lambda x: None, None, x)
        return centred(w, x)

    with pytest.warns(mt.MultitowerWarning, match="rows are brought together") as told:
        look_at(mt.value_and_grad(loss, devices=2), X)
    assert len(ours(told)) == 1


TARGETS = {"y": np.arange(8.0, dtype=np.float32)[:, None]}


class Task:
    targets = TARGETS["y"]

    def loss(self, w, x):
        return ((x @ w[:, None] - self.targets) ** 2).mean()


@pytest.mark.parametrize("where", ["global", "method", "list"])
def test_an_array_from_anywhere_beside_one_row_per_tower_is_told(where):
    # The lie: it is told of a closed-over variable, and not of one in a module or an object.
    loss = {
        "global": lambda w, x: ((x @ w[:, None] - TARGETS["y"]) ** 2).mean(),
        "method": Task().loss,
        "list": lambda w, x: ((x @ w[:, None] - jnp.array([[1.0], [2], *[[3]] * 6])) ** 2).mean(),
    }[where]
    with pytest.warns(mt.MultitowerWarning, match=r"shape \(8, 1\), with one entry per row"):
        look_at(mt.grad(loss, devices=8), X)
    with pytest.warns(mt.MultitowerWarning, match=r"shape \(8, 1\), with one entry per row"):
        look_at_step(loss, towers=8)


@pytest.mark.parametrize("towers", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_a_forgotten_array_beside_one_row_per_tower_is_told(towers):
    # The lie: in a tower of one row (1, 1) - (8, 1) broadcasts, to a loss of no program.
    def gradient(names, x, y):
        loss = lambda w: ((x @ w[:, None] - y) ** 2).mean()
        return mt.grad(loss, in_axes=names, devices=8, towers=towers)

    y = np.arange(8, dtype=np.float32)[:, None]
    with pytest.warns(mt.MultitowerWarning, match=r"shape \(8, 1\), with one entry per row"):
        wrong = gradient({"x": 0}, X, y)(W)
    right = gradient({"x": 0, "y": 0}, X, y)(W)  # as it says
    expected = 2 * X.T @ (X @ np.ones((3, 1)) - y) / len(X)
    np.testing.assert_allclose(right, expected[:, 0], rtol=1e-5)
    assert not np.allclose(wrong, right)
    look_at(gradient({"x": 0, "y": None}, X, y))  # as it says: every tower needs the whole


@pytest.mark.parametrize("most", [70, 300])
def test_parameters_of_every_size(most):
    # The lie: a model with tables of many sizes, in which no number is left for the rows or for the
    # towers, ends before its first step.
    tables = [np.ones(size, np.float32) for size in range(1, most)]
    run = mt.value_and_grad(lambda tables, x: losses(tables[2], x).sum(), devices=2)
    with pytest.warns(mt.MultitowerWarning, match="sum over rows"):  # it has looked
        jax.eval_shape(run, tables, X)


# Multiples of the reader's numbers of towers (11 and 13, and once 7), and its numbers of rows.
@pytest.mark.slow
@pytest.mark.parametrize("size", [28, 22, 26, 211, 223])
def test_sizes_that_a_function_makes_itself(size):
    # The lie: a network that cuts images to 28 pixels is told that its BatchNorm adds up rows,
    # since the reader took the 784 pixels for a multiple of its number of towers.
    def cut(x):
        return jnp.tile(x, (1, 300))[:, :size]

    def average(w, batch, *, model_state):
        new = (cut(batch)[:, None] * cut(batch)[..., None]).mean((0, 1, 2))
        loss = ((cut(batch) * w - 1) ** 2).sum() / (size * len(batch))
        return loss, {}, (model_state + new) / 2

    def add_up(w, batch, *, model_state):
        return (w * batch[:, 0] - 1) ** 2, {}, model_state + cut(batch).sum()

    def run(loss):
        step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
        step(step.init(1.0, model_state=jnp.float32(0)), X)
        return mt.check_parallel(loss, 1.0, X, model_state=jnp.float32(0))

    assert run(average)
    with pytest.warns(mt.MultitowerWarning, match="it adds up rows"):
        assert not run(add_up)


def test_a_function_that_takes_no_other_number_of_rows_is_looked_at():
    """Lie: the look has failed, because the function fails with the second number of rows."""

    def loss(w, x):
        if len(x) > 220:
            raise ValueError("too many")
        return losses(w, x - x.mean(0)) * 0.99 ** len(x)

    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.grad(loss, devices=2), X)


class Annealing:
    """A loss whose penalty grows from call to call, and which counts and keeps other things."""

    def __init__(self):
        self.step = self.calls = 0

    def loss(self, w, x):
        self.step += 1
        return self.squares(w, x) * min(1.0, self.step / 10)

    def squares(self, w, x):
        self.calls += 1
        self.hidden = x @ w
        return self.hidden**2


@pytest.mark.parametrize("is_closed_over", [False, True])
def test_a_number_that_a_loss_keeps_for_its_next_call_is_told(is_closed_over):
    """The lie: it counts calls. It counts traces."""
    model = Annealing()
    loss = (lambda w, x: 2 * model.loss(w, x)) if is_closed_over else model.loss
    with pytest.warns(mt.MultitowerWarning, match=r"changes self.step and reads it"):
        look_at(mt.value_and_grad(loss, devices=2), X)
    with pytest.warns(mt.MultitowerWarning, match=r"changes self.step and reads it"):
        look_at_step(loss, devices=2, towers=None)


def test_what_a_loss_writes_and_does_not_keep_is_not_told():
    model = Annealing()
    look_at(mt.value_and_grad(model.squares, devices=2), X)  # warnings are errors
    look_at(mt.value_and_grad(lambda w, x: 2 * model.squares(w, x), devices=2), X)
