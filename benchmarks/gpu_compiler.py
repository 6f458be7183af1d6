"""XLA's compiler for GPUs, on a machine without one: JAX's CUDA build compiles for a description.

Nothing can run. What is seen is the compiled program, its memory, and its kernels as PTX, the
assembly language of NVIDIA's GPUs. Two things differ from a machine with a GPU: products of
matrices are left to cuBLAS, since XLA chooses among its own kernels by running them, and there is
no cuDNN that could say which of its kernels it would take.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# An NVIDIA H100 SXM, from its data sheet and the limits of compute capability 9.0.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 85899345920
  clock_rate_ghz: 1.98
}
"""

# Of integers a sum, and the largest and the smallest, are the same in any order.
_ATOMIC = re.compile(r"\b(?:atom|red)\.[\w.]+")
_DEPENDS_ON_ORDER = re.compile(r"\.(?:cas|exch|b?f\d+)")
_FLOATS = re.compile(r"\t(\w+)(?:\.\w+)*\.b?f(?:16|32|64)(?:x2)?\b")
_MOVES = ("ld", "st", "mov", "selp")
_COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")


def start(folder: Path) -> None:
    """Has JAX compile for GPUs and leave its kernels in this folder; before it is imported."""
    flags = {
        "xla_gpu_enable_triton_gemm": "false",
        "xla_dump_to": folder,
        "xla_dump_emitter_re": "ptx",
    }
    os.environ["XLA_FLAGS"] = " ".join(f"--{name}={value}" for name, value in flags.items())
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # of programs in it no kernels are left
    os.environ["JAX_PLATFORMS"] = "cpu"  # what runs, runs there
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # no GPU, no driver: it says so many times


def described_gpus(count: int) -> list[Any]:
    """So many H100s of one process, for programs that are compiled and never run.

    Raises:
        RuntimeError: JAX's CUDA build is not installed.
    """
    from jax.experimental import topologies

    shape = f"1x1x{count}"
    found = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=shape)
    return list(found.devices)


@contextmanager
def in_place_of_devices(gpus: list[Any]) -> Iterator[None]:
    """The library takes these for the devices of this process."""
    import jax

    with mock.patch.object(jax, "local_devices", return_value=gpus):
        yield


def order_dependent(folder: Path) -> Counter[str]:
    """Atomic instructions whose result depends on which thread is first, in all kernels."""
    found = Counter(name for text in _kernels(folder) for name in _ATOMIC.findall(text))
    return Counter({name: found[name] for name in found if _DEPENDS_ON_ORDER.search(name)})


def float_operations(folder: Path) -> Counter[str]:
    """What the kernels do with floats, beside moving them."""
    found = Counter(name for text in _kernels(folder) for name in _FLOATS.findall(text))
    return Counter({name: count for name, count in found.items() if name not in _MOVES})


def collectives_of(text: str) -> Counter[str]:
    """What a program sends between GPUs."""
    return Counter(re.findall(rf" ({'|'.join(_COLLECTIVES)})(?:-start)?\(", text))


def num_kernels(text: str) -> int:
    """How many kernels, calls of libraries and copies a program starts, apart from loops."""
    entry = text[text.index("\nENTRY ") :]
    return len(re.findall(r" (?:fusion|custom-call|copy|sort|scatter)\(", entry))


def in_words(found: Counter[str]) -> str:
    """Counted things."""
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "-"


def step_parts(loss_fn: Callable[..., Any], optimizer: Any, dtype: Any = None) -> Any:
    """What `mt.train_step` makes of these arguments."""
    from dataclasses import replace

    from multitower.steps.loss import LossFunction
    from multitower.steps.parts import StepParts

    loss = replace(LossFunction.of(loss_fn), compute_dtype=dtype)
    return StepParts(loss, optimizer, None, "mean", False, False, None, "mean")


def same_bits(given: Any, gpus: list[Any], towers: int) -> Any:
    """The programs of a step with towers.

    Args:
        given: from `multitower.planning.shapes.planned`.
        gpus: which run the towers.
        towers: how many there are.
    """
    import jax

    from multitower.engines.job import Shared
    from multitower.engines.same_bits import SameBits
    from multitower.steps.job import make_job
    from multitower.steps.state.bundles import bundled, bundled_job
    from multitower.towers.leaves import row_shapes
    from multitower.towers.placement import contiguous

    tower_rows = -(-given.batch.num_rows // towers)
    job = bundled_job(make_job(given.step, given.batch.split, tower_rows, towers))
    (state,) = jax.eval_shape(bundled, [given.fields])
    engine = SameBits(job, contiguous(gpus, towers))
    return engine._compile(
        Shared(state, given.batch.shared), row_shapes(given.batch.rows, tower_rows)
    )


def forget(folder: Path) -> None:
    """Removes what was compiled so far."""
    for one in folder.iterdir():
        if one.is_file():
            one.unlink()


def _kernels(folder: Path) -> list[str]:
    return [one.read_text() for one in sorted(folder.glob("*.ptx"))]
