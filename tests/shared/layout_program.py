"""One process of several: `python layout_program.py PORT PROCESSES PROCESS DEVICES WHAT...`

Every process simulates DEVICES devices. Process 0 prints JSON: for each WHAT what it found. With
PORT 0 the process is alone and joins nobody.
"""

import functools
import json
import sys
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import multitower as mt
from multitower.processes.together import texts_of_all, whole_on_host
from multitower.steps.local.meeting import Meeting
from multitower.steps.state.leaves import leaf_like, named_leaves, on_host
from multitower.steps.state.replicas import check_replicas
from multitower.steps.step import TrainStep
from multitower.training.scoring.evaluation import evaluate

jax.config.update("jax_enable_compilation_cache", False)

TOWERS = 8
COLUMNS, HIDDEN = 6, 5


def losses(params, batch, *, rng, model_state):
    """Dropout, statistics of the rows, a loss of each row."""
    x = jnp.tanh(batch["x"] @ params["in"])
    kept = jax.random.bernoulli(rng, 0.8, x.shape)
    mean = 0.9 * model_state["mean"] + 0.1 * x.mean(0)
    new = {"mean": mean, "updates": model_state["updates"] + 1}
    error = (jnp.where(kept, x - mean, 0) @ params["out"] - batch["y"]) ** 2
    return error, {"absolute": jnp.sqrt(error)}, new


