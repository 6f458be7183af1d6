"""The documentation: its code runs, what it names is there, it builds, and it needs no network.

README is one of its pages. Links, figures and words are looked at in test_readable.py.
"""

import ast
import functools
import html
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import zlib
from html.parser import HTMLParser
from typing import NamedTuple

import numpy as np
import pytest

import multitower as mt
from forks import compiling_quickly
from places import ROOT, text_of

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
PAGES |= {"../README.md": ROOT / "README.md"}

# As in conftest.py: tests leave out most of XLA's optimizations.
LEFT_OUT = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"

# Programs of these pages take long, most of them to compile.
SLOW = {
    "coming-from/accelerate.md",
    "coming-from/horovod.md",
    "coming-from/keras.md",
    "coming-from/mirrored-strategy.md",
    "coming-from/named-sharding.md",
    "coming-from/pmap.md",
    "coming-from/pytorch.md",
    "frameworks.md",
    "guides/asynchronous.md",
    "guides/batchnorm.md",
    "guides/bayesian.md",
    "guides/check-parallel.md",
    "guides/checkpointing.md",
    "guides/command-line.md",
    "guides/comparing-rows.md",
    "guides/data.md",
    "guides/debugging.md",
    "guides/early-stopping.md",
    "guides/evaluation.md",
    "guides/existing-loop.md",
    "guides/fine-tuning.md",
    "guides/gpu-speed.md",
    "guides/gradient-accumulation.md",
    "guides/gradient-clipping.md",
    "guides/inference.md",
    "guides/language-model.md",
    "guides/large-models.md",
    "guides/memory.md",
    "guides/mixup.md",
    "guides/model-state.md",
    "guides/mixed-precision.md",
    "guides/padding.md",
    "guides/profiling.md",
    "guides/ragged-batches.md",
    "guides/randomness.md",
    "guides/several-models.md",
    "guides/slow-links.md",
    "guides/stages.md",
    "guides/tracking.md",
    "guides/trainer.md",
    "guides/weight-decay.md",
    "index.md",  # whose code is that of README
    "same-bits.md",
    "tutorial.md",
    "which-api.md",
}

