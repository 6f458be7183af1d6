"""multitower verify: a table for equal runs; a code and a line for those that are not."""

import contextlib
import dataclasses
import importlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
import places
from faults import change_results, divide_parameters
from forks import Fork
from multitower.cli.main import main
from multitower.cli.starting import layouts
from multitower.proof.record import TOWER, Spot, StepRecord, as_facts, digest
from multitower.recipes.catalog import find_recipe
from multitower.runs.options import RunOptions
from multitower.runs.verified import OPTIONS, Verified
from multitower.runs.verify import Look, with_defaults
from processes import clean_environment, ended

RECIPE = str(places.CIRCLE)
FLAGS = ["--towers", "2", "--steps", "2", "--batch-size", "14", "--devices", "1,2"]


@pytest.mark.slow
def test_it_checks_what_train_does(tmp_path, capsys):
    # The lie: a check of some other program.
    assert main(["verify", RECIPE, *FLAGS]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["step", "1", "device", "2", "devices"]
    for number, line in enumerate(shown[2:4], start=1):
        step, one, two = line.split()
        assert (int(step), one) == (number, two)
    assert shown[2] != shown[3]
    assert "params       same bits" in shown
    where = ["--devices", "2", "--run-dir", str(tmp_path)]
    assert main(["train", RECIPE, *FLAGS[:-2], *where]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["fingerprint"].startswith(shown[3].split()[1])


@pytest.mark.slow
def test_a_difference_is_code_1_and_one_line(monkeypatch, capsys):
    change_results(monkeypatch, divide_parameters)
    assert main(["verify", RECIPE, *FLAGS, "--json", "--steps", "1"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["same_bits"] is False
    assert found["parts"][0][0]["step"] == found["parts"][1][0]["step"]
    assert found["parts"][0][0]["params"] != found["parts"][1][0]["params"]
    assert captured.err.startswith("multitower: step 1: 1 device and 2 devices part in the update")


@pytest.mark.slow
def test_a_model_in_stages_has_the_same_bits(capsys):
    assert main(["verify", RECIPE, *FLAGS, "--stages", "2"]) == 0
    assert "params       same bits" in capsys.readouterr().out.splitlines()


OF_PROCESSES = """
import os
import jax
from multitower.recipes.catalog import find_recipe
from dataclasses import replace

circle = find_recipe({circle!r}, {{}})

def loss(params, batch):
    losses, metrics = circle.loss(params, batch)
    if jax.process_index() == 1:
        {fault}
    return losses, metrics

recipe = replace(circle, loss=loss)
"""


def verified(recipe, *flags):
    """What the command leaves in a fresh process: this one may compile otherwise (conftest.py)."""
    words = ["-m", "multitower", "verify", recipe, *FLAGS[:-2], *flags]
    return ended(Fork(*words, env=clean_environment()))


def commands():
    """What every process of this machine was started with."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield file.read_text(errors="replace")


@pytest.mark.slow
def test_asynchronous_updates_are_verified_until_a_tower_has_its_second_turn(capsys):
    # The lie: steps that agree because no gradient is stale yet.
    flags = "--devices 1,2 --towers 5 --asynchronous --stale-scale 1 --clip-norm 0.5"
    assert main(["verify", RECIPE, "--batch-size", "4", *flags.split()]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:8]] == list("123456")
    assert "local        same bits" in shown


def test_a_rotation_is_verified_until_it_begins_anew():
    # The lie: steps of one group alone, in which nothing is stale.
    rotation = {"asynchronous": True, "max_staleness": 1, "rotation": "0,0,0,0,0,0,1"}
    assert with_defaults(RunOptions(towers=8, **rotation), 1).steps == 8


def test_a_file_decides_the_options_of_what_is_compared_with_it():
    # The lie: a comparison with another training than the one in the file.
    options = RunOptions(towers=4, stages=2, remat=False, clip_norm=0.5)
    before = Verified("1", "circle", {}, {name: getattr(options, name) for name in OPTIONS}, [])
    of = (Path("one.json"), find_recipe(RECIPE))
    assert before.options_for({}, *of) == options
    assert before.options_for({"clip_norm": 0.5, "compute_dtype": "float32"}, *of) == options
    with pytest.raises(mt.RunError, match=r"--clip-norm 0\.5, and this command has --clip-norm 1"):
        before.options_for({"clip_norm": 1.0}, *of)
    with pytest.raises(mt.RunError, match="without --shard-update, and this command has --shard-u"):
        before.options_for({"shard_update": True}, *of)
    before.options["remat"] = True
    with pytest.raises(mt.RunError, match="without --no-remat, and this command has --no-remat: l"):
        before.options_for({"remat": False}, *of)


TURNS = {"asynchronous": True, "max_staleness": 1}


@pytest.mark.parametrize(
    ("there", "same", "other"),
    [
        ({}, {"global_batch": 64}, {"global_batch": 32}),
        ({"global_batch": 64}, {"global_batch": 64}, {"global_batch": 65}),
        ({"sync_every": 2}, {"outer_lr": 0.7, "outer_momentum": 0.9}, {"outer_lr": 0.5}),
        ({"asynchronous": True}, {"max_staleness": 3, "stale_scale": 0.0}, {"max_staleness": 1}),
        ({**TURNS, "rotation": "0,1"}, {"rotation": "0, 1"}, {"rotation": "1, 0"}),
        (TURNS, {"rotation": "0, 1"}, {"rotation": "0,1,1"}),
        (TURNS, {"stale_scale": 0.0}, {"stale_scale": 0.5}),
    ],
)
def test_the_same_value_said_differently_is_no_other(there, same, other):
    """Lies: text that is compared, or a default that counts as another run."""
    options = RunOptions(towers=4, **there)
    before = Verified("1", "circle", {}, {name: getattr(options, name) for name in OPTIONS}, [])
    of = (Path("one.json"), find_recipe(RECIPE))
    assert before.options_for(same, *of) == options
    with pytest.raises(mt.RunError, match="leave it out, or compare with another run"):
        before.options_for(other, *of)


def test_settings_of_a_file_are_compared_by_value_and_its_data_kept():
    """Lies: data of the default place where the file has others; `0.10` for another `0.1`."""
    file = Path("one.json")
    before = Verified("1", "cifar10", {"data": "there", "lr_base": "0.002"}, {}, [])
    assert before.settings_for("cifar10", {}, file) == before.settings
    same = {"lr_base": "2e-3", "synthetic": "false"}
    assert before.settings_for("cifar10", same, file) == before.settings
    moved = before.settings_for("cifar10", {"data": "here"}, file)
    assert moved == {"data": "here", "lr_base": "0.002"}
    with pytest.raises(mt.RunError, match=r"lr_base=0\.002, and this command has lr_base=0\.1"):
        before.settings_for("cifar10", {"lr_base": "0.1"}, file)
    with pytest.raises(mt.RunError, match="with synthetic=its default, and this command has syn"):
        before._replace(settings={}).settings_for("cifar10", {"synthetic": "true"}, file)
    with pytest.raises(mt.RunError, match="holds a run of cifar10, and this is digits"):
        before.settings_for("digits", {}, file)


NEEDS_OPTIONS = """
import dataclasses, pathlib
from multitower.recipes import digits

@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    width: int
    data: str

def make_recipe(options):
    assert pathlib.Path(options.data).is_dir(), options.data
    return digits.recipe
"""


def test_a_recipe_is_made_with_the_settings_of_the_file_and_the_data_that_are_here(tmp_path):
    # The lie: a recipe that is asked for its name without what it needs, or where its data were.
    recipe, file = tmp_path / "mine.py", Path("one.json")
    recipe.write_text(NEEDS_OPTIONS)
    before = Verified("1", "digits", {"width": "3", "data": "/gone"}, {}, [])
    found = before.settings_for(str(recipe), {"data": str(tmp_path)}, file)
    assert found == {"width": "3", "data": str(tmp_path)}
    with pytest.raises(mt.RunError, match="width=3, and this command has width=4"):
        before.settings_for(str(recipe), {"data": str(tmp_path), "width": "4"}, file)


@pytest.mark.parametrize(
    ("there", "flags", "said"),
    [
        ({"seed": 5}, "--seed 0", "with --seed 5, and this command has --seed 0"),
        (
            {"sync_every": 2, "local_state": "average"},
            "--local-state keep",
            "with --local-state average, and this command has --local-state keep",
        ),
        (
            {"compute_dtype": "bfloat16"},
            "--compute-dtype float32",
            "with --compute-dtype bfloat16, and this command has --compute-dtype float32: leave it",
        ),
    ],
)
def test_a_flag_that_says_the_default_is_no_flag_left_out(there, flags, said, tmp_path, capsys):
    """Lie: the file's option, run in spite of what was typed."""
    file = tmp_path / "one.json"
    options = dataclasses.asdict(RunOptions(towers=2, steps=1, **there))
    facts = {"runs": ["1"], "recipe": "circle", "settings": {}, "options": options}
    file.write_text(json.dumps({**facts, "first_run": as_facts([])}))
    assert main(["verify", RECIPE, "--against", str(file), *flags.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_law_l3_in_layouts_of_processes():
    # The lie: over processes a trainer makes several local updates a call, and verify one.
    words = ["--sync-every", "2", "--steps", "3", "--json"]
    found = verified(RECIPE, "--layouts", "1x2,2x1", *words)
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)
    assert facts["runs"] == ["1 x 2", "2 x 1"]
    assert facts["fingerprints"][0] == facts["fingerprints"][1]
    assert len(set(facts["fingerprints"][0])) == 3


@pytest.mark.slow
def test_a_process_that_computes_something_else_is_named(tmp_path):
    """Lies: fingerprints of process 0, whichever process is wrong; values of another leaf."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(OF_PROCESSES.format(circle=RECIPE, fault="losses = losses * 1.001"))
    found = verified(str(recipe), "--layouts", "1x2,2x1", "--steps", "1")
    assert found.returncode == 1, found.stderr
    assert "step 1: 1 x 2 and 2 x 1 part in the tower program" in found.stderr
    said = (
        r"\(tower 1 in process 1\): gradients\['hidden'\]\[0\]\[0\] is (\S+) \(0x\w+\) and (\S+) "
    )
    one, two = map(float, re.search(said, found.stderr).groups())
    assert two == pytest.approx(1.001 * one, rel=1e-5)
    assert "params       DIFFERENT" in found.stdout


@pytest.mark.parametrize("repeats", [True, False])
def test_the_two_values_of_layouts_are_shown(repeats, monkeypatch, tmp_path, capsys):
    """Lie: a look at process 0, or at a value that the run did not have."""
    values = {"1 x 2": jnp.bfloat16([1, 2, 3]), "2 x 1": jnp.bfloat16([1, 2.5, 3])}
    seen = []

    def run(layout, words, environment=None):
        value, spot = values[str(layout)], Spot(TOWER, 1, "gradients['w']")
        if environment:
            look = Look.of_text(environment["MULTITOWER_LOOK_AT"])
            seen.append((str(layout), look.place.process, look.place.spot))
            monkeypatch.setattr(jax, "process_index", lambda: look.place.process)
            found = np.asarray(value if repeats else value + 1)
            monkeypatch.setattr("multitower.runs.verify.look", lambda run, place: found)
            look.write(None, None, 1)
            return "{}"
        other = {Spot(TOWER, 0, "gradients['w']"): "same"}
        mine = {spot: digest(value)}
        each = [{**other, **mine}] if layout.processes == 1 else [other, mine]
        facts = {"runs": [str(layout)], "recipe": "circle", "settings": {}}
        facts["options"] = dict.fromkeys(OPTIONS)
        return json.dumps({**facts, "first_run": as_facts([StepRecord(each, "0", {})])})

    module = importlib.import_module("multitower.cli.verify")
    monkeypatch.setattr(module, "run_in_layout", run)
    monkeypatch.setattr("multitower.runs.verify.run_maker", lambda *_: lambda devices: None)
    assert main(["verify", RECIPE, "--layouts", "1x2,2x1", "--json"]) == 1
    spot = Spot(TOWER, 1, "gradients['w']")
    assert seen == [("1 x 2", 0, spot), ("2 x 1", 1, spot)]
    said = capsys.readouterr().err
    shown = (
        "[1] is 2 (0x4000) and 2.5 (0x4020)" if repeats else "[1] is 3 (0x4040) and 3.5 (0x4060)"
    )
    assert f"part in the tower program (tower 1 in process 1): gradients['w']{shown}" in said
    assert ("do not even repeat themselves" in said) is not repeats


@pytest.mark.parametrize(
    ("code", "said"), [(130, "multitower: stopped\n"), (143, "multitower: stopped by SIGTERM\n")]
)
def test_layouts_that_are_stopped(code, said, monkeypatch, capsys):
    """Lie: a layout that failed, where somebody has ended it."""
    monkeypatch.setattr(layouts, "run_local_processes", lambda *_, **__: code)
    assert main(["verify", RECIPE, "--layouts", "1x2"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path):
    recipe = tmp_path / "recipe.py"
    fault = "print('out of luck', file=__import__('sys').stderr); os._exit(9)"
    recipe.write_text(OF_PROCESSES.format(circle=RECIPE, fault=fault))
    found = verified(str(recipe), "--layouts", "2x1")
    assert found.returncode == 2
    assert "out of luck" in found.stderr
    assert "the layout 2 x 1 failed with exit code 9" in found.stderr
    assert not [words for words in commands() if str(recipe) in words]


@pytest.mark.slow
def test_a_run_is_compared_with_a_file(tmp_path, monkeypatch, capsys):
    """Lies: a file whose settings are not looked at; a comparison that cannot fail."""
    file = tmp_path / "one.json"
    assert main(["verify", RECIPE, *FLAGS[:-1], "1", "--steps", "1", "--json"]) == 0
    file.write_text(capsys.readouterr().out)
    against = ["verify", RECIPE, "--devices", "2", "--against", str(file)]
    assert main(against) == 0
    assert f"step  {file} (1 device)  2 devices" in capsys.readouterr().out
    assert main([*against, "--towers", "4"]) == 2
    assert "holds a run with --towers 2, and this command has --towers 4" in capsys.readouterr().err
    assert main(["verify", "digits", "--against", str(file)]) == 2
    assert "holds a run of circle, and this is digits" in capsys.readouterr().err
    change_results(monkeypatch, divide_parameters)
    assert main(against) == 1
    shown = capsys.readouterr().err
    assert f"{file} (1 device) and 2 devices part in the update" in shown
    assert "other versions" not in shown
    # Lie: the layout is to blame for what another version of JAX computes.
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "versions": {**facts["versions"], "jax": "0.9.9"}}))
    assert main(against) == 1
    assert f"{file} was made with jax 0.9.9, and this is jax {jax.__version__}: other" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layouts", "2x"], "--layouts 2x: '2x' is not a layout. Give processes x devices"),
        (["--layouts", "1x4,2x2", "--towers", "2"], "the layout 1 x 4 has 4 devices, and 2 towers"),
        (["--layouts", "1x2", "--devices", "1"], "leave --devices out. For processes on acc"),
        (["--layouts", "1x2", "--simulate", "1"], "leave --simulate out"),
        (["--simulate", "1,2", "--distributed"], "several processes make one run in one layout"),
        (["--against", "nothing.json"], "--against nothing.json: cannot be read (No such file"),
        (["--against", RECIPE], "it holds something else"),
    ],
)
def test_mistakes_in_layouts_are_named(flags, said, capsys):
    assert main(["verify", RECIPE, *flags]) == 2
    assert said in capsys.readouterr().err


def test_mistakes_are_named(capsys):
    assert main(["verify", RECIPE, "--devices", "1,x"]) == 2
    assert "--devices 1,x: give numbers of devices, such as --devices 1,2,4" in (
        capsys.readouterr().err
    )
    assert main(["verify", RECIPE, "--devices", "1,4", "--towers", "2"]) == 2
    assert "2 towers cannot fill 4 devices" in capsys.readouterr().err
    assert main(["verify", RECIPE, "--devices", "1,99"]) == 2
    assert "--devices 99" in capsys.readouterr().err