def batch(number, rows):
    draw = np.random.default_rng(number)
    x = draw.normal(size=(rows, COLUMNS)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


def first_params():
    draw = np.random.default_rng(99)
    return {
        "in": draw.normal(size=(COLUMNS, HIDDEN)).astype(np.float32),
        "out": draw.normal(size=HIDDEN).astype(np.float32),
    }


def same_bits(devices=None):
    """Everything after three steps, the last one with so few rows that towers stay empty."""
    momentum = optax.sgd(1e-2, momentum=0.9)  # every day: an update of fewer kernels than Adam's
    step = mt.train_step(losses, momentum, towers=TOWERS, ema_decay=0.9, devices=devices)
    statistics = {"mean": np.zeros(HIDDEN, np.float32), "updates": np.int32(0)}
    state = step.init(first_params(), model_state=statistics, rng=jax.random.key(7))
    state, metrics = step(state, batch(0, 32))
    history = [metrics]
    ahead = [batch(1, 32), batch(2, 13)]
    for rows in mt.prefetch(ahead, towers=TOWERS, global_batch=32, devices=devices):
        state, metrics = step(state, rows)
        history.append(metrics)
    return mt.fingerprint((state, history))


def float16(devices=None):
    """A loss scale that is halved, since gradients of the last tower overflow: in one process."""
    where = {"towers": TOWERS, "devices": devices}
    step = mt.train_step(losses, optax.adam(1e-2), compute_dtype=jnp.float16, **where)
    statistics = {"mean": np.zeros(HIDDEN, np.float32), "updates": np.int32(0)}
    state = step.init(first_params(), model_state=statistics, rng=jax.random.key(7))
    history = []
    for number in range(3):
        rows = batch(number, 32)
        if number == 1:
            rows["y"][-1] = 1e4
        state, metrics = step(state, rows)
        history.append(metrics)
    return [*(float(one["skipped"]) for one in history), mt.fingerprint((state, history))]


def local_step(devices, **options):
    """Towers that update their own, and a first state."""
    step = mt.train_step(
        losses, optax.adam(1e-2), towers=TOWERS, ema_decay=0.9, devices=devices, sync_every=2,
        local_state="average", diagnostics=True, **options,
    )  # fmt: skip
    statistics = {"mean": np.zeros(HIDDEN, np.float32), "updates": np.int32(0)}
    return step, step.init(first_params(), model_state=statistics, rng=jax.random.key(7))


def local(devices=None):
    """Towers that update their own: before a meeting, after one, in a state that was whole."""
    step, state = local_step(devices)
    found, history = [], []
    for number, rows in enumerate((32, 32, 13)):
        state, metrics = step(state, batch(number, rows))
        history.append(metrics)
        check_replicas(state)
        found.append(mt.fingerprint((state, history)))
    copies = [leaf_like(on_host(leaf), leaf) for _, leaf in named_leaves(state)]
    state = jax.tree.unflatten(jax.tree.structure(state), copies)
    state, metrics = step(state, batch(3, 32))
    return [*found, mt.fingerprint((state, [*history, metrics]))]


def local_calls(devices=None):
    """The second and the last of `local`, in two calls of two steps.

    In the second call process 0 makes the steps before the meeting, and waits for all of it, before
    another process has begun: it would hang if anything in them went over processes.
    """
    step, state = local_step(devices, steps_per_call=2)
    state, first = step(state, [batch(0, 32), batch(1, 32)])
    history = [{name: leaf[place] for name, leaf in first.items()} for place in (0, 1)]
    found = [mt.fingerprint((state, history))]
    meet = Meeting.run

    def meet_alone(self, parts):
        if jax.process_index() == 0:
            jax.block_until_ready([leaf for leaf in jax.live_arrays() if not leaf.is_deleted()])
            texts_of_all("now the others")
        return meet(self, parts)

    Meeting.run = meet_alone
    try:
        if jax.process_index() > 0:
            texts_of_all("after process 0")
        state, last = step(state, [batch(2, 13), batch(3, 32)])
    finally:
        Meeting.run = meet
    history += [{name: leaf[place] for name, leaf in last.items()} for place in (0, 1)]
    return [*found, mt.fingerprint((state, history))]


def local_run(devices=None):
    """A run of a trainer, what it tells, and how many steps its calls make."""
    heard, sizes, there = [], [], TrainStep.__call__

    def seen(step, state, batches):
        sizes.append(len(batches) if isinstance(batches, list) else None)
        return there(step, state, batches)

    trainer = mt.Trainer(
        per_row, optax.adam(1e-2), towers=TOWERS, devices=devices, global_batch=32, sync_every=2,
        check_replicas_every=3, hooks=[lambda one: heard.append([one.step, one.metrics["loss"]])],
    )  # fmt: skip
    lazily = lambda number: mt.LazyRows(32, lambda places: {
        name: leaf[places] for name, leaf in batch(number, 32).items()
    })  # fmt: skip
    TrainStep.__call__ = seen
    try:
        state = trainer.fit(first_params(), lambda first: map(lazily, range(first, 9)), steps=6)
    finally:
        TrainStep.__call__ = there
    return {"bits": mt.fingerprint(state), "heard": heard, "sizes": sizes}


def stages(devices=None, elsewhere=False):
    """A model in stages: trained, to the host and back; `elsewhere` scored, and without stages.

    With tied weights, dropout, statistics, and a ratio as the loss, whose weights come first.
    """

    def loss(params, batch, *, rng, model_state):
        h = mt.cut(jnp.tanh(batch["x"] @ params["in"]))
        kept = jax.random.bernoulli(rng, 0.8, h.shape)
        new = {"mean": 0.9 * model_state["mean"] + 0.1 * h.mean(0)}
        error = ((h * kept @ params["in"].T - batch["x"]) ** 2).sum(1) + (h @ params["out"]) ** 2
        return mt.ratio(error * batch["y"] ** 2, batch["y"] ** 2), {"error": error}, new

    options = {"ema_decay": 0.9, "clip_norm": 0.5, "skip_nonfinite": True, "diagnostics": True}
    options |= {"towers": TOWERS, "devices": devices, "global_batch": 32}
    make = lambda **more: mt.train_step(loss, optax.adam(1e-2), **options, **more)
    step, whole = make(stages=2), make()
    statistics = {"mean": np.zeros(HIDDEN, np.float32)}
    state = step.init(first_params(), model_state=statistics, rng=jax.random.key(7))
    found, history = [], []
    for number, rows in enumerate((32, 13)):
        state, metrics = step(state, batch(number, rows))
        history.append(metrics)
        check_replicas(state)
    found.append(mt.fingerprint((state, history)))
    copies = [leaf_like(on_host(leaf), leaf) for _, leaf in named_leaves(state)]
    restored = jax.tree.unflatten(jax.tree.structure(state), copies)
    for one in (restored, state):
        state, metrics = step(one, batch(2, 32))
        found.append(mt.fingerprint((state, metrics)))
    if not elsewhere:
        return found
    score = lambda params, x: {"hidden": mt.cut(jnp.tanh(x["x"] @ params["in"])) @ params["out"]}
    where = {"devices": devices, "towers": TOWERS, "stages": 2}
    found.append(evaluate(score, state.params, batch(4, 29), global_batch=16, **where))
    state, _ = whole(state, batch(3, 32))  # from stages to none, and back
    state, _ = step(state, batch(4, 32))
    return [*found, mt.fingerprint(state)]


def fast():
    """The parameters in full: they are equal to rounding, as many towers as devices.

    With plain gradient descent: Adam would not show a gradient that is twice too large.
    """
    step = mt.train_step(lambda w, rows: (rows["x"] @ w - rows["y"]) ** 2, optax.sgd(0.05))
    state = step.init(np.zeros(COLUMNS, np.float32))
    for number, rows in enumerate((32, 32, 13)):
        state, metrics = step(state, batch(number, rows))
    return [np.asarray(state.params).tolist(), float(metrics["loss"])]


def functions(devices=None, cases=((None, (32, 13)), (TOWERS, (32, 13)))):
    """make_parallel, value_and_grad and evaluate on rows that fill the towers and that do not."""
    found = {}
    params = first_params()
    for towers, numbers in cases:
        where = {"devices": devices, "towers": towers}
        double = mt.make_parallel(lambda x: jnp.sin(x) * 2, **where)
        gradient = mt.grad(lambda p, x: jnp.tanh(x @ p["in"]).sum(1), **where)
        for rows in numbers:
            x = batch(5, rows)["x"]
            found[f"rows {rows} {towers}"] = whole_on_host(double(x)).tolist()
            found[f"gradient {rows} {towers}"] = np.asarray(gradient(params, x)["in"]).tolist()
        found[f"evaluate {towers}"] = evaluate(
            lambda w, x: {"x": x * w}, 2.0, np.arange(101.0), global_batch=24, **where
        )
    return found


def per_row(params, rows):
    return (jnp.tanh(rows["x"] @ params["in"]) @ params["out"] - rows["y"]) ** 2


def sharded(devices=None):
    """All bits of a state in blocks, before and after it was whole; and what one may see alone."""
    options = {"towers": TOWERS, "ema_decay": 0.9, "devices": devices}
    step = mt.train_step(per_row, optax.adamw(1e-2), shard_update=True, **options)
    whole = mt.train_step(per_row, optax.adamw(1e-2), **options)
    state, _ = step(step.init(first_params()), batch(0, 32))
    seen = None
    if jax.process_index() == 0:  # of several processes; nothing is sent for the parameters
        seen = float(state.params["out"].addressable_shards[0].data[0])
    state, _ = step(state, batch(1, 13))
    found = [mt.fingerprint(state)]
    state, _ = whole(state, batch(2, 32))  # from blocks to a state without, and back
    state, _ = step(state, batch(3, 32))
    return [seen, *found, mt.fingerprint(state)]


def shards(devices=None):
    """States of which every device has a part: trained, copied to the host and back, changed."""
    params = {"in": np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)}
    rows = np.random.default_rng(3).normal(size=(8, 64)).astype(np.float32)
    found = []
    for way in ("shard_params", "shard_update"):
        step = mt.train_step(
            lambda params, rows: (jnp.tanh(rows @ params["in"]) ** 2).sum(1), optax.lamb(0.1),
            devices=devices, clip_norm=0.1, ema_decay=0.9, **{way: True},
        )  # fmt: skip
        state, _ = step(step.init(params), rows)
        named = named_leaves(state)
        copies = [leaf_like(on_host(leaf), leaf) for _, leaf in named]
        state = jax.tree.unflatten(jax.tree.structure(state), copies)
        state, _ = step(state, rows[:5])
        check_replicas(state)
        check_replicas(state.replace(step=np.array(2, np.int32)))  # only that is on the hosts
        state.ema_params["in"] = params["in"]
        state, metrics = step(state, rows)
        kept = [state.params["in"], state.opt_state[0].nu["in"], state.ema_params["in"]]
        assert len(mt.fingerprint(state)) == 64
        found += [
            float(metrics["loss"]),
            *(whole_on_host(leaf)[::9, ::9].tolist() for leaf in kept),
        ]
    return found


