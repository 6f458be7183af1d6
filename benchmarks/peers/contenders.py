"""Who takes part: one line for each, and what it needs to run."""

import difflib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent.parent / ".venv-peers"


@dataclass(frozen=True)
class Contender:
    """One way to train on two devices.

    Attributes:
        key: its name in `--contenders`, and what the worker is told.
        title: as printed.
        script: the worker's program.
        needs: the environment that setup.sh makes; or "", for the interpreter of compare.py.
        module: what that interpreter must have.
        programs: the one-device program in lines/, and what it becomes.
        batch_norm: are its statistics a tower's, or those of the whole batch?
    """

    key: str
    title: str
    script: Path
    needs: Literal["", "torch", "tensorflow"]
    module: str
    programs: tuple[str, str]
    batch_norm: Literal["tower", "global"] = "tower"

    def interpreter(self) -> Path:
        """The Python that runs it."""
        if self.needs:
            return ENVIRONMENTS / self.needs / "bin" / "python"
        return Path(sys.executable)

    def why_not(self) -> str:
        """The reason why it cannot run here, and the way out; or nothing."""
        if self.needs:
            found = self.interpreter().exists()
            way_out = f"run benchmarks/peers/setup.sh {self.needs}"
        else:
            found = importlib.util.find_spec(self.module) is not None
            way_out = f"this Python has no {self.module}: use the one of `make setup`"
        return "" if found else way_out

    def changed_lines(self) -> int:
        """Lines of the one-device program that changed, went away or came; blank ones are free."""
        before, after = (code_of(HERE / "lines" / f"{name}.py") for name in self.programs)
        blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        return sum(max(b - a, d - c) for tag, a, b, c, d in blocks if tag != "equal")


def code_of(path: Path) -> list[str]:
    """The lines after the docstring that are not blank."""
    text = path.read_text(encoding="utf-8").split('"""', 2)[2]
    return [line for line in text.splitlines() if line.strip()]


def jax(key: str, title: str, program: str, **options: Literal["tower", "global"]) -> Contender:
    programs = ("plain_jax", program)
    return Contender(key, title, HERE / "jax_worker.py", "", "jax", programs, **options)


def torch(key: str, title: str, program: str) -> Contender:
    programs = ("plain_torch", program)
    return Contender(key, title, HERE / "torch_worker.py", "torch", "torch", programs)


# Losses and times are compared with the step that a careful user writes by hand.
REFERENCE = "shard-map"
# Where statistics of batch normalisation are those of the whole batch, losses are other ones.
GLOBAL_REFERENCE = "named-sharding"

CONTENDERS = {
    contender.key: contender
    for contender in (
        jax("shard-map", "JAX: shard_map + pmean", "jax_shard_map"),
        jax(
            "named-sharding", "JAX: jit + NamedSharding", "jax_named_sharding", batch_norm="global"
        ),
        jax("multitower-two-lines", "multitower, two lines", "multitower_value_and_grad"),
        jax("multitower", "multitower", "multitower_train_step"),
        jax("multitower-same-bits", "multitower, same bits", "multitower_same_bits"),
        Contender(
            "keras",
            "Keras DataParallel on JAX",
            HERE / "keras_worker.py",
            "",
            "keras",
            ("plain_keras", "keras_data_parallel"),
            "global",
        ),
        Contender(
            "mirrored",
            "TensorFlow MirroredStrategy",
            HERE / "tensorflow_worker.py",
            "tensorflow",
            "tensorflow",
            ("plain_tensorflow", "tensorflow_mirrored"),
        ),
        torch("ddp", "PyTorch DDP", "torch_ddp"),
        torch("ddp-compile", "PyTorch DDP, torch.compile", "torch_ddp"),
        torch("accelerate", "Accelerate", "torch_accelerate"),
        torch("fabric", "Lightning Fabric", "torch_fabric"),
    )
}
