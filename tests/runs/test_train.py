"""A run: the same bits on any number of devices, numbers that mean what they say."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.recipes import DataSets, Optimizer, Recipe
from multitower.runs.options import RunOptions
from multitower.runs.pipeline import describe_pipeline, pipeline_in_words, planned_pipeline
from multitower.runs.plan import plan
from multitower.runs.setup import RecipeJob
from multitower.runs.train import run, score
from multitower.stages.layout import lay_out
from multitower.stages.order import Segments
from multitower.training.observe import EventFiles

TRUE = np.array([1.0, -2.0, 3.0], np.float32)


def load():
    inputs = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    data = {"x": inputs, "y": inputs @ TRUE}
    return DataSets({k: v[:70] for k, v in data.items()}, {k: v[70:] for k, v in data.items()})


def metrics(params, batch):
    error = batch["x"] @ params - batch["y"]
    return {"loss": error**2, "accuracy": (jnp.abs(error) < 0.1).astype(jnp.float32)}


def loss(params, batch):
    scores = metrics(params, batch)
    return scores["loss"], {"accuracy": scores["accuracy"]}


def noisy(batch, generator):
    return {**batch, "x": batch["x"] + generator.normal(0, 1e-3, batch["x"].shape).astype("f4")}


LINE = Recipe(
    name="line",
    data=load,
    init=lambda key: jax.random.uniform(key, (3,)),
    loss=loss,
    metrics=metrics,
    optimizer=lambda steps: optax.adam(optax.cosine_decay_schedule(0.3, steps)),
    steps=200,
    global_batch=16,
    distort=noisy,
)


def deep(params, batch):
    return {"loss": (mt.cut(jnp.tanh(batch["x"] @ params["in"])) @ params["out"]) ** 2}


DEEP = dataclasses.replace(
    LINE,
    init=lambda key: {"in": jax.random.uniform(key, (3, 2)) / 3, "out": jnp.ones(2)},
    loss=lambda params, batch: deep(params, batch)["loss"],
    metrics=deep,
)


def looking(key):
    params = DEEP.init(key)
    assert float(params["out"][0]) == 1  # no function that can be traced
    return params


def by_value(key):
    params = DEEP.init(key)
    return {"in": params["in"], "out": params["out"][params["out"] > 0]}  # nor this one


IN_STAGES = RunOptions(devices=2, towers=4, stages=2, steps=2)


@pytest.mark.parametrize(
    ("init", "options", "is_function"),
    [
        (DEEP.init, IN_STAGES, True),
        (looking, IN_STAGES, False),
        (by_value, IN_STAGES, False),
        (DEEP.init, RunOptions(devices=2, shard_params=True), True),
        (DEEP.init, RunOptions(), False),
    ],
)
def test_a_run_of_a_model_in_parts_makes_each_array_where_it_lives(init, options, is_function):
    # The lie: a model that lies whole on the first device.
    recipe = dataclasses.replace(DEEP, init=init)
    params = RecipeJob.of(recipe, options, None).first_state()["params"]
    assert callable(params) is is_function
    found = params() if is_function else params
    assert mt.fingerprint(found) == mt.fingerprint(DEEP.init(jax.random.key(0)))


@pytest.mark.slow
def test_weights_made_in_stages_are_those_of_arrays():
    # The lie: other random numbers on another device.
    made, whole = (dataclasses.replace(DEEP, init=init) for init in (DEEP.init, looking))
    assert run(made, IN_STAGES)["fingerprint"] == run(whole, IN_STAGES)["fingerprint"]


@pytest.mark.slow
def test_a_run_with_stages_says_where_they_run_and_how_long_they_wait():
    # The lies: two devices that are counted as one, a bubble of another number of towers.
    options = RunOptions(devices=2, towers=4, stages=2, steps=1)
    result = run(DEEP, options)
    assert (result["devices"], result["placement"]) == (
        2, {"cpu:0": [0, 1, 2, 3], "cpu:1": [0, 1, 2, 3]},
    )  # fmt: skip
    pipeline = json.loads(json.dumps(result["pipeline"]))
    planned = planned_pipeline(options)
    assert planned == {name: pipeline[name] for name in ("stages", "layout", "towers")}
    assert (pipeline["stages"], pipeline["layout"], pipeline["towers"]) == (2, [1, 2], 4)
    assert pipeline["least_bubble"] == pytest.approx(1 / 5)
    # Four towers: device 0 begins with a forward program, and ends when the last one is back.
    assert pipeline["timeline"][0] == [0, 0, 0, 0, "forward", 0, 1]
    assert pipeline["timeline"][-1] == [0, 0, 0, 3, "backward", 15, 18]
    assert pipeline["bubble"] == pytest.approx(1 - (4 * 4 + 4 * 3) / (2 * 18), abs=1e-4)
    words = (
        "2 stages, 1 replica of 2 devices wait for 22 % of a step (4 towers pass; at least 20 %)"
    )
    assert pipeline_in_words(pipeline) == words
    # Where nothing is computed again, the order of the programs has the bubble of the formula.
    layout = lay_out(jax.devices()[:2], 4, 2, (1, 2))
    segments = Segments((0, 1), (0, 0), (1, 1), (True, False))
    assert json.loads(json.dumps(describe_pipeline(layout, segments))) == pipeline
    kept = describe_pipeline(layout, segments, remat=False)
    assert kept["bubble"] == kept["least_bubble"] == pytest.approx(1 / 5)
    assert kept["timeline"][-1][-1] == 15  # four towers, three units each, and one tower alone


@pytest.mark.slow
def test_a_recipe_learns_with_its_own_numbers():
    result = run(LINE, RunOptions(devices=2))
    assert (result["recipe"], result["steps"], result["batch_size"]) == ("line", 200, 16)
    assert (result["towers"], result["devices"], result["same_bits"]) == (2, 2, False)
    assert result["test_accuracy"] == 1.0
    assert result["test_loss"] < 1e-3
    assert result["examples_per_s"] > 0
    assert result["seconds"] > 0


@pytest.mark.slow
def test_with_towers_the_fingerprint_does_not_depend_on_the_devices():
    # 22 rows do not fill 8 towers evenly, and 8 towers not 3 devices.
    options = RunOptions(towers=8, steps=5, global_batch=22, seed=3)
    results = [run(LINE, dataclasses.replace(options, devices=n)) for n in (1, 2, 3, 8)]
    same = ("fingerprint", "test_loss", "test_accuracy", "towers", "same_bits")
    assert len({tuple(result[key] for key in same) for result in results}) == 1
    assert [result["devices"] for result in results] == [1, 2, 3, 8]


def test_the_fingerprint_is_that_of_the_whole_state_of_a_loop_by_hand():
    from multitower.data.batches import make_batch

    options = RunOptions(devices=1, towers=2, steps=3, seed=5)
    step = mt.train_step(loss, LINE.optimizer(3), devices=1, towers=2)
    state = step.init(LINE.init(jax.random.key(5)))
    for number in range(3):
        rows = {"global_batch": 16, "seed": 5, "step": number, "distort": noisy}
        state, _ = step(state, make_batch(load().train, **rows))
    assert run(LINE, options)["fingerprint"] == mt.fingerprint(state)


@pytest.mark.slow
def test_another_seed_is_another_run():
    results = [run(LINE, RunOptions(devices=1, steps=1, seed=seed)) for seed in (0, 1, 2**32 - 1)]
    assert len({result["fingerprint"] for result in results}) == 3


@pytest.mark.slow
def test_every_step_is_reported_once_and_in_order():
    seen = []
    run(LINE, RunOptions(devices=2, steps=4), seen.append)
    assert [(now.step, now.num_steps) for now in seen] == [(n, 4) for n in (1, 2, 3, 4)]
    assert all(set(now.metrics) == {"loss", "accuracy"} for now in seen)
    assert seen[0].examples_per_s is None
    assert all(now.examples_per_s > 0 for now in seen[1:])


@pytest.mark.slow
def test_a_recipe_clips_unless_the_run_says_otherwise():
    clipped = dataclasses.replace(LINE, clip_norm=0.1)
    options = RunOptions(devices=1, steps=2)
    found = [
        run(*how)["fingerprint"]
        for how in (
            (LINE, options),
            (clipped, options),
            (LINE, dataclasses.replace(options, clip_norm=0.1)),
            (clipped, dataclasses.replace(options, clip_norm=0.2)),
        )
    ]
    assert found[1] == found[2]
    assert len(set(found)) == 3


@pytest.mark.slow
def test_mixed_precision_is_that_of_a_step_by_hand():
    from multitower.data.batches import make_batch

    options = RunOptions(devices=1, towers=2, steps=1, compute_dtype="bfloat16")
    step = mt.train_step(loss, LINE.optimizer(1), devices=1, towers=2, compute_dtype=jnp.bfloat16)
    batch = make_batch(load().train, global_batch=16, seed=0, step=0, distort=noisy)
    state, _ = step(step.init(LINE.init(jax.random.key(0))), batch)
    assert run(LINE, options)["fingerprint"] == mt.fingerprint(state)
    wide = [dataclasses.replace(options, compute_dtype=dtype) for dtype in (None, "float32")]
    assert len({run(LINE, one)["fingerprint"] for one in (options, *wide)}) == 2


def test_another_compute_dtype_is_refused():
    with pytest.raises(mt.RunError, match="compute_dtype=int8: say float32, bfloat16 or float16"):
        RunOptions(compute_dtype="int8")


@pytest.mark.slow
def test_one_step_has_no_rate():
    # The lie: a rate that is mostly the compiler's time.
    assert run(LINE, RunOptions(devices=1, steps=1))["examples_per_s"] is None


@pytest.mark.filterwarnings("ignore:keep_best='loss' and best='max'")
def test_a_directory_holds_all_that_a_run_leaves(tmp_path):
    # Two test phases in one run, and the last one only once. The loss falls, so that the highest
    # one is not the last: who kept the last state, or the lowest score, would be seen.
    seen = []
    options = RunOptions(devices=2, towers=4, steps=4, evaluate_every=2, keep_best="loss")
    result = run(LINE, options, seen.append, directory=tmp_path)
    assert [(now.phase, now.step) for now in seen] == [
        ("train", 1), ("train", 2), ("test", 2), ("train", 3), ("train", 4),
    ]  # fmt: skip
    names = {".lock", "best", "checkpoints", "events"}
    names |= {"metrics.jsonl", "report.html", "result.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result["placement"] == {"cpu:0": [0, 1], "cpu:1": [2, 3]}
    assert set(result["best"]) == {"step", "loss", "accuracy"}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tests = {line["step"]: line["loss"] for line in lines if line["phase"] == "test"}
    assert list(tests) == [2, 4]
    assert tests[2] > tests[4]
    assert (result["best"]["step"], result["best"]["loss"]) == (2, pytest.approx(tests[2]))
    scored = score(LINE, options, tmp_path, best=True)
    assert scored["step"] == result["best"]["step"]
    assert scored["test_loss"] == result["best"]["loss"]
    assert score(LINE, options, tmp_path)["fingerprint"] == result["fingerprint"]


@pytest.mark.slow
def test_a_loader_of_test_batches_and_options_of_numpy(tmp_path):
    # The lies: a run that ends with a score, and cannot be scored again; raw errors of JSON.
    test = load().test

    class Loader:
        def __iter__(self):
            return ({name: rows[i : i + 10] for name, rows in test.items()} for i in (0, 10))

    data = lambda: DataSets(load().train, Loader())
    recipe = dataclasses.replace(LINE, data=data, options={"rate": np.float32(0.5)})
    options = RunOptions(steps=2, evaluate_every=1, keep_best="loss", best="min")
    job = RecipeJob.of(recipe, options, tmp_path)
    job.check_scores()
    assert job.facts()["options"]["rate"] == 0.5
    recipe = dataclasses.replace(recipe, options={})
    result = run(recipe, options, directory=tmp_path)
    scored = score(recipe, options, tmp_path)
    assert scored["test_loss"] == result["test_loss"]
    assert scored["examples"] is None


def with_values(key):
    return jnp.asarray(np.asarray(jax.random.uniform(key, (3,))))  # as weights from a file


def scaled(params, batch):
    return {name: batch["scale"] * value for name, value in metrics(params, batch).items()}


def of_towers(params, batch):
    found = metrics(params, batch)
    return {**found, "loss": found["loss"] + 0 * jax.lax.pmean(params[0], "towers")}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"init": with_values}, marks=pytest.mark.slow),
        {"data": lambda: DataSets(load().train, {**load().test, "scale": 1.0}), "metrics": scaled},
        {"metrics": of_towers},
    ],
    ids=["values of weights", "a shared number", "other towers"],
)
def test_what_trains_can_keep_the_best(changes, tmp_path):
    # The lie: a check of the name of a score that fails where the run does not.
    recipe = dataclasses.replace(LINE, **changes)
    options = RunOptions(steps=2, evaluate_every=1, keep_best="loss", best="min", devices=2)
    job = RecipeJob.of(recipe, options, tmp_path)
    job.check_scores()
    assert job.test(job.trainer.step.init(**job.first_state())).keys() == {"loss", "accuracy"}
    if "init" in changes:
        plan(recipe, RunOptions(devices=2), machines=1, memory=None)  # raises no error


def test_metrics_that_fail_are_told_before_the_run(tmp_path):
    # The lie: a mistake in metrics is what cannot be checked, and the run trains up to its test.
    options = RunOptions(steps=2, evaluate_every=1, keep_best="loss", best="min", devices=1)
    wrong = dataclasses.replace(LINE, metrics=lambda params, batch: {"loss": batch["labels"]})
    with pytest.raises(KeyError, match="labels"):
        RecipeJob.of(wrong, options, tmp_path).check_scores()
    other = dataclasses.replace(LINE, metrics=of_towers)
    options = dataclasses.replace(options, keep_best="lost")
    with pytest.raises(mt.RunError, match="lost"):
        RecipeJob.of(other, options, tmp_path).check_scores()


@pytest.mark.slow
def test_a_score_with_several_numbers_is_no_error_at_the_end(tmp_path):
    # The lie: a run that has made all of its steps, and has no result.
    pair = lambda params, batch: {**metrics(params, batch), "pair": batch["x"][:, :2]}
    recipe, options = dataclasses.replace(LINE, metrics=pair), RunOptions(steps=1, devices=1)
    result = run(recipe, options, directory=tmp_path)
    assert "test_loss" in result
    assert "test_pair" not in result
    found = score(recipe, options, tmp_path)["test_pair"]
    np.testing.assert_allclose(found, load().test["x"][:, :2].mean(0), atol=1e-6)


@pytest.mark.slow
def test_a_recipe_that_changes_the_working_directory(tmp_path, monkeypatch):
    """Lie: a run in two directories, of which neither can be resumed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def data():
        monkeypatch.chdir(tmp_path / "elsewhere")
        return load()

    # A test phase that the run does not reach is made at its end.
    options = RunOptions(steps=1, devices=1, keep_best="loss", best="min", evaluate_every=9)
    run(dataclasses.replace(LINE, data=data), options, directory=Path("run"))
    assert not list((tmp_path / "elsewhere").iterdir())
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert made >= {"best", "checkpoints", "events", "metrics.jsonl", "report.html", "result.json"}


