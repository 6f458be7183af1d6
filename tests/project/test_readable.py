"""README and the documentation can be believed: links lead somewhere, figures were measured."""

import re

import pytest

from places import ROOT, text_of

RESULTS = ROOT / "benchmarks" / "results"
TEXTS = {
    str(path.relative_to(ROOT)): text_of(path)
    for path in sorted(
        [
            *ROOT.glob("*.md"),
            *ROOT.glob("docs/**/*.md"),
            *ROOT.glob("examples/**/*.md"),
            *ROOT.glob("benchmarks/**/*.md"),
        ]
    )
}
PAGES = ["README.md", *(name for name in TEXTS if name.startswith("docs/"))]


def without_code(text):
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


# ---------------------------------------------------------------- links

# The changelog's format, and what a Kubernetes cluster needs.
OUTSIDE = {
    "https://keepachangelog.com/en/1.1.0/",
    "https://semver.org/spec/v2.0.0.html",
    "https://jobset.sigs.k8s.io",
}


def anchors_of(text):
    """As MkDocs and web views of Markdown name the headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    """Lie: a link to a page that was renamed, or to a heading that is gone."""
    found = re.findall(r"\]\(([^)\s]+)\)(?:\{[^}]*\})?", without_code(TEXTS[name]))
    for link in found:
        if "://" in link:
            assert link in OUTSIDE, link
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target.read_text(encoding="utf-8")), link


# ---------------------------------------------------------------- figures


def rows(text):
    """The cells of all table rows."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def table(text, corner):
    """The rows of the table whose first title this is, without titles."""
    (start,) = re.finditer(rf"^\| {re.escape(corner)} \|", text, re.MULTILINE)
    return rows(text[start.start() :].partition("\n\n")[0])[2:]


