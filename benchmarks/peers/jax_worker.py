"""The contenders on JAX: multitower, and two steps written by hand.

Started by compare.py, with the interpreter that runs it; protocol.py says what it answers.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_models import LOSSES, resnet, unflatten
from protocol import Program, Task, serve
from works import BETA_1, BETA_2, EPSILON, NUM_DEVICES, Work

import multitower as mt
from multitower.recipes.networks import resnet20

SPLIT, WHOLE = PartitionSpec("d"), PartitionSpec()


def make_optimizer(work: Work) -> Any:
    return optax.adam(work.learning_rate, BETA_1, BETA_2, EPSILON)


def multitower(task: Task, towers: int | None) -> Program:
    """The library's step; `towers` asks for the same bits on any number of devices."""
    if task.work.has_batch_norm:

        def losses(params: Any, batch: Any, *, model_state: Any) -> Any:
            loss, statistics = resnet(params, batch, model_state)
            return loss, {}, statistics

        model_state = {"model_state": resnet20.init_statistics()}
    else:
        losses, model_state = LOSSES[task.work.name], {}
    step = mt.train_step(losses, make_optimizer(task.work), devices=NUM_DEVICES, towers=towers)
    state = step.init(unflatten(task.weights), **model_state)
    batches = [mt.shard(batch, devices=NUM_DEVICES, towers=towers) for batch in task.batches]

    def one(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return program(one, state, batches)


def two_lines(task: Task) -> Program:
    """The one-device step with `mt.value_and_grad` in place of `jax.value_and_grad`."""
    optimizer = make_optimizer(task.work)

    def losses(params: Any, statistics: Any, batch: Any) -> Any:
        if task.work.has_batch_norm:
            return resnet(params, batch, statistics)
        return LOSSES[task.work.name](params, batch), statistics

    def step(state: Any, batch: Any) -> Any:
        params, statistics, opt_state = state
        (loss, statistics), grads = mt.value_and_grad(
            losses, has_aux=True, in_axes=(None, None, 0), devices=NUM_DEVICES
        )(params, statistics, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), statistics, opt_state), loss

    state, batches = placed(task, optimizer, make_mesh())
    return program(jax.jit(step, donate_argnums=0), state, batches)


def hand_written_loss(work: Work) -> Callable[..., Any]:
    """The mean over the rows at hand, and the new statistics where there are any."""

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        if work.has_batch_norm:
            losses, statistics = resnet(params, batch, statistics)
        else:
            losses = LOSSES[work.name](params, batch)
        return losses.mean(), statistics

    return loss


def named_sharding(task: Task) -> Program:
    """`jax.jit` of the one-device step; the compiler cuts it up, as the arrays are sharded."""
    loss_of, optimizer = hand_written_loss(task.work), make_optimizer(task.work)

    def step(state: Any, batch: Any) -> Any:
        params, statistics, opt_state = state
        (loss, statistics), grads = jax.value_and_grad(loss_of, has_aux=True)(
            params, statistics, batch
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), statistics, opt_state), loss

    mesh = make_mesh()
    state, batches = placed(task, optimizer, mesh)
    whole = NamedSharding(mesh, WHOLE)
    return program(jax.jit(step, donate_argnums=0, out_shardings=whole), state, batches)


def shard_map(task: Task) -> Program:
    """The step of one device, with `pmean` where the devices meet."""
    loss_of, optimizer = hand_written_loss(task.work), make_optimizer(task.work)

    def on_device(state: Any, batch: Any) -> Any:
        params, statistics, opt_state = state
        (loss, statistics), grads = jax.value_and_grad(loss_of, has_aux=True)(
            params, statistics, batch
        )
        loss, statistics, grads = jax.lax.pmean((loss, statistics, grads), "d")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), statistics, opt_state), loss

    mesh = make_mesh()
    step = jax.shard_map(
        on_device, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=WHOLE, check_vma=False
    )
    state, batches = placed(task, optimizer, mesh)
    return program(jax.jit(step, donate_argnums=0), state, batches)


def make_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:NUM_DEVICES]), ("d",))


def placed(task: Task, optimizer: Any, mesh: Mesh) -> tuple[Any, Any]:
    """First weights, statistics and optimizer state on every device; batches cut in two."""
    params = unflatten(task.weights)
    statistics = resnet20.init_statistics() if task.work.has_batch_norm else {}
    state = (params, statistics, optimizer.init(params))
    return (
        jax.device_put(state, NamedSharding(mesh, WHOLE)),
        [jax.device_put(batch, NamedSharding(mesh, SPLIT)) for batch in task.batches],
    )


def program(step: Callable[[Any, Any], Any], state: Any, batches: list[Any]) -> Program:
    """Goes round the batches, and keeps the state."""
    steps_done = 0

    def call() -> Any:
        nonlocal state, steps_done
        state, loss = step(state, batches[steps_done % len(batches)])
        steps_done += 1
        return loss

    def wait(loss: Any) -> float:
        jax.block_until_ready(state)  # the update ends after the loss
        return float(loss)

    return Program(call, wait)


CONTENDERS: dict[str, Callable[[Task], Program]] = {
    "multitower-two-lines": two_lines,
    "multitower": lambda task: multitower(task, None),
    "multitower-same-bits": lambda task: multitower(task, NUM_DEVICES),
    "named-sharding": named_sharding,
    "shard-map": shard_map,
}

if __name__ == "__main__":
    # Before JAX starts its backends. It also sets NPROC, without which collectives dead-lock.
    mt.configure(simulated_devices=NUM_DEVICES)
    serve(lambda task: CONTENDERS[task.contender](task), ("jax", "jaxlib", "optax"))
