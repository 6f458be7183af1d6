"""multitower resume DIR --steps N: a run gets more steps, also if it is finished."""

import json

import pytest

import places
from multitower.cli.main import main

CIRCLE = str(places.CIRCLE)


def result_of(directory):
    return json.loads((directory / "result.json").read_text())


@pytest.mark.slow
def test_a_finished_run_is_extended(tmp_path, capsys):
    """Lies: a run of other bits than one of so many steps; a config that still says fewer."""
    command = ["train", CIRCLE, "--batch-size", "12", "--towers", "2", "--devices", "1"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert main([*command, "--steps", "5", "--run-dir", str(whole)]) == 0
    assert main([*command, "--steps", "3", "--run-dir", str(run_dir)]) == 0
    resume = ["resume", str(run_dir), "--devices", "2"]
    capsys.readouterr()
    for words in (resume, [*resume, "--steps", "3"]):
        assert main(words) == 2
        assert "pass --steps with more than its 3 steps" in capsys.readouterr().err
    assert main([*resume, "--steps", "2"]) == 2
    assert "makes 3 steps. Pass more to extend it" in capsys.readouterr().err
    assert result_of(run_dir)["steps"] == 3  # a refused run keeps its result
    # Lie: settings that are compared after the result has been deleted.
    config = run_dir / "config.json"
    begun = config.read_text()
    for name, other in (("seed", 1), ("clip_norm", 0.5)):
        read = json.loads(begun)
        changed = json.dumps({**read, "options": {**read["options"], name: other}})
        config.write_text(changed)
        assert main([*resume, "--steps", "5"]) == 2, name
        assert (result_of(run_dir)["steps"], config.read_text()) == (3, changed)
    config.write_text(begun)

    assert main([*resume, "--steps", "5"]) == 0
    for name in ("fingerprint", "steps", "test_loss"):
        assert result_of(run_dir)[name] == result_of(whole)[name]
    assert json.loads((run_dir / "config.json").read_text())["options"]["steps"] == 5
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 5]


SCHEDULED = """
from dataclasses import replace
import runpy
import optax
circle = runpy.run_path({circle!r})["recipe"]
recipe = replace(circle, optimizer=lambda steps: optax.sgd(optax.cosine_decay_schedule(0.1, steps)))
"""


def test_a_schedule_that_depends_on_the_steps_is_not_extended(tmp_path, capsys):
    """Lie: a run that no number of steps from the start would have made."""
    recipe = tmp_path / "scheduled.py"
    recipe.write_text(SCHEDULED.format(circle=CIRCLE))
    config = json.dumps({"recipe": str(recipe), "options": {"steps": 1, "towers": 2}})
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "result.json").write_text('{"steps": 1}')
    assert main(["resume", str(tmp_path), "--devices", "1", "--steps", "2"]) == 2
    assert "depends on the number of steps" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == config
    assert (tmp_path / "result.json").exists()
