"""The examples: run, equal to their one-device versions, two lines apart, and shown as they are."""

import difflib
import json
import runpy
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import multitower as mt
from events import events_of
from places import EXAMPLES

NAMES = ["vector_add", "polynomial", "matrix_powers"]
SHOWN = [*NAMES, "contrastive", "large_model", "local_updates"]
FRAMEWORKS = ["flax_nnx", "flax_linen", "equinox", "haiku", "keras", "plain_jax"]


def versions(name):
    one = runpy.run_path(str(EXAMPLES / name / "one_device.py"))
    every = runpy.run_path(str(EXAMPLES / name / "all_devices.py"))
    return one["main"], every["main"]


def changed_lines(name):
    """The lines that differ, without the docstring and empty lines."""
    texts = [
        (EXAMPLES / name / f"{which}.py").read_text().split('"""', 2)[2].splitlines()
        for which in ("one_device", "all_devices")
    ]
    lines = list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]
    return [line for line in lines if line[0] in "+-" and line[1:].strip()]


@pytest.mark.parametrize("name", NAMES + FRAMEWORKS)
def test_two_lines_differ(name):
    # The lie: "two lines" that are three, or a second program in disguise.
    added = [line for line in changed_lines(name) if line[0] == "+"]
    assert len(added) == 2
    assert "+import multitower as mt" in added


