"""Devices: what is set before JAX starts, and what is found afterwards."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.hardware import configuration
from multitower.hardware.configuration import CPU_THREADS, warn_if_threads_are_few
from multitower.towers.placement import _warn_of_several_kinds
from processes import run_fork, run_python


def test_configure_again_with_the_same_settings_does_nothing():
    """Lie: a notebook cell that is run twice fails, or changes something."""
    before = os.environ["NPROC"]
    mt.configure(simulated_devices=8)
    mt.configure()
    assert (len(jax.devices()), os.environ["NPROC"]) == (8, before)


AFTER_THE_START = """
import jax
jax.numpy.zeros(3)
import multitower as mt
limits = dict(simulated_devices=2, memory_fraction=0.5, visible_devices="0", onednn=True)
for name, value in limits.items():
    try:
        mt.configure(**{name: value})
    except RuntimeError as error:
        assert type(error) is mt.ConfigurationError
        assert "too late" in str(error) and name in str(error), error
        print(name, len(jax.devices()))
"""


@pytest.mark.slow
def test_trap_limits_set_too_late_are_an_error():
    """Trap (jax#5555): JAX takes 75 % of every GPU although a limit was set, too late."""
    said = run_fork("-c", AFTER_THE_START)
    assert said == "simulated_devices 1\nmemory_fraction 1\nvisible_devices 1\nonednn 1\n"


CONFIGURED = """
import os, sys
import multitower as mt
mt.configure(simulated_devices={count})
import jax
assert {count} == len(jax.devices()) == len(mt.devices())
print(os.environ["NPROC"], os.environ.get("XLA_FLAGS"))
"""


@pytest.mark.slow
def test_the_thread_pool_has_the_same_size_for_every_device_count():
    """Trap: the last bits of XLA's CPU kernels depend on NPROC."""
    found = {run_fork("-c", CONFIGURED.format(count=count)) for count in (1, 16)}
    assert found == {f"{CPU_THREADS} None\n"}


ONEDNN = """
import os, warnings
import multitower as mt
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    mt.configure(simulated_devices=2, onednn=True)
    mt.configure(onednn=True)
from multitower.hardware.configuration import uses_onednn
import jax
assert len(said) == (jax.__version_info__ < (0, 12)), said
assert uses_onednn() == (not said)
assert os.environ["XLA_FLAGS"].count("--xla_cpu_use_onednn=true") == 1
assert len(jax.devices()) == 2
mt.configure(onednn=True)
"""


@pytest.mark.slow
def test_onednn_is_asked_for_once_and_said_where_it_does_nothing():
    run_fork("-c", ONEDNN)


@pytest.mark.slow
def test_configure_wins_over_a_device_count_in_the_environment():
    """Lie: the flag in the shell wins, and eight devices are three; or JAX refuses to start."""
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=3"
    program = CONFIGURED.format(count=2)
    out = run_python("-c", program, XLA_FLAGS=flags, NPROC="2", JAX_NUM_CPU_DEVICES="5")
    assert out == f"{CPU_THREADS} --xla_cpu_enable_fast_math=false\n"


@pytest.mark.slow
def test_gpu_settings_reach_jax_before_it_starts():
    program = """
import os
import multitower as mt
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.5"  # jaxlib refuses both names at once
mt.configure(visible_devices=[0, 2], memory_fraction=0.9, preallocate=False)
import jax
assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
print(jax.config.read("jax_cuda_visible_devices"), *(os.environ[name] for name in names))
"""
    assert run_fork("-c", program) == "0,2 0.9 false\n"


SET_BY_HAND = """
import warnings
import multitower as mt
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    mt.devices(1)
    mt.devices()
    mt.devices()
print([str(w.message) for w in caught if w.category is mt.MultitowerWarning])
"""


@pytest.mark.slow
def test_trap_devices_set_by_hand_with_too_few_threads_warn_once():
    """Trap: "may be stuck", then an abort, for a user who never heard of mt.configure."""
    by_hand = dict(XLA_FLAGS="--xla_force_host_platform_device_count=8")
    few = run_python("-c", SET_BY_HAND, **by_hand, NPROC="4")
    assert few.count("dead-lock") == 1
    assert "8 CPU devices share a pool of 4 threads" in few
    assert "simulated_devices=8" in few
    assert "NPROC=32" in few
    assert run_python("-c", SET_BY_HAND, **by_hand, NPROC="16") == "[]\n"


def test_the_threads_of_many_devices_are_those_that_they_get(monkeypatch):
    """Lie: configure(simulated_devices=24) makes NPROC 32, and 24 devices work with it."""
    monkeypatch.setattr(configuration, "_applied", {})
    monkeypatch.setenv("NPROC", "48")
    with pytest.warns(mt.MultitowerWarning, match=r"24 devices need 48.*NPROC=48 XLA_FLAGS="):
        configuration.warn_if_bits_depend_on_threads(3 * jax.devices())
    monkeypatch.setenv("NPROC", "32")
    with pytest.warns(mt.MultitowerWarning, match="start Python with NPROC=48"):
        configuration.warn_if_threads_are_few(3 * jax.devices())


def test_devices_by_number_name_and_list():
    everything = jax.local_devices()
    assert mt.devices() == everything
    assert mt.devices(3) == everything[:3]
    assert mt.devices("cpu") == everything
    assert mt.devices("cpu:5") == [everything[5]]
    assert mt.devices(["cpu:2", everything[0]]) == [everything[2], everything[0]]
    assert mt.devices(everything[4]) == [everything[4]]


def test_soft_placement_falls_back_and_says_so():
    """Lie: a program written for a GPU runs on a CPU without a word."""
    with pytest.warns(mt.MultitowerWarning, match=r"devices=20, .* has 8: .* Using cpu:0, cpu:1"):
        assert mt.devices(20, soft=True) == jax.local_devices()
    with pytest.warns(mt.MultitowerWarning, match="no device 'gpu:1'.* Using cpu:0 instead"):
        assert mt.devices("gpu:1", soft=True) == mt.devices("cpu:0")
    with pytest.warns(mt.MultitowerWarning, match="no device 'gpu'"):
        assert mt.devices("gpu", soft=True) == jax.local_devices()


def test_device_is_the_home_of_new_arrays_and_of_these_only():
    with mt.device("cpu:2") as two:
        assert jnp.zeros(3).devices() == {two}
        with mt.device(mt.devices("cpu:3")[0]) as three:
            assert jnp.zeros(3).devices() == {three}
        assert jnp.zeros(3).devices() == {two}
    assert jnp.zeros(3).devices() == {jax.devices()[0]}
    with pytest.warns(mt.MultitowerWarning, match="gpu:0"), mt.device("gpu:0", soft=True) as soft:
        assert soft == jax.devices()[0]
    with pytest.raises(mt.DeviceError, match="gpu:0"), mt.device("gpu:0"):
        pass


@pytest.mark.parametrize("spec", [3, ["cpu:3", "cpu:1"], None])
def test_a_number_or_a_list_is_no_home_of_new_arrays(spec):
    """Lie: mt.device(3) is the fourth device."""
    with pytest.raises(mt.DeviceError, match=r"not the name of one device: say mt\.device"):
        mt.device(spec).__enter__()


def test_devices_in_errors_have_the_names_that_are_accepted(monkeypatch):
    """Lie: process 1 has cpu:2048 and cpu:2049, which are its cpu:0 and cpu:1."""
    own = [SimpleNamespace(platform="cpu", id=2048 + number) for number in range(2)]
    monkeypatch.setattr(jax, "local_devices", lambda **_: own)
    for wrong in (3, "cpu:2048"):
        with pytest.raises(mt.DeviceError, match=r"cpu:0, cpu:1\."):
            mt.devices(wrong)


STEPS_WITHOUT_A_SYNC = """
import sys
num_devices, num_steps, *towers_too = map(int, sys.argv[1:])
import multitower as mt
mt.configure(simulated_devices=num_devices)
import jax, numpy as np, optax

def losses(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2

rng = np.random.default_rng(0)
batch = {"x": rng.normal(size=(64, 8)).astype("f"), "y": rng.normal(size=64).astype("f")}
for towers in (None, *towers_too):
    step = mt.train_step(losses, optax.sgd(1e-3), towers=towers)
    state = step.init({"w": np.zeros(8, "f")})
    placed = mt.shard(batch, towers=towers)
    for _ in range(num_steps):
        state, metrics = step(state, placed)
    assert int(state.step) == num_steps and np.isfinite(float(metrics["loss"]))
gradient = jax.jit(mt.grad(losses))
params = {"w": np.zeros(8, "f")}
for _ in range(num_steps):
    params = gradient(params, batch)
jax.block_until_ready(params)
"""


def test_trap_simulated_devices_never_dead_lock():
    """Trap: XLA's CPU collectives wait for threads that are not there, and abort after 40 s."""
    run_fork("-c", STEPS_WITHOUT_A_SYNC, "8", "300")


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "num_steps"), [(2, 1000), (8, 300), (16, 400)])
def test_trap_many_steps_without_a_host_sync_never_dead_lock(num_devices, num_steps):
    """With towers, too: as many as devices."""
    words = map(str, (num_devices, num_steps, num_devices))
    run_fork("-c", STEPS_WITHOUT_A_SYNC, *words, timeout_s=240)


