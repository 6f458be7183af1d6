"""A resume trains on the batches that the run began with, or says that it does not."""

import dataclasses
import json
import shutil
import warnings

import jax
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.recipes import DataSets, Recipe
from multitower.runs.options import RunOptions
from multitower.runs.train import run


def load(size=40):
    inputs = np.arange(2.0 * size, dtype=np.float32).reshape(size, 2) / size
    return DataSets({"x": inputs}, {"x": inputs[:4]})


def errors(params, batch):
    return ((batch["x"] @ params) - 1) ** 2


RECIPE = Recipe(
    name="plane",
    data=load,
    init=lambda key: jax.random.uniform(key, (2,)),
    loss=errors,
    metrics=lambda params, batch: {"loss": errors(params, batch)},
    optimizer=lambda steps: optax.sgd(0.01),
    steps=2,
    global_batch=8,
    options={"data": "/here", "shape": (2, 3)},  # a tuple becomes a list in JSON
)
OPTIONS = RunOptions(towers=2, devices=1, checkpoint_every=1)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    run(RECIPE, OPTIONS, directory=directory)
    return directory


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ({}, {"seed": 1}, "seed 1, and the run began with 0. .* Put 0 back"),
        ({"options": {"shape": (2, 4)}}, {}, r"shape \[2, 4\], and the run began with \[2, 3\]"),
        ({"name": "line"}, {}, "recipe 'line', and the run began with 'plane'"),
    ],
)
def test_a_changed_seed_or_recipe_is_refused(recipe, options, said, begun):
    """Lie: a config.json edited by hand, and a run that goes on with other rows in silence."""
    changed = dataclasses.replace(RECIPE, **recipe), dataclasses.replace(OPTIONS, **options)
    with pytest.raises(mt.RunError, match=said):
        run(*changed, directory=begun, resume=True)


@pytest.mark.slow
def test_changed_data_is_told_and_moved_data_is_not(begun):
    """Lie: other data under the same name. Nor is data in another place another run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", mt.MultitowerWarning)
        moved = dataclasses.replace(RECIPE, options={"data": "/there", "shape": (2, 3)})
        run(moved, OPTIONS, directory=begun, resume=True)
    grown = dataclasses.replace(RECIPE, data=lambda: load(48))
    with pytest.warns(UserWarning, match="the training data is not that with which the run"):
        run(grown, OPTIONS, directory=begun, resume=True)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_hides_no_other_seed(begun, tmp_path):
    """Lie: another seed that is noticed only if the newest checkpoint can be read."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    about = tmp_path / "checkpoints" / "2" / "about" / "metadata"
    about.write_text(json.dumps({}))
    with pytest.raises(mt.RunError, match="the run began with 0"):
        run(
            RECIPE,
            dataclasses.replace(OPTIONS, seed=1),
            directory=tmp_path,
            resume=True,
            allow_previous=True,
        )
