"""Checkpoints: complete or absent, the same bits back, and damage that is found."""

import gc
import hashlib
import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.training.checkpoints.checkpoint import Checkpoints

ROWS = {"x": np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)}


def losses(params, batch, *, rng, model_state):
    hidden = batch["x"] @ params["w"] * jax.random.bernoulli(rng, 0.5, (len(batch["x"]), 3))
    loss = jnp.sum(hidden**2, -1)
    return loss, {}, {"mean": 0.9 * model_state["mean"] + 0.1 * loss.mean()}


def make(num_devices):
    """A step with a key, model state, a moving average and 16-bit parameters; its first state."""
    step = mt.train_step(
        losses, optax.sgd(0.1, momentum=0.9), towers=4, devices=num_devices, ema_decay=0.9
    )
    params = {"w": np.ones((5, 3), jnp.bfloat16)}
    return step, step.init(params, model_state={"mean": 0.0}, rng=jax.random.key(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints 1, 2 and 3, and the fingerprint after six steps."""
    directory = tmp_path_factory.mktemp("run")
    step, state = make(1)
    with Checkpoints(directory) as checkpoints:
        for number in range(1, 7):
            state, _ = step(state, ROWS)
            if number <= 3:
                checkpoints.save(number, state, {"number": number})
    return directory, mt.fingerprint(state)


@pytest.mark.parametrize("num_devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_resume_on_another_device_count_gives_the_same_bits(saved, num_devices):
    # The lie (law L4): a resume that forgets the key, the average, or the dtype of a leaf.
    directory, expected = saved
    step, state = make(num_devices)
    with Checkpoints(directory) as checkpoints:
        number, state, about = checkpoints.restore(like=state)
    assert (number, about) == (3, {"number": 3})
    for _ in range(3):
        state, _ = step(state, ROWS)
    assert mt.fingerprint(state) == expected


def test_keeps_the_last_ones_and_a_named_one_can_be_read(saved):
    directory, _ = saved
    with Checkpoints(directory) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3]
        found = checkpoints.restore(like=make(1)[1], step=2)
        assert (int(found.state.step), found.about) == (2, {"number": 2})
        with pytest.raises(
            mt.CheckpointError, match=r"no complete checkpoint 7; it has \[1, 2, 3\]"
        ):
            checkpoints.restore(like=make(1)[1], step=7)


def test_a_lower_number_than_the_newest_is_refused(tmp_path):
    """Lie: a run that goes on from an earlier checkpoint saves nothing, and nobody says so."""
    state = mt.train_step(lambda w, x: w * x, optax.sgd(0.1), devices=1).init(np.float32(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state, {})
        checkpoints.save(7, state, {})
        with pytest.raises(mt.CheckpointError, match="has checkpoint 7, and step 5 is to be saved"):
            checkpoints.save(5, state, {})
        assert checkpoints.steps() == [7]


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 2])
def test_what_a_user_has_written_into_a_state_is_saved(tmp_path, towers):
    # The lies: a number that is no array; a dtype that no resume takes; a value from before.
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    loss = lambda w, x: (x["x"] @ w) ** 2
    step = mt.train_step(loss, optimizer, towers=towers, devices=2)
    state, _ = step(step.init(np.ones(5, np.float32)), ROWS)
    state.opt_state.hyperparams["learning_rate"] = 0.01
    assert "opt_state=<" in repr(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        wide = np.arange(5.0)  # float64
        checkpoints.save(2, state.replace(params=wide, step=2), {})
        found = [checkpoints.restore(like=step.init(wide), step=number).state for number in (1, 2)]
    assert mt.fingerprint(found[1].params) == mt.fingerprint(np.arange(5, dtype=np.float32))
    assert mt.fingerprint(step(found[0], ROWS)) == mt.fingerprint(step(state, ROWS))


def test_saving_does_not_keep_the_memory_of_the_state(tmp_path):
    # The lie: a background save that writes what the next step has overwritten.
    step, state = make(2)
    with Checkpoints(tmp_path) as checkpoints:
        before = mt.fingerprint(state)
        checkpoints.save(0, state, {})
        for _ in range(3):
            state, _ = step(state, ROWS)
        assert mt.fingerprint(checkpoints.restore(like=make(2)[1]).state) == before


def damage(directory, number):
    """Flips a byte in the middle of every data file of one checkpoint."""
    for path in (directory / str(number) / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 0xFF
            path.write_bytes(content)


# Orbax reads all leaves at once: those that fail after the first one report to nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "how",
    ["flipped bytes", pytest.param("a missing file", marks=pytest.mark.slow), "other bits"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_offered(tmp_path, how):
    # The lie: "latest" that cannot be read, or that is read without complaint; or its content
    # under the number of the one before.
    _, before = make(1)
    state = jax.tree.map(jnp.copy, before)
    state = state.replace(params=jax.tree.map(lambda leaf: 2 * leaf, state.params))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, before, {})
        checkpoints.save(2, state, {})
        checkpoints.wait()
        if how == "flipped bytes":
            damage(tmp_path, 2)
        elif how == "a missing file":
            (tmp_path / "2" / "state" / "manifest.ocdbt").unlink()
        else:  # what a disk gives back without an error of its own
            metadata = next((tmp_path / "2" / "about").iterdir())
            about = json.loads(metadata.read_text())
            about |= {"fingerprint": "0" * 64, "sha256": None}
            rest = {name: value for name, value in about.items() if name != "sha256"}
            text = json.dumps(rest, sort_keys=True)
            about["sha256"] = hashlib.sha256(text.encode()).hexdigest()
            metadata.write_text(json.dumps(about))
        found = "its bits are not the ones" if how == "other bits" else "it cannot be read"
        said = rf"checkpoint 2: {found}.* allow the previous one, 1"
        with pytest.raises(mt.CheckpointError, match=said):
            checkpoints.restore(like=state)
        warned = pytest.warns(mt.MultitowerWarning, match=r"checkpoint 2: .* from checkpoint 1")
        with warned:
            found = checkpoints.restore(like=state, allow_previous=True)
        assert (found.step, mt.fingerprint(found.state)) == (1, mt.fingerprint(before))
        # Nothing is deleted, and step 2 can be saved anew.
        assert (tmp_path / "damaged-2" / "about").exists()
        checkpoints.save(2, state, {})
        found = checkpoints.restore(like=state)
        assert (found.step, mt.fingerprint(found.state)) == (2, mt.fingerprint(state))
    gc.collect()  # here, where such reports are ignored


def copied(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_what_was_saved_beside_a_state_is_checked_too(saved, tmp_path):
    """Lie: one flipped bit, and a run is resumed as another one."""
    directory = copied(saved, tmp_path)
    (file,) = (directory / "3" / "about").glob("metadata")
    flipped = file.read_text().replace('"number": 3', '"number": 2')
    assert flipped != file.read_text()
    file.write_text(flipped)
    with Checkpoints(directory, read_only=True) as checkpoints:
        with pytest.raises(mt.CheckpointError, match="checkpoint 3: what was saved about it is"):
            checkpoints.restore(like=make(1)[1])
        with pytest.raises(mt.CheckpointError, match="3 cannot be read: what was saved about it"):
            checkpoints.newest_about()


def test_numbers_may_be_keys_of_what_is_saved_beside_a_state(tmp_path):
    """Lie: a checkpoint that is damaged from the start, since JSON sorts 10 before 9."""
    state = mt.train_step(lambda w, x: w * x, optax.sgd(0.1), devices=1).init(np.float32(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"weights": {9: 0.5, 10: 0.25}})
        assert checkpoints.restore(like=state).about == {"weights": {"9": 0.5, "10": 0.25}}


def test_all_that_are_damaged_are_passed_over_and_kept(saved, tmp_path):
    """Lies: only one is passed over; a newer one than was asked for; files that are overwritten."""
    directory = copied(saved, tmp_path)
    for number in (2, 3):
        (file,) = (directory / str(number) / "about").glob("metadata")
        file.write_text(file.read_text().replace('"number": ', '"number": 1'))
    for name in ("damaged-2", "damaged-3", "damaged-3-2"):
        (directory / name).mkdir()
    like = make(1)[1]
    with Checkpoints(directory) as checkpoints:
        with pytest.raises(mt.CheckpointError, match="3 cannot be read"):
            checkpoints.run_of(3)
        with pytest.raises(mt.CheckpointError, match=r"checkpoint 2: .* previous one, 1 \("):
            checkpoints.restore(like=like, step=2)
        said = "checkpoint 3: .*; checkpoint 2: .* from checkpoint 1"
        with pytest.warns(mt.MultitowerWarning, match=said):
            assert checkpoints.restore(like=like, allow_previous=True).step == 1
    kept = {path.name for path in directory.glob("damaged-*")}
    assert kept == {"damaged-2", "damaged-2-2", "damaged-3", "damaged-3-2", "damaged-3-3"}


def test_a_reader_passes_over_a_damaged_one_and_leaves_it_where_it_is(saved, tmp_path):
    """Lie: one who only reads renames a directory of a run that may be saving."""
    directory = copied(saved, tmp_path)
    (file,) = (directory / "3" / "about").glob("metadata")
    file.write_text("{}")
    before = sorted(directory.iterdir())
    with (
        Checkpoints(directory, read_only=True) as checkpoints,
        pytest.warns(mt.MultitowerWarning, match="from checkpoint 2; .* were left as they are"),
    ):
        assert checkpoints.restore(like=make(1)[1], allow_previous=True).step == 2
    assert sorted(directory.iterdir()) == before


def test_the_one_before_is_before_the_one_that_was_asked_for(saved, tmp_path):
    directory = copied(saved, tmp_path)
    (file,) = (directory / "2" / "about").glob("metadata")
    file.write_text(file.read_text().replace('"number": 2', '"number": 3'))
    with Checkpoints(directory) as checkpoints:
        with pytest.warns(mt.MultitowerWarning, match=r"checkpoint 2: .* from checkpoint 1"):
            found = checkpoints.restore(like=make(1)[1], step=2, allow_previous=True)
        assert (found.step, found.about) == (1, {"number": 1})
        assert checkpoints.steps() == [1, 3]


def test_a_checkpoint_under_another_number_is_found(saved, tmp_path):
    """Lie: a directory that was renamed; the run then makes other steps than it says."""
    directory = copied(saved, tmp_path)
    (directory / "3").rename(directory / "8")
    with (
        Checkpoints(directory) as checkpoints,
        pytest.raises(mt.CheckpointError, match="it is checkpoint 3 under another name"),
    ):
        checkpoints.restore(like=make(1)[1])


@pytest.mark.slow
def test_a_reader_that_is_overtaken_reads_the_next(tmp_path, capfd):
    """Lie: "damaged", of a checkpoint that the run has just replaced by a newer one."""
    like, ended, errors, read_of = make(1)[1], threading.Event(), [], set()

    def read():
        last_time = False
        while not last_time:
            last_time = ended.is_set()
            try:
                with Checkpoints(tmp_path, read_only=True) as checkpoints:
                    number, _, about = checkpoints.restore(like=like)
                    assert about == {"number": number}
                    assert checkpoints.newest_about()[0] >= number
                    read_of.add(number)
            except Exception as error:
                errors.append(error)

    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, like, {"number": 1})
        checkpoints.wait()
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for number in range(2, 15):
            checkpoints.save(number, like, {"number": number})
            checkpoints.wait()
        ended.set()
        for reader in readers:
            reader.join()
    assert errors == []
    assert 14 in read_of  # whoever was starved till then reads the last one
    assert capfd.readouterr().err == ""  # nor lines of the libraries below


def test_a_run_that_replaces_a_checkpoint_does_not_stop_its_reader(tmp_path):
    """Lie: eval of a run that trains says that the checkpoint it has just read cannot be read."""
    _, state = make(1)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, state, {}, run={"number": 1})
    with Checkpoints(tmp_path, read_only=True) as reader:
        number = reader.restore(like=state).step
        shutil.rmtree(tmp_path / "1")
        assert reader.run_of(number) == {"number": 1}


def test_another_model_is_refused_by_name(saved):
    directory, _ = saved
    other = mt.train_step(lambda w, x: (w - x) ** 2, optax.sgd(0.1), devices=1).init(1.0)
    refused = pytest.raises(mt.CheckpointError, match=r"only the model has a leaf \.params")
    with Checkpoints(directory) as checkpoints, refused:
        checkpoints.restore(like=other)


def test_the_step_of_a_state_is_a_number_of_a_checkpoint(tmp_path):
    _, state = make(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state.step, state, {})
        checkpoints.save(np.int64(3), state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [0, 3]
        assert checkpoints.restore(like=state).step == 3


def test_what_would_be_saved_nowhere_is_an_error(tmp_path):
    """Lies: a save that keeps nothing; a good checkpoint that is called damaged."""
    _, state = make(1)
    for wrong in (0, -1, 1.5):
        with pytest.raises(mt.ArgumentError, match=f"keep_last={wrong}: it must be a whole"):
            Checkpoints(tmp_path, keep_last=wrong)
    nothing = pytest.raises(mt.CheckpointError, match="nothing can be saved")
    with Checkpoints(tmp_path, read_only=True) as checkpoints, nothing:
        checkpoints.save(1, state, {})
    with Checkpoints(tmp_path) as checkpoints:
        for wrong in (-1, 1.5, "1", None):
            with pytest.raises(mt.ArgumentError, match=f"step={wrong!r}: it must be a whole"):
                checkpoints.save(wrong, state, {})
        for about in ({"rate": np.float32(1)}, {"x": {1}}, {1: 2, "a": 3}, None, "x"):
            with pytest.raises(mt.ArgumentError, match="keep a dict of JSON values, and"):
                checkpoints.save(1, state, about)
        with pytest.raises(mt.StateError, match=r"Checkpoints\.save got dict as state"):
            checkpoints.save(1, {"w": np.ones(3)}, {})
        checkpoints.save(1, state, {})
        with pytest.raises(mt.StateError, match=r"got dict as state: pass like=step\.init"):
            checkpoints.restore(like={"w": np.ones(3)})


@pytest.mark.parametrize("name", ["[lr=0.1]", "a\\b"])
def test_a_directory_whose_name_orbax_reads_as_a_pattern_is_refused(name, tmp_path):
    """Lie: checkpoints that are written without an error, and are "damaged" when they are read."""
    with pytest.raises(mt.CheckpointError, match=r"cannot be kept in .*Orbax takes \["):
        Checkpoints(tmp_path / name / "checkpoints")
    assert list(tmp_path.iterdir()) == []
    for whole in ("lr=0.1, 'a' ü", "{lr}*?"):  # what it takes as it is
        _, state = make(1)
        with Checkpoints(tmp_path / whole) as checkpoints:
            checkpoints.save(1, state, {})
            checkpoints.wait()
            assert mt.fingerprint(checkpoints.restore(like=state).state) == mt.fingerprint(state)


def test_an_empty_directory_and_one_that_cannot_be_made(tmp_path):
    refused = pytest.raises(mt.CheckpointError, match="no complete checkpoint to resume from")
    with Checkpoints(tmp_path / "new") as checkpoints, refused:
        checkpoints.restore(like=make(1)[1])
    (tmp_path / "file").write_text("")
    with pytest.raises(mt.CheckpointError, match="cannot be kept in"):
        Checkpoints(tmp_path / "file" / "inside")


def test_trap_an_unfinished_save_is_the_latest_checkpoint(tmp_path):
    """maxtext#5260: a directory that a killed process left half-written counts as the newest."""
    _, state = make(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]


def test_reading_leaves_a_save_in_progress_alone(tmp_path):
    """Lie: `multitower eval` cleans up what the run there is writing at the moment."""
    trainer = mt.Trainer(losses, optax.sgd(0.1), run_dir=tmp_path, keep_best="hits", devices=1)
    _, state = make(1)
    for kept in ("checkpoints", "best"):
        with Checkpoints(tmp_path / kept) as checkpoints:
            checkpoints.save(1, state, {"scores": {"loss": 1.0}})
        (tmp_path / kept / "2.orbax-checkpoint-tmp").mkdir()
    assert trainer.best == (1, {"loss": 1.0})
    Checkpoints(tmp_path / "checkpoints", read_only=True).close()
    for kept in ("checkpoints", "best"):
        assert (tmp_path / kept / "2.orbax-checkpoint-tmp").exists()


def test_a_save_that_has_failed_waits_for_nobody(tmp_path):
    """Lie: an error that somebody else handles around the save is taken for one of the save."""
    _, state = make(1)
    try:
        raise KeyError("of the caller")
    except KeyError:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state, {})
            checkpoints.wait()
            try:
                raise OSError("of the save")
            except OSError:
                with pytest.raises(OSError, match="of the save"):
                    checkpoints._manager._meet(key="a", timeout_ms=1)
    assert checkpoints.steps() == [1]


def test_trap_a_failed_background_save_that_nobody_hears_of(tmp_path, monkeypatch):
    """orbax#605."""
    _, state = make(1)
    checkpoints = Checkpoints(tmp_path)

    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._manager._manager, "check_for_errors", fail)
    with pytest.raises(mt.CheckpointError, match=r"No space left .* MiB are free"):
        checkpoints.save(1, state, {})
    monkeypatch.undo()
    checkpoints.close()