@pytest.mark.parametrize(("error", "said"), [(AssertionError(), "jax.cuda12., is missing"),
                                             (RuntimeError("no driver"), "no driver")])  # fmt: skip
@pytest.mark.parametrize("spec", [None, 2, "gpu"])
def test_devices_that_cannot_start_are_told(spec, error, said, monkeypatch):
    """Lie: a bare AssertionError of JAX, on a machine without its package for GPUs."""

    def fail(**_):
        raise error

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(mt.DeviceError, match=f"JAX cannot start its devices: .*{said}"):
        mt.devices(spec)


def test_stages_without_a_cpu_say_what_to_set(monkeypatch):
    """Lie: JAX_PLATFORMS=cuda, as GPU users set it, leaves the host without a device."""
    found = jax.local_devices

    def without_cpu(*args, backend=None, **how):
        if backend == "cpu":
            raise RuntimeError("Unknown backend: 'cpu' requested")
        return found(*args, backend=backend, **how)

    monkeypatch.setattr(jax, "local_devices", without_cpu)
    step = mt.train_step(
        lambda w, x: ((x @ w) ** 2).mean(1), optax.adam(0.1), devices=2, towers=2, stages=1
    )
    with pytest.raises(mt.DeviceError, match=r"Say JAX_PLATFORMS=.*,cpu\."):
        step(step.init(jnp.ones((3, 3))), np.ones((4, 3), np.float32))


@pytest.mark.parametrize("spec", [[1], [0, 1], (2, "cpu:0")])
def test_a_number_in_a_list_is_neither_a_count_nor_a_place(spec):
    """Lie: devices=[1] is the first device, and visible_devices=[1] the second."""
    with pytest.raises(mt.DeviceError, match=r"in a list a number could be .* name them: \['cpu:"):
        mt.devices(spec)


def test_devices_of_several_kinds_are_told():
    """Lie: the same bits on an A100 and a T4, which no run here can show."""
    kinds = [SimpleNamespace(device_kind=kind) for kind in ("A100", "A100", "T4")]
    with pytest.warns(mt.MultitowerWarning, match="several kinds, A100 and T4"):
        _warn_of_several_kinds(kinds)
    _warn_of_several_kinds(kinds[:2])  # a warning is an error


def test_threads_that_are_no_number_are_those_of_the_machine(monkeypatch):
    monkeypatch.setenv("NPROC", "auto")
    cpus = [SimpleNamespace(platform="cpu")]
    warn_if_threads_are_few(cpus)
