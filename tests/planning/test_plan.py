"""A plan: from shapes alone, in bytes that can be worked out by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import multitower as mt
from multitower.planning import memory, traffic
from multitower.planning.layouts import PlannedLayout, Room, tower_layouts
from multitower.planning.memory import Spread
from multitower.planning.programs import Programs, TowerProgram
from multitower.planning.shapes import StateBytes, planned
from multitower.planning.sizes import in_words, memory_in_bytes
from multitower.planning.staged import _halving
from multitower.planning.words import advise

WIDTH = 40_000


def shape(*dims, dtype=np.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def losses(params, batch):
    return (jnp.tanh(batch @ params["in"]) @ params["out"])[:, 0] ** 2


HUGE = {"in": shape(WIDTH, WIDTH), "out": shape(WIDTH, 1)}
PARAMETERS = 4 * (WIDTH**2 + WIDTH)


@pytest.fixture(scope="module")
def huge():
    """The plan of a model of 6 GB, whose Adam alone would fill this machine."""
    before = len(jax.live_arrays())
    batch = shape(16, WIDTH)
    found = mt.plan(losses, optax.adam(1e-3), HUGE, batch, devices=2, towers=4, memory="24GiB")
    assert len(jax.live_arrays()) <= before + 1
    return found


def by_options(plan, **options):
    """The layout of these options."""
    (found,) = [
        one
        for one in plan.layouts
        if {n: v for n, v in one.options.items() if n not in ("devices", "layout")} == options
    ]
    return found


def test_a_function_that_makes_the_parameters(monkeypatch):
    # The lie: it is called, and makes a model that fits nowhere; or what `init` takes is refused.
    monkeypatch.setattr("multitower.planning.make._attributes", lambda given, *_: {"given": given})
    monkeypatch.setattr("multitower.planning.plan.Plan", lambda given: given)
    count = len(jax.live_arrays())
    weights = lambda: jax.tree.map(lambda x: jnp.ones(x.shape), HUGE)
    found = mt.plan(losses, optax.adam(1e-3), weights, shape(16, WIDTH))
    assert found.fields.params == HUGE
    assert {type(leaf) for leaf in jax.tree.leaves(found.fields)} == {jax.ShapeDtypeStruct}
    assert len(jax.live_arrays()) <= count + 1
    make = lambda: nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    plans = [
        mt.plan(lambda net, x: net(x)[:, 0] ** 2, optax.sgd(0.1), given, shape(4, 8)).fields
        for given in (make, make())
    ]
    assert plans[0] == plans[1]
    with pytest.raises(mt.ArgumentError, match=r"params is losses, which takes params, batch"):
        mt.plan(losses, optax.sgd(0.1), losses, shape(16, WIDTH))


@pytest.mark.slow
def test_every_kind_of_bytes(huge):
    """Lie: Adam's two moments counted once, or for every tower."""
    whole = by_options(huge, towers=4)
    blocks = by_options(huge, towers=4, shard_update=True)
    shards = by_options(huge, shard_params=True)
    assert whole.memory["parameters"] == PARAMETERS
    assert whole.memory["optimizer_state"] == 2 * PARAMETERS + 4
    assert whole.memory["rows"] == 8 * WIDTH * 4
    assert whole.memory["average"] == 0
    assert whole.memory["gradients"] == pytest.approx(2 * PARAMETERS, rel=1e-6)
    assert blocks.memory["parameters"] == PARAMETERS
    assert blocks.memory["optimizer_state"] == PARAMETERS + 8  # a count for every tower
    assert shards.memory["parameters"] == PARAMETERS / 2
    assert shards.memory["optimizer_state"] == PARAMETERS + 4
    # On two devices the parameters that are handed out take more than the split state saves.
    assert blocks.total_bytes > whole.total_bytes > shards.total_bytes


