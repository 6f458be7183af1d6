"""A resume with other settings is refused by name: it would be neither run."""

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import pty
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.training.hyperparameters import use_edited
from multitower.training.same_run import (
    BatchRows,
    check_same_run,
    describe_arrays,
    describe_run,
)

X = np.linspace(-1, 1, 16, dtype=np.float32)


injected = optax.inject_hyperparams(optax.adamw)


def loss(w, x):
    return (w * x - x) ** 2


def fit(run_dir, optimizer=None, steps=2, allow_changes=False, rows=16, **settings):
    options = {"towers": 4, "devices": 1, "global_batch": 16, **settings}
    trainer = mt.Trainer(loss, optimizer or optax.adam(0.1), run_dir=run_dir, **options)
    return trainer.fit(
        np.float32(0),
        lambda first: itertools.repeat(np.resize(X, rows)),
        steps=steps,
        resume=True,
        allow_changes=allow_changes,
    )


@pytest.fixture(scope="module")
def first_two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    fit(directory)
    return directory


@pytest.fixture
def begun(first_two_steps, tmp_path):
    """The directory of a run that has made two steps."""
    return shutil.copytree(first_two_steps, tmp_path / "run")


SAME = [
    {},
    pytest.param({"devices": 2}, marks=pytest.mark.slow),  # with a check of replicas, below
    pytest.param({"devices": 3}, marks=pytest.mark.slow),
    pytest.param({"devices": 2, "shard_update": True}, marks=pytest.mark.slow),
    {"optimizer": optax.adam(jnp.float32(0.1).item())},
    {"devices": 2, "check_replicas_every": 1},
]


@pytest.mark.parametrize("settings", SAME, ids="-".join)
def test_another_place_is_the_same_run(settings, begun):
    assert fit(begun, steps=3, **settings).step == 3


DESCRIBED = """
import json, jax, numpy as np, optax
from multitower.training.same_run import describe_run
print(json.dumps(describe_run(optax.adam(0.1), np.float32(0), {})))
"""


@pytest.mark.slow
def test_a_run_of_a_terminal_is_the_same_in_a_script():
    # The lie: the text of a program has no colours, which JAX adds for a terminal.
    assert importlib.util.find_spec("colorama"), "without it there are no colours"
    reader, terminal = pty.openpty()
    subprocess.run([sys.executable, "-c", DESCRIBED], stdout=terminal, check=True)
    os.close(terminal)
    found = b""
    with contextlib.suppress(OSError):  # the end of what a terminal has shown
        while more := os.read(reader, 4096):
            found += more
    os.close(reader)
    assert json.loads(found) == describe_run(optax.adam(0.1), np.float32(0), {})


OTHERS = [
    ({"towers": 8}, "another towers: the run there has 4, this one has 8"),
    ({"towers": None}, "another towers: the run there has 4, this one has None"),
    ({"global_batch": 8, "rows": 8}, "another global_batch: the run there has 16, this one has 8"),
    (
        {"optimizer": optax.adam(0.2)},
        r"optimizer: the run there has .* numbers 0.1, this one has 0.2",
    ),
    (
        {"optimizer": optax.adam(optax.linear_schedule(0.1, 0, 5))},
        r"only the model has a leaf \.opt_state",
    ),
    (
        {"optimizer": optax.adam(0.1, b2=0.99)},
        "another optimizer: the run there has one with the numbers",
    ),
    ({"clip_norm": 1.0}, "another clip_norm: the run there has None, this one has 1.0"),
    (
        {"on_nonfinite": "skip"},
        "another on_nonfinite: the run there has 'stop', this one has 'skip'",
    ),
]


@pytest.mark.parametrize(
    ("settings", "said"), OTHERS, ids=lambda x: "" if isinstance(x, str) else "-".join(x)
)
def test_another_run_is_refused_by_name(settings, said, begun):
    # The lie: a run that goes on with another learning rate, and a result that is of neither.
    with pytest.raises((mt.RunError, mt.CheckpointError), match=said):
        fit(begun, steps=3, **settings)


@pytest.mark.slow
def test_the_number_of_stages_counts(tmp_path):
    """Lie: a run without its stages goes on as the same one, with other bits."""
    fit(tmp_path, stages=1)
    with pytest.raises(mt.RunError, match="another stages: the run there has 1, this one has 2"):
        fit(tmp_path, stages=2)
    with pytest.raises(mt.RunError, match="another remat: the run there has True, this one has"):
        fit(tmp_path, stages=1, remat=False)
    with pytest.raises(mt.RunError, match="another stages: the run there has 1, this one has None"):
        fit(tmp_path)


