"""report.html: one harmless file that shows all that happened, whatever a run is called."""

import base64
import io
import json
import os
import re
import sys
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
from PIL import Image

import multitower as mt
from multitower.recipes.catalog import find_recipe
from multitower.runs.pipeline import describe_pipeline
from multitower.runs.report import Sample, TextSample, write_report
from multitower.runs.report_page.charts import draw_charts
from multitower.runs.report_page.curves import read_curves, thin
from multitower.runs.report_page.pipeline import draw_pipeline
from multitower.runs.report_page.scales import for_metric, for_steps, linear, logarithmic
from multitower.runs.train import RunOptions, run
from multitower.stages.layout import lay_out
from multitower.stages.order import Segments
from processes import run_python

CONFIG = {
    "recipe": "digits",
    "settings": {"width": 16},
    "options": {"devices": None, "towers": 8, "steps": 3, "global_batch": None, "best": "max"},
}
RESULT = {
    "recipe": "digits",
    "options": {"width": 16, "path": "/a/b"},
    "steps": 3,
    "batch_size": 64,
    "test_accuracy": 0.98765,
    "test_loss": 0.0447,
    "best": {"step": 2, "accuracy": 0.99},
    "fingerprint": "9dfee0b2",
    "towers": 8,
    "devices": 2,
    "same_bits": True,
    "examples_per_s": 2152.3,
    "seconds": 19.4,
    "versions": {"jax": "0.10.2"},
    "host": {"cpu_cores": 2, "platform": "cpu", "device_kind": "cpu"},
}
PLACEMENT = [("cpu:0", range(4)), ("cpu:1", range(4, 8))]
VOID = {"meta", "img", "link", "br", "wbr", "hr", "input"}


