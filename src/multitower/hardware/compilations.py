"""Counts compilations: after the first steps of a run there should be none."""

from collections.abc import Generator
from contextlib import contextmanager

import jax

_EVENT = "backend_compile_duration"


@contextmanager
def counted_compilations() -> Generator[list[str]]:
    """Counts the programs that this process compiles inside a `with` block, in any thread.

    Yields:
        A list that grows by one entry, the name of JAX's event, for each program.

    Example:
        >>> import jax, numpy as np
        >>> from multitower.hardware.compilations import counted_compilations
        >>> double = jax.jit(lambda x: 2 * x)
        >>> with counted_compilations() as compiled:
        ...     for _ in range(3):
        ...         _ = double(np.float32(1))
        >>> len(compiled)
        1
    """
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith(_EVENT):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