@pytest.mark.slow
def test_epochs_and_extra_metrics(tmp_path):
    # The lies: an epoch of other rows, a schedule of another length, metrics that nobody writes.
    made = []  # 70 rows in batches of 16, 1.6 times, are 7 steps

    def optimizer(steps):
        made.append(steps)
        rate = optax.cosine_decay_schedule(0.3, steps)
        return Optimizer(optax.adam, rate)

    recipe = dataclasses.replace(LINE, optimizer=optimizer)
    names = "gradient_norm,learning_rate"
    options = RunOptions(devices=1, towers=2, epochs=1.6, extra_metrics=names)
    result = run(recipe, options, directory=tmp_path)
    assert (made, result["steps"], result["epochs"]) == ([7], 7, 1.6)
    assert result["extra_metrics"] == names.split(",")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "train"]
    found = [line["learning_rate"] for line in steps]
    expected = 0.15 * (1 + np.cos(np.pi * np.arange(7) / 7))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert all(line["gradient_norm"] > 0 for line in steps)


def test_a_run_that_ends_early_scores_what_it_has(tmp_path):
    still = dataclasses.replace(LINE, optimizer=lambda steps: optax.sgd(0.0))
    rule = {"early_stopping": "loss:2", "best": "min", "evaluate_every": 1}
    options = RunOptions(devices=1, steps=9, **rule)
    result = run(still, options, directory=tmp_path)
    assert result["steps"] == 3  # the best is that of the first test phase
    assert result["early_stopping"] == "loss:2"
    assert "loss has not improved in the last 2 test phases" in result["stopped"]
    assert json.loads((tmp_path / "result.json").read_text()) == result
    either = dataclasses.replace(options, early_stopping="loss:2:min", best="max")
    assert either.stopping_rule() == options.stopping_rule()
    with pytest.raises(mt.RunError, match="early_stopping='lost': the test phase has no such"):
        run(still, dataclasses.replace(options, early_stopping="lost"))