def own_rows(devices=None):
    """The same steps from rows that are read where they are needed, and which ones were read."""
    read, seen = [], []

    def lazily(number, rows):
        def some(places):
            read.append(places.tolist())
            return {name: leaf[places] for name, leaf in batch(number, rows).items()}

        return mt.LazyRows(rows, some)

    for towers in (TOWERS, None):
        step = mt.train_step(
            lambda w, rows: (rows["x"] @ w - rows["y"]) ** 2,
            optax.sgd(0.05),
            towers=towers,
            devices=devices,
        )
        state = step.init(np.zeros(COLUMNS, np.float32))
        ahead = mt.prefetch([lazily(0, 32), lazily(1, 13)], towers=towers, devices=devices)
        for rows in ahead:
            state, _ = step(state, rows)
        seen.append(np.asarray(state.params).tolist())
    evaluate(Table.score, 2.0, Table(), global_batch=24, towers=TOWERS, devices=devices)
    return [read, seen, sorted(Table.read)]


class Table:
    """A data set that notes which of its 48 rows are read."""

    read: ClassVar[set] = set()
    shape, ndim, dtype = (48,), 1, np.dtype(np.float32)

    def __getitem__(self, places):
        Table.read.update(places.tolist())
        return np.float32(places)

    @staticmethod
    def score(w, x):
        return {"x": x * w}