# A fence of three or more backticks, perhaps indented, to the same one again.
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+) ?(?P<kind>[^`\n]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
# Ours runs. What is only shown, the code of others above all, says so.
OURS = re.compile(r'python(?: title="[^"]+")?')
SHOWN = re.compile(r'\{ \.python \.foreign title="[^"]+" \}')
OTHERS = {"diff", "sh", "text", "toml"}

# What users import apart from `multitower` itself.
ELSEWHERE = {
    "data.datasets.cifar10": ("download_cifar10", "read_cifar10"),
    "data.datasets.download": ("cache_directory",),
    "data.datasets.mnist": ("download_mnist", "read_mnist"),
    "data.datasets.synthetic": ("make_synthetic",),
    "data.datasets.text": ("read_text",),
    "recipes": ("DataSets", "Optimizer", "Recipe", "find_recipe", "option_names"),
    "runs.options": ("RunOptions",),
    "runs.sample": ("sample",),
    "runs.train": ("run", "score"),
}


class Block(NamedTuple):
    """A fenced block of a page; `line` is the number of its first line of code."""

    kind: str
    line: int
    code: str


@functools.cache
def blocks(page):
    text = text_of(PAGES[page])
    return [
        Block(
            match["kind"].strip(),
            text.count("\n", 0, match.start("code")) + 1,
            textwrap.dedent(match["code"]),
        )
        for match in FENCE.finditer(text)
    ]


def blocks_of(kind):
    """All blocks of one kind, with their pages."""
    return [
        (page, block)
        for page in PAGES
        for block in blocks(page)
        if re.fullmatch(kind, block.kind)
    ]  # fmt: skip


def words(text):
    return " ".join(text.split())


# ---------------------------------------------------------------- the code


RUN = [
    pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
    for page in dict.fromkeys(page for page, _ in blocks_of(OURS))
]


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, monkeypatch, tmp_path, capsys):
    """Lie: code that does not run, a claim that its own assertion refutes, a made-up output."""
    monkeypatch.chdir(tmp_path)
    if page == "guides/debugging.md" and compiling_quickly() and LEFT_OUT:
        pytest.skip("XLA's older emitter, which tests use here, looks through the page's barrier")
    namespace = {"__name__": "__main__"}
    for block in blocks(page):
        if OURS.fullmatch(block.kind):
            # With so many empty lines before it, a traceback names the line of the page.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(PAGES[page]), "exec"), namespace)
    printed = words(capsys.readouterr().out)
    for block in blocks(page):
        if block.kind == "text":
            assert words(block.code) in printed


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_kind(page):
    """Lie: a block that nobody runs because of a slip in its first line."""
    found = blocks(page)
    for block in found:
        known = block.kind in OTHERS or OURS.fullmatch(block.kind) or SHOWN.fullmatch(block.kind)
        assert known, f"{page}, line {block.line}: {block.kind!r}"
    assert len(re.findall(r"^ *```", text_of(PAGES[page]), re.MULTILINE)) == 2 * len(found)


@pytest.mark.parametrize(("page", "block"), blocks_of(SHOWN))
def test_code_that_is_only_shown_can_be_read_by_python(page, block):
    """Lie: the program of another library, with a mistake that it would not have there."""
    ast.parse(block.code, filename=page)


def test_the_first_thing_is_a_diff_of_two_lines_and_both_sides_agree():
    """Lie: "two lines" that are three, or that change the answer."""
    diff = blocks("index.md")[0]
    assert diff.kind == "diff"
    assert diff.code == blocks("../README.md")[0].code
    lines = diff.code.splitlines()
    assert [line[0] for line in lines if line[:1] in ("+", "-")] == ["+", "-", "+"]
    answers = []
    for side in "-+":
        code = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", side))
        namespace = {}
        exec(compile(code, f"index.md, side {side}", "exec"), namespace)
        x = np.linspace(-1, 1, 39, dtype=np.float32).reshape(13, 3)
        params, batch = {"w": np.ones(3, np.float32)}, {"x": x, "y": 5 * x.sum(1) + 3}
        opt_state = namespace["optimizer"].init(params)
        for _ in range(2):
            params, opt_state, loss = namespace["train"](params, opt_state, batch)
        # The same loss goes to train_step, as the page says under the diff.
        mt.train_step(namespace["losses"], namespace["optimizer"], towers=8)
        answers.append([loss, *params["w"]])
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-5)


# ---------------------------------------------------------------- what is named is there


@functools.cache
def help_of(command):
    """What `multitower COMMAND --help` prints, in a process that runs already."""
    import contextlib
    import io

    from multitower.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue()


def shell_blocks():
    """Those of the pages; README and examples/README.md, read on the web, indent theirs."""
    found = [(page, block.code) for page, block in blocks_of("sh")]
    for path in (ROOT / "README.md", ROOT / "examples" / "README.md"):
        lines = re.findall(r"^    (\S.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        found.append((path.name, "\n".join(x for x in lines if x.startswith(("make", "multit")))))
    return found


@pytest.mark.parametrize(("page", "code"), shell_blocks())
def test_commands_are_there(page, code):
    """Lie: a command that does not know the flag that the page tells to pass."""
    from multitower.recipes.catalog import SHIPPED, find_recipe, option_names

    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in code.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":
            assert arguments[0] in targets, line
        if program == "multitower":
            own = option_names(arguments[1]) if arguments[1:] and arguments[1] in SHIPPED else ()
            options = {"--" + name.replace("_", "-") for name in own}
            for flag in (word for word in arguments if word.startswith("--")):
                assert flag in options or re.search(rf"{flag}\b", help_of(arguments[0])), line
            settings = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--set"]
            if settings:
                find_recipe(arguments[1], dict(pair.split("=") for pair in settings))


def test_settings_files_are_understood(tmp_path):
    """Lie: a TOML file with a name that there is not."""
    from multitower.cli.flags.config_file import read_config_file
    from multitower.recipes.catalog import find_recipe

    for _, block in blocks_of("toml"):
        path = tmp_path / "settings.toml"
        path.write_text(block.code)
        config = read_config_file(path)
        find_recipe(config.recipe, config.settings)


@pytest.mark.parametrize("page", PAGES)
def test_no_page_knows_this_machine_or_an_index(page):
    """Lie: a path that only the writer has; a place to install from that may be gone."""
    text = PAGES[page].read_text(encoding="utf-8")
    assert not re.search(r"/(tmp|home|root|work|Users)/|pypi|index-url|devpi", text)
    for path in re.findall(r"\b(?:ARCHITECTURE\.md|(?:benchmarks|examples)/[\w/.]+\w)", text):
        assert (ROOT / path).exists(), path


# ---------------------------------------------------------------- the reference, and the site


def public_names():
    """Everything that the reference must have, name to thing."""
    names = {f"multitower.{name}": getattr(mt, name) for name in mt.__all__}
    for place, own in ELSEWHERE.items():
        module = importlib.import_module(f"multitower.{place}")
        names |= {f"multitower.{place}.{name}": getattr(module, name) for name in own}
    return names


def test_every_public_name_has_a_place_in_the_reference():
    """Lie: "every public name" without the new one. (A second look for Pythons without MkDocs.)"""
    pages = "".join(PAGES[page].read_text() for page in PAGES if page.startswith("reference/"))
    directives = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    assert not set(public_names()) - directives


@pytest.mark.parametrize("name", mt.__all__)
def test_every_public_name_has_a_guide_that_uses_it(name):
    """Lie: "where each name is used", and the page there says nothing of it."""
    index = PAGES["reference/index.md"]
    row = re.search(rf"^\| \[`{name}`\].*\]\((\S+)\) \|$", index.read_text(), re.MULTILINE)
    assert row, name
    page = (index.parent / row[1].partition("#")[0]).resolve()
    text = page.read_text(encoding="utf-8")
    shown_elsewhere = page.name == "errors.md" or issubclass(
        value if isinstance(value := getattr(mt, name), type) else int, mt.MultitowerError
    )
    returned = {"TrainStep": "train_step", "TowerRows": "mt.shard", "TrainState": "state"}
    files = {"MetricsFile": "metrics.jsonl", "EventFiles": "events/"}
    assert shown_elsewhere or (returned | files).get(name, name) in text


# What people type into the search box, and a page or section that is called so.
PHRASES = [
    "experiment tracking",
    "profiling",
    "gradient accumulation",
    "mixed precision",
    "gradient clipping",
    "asynchronous training",
    "weight decay",
    "early stopping",
    "checkpointing",
    "resume",
    "troubleshooting",
    "multi-node training",
    "fine-tuning",
    "lora",
    "fsdp",
    "pipeline parallelism",
    "network security",
    "padding",
    "token",
    "language model",
    "eval mode",
    "batchnorm",
    "model state",
    "dropout",
    "batch inference",
    "prefetching",
    "data augmentation",
    "learning rate",
    "nan",
    "gpu memory",
    "optimizer state",
    "last batch",
    "reproducibility",
    "glossary",
    "changelog",
    "examples",
]


def check_flags_stay_in_one_piece(site):
    page = (site / "guides" / "multi-node" / "index.html").read_text(encoding="utf-8")
    assert '<span class="flag">--distributed</span>' in page
    assert not re.search(r"<code>[^<]*--[a-z]", re.sub(r"<pre.*?</pre>", "", page, flags=re.S))


def check_search_finds(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = [page["title"].lower() for page in index["docs"]]
    for phrase in PHRASES:
        assert any(phrase in title for title in titles), phrase


class Loads(HTMLParser):
    """Collects what a browser fetches by itself for a page."""

    def __init__(self, text):
        super().__init__()
        self.urls = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag != "a":
            kept = tag == "link" and found.get("rel") in {"canonical", "prev", "next"}
            self.urls += [] if kept else [found.get("src"), found.get("href"), found.get("srcset")]
        self.urls += re.findall(r"url\(([^)]*)\)", found.get("style") or "")


def check_nothing_from_outside(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        outside = [u for u in Loads(text).urls if u and re.match(r"['\"]?(\w+:)?//", u)]
        assert not outside, (path, outside)
        # Material's script fetches a diagram library, and facts about a repository, for these.
        assert 'class="mermaid"' not in text
        assert 'data-md-component="source"' not in text
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text()), path


def check_every_public_name_is_there(site):
    _, _, _, _, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    places = dict(re.findall(r"^(\S+) py:\S+ \S+ (\S+) ", zlib.decompress(packed).decode(), re.M))
    for name, thing in public_names().items():
        path, anchor = places[name].replace("$", name).split("#")
        page = (site / path / "index.html").read_text(encoding="utf-8")
        assert f'id="{anchor}"' in page, name
        first_line = (inspect.getdoc(thing) or "").partition("\n")[0].replace("`", "")
        text = html.unescape(re.sub(r"<[^>]*>", "", page))
        assert len(first_line) > 10, name
        assert words(first_line) in words(text), name


@pytest.mark.slow
def test_the_site_builds_complete_and_needs_nothing_from_outside(tmp_path):
    """Lies: a broken link, a public name that is left out, a page that calls home.

    One test, because the site is built once for all of this.
    """
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed")
    build = subprocess.run(
        # Not with --quiet: a warning that is not written does not count as one.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    check_nothing_from_outside(tmp_path)
    check_every_public_name_is_there(tmp_path)
    check_search_finds(tmp_path)
    check_flags_stay_in_one_piece(tmp_path)
    assert str(ROOT) not in "".join(path.read_text() for path in tmp_path.rglob("*.html"))