@pytest.mark.slow
def test_trackers_are_told_the_batch_size_that_the_recipe_chose(monkeypatch, tmp_path):
    """Lie: global_batch None beside each of two runs that are compared."""
    told = []

    class Events(EventFiles):
        def __init__(self, directory, texts):
            told.append(json.loads(texts["configuration"].strip("`")))
            super().__init__(directory, texts)

    monkeypatch.setattr("multitower.runs.train.EventFiles", Events)
    run(LINE, RunOptions(devices=1, towers=2), directory=tmp_path)
    assert (told[0]["steps"], told[0]["global_batch"]) == (LINE.steps, LINE.global_batch)


def test_every_option_of_a_run_reaches_its_trainer(monkeypatch, tmp_path):
    # The lie: an option that stands in config.json and in the report, and is dropped.
    given = {}
    monkeypatch.setattr(
        "multitower.runs.setup.Trainer", lambda *_, **options: given.update(options)
    )
    chosen = {
        "devices": 2, "towers": 4, "global_batch": 8, "checkpoint_every": 3, "keep_best": "loss",
        "best": "min", "shard_update": True, "shard_params": True, "clip_norm": 0.5, "stages": 2,
        "layout": "1x2", "remat": False, "steps_per_call": 3, "compute_dtype": "bfloat16",
        "sync_every": 4, "asynchronous": True, "max_staleness": 1, "interleave": True,
        "local_state": "average", "momentum_correction": True, "keep_last": 1,
        "profile": "2:3", "extra_metrics": "gradient_norm", "early_stopping": "loss:2",
        "ema_decay": 0.9, "on_nonfinite": "skip",
    }  # fmt: skip
    words = {
        "rotation": "0, 1", "stale_scale": 2, "outer_lr": 0.5, "outer_momentum": 0.0,
        "min_delta": 0.25,
    }  # fmt: skip
    RecipeJob.of(LINE, RunOptions(**chosen, **words, evaluate_every=1), tmp_path)
    assert given.pop("stale_scale")(np.int32(3)) == 1 / 16
    outer = given.pop("outer_optimizer")
    assert outer.update(np.float32(4), outer.init(np.float32(0)))[0] == -2
    wanted = {
        **chosen,
        "extra_metrics": ["gradient_norm"],
        "early_stopping": mt.EarlyStopping("loss", patience=2, min_delta=0.25, best="min"),
        "layout": (1, 2),
        "rotation": (0, 1),
        "profile": (2, 3),
        "run_dir": tmp_path,
    }
    wanted["updates"] = "asynchronous" if wanted.pop("asynchronous") else "synchronous"
    wanted["hooks"] = []  # who runs it says what is shown
    assert given == wanted
    RecipeJob.of(dataclasses.replace(LINE, ema_decay=0.5), RunOptions(), None)
    assert (given["ema_decay"], given["on_nonfinite"]) == (0.5, "stop")
    names = {field.name for field in dataclasses.fields(RunOptions)}
    # The first ones are the loop's and the data's, and looked at elsewhere; "log" is a hook's.
    assert names == {*chosen, *words, "steps", "epochs", "seed", "evaluate_every", "log"}


