"""A grain pipeline is a source of batches like any other: its batch s depends on s alone."""

import itertools

import grain
import numpy as np
import optax
import pytest

import multitower as mt

ROWS = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
ASKED = []  # the first batch of every run


def batches(first):
    """The same batches as `multitower.data.batches` would promise, by grain: shuffled, endless."""
    ASKED.append(first)
    places = grain.MapDataset.range(len(ROWS)).shuffle(seed=3).repeat()
    numbered = places.map(lambda place: {"x": ROWS[place]}).batch(16)
    return (numbered[number] for number in itertools.count(first))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_grain_pipeline_resumes_elsewhere_with_the_same_bits(tmp_path):
    # The lie (law L5): a resume that is handed other batches than the run would have had.
    def fit(directory, steps, devices, *, resume=False):
        loss = lambda w, batch: ((batch["x"] * w).sum(-1) - 1) ** 2
        trainer = mt.Trainer(
            loss, optax.sgd(0.1), run_dir=directory, towers=4, devices=devices, global_batch=16
        )
        return mt.fingerprint(trainer.fit(np.zeros(4, "f"), batches, steps=steps, resume=resume))

    ASKED.clear()
    whole = fit(tmp_path / "whole", 9, devices=1)
    fit(tmp_path / "stopped", 5, devices=2)
    assert fit(tmp_path / "stopped", 9, devices=4, resume=True) == whole
    assert ASKED == [0, 0, 5]  # one that begins anew comes to the same bits
