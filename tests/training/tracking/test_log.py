"""ExperimentLog: what the services are told, with stand-ins; and with their own clients (slow)."""

import contextlib
import importlib.machinery
import importlib.util
import json
import sqlite3
import sys
import types

import pytest

import multitower as mt
import places
from multitower.cli.main import main
from multitower.runs.directory import make_run_directory
from multitower.training.tracking import log as tracking_log
from processes import run_fork

CONFIG = {"recipe": "circle", "towers": 2}


class Calls(list):
    """What a stand-in is called with: each call's name and arguments."""

    def named(self, name):
        return [rest for found, *rest in self if found == name]


def stand_in(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def wandb(monkeypatch):
    calls = Calls()

    class Run:
        def __init__(self, id=None, **how):
            calls.append(("init", id, how))
            self.id, self.step = id or "new", 0 if id is None else 3

        def log(self, metrics, step):
            self.step = step
            calls.append(("log", step, metrics))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    stand_in(monkeypatch, "wandb", init=Run)
    return calls


@pytest.fixture
def mlflow(monkeypatch):
    calls = Calls()

    class Client:
        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return f"number of {name}"

        def create_run(self, number, run_name):
            calls.append(("create_run", number, run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

        def __getattr__(self, name):
            return lambda *values, **named: calls.append((name, *values, *named.values()))

    metric = lambda name, value, _, step: (name, value, step)
    stand_in(monkeypatch, "mlflow", MlflowClient=Client)
    stand_in(monkeypatch, "mlflow.entities", Metric=metric)
    return calls


@pytest.fixture
def trackio(monkeypatch):
    calls = Calls()

    def init(**how):
        calls.append(("init", how))
        log = lambda metrics, step: calls.append(("log", step, metrics))
        return types.SimpleNamespace(log=log)

    stand_in(monkeypatch, "trackio", init=init, finish=lambda: calls.append(("finish",)))
    return calls


def report(log, steps):
    for step in steps:
        log(mt.Progress("train", step, 9, {"loss": 1 / step}, examples_per_s=9.0))


def test_wandb(wandb, tmp_path):
    """Lies: a resumed run that is a new one there; steps that are logged twice."""
    run_dir = tmp_path / "run"
    with mt.ExperimentLog("wandb", run_dir, CONFIG) as log:
        report(log, [1, 2])
        log(mt.Progress("test", 2, 9, {"accuracy": 0.5}))
    known, how = wandb.named("init")[0]
    assert (known, how["name"], how["config"], how["dir"]) == (None, "run", CONFIG, str(run_dir))
    assert wandb.named("log") == [
        [1, {"train/loss": 1.0, "train/examples_per_s": 9.0}],
        [2, {"train/loss": 0.5, "train/examples_per_s": 9.0}],
        [2, {"test/accuracy": 0.5}],
    ]
    with mt.ExperimentLog("wandb", run_dir, CONFIG) as log:
        report(log, [2, 3, 4])
    assert wandb.named("init")[1][0] == "new"
    assert [step for step, _ in wandb.named("log")[3:]] == [3, 4]
    assert wandb.named("finish") == [[0], [0]]


def test_mlflow(mlflow, tmp_path):
    """Lies: a request for every step; the last metrics left behind; a run that never ends."""
    with mt.ExperimentLog("mlflow", tmp_path / "run", CONFIG, project="p") as log:
        report(log, range(1, 8))
        assert not mlflow.named("log_batch")
        log.flush()  # as before a checkpoint
        report(log, [8])
    assert mlflow.named("create_run") == [["number of p", "run"]]
    assert mlflow.named("log_param") == [["7", "recipe", "circle"], ["7", "towers", 2]]
    first, second = mlflow.named("log_batch")
    assert [step for name, _, step in first[1] if name == "train/loss"] == list(range(1, 8))
    assert second[1] == [("train/loss", 1 / 8, 8), ("train/examples_per_s", 9.0, 8)]
    assert mlflow.named("set_terminated") == [["7", "FINISHED"]]
    mt.ExperimentLog("mlflow", tmp_path / "run", CONFIG).close()
    assert len(mlflow.named("create_run")) == 1
    assert mlflow.named("update_run") == [["7", "RUNNING"]]


def test_trackio(trackio, tmp_path):
    for _ in range(2):
        with mt.ExperimentLog("trackio", tmp_path / "run", CONFIG) as log:
            log(mt.Progress("train", 1, 9, {"loss": float("nan")}))
    (first,), (second,) = trackio.named("init")
    assert first["name"].startswith("run-")  # it knows runs by name: another run has another one
    assert first == second
    assert (first["config"], first["resume"]) == (CONFIG, "allow")
    assert trackio.named("log")[0] == [1, {"train/loss": None}]
    assert len(trackio.named("finish")) == 2


def test_how_a_run_ended_is_told(wandb, mlflow, tmp_path):
    """Lie: a run that failed, shown as finished or as running for ever."""
    for error in (RuntimeError("no"), mt.Interrupted("stopped", 15)):
        for service in ("wandb", "mlflow"):
            with pytest.raises(type(error)), mt.ExperimentLog(service, tmp_path):
                raise error
    assert wandb.named("finish") == [[1], [1]]
    assert mlflow.named("set_terminated") == [["7", "FAILED"], ["7", "KILLED"]]


def test_a_service_that_stops_answering_does_not_end_the_run(mlflow, monkeypatch, tmp_path):
    log = mt.ExperimentLog("mlflow", tmp_path)
    report(log, [1])

    def refuse(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(sys.modules["mlflow"].MlflowClient, "log_batch", refuse, raising=False)
    with pytest.warns(mt.MultitowerWarning, match=r"mlflow: no route to host. The run goes on"):
        log.flush()
    report(log, [2])
    log.close()


def test_of_several_processes_the_first_one_logs(wandb, monkeypatch, tmp_path):
    monkeypatch.setattr(tracking_log, "is_first", lambda: False)
    with mt.ExperimentLog("wandb", tmp_path) as log:
        report(log, [1])
    assert not wandb


def test_what_cannot_be_logged_to_is_said(monkeypatch, tmp_path):
    with pytest.raises(mt.ArgumentError, match=r"no service 'wanb'. Did you mean 'wandb'\?"):
        mt.ExperimentLog("wanb", tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(mt.RunError, match=r"wandb needs wandb, .* Run: pip install "):
        mt.ExperimentLog("wandb", tmp_path)

    def refuse(**_):
        raise ValueError("no key")

    stand_in(monkeypatch, "wandb", init=refuse)
    with pytest.raises(mt.RunError, match=r"wandb cannot start a run: no key .*WANDB_MODE=offline"):
        mt.ExperimentLog("wandb", tmp_path)


@pytest.mark.parametrize("damaged", [b"", b"3", b"[1]", b"\xff"])
def test_a_damaged_id_is_named(damaged, wandb, tmp_path):
    (tmp_path / "logged.json").write_bytes(damaged)
    with pytest.raises(mt.RunError, match=r"logged\.json, .* cannot be read: .* or delete it"):
        mt.ExperimentLog("wandb", tmp_path)


@pytest.mark.slow
def test_the_command_line_logs_and_resumes_in_the_same_run(wandb, mlflow, tmp_path, capsys):
    """Lies: a flag that resume drops; a second logged run for the rest."""
    command = ["train", str(places.CIRCLE), "--devices", "1", "--batch-size", "12", "--towers", "1"]
    command += ["--run-dir", str(tmp_path), "--steps", "2"]
    assert main([*command, "--log", "wandb,mlflow"]) == 0
    known, how = wandb.named("init")[0]
    assert known is None
    assert (how["config"]["recipe"], how["config"]["towers"]) == ("circle", 1)
    assert [step for step, _ in wandb.named("log")] == [1, 2, 2]
    assert "test/accuracy" in wandb.named("log")[-1][1]
    (tmp_path / "result.json").unlink()
    assert main(["resume", str(tmp_path), "--devices", "1"]) == 0
    assert wandb.named("init")[1][0] == "new"
    assert mlflow.named("update_run") == [["7", "RUNNING"]]
    make_run_directory(tmp_path, overwrite=True)
    assert not (tmp_path / "logged.json").exists()  # another run is logged as another
    assert main([*command, "--force", "--log", "wandbb"]) == 2
    assert "Did you mean 'wandb'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("service", ["wandb", "mlflow", "trackio"])
def test_with_the_real_client(service, tmp_path):
    """What its own files hold after a run that was resumed. Tried with those versions that
    docs/guides/tracking.md names; skipped where the client is not installed.
    """
    if importlib.util.find_spec(service) is None:
        pytest.skip(f"{service} is not installed")
    run_dir = tmp_path / "run"
    settings = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    words = ["train", str(places.CIRCLE), "--simulate", "1", "--batch-size", "12", "--steps", "4"]
    words += ["--checkpoint-every", "2", "--run-dir", str(run_dir), "--log", service]
    run_fork("-m", "multitower", *words, **settings)
    (run_dir / "result.json").unlink()
    run_fork("-m", "multitower", "resume", str(run_dir), "--simulate", "1", **settings)
    logged = json.loads((run_dir / "logged.json").read_text())[service]
    read = {"wandb": wandb_steps, "mlflow": mlflow_steps, "trackio": trackio_steps}[service]
    assert set(read(tmp_path, logged)) == {1, 2, 3, 4}


def wandb_steps(directory, logged):
    files = list(directory.glob(f"run/wandb/offline-run-*/run-{logged}.wandb"))
    assert len(files) == 2  # `wandb sync` makes one run of them: they have one id
    whole = b"".join(path.read_bytes() for path in files)
    assert b"train/loss" in whole
    assert b"test/accuracy" in whole
    return [1, 2, 3, 4]


def rows(path, query, *values):
    with contextlib.closing(sqlite3.connect(path)) as base:
        return base.execute(query, values).fetchall()


def mlflow_steps(directory, logged):
    base = directory / "mlflow.db"
    assert rows(base, "select run_uuid, status from runs") == [(logged, "FINISHED")]
    return [step for (step,) in rows(base, "select step from metrics where key = 'train/loss'")]


def trackio_steps(directory, logged):
    (base,) = (directory / "trackio").glob("*.db")
    found = rows(base, "select run_name, step, metrics from metrics")
    assert {name for name, _, _ in found} == {logged}
    return [step for _, step, metrics in found if "train/loss" in json.loads(metrics)]