def test_what_is_said_of_a_run_directory_is_for_a_job_that_has_one():
    """Lie: a warning that nothing is kept, where `verify` or `resume` makes a job to look at."""
    options = RunOptions(checkpoint_every=2, keep_last=7, profile="2:3")
    RecipeJob.of(LINE, options, None)  # warnings are errors


def test_every_option_of_a_plan_reaches_it(monkeypatch):
    # The lie: bytes of a plain step, whatever was asked for.
    given = {}
    monkeypatch.setattr(
        "multitower.runs.plan.plan_step", lambda *_, **options: given.update(options)
    )
    chosen = {
        "devices": 2, "towers": 4, "clip_norm": 0.5, "ema_decay": 0.9, "sync_every": 4,
        "compute_dtype": "bfloat16", "local_state": "average", "max_staleness": 1,
    }  # fmt: skip
    words = {"outer_lr": 0.5, "outer_momentum": 0.0, "asynchronous": True, "rotation": "0,1"}
    plan(LINE, RunOptions(**chosen, **words), machines=3, memory="1GB")
    assert given.pop("outer_optimizer").init(np.ones(3)) == optax.sgd(0.5).init(np.ones(3))
    others = {"updates": "asynchronous", "rotation": (0, 1), "machines": 3, "memory": "1GB"}
    assert given == {**chosen, **others, "model_state": None, "rng": None}


