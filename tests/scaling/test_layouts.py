"""Scaling over processes: measurements of several jobs in one table, told as they are."""

import contextlib
import copy
import importlib
import json
import re

import numpy as np
import pytest

import multitower as mt
import places
from forks import Fork
from multitower.cli.main import main
from multitower.recipes.catalog import find_recipe
from multitower.runs.options import RunOptions
from multitower.scaling.measure import ScalingOptions, _rows
from multitower.scaling.plan import ScalingPlan
from multitower.scaling.plot import plot_scaling
from multitower.scaling.summary import OPTIONS, joined, with_summary
from multitower.scaling.words import (
    caution,
    losses_in_words,
    speed_tables,
    turns_in_words,
    where_in_words,
)
from processes import clean_environment, ended

FILE = str(places.CIRCLE)
scale_command = importlib.import_module("multitower.cli.scale")


def measurement(processes, each, *turns, batch=12, losses=(0.7, 0.6), **facts):
    """What one job measures; every host has one process."""
    times = np.percentile(turns, [50, 25, 75])
    entry = {
        "devices": processes * each,
        "processes": processes,
        "hosts": processes,
        "layout": f"{processes} x {each}" if processes > 1 else None,
        "job": 0,
        "batch_size": batch,
        "step_s": {
            **dict(zip(("median", "lower_quartile", "upper_quartile"), times, strict=True)),
            "turns": list(turns),
        },
        "examples_per_s": batch / times[0],
        "recompilations": 0,
        "memory": {"peak_bytes": 4, "per_device_bytes": [4] * each, "source": "live arrays"},
        "split": {},
        "losses": list(losses),
    }
    found = {
        "recipe": "circle",
        "options": {"data": "here"},
        "seed": 0,
        "versions": {"jax": "1"},
        "host": {"platform": "gpu", "device_kind": "H100", "cpu_cores": 2},
        **{name: getattr(RunOptions, name) for name in OPTIONS},
        "batch_size": 12,
        "steps": 1,
        "lead_steps": 3,
        "rounds": len(turns),
        "strong": [entry],
        "weak": None,
        **facts,
    }
    return with_summary(found, None, None)


def test_a_job_is_added_to_the_table():
    """Lies: a speed-up by pairs of turns that had no time in common; layouts that cover each other
    because they have as many devices.
    """
    found = measurement(2, 2, 0.2, 0.3, 0.4)
    for other in (measurement(1, 4, 0.4, 0.5, 0.6), measurement(1, 1, 1.0, 2.0, 3.0)):
        found = joined(found, other, None, None)
    assert found["layouts"] == ["1 x 1", "1 x 4", "2 x 2"]
    assert found["devices"] == [1, 4, 4]
    two = found["strong"][2]
    assert two["speedup"]["median"] == pytest.approx(2.0 / 0.3)
    rates = np.percentile(12 / np.array([0.2, 0.3, 0.4]), [25, 75])
    base = np.percentile(12 / np.array([1.0, 2.0, 3.0]), [25, 75])
    assert two["speedup"]["lower_quartile"] == pytest.approx(rates[0] / base[1])
    assert two["speedup"]["upper_quartile"] == pytest.approx(rates[1] / base[0])
    assert two["efficiency"]["median"] == pytest.approx(2.0 / 0.3 / 4)
    assert [row[0] for row in speed_tables(found)[0].rows] == found["layouts"]
    assert speed_tables(found)[0].rows[2][5] == "167 %"  # the efficiency
    assert speed_tables(found)[0].heads[0] == "processes x devices"
    assert "one after the other, and not in turns" in turns_in_words(found)
    assert turns_in_words(measurement(2, 2, 0.2)) is None
    assert turns_in_words(joined(measurement(1, 1, 1.0), measurement(2, 1, 1.0), None, None))
    assert where_in_words(found) == "1 x 1, 1 x 4, 2 x 2 (processes x devices of each)"
    assert "The loss curve is the same on 1 x 1, 1 x 4" in losses_in_words(found)
    assert plot_scaling(found).startswith(b"\x89PNG")


def test_a_layout_that_is_measured_again_takes_the_place_of_the_first():
    found = joined(measurement(2, 2, 0.2), measurement(2, 2, 0.4), None, None)
    assert [entry["step_s"]["median"] for entry in found["strong"]] == [0.4]


