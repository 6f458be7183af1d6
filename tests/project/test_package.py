"""What is built for others: the wheel and the sdist install and run in clean environments.

Environments are made by uv, with the packages and hashes of this Python's lock. That needs the
package index that uv is configured for: without it the tests fail and show what uv says.
"""

import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from places import CIRCLE, ROOT
from processes import clean_environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
UV = Path(sys.executable).parent / "uv"
LOCK = ROOT / "requirements" / f"python3.{min(sys.version_info.minor, 13)}.txt"

# Without extras: a training step runs, and types are there for type checkers.
TRAIN = """
import importlib.resources
import jax.numpy as jnp, optax
import multitower as mt

mt.configure(simulated_devices=2)
assert "site-packages" in mt.__file__, mt.__file__
assert importlib.resources.files("multitower").joinpath("py.typed").is_file()
step = mt.train_step(lambda w, x: (w - x) ** 2, optax.sgd(0.1), towers=2)
state = step.init(jnp.float32(3.0))
for _ in range(2):
    state, metrics = step(state, jnp.ones(4))
assert float(metrics["loss"]) < 4
"""
WITHOUT_ORBAX = """
try:
    mt.Checkpoints("checkpoints")
except mt.errors.CheckpointError as error:
    print(error)
"""
SAVE_AND_RESTORE = """
with mt.Checkpoints("checkpoints") as checkpoints:
    checkpoints.save(2, state, {})
    checkpoints.wait()
    restored = checkpoints.restore(like=step.init(jnp.float32(0.0)))
assert mt.fingerprint(restored.state) == mt.fingerprint(state)
"""


def call(*words, cwd, returns=0):
    """What a command writes; a failure is an error that shows all of it."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")
    environment = {k: v for k, v in clean_environment().items() if k not in hidden}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != returns:
        pytest.fail(f"{shlex.join(map(str, words))}:\n{done.stdout[-4000:]}", pytrace=False)
    return done.stdout


def build(source, target):
    """The paths of the sdist and the wheel, built offline by the hatchling that is installed."""
    call(sys.executable, "-m", "hatchling", "build", "-d", target, cwd=source)
    (sdist,) = target.glob("*.tar.gz")
    (wheel,) = target.glob("*.whl")
    return sdist, wheel


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("dist"))


class Environment:
    """A virtual environment, at first without any package."""

    def __init__(self, directory):
        self.directory = directory
        self.bin = directory / "venv" / "bin"
        call(UV, "venv", "--quiet", "--python", sys.executable, directory / "venv", cwd=directory)

    def install(self, *requirements, flags=(), locked=True):
        options = ["--python", self.bin / "python", *flags]
        options += ["--constraints", LOCK] if locked else []
        return call(UV, "pip", "install", *options, *requirements, cwd=self.directory)

    def installed(self):
        return call(UV, "pip", "freeze", "--python", self.bin / "python", cwd=self.directory)

    def run(self, program):
        return call(self.bin / "python", "-c", program, cwd=self.directory)

    def multitower(self, *words, returns=0):
        return call(self.bin / "multitower", *words, cwd=self.directory, returns=returns)


def command_in(error):
    words = shlex.split(error.rpartition(" Run: ")[2])
    assert words[:2] == ["pip", "install"], error
    return words[2:]


# ---------------------------------------------------------------- the files


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    """Lie: an sdist that lacks a file, so that those who build from it get something else."""
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    _, again = build(source, tmp_path / "dist")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone knows what git tracks")
def test_the_sdist_has_all_that_git_tracks(built):
    """Lie: tests and documentation that cannot be run from the sdist."""
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(call("git", "ls-files", cwd=ROOT).splitlines())
    assert {name for name in tracked if (ROOT / name).exists()} - found == set()


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(built):
    """Lie: a wheel without types, templates or a license, or with tests in it."""
    _, wheel = built
    names = set(contents(wheel))
    about = f"multitower-{PROJECT['version']}.dist-info/"
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "multitower/py.typed" in package
    assert {name for name in names if not name.startswith(about)} == package
    assert about + "licenses/LICENSE" in names


@pytest.mark.slow
def test_the_metadata_is_complete(built):
    """Lie: a package page without a text, a license or an author."""
    _, wheel = built
    text = contents(wheel)[f"multitower-{PROJECT['version']}.dist-info/METADATA"].decode()
    for line in (
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Author: The multitower authors",
        "Description-Content-Type: text/markdown",
        "Requires-Python: >=3.11",
        "Classifier: Typing :: Typed",
        "Provides-Extra: checkpoint",
    ):
        assert f"\n{line}\n" in text, line


# ---------------------------------------------------------------- clean environments


@pytest.mark.slow
def test_each_extra_is_enough_for_what_it_is_for(built, tmp_path):
    """Lies: a hidden dependency on an extra, or of one on another; an error that does not help.

    In one environment that gets more and more, since Python compiles the packages of a new one.
    """
    wheel = built[1].as_uri()
    environment = Environment(tmp_path)
    environment.install(f"multitower @ {wheel}")
    for_checkpoints = command_in(environment.run(TRAIN + WITHOUT_ORBAX))
    for_commands = command_in(environment.multitower("doctor", returns=2))
    assert for_checkpoints == PROJECT["optional-dependencies"]["checkpoint"]

    environment.install(f"multitower[checkpoint] @ {wheel}")
    environment.run(TRAIN + SAVE_AND_RESTORE)
    assert "tyro" not in environment.installed()

    environment.install(*for_commands)
    (tmp_path / "new").mkdir()
    new = Environment(tmp_path / "new")
    new.install(f"multitower[cli] @ {wheel}")
    assert environment.installed() == new.installed()
    flags = ["--simulate", "2", "--towers", "2", "--steps", "2", "--run-dir", "run"]
    environment.multitower("train", CIRCLE, *flags)
    assert (tmp_path / "run" / "result.json").is_file()
    assert (tmp_path / "run" / "report.html").is_file()
    assert "versions" in environment.multitower("doctor", "--simulate", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", sorted({*PROJECT["optional-dependencies"]} - {"checkpoint", "cli"})
)
def test_other_extras_can_be_resolved(extra, built, tmp_path):
    """Lie: an extra whose packages do not exist, or contradict the lock. Nothing is installed."""
    environment = Environment(tmp_path)
    wheel = f"multitower[{extra}] @ {built[1].as_uri()}"
    # Trackio's client needs an older Pillow than the one that is locked, which the library takes.
    said = environment.install(wheel, flags=["--dry-run"], locked=extra != "trackio")
    for line in PROJECT["optional-dependencies"][extra]:
        assert f"+ {re.split(r'[^A-Za-z0-9-]', line)[0].lower()}" in said.lower(), line
    if extra.startswith("cuda"):
        assert f"+ jax-{extra}-plugin==" in said


# ---------------------------------------------------------------- what stands beside the package


def read_yaml(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_citation_agrees_with_the_package():
    """Lie: a citation of another license, or of a version that was the newest once."""
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["title"] == PROJECT["name"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert "version" not in citation  # it stands in pyproject.toml alone


def test_github_runs_what_ci_runs():
    """Lie: a second description of CI, which falls behind."""
    (job,) = read_yaml(".github/workflows/ci.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert [command.split()[-1] for command in commands] == [".ci/run"]
    (pythons,) = [step["with"]["python-version"] for step in job["steps"] if "with" in step]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"${{CI_PYTHONS:-{' '.join(pythons.split())}}}" in script
