"""Faults that several tests plant in the library."""

import jax

from multitower.engines import same_bits


def change_results(monkeypatch, change):
    """What a device ends a same-bits job with becomes `change(i, num_devices, fields, metrics)`."""
    run = same_bits.SameBits.run

    def changed(self, *given):
        finished = run(self, *given)
        count = len(finished.results)
        for i, result in enumerate(finished.results):
            finished.results[i] = change(i, count, *result)
        return finished

    monkeypatch.setattr(same_bits.SameBits, "run", changed)


def divide_parameters(_, num_devices, fields, metrics):
    """A mean over devices instead of towers."""
    params = jax.tree.map(lambda x: x / num_devices, fields.params)
    return fields._replace(params=params), metrics
