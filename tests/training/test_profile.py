"""Profiles: the trace holds whole steps, those that were asked for; a wrong range is refused."""

import gzip
import itertools
import json

import jax
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.cli.main import main
from multitower.training import profile as profiles
from places import CIRCLE


@pytest.fixture
def traced(monkeypatch):
    """Which steps are traced, without a trace: the profiler takes a second."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(
        jax.profiler, "save_device_memory_profile", lambda path: calls.append("memory")
    )
    return calls


def fit(calls, run_dir, steps=6, **options):
    def batches(first):
        for number in itertools.count(first):
            if number == options.get("broken"):
                raise RuntimeError("broken")
            yield {"x": np.full(4, number, np.float32)}

    how = {name: value for name, value in options.items() if name != "broken"}
    trainer = mt.Trainer(
        lambda w, batch: (w - batch["x"]) ** 2, optax.sgd(0.1), run_dir=run_dir, devices=1, **how
    )
    step = trainer.step

    class Noting:
        def __call__(self, *arguments):
            calls.append("call")
            return step(*arguments)

        def __getattr__(self, name):
            return getattr(step, name)

    trainer.step = Noting()
    trainer.fit(np.float32(0), batches, steps=steps)


@pytest.mark.slow
def test_the_steps_that_were_asked_for(traced, tmp_path):
    """Lie: a trace that begins a step late, as a hook would begin it."""
    fit(traced, tmp_path / "a", profile=(3, 4))
    assert traced == ["call", "call", "start", "call", "call", "stop", "memory", "call", "call"]
    traced.clear()
    fit(traced, tmp_path / "b", profile=(4, 4), steps_per_call=3)  # whole calls
    assert traced == ["call", "start", "call", "stop", "memory"]


def test_a_run_that_breaks_off_ends_its_trace(traced, tmp_path):
    """Lie: a second run that cannot trace, since the first trace goes on for ever."""
    with pytest.raises(RuntimeError, match="broken"):
        fit(traced, tmp_path, profile=(1, 6), broken=4)
    assert traced[-1] == "stop"


def test_devices_are_done_before_a_trace_ends(traced, tmp_path, monkeypatch):
    """Lie: a trace without the last step's work, which JAX has only started."""
    block = jax.block_until_ready
    monkeypatch.setattr(
        profiles.jax, "block_until_ready", lambda tree: traced.append("block") or block(tree)
    )
    fit(traced, tmp_path, steps=3, profile=(2, 2))
    before, traced_step = ["call", "block"], ["start", "call", "block", "block"]
    assert traced == [*before, *traced_step, "stop", "memory", "call"]


@pytest.mark.parametrize("pair", [(0, 2), (3, 2)])
def test_an_empty_range_is_refused(pair, tmp_path):
    with pytest.raises(mt.RunError, match="numbers of the first and the last step"):
        mt.Trainer(lambda w, x: w * x, optax.sgd(0.1), run_dir=tmp_path, profile=pair)
    with pytest.raises(mt.ArgumentError, match="needs a run_dir"):
        mt.Trainer(lambda w, x: w * x, optax.sgd(0.1), profile=(1, 2))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("10", "--profile 10: say the numbers of the first and the last step, such as 10:13"),
        ("2:1", "--profile 2:1: say the numbers"),
        (
            "3:9",
            "--profile 3:9, and the run makes 4 steps: the last one to profile is at most step",
        ),
    ],
)
def test_a_wrong_range_is_said_before_anything_is_written(given, said, tmp_path, capsys):
    words = ["train", str(CIRCLE), "--steps", "4", "--devices", "1", "--profile", given]
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_in_stages_shows_how_its_programs_ran(tmp_path):
    # The lies: devices under other numbers in the trace; a picture of the planned order again.
    words = ["train", str(CIRCLE), "--steps", "4", "--devices", "2", "--towers", "3"]
    words += ["--stages", "2", "--profile", "3:4", "--run-dir", str(tmp_path)]
    assert main(words) == 0
    pipeline = json.loads((tmp_path / "result.json").read_text())["pipeline"]
    traced = pipeline["traced"]
    assert sorted(slot[:5] for slot in traced["timeline"]) == sorted(
        slot[:5] for slot in pipeline["timeline"]
    )
    times = {tuple(slot[1:5]): slot[5:] for slot in traced["timeline"]}
    for (stage, _, tower, kind), (start, end) in times.items():
        assert 0 <= start < end
        needs = (0, 0, tower, "forward") if stage else (1, 0, tower, "backward")
        if (stage, kind) != (0, "forward"):
            assert times[needs][1] <= start + 1e-6
    assert 0 < traced["bubble"] < 1
    assert "The last step of the profile" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_real_trace_and_how_to_open_it(tmp_path, capsys):
    words = ["train", str(CIRCLE), "--steps", "4", "--devices", "2", "--towers", "2"]
    assert main([*words, "--profile", "3:4", "--run-dir", str(tmp_path)]) == 0
    assert f"xprof --logdir {tmp_path / 'profile'}" in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["profile"] == "3:4"
    assert "xprof --logdir profile" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "profile" / "memory.prof").stat().st_size > 0
    (path,) = (tmp_path / "profile").glob("plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    calls = [one for one in events if one.get("name") == "PjitFunction(jit(tower))"]
    assert len(calls) in (2, 4, 8)  # two towers in two steps; JAX may note a call twice