def test_another_loss_curve_of_another_job_is_named():
    """Lies: curves that are compared within a job alone, where there is one; bits that are nearly
    the same.
    """
    found = joined(measurement(1, 1, 1.0), measurement(2, 1, 1.0, losses=(0.7, 0.5)), None, None)
    assert found["losses"]["same"] is False
    (said,) = found["losses"]["differences"]
    assert said == "step 2: the loss is 0.6 on 1 x 1 and 0.5 on 2 x 1"
    near = [measurement(n, 1, 1.0, losses=(0.7, 0.6 + n * 1e-9), towers=2) for n in (1, 2)]
    assert joined(*near, None, None)["losses"]["same"] is False


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"batch_size": 24}, "have batch_size 12, and this one has 24"),
        ({"compute_dtype": "bfloat16"}, "have compute_dtype None, and this one has 'bfloat16'"),
        ({"options": {"lr": 1}}, "options of the recipe"),
        ({"host": {"platform": "gpu", "device_kind": "A100"}}, "have device 'H100'"),
        ({"versions": {"jax": "2"}}, "versions"),
        ({"seed": 1}, "have seed 0, and this one has 1"),
        ({"rounds": 2}, "have rounds 1, and this one has 2"),
    ],
)
def test_another_training_is_not_added(facts, said):
    with pytest.raises(mt.RunError, match=said):
        joined(measurement(1, 1, 1.0), measurement(2, 1, 1.0, **facts), None, None)
    elsewhere = measurement(2, 1, 1.0, options={"data": "there"})
    assert joined(measurement(1, 1, 1.0), elsewhere, None, None)["layouts"] == ["1 x 1", "2 x 1"]


def test_processes_that_share_cores_are_simulated():
    """Lie: a speed-up of simulated processes, which have one device each."""
    cpu = {"platform": "cpu", "device_kind": "cpu", "cpu_cores": 2}
    together = measurement(2, 1, 1.0, host=cpu)
    assert not together["simulated"]  # one device on each of two machines
    together["strong"][0]["hosts"] = 1
    found = joined(measurement(1, 1, 1.0, host=cpu), together, None, None)
    assert found["simulated"]
    assert caution(found).startswith("Simulated devices and processes share the 2 cores of one")


def test_a_prediction_waits_for_three_numbers_of_devices():
    found = measurement(1, 1, 1.0)
    for processes, each in ((2, 1), (4, 1)):
        assert found["prediction"] is None
        found = joined(found, measurement(processes, each, 1 / processes), None, 8)
    assert found["prediction"]["step_s"] == pytest.approx(1 / 8)
    again = joined(found, measurement(1, 4, 0.3), None, 8)
    assert again["prediction"] is None  # two step times for four devices


