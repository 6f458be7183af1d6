"""Every test and docstring example runs on eight simulated devices."""

import gc
import os
import signal
import zlib
from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

import multitower as mt
from forks import compiling_quickly

# A shell ignores SIGINT for what runs in its background, and so would the runs of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The Makefile has JAX leave out most optimizations, as JAX's own tests do: compiling is what tests
# wait for. Not so where bits or memory are what is tested: optimizations decide over both.
LEFT_OUT = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
OPTIMIZED = (
    "engines/",
    "planning/test_measured",
    "processes/",
    "proof/",
    "stages/test_same",
    "steps/test_budgets",
    "steps/test_random_programs",
)
# Rules and gradients, not bits: they hold however they are compiled.
LEFT_OUT_AGAIN = (
    "engines/test_exchanges.py::test_collectives",
    "engines/test_exchanges.py::test_trap",
)
# These compare processes of their own, and are left out here: a process that compiles in two ways
# keeps what other tests have compiled, and scores by it.
OPTIMIZED_ELSEWHERE = (*OPTIMIZED, "cli/test_main", "recipes/")
# Files whose tests share what is dear to set up: one worker runs all of a file.
TOGETHER = (
    "cli/test_faults",
    "cluster/",
    "models/test_keras",
    "planning/test_plan",
    "processes/test_layouts",
    "project/test_package",
    "project/test_quoted_messages",
    "recipes/test_gpt",
    "runs/test_same_stream",
    "scaling/test_scaling",
    "steps/state/test_bundles",
    "steps/state/test_changed_state",
    "steps/test_shards",
    "steps/test_steps_per_call",
    "training/checkpoints/test_checkpoint",
)

# The longest tests that any worker takes begin first: at the end no core waits for one of them.
LONG = (
    "cli/test_main.py::test_the_",
    "cli/test_processes",
    "planning/test_measured",
    "project/test_gpu_script",
    "recipes/",
    "runs/test_kill",
    "stages/test_same",
)

# Slow tests that no share leaves out: law L4, kill -9 and resume.
IN_EVERY_SHARE = ("runs/test_kill.py::test_killed_and_resumed_is_as_if_nothing_had_happened[5-",)
# Which share of the slow tests to take, where there is no time for all (.ci/run): the quarters are
# 0/4 to 3/4.
SLOW_SHARE = os.environ.get("SLOW_SHARE", "0/1")

# The same examples in every run, and no test looks at a clock: machines are shared.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def start() -> None:
    """Eight simulated devices, in this process alone: what it starts has its own settings."""
    mt.configure(simulated_devices=8)
    for name, value in (compiling_quickly() if LEFT_OUT else {}).items():
        if name not in os.environ:
            os.environ[name] = value
            jax.devices()  # reads it
            del os.environ[name]


start()


def pytest_collection_finish() -> None:
    """Python looks for garbage rarely, and not among what was imported: a tenth of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    """After each file: what JAX keeps of programs that nobody calls again.

    Each holds two megabytes, 3 GB after an eighth of all tests.
    """
    yield
    jax.clear_caches()


def is_in(nodeid: str, places: tuple[str, ...]) -> bool:
    """Whether a test is in one of these folders or files of tests/."""
    return nodeid.removeprefix("tests/").startswith(places)


def scope_of(nodeid: str) -> str:
    """What one worker runs as a whole: a test, or a file."""
    return nodeid.partition("::")[0] if is_in(nodeid, TOGETHER) else nodeid


def is_left_out(item: pytest.Item) -> bool:
    """Whether a test is a slow one of another share, by its name."""
    is_slow = item.get_closest_marker("slow") or is_in(item.nodeid, ("cluster/",))
    share, num_shares = map(int, SLOW_SHARE.split("/"))
    is_slow = is_slow and not is_in(item.nodeid, IN_EVERY_SHARE)
    return bool(is_slow) and zlib.crc32(scope_of(item.nodeid).encode()) % num_shares != share


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, a file's tests in their order; of slow ones the share that is asked for."""
    items.sort(key=lambda item: not is_in(item.nodeid, LONG))
    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of a test: how it is compiled, here and in what it starts."""
    if LEFT_OUT:
        here, elsewhere = (is_in(item.nodeid, where) for where in (OPTIMIZED, OPTIMIZED_ELSEWHERE))
        here = here and not is_in(item.nodeid, LEFT_OUT_AGAIN)
        jax.config.update("jax_disable_most_optimizations", not here)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0" if elsewhere else "1"


class SomeFilesTogether(LoadScopeScheduling):
    """Any worker takes any test, but for the files of TOGETHER.

    (Marks of pytest-xdist 3.8 for this, `xdist_group`, do nothing with pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SomeFilesTogether:
    """Used by `pytest -n`."""
    return SomeFilesTogether(config, log)