def global_arrays(devices=None):
    """Arrays of all processes as arguments: what one call returns is fed to the next."""
    x = batch(5, 32)["x"]
    found = {}
    for towers in (None, TOWERS):
        where = {"devices": devices, "towers": towers}
        double = mt.make_parallel(lambda x: jnp.sin(x) * 2, **where)
        found[str(towers)] = whole_on_host(double(double(x))).tolist()
        sharded = next(mt.prefetch([double(x)], **where))
        found[f"ahead {towers}"] = whole_on_host(double(sharded)).tolist()
        again = next(mt.prefetch([mt.shard(x, **where)], **where))  # as a Trainer does with it
        found[f"sharded before {towers}"] = whole_on_host(double(again)).tolist()
    evenly = mt.shard(np.float32(range(96)), devices=devices)
    try:
        mt.shard(evenly, towers=2, global_batch=128, devices=devices)  # 64 rows a tower, 48 here
    except mt.BatchError as error:
        found["error"] = str(error)
    cut = mt.shard(x, towers=TOWERS, devices=devices)
    try:
        mt.make_parallel(jnp.sin, towers=2 * TOWERS, devices=devices)(cut)
    except mt.BatchError as error:
        found["other towers"] = str(error)
    return found


def negative_zeros(devices=None):
    """All bits of rows and of a state in blocks that are -0.0, which a sum would make 0.0.

    And the dtype of 16-bit rows times a Python number, which adapts to them.
    """
    found = {}
    zeros = -np.zeros(24, np.float32)
    for towers in (5, TOWERS):  # 5 divide neither the rows nor the devices
        where = {"towers": towers, "devices": devices}
        negate = mt.make_parallel(lambda x: -jnp.abs(x), **where)
        gradient = mt.value_and_grad(lambda w, x: (w * x, {"x": x}), has_aux=True, **where)
        for rows in (24, 13):
            found[f"rows {rows} {towers}"] = mt.fingerprint(negate(zeros[:rows]))
            found[f"aux {rows} {towers}"] = mt.fingerprint(gradient(np.float32(1), zeros[:rows]))
        times = mt.make_parallel(lambda x, s: x * s, in_axes=(0, None), **where)
        found[f"number {towers}"] = mt.fingerprint(times(zeros.astype(jnp.bfloat16), 0.1))
    optimizer = optax.MultiSteps(optax.adam(1e-2), 2)
    step = mt.train_step(
        lambda w, x: -jnp.abs(w * x).sum(1), optimizer, towers=5, shard_update=True, devices=devices
    )
    state, _ = step(step.init(np.ones(7, np.float32)), np.zeros((24, 7), np.float32))
    return found | {"state": mt.fingerprint(state)}