def test_a_checkpoint_of_before_stages_were_kept_for_every_run_is_resumed():
    """Lie: a run from before an update of multitower is another one."""
    now = describe_run(optax.sgd(0.1), np.float32(0), {"stages": None})
    check_same_run({name: now[name] for name in now if name != "stages"}, now, "runs/1")


def test_numbers_that_an_optimizer_keeps_in_its_state_count(tmp_path):
    # The lie: 0.2 in the program, and the 0.1 of the checkpoint in every update.
    make = optax.inject_hyperparams(optax.sgd)
    fit(tmp_path, make(0.1))
    assert fit(tmp_path, make(0.1), steps=3).step == 3
    with pytest.raises(
        mt.RunError,
        match=r"another optimizer\.hyperparams\['learning_rate'\]: .* has 0\.1, this one has 0\.2",
    ):
        fit(tmp_path, make(0.2), steps=4)


def test_kernels_of_onednn_count(begun, monkeypatch):
    monkeypatch.setattr("multitower.training.same_run.uses_onednn", lambda: True)
    with pytest.raises(mt.RunError, match="another onednn: the run there has False"):
        fit(begun, steps=3)


def test_settings_of_jax_count(begun):
    """Lie: other random numbers after a resume, from an environment variable that has changed."""
    with (
        jax.threefry_partitionable(False),
        pytest.raises(
            mt.RunError, match=r"another jax_threefry_partitionable: the run .* has True"
        ),
    ):
        fit(begun, steps=3)


@pytest.mark.slow
def test_a_schedule_counts_by_what_it_computes(tmp_path):
    make = lambda last: optax.sgd(optax.linear_schedule(0.1, last, 5))
    fit(tmp_path, make(0.0))
    assert fit(tmp_path, make(0.0), steps=3).step == 3
    with pytest.raises(mt.RunError, match="another optimizer"):
        fit(tmp_path, make(0.01), steps=4)


def test_a_table_in_a_jitted_schedule_counts():
    """Lie: the run of another table, because a call inside of the update has it."""
    table = np.linspace(0, 1, 300, dtype=np.float32)
    rate = lambda table: jax.jit(lambda count: jnp.asarray(table)[count])
    there, here, again = (
        describe_run(optax.sgd(rate(one)), np.float32(0), {})
        for one in (table, table[::-1].copy(), table.copy())
    )
    assert there == again
    assert there["optimizer"] != here["optimizer"]


def test_a_nan_in_the_program_of_an_update_is_the_same_nan():
    """Lie: the run that is there has nan, and this one has nan."""

    def clip(updates, state, params=None):
        middle = jnp.median(jnp.abs(updates))  # nan, if there is one among them
        return jnp.clip(updates, -middle, middle), state

    optimizer = optax.GradientTransformation(lambda params: (), clip)
    now = describe_run(optimizer, np.zeros(3, np.float32), {})
    saved = json.loads(json.dumps(now))
    assert saved == now
    saved["optimizer"]["numbers"].append(float("nan"))  # as they were once saved
    check_same_run(saved, now, "runs/1")


def test_an_update_of_complex_weights_counts():
    """Lie: a Trainer that refuses complex weights, with float()'s error, as train_step does not."""
    weights = jax.ShapeDtypeStruct((3,), np.complex64)
    one, other = (describe_run(optax.sgd(rate), weights, {}) for rate in (0.25, 0.5))
    with pytest.raises(mt.RunError, match=r"with the numbers 0\.25, this one has 0\.5"):
        check_same_run(one, other, "here")


@pytest.mark.slow
def test_an_average_counts_by_what_it_computes(tmp_path):
    make = lambda offset: lambda step: jnp.minimum(0.9, (1 + step) / (offset + step))
    fit(tmp_path, ema_decay=make(10.0))
    assert fit(tmp_path, steps=3, ema_decay=make(10.0)).step == 3
    with pytest.raises(
        mt.RunError, match=r"another ema_decay: the run there has .* 10, this one has 20"
    ):
        fit(tmp_path, steps=4, ema_decay=make(20.0))


def test_changes_can_be_allowed(begun):
    assert fit(begun, optax.adam(0.2), steps=3, allow_changes=True).step == 3
    assert fit(begun, optax.adam(0.2), steps=4).step == 4  # it is that run from now on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "numbers"),
    [
        (optax.adam(0.3), optax.adam(0.03), "0.3, this one has 0.03"),
        (injected(0.1), injected(0.01), "0.1, this one has 0.01"),
        (injected(0.1), injected(0.1, weight_decay=0.25), "0.0001, this one has 0.25"),
    ],
    ids=["update", "state", "weight decay"],
)
def test_numbers_that_differ_are_named_for_many_parameters(before, after, numbers):
    # The lie: "the same numbers in it", because the zeros of all first moments came before them.
    many = [X] * 60
    with pytest.raises(mt.RunError, match=numbers):
        check_same_run(describe_run(before, many, {}), describe_run(after, many, {}), "runs/a")