@pytest.mark.parametrize("name", SHOWN)
def test_under_sixty_lines_and_shown_as_it_is(name):
    # The lie: a page that shows another diff than the files have.
    page = (EXAMPLES / "README.md").read_text()
    for line in changed_lines(name):
        assert line in page
    for which in ("one_device", "all_devices"):
        assert len((EXAMPLES / name / f"{which}.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("num_rows", [1000, 1001, 1])
def test_vector_add_is_exact(num_rows):
    # The lie: rows lost, doubled or rounded where they do not divide.
    one, every = versions("vector_add")
    total = every(num_rows)
    np.testing.assert_array_equal(total, one(num_rows))
    assert isinstance(total, jax.Array)
    assert len(total.sharding.device_set) == len(mt.devices())


@pytest.mark.slow
def test_polynomial_equals_one_device():
    # The lie: rows that do not count, or a loss of another size. (Adam hides the size of a
    # gradient; test_trap_gradients_n_times_too_big looks at that.)
    one, every = versions("polynomial")
    loss, weights = one(1001)
    all_loss, all_weights = every(1001)
    np.testing.assert_allclose(weights[:2], [5, 0], atol=0.05)
    assert 3 < weights[2] < 4  # the number of steps of the classic program leaves it on its way
    # 1001 Adam steps in float32 amplify the rounding of one step.
    np.testing.assert_allclose(all_weights, weights, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(all_loss, loss, rtol=2e-3)


def test_matrix_powers_equal_one_device_and_numpy():
    # The lie: the classic version computes the power n+1.
    one, every = versions("matrix_powers")
    total = every(5, 40)
    rng = np.random.default_rng(0)
    a, b = rng.uniform(size=(2, 40, 40)).astype(np.float32) / 40
    expected = sum(np.linalg.matrix_power(m.astype(np.float64), 5) for m in (a, b))
    np.testing.assert_allclose(total, expected, rtol=1e-4)
    np.testing.assert_allclose(total, one(5, 40), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_a_contrastive_loss_equals_that_of_the_whole_batch():
    # The lie: negatives of a tower's own rows only, which trains, to something else.
    one, every = versions("contrastive")
    loss, params = one(steps=4)
    all_loss, all_params = every(steps=4)
    assert all_loss == pytest.approx(loss, rel=1e-4)
    for found, wanted in zip(all_params, params, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4)  # Adam enlarges the rounding


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_a_contrastive_loss_in_stages_equals_that_of_the_whole_batch():
    # The lies: two encoders on one device; a page that shows other lines than the file has.
    path = EXAMPLES / "contrastive" / "in_stages.py"
    made = runpy.run_path(str(path))
    loss, params = versions("contrastive")[0](steps=4)
    staged_loss, staged_params = made["main"](steps=4)
    assert staged_loss == pytest.approx(loss, rel=1e-4)
    for found, wanted in zip(staged_params, params, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4)  # Adam enlarges the rounding
    (runner,) = made["step"]._makers.newest.runners.values()
    assert runner._job.chain.homes == (0, 0, 1, 1)
    assert made["step"].layout.place_of == (0, 1)
    lines = path.read_text().splitlines()
    page = (EXAMPLES / "README.md").read_text().split("## A contrastive loss in stages")[1]
    shown = [line[1:] for line in page.split("```")[1].splitlines() if line.startswith("+")]
    assert len(shown) == 2
    assert set(shown) <= {*lines}
    assert len(lines) < 60


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_asynchronous_towers_learn():
    # The lie: a rotation that trains nothing, or a program that reads every update at once.
    every = runpy.run_path(str(EXAMPLES / "asynchronous" / "all_devices.py"))["main"]
    loss, state = every(300)
    assert loss < 0.2  # the labels have variance 1.4
    assert int(state.step) == 300


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_a_model_cut_over_devices_is_the_one_of_one_device():
    # The lies: "cut" that leaves the whole model on every device; another training.
    one, every = versions("large_model")
    loss, params, accuracy = one(steps=60)
    all_loss, all_params, all_accuracy = every(steps=60)
    assert accuracy > 0.9
    assert all_accuracy == pytest.approx(accuracy, abs=0.01)
    assert all_loss == pytest.approx(loss, rel=1e-2)
    for found, wanted in zip(all_params, params, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-3)  # Adam enlarges the rounding


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_towers_that_train_on_their_own_learn_too():
    # The lies: towers that never meet, or an average that has learnt nothing.
    one, every = versions("local_updates")
    accuracies = one()[2], every()[2]
    assert min(accuracies) > 0.9
    assert abs(accuracies[0] - accuracies[1]) < 0.05


def test_the_contrastive_loss_changes_two_lines_and_one_call():
    added = [line for line in changed_lines("contrastive") if line[0] == "+"]
    assert len(added) == 4
    assert sum("mt.all_rows" in line or "mt.row_index" in line for line in added) == 2


def test_two_products_run_at_the_same_time():
    # The lie: "parallel" that runs one after the other. Each waits for the other one to be there.
    both_there = threading.Barrier(2, timeout=30)

    def meet(x):
        both_there.wait()
        return x

    @mt.make_parallel
    def square(matrices):
        shape = jax.ShapeDtypeStruct(matrices.shape, matrices.dtype)
        here = jax.pure_callback(meet, shape, matrices)
        return here @ here

    square = mt.make_parallel(square.__wrapped__, devices=2)
    matrices = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    result = square(matrices)
    np.testing.assert_allclose(result, matrices @ matrices, rtol=1e-5, atol=1e-5)
    assert [shard.device for shard in result.addressable_shards] == mt.devices(2)


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
@pytest.mark.filterwarnings("ignore:.*with statistics of their own tower.s rows")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_learns_on_all_devices_as_on_one(name, monkeypatch):
    # The lies: a framework that "is supported" and learns nothing; a loss of another size.
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # Keras looks for TensorFlow otherwise
    pytest.importorskip(name.partition("_")[0] if name != "plain_jax" else "jax")
    one, every = versions(name)
    (losses, accuracy), (all_losses, all_accuracy) = one(), every()
    assert accuracy > 0.85
    assert all_accuracy > 0.85
    if name == "plain_jax":  # neither dropout nor BatchNorm: equal up to rounding
        np.testing.assert_allclose(all_losses, losses, rtol=2e-2, atol=2e-3)
    else:
        # Towers draw and normalise on their own, over 32 rows instead of 64: another, noisier
        # training loss by design (test_haiku and its like replay it exactly), an equal model.
        assert np.mean(all_losses[-20:]) < 0.1 * all_losses[0]
        assert abs(all_accuracy - accuracy) < 0.05
    assert len(all_losses) == 132


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_the_server_answers_many_at_once():
    # The lies: answers of another request; rows that filled a batch up; a mistake that ends it.
    made = runpy.run_path(str(EXAMPLES / "serving" / "server.py"))
    images, labels = made["load_digits"](return_X_y=True)
    server = made["make_server"](0, made["Predictor"](made["train"]()))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def post(content):
        url = f"http://127.0.0.1:{server.server_port}"
        request = urllib.request.Request(url, data=json.dumps(content).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    try:
        sizes = [1, 7, 64, 100, 3, 1, 30]
        starts = np.cumsum([0, *sizes[:-1]])
        asked = [images[a : a + n].tolist() for a, n in zip(starts, sizes, strict=True)]
        with ThreadPoolExecutor(len(sizes)) as pool:
            answers = [answer["digits"] for answer in pool.map(post, asked)]
        assert [len(answer) for answer in answers] == sizes
        found = np.concatenate(answers)
        assert np.mean(found == labels[: len(found)]) > 0.9
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post([[1, 2, 3]])
        assert len(post(asked[0])["digits"]) == 1
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(capsys, monkeypatch):
    # The lies: a plot of something else than the text says; a notebook that needs a GPU.
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((EXAMPLES / "notebook" / "digits.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {}
    for source in sources:
        exec(compile(source, "digits.ipynb", "exec"), names)
    assert names["accuracy"] > 0.85
    differences = names["differences"]
    assert max(map(max, (differences[3, 8], differences[8, 8]))) == 0
    assert differences[8, None][-1] > 100 * differences[8, None][0] > 0
    assert names["same"]
    np.testing.assert_array_equal(names["on_eight"], names["on_one"])
    assert names["rows"].max() == 1000
    assert "not safe to run data parallel" in capsys.readouterr().out
    names["plt"].close("all")


@pytest.mark.slow
def test_the_tower_program(tmp_path, capsys):
    # The lies: per-tower variables that stay frozen, a saver that restores something else,
    # two points of a step in the summaries.
    path = EXAMPLES / "tower_program" / "tower_program.py"
    assert len(path.read_text().splitlines()) < 120
    main = runpy.run_path(str(path))["main"]
    result, restored, state, predictions, tower_losses = main(tmp_path, epochs=4)
    assert result["accuracy"] > 0.8
    assert mt.fingerprint(restored) == mt.fingerprint(state)
    assert predictions.shape == (360,)
    assert sorted(tower_losses) == list(range(1, 45))
    assert all(len(losses) == 4 and len(set(losses)) == 4 for losses in tower_losses.values())
    assert "epoch 4" in capsys.readouterr().out
    phases = {path.name: path for path in (tmp_path / "events").iterdir()}
    assert set(phases) == {"train", "test"}
    for phase, steps in (("train", range(1, 45)), ("test", (11, 22, 33, 44))):
        events = events_of(phases[phase])
        points = {
            tag: [one.step for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]
        }
        assert points["loss"] == points["accuracy"] == list(steps)
        assert all(len(found) == len(set(found)) for found in points.values())
