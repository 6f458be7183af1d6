"""Scaling: what more devices give, told as it is."""

import io
import itertools
import json
import math
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import multitower as mt
import places
from faults import change_results
from multitower.cli.main import main
from multitower.engines import totals
from multitower.hardware.memory import MemoryWatch, PeakMemory
from multitower.recipes.catalog import find_recipe
from multitower.runs.options import RunOptions
from multitower.scaling.fit import fit_step_times, held_out
from multitower.scaling.losses import compare_losses
from multitower.scaling.measure import ScalingOptions, scale
from multitower.scaling.report import write_scaling
from multitower.scaling.run import LEAD_STEPS, TAIL_STEPS, ScalingRun, TurnSteps
from multitower.scaling.stage_times import pipeline_tables, waiting_in_words
from multitower.scaling.summary import not_comparable
from multitower.scaling.words import speed_tables, split_in_words
from multitower.steps import runner as step_runner
from multitower.training.fitting.calls import sizes_of_calls
from multitower.training.fitting.settings import MOST_STEPS_PER_CALL

FILE = str(places.CIRCLE)
RECIPE = find_recipe(FILE, {})
STRONG = ScalingOptions(kinds=("strong",), steps=1, rounds=1)
FLAGS = ["--steps", "2", "--rounds", "3", "--batch-size", "12"]
FAST_PARTS = {"input_s", "host_s", "step_s"}
ALL_PARTS = {*FAST_PARTS, "tower_programs_s", "reduction_s", "update_s"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The directory of a measurement in the fast mode, where a run has been before."""
    directory = tmp_path_factory.mktemp("scale")
    (directory / "report.html").write_text("of the run")
    flags = [*FLAGS, "--strong", "--predict", "6", "--run-dir", str(directory)]
    assert main(["scale", FILE, "--devices", "4,1,2,1", *flags]) == 0
    return directory


@pytest.fixture(scope="module")
def result(measured):
    return json.loads((measured / "scale.json").read_text())


@pytest.mark.slow
def test_the_numbers_follow_from_the_turns(result):
    """Lie: a speed-up that is not the ratio of what was measured."""
    assert result["devices"] == [entry["devices"] for entry in result["strong"]] == [1, 2, 4]
    assert result["weak"] is None
    base = np.array(result["strong"][0]["step_s"]["turns"])
    for entry in result["strong"]:
        turns = np.array(entry["step_s"]["turns"])
        assert len(turns) == 3
        assert (turns > 0).all()
        assert entry["step_s"]["median"] == np.median(turns)
        assert entry["examples_per_s"] == pytest.approx(12 / np.median(turns))
        assert entry["speedup"]["median"] == pytest.approx(np.median(base / turns))
        efficiency = entry["speedup"]["median"] / entry["devices"]
        assert entry["efficiency"]["median"] == pytest.approx(efficiency)
        spread = [entry["speedup"][f"{which}_quartile"] for which in ("lower", "upper")]
        assert spread[0] <= entry["speedup"]["median"] <= spread[1]
        assert entry["recompilations"] == 0
        assert {name for name, value in entry["split"].items() if value} == FAST_PARTS
        assert entry["split"]["host_s"] <= entry["split"]["step_s"]


def test_what_a_device_holds_is_seen(result):
    """Lie: memory of all the runs in this process taken for one."""
    state = 3 * 4 * (3 * 32 + 33)  # Adam: parameters and two moments
    for entry in result["strong"]:
        memory = entry["memory"]
        assert memory["source"] == "live arrays"
        assert len(memory["per_device_bytes"]) == entry["devices"]
        assert state < memory["peak_bytes"] < 2 * state


@pytest.mark.slow
def test_the_losses_are_those_of_train(result, tmp_path):
    """Lie: fast steps of some other training."""
    assert result["losses"]["same"] is True
    assert result["losses"]["steps"] == 10
    run = ScalingRun(RECIPE, RunOptions(devices=1, global_batch=12, steps=20))
    run.warm_up(1)
    run.take_turn(1)
    flags = ["--devices", "1", "--batch-size", "12", "--steps", str(len(run.losses))]
    assert main(["train", FILE, *flags, "--run-dir", str(tmp_path)]) == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    trained = [line["loss"] for line in map(json.loads, lines) if line.get("phase") != "test"]
    assert run.losses == pytest.approx(trained, rel=1e-6)
    assert len(run.losses) == 2 * (LEAD_STEPS + 1 + TAIL_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "counted", "said"),
    [
        (["--sync-every", "3"], 3, "of which one in 3 ends with a meeting of the towers"),
        (["--asynchronous", "--max-staleness", "1"], 2, "A step is one update, and a time is the"),
    ],
)
def test_local_and_asynchronous_updates_are_measured(flags, counted, said, tmp_path, capsys):
    """Lies: another training than train's; rounds that are cut; parts of steps that differ."""
    training = ["--towers", "4", "--batch-size", "12", *flags]
    turns = ["--steps", "2", "--rounds", "1", "--devices", "1,2"]
    assert main(["scale", FILE, *training, *turns, "--run-dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "scale.json").read_text())
    assert (found["steps"], found["counted_steps"]) == (2, counted)
    assert found["losses"]["rule"] == "the same bits"
    assert found["losses"]["same"] is True
    for entry in found["strong"]:
        assert set(entry["split"].values()) == {None}
        assert entry["speedup"]["median"] > 0
    printed = capsys.readouterr().out
    assert said in printed
    assert "ms in each part" not in printed
    assert said in (tmp_path / "scale.html").read_text()
    losses = found["strong"][0]["losses"]
    length = ["--steps", str(len(losses)), "--devices", "1", "--run-dir", str(tmp_path)]
    assert main(["train", FILE, *training, *length]) == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    trained = [line["loss"] for line in map(json.loads, lines) if line.get("phase") != "test"]
    assert losses == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--sync-every 4", "--sync-every 4 without --towers: every number of devices would have"),
        ("--asynchronous", "--asynchronous without --towers: every number of devices would have"),
        ("--sync-every 4 --towers 4 --shard-update", "exclude each other: with local updates"),
        ("--asynchronous --towers 4 --layouts 1x1 --stages 2", "--asynchronous and --stages"),
        ("--stages 2 --towers 4 --shard-update", "--stages and --shard-update exclude"),
        ("--asynchronous --towers 4 --layouts 2x1", "--asynchronous over 2 processes: asynch"),
        ("--asynchronous --towers 4 --max-staleness 2", "makes 3 groups of towers, and 4 towers"),
    ],
)
def test_updates_that_cannot_be_compared_are_refused(flags, said, tmp_path, capsys):
    directory = tmp_path / "run"
    where = [] if "--layouts" in flags else ["--devices", "1,2"]
    assert main(["scale", FILE, *flags.split(), *where, "--run-dir", str(directory)]) == 2
    assert said in capsys.readouterr().err
    assert not directory.exists()


@pytest.mark.parametrize("every", [1, 2, 3, 5, 16, 17, 40])
@pytest.mark.parametrize("num_steps", [1, 7, 40])
def test_rounds_of_local_updates_are_measured_whole_in_calls_too(every, num_steps):
    """Lies: a time that begins or ends in a call; turns with different numbers of meetings."""
    turn = TurnSteps.of(RunOptions(sync_every=every, towers=2), num_steps)
    assert turn.counted >= num_steps
    assert turn.lead >= LEAD_STEPS
    most = min(every, MOST_STEPS_PER_CALL)
    for first in (0, turn.total, 2 * turn.total):
        sizes = sizes_of_calls(most, [every], first=first, last=first + turn.total)
        ends = set(itertools.accumulate(sizes, initial=first))
        assert {first + turn.lead, first + turn.lead + turn.counted} <= ends
        assert turn.counted % every == 0


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("options", [{}, {"asynchronous": True, "towers": 4}])
def test_what_the_host_does_for_a_step_is_counted_in_every_step(options, num_steps, monkeypatch):
    """Lie: a step that is measured from the end of its start on, so that --steps 1 is too fast."""
    clock = SimpleNamespace(now=0.0)

    def step(state, batch):
        clock.now += 5  # on the host; devices take no time
        return state, {"loss": np.float32(1)}

    time_of_clock = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr("multitower.scaling.run.time", time_of_clock)
    run = ScalingRun.__new__(ScalingRun)
    calls = lambda first, last: (SimpleNamespace(batch=n) for n in range(first, last))
    trainer = SimpleNamespace(step=step)
    run._job = SimpleNamespace(trainer=trainer, calls=calls, options=RunOptions(**options))
    run._state, run.losses, run.turns_s, run.num_recompilations = None, [], [], 0
    run.take_turn(num_steps)
    assert run.turns_s == [5]


def test_simulated_devices_are_named(measured, result):
    """Lie: a speed-up of one machine's cores."""
    assert result["simulated"] is True
    assert result["host"]["platform"] == "cpu"
    assert {"python", "jax", "numpy"} <= set(result["versions"])
    page = (measured / "scale.html").read_text()
    assert "so they cannot show a speed-up" in page
    from multitower.scaling import plot as scaling_plot

    assert "cannot show a speed-up" in scaling_plot._title(result)
    there = {**result, "simulated": False, "host": {"device_kind": "H100"}}
    assert scaling_plot._title(there) == "circle on H100"


def test_the_files_are_whole_and_need_no_other(measured, result):
    assert (measured / "report.html").read_text() == "of the run"
    picture = (measured / "scale.png").read_bytes()
    image = Image.open(io.BytesIO(picture))
    assert image.format == "PNG"
    assert image.size[0] > 2 * image.size[1]
    assert len(np.unique(np.asarray(image.convert("L")))) > 20
    page = (measured / "scale.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "://" not in page
    assert page.count("<table>") == 5  # speed, split, how, versions, machine
    assert "--devices 4,1,2,1" in result["command"]


def test_error_bars_end_at_the_quartiles():
    """Lie: the distance to the upper quartile below the median."""
    from multitower.scaling import plot as scaling_plot

    drawn = []
    axes = SimpleNamespace(errorbar=lambda _, middle, yerr, **__: drawn.append((middle, *yerr)))
    speedup = {"median": 2.0, "lower_quartile": 1.5, "upper_quartile": 4.0}
    scaling_plot._draw(axes, [1], [{"speedup": speedup}], "speedup", {})
    assert drawn == [([2.0], [0.5], [2.0])]


@pytest.mark.slow
@pytest.mark.parametrize("shard_update", [False, True])
def test_with_towers_all_parts_are_seen_and_all_losses_are_equal(shard_update):
    """Lie: parts of a step that were guessed; or a check that rounding could hide from."""
    options = RunOptions(towers=3, global_batch=12, shard_update=shard_update)
    found = scale(RECIPE, options, [1, 2], replace(STRONG, kinds=(), steps=2))
    assert found["shard_update"] is shard_update
    assert found["weak"] is None
    assert found["losses"] == {
        "same": True,
        "rule": "the same bits",
        "steps": 2 * (LEAD_STEPS + 2 + TAIL_STEPS),
        "largest_difference": 0.0,
        "differences": (),
    }
    for entry in found["strong"]:
        assert set(entry["split"]) == ALL_PARTS
        assert all(value > 0 for value in entry["split"].values())


@pytest.mark.slow
def test_stages_are_measured_as_a_whole_and_each_program_alone(tmp_path):
    # The lies: the time of one stage shown for another; a pipeline of equal work after all.
    options = RunOptions(towers=2, stages=2, global_batch=12)
    found = scale(RECIPE, options, [1, 2], STRONG)
    assert found["losses"]["same"]
    for entry in found["strong"]:
        split = entry["split"]
        assert {name for name, value in split.items() if value is not None} == FAST_PARTS
        pipeline = entry["pipeline"]
        programs = {(stage, kind): time_s for stage, _, kind, time_s in pipeline["programs"]}
        assert programs.keys() == {(0, "forward"), (0, "backward"), (1, "backward")}
        # Of two towers the second one waits for its forward program, and comes back last.
        ends = {(s, tower, kind): end for _, s, _, tower, kind, _, end in pipeline["timeline"]}
        if entry["devices"] == 2:
            expected = programs[0, "forward"] + programs[1, "backward"] * 2
            assert ends[1, 1, "backward"] >= expected - 1e-9
            assert 0 < pipeline["bubble"] < 1
    assert [line[:9] for line in waiting_in_words(found)] == ["2 devices"]
    assert [len(table.rows) for table in pipeline_tables(found)] == [2, 2]
    (page,) = (path for path in write_scaling(tmp_path, found) if path.suffix == ".html")
    assert page.read_text().count("tower 1, stage 1, backward") == 1
    assert "overlap" in split_in_words(found)
    assert speed_tables(found)[0].title.endswith("the same 2 towers, 2 stages")


@pytest.mark.slow
def test_a_slow_part_is_found(monkeypatch):
    """Lie: time of one part shown in another."""
    reduced, pause = totals.Totals._reduced, 0.04

    def slow(*args):
        time.sleep(pause)
        return reduced(*args)

    def slow_input(batch, generator):
        time.sleep(pause)
        return batch

    monkeypatch.setattr(totals.Totals, "_reduced", slow)
    recipe = replace(RECIPE, distort=slow_input)
    how = replace(STRONG, steps=3)
    split = scale(recipe, RunOptions(towers=2, global_batch=4), [1], how)["strong"][0]["split"]
    assert split["input_s"] > pause
    assert split["reduction_s"] > pause
    assert split["tower_programs_s"] < pause > split["update_s"]


def test_a_turn_is_timed_without_its_first_steps(monkeypatch):
    """Lie: the first steps of a turn, with batches that were made before it."""
    run = ScalingRun(RECIPE, RunOptions(devices=1, global_batch=4, steps=20))
    ends = [0.0, 7.0, 8.0, 10.0, 11.0, 15.0]
    monkeypatch.setattr(run, "_train", lambda turn, look: ends[: turn.total])
    run.take_turn(2)
    assert run.turns_s == [(11.0 - 8.0) / 2]


@pytest.mark.slow
def test_weak_scaling_gives_each_device_as_much(monkeypatch):
    """Lie: more devices that each have less to do, called weak."""
    order = []
    take_turn = ScalingRun.take_turn

    def noted(self, num_steps):
        order.append(self._job.options.devices)
        take_turn(self, num_steps)

    monkeypatch.setattr(ScalingRun, "take_turn", noted)
    how = ScalingOptions(kinds=("weak",), steps=1, rounds=2)
    found = scale(RECIPE, RunOptions(global_batch=8), [2, 4], how)
    assert [entry["batch_size"] for entry in found["weak"]] == [8, 16]
    assert found["strong"] is None
    assert found["losses"]["same"] is None
    two, four = (np.array(entry["step_s"]["turns"]) for entry in found["weak"])
    assert found["weak"][1]["speedup"]["median"] == pytest.approx(np.median(2 * two / four))
    assert found["weak"][1]["efficiency"]["median"] == pytest.approx(np.median(two / four))
    assert order == [2, 4, 4, 2]  # neither is always the first


@pytest.mark.slow
def test_another_loss_curve_is_code_1(monkeypatch, tmp_path, capsys):
    """Lie: a speed-up by leaving rows out."""
    feed = step_runner.Feeder.feed

    def fewer(self, parts):
        num_rows = parts.num_rows // len(self._placement.devices)
        return feed(self, parts._replace(num_rows=num_rows))

    monkeypatch.setattr(step_runner.Feeder, "feed", fewer)
    flags = [*FLAGS, "--devices", "1,2", "--strong", "--run-dir", str(tmp_path)]
    assert main(["scale", FILE, *flags]) == 1
    captured = capsys.readouterr()
    assert "Loss curves DIFFER" in captured.out
    assert re.match(r"multitower: step 1: the loss is \S+ on 1 device and ", captured.err)
    assert json.loads((tmp_path / "scale.json").read_text())["losses"]["same"] is False


@pytest.mark.slow
def test_one_bit_of_a_loss_is_a_difference_with_towers(monkeypatch):
    """Lie: bits that are compared with a tolerance."""

    def nearly(_, num_devices, fields, metrics):
        return fields, jax.tree.map(lambda x: x * (1 + 3e-7 * (num_devices - 1)), metrics)

    change_results(monkeypatch, nearly)
    found = scale(RECIPE, RunOptions(towers=2, global_batch=12), [1, 2], STRONG)
    assert found["losses"]["same"] is False
    assert found["losses"]["largest_difference"] < 1e-5


def test_a_recompilation_is_counted(monkeypatch):
    """Lie: compiling taken for training."""
    run = ScalingRun(RECIPE, RunOptions(devices=1, global_batch=12, steps=20))
    run.warm_up(1)
    run.take_turn(1)
    assert run.num_recompilations == 0
    step, forgotten = step_runner.FastRunner.run, []

    def forgetful(self, *arguments):
        if not forgotten:
            self.program._jitted.clear_cache()
            forgotten.append(True)
        return step(self, *arguments)

    monkeypatch.setattr(step_runner.FastRunner, "run", forgetful)
    for _ in range(2):  # also after a turn without one
        run.take_turn(1)
        assert run.num_recompilations == 1


def test_what_is_measured_if_nothing_else_is_said():
    """Lies: weak scaling of a fixed number of towers; a prediction from one number of devices."""
    assert ScalingOptions().kinds_on([1, 2], None) == ("strong", "weak")
    assert ScalingOptions().kinds_on([1, 2], 2) == ("strong",)
    with pytest.raises(mt.RunError, match=r"different numbers of devices.* there are 2"):
        ScalingOptions(predict=8).kinds_on([2, 1, 2], None)


@pytest.mark.parametrize("rounds", ["log2 devices", "devices - 1"])
def test_the_fit_finds_what_the_points_were_made_of(rounds):
    """Lie: a prediction from other coefficients."""
    term = {"log2 devices": math.log2, "devices - 1": lambda count: count - 1}[rounds]

    def step_s(count):
        return 0.1 / count + 0.02 * 2 * (count - 1) / count + 0.003 * term(count)

    points = {count: step_s(count) for count in (1, 2, 4, 8, 16)}
    fit = fit_step_times(points)
    assert fit[:3] == pytest.approx((0.1, 0.02, 0.003), rel=1e-6)
    assert fit.rounds == rounds
    assert fit.step_s(64) == pytest.approx(step_s(64))
    assert all(abs(one.error) < 1e-6 for one in held_out(points))


def test_a_held_out_point_is_not_in_the_fit():
    """Lie: an error on points that the fit has seen."""
    points = {1: 0.8, 2: 0.4, 4: 0.2, 8: 0.2}  # the last one twice as slow as the others foretell
    last = held_out(points)[-1]
    assert (last.devices, last.measured_s) == (8, 0.2)
    assert last.predicted_s == pytest.approx(0.1)
    assert last.error == pytest.approx(-0.5)


def test_no_coefficient_is_negative():
    # Faster than ideal: a plain least-squares fit would give the latency back as a gift.
    fit = fit_step_times({1: 1.0, 2: 0.4, 4: 0.15})
    assert min(fit[:3]) >= 0


def test_the_prediction_is_that_of_the_fit(result):
    prediction = result["prediction"]
    points = {entry["devices"]: entry["step_s"]["median"] for entry in result["strong"]}
    assert prediction["devices"] == 6
    assert prediction["step_s"] == pytest.approx(fit_step_times(points).step_s(6))
    assert prediction["speedup"] == pytest.approx(points[1] / prediction["step_s"])
    assert [one["devices"] for one in prediction["held_out"]] == [1, 2, 4]


def test_losses_within_rounding_agree_and_others_do_not():
    curve = [0.7, 0.6, 0.5]
    assert compare_losses({1: curve, 2: [0.7001, 0.6, 0.5]}, exact=False).same
    assert not compare_losses({1: curve, 2: [0.7001, 0.6, 0.5]}, exact=True).same
    late = {1: [1.0] * 11, 2: [1.0] * 10 + [2.0]}
    assert compare_losses(late, exact=False).same  # rounding has grown by then
    assert not compare_losses(late, exact=True).same
    assert compare_losses({1: [0.0], 2: [0.0]}, exact=False).largest_difference == 0
    assert compare_losses({1: curve}, exact=True).same is None
    assert compare_losses({1: [1e-8], 2: [3e-8]}, exact=False).same  # rounding of larger numbers


def test_what_differs_by_tower_is_compared_with_a_number_of_towers_alone():
    """Lies: a false alarm at dropout and BatchNorm; or no alarm although the towers are fixed."""
    noisy = replace(RECIPE, loss=lambda params, batch, *, rng: 0)
    with_state = replace(RECIPE, model_state=lambda params: 0)
    for recipe in (noisy, with_state):
        assert "--towers T fixes" in not_comparable(recipe, RunOptions())
        assert not_comparable(recipe, RunOptions(towers=2)) is None
    assert not_comparable(RECIPE, RunOptions()) is None


@pytest.mark.slow
def test_noise_of_towers_is_no_difference():
    """Lie: a false alarm, as the masks of dropout depend on the number of towers."""

    def noisy(params, batch, *, rng):
        keep = jax.random.bernoulli(rng, 0.5, (len(batch["x"]),))
        return jnp.where(keep, RECIPE.loss(params, batch)[0], 0.0)

    found = scale(replace(RECIPE, loss=noisy), RunOptions(global_batch=12), [1], STRONG)
    assert found["losses"]["same"] is None
    assert "--towers T" in found["losses"]["rule"]


class Accelerator:
    """A device whose allocator tells."""

    platform = "gpu"

    def __init__(self, *told):
        self._told = list(told)

    def memory_stats(self):
        return self._told.pop(0)


def test_an_allocators_peak_is_ours_or_not_known():
    """Lie: the peak of an earlier run, for an allocator forgets none."""
    before = {"bytes_in_use": 40, "peak_bytes_in_use": 100}
    higher = {"bytes_in_use": 60, "peak_bytes_in_use": 120}
    watch = MemoryWatch([Accelerator(before, higher), Accelerator(before, before)])
    watch.look()
    peak = watch.peak()
    assert peak == PeakMemory((80, None), "allocator")
    assert peak.largest_bytes() is None
    silent = MemoryWatch([Accelerator(None, None)]).peak()
    assert (silent.source, silent.largest_bytes()) == (None, None)


@pytest.mark.slow
def test_a_training_that_fails_is_no_measurement():
    broken = replace(RECIPE, loss=lambda params, batch: RECIPE.loss(params, batch)[0] * jnp.inf)
    with pytest.raises(mt.NonFiniteError, match="step 1: the loss is inf"):
        scale(broken, RunOptions(global_batch=12), [1], STRONG)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rounds", "0"], "--rounds 0: it must be 1 or more"),
        (["--steps", "0"], "--steps 0: it must be 1 or more"),
        (["--predict", "0"], "--predict 0: it must be 1 or more"),
        (["--predict", "8"], "at least 3 different numbers of devices"),
        (["--weak", "--predict", "8", "--devices", "1,2,4"], "there are 0"),
        (["--weak", "--towers", "2"], "weak scaling with 2 towers"),
        (["--towers", "2", "--devices", "1,4"], "2 towers cannot fill 4 devices"),
        (["--devices", "1,99"], "--devices 99"),
        (["--devices", "one"], "give numbers of devices"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(flags, said, tmp_path, capsys):
    there = [] if "--devices" in flags else ["--devices", "1,2"]
    directory = tmp_path / "new"
    assert main(["scale", FILE, *there, *flags, "--run-dir", str(directory)]) == 2
    assert said in capsys.readouterr().err
    assert not directory.exists()


def test_a_measurement_is_not_overwritten(measured, tmp_path, capsys):
    before = (measured / "scale.json").read_bytes()
    assert main(["scale", FILE, "--devices", "1", "--run-dir", str(measured)]) == 2
    assert "holds another measurement" in capsys.readouterr().err
    assert (measured / "scale.json").read_bytes() == before
    (tmp_path / "file").touch()
    assert main(["scale", FILE, "--devices", "1", "--run-dir", str(tmp_path / "file")]) == 2
    assert "cannot be used" in capsys.readouterr().err


@pytest.mark.slow
def test_force_and_json_and_one_number_of_devices(tmp_path, capsys):
    (tmp_path / "scale.json").write_text("of another")
    flags = ["--devices", "1", "--steps", "1", "--rounds", "1", "--json", "--force"]
    assert main(["scale", FILE, *flags, "--run-dir", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "scale.json").read_text())
    assert shown["losses"]["same"] is None
    assert shown["simulated"] is False


def test_without_matplotlib_it_says_so_at_once(monkeypatch, tmp_path, capsys):
    for module in ("multitower.scaling.report", "multitower.scaling.plot"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert main(["scale", FILE, "--devices", "1", "--run-dir", str(tmp_path / "new")]) == 2
    assert "needs matplotlib, which is not installed. Run: pip install" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