def test_half_of_an_outer_optimizer_has_the_other_half_of_the_default():
    # The lie: --outer-lr 0.5 that also drops the momentum.
    assert RunOptions(sync_every=2).outer_optimizer() is None
    gradient = np.float32(1)
    for given, meant in (
        ({"outer_lr": 0.5}, optax.sgd(0.5, momentum=0.9, nesterov=True)),
        ({"outer_momentum": 0.5}, optax.sgd(0.7, momentum=0.5, nesterov=True)),
    ):
        found = []
        for optimizer in (RunOptions(sync_every=2, **given).outer_optimizer(), meant):
            _, state = optimizer.update(gradient, optimizer.init(gradient))
            found.append(optimizer.update(gradient, state)[0])
        assert found[0] == found[1]


def test_a_run_that_diverges_stops_and_says_where_or_skips_steps():
    wild = dataclasses.replace(LINE, optimizer=lambda steps: optax.sgd(1e18))
    with pytest.raises(mt.NonFiniteError, match=r"step [2-6] of 200: the loss is (nan|inf)"):
        run(wild, RunOptions(devices=1))
    seen = []
    result = run(wild, RunOptions(devices=1, steps=4, on_nonfinite="skip"), seen.append)
    assert (result["test_loss"], result["test_accuracy"]) == (None, 0)  # JSON has no infinity
    assert [now.metrics["skipped"] for now in seen].count(1) >= 1