@pytest.mark.slow
def test_stages_split_and_wait(huge):
    staged = by_options(huge, towers=4, stages=2)
    assert staged.options["layout"] == (1, 2)
    assert staged.memory["parameters"] == 4 * WIDTH**2  # the stage with the large matrix
    assert staged.bubble == 1 / 5
    # (P - 1) / (M + P - 1) with 9 towers is 1/10; 16 rows fill 16 towers evenly.
    assert staged.note == "towers=16 would halve the time in which devices wait"
    assert _halving(9, 30) == "towers=10 would halve the time in which devices wait"
    assert _halving(17, 16) == ""  # towers without rows make no work
    kept = by_options(huge, towers=4, stages=2, remat=False)
    more = {name for name, size in kept.memory.items() if size != staged.memory[name]}
    assert more <= {"activations"}
    # A row of activations for each tower, and the rows' numbers, forward or backward.
    assert staged.sent_bytes == pytest.approx(16 * WIDTH * 4, rel=0.01)


def test_trap_memory_that_no_counter_shows(huge):
    """nemos#616: counters that do not move; the compiler knows what a program needs as it runs."""
    hidden = 4 * 4 * WIDTH  # of a tower's rows
    for layout in huge.layouts:
        assert layout.estimated or layout.memory["activations"] >= hidden, layout.options


def test_what_it_says(huge):
    """Lie: a layout that needs more than there is, or one that fits and is not named."""
    assert [one for one in huge.layouts if one.total_bytes <= 24 * 2**30] == huge.fits
    assert "does not fit" in huge.advice
    assert "shard_update=True" in huge.advice
    text = str(huge)
    assert text == repr(huge)
    assert huge.advice in text
    assert huge.limits[0].startswith("What breaks first with more devices: beyond 10 devices (stag")
    assert "then beyond 16 devices (rows" in huge.limits[0]
    facts = json.loads(json.dumps(huge.to_dict()))
    assert [one["fits"] for one in facts["layouts"]] == [x in huge.fits for x in huge.layouts]