WAYS = [
    {},
    {"shard_update": True, "devices": 2},
    {"sync_every": 2},
    pytest.param({"updates": "asynchronous", "devices": 2}, marks=pytest.mark.slow),
    pytest.param({"towers": None, "shard_params": True, "devices": 2}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_allowed_change_of_what_the_state_holds_is_made(way, tmp_path):
    # The lie: an error names both learning rates and the way out, and then the old one is used.
    make = functools.partial(injected, b2=0.99)
    numbers = lambda state: (getattr(state.local, "opt_state", state.opt_state)).hyperparams
    fit(tmp_path, make(0.1), **way)
    for steps, rate in ((4, 0.2), (6, 0.99)):  # 0.99 was among the numbers before
        found = numbers(fit(tmp_path, make(rate), steps, allow_changes=True, **way))
        assert np.unique(found["learning_rate"]) == np.float32(rate)
        assert np.unique(found["b2"]) == np.float32(0.99)


EDITS = {
    "freeze one": ({"a": 0.25, "b": 0.5}, {"a": 0.0, "b": 0.5}),
    "swap": ({"a": 0.25, "b": 0.5}, {"a": 0.5, "b": 0.25}),
    "what another has": ({"a": 0.25, "b": 0.5, "c": 0.5, "d": 0.5}, dict.fromkeys("abcd", 0.5)),
    "sign": ({"a": 0.25, "b": 0.5}, {"a": -0.25, "b": 0.5}),
    "sixty": (
        {f"w{number}": 1 / (1 + number) for number in range(60)},
        {f"w{number}": 0.5 / (1 + number) for number in range(60)},
    ),
}


@pytest.mark.parametrize(
    "edit",
    [pytest.param(edit, marks=[pytest.mark.slow] * (edit == "sixty")) for edit in EDITS],
)
def test_every_edit_is_noticed_by_name_and_made_if_allowed(edit):
    """Lie: "with the new value", and what keeps its size, or is 0, or is one of many, is old."""

    def of(rates):
        groups = {name: injected(rate) for name, rate in rates.items()}
        optimizer = optax.multi_transform(groups, {name: name for name in rates})
        weights = {name: np.ones(2, np.float32) for name in rates}
        state = mt.train_step(lambda w, x: x, optimizer, devices=1).init(weights)
        saved = json.loads(json.dumps(describe_run(optimizer, weights, {})))
        return state, saved

    (before, there), (after, here) = map(of, EDITS[edit])
    name = next(name for name, rate in EDITS[edit][0].items() if rate != EDITS[edit][1][name])
    with pytest.raises(mt.RunError, match=rf"optimizer\.inner_states\['{name}'\]\.inner_state\.h"):
        check_same_run(there, here, "runs/a")
    use_edited(before, after, there, here)
    groups = before.opt_state.inner_states.items()
    rates = {name: one.inner_state.hyperparams["learning_rate"] for name, one in groups}
    assert rates == {name: np.float32(rate) for name, rate in EDITS[edit][1].items()}


@pytest.mark.slow
def test_the_outer_learning_rate_of_local_updates_counts_too(tmp_path):
    # The lie: an edited outer learning rate is not noticed, and the old one is used.
    outer = optax.inject_hyperparams(optax.sgd)
    local = {"sync_every": 2, "devices": 2}
    fit(tmp_path, injected(0.1), outer_optimizer=outer(0.7), **local)
    with pytest.raises(mt.RunError, match=r"outer_optimizer\.hyperparams.* 0.7, this one has 0.25"):
        fit(tmp_path, injected(0.1), 4, outer_optimizer=outer(0.25), **local)
    state = fit(
        tmp_path, injected(0.1), 4, outer_optimizer=outer(0.25), allow_changes=True, **local
    )
    assert state.opt_state.hyperparams["learning_rate"] == np.float32(0.25)
    assert np.unique(state.local.opt_state.hyperparams["learning_rate"]) == np.float32(0.1)


@pytest.mark.slow
def test_an_allowed_change_leaves_what_a_schedule_or_the_user_has_made(tmp_path):
    # The lie: a learning rate that was written by hand begins anew when the decay is edited.
    state = fit(tmp_path / "first", injected(0.1, b1=lambda count: 0.5 / (1 + count)))
    state.opt_state.hyperparams["learning_rate"] = 0.05
    with mt.Checkpoints(tmp_path / "first" / "checkpoints") as kept:
        run = kept.run_of(2)
    with mt.Checkpoints(tmp_path / "second" / "checkpoints") as kept:
        kept.save(2, state, {}, run=run)
    changed = injected(0.1, b1=lambda count: 0.5 / (1 + count), weight_decay=0.25)
    found = fit(tmp_path / "second", changed, steps=3, allow_changes=True).opt_state.hyperparams
    assert found["learning_rate"] == np.float32(0.05)
    assert found["weight_decay"] == np.float32(0.25)
    assert found["b1"] == np.float32(0.5 / 3)


@pytest.mark.parametrize("rows", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_the_rows_of_batches_count_where_nobody_said_how_many(rows, tmp_path):
    fit(tmp_path, global_batch=None)
    with pytest.raises(mt.RunError, match=f"batches of 16 rows, this one has {rows}") as told:
        fit(tmp_path, steps=5, global_batch=None, rows=rows)
    assert ("also pass Trainer(global_batch=16)" in str(told.value)) is (rows < 16)


@pytest.mark.slow
def test_two_small_batches_after_a_resume_are_answered_with_the_way_out(tmp_path):
    # The lie: "pass allow_changes=True", and then another error that names no way.
    def fit(steps, **how):
        sizes = [16, 16, 4, 4, 16]
        batches = lambda first: (np.resize(X, size) for size in sizes[first:])
        options = {"towers": 2, "devices": 1, "global_batch": how.pop("global_batch", None)}
        trainer = mt.Trainer(loss, optax.sgd(0.1), run_dir=tmp_path, hooks=[], **options)
        return trainer.fit(np.float32(0), batches, steps=steps, resume=True, **how)

    fit(2)
    with pytest.raises(mt.RunError, match=r"allow_changes=True\. If batches of 16 rows are still"):
        fit(5)
    with pytest.raises(mt.BatchError, match=r"or else is the rows of the first.* global_batch=16"):
        fit(5, allow_changes=True)
    assert fit(5, allow_changes=True, global_batch=16).step == 5


def test_law_l4_batches_of_any_size_go_on_where_a_full_one_is_said(tmp_path):
    """Lie: two small batches after a resume, or a larger one, are those of another run."""
    for rows, steps in ((8, 1), (5, 3), (16, 4)):
        assert fit(tmp_path, optax.sgd(0.1), steps=steps, rows=rows).step == steps


@pytest.mark.slow
@pytest.mark.parametrize("cut", [2, 5])
def test_law_l4_a_run_that_goes_on_with_a_ragged_batch(cut, tmp_path):
    """Lie: the ragged batch is taken for a full one, and its rows go to other towers."""

    def batches(first):
        for number in range(first, 6):
            yield {"x": np.random.default_rng(number).normal(size=[8, 8, 5][number % 3])}

    def fit(where, steps, **how):
        loss = lambda w, batch, *, rng: (w * batch["x"] - 1) ** 2 * jax.random.uniform(rng, ())
        given = {"run_dir": where, "checkpoint_every": 1, "devices": 1, "towers": 2, "hooks": []}
        trainer = mt.Trainer(loss, optax.adam(0.1), **given)
        return trainer.fit(jnp.float32(0), batches, steps=steps, rng=jax.random.key(0), **how)

    wanted = mt.fingerprint(fit(tmp_path / "whole", 6))
    fit(tmp_path / "stopped", cut)
    assert mt.fingerprint(fit(tmp_path / "stopped", 6, resume=True)) == wanted


def test_another_version_of_jax_may_trace_another_program():
    """Lie: after an upgrade no run goes on."""
    run = lambda checksum, version: {
        "optimizer": {"sha256": checksum, "numbers": []},
        "versions": {"jax": version},
        **describe_arrays(()),
    }
    check_same_run(run("a", "0.10"), run("b", "0.12"), "runs/1")
    with pytest.raises(mt.RunError, match="holds a run with another optimizer"):
        check_same_run(run("a", "0.12"), run("b", "0.12"), "runs/1")


def test_the_state_that_an_optimizer_begins_with_counts():
    """Lie: two optimizers are one, as they make the same updates of their states."""
    as_it_is = lambda gradients, state, params=None: (gradients, state)
    zeros, ones = (
        describe_run(optax.GradientTransformation(init, as_it_is), np.float32(0), {})
        for init in (jnp.zeros_like, jnp.ones_like)
    )
    with pytest.raises(mt.RunError, match="another first optimizer state"):
        check_same_run(zeros, ones, "runs/1")


def test_the_largest_batch_counts_whenever_it_comes():
    """Lies: only the first two batches count; after a small one, the run is another one."""
    run = {}
    rows = BatchRows(run, {})
    for num_rows in (4, 4, 8, 4):
        rows.see(num_rows)
    kept = {}
    again = BatchRows(kept, run)
    assert again.wanted == 8
    assert kept == run  # also in a checkpoint before the next full batch
    again.see(3)
    again.see(8)
    with pytest.raises(mt.RunError, match="batches of 8 rows, this one has 9"):
        again.see(9)