@pytest.mark.slow
def test_a_resume_without_a_profile_tells_of_none(tmp_path):
    """Lie: "the profile of steps None", since the run before it had one."""
    (tmp_path / "profile").mkdir()
    options = RunOptions(devices=1, steps=1, global_batch=8)
    assert "profile" not in run(LINE, options, directory=tmp_path, resume=True)


def test_the_first_rows_are_those_of_the_first_batch_with_its_distortions():
    """Lie: pictures and a checksum of rows that the model never sees."""
    shuffled = lambda batch, generator: {**batch, "x": generator.permutation(batch["x"])}
    recipe = dataclasses.replace(LINE, distort=shuffled)
    job = RecipeJob.of(recipe, RunOptions(devices=1), None)
    batch = next(job.batches(0))["x"]
    for num_rows in (3, 16, 20):
        np.testing.assert_array_equal(job.first_batch(num_rows)["x"], batch[:num_rows])


def test_a_test_set_that_cannot_be_scored_is_refused_before_training(tmp_path):
    """Lie: a run that has made all its steps, and ends in an error of a batch without rows."""
    train, test = load()
    of_test = lambda rows: dataclasses.replace(LINE, data=lambda: DataSets(train, rows))
    empty = of_test({name: rows[:0] for name, rows in test.items()})
    with pytest.raises(mt.RunError, match=r"the test set of line has no examples.*DataSets\("):
        run(empty, RunOptions(devices=1, steps=2), directory=tmp_path)
    uneven = of_test({**test, "y": test["y"][1:]})
    with pytest.raises(mt.BatchError, match=r"data\.test\['x'\]"):
        run(uneven, RunOptions(devices=1, steps=2), directory=tmp_path)
    assert list(tmp_path.iterdir()) == []  # no step was made


