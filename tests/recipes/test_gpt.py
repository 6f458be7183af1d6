"""The recipe gpt: its loss, its optimizer, its command line, on a model of 10 000 parameters."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.cli.main import main
from multitower.data.datasets.text import Text
from multitower.recipes import gpt
from multitower.recipes.catalog import find_recipe
from multitower.recipes.packing import SEPARATOR
from multitower.runs.options import RunOptions
from multitower.runs.setup import RecipeJob
from multitower.runs.train import run
from numpy_transformer import numpy_logits
from processes import run_fork

MICRO = gpt.make_recipe(gpt.Options(size="micro", synthetic=True))
# Documents of all lengths: in a batch of two rows one tower has fewer bytes to predict.
TEXT = Text([bytes(range(65, 65 + n)) for n in (3, 1, 30, 2, 2, 1, 1, 9)], [b"held out"])
LENGTH = 8


@pytest.fixture(scope="module")
def rows():
    return gpt.make_data(TEXT, LENGTH).train["tokens"]


@pytest.fixture(scope="module")
def params():
    return MICRO.init(jax.random.key(0))  # by operations, as a run does: they share programs


def documents_of(row):
    """The parts of a row that see each other, each with what it predicts."""
    starts = [place for place in range(1, len(row) - 1) if row[place] == SEPARATOR]
    for start, end in zip([0, *starts], [*starts, len(row) - 1], strict=True):
        yield row[start:end].tolist(), row[start + 1 : end + 1].tolist()


def mean_by_hand(params, rows):
    """The mean loss of all predicted bytes, in nats."""
    losses = []
    for row in rows:
        for inputs, targets in documents_of(row):
            scores = numpy_logits(params, inputs)
            shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            losses += [
                -math.log(shares[n, byte]) for n, byte in enumerate(targets) if byte != SEPARATOR
            ]
    assert len(losses) == sum(map(len, TEXT.train))
    return np.mean(losses)


def test_the_loss_is_the_mean_over_predicted_bytes(params, rows):
    # The lies: padding or a separator that counts, a mean of means, nats that are called bits.
    wanted = mean_by_hand(params, rows)
    found, shown = jax.jit(gpt.loss)(params, {"tokens": rows})
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    assert float(shown["bits_per_byte"]) == pytest.approx(wanted / math.log(2), rel=1e-5)


@pytest.mark.slow
def test_a_score_is_the_mean_over_predicted_bytes(params, rows):
    scored = mt.evaluate(gpt.metrics, params, {"tokens": rows}, global_batch=4, devices=1)
    wanted = mean_by_hand(params, rows) / math.log(2)
    assert scored["bits_per_byte"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_two_towers_with_unequal_numbers_of_bytes_are_one_device(params, rows):
    batch = {"tokens": rows[:4]}
    counted = (batch["tokens"][:, 1:] != SEPARATOR).reshape(2, -1).sum(1)
    assert counted[0] != counted[1]
    rate = 0.5
    step = mt.train_step(gpt.loss, optax.sgd(rate), devices=2, towers=2, clip_norm=1.0)
    state, shown = step(step.init(params), batch)
    value, gradient = jax.jit(jax.value_and_grad(lambda p: gpt.loss(p, batch)[0]))(params)
    factor = min(1.0, 1.0 / math.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient))))
    assert factor < 1
    expected = jax.tree.map(lambda p, g: p - rate * factor * g, params, gradient)
    assert float(shown["loss"]) == pytest.approx(float(value), rel=1e-5)
    for new, wanted in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        np.testing.assert_allclose(new, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_matrices_decay_and_norms_and_the_embedding_do_not(params):
    optimizer = gpt.make_optimizer(gpt.Options(size="micro", learning_rate=0.5))(1).build()
    nothing = jax.tree.map(np.zeros_like, params)
    update = jax.jit(lambda params: optimizer.update(nothing, optimizer.init(params), params)[0])
    update = jax.device_get(update(params))
    flat, _ = jax.tree_util.tree_flatten_with_path(update)
    for (path, change), leaf in zip(flat, jax.tree.leaves(params), strict=True):
        is_matrix = len(path) > 1 and leaf.ndim > 1
        expected = -0.5 * 0.1 * np.asarray(leaf) if is_matrix else np.zeros_like(leaf)
        np.testing.assert_allclose(change, expected, rtol=1e-5, err_msg=str(path))


@pytest.mark.slow
def test_the_learning_rate_rises_and_falls_along_a_cosine(params):
    optimizer = gpt.make_optimizer(gpt.Options(learning_rate=1.0, weight_decay=0))(200).build()
    ones = {"norm": jnp.ones(1)}
    state, found = optimizer.init(ones), []
    update = jax.jit(optimizer.update)
    for _ in range(201):
        change, state = update(ones, state, ones)
        # With one gradient for ever Adam moves by the rate itself.
        found.append(-float(change["norm"][0]))
    places = [0, 5, 10, 105, 200]
    np.testing.assert_allclose(
        [found[n] for n in places], [1 / 11, 6 / 11, 1.0, 0.55, 0.1], rtol=1e-4
    )


def test_the_sizes_are_those_of_their_names():
    for name, millions in {"micro": 0.0101, "tiny": 0.468, "small": 9.9, "medium": 85.2}.items():
        shapes = jax.eval_shape(gpt.make_recipe(gpt.Options(size=name)).init, jax.random.key(0))
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert count == pytest.approx(1e6 * millions, rel=0.02), name


@pytest.mark.parametrize("content", [b"xy", b"abc\n" * 30, b"x" * 120])
def test_a_text_that_fills_no_row_is_refused_in_words(content, tmp_path):
    """Lie: a run that trains on rows of filling."""
    file = tmp_path / "short.txt"
    file.write_bytes(content)
    recipe = gpt.make_recipe(gpt.Options(data=file))
    with pytest.raises(mt.DataError, match="a row of this model takes 128"):
        recipe.data()


def test_128_kib_of_what_is_held_out_are_scored_from_its_beginning_to_its_end():
    text = Text([b"a" * 128], [bytes([n]) * 2**18 for n in range(1, 5)])
    tokens = gpt.make_data(text, 128).test["tokens"]
    assert tokens.shape == (1024, 129)
    assert np.bincount(tokens[:, 5], minlength=5).tolist() == [0, 256, 256, 256, 256]
    few = Text([b"aa"], [b"bcd"])
    assert gpt.make_data(few, 2).test["tokens"].tolist() == [[256, 98, 99], [99, 100, 256]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "huge"}, r"size=huge: say micro, tiny, small, medium\."),
        ({"data": "text.txt", "synthetic": "true"}, r"both synthetic text and data=text\.txt"),
        ({"length": "1"}, r"length=1 is out of range: use 2 to"),
        ({"learning_rate": "-1"}, r"learning_rate=-1\.0 is out of range"),
    ],
)
def test_options_that_make_no_sense(settings, message):
    with pytest.raises(mt.RunError, match=message):
        find_recipe("gpt", settings)


# ---------------------------------------------------------------- writing


@pytest.mark.slow
def test_the_coldest_text_is_the_most_probable_byte_each_time(params):
    tokens = [SEPARATOR, *b"abc"]
    expected = b""
    for _ in range(6):
        scores = numpy_logits(params, tokens)[-1][:SEPARATOR]
        tokens.append(int(scores.argmax()))
        expected += bytes(tokens[-1:])
    found = MICRO.generate(params, "abc", num_bytes=6, temperature=0, seed=0)
    text = expected.decode("utf-8", "replace")
    assert found == "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


@pytest.mark.slow
def test_draws_follow_the_scores_divided_by_the_temperature(params):
    # As many bytes as below: the same program.
    write = lambda seed: MICRO.generate(params, "a", num_bytes=5, temperature=0.03, seed=seed)
    scores = numpy_logits(params, [SEPARATOR, 97])[-1][:SEPARATOR] / 0.03
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    byte = int(shares[:128].argmax())
    assert 0.1 < shares[byte] < 0.9
    hits = sum(write(seed)[0] == chr(byte) for seed in range(200))
    spread = math.sqrt(200 * shares[byte] * (1 - shares[byte]))
    assert abs(hits - 200 * shares[byte]) < 4 * spread
    assert write(7) == write(7)


@pytest.mark.parametrize("prompt", ["", "x" * 16])
def test_a_prompt_that_does_not_fit_is_an_error(params, prompt):
    with pytest.raises(mt.RunError, match=rf"has {len(prompt)} bytes: this model takes 1 to 15\."):
        MICRO.generate(params, prompt, num_bytes=1, temperature=1.0, seed=0)


# ---------------------------------------------------------------- the command line

WORDS = ["train", "gpt", "--size", "micro", "--synthetic", "--towers", "2", "--steps", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpt") / "run"
    assert main([*WORDS, "--devices", "1", "--run-dir", str(directory)]) == 0
    return directory


@pytest.mark.slow
def test_a_run_says_how_many_bits_and_of_which_text(trained):
    result = json.loads((trained / "result.json").read_text())
    assert result["clip_norm"] == 1.0
    assert 7.5 < result["test_bits_per_byte"] < 8.5
    assert result["test_bits_per_byte"] == pytest.approx(result["test_loss"] / math.log(2))
    options = result["options"]
    assert (options["size"], options["synthetic"]) == ("micro", True)
    assert len(options["text_sha256"]) == 64
    text = gpt.make_synthetic_text()
    assert options["train_bytes"] == sum(map(len, text.train))
    assert options["held_out_bytes"] == sum(map(len, text.test))
    report = (trained / "report.html").read_text()
    assert all(char >= " " or char in "\n\t" for char in report)
    assert '<th scope="row">clip norm</th><td class="unset">not set</td><td>1.0</td>' in report
    assert "Generated text" in report
    assert f"<b>{text.test[0].decode()[:7]}</b>" in report


@pytest.mark.slow
def test_one_device_has_the_same_fingerprint(trained, tmp_path):
    assert main([*WORDS, "--devices", "2", "--run-dir", str(tmp_path)]) == 0
    keys = ("fingerprint", "test_bits_per_byte")
    one, two = (json.loads((d / "result.json").read_text()) for d in (trained, tmp_path))
    assert [one[key] for key in keys] == [two[key] for key in keys]


@pytest.mark.slow
def test_a_run_is_scored_again(trained, capsys):
    assert main(["eval", str(trained), "--devices", "1"]) == 0
    scored = json.loads(capsys.readouterr().out)
    result = json.loads((trained / "result.json").read_text())
    assert scored["fingerprint"] == result["fingerprint"]
    assert scored["test_bits_per_byte"] == result["test_bits_per_byte"]


@pytest.fixture(scope="module")
def changed(params, tmp_path_factory):
    """The directory of a run whose state is not its first one, and the parameters of that state.

    What a run leaves for `sample`, without training: that is compiled for many seconds.
    """
    directory = tmp_path_factory.mktemp("gpt")
    options, settings = RunOptions(devices=1), {"size": "micro", "synthetic": "true"}
    config = {"recipe": "gpt", "settings": settings, "options": dataclasses.asdict(options)}
    (directory / "config.json").write_text(json.dumps(config))
    trainer = RecipeJob.of(MICRO, options, directory).trainer
    others = jax.tree.map(lambda leaf: -2 * np.asarray(leaf), params)
    with mt.Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.save(1, trainer.step.init(others), {})
    return directory, others


def sampled(directory, capsys, *flags):
    """What `multitower sample` prints."""
    assert main(["sample", str(directory), "--prompt", "abc ", "--bytes", "5", *flags]) == 0
    return capsys.readouterr().out


def test_a_checkpoint_writes_text(changed, params, capsys, monkeypatch):
    monkeypatch.delattr(gpt, "_read")  # it needs none of the text that it has learned from
    directory, others = changed
    seeds = [["--seed", number] for number in "334"]
    texts = [sampled(directory, capsys, *flags) for flags in (*seeds, ["--temperature", "0"])]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("abc ") and len(text) > 5 for text in texts)
    # It is the state of the checkpoint that writes, not the first one.
    write = lambda own: MICRO.generate(own, "abc ", num_bytes=5, temperature=0, seed=0)
    assert texts[3] == f"abc {write(others)}\n" != f"abc {write(params)}\n"


@pytest.mark.slow
def test_a_run_writes_text(trained, params, capsys):
    text = sampled(trained, capsys, "--temperature", "0")
    untrained = MICRO.generate(params, "abc ", num_bytes=5, temperature=0, seed=0)
    assert text.startswith("abc ")
    assert text != f"abc {untrained}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "the prompt has 0 bytes: this model takes 1 to 15."),
        (["--prompt", "a", "--bytes", "0"], "0 bytes were asked for: it must be 1 or more."),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0: it must be 0 or more."),
        (["--prompt", "a", "--seed", "-1"], "--seed -1 is out of range"),
        (["--prompt", "a", "--best"], "no state has been kept as the best"),
    ],
)
def test_what_sample_cannot_do_is_one_line(changed, capsys, flags, message):
    assert main(["sample", str(changed[0]), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_is_no_run_of_a_language_model(tmp_path, capsys):
    assert main(["sample", str(tmp_path), "--prompt", "a"]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"recipe": "digits", "options": {}}')
    assert main(["sample", str(tmp_path), "--prompt", "a"]) == 2
    assert "is a run of the recipe digits, which writes no text" in capsys.readouterr().err
    gpt_run = {"recipe": "gpt", "options": {}, "settings": {"size": "micro"}}
    (tmp_path / "config.json").write_text(json.dumps(gpt_run))
    assert main(["sample", str(tmp_path), "--prompt", "a"]) == 2
    assert "checkpoints does not exist: no complete checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["digits", "cifar10"])
def test_size_is_refused_where_there_are_no_sizes(recipe, capsys):
    assert main(["train", recipe, "--size", "tiny"]) == 2
    assert f"the recipe {recipe} has no option 'size'." in capsys.readouterr().err


TWO_PROCESSES = ["--simulate-processes", "2"]


@pytest.mark.slow
def test_the_same_bits_on_one_device_and_on_two_processes(tmp_path):
    words = ["train", "gpt", "--size", "micro", "--synthetic", "--towers", "4", "--steps", "2"]
    words += ["--simulate", "1"]
    found = []
    for number, where in enumerate(([], TWO_PROCESSES)):
        run_dir = tmp_path / str(number)
        words_here = [*words, *where, "--run-dir", str(run_dir)]
        run_fork("-m", "multitower", *words_here, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
        result = json.loads((run_dir / "result.json").read_text())
        found.append([result[key] for key in ("fingerprint", "test_bits_per_byte")])
    assert found[0] == found[1]


@pytest.mark.slow
def test_trap_a_report_of_parameters_that_are_split_over_processes(tmp_path):
    # The lie: a run that trains to its end, and fails when the first process alone writes of it.
    words = ["train", "gpt", "--size", "micro", "--synthetic", "--shard-params", "--steps", "2"]
    where = [*TWO_PROCESSES, "--simulate", "1", "--run-dir", str(tmp_path)]
    run_fork("-m", "multitower", *words, *where, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert "Generated text" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_every_way_to_make_a_step_trains_the_same_model():
    # With towers one device says the same as two; what blocks and shards are needs two.
    plain = run(MICRO, RunOptions(devices=1, steps=2))["test_loss"]
    for devices, options in (
        (1, {"towers": 2, "stages": 2}),
        (2, {"towers": 2, "shard_update": True}),
        (2, {"shard_params": True}),
    ):
        found = run(MICRO, RunOptions(devices=devices, steps=2, **options))["test_loss"]
        assert found == pytest.approx(plain, rel=1e-5), options
    options = {"towers": 2, "stages": 2, "compute_dtype": "bfloat16"}
    narrow = run(MICRO, RunOptions(devices=1, steps=2, **options))["test_loss"]
    assert narrow != plain
    assert narrow == pytest.approx(plain, rel=0.01)


@pytest.mark.slow
def test_the_default_learns(tmp_path):
    # 100 of the 1500 steps come to 3.97, from the 8 of random bytes; to count bytes gives over 4.5.
    run_fork("-m", "multitower", "train", "gpt", "--steps", "100", "--run-dir", str(tmp_path))
    assert json.loads((tmp_path / "result.json").read_text())["test_bits_per_byte"] < 4.2
