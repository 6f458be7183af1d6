"""One-device programs: the same function, compiled for every device that runs it."""

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from multitower.engines.collectives import first_collective, place_of
from multitower.errors import ArgumentError, OutputError
from multitower.towers.leaves import shape_of
from multitower.towers.refusals import refuse_overwritten
from multitower.towers.rows import Tower
from multitower.towers.split import TowerRows, copy_to


class Compiled(Protocol):
    """An executable on one device, such as `jax.stages.Compiled`."""

    def __call__(self, *args: Any) -> Any:
        """Runs the program."""
        ...

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of what it returns."""
        ...

    def memory_analysis(self) -> Any:
        """What the compiler says of the memory that it takes."""
        ...


@dataclass(frozen=True)
class Holding:
    """An executable with the large arrays that it takes before its arguments.

    Attributes:
        compiled: the executable.
        arrays: these arrays on its device.
        originals: the arrays of JAX among those that the program closes over.
    """

    compiled: Compiled
    arrays: list[jax.Array]
    originals: list[jax.Array]

    def __call__(self, *args: Any) -> Any:
        """As in `Compiled`."""
        refuse_overwritten(self.originals)
        return self.compiled(self.arrays, *args)

    @property
    def out_info(self) -> Any:
        """As in `Compiled`."""
        return self.compiled.out_info

    def memory_analysis(self) -> Any:
        """As in `Compiled`."""
        return self.compiled.memory_analysis()


def compile_for_each(
    fn: Callable[..., Any],
    arguments: Sequence[Any],
    devices: Sequence[jax.Device],
    *,
    donate: tuple[int, ...] = (),
    keep_unused: bool = False,
    compile: Callable[..., jax.stages.Compiled] = lambda traced, lowered, device: lowered.compile(),
) -> list[Compiled]:
    """Compiles `fn` once per device: for the first device alone, then for the others in parallel.

    The first one comes alone because a GPU's autotuner remembers, within a process, which kernels
    it chose: the other devices then get the same kernels. Large arrays that `fn` closes over are
    arguments of the executables (`held`).

    Args:
        fn: a function of arrays.
        arguments: its arguments, as arrays or `jax.ShapeDtypeStruct`.
        devices: where it will run.
        donate: positions of the arguments whose memory the results may take.
        keep_unused: whether the program keeps arguments that it does not use.
        compile: `compile(traced, lowered, device)` returns the executable.

    Returns:
        One executable per device, in the same order.

    Raises:
        OutputError: the function has ordered effects, such as a callback with `ordered=True`, or
            random numbers without a key.
        ArgumentError: an argument has a dtype of less than a byte.
    """
    _refuse_packed(arguments)
    compiler_options = _options(devices[0].platform)
    jitted = jax.jit(
        fn, donate_argnums=donate, keep_unused=keep_unused, compiler_options=compiler_options
    )

    def trace(device: jax.Device) -> jax.stages.Traced:
        there = SingleDeviceSharding(device)
        return jitted.trace(*jax.tree.map(lambda x: shape_of(x, there), tuple(arguments)))

    first = trace(devices[0])
    _refuse_keyless(first.jaxpr)
    if compiler_options is not None:
        from multitower.engines.scatters import sorting  # noqa: PLC0415 (importing stays quick)

        if (other := sorting(first)) is not None:
            other.__name__ = getattr(fn, "__name__", "program")  # as profiles show it
            more: dict[str, Any] = {"keep_unused": keep_unused, "compile": compile}
            return compile_for_each(other, arguments, devices, donate=donate, **more)
    from multitower.engines.held import HeldArrays  # noqa: PLC0415 (importing stays quick)

    if held := HeldArrays(first.jaxpr):

        def apart(arrays: list[jax.Array], *args: Any) -> Any:
            return held.call(first, arrays, args)

        apart.__name__ = getattr(fn, "__name__", "program")  # as profiles show it
        made = compile_for_each(
            apart,
            (held.shapes, *arguments),
            devices,
            donate=tuple(place + 1 for place in donate),
            keep_unused=keep_unused,
            compile=compile,
        )
        pairs = zip(made, devices, strict=True)
        return [Holding(one, held.on_device(device), held.originals) for one, device in pairs]

    def lower(device: jax.Device) -> tuple[jax.stages.Traced, jax.stages.Lowered, jax.Device]:
        traced = trace(device)
        _refuse_order(traced.jaxpr.effects)
        return traced, traced.lower(), device

    # In this thread: `with jax.enable_x64(True)` and the like hold only where they are entered.
    lowered = [lower(device) for device in devices]
    made: list[Compiled] = [compile(*lowered[0])]
    if len(devices) > 1:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            made += pool.map(lambda one: compile(*one), lowered[1:])
    if not keep_unused and any(map(_is_elsewhere, made, devices)):
        options: dict[str, Any] = {"donate": donate, "compile": compile}
        return compile_for_each(fn, arguments, devices, keep_unused=True, **options)
    return made


def _is_elsewhere(program: Compiled, device: jax.Device) -> bool:
    """Whether results are on another device, as of a program that has dropped all arguments."""
    # `output_shardings` would put shardings into the user's dataclasses, which may check arrays.
    found = jax.tree.leaves(program.out_info)
    return any(leaf.sharding.device_set != {device} for leaf in found)


def _refuse_order(effects: Iterable[Any]) -> None:
    """Refuses ordered effects: towers run side by side, so nothing in them can have an order."""
    if any("Ordered" in type(effect).__name__ or "Ordered" in str(effect) for effect in effects):
        raise OutputError(
            "the function has a callback with ordered=True (io_callback, jax.debug.print), and "
            "towers run side by side. Say ordered=False, or print what the function returns."
        )


def _refuse_keyless(program: Any) -> None:
    """Refuses random numbers without a key: XLA chooses them anew whenever it compiles."""
    found = first_collective(program, lambda equation: equation.primitive.name == "rng_uniform")
    if found is not None:
        raise OutputError(
            f"{place_of(found)} draws without a key, so that every device and every run gets "
            "other numbers. Draw from a key: jax.random.uniform(key, shape, minval=, maxval=)."
        )


def _refuse_packed(arguments: Sequence[Any]) -> None:
    """Refuses dtypes of less than a byte, which JAX does not pass to ahead-of-time programs.

    JAX 0.12 passes such floats.
    """
    kinds: list[tuple[Any, Any, str]] = [(jnp.integer, jnp.iinfo, "int8")]
    if jax.__version_info__ < (0, 11):
        kinds.append((jnp.floating, jnp.finfo, "bfloat16"))
    for leaf in jax.tree.leaves(arguments):
        for kind, info, wider in kinds:
            if jnp.issubdtype(leaf.dtype, kind) and info(leaf.dtype).bits < 8:
                raise ArgumentError(
                    f"an argument has dtype {leaf.dtype}, which a tower's program cannot take. "
                    f"Pass x.astype(jnp.{wider}), and cast it back inside of the function."
                )


class WholeNumbers:
    """Whole-number arguments of programs, int32, shape (); each is copied to its place once."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, int], jax.Array] = {}

    def on(self, home: jax.Device | Sharding, value: int) -> jax.Array:
        """A number on a device, or on all devices of a sharding, int32, shape ()."""
        key = (home, value)
        if key not in self._copies:
            self._copies[key] = copy_to([np.int32(value)], [home])[0]
        return self._copies[key]

    def of_tower(self, device: jax.Device, rows: TowerRows, tower: int) -> Tower:
        """The number and the row counts of a tower of these rows, on its device."""
        return Tower(*(self.on(device, number) for number in rows.counts(tower)))


def signature(tree: Any) -> Any:
    """What a compiled program depends on: structure, shapes, dtypes and settings; hashable."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves)
    return treedef, kinds, settings()


def settings() -> Any:
    """The values of JAX's settings that a program depends on; hashable."""
    return _settings_of(jax.config)


# JAX's settings that change results, and may change from call to call, as in a `with` block.
_SETTINGS = (
    "jax_accurate_erf_inv",
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_high_dynamic_range_gumbel",
    "jax_random_seed_offset",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
# Not every version has all of them.
_settings_of = operator.attrgetter(*[name for name in _SETTINGS if hasattr(jax.config, name)])


def _options(platform: str) -> dict[str, bool | str] | None:
    # Atomics and timed autotuning may choose another order of additions on every run.
    return {"xla_gpu_deterministic_ops": True} if platform in ("gpu", "cuda", "rocm") else None
