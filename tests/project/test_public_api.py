"""What `import multitower as mt` shows, and what it costs."""

import ast
import doctest
import inspect
import operator
import pickle
from pathlib import Path

import pytest

import multitower as mt
from processes import run_fork, run_python

SOURCES = sorted(Path(mt.__file__).parent.rglob("*.py"))


def test_all_is_complete_and_sorted():
    """Lie: a public name that nobody can find, or a private one that everybody uses."""
    public = {
        name
        for name, value in vars(mt).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(mt.__all__) == {*public, "testing"}
    assert mt.__all__ == sorted(mt.__all__)
    assert dir(mt) == mt.__all__


def test_public_classes_say_where_users_find_them():
    """Lie: a traceback that names a module which nobody is promised."""
    classes = [thing for thing in vars(mt).values() if inspect.isclass(thing)]
    assert len(classes) > 20
    for one in classes:
        assert f"{one.__module__}.{one.__qualname__}" == f"multitower.{one.__name__}"
        assert pickle.loads(pickle.dumps(one)) is one


@pytest.mark.parametrize("name", mt.__all__)
def test_every_public_name_is_documented(name):
    """Lie: a function without its errors and an example that runs."""
    value = getattr(mt, name)
    doc = inspect.getdoc(value)
    assert doc
    if inspect.isfunction(value):
        assert "Raises:" in doc
        assert "Example:" in doc
        assert ">>> " in doc
        for argument in inspect.signature(value).parameters:
            assert f"{argument}:" in doc, argument
    if inspect.isclass(value) and not issubclass(value, Exception):
        assert "Example:" in doc
        assert ">>> " in doc


METHODS = [
    f"{kind}.{name}"
    for kind in mt.__all__
    if inspect.isclass(getattr(mt, kind))
    for name, method in vars(getattr(mt, kind)).items()
    if inspect.isfunction(method) and ">>> " in (method.__doc__ or "")
]


@pytest.mark.parametrize("name", METHODS)
def test_examples_of_methods_run(name):
    """Lie: an example that no test has run.

    Doctest takes a method for another module's: its class says that it is of `multitower`.
    """
    text = inspect.getdoc(operator.attrgetter(name)(mt)) or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert not doctest.DocTestRunner().run(example).failed


def test_only_public_jax():
    """Lie: it works on one JAX version only."""
    for path in SOURCES:
        text = path.read_text()
        if "_src" not in text:  # to parse all would take a second
            continue
        for node in ast.walk(ast.parse(text)):
            names = [
                alias.name for alias in getattr(node, "names", []) if node.__class__ is ast.Import
            ]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.startswith("jax._src") for name in names), path


IMPORT = """
import sys
import jax, numpy
before = set(sys.modules)
import multitower as mt
new = set(sys.modules) - before
known = {"multitower", "jax", "jaxlib", "numpy"} | sys.stdlib_module_names
others = {name.partition(".")[0] for name in new} - known
assert not others, others
readers = {"multitower.checks.reading", "multitower.trials.verdict"}
late = {*readers, "multitower.cli.main"} & new
assert not late, late
print(len(new))
mt.make_parallel(lambda x: x)
mt.grad(lambda w, x: w * x)
jax.config.update("jax_num_cpu_devices", 3)  # JAX refuses this once its backends run
assert len(jax.devices()) == 3
"""


def test_import_is_quick_and_starts_nothing():
    """Lie: `import multitower` takes GPUs, or loads what only the command line needs."""
    num_modules = int(run_python("-c", IMPORT))
    assert num_modules < 160  # what takes the time, and unlike time the same on a busy machine


@pytest.mark.slow
def test_making_a_parallel_function_starts_nothing():
    program = """
import multitower as mt
run = mt.make_parallel(lambda x: x)
grad = mt.grad(lambda w, x: w * x)
mt.configure(simulated_devices=2)
import jax
assert len(jax.devices()) == 2 and run(jax.numpy.arange(3)).shape == (3,)
"""
    run_fork("-c", program)