class Outline(HTMLParser):
    """The tags of a page; refuses one that is closed twice, never, or in the wrong place."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> too many"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "".join(self.texts)


def line(step, phase="train", **metrics):
    return {"phase": phase, "step": step, **metrics}


def make_page(directory, lines=(), *, config=CONFIG, result=RESULT, samples=(), texts=()):
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (directory / "metrics.jsonl").write_text(text)
    shown = {"samples": samples, "texts": texts}
    path = write_report(directory, config=config, result=result, placement=PLACEMENT, **shown)
    assert path == directory / "report.html"
    return path.read_text(encoding="utf-8")


def three_lines():
    train = [line(s, loss=1 / s, accuracy=s / 4, examples_per_s=9.0 * s) for s in (1, 2, 3)]
    return [*train, line(3, "test", loss=0.5, accuracy=0.5)]


def pictures(page):
    """The drawings of the charts: for each metric one for cards of each width."""
    return re.findall(r'<svg class="(?:medium|narrow|wide)".*?</svg>', page, re.DOTALL)


def points(picture, kind):
    found = re.search(f'<path class="{kind}" d="(.*?)"', picture).group(1)
    return [tuple(map(float, xy.split())) for xy in re.findall(r"[\d.]+ [\d.]+", found)]


def columns(picture):
    """Where the labels of the steps stand: the middle of a text is at its x."""
    return {
        label: float(x)
        for x, label in re.findall(r'<text class="across" x="(.*?)" y=".*?">(.*?)</text>', picture)
    }


def heights(picture):
    """Where the labels of the values stand: at lines of the grid, in the same order."""
    lines = re.findall(r'<path class="grid" d="M [\d.]+ ([\d.]+) ', picture)
    labels = re.findall(r'<text class="up".*?>(.*?)</text>', picture)
    return {label: float(y) for y, label in zip(lines, labels, strict=True)}


def sample(label=3, predicted=5, probability=0.75, channels=1):
    return Sample(np.full((4, 6, channels), 7, np.uint8), label, predicted, probability)


# ---------------------------------------------------------------- one file, harmless


def test_trap_a_report_that_loads_something_from_elsewhere(tmp_path):
    # The lie: "one file", and a font, a script or an image that is missing without a network.
    page = make_page(tmp_path, three_lines(), samples=[sample()])
    for outside in ("http:", "https:", "//", "@import", "url(", "<script", "<link", "<iframe"):
        assert outside not in page.replace("image/png;base64", ""), outside
    for tag, attributes in Outline(page).tags:
        assert attributes.get("src", "data:").startswith("data:"), tag
        assert "href" not in attributes
        assert not [name for name in attributes if name.startswith("on")], tag


HOSTILE = "<script>alert('x')</script>\"'&<img src=//evil onerror=x>"


def test_trap_a_recipe_whose_name_is_a_script(tmp_path):
    # The lie: names and paths are text. They come from users, and from other people's recipes.
    config = {"recipe": HOSTILE, "settings": {HOSTILE: HOSTILE}, "options": {HOSTILE: [HOSTILE]}}
    host = {"platform": HOSTILE, "device_kind": HOSTILE, HOSTILE: HOSTILE}
    versions = {HOSTILE: HOSTILE}
    bad = {"recipe": HOSTILE, "options": {HOSTILE: HOSTILE}, "fingerprint": HOSTILE}
    result = {**RESULT, **bad, "test_" + HOSTILE: 1.0, "best": {HOSTILE: 1.0}}
    result |= {"host": host, "versions": versions}
    lines = [line(1, loss=1.0, **{HOSTILE: 2.0}), line(2, HOSTILE, loss=None)]
    lines += [line(s, HOSTILE, loss=1.0) for s in range(3, 999)]
    page = make_page(tmp_path, lines, config=config, result=result)
    write_report(tmp_path, config=config, result=result, placement=[(HOSTILE, [0])])
    for one in (page, (tmp_path / "report.html").read_text(encoding="utf-8")):
        outline = Outline(one)
        assert not [tag for tag, _ in outline.tags if tag in ("script", "img")]
        assert not [tag for tag, attributes in outline.tags if "onerror" in str(attributes.keys())]
        assert HOSTILE in outline.text


def test_a_path_that_is_no_text_does_not_cost_the_report(tmp_path):
    config = {**CONFIG, "recipe": os.fsdecode(b"/tmp/\xff.py")}
    assert "\\udcff.py" in make_page(tmp_path, config=config)


@pytest.mark.slow
def test_what_cannot_be_written_leaves_the_old_report_alone(tmp_path, monkeypatch):
    # The lie: half a page, where there was a whole one.
    old = make_page(tmp_path, three_lines())

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("multitower.runs.directory.os.replace", refuse)
    with pytest.raises(mt.RunError, match=r"report\.html cannot be written: No space left"):
        make_page(tmp_path, result={**RESULT, "recipe": "another"})
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


# ---------------------------------------------------------------- what it says


def test_the_page_tells_what_happened(tmp_path):
    page = make_page(tmp_path, three_lines(), samples=[sample()])
    outline = Outline(page)
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        "Curves",
        "Sample predictions",
        "Devices and towers",
        "Settings",
        "Software and machine",
    ]
    for told in ("98.77 %", "2,152", "19.4 s", "9dfee0b2", "/a/b", "0.10.2"):
        assert told in outline.text, told
    assert "Best test phase: step 2, accuracy 99 %." in outline.text
    assert "3 steps, 8 towers on 2 simulated CPU devices" in outline.text
    assert "64 examples is cut into 8 towers of 8 examples" in outline.text
    assert ("html", {"lang": "en"}) in outline.tags


def test_what_was_asked_for_stands_beside_what_was_used(tmp_path):
    # The lie: an option "best" that shows the result of that name.
    page = make_page(tmp_path)
    rows = re.findall(r'<th scope="row">(.*?)</th><td[^>]*>([^<]*)</td><td>([^<]*)</td>', page)
    assert {option: found for option, *found in rows} == {
        "recipe": ["digits", "digits"],
        "devices": ["not set", "2"],
        "towers": ["8", "8"],
        "steps": ["3", "3"],
        "global batch": ["not set", "64"],
        "best": ["max", "max"],
    }


def test_every_device_shows_its_towers(tmp_path):
    page = make_page(tmp_path)
    rows = re.findall(r'<th scope="row">(cpu:\d)</th><td><ol class="chips">(.*?)</ol>', page)
    found = {device: re.findall(r"<li>(\d+)</li>", chips) for device, chips in rows}
    assert found == {"cpu:0": ["0", "1", "2", "3"], "cpu:1": ["4", "5", "6", "7"]}


def test_a_pipeline_has_a_box_for_every_program(tmp_path):
    # The lie: a figure of some other order, or of one device alone.
    layout = lay_out(jax.devices()[:4], 6, 3, (1, 3))
    segments = Segments((0, 1, 2), (0, 0, 0), (1, 1, 1), (True, True, False))
    result = {**RESULT, "pipeline": describe_pipeline(layout, segments)}
    path = write_report(tmp_path, config=CONFIG, result=result, placement=PLACEMENT)
    page = path.read_text(encoding="utf-8")
    Outline(page)
    assert page.count('<rect class="forward"') == 6 * 2
    assert page.count('<rect class="backward"') == 6 * 3
    assert page.count('<rect class="idle"') == 3
    assert "tower 5, stage 2, backward" in page
    assert "gives 25 %" in page  # 2 / (6 + 2)


def test_a_pipeline_of_towers_that_meet_has_a_box_for_every_round(tmp_path):
    # The lies: one box for two programs; the formula of towers that do not meet.
    layout = lay_out(jax.devices()[:2], 3, 2, (1, 2))
    segments = Segments((0, 1, 1), (0, 0, 1), (1, 0.5, 0.5), (True, True, False))
    found = draw_pipeline(describe_pipeline(layout, segments))
    assert found["picture"].count('<rect class="forward"') == 3 * 2
    assert found["picture"].count('<rect class="backward"') == 3 * 3
    assert "tower 2, stage 1, round 1, backward" in found["picture"]
    result = {**RESULT, "pipeline": describe_pipeline(layout, segments)}
    path = write_report(tmp_path, config=CONFIG, result=result, placement=PLACEMENT)
    page = path.read_text(encoding="utf-8")
    assert "The towers meet 1 time" in page
    assert "(P-1)/(M+P-1)" not in page
    # A run that was resumed after its last step has made none.
    result = {**RESULT, "pipeline": describe_pipeline(layout, None)}
    path = write_report(tmp_path, config=CONFIG, result=result, placement=PLACEMENT)
    assert "</rect>" not in path.read_text(encoding="utf-8")


def test_trap_simulated_devices_taken_for_a_speed_up(tmp_path):
    # The lie: "2152 examples/s on 2 devices", which are two threads of one CPU.
    warning = "do not show the speed-up"
    assert warning in Outline(make_page(tmp_path)).text
    gpu = {**RESULT, "host": {"platform": "gpu", "device_kind": "NVIDIA H100"}}
    outline = Outline(make_page(tmp_path, result=gpu))
    assert "speed-up" not in outline.text
    assert "2 GPUs (NVIDIA H100)" in outline.text
    # Two machines with a CPU each simulate nothing.
    outline = Outline(make_page(tmp_path, result={**RESULT, "processes": 2}))
    assert warning in outline.text
    assert "simulated" not in outline.text
    assert "2 CPU devices belong to 2 processes" in outline.text


def test_a_run_without_fixed_towers_does_not_promise_its_bits(tmp_path):
    promise = "The same on any number of devices"
    assert promise in make_page(tmp_path)
    assert promise not in make_page(tmp_path, result={**RESULT, "same_bits": False})


# ---------------------------------------------------------------- samples


def test_every_sample_shows_its_label_its_prediction_and_whether_it_is_right(tmp_path):
    samples = [sample(3, 5, 0.75), sample(2, 2, 0.5, channels=3), sample(1, 0, float("nan"))]
    page = make_page(tmp_path, samples=samples)
    outline = Outline(page)
    images = [attributes for tag, attributes in outline.tags if tag == "img"]
    assert [one["alt"] for one in images] == [
        f"Test example {i}, label {label}" for i, label in ((1, 3), (2, 2), (3, 1))
    ]
    items = [re.sub(r"<.*?>|\s+", " ", item) for item in re.findall(r"(?s)<img.*?</li>", page)]
    words = [" ".join(item.split()) for item in items]
    assert words == [
        "✗ wrong predicted 5 label 3 75 %",
        "✓ right predicted 2 label 2 50 %",
        "✗ wrong predicted 0 label 1 \N{EN DASH}",
    ]


def test_without_samples_there_is_no_section_of_them(tmp_path):
    assert "Sample predictions" not in make_page(tmp_path)


def test_generated_text_keeps_its_lines_and_stays_text(tmp_path):
    texts = [TextSample("def f(x):\n", "    return x\n"), TextSample("<b>", HOSTILE)]
    page = make_page(tmp_path, texts=texts)
    outline = Outline(page)
    assert "<h2>Generated text</h2>" in page
    assert "<b>def f(x):\n</b>    return x\n</pre>" in page
    assert [tag for tag, _ in outline.tags].count("pre") == 2
    assert "<script" not in page
    assert "Generated text" not in make_page(tmp_path)


def test_an_image_of_another_kind_is_named(tmp_path):
    bad = sample()._replace(image=np.zeros((4, 4), np.float32))
    with pytest.raises(mt.RunError, match=r"samples\[1\].image is float32 of shape \(4, 4\)"):
        make_page(tmp_path, samples=[sample(), bad])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_sample_has_the_pixels_of_its_image(tmp_path, channels):
    # The lie: an image that is not what the model saw: turned, cut, with its colours swapped.
    image = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    page = make_page(tmp_path, samples=[sample()._replace(image=image)])
    source = re.search(r'src="data:image/png;base64,(.*?)"', page).group(1)
    with Image.open(io.BytesIO(base64.b64decode(source))) as decoded:
        np.testing.assert_array_equal(np.asarray(decoded).reshape(image.shape), image)


# ---------------------------------------------------------------- curves


def test_trap_a_spike_that_thinning_hides(tmp_path):
    # The lie: a smooth curve, of a run in which one step in twenty thousand exploded.
    spike, num_steps = 12_345, 20_000
    lines = [
        line(s, loss=50.0 if s == spike else 1 + 0.1 * (s % 7), accuracy=0.5, examples_per_s=5e3)
        for s in range(1, num_steps + 1)
    ]
    page = make_page(tmp_path, lines, samples=[sample()] * 24)
    assert len(page.encode()) < 500_000
    assert "highest 50 at step 12,334 to 12,416" in page
    for picture in pictures(page)[:3]:  # the three drawings of the loss
        band = points(picture, "band train")
        assert len(band) < 1_000
        top = min(y for _, y in band)
        assert top == pytest.approx(heights(picture)["50"], abs=0.1)  # the top of the axis
        places = columns(picture)
        at = places["0"] + (places["20k"] - places["0"]) * spike / num_steps
        assert min(abs(x - at) for x, y in band if y == top) < 3
    Outline(page)


def test_every_point_of_a_short_run_is_drawn():
    curve = thin([(s, float(s)) for s in range(1, 241)])
    assert curve.points_per_stretch == 1
    assert [s.mean for s in curve.stretches] == list(range(1, 241))
    for picture in pictures(draw_charts({"speed": {"train": curve}})):
        line = points(picture, "line train")
        assert len(line) == 240
        across, up = columns(picture), heights(picture)
        step = (across["200"] - across["0"]) / 200
        assert [(x - across["0"]) / step for x, _ in line] == pytest.approx(range(1, 241), abs=0.1)
        height = (up["200"] - up["0"]) / 200
        assert [(y - up["0"]) / height for _, y in line] == pytest.approx(range(1, 241), abs=0.1)


@pytest.mark.slow
def test_the_pointer_finds_every_point_once(tmp_path):
    # The lie: a tooltip that lacks its point, or has its neighbour's.
    train = [line(s, loss=float(s)) for s in range(1, 1001)]
    page = make_page(tmp_path, [*train, line(1000, "test", loss=7.0)])
    titles = re.findall(r"<title>(step .*?)</title>", page, re.DOTALL)
    assert len(titles) == 240
    assert all(title.count("train") == 1 for title in titles)
    assert titles[0] == "step 1 to 4\ntrain 2.5 (1 to 4)"
    assert [title for title in titles if "test" in title] == titles[-1:]


def test_values_that_are_not_finite_are_a_gap_and_a_mark(tmp_path):
    losses = [3.0, 2.0, None, 1.0, 0.5]
    page = make_page(tmp_path, [line(s, loss=x) for s, x in enumerate(losses, 1)])
    for picture in pictures(page):
        drawn = re.search(r'<path class="line train" d="(M.*?)"', picture).group(1)
        assert drawn.count("M") == 2
        assert len(points(picture, "line train")) == 4
        assert len(points(picture, "lost")) == 2
    assert "1 value not finite" in Outline(page).text


def test_a_metric_without_any_finite_value_still_has_a_chart(tmp_path):
    page = make_page(tmp_path, [line(1, loss=None), line(2, loss=None)])
    assert "loss over 2 steps. train: no finite value." in page
    Outline(page)


def test_an_empty_file_and_none_at_all_give_a_report_without_curves(tmp_path):
    assert "wrote no metrics" in make_page(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    path = write_report(tmp_path, config=CONFIG, result={"recipe": "digits"}, placement=[])
    assert "wrote no metrics" in path.read_text(encoding="utf-8")


def test_a_single_step_is_a_dot(tmp_path):
    result = {**RESULT, "steps": 1, "examples_per_s": None}
    page = make_page(tmp_path, [line(1, loss=2.0)], result=result)
    for picture in pictures(page):
        one, again = points(picture, "dots train")
        assert one == again  # a line without length, with round ends
        assert one[0] == columns(picture)["1"]
        assert one[1] == pytest.approx(heights(picture)["2"], abs=0.1)
    Outline(page)


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line(1, loss=2.0)) + '\n{"phase": "tra')
    assert len(read_curves(path)["loss"]["train"].stretches) == 1


def test_damaged_lines_are_left_out(tmp_path):
    """Lie: a run that has made all its steps, and ends in a traceback of its report."""
    damaged = [b"\xff", b"[]", b"3", b"{}", b'{"phase": "train", "step": "x", "loss": 1}']
    other = json.dumps({**line(2, loss=1.0), "note": "x"}).encode()
    whole = json.dumps(line(1, loss=2.0)).encode()
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([whole, *damaged, other]))
    assert read_curves(tmp_path / "metrics.jsonl")["loss"]["train"].final == 1.0
    assert len(read_curves(tmp_path / "metrics.jsonl")["loss"]["train"].stretches) == 2


def test_metrics_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(mt.RunError, match=r"metrics\.jsonl cannot be read"):
        read_curves(tmp_path / "metrics.jsonl")


def test_the_few_points_of_the_test_phase_are_drawn_over_the_training(tmp_path):
    page = make_page(tmp_path, [line(1, "test", loss=1.0), line(1, loss=2.0), line(2, loss=1.0)])
    assert page.index('class="line train"') < page.index('class="line test"')


@pytest.mark.slow
def test_the_loss_comes_first_and_every_metric_has_a_chart():
    one = {"train": thin([(1, 0.5), (2, 0.25)])}
    html = draw_charts({"loss": one, "top_5_accuracy": one, "examples_per_s": one})
    assert re.findall("<h3>(.*?)</h3>", html) == ["loss", "top 5 accuracy", "examples per second"]
    labels = [
        attributes["aria-label"]
        for tag, attributes in Outline(html).tags
        if attributes.get("role") == "img"
    ]
    assert labels[0].startswith("loss over 2 steps. train: from 0.5 to 0.25, lowest 0.25 at step 2")


# ---------------------------------------------------------------- axes


def is_drawn(low, high):
    """Whether both ends lie within the drawing, the low one not above the high one."""
    curve = thin([(1, low), (2, high)])
    for picture in pictures(draw_charts({"loss": {"train": curve}})):
        height = float(re.search(r'viewBox="0 0 \d+ (\d+)"', picture).group(1))
        (_, first), (_, last) = points(picture, "line train")
        if not 0 <= last <= first <= height:
            return False
    return True


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 1),
        (0.17, 1),
        (-3, 7),
        (5, 5),
        (0, 0),
        (-2, -2),
        (1e-9, 3e-9),
        (0, 1e300),
        (1e9, 1e9 + 1),
    ],
)
def test_an_axis_holds_its_values_and_a_few_round_marks(low, high):
    axis = linear(low, high)
    assert axis.low <= low <= high <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    labels = [label for _, label in axis.ticks]
    assert len(set(labels)) == len(labels)
    assert is_drawn(low, high)


@pytest.mark.parametrize(("low", "high"), [(0.03, 2.4), (1e-7, 3), (1, 20), (1e-250, 1e250)])
def test_a_logarithmic_axis_holds_its_values_and_a_few_powers(low, high):
    axis = logarithmic(low, high)
    assert axis.low <= low <= high <= axis.high
    assert 2 <= len(axis.ticks) <= 12
    assert is_drawn(low, high)


def test_a_loss_that_falls_far_is_drawn_as_ratios_and_a_zero_is_not():
    assert for_metric("loss", 0.01, 2).logarithmic
    assert not for_metric("loss", 0.0, 2).logarithmic
    assert not for_metric("accuracy", 0.01, 1).logarithmic
    assert for_metric("examples_per_s", 900, 1000).low == 0


@pytest.mark.parametrize(("high", "labels"), [(0, "0 1"), (1, "0 1"), (3, "0 1 2 3")])
def test_staleness_is_a_whole_number_of_updates(high, labels):
    """Lie: marks at 0.2 updates, or an axis that begins at the staleness of a resumed run."""
    assert [label for _, label in for_metric("staleness", high, high).ticks] == labels.split()


@pytest.mark.parametrize("last", [0, 1, 2, 7, 12, 200, 23_450, 10_000_000])
def test_steps_are_whole_numbers(last):
    labels = [label for _, label in for_steps(last).ticks]
    assert len(labels) == len(set(labels)) <= 7
    assert not any("." in label for label in labels)


# ---------------------------------------------------------------- what draws


@pytest.mark.parametrize("library", ["matplotlib", "jinja2", "PIL"])
def test_a_library_that_is_missing_is_named_before_the_training(tmp_path, monkeypatch, library):
    for name in [one for one in sys.modules if one.startswith("multitower.runs.report")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [one for one in sys.modules if one.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    said = rf"the report of a run needs {library}, which is not installed\. Run: pip install"
    with pytest.raises(mt.RunError, match=said):
        run(find_recipe("digits"), RunOptions(steps=1), directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_line_imports_what_draws_only_where_it_draws():
    # The lie: --help and --version that wait for matplotlib.
    found = run_python(
        "-c",
        "import sys, multitower.cli.train, multitower.cli.scale;"
        "print([n for n in ('matplotlib', 'jinja2', 'PIL') if n in sys.modules])",
    )
    assert found.strip() == "[]"