def test_a_failure_at_the_very_end_is_one_of_ours(tmp_path, monkeypatch):
    """Lie: a bare OSError from a thread of Orbax's, if the disk goes bad at the last moment."""
    checkpoints = Checkpoints(tmp_path)
    _, state = make(1)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    close = checkpoints._manager._manager.close

    def fail():
        close()
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checkpoints._manager._manager, "close", fail)
    with pytest.raises(mt.CheckpointError, match="Read-only file system"):
        checkpoints.close()


def test_a_leaf_without_elements(tmp_path):
    # The lie: Orbax's words, "Cannot save arrays with zero size", and a run that cannot be saved.
    step = mt.train_step(
        lambda p, x: (p["w"] * x + p["none"].sum()) ** 2, optax.adam(0.1), devices=2
    )
    make_state = lambda w: step.init({"w": jnp.float32(w), "none": jnp.zeros((0, 3))})
    with Checkpoints(tmp_path) as checkpoints:
        state = make_state(2)
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(like=make_state(0)).state
    assert mt.fingerprint(restored) == mt.fingerprint(state)
    assert restored.params["none"].shape == (0, 3)


def test_as_many_checkpoints_are_kept_as_are_asked_for(tmp_path):
    # The lie: keep_last is dropped, and a test that saves as many as are kept does not see it.
    _, state = make(1)
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for number in range(1, 6):
            checkpoints.save(number, state, {})
            checkpoints.wait()
        assert checkpoints.steps() == [4, 5]


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"a": np.float32(1), "b": np.float32(2)}, {"a": np.float32(1)}),
        ({"a": np.float32(1)}, {"a": np.float32(1), "b": np.float32(2)}),
        ({"a": np.float32(1)}, {"a": np.float16(1)}),
        ({"a": np.ones(2, np.float32)}, {"a": np.ones(3, np.float32)}),
    ],
)
def test_what_is_on_disk_is_what_is_asked_for(saved, wanted, tmp_path):
    # The lie: leaves more or fewer, or another dtype, are taken as they come.
    step = mt.train_step(lambda p, x: sum(jnp.sum(v) for v in p.values()) * x, optax.sgd(0.1))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, step.init(saved), {})
        checkpoints.wait()
        with pytest.raises(mt.CheckpointError, match=r"params\['[ab]'\]"):
            checkpoints.restore(like=step.init(wanted))


def test_leaves_come_back_to_their_places_beyond_ten(tmp_path):
    # The lie: names sorted as text, so that leaf 10 comes before leaf 2.
    step = mt.train_step(lambda p, x: sum(p) * x, optax.sgd(0.1), devices=1)
    state = step.init([np.float32(n) for n in range(12)])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(like=step.init([np.float32(0)] * 12)).state
    assert [float(leaf) for leaf in restored.params] == list(range(12))