def test_other_devices_take_no_other_programs(huge, monkeypatch):
    """Lie: 128 machines that are planned by compiling again."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled"))
    assert huge.on().layouts == huge.layouts
    many = huge.on(machines=128)
    assert (many.num_rows, by_options(many, towers=512).devices) == (16 * 128, 256)
    one, all_of = by_options(huge, towers=4), by_options(many, towers=512)
    assert all_of.memory["activations"] == one.memory["activations"]
    assert all_of.sent_bytes == pytest.approx(2 * PARAMETERS * 255 / 256, rel=1e-4)
    # One replica for each machine: none is on several of them.
    assert by_options(many, towers=512, stages=2).options["layout"] == (128, 2)


@pytest.mark.parametrize(
    ("devices", "towers", "expected"),
    [
        (1, 1, (1, 1, 1)),
        (1, 8, (8, 4, 1)),
        (2, 4, (2, 2, 1)),
        (3, 6, (2, 2, 2)),
        (8, 8, (1, 1, 1)),
    ],
)
def test_sums_that_wait(devices, towers, expected):
    """Lie: a device of many towers keeps one sum; it keeps one for every level of its tree."""
    found = Spread.of(devices, towers)
    assert (found.slots, found.depth, found.num_parts) == expected


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_bytes_sent_are_those_of_a_ring(devices):
    """The same numbers as `steps/test_budgets.py` reads off the compiled programs."""
    size = 840 * 1024
    ring = 2 * size * (devices - 1) / devices
    assert traffic.without_towers([size], devices).num_bytes == ring
    assert traffic.with_towers([size], Spread.of(devices, 2 * devices)) == (
        ring * (1.5 if devices == 3 else 1),
        (devices - 1) * (3 if devices == 3 else 2),
    )
    small = traffic.with_towers([1000], Spread.of(devices, devices))
    assert small == (1000 * (devices - 1), devices - 1)


@pytest.mark.parametrize(
    ("num_rows", "loss", "refused"),
    [
        (30, lambda w, x: jnp.mean((x @ w) ** 2), True),
        pytest.param(30, lambda w, x: (x @ w) ** 2, False, marks=pytest.mark.slow, id="rows"),
        pytest.param(
            32, lambda w, x: jnp.mean((x @ w) ** 2), False, marks=pytest.mark.slow, id="fill"
        ),
        pytest.param(
            30,
            lambda w, x: ((x @ w) ** 2, {"mean": jnp.mean(x)}),
            True,
            marks=pytest.mark.slow,
            id="metric",
        ),
    ],
)
def test_what_a_step_would_refuse_is_said(num_rows, loss, refused):
    """Lie: the plan is for 30 rows on 8 towers, and the step refuses their mean of means."""
    found = mt.plan(loss, optax.sgd(0.1), shape(4), shape(num_rows, 4), devices=2, towers=8)
    said = [note for note in found.notes if "train_step will refuse 30 rows and " in note]
    assert len(said) == refused
    assert all("with 8 towers, which" in note for note in said)
    assert [one.refused for one in found.layouts] == [
        refused and one.options.get("towers") == 8 for one in found.layouts
    ]
    assert not any(one.refused for one in found.fits)
    assert "towers=8" not in found.advice or not refused


@pytest.mark.slow
def test_rows_that_devices_cannot_share_evenly_are_whole_on_each():
    """Lie: it fits on a device with 8 MiB, and each of them gets the whole batch."""
    loss = lambda w, x: (x @ w) ** 2
    found = mt.plan(loss, optax.sgd(0.1), shape(4), shape(31, 4), devices=2, towers=2)
    fed = {len(one.options): one.memory["rows"] for one in found.layouts}
    there = mt.shard(np.zeros((31, 4), np.float32), devices=2)
    assert fed[1] == there.addressable_shards[0].data.nbytes == 31 * 4 * 4
    assert by_options(found, towers=2).memory["rows"] == 16 * 4 * 4


def test_leaves_that_no_device_divides_stay_whole():
    tree = [shape(64, 64), shape(63, 65), shape(64, 63)]
    assert memory.shard_bytes(tree, 2) == 4 * (64 * 64 / 2 + 63 * 65 + 64 * 63)
    assert memory.shard_bytes(tree, 1) == 4 * (64 * 64 + 63 * 65 + 64 * 63)


def layout_of(total, **options):
    return PlannedLayout({"devices": 2, **options}, 2, {}, total, 0, 0)


def test_advice_names_the_smallest_change():
    several = [layout_of(100), layout_of(60, towers=8), layout_of(20, stages=2)]
    assert advise(several, 100) == "Without any option it fits on a device with 100 B: 100 B."
    assert "makes it fit is towers=8: 60 B" in advise(several, 60)
    assert "makes it fit is stages=2: 20 B" in advise(several, 59)
    assert advise(several, 19).startswith("Nothing fits on a device with 19 B: stages=2 needs")
    assert advise(several, None).endswith("stages=2 needs least: 20 B.")
    best_first = "Without any option a device needs 100 B"
    assert advise(several[:1], None) == f"{best_first}."
    assert (
        advise([*several[:1], layout_of(120)], None) == f"{best_first}, the least of these layouts."
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("80 gb", 80 * 10**9),
        ("1.5MiB", 1572864),
        ("7", 7),
        (9, 9),
        (24e9, 24 * 10**9),
    ],
)
def test_amounts_of_memory(text, expected):
    assert memory_in_bytes(text) == expected


@pytest.mark.slow
def test_a_program_without_parameters_has_no_blocks():
    found = mt.plan(lambda w, x: x**2, optax.sgd(0.1), {}, shape(8), devices=2, towers=4)
    assert "towers=4" in str(found)
    assert "towers=4, shard_update" not in str(found)


@pytest.mark.parametrize(
    "text", ["much", "24 GiBs", "-1GiB", "", 0, True, 1.5, np.inf, np.nan, "0GiB", "9" * 400]
)
def test_no_amounts_of_memory(text):
    with pytest.raises(mt.ArgumentError, match="such as 24GiB"):
        memory_in_bytes(text)


def test_bytes_in_words():
    words = {
        0: "0 B",
        999: "999 B",
        1024: "1 KiB",
        1_023_900: "0.976 MiB",
        2**20 * 3 // 2: "1.5 MiB",
        2**50: "1.02e+03 TiB",
    }
    assert {number: in_words(number) for number in words} == words


@pytest.mark.parametrize(
    "options", [{"devices": 0}, {"machines": 1.5}, {"towers": 0}, {"memory": "lots"}]
)
def test_bad_arguments_are_refused_before_anything_is_compiled(options):
    with pytest.raises((mt.ArgumentError, mt.DeviceError)):
        mt.plan(losses, optax.sgd(0.1), HUGE, shape(16, WIDTH), **options)


def test_a_compiler_that_fails_is_told(monkeypatch):
    """Lie: a guess in place of what the compiler could not say."""

    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: of memory")

    monkeypatch.setattr(Programs, "fast", fails)
    monkeypatch.setattr(Programs, "update", 0)
    monkeypatch.setattr(
        Programs, "tower", lambda *_: TowerProgram((PARAMETERS,), (PARAMETERS,), 0, None)
    )
    plan = mt.plan(losses, optax.sgd(0.1), HUGE, shape(16, WIDTH), devices=1, towers=1)
    assert [one.options for one in plan.layouts] == [{"devices": 1, "towers": 1}]
    assert "the compiler fails (RESOURCE_EXHAUSTED: of memory)" in str(plan)
    assert plan.advice.startswith("With towers=1 a device needs")
    monkeypatch.setattr(Programs, "tower", fails)
    with pytest.raises(mt.ArgumentError, match="fails for every layout"):
        mt.plan(losses, optax.sgd(0.1), HUGE, shape(16, WIDTH), devices=1)


def given_of(loss, params, batch, **extras):
    step = mt.train_step(loss, optax.adam(1e-3), ema_decay=0.9)._step
    return planned(step, params, batch, **{"model_state": None, "rng": None, **extras})


def test_modules_and_extras_may_be_shapes():
    """Lie: a model that fits nowhere can be planned, but not as a module."""
    model = nnx.eval_shape(lambda: nnx.BatchNorm(1000, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    given = given_of(lambda model, x: model(x).sum(-1), model, shape(8, 1000))
    assert StateBytes.of(given.fields, ()) == (8000, 16004, 8000, 8004)
    keyed = given_of(
        lambda params, x, *, rng, model_state: (x @ params, {}, model_state),
        shape(10, dtype=jnp.bfloat16),
        shape(8, 10),
        rng=jax.eval_shape(jax.random.key, 0),
        model_state={"mean": shape(3)},
    )
    # The average of bfloat16 is float32; a key takes 8 bytes, the count of steps 4.
    assert StateBytes.of(keyed.fields, ()) == (20, 44, 40, 12 + 8 + 4)


def test_a_ratio_and_towers_that_meet():
    weights = Programs(
        given_of(lambda w, x: mt.ratio(x @ w, jnp.ones(len(x))), shape(5), shape(8, 5))
    ).weights
    assert [leaf.shape for leaf in weights] == [()]
    meet = given_of(lambda w, x: (mt.all_rows(x @ w).sum() - x @ w) ** 2, shape(5), shape(8, 5))
    notes = []
    assert list(tower_layouts(meet, Programs(meet), Room(2, 1, 4), notes)) == []
    assert "exchange values" in notes[0]


def apart(**options):
    """A plan of towers apart on two devices, of a model that is worked out by hand."""
    width = 1000
    params = {"in": shape(width, width), "out": shape(width, 1)}
    batch = shape(16, width)
    return mt.plan(losses, optax.adam(1e-3), params, batch, **{"devices": 2, **options})


@pytest.mark.slow
def test_local_updates_by_hand():
    """Lie: one inner optimizer state a device, or a meeting's bytes in every step."""
    size = 4 * (1000**2 + 1000)
    plan = apart(towers=4, sync_every=8)
    (found,) = plan.layouts
    assert found.options == {"devices": 2, "towers": 4, "sync_every": 8}
    assert found.memory["parameters"] == size + 2 * size  # of the last meeting, and two towers'
    assert found.memory["optimizer_state"] == size + 2 * (2 * size + 4)  # one momentum outside
    # A ring sends every byte once on two devices; besides a few bytes of metrics.
    assert size / 8 < found.sent_bytes < size / 8 + 100
    (many,) = plan.on(machines=4).layouts
    assert (many.devices, many.memory) == (8, {**found.memory, "update": many.memory["update"]})
    assert "shard_params" not in str(plan)