def section(file, title):
    text = (RESULTS / file).read_text(encoding="utf-8")
    return re.split(r"^## ", text, flags=re.MULTILINE)[
        [part.split("\n")[0] for part in re.split(r"^## ", text, flags=re.MULTILINE)].index(title)
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_overhead_was_measured(page):
    """Lie: a time that nobody measured, or that was true once."""
    measured = {
        (work, contender): [float(number) for number in (ms, ratio, more)]
        for work, contender, ms, ratio, _, more in rows(
            section("step_overhead.md", "Python 3.13.0, JAX 0.12.0.1")
        )[2:]
    }
    shown = {"LeNet-5": "LeNet-5", "MLP 784": "MLP-1024", "Polynomial": "Polynomial"}
    found = table(TEXTS[page], "work, 2 devices")
    assert len(found) == 3
    for title, by_hand, fast, same_bits in found:
        (work,) = (name for start, name in shown.items() if title.startswith(start))
        ms, _, _ = measured[work, "hand-written"]
        assert by_hand == f"{ms:.2f} ms"
        assert fast == f"{measured[work, 'fast'][1]:.2f}x"
        _, ratio, more = measured[work, "same bits"]
        # Two digits of a half may go either way.
        assert same_bits in {f"{ratio:.2f}x ({more + nudge:+.2f} ms)" for nudge in (0, 1e-9)}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_overhead_on_a_gpu_was_measured(page):
    """Lie: the same, of a machine that nobody here can ask again."""
    measured = {}
    for row in rows(section("gpu.md", "Steps that fill the GPU")):
        if len(row) == 7:  # of the transformer, the second table, with cuDNN's attention
            measured[row[0].partition(",")[0].lower(), row[1]] = row[2:4]
    found = table(TEXTS[page], "work, one GPU")
    assert len(found) == 3
    for title, by_hand, *ratios in found:
        work = title.partition(",")[0].lower()
        assert by_hand == f"{float(measured[work, 'hand-written'][0]):.2f} ms"
        ways = [f"{float(measured[work, way][1]):.2f}x" for way in ("fast", "same bits")]
        assert ratios == ways


def test_times_in_the_guide_to_speed_on_gpus_were_measured():
    """Lie: the same, in a guide."""
    measured = re.findall(r"\d+\.\d+", (RESULTS / "gpu.md").read_text(encoding="utf-8"))
    times = re.findall(r"(\d+\.(\d+)) ms", TEXTS["docs/guides/gpu-speed.md"])
    assert len(times) == 4
    for time, digits in times:
        assert time in {f"{float(one):.{len(digits)}f}" for one in measured}


def test_comparison_was_measured():
    """Lie: a ratio to another library that no run has shown."""
    works = ["Polynomial", "MLP-1024", "LeNet-5", "ResNet-20", "Transformer", "GPT"]
    measured = {}
    for work in works:
        for title, ms, ratio, *_, lines in (row[:8] for row in rows(section("peers.md", work))[2:]):
            measured[title.removesuffix(" (1)"), work] = float(ms), ratio, lines
    table = [row for row in rows(TEXTS["README.md"]) if len(row) == 8][2:]
    assert len(table) == 11
    for title, *cells, lines in table:
        for work, cell in zip(works, cells, strict=True):
            ms, ratio, counted = measured[title, work]
            if cell.endswith(" ms"):
                digits = len(cell.removesuffix(" ms").partition(".")[2])
                assert cell == f"{ms:.{digits}f} ms", (title, work)
            else:
                assert cell == f"{ratio}x", (title, work)
            assert lines == counted, title


def test_accuracies_of_the_examples_were_measured():
    """Lie: an accuracy from another version of the example."""
    measured = rows((RESULTS / "examples.md").read_text(encoding="utf-8"))[2:]
    shown = [row for row in rows(TEXTS["examples/README.md"]) if row[0].startswith("[")]
    found = [[re.sub(r"\[(\w+)\].*", r"\1", folder), one, four] for folder, _, one, four in shown]
    assert found == measured


def test_the_first_step_of_stages_was_measured():
    """Lie: programs that are compiled once, and take as long as if they were not."""
    measured = rows(section("stages_compile.md", "Python 3.13.0, JAX 0.12.0.1"))
    found = rows(TEXTS["docs/guides/stages.md"])
    assert len(measured) == 5
    assert all(row in found for row in measured)


def test_losses_of_asynchronous_training_were_measured():
    """Lie: a table of losses from another run."""
    measured = {
        tuple(row[:4]): row[5]
        for row in rows(section("asynchronous.md", "Losses"))
        if len(row) == 7
    }
    ways = [("synchronous", "0.9"), ("asynchronous", "0.9")]
    ways += [("with `momentum_correction`", "0.9"), ("asynchronous", "0.0")]
    table = [row for row in rows(TEXTS["docs/guides/asynchronous.md"]) if len(row) == 6][2:]
    assert len(table) == 6
    for towers, rate, *losses in table:
        assert losses == [measured[towers, *way, rate] for way in ways]


# Figures that are not measurements: why they may stand in the text.
NOT_MEASURED = {
    "170 MB": "the size of CIFAR-10's archive",
}


@pytest.mark.parametrize("page", PAGES)
def test_figures_stand_in_tables_that_are_compared(page):
    """Lie: "only 3 % slower", in a sentence that no test reads."""
    if page == "docs/changelog.md":
        return
    prose = re.sub(r"^\|.*\|$", "", without_code(TEXTS[page]), flags=re.MULTILINE)
    found = re.findall(r"\b\d[\d.,]*(?: ?(?:ms|GB|MB|GiB|MiB|%)(?!\w)|x\b)", prose)
    assert [figure for figure in found if figure not in NOT_MEASURED] == []


# ---------------------------------------------------------------- words


@pytest.mark.parametrize("page", [name for name in PAGES if "coming-from/" in name])
def test_programs_have_names(page):
    """Lie of a kind: "there" and "here", where a reader must guess which library is which."""
    text = without_code(TEXTS[page])
    for point in re.findall(r"^- \*\*.*?(?=^- |^#|^\||\Z)", text, re.MULTILINE | re.DOTALL):
        assert not re.search(r"\b([Hh]ere|[Tt]here|[Oo]urs)\b", point), point

    for point in re.findall(r"^- \*\*.*?(?=^- |^#|^\||\Z)", TEXTS[page], re.M | re.S):
        assert "multitower" in point or page.endswith("index.md"), point


@pytest.mark.parametrize("page", PAGES)
def test_what_contradicts_the_code_is_gone(page):
    """Lie: what was true once."""
    for gone in ("to come", "Many machines", "come along", "comes along", "No toll", "P2", "P4"):
        assert gone not in TEXTS[page] or page == "docs/changelog.md", gone


@pytest.mark.parametrize("page", PAGES)
def test_a_tower_is_explained_where_it_first_appears(page):
    """Lie of a kind: a word of our own that a reader cannot know."""
    own = {"docs/reference/", "docs/changelog.md", "docs/glossary.md", "docs/coming-from/index.md"}
    text = without_code(TEXTS[page])
    if any(page.startswith(start) for start in own) or text.count("tower") < 4:
        return
    assert re.search(r"\*tower\*|\*towers\*|\*Tower\*", text), page