def test_scores_of_the_best_state_that_are_not_finite(tmp_path):
    """Lie: a run that has made all its steps, and ends in an error of its result."""
    unbounded = lambda params, batch: {**metrics(params, batch), "bits": batch["x"][:, 0] * jnp.inf}
    recipe = dataclasses.replace(LINE, metrics=unbounded)
    options = RunOptions(devices=1, steps=1, keep_best="accuracy")
    job = RecipeJob.of(recipe, options, tmp_path)
    job.test(job.trainer.step.init(**job.first_state()))
    best = job.facts()["best"]
    assert (best["step"], best["bits"]) == (0, None)
    assert score(recipe, options, tmp_path, best=True)["test_bits"] is None


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"steps": 0}, mt.RunError, "steps=0"),
        ({"max_staleness": 1}, mt.RunError, "max_staleness=1 is for asynchronous updates: add a"),
        ({"rotation": "0"}, mt.RunError, "rotation=0 is for asynchronous updates"),
        ({"interleave": True}, mt.RunError, r"interleave=True .*: add stages \(--stages\)"),
        ({"remat": False}, mt.RunError, "remat=False is for stages of a model"),
        ({"outer_lr": 1.0}, mt.RunError, r"local updates: add sync_every \(--sync-every\), or lea"),
        ({"min_delta": 1.0}, mt.RunError, "min_delta=1.0 is for early stopping: add early_stopp"),
        ({"sync_every": 2, "local_state": "mean"}, mt.RunError, "say keep or average"),
        ({"sync_every": 2, "outer_momentum": 1.0}, mt.RunError, "0 or more, and below 1"),
        ({"asynchronous": True, "stale_scale": -1.0}, mt.RunError, "stale_scale=-1.0: it must be"),
        ({"asynchronous": True, "rotation": "0;1"}, mt.RunError, "such as 0,1,0,2"),
        ({"keep_last": 0}, mt.RunError, "keep_last=0: it must be 1 or more"),
        ({"global_batch": 0}, mt.RunError, "batch of 0 examples"),
        ({"seed": -1}, mt.RunError, "seed=-1"),
        ({"seed": 2**32}, mt.RunError, "use 0 to 4294967295"),
        ({"evaluate_every": -1}, mt.RunError, "evaluate_every=-1"),
        ({"best": "highest"}, mt.RunError, "say max or min"),
        ({"steps": 3, "epochs": 2}, mt.RunError, "both steps=3 and epochs=2: a run has one"),
        ({"on_nonfinite": "go on"}, mt.RunError, "say stop or skip"),
        ({"ema_decay": 2.0}, mt.ArgumentError, "ema_decay=2.0: it must be a number from 0 to 1"),
        ({"epochs": 0}, mt.RunError, "epochs=0: it must be a number above 0"),
        ({"early_stopping": "loss"}, mt.RunError, "add evaluate_every"),
        ({"early_stopping": "loss:", "evaluate_every": 1}, mt.RunError, "such as loss:5:min"),
        ({"early_stopping": "loss:0", "evaluate_every": 1}, mt.RunError, "NAME:PATIENCE"),
        ({"extra_metrics": "norm"}, mt.ArgumentError, "'gradient_norm' and 'learning_rate'"),
        ({"towers": 0}, mt.DeviceError, "towers=0"),
    ],
)
def test_options_that_make_no_sense_are_errors_before_anything_starts(wrong, error, message):
    with pytest.raises(error, match=message):
        RunOptions(**wrong)


@pytest.mark.slow
def test_options_that_json_does_not_have_are_in_the_result(tmp_path):
    """Lie: a run that is finished, and has no result because its recipe has no limit."""
    options = {"limit": float("inf")}
    recipe = dataclasses.replace(
        LINE, options=options, about_data=lambda: {"mean": np.float32(0.5)}, clip_norm=np.float32(9)
    )
    run(recipe, RunOptions(steps=2, devices=1), directory=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["options"] == {"limit": "inf", "mean": 0.5}
    assert result["clip_norm"] == 9


@pytest.mark.slow
def test_a_report_without_samples_is_a_report(tmp_path, monkeypatch):
    """Lie: a finished run that fails, as one device has no room for a model that is split."""

    def no_room(*_):
        raise MemoryError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr("multitower.runs.train.sample_predictions", no_room)
    with pytest.warns(mt.MultitowerWarning, match="no samples: MemoryError: RESOURCE_EXHAUSTED"):
        run(LINE, RunOptions(steps=2, devices=1), directory=tmp_path)
    assert (tmp_path / "report.html").exists()