@pytest.mark.slow
def test_asynchronous_updates_by_hand():
    """Lie: the versions of all groups on the first device, or those of none."""
    size = 4 * (1000**2 + 1000)
    plan = apart(updates="asynchronous", max_staleness=1)
    counts = [one.options["towers"] for one in plan.layouts]
    assert counts == [2, 4, 8, 16]
    for found in plan.layouts:
        # That of the first group, and the newest, which the other group has made.
        assert found.memory["parameters"] == 2 * size
        assert found.memory["optimizer_state"] == 2 * size + 4
        # The gradient there and the parameters back.
        assert 2 * size < found.sent_bytes < 2 * size + 100
    alone = apart(updates="asynchronous", towers=4, devices=1).layouts[0]
    assert (alone.memory["parameters"], alone.sent_bytes) == (4 * size, 0)
    many = apart(updates="asynchronous", towers=16).layouts[0]
    assert many.memory["parameters"] == (8 + 1) * size
    assert "updates='asynchronous'" in str(plan)


@pytest.mark.slow
def test_what_towers_apart_cannot_be_planned_for():
    for options, said in (
        ({"updates": "asynchronous", "machines": 2}, "the devices of one machine"),
        ({"updates": "asynchronous", "sync_every": 2}, "exclude each other"),
        ({"updates": "asynchronous", "towers": 4, "max_staleness": 2}, "do not divide"),
        ({"max_staleness": 2}, "say updates='asynchronous'"),
        ({"sync_every": 0}, "whole number"),
        ({"outer_optimizer": optax.sgd(1.0)}, "sync_every= is missing"),
        ({"clip_norm": 0}, "clip_norm=0"),
        ({"reduction": "median"}, "reduction="),
    ):
        with pytest.raises(mt.ArgumentError, match=said):
            apart(**options)
    meet = lambda w, x: (mt.all_rows(x @ w).sum() - x @ w) ** 2
    for options in ({"sync_every": 2}, {"updates": "asynchronous"}):
        with pytest.raises(mt.ArgumentError, match="exchanges values between towers"):
            mt.plan(meet, optax.sgd(0.1), shape(5), shape(8, 5), devices=2, towers=2, **options)