def unlike(devices=None):
    """What is said where the second process passes something else than the first one."""
    here = jax.process_index()

    def said(rows, params=None, towers=4, loss=per_row, **cut):
        with warnings.catch_warnings(record=True) as told:
            try:
                step = mt.train_step(loss, optax.sgd(0.1), towers=towers, devices=devices, **cut)
                step(step.init(params or first_params()), rows)
            except mt.MultitowerError as error:
                return str(error)
        return "".join(str(one.message) for one in told)

    def part(start, size):
        return {name: leaf[start : start + size] for name, leaf in batch(0, 48).items()}

    def fit(steps=2, rate=0.1):
        try:
            trainer = mt.Trainer(per_row, optax.sgd(rate), towers=4, devices=devices, hooks=[])
            trainer.fit(first_params(), lambda first: iter([part(0, 24)] * 9), steps=steps)
        except mt.MultitowerError as error:
            return str(error)

    def score(rows):
        try:
            mt.evaluate(lambda w, x: {"x": w * x}, 1.0, np.ones(rows), global_batch=8, towers=4)
        except mt.MultitowerError as error:
            return str(error)

    other = {name: leaf + here for name, leaf in first_params().items()}
    cut = {"stages": 2}
    calls = {"sync_every": 4, "steps_per_call": 4}
    found = {
        "batches of a call": texts_of_all(said([part(0, 24)] * (3 - here), **calls)),
        "stages": said(part(0, 24), other, **cut),
        "one replica over processes": said(part(0, 24), **cut, layout=(1, 2)),
        "a part of the batch": said(part(24 * here, 24)),
        "fewer rows": said(part(0, 24 - 8 * here)),
        "parameters": said(part(0, 24), other),
        "towers": said(part(0, 24), towers=4 + here),
        "alike": said(part(0, 24)),
        "metrics": said(
            part(0, 24),
            loss=lambda w, x: (per_row(w, x), {"more": per_row(w, x)} if here else {}),
        ),
        "code": said(part(0, 24), loss=lambda w, x: per_row(w, x) * (2 if here else 3)),
        "steps": texts_of_all(fit(steps=2 + here)),
        "learning rate": fit(rate=0.1 + here),
        "rows to score": texts_of_all(score(24 - 8 * here)),
    }
    with warnings.catch_warnings(record=True) as told:
        add = mt.make_parallel(
            lambda x, y, empty: x + y, towers=4, devices=devices, in_axes=(0, None, None)
        )
        add(np.ones(8), np.float32(here), np.zeros((0, 3)))
    return found | {"an argument": "".join(str(one.message) for one in told)}


def texts(devices=None):
    """One text is short, and the other longer than a line may be."""
    return texts_of_all("\N{DEGREE SIGN}" * (1 + 5000 * jax.process_index()))