def test_weak_scaling_of_a_later_job_has_the_rows_of_the_first(tmp_path):
    """Lie: as many rows as the batch has, in every job that measures one layout."""
    weak = {**measurement(1, 4, 1.0), "weak": measurement(1, 4, 1.0, batch=48)["strong"]}
    (tmp_path / "scale.json").write_text(json.dumps(weak))
    how = ScalingOptions()
    plan = ScalingPlan(find_recipe(FILE, {}), RunOptions(), how, tmp_path, force=False, add=True)
    assert plan._rows_per_device(tmp_path) == 12
    title = speed_tables({**weak, "strong": None})[0].title
    assert title == "Weak scaling: 12 examples per step on every device"
    assert _rows("weak", 12, 4, 4, ScalingOptions()) == 12
    assert _rows("weak", 12, 4, 4, ScalingOptions(rows_per_device=12)) == 48
    assert _rows("strong", 12, 4, 4, ScalingOptions(rows_per_device=12)) == 12


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layouts", "1x1,2"], "--layouts 1x1,2: '2' is not a layout"),
        (["--layouts", "1x4", "--towers", "2"], "the layout 1 x 4 has 4 devices"),
        (["--layouts", "1x2,2x1,1x1,4x1", "--predict", "8"], "have equally many"),
        (["--layouts", "1x1,2x1", "--predict", "8"], "at least 3 different numbers of devices"),
        (["--layouts", "1x1", "--devices", "1"], "leave --devices out"),
        (["--devices", "1", "--add", "--force"], "leave --force out"),
        (["--distributed", "--simulate", "1,2"], "several processes make one run in one layout"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(flags, said, tmp_path, capsys):
    directory = tmp_path / "new"
    assert main(["scale", FILE, *flags, "--run-dir", str(directory)]) == 2
    assert said in capsys.readouterr().err
    assert not directory.exists()


def test_what_cannot_be_added_to_is_refused(tmp_path, capsys, monkeypatch):
    """Lie: a measurement of hours that nothing can be made of."""
    monkeypatch.setattr("multitower.scaling.plan.scale", lambda *_: pytest.fail("it measures"))
    words = ["scale", FILE, "--devices", "1", "--add"]
    assert main(words) == 2
    assert "--run-dir DIR, which must be named" in capsys.readouterr().err
    before = measurement(1, 1, 1.0)
    without_stages = {name: value for name, value in before.items() if name != "stages"}
    for other in ({}, without_stages, {**before, "strong": [{"devices": 1}]}):  # earlier versions
        (tmp_path / "scale.json").write_text(json.dumps(other))
        assert main([*words, "--run-dir", str(tmp_path)]) == 2
        assert "holds no measurement that another one can be added to" in capsys.readouterr().err
    (tmp_path / "scale.json").write_text(json.dumps(copy.deepcopy(before)))
    flags = ["--steps", "1", "--rounds", "1", "--batch-size", "24", "--strong"]
    assert main([*words, *flags, "--run-dir", str(tmp_path)]) == 2
    assert "have batch_size 12, and this one has 24" in capsys.readouterr().err


def test_what_another_job_adds_meanwhile_stays(monkeypatch, tmp_path):
    """Lie: a table that was read before another job wrote its row, and written after that."""
    written = []

    @contextlib.contextmanager
    def held_by_another_one_first(directory, **_):
        (directory / "scale.json").write_text(json.dumps(measurement(2, 2, 0.2)))
        yield

    monkeypatch.setattr("multitower.scaling.plan.scale", lambda *_: measurement(1, 1, 1.0))
    monkeypatch.setattr(scale_command, "held_run_directory", held_by_another_one_first)
    monkeypatch.setattr(scale_command, "_say_result", lambda _: None)
    monkeypatch.setattr(
        "multitower.scaling.report.write_scaling", lambda _, result: written.append(result) or []
    )
    words = ["scale", FILE, "--devices", "1", "--strong", "--add", "--run-dir", str(tmp_path)]
    assert main([*words, "--predict", "8"]) == 0  # once there are enough points
    assert written[0]["layouts"] == ["1 x 1", "2 x 2"]
    assert written[0]["prediction"] is None


def test_layouts_are_added_for_a_prediction(monkeypatch, tmp_path, capsys):
    """Lie: too few numbers of devices, where the directory has the others."""
    written = []

    def run(layout, words):
        read = json.loads((tmp_path / "scale.json").read_text())
        added = joined(read, measurement(*layout, 1 / layout.total), None, 8)
        (tmp_path / "scale.json").write_text(json.dumps(added))

    (tmp_path / "scale.json").write_text(json.dumps(measurement(1, 1, 1.0)))
    monkeypatch.setattr(scale_command, "run_in_layout", run)
    monkeypatch.setattr(scale_command, "_say_result", lambda _: None)
    monkeypatch.setattr(
        "multitower.scaling.report.write_scaling", lambda _, result: written.append(result) or []
    )
    words = ["scale", FILE, "--strong", "--steps", "1", "--rounds", "1", "--batch-size", "12"]
    words += ["--add", "--run-dir", str(tmp_path), "--predict", "8"]
    assert main([*words, "--layouts", "2x1,4x1"]) == 0, capsys.readouterr().err
    assert written[0]["prediction"]["step_s"] == pytest.approx(1 / 8)


def test_weak_scaling_of_jobs_that_began_at_once_is_refused():
    """Lie: an efficiency of 12 rows on one device against 12 rows on four."""
    weak = [{**measurement(1, 1, 1.0), "strong": None}, {**measurement(1, 4, 1.0), "strong": None}]
    for one in weak:
        one["weak"] = measurement(1, one["devices"][0], 1.0)["strong"]
    with pytest.raises(mt.RunError, match="has 12 rows per device, and this one has 3: another"):
        joined(*weak, None, None)
    with pytest.raises(mt.RunError, match="kind of scaling 'strong', and this one has 'weak'"):
        joined(measurement(1, 1, 1.0), weak[1], None, None)


@pytest.mark.slow
def test_a_layout_of_local_updates_is_added(tmp_path):
    """Lies: another training in calls of several steps; a meeting that is measured half."""
    words = ["scale", FILE, "--towers", "2", "--batch-size", "12", "--steps", "1", "--rounds", "1"]
    words += ["--sync-every", "3", "--layouts", "1x1,2x1", "--run-dir", tmp_path]
    # In a fresh process: this one may compile otherwise (conftest.py).
    done = ended(Fork("-m", "multitower", *words, env=clean_environment()))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "scale.json").read_text())
    assert found["layouts"] == ["1 x 1", "2 x 1"]
    assert found["losses"]["same"] is True
    assert found["losses"]["steps"] == 2 * (3 + 3 + 3)
    assert (found["lead_steps"], found["counted_steps"]) == (3, 3)
    two = found["strong"][1]
    assert (two["processes"], two["recompilations"], set(two["split"].values())) == (2, 0, {None})


@pytest.mark.slow
def test_a_layout_of_processes_is_added(tmp_path):
    """Lies: memory and towers of process 0 alone; simulated processes that show a speed-up."""
    words = ["scale", FILE, "--towers", "2", "--batch-size", "12", "--steps", "1", "--rounds", "2"]
    for where in (["--simulate", "1"], ["--layouts", "2x1"]):
        # In a fresh process: this one may compile otherwise (conftest.py).
        to = ["--run-dir", tmp_path, "--add"]
        done = ended(Fork("-m", "multitower", *words, *where, *to, env=clean_environment()))
        assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "scale.json").read_text())
    assert found["layouts"] == ["1 x 1", "2 x 1"]
    assert found["losses"]["same"] is True
    assert found["losses"]["rule"] == "the same bits"
    assert found["simulated"] is True
    assert "--layouts 2x1" in found["command"]
    two = found["strong"][1]
    assert (two["processes"], two["hosts"], two["recompilations"]) == (2, 1, 0)
    assert len(two["memory"]["per_device_bytes"]) == 2
    assert all(value >= 0 for value in two["split"].values())
    assert two["split"]["tower_programs_s"] > 0
    for shown in (done.stdout, (tmp_path / "scale.html").read_text()):
        assert "so they cannot show a speed-up" in shown
        assert re.search(r"2 x 1", shown)
