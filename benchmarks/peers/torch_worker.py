"""The contenders on PyTorch: one process per device, one thread each, gloo between them.

Started by compare.py; protocol.py says what it answers. The process that it starts is rank 0; it
starts rank 1 itself, in the environment that torchrun would make, and passes every command on.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from works import BETA_1, BETA_2, EPSILON, NUM_DEVICES

Prepare = Callable[[Any, Any], tuple[Any, Any, Callable[[Any], None]]]

# A rank that waits for the other one may wait while both are stopped: in fact, forever.
PATIENCE = timedelta(days=7)


def torchrun() -> Iterator[str]:
    """Starts the other ranks, and yields the commands as they pass by."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(NUM_DEVICES),
        LOCAL_WORLD_SIZE=str(NUM_DEVICES),
        GROUP_RANK="0",
        RANK="0",
        LOCAL_RANK="0",
        TORCHELASTIC_RUN_ID="peers",
    )
    others = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(1, NUM_DEVICES)
    ]

    def commands() -> Iterator[str]:
        for line in sys.stdin:
            for other in others:
                print(line, end="", file=other.stdin, flush=True)
            yield line

    return commands()


def ddp(model: Any, optimizer: Any) -> Any:
    import torch

    torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    return torch.nn.parallel.DistributedDataParallel(model), optimizer, lambda loss: loss.backward()


def compiled(model: Any, optimizer: Any) -> Any:
    import torch

    model, optimizer, backward = ddp(model, optimizer)
    return torch.compile(model), optimizer, backward


def accelerate(model: Any, optimizer: Any) -> Any:
    from accelerate import Accelerator, InitProcessGroupKwargs

    wait = InitProcessGroupKwargs(backend="gloo", timeout=PATIENCE)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[wait])
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def fabric(model: Any, optimizer: Any) -> Any:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo", timeout=PATIENCE)
    fabric = Fabric(accelerator="cpu", devices=NUM_DEVICES, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    return model, optimizer, fabric.backward


CONTENDERS: dict[str, Prepare] = {
    "ddp": ddp,
    "ddp-compile": compiled,
    "accelerate": accelerate,
    "fabric": fabric,
}


def make(task: Any) -> Any:
    """The training step of PyTorch's tutorials, on batches that are tensors already."""
    import torch
    from protocol import Program
    from torch_models import MODELS, rows_of

    torch.set_num_threads(1)
    model = MODELS[task.work.name](task.weights)
    optimizer = torch.optim.Adam(
        model.parameters(), task.work.learning_rate, (BETA_1, BETA_2), EPSILON
    )
    model, optimizer, backward = CONTENDERS[task.contender](model, optimizer)
    loss_of = torch.nn.MSELoss() if task.work.name == "Polynomial" else torch.nn.CrossEntropyLoss()
    rank = int(os.environ["RANK"])
    batches = [rows_of(batch, rank, NUM_DEVICES) for batch in task.batches]
    steps_done = 0

    def call() -> Any:
        nonlocal steps_done
        x, y = batches[steps_done % len(batches)]
        steps_done += 1
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        backward(loss)
        optimizer.step()
        return loss

    def wait(loss: Any) -> float:
        # Each rank has the loss of its rows; asking for all of them also waits for all ranks.
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        return float(mean) / NUM_DEVICES

    return Program(call, wait)


if __name__ == "__main__":
    received = sys.stdin if "RANK" in os.environ else torchrun()
    from protocol import serve

    serve(make, ("torch", "accelerate", "lightning-fabric"), received)