def texts_after_a_late_program():
    """Texts, while a program with one device of each process has not yet sent what it has.

    Process 1 takes long before it sends; with the product, XLA does not wait for the program.
    """
    firsts = {one.process_index: one for one in reversed(jax.devices())}
    own = [firsts[process] for process in range(jax.process_count())]
    split = jax.NamedSharding(jax.sharding.Mesh(np.array(own), "p"), jax.P("p"))

    def late(x):
        times = jnp.where(lax.axis_index("p") == 1, 30_000_000, 0)
        z = lax.fori_loop(0, times, lambda _, z: jnp.sin(z) + x[0], x[0])
        product = jnp.full((300, 300), z) @ jnp.full((300, 300), z)
        return lax.all_gather(jnp.full(512, z) + 0 * product.sum(), "p")

    gather = jax.jit(jax.shard_map(
        late, mesh=split.mesh, in_specs=jax.P("p"), out_specs=jax.P(), check_vma=False
    ))  # fmt: skip
    ones = jax.device_put(np.ones(1, np.float32), own[jax.process_index()])
    given = jax.make_array_from_single_device_arrays((len(own),), split, [ones])
    own_words = f"process {jax.process_index()} of two"
    jax.block_until_ready(gather(given))
    texts_of_all(own_words)  # all is compiled, and the processes are connected
    found = gather(given)
    texts = texts_of_all(own_words)
    return [texts, np.asarray(found.addressable_data(0))[:, 0].tolist()]


def meeting(devices=None, num_stages=None):
    """Towers that meet, forward and backward: sums, all rows, and who is who.

    In stages also forward alone, for two batches: rows, and what the first stage makes of them.
    """

    def forward(params, rows):
        z = jnp.tanh(rows["x"] @ params["in"])
        z = mt.cut(z - lax.pmean(z.mean(0), "towers"))
        alike = z @ mt.all_rows(z).T
        right = jnp.take_along_axis(alike, (mt.row_index(z) ^ 1)[:, None], 1)[:, 0]
        return alike, right * params["out"].mean(), z

    def loss(params, rows):
        alike, right, _ = forward(params, rows)
        return jax.nn.logsumexp(alike, axis=1) - right

    where = {"towers": TOWERS, "stages": num_stages, "devices": devices}
    step = mt.train_step(loss, optax.adam(1e-2), **where)
    state, history = step.init(first_params()), []
    for number in range(2):
        state, metrics = step(state, batch(number, 32))
        history.append(metrics)
    if num_stages is not None:
        infer = mt.make_parallel(forward, in_axes=(None, 0), **where)
        found = [infer(first_params(), batch(number, rows)) for number, rows in ((0, 32), (1, 16))]
        history.append(jax.tree.map(whole_on_host, found))
    return mt.fingerprint((state, history))


WHATS = {
    "same_bits": same_bits,
    "meeting": meeting,
    "local": local,
    "stages": stages,
    "fast": fast,
    "functions": functions,
    "some_functions": functools.partial(functions, cases=((None, (13,)), (TOWERS, (32,)))),
    "sharded": sharded,
    "shards": shards,
    "own_rows": own_rows,
    "global_arrays": global_arrays,
    "negative_zeros": negative_zeros,
    "unlike": unlike,
    "texts": texts,
    "texts_after_a_late_program": texts_after_a_late_program,
    "float16": float16,
    "local_calls": local_calls,
    "local_run": local_run,
    "stages_elsewhere": functools.partial(stages, elsewhere=True),
    "stages_that_meet": functools.partial(meeting, num_stages=2),
}


def main(port, num_processes, process, num_devices, *whats):
    together = {}
    if port != "0":
        together = dict(
            distributed=True,
            coordinator=f"127.0.0.1:{port}",
            num_processes=int(num_processes),
            process_id=int(process),
        )
    mt.configure(simulated_devices=int(num_devices), **together)
    found = {what: WHATS[what]() for what in whats}
    if process == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