@pytest.mark.slow
def test_mixed_precision_is_planned_for():
    """Lie: a program in float32. (CPUs cast to it again, so that there activations are more.)"""
    deep = lambda params, x: jnp.tanh(jnp.tanh(x @ params) @ params).astype(jnp.float32).sum(1)
    given = (deep, optax.sgd(0.1), shape(64, 64), shape(4096, 64))
    found = [
        mt.plan(*given, devices=1, towers=1, compute_dtype=dtype, clip_norm=1.0).layouts[0].memory
        for dtype in (None, jnp.bfloat16)
    ]
    assert found[1]["activations"] != found[0]["activations"]
    assert found[1]["parameters"] == found[0]["parameters"]


@pytest.mark.slow
def test_a_loss_that_needs_several_rows_is_planned_without_the_smallest_towers():
    # The lie: no plan at all, because one of the numbers of towers that nobody asked for is too
    # large, or because the shapes of the sums are looked up with one row.
    def pairs(w, x):
        first, second = jnp.split(x, 2)
        return ((first @ w - second @ w) ** 2).mean()

    given = (pairs, optax.sgd(0.1), shape(4), shape(16, 4))
    plan = mt.plan(*given, devices=2)
    counts = {layout.options.get("towers", 2) for layout in plan.layouts}
    assert counts == {2, 4, 8}
    assert any(
        note.startswith("towers=16 is left out: the loss fails with 1 row (") for note in plan.notes
    )
    with pytest.raises(ValueError, match="equal division"):
        mt.plan(*given, devices=2, towers=16)
    with pytest.raises(ValueError, match="equal division"):
        mt.plan(pairs, optax.sgd(0.1), shape(4), shape(3, 4), devices=1)
