"""How well local updates train, against synchronous steps with the same batches in the same order.

Every run has the same seed, batches, inner optimizer and number of examples; what differs is how
often the towers meet, and what is done there. Bytes are those of gradients or outer gradients that
each tower sends, relative to synchronous steps.

    python benchmarks/local_updates.py [digits | cifar10] [--steps 512] [--towers 4] [--devices 2]
"""

import argparse
import time
from typing import Any

import multitower as mt

EVERY = (1, 4, 16, 64)


def train(recipe: Any, steps: int, options: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Scores on the test set after a run, and its seconds."""
    import jax

    loss = recipe.loss if recipe.augment is None else mt.augmented(recipe.loss, recipe.augment)
    data, key = recipe.data(), jax.random.key(0)
    rows = recipe.global_batch
    num_examples = len(data.train["label"])
    optimizer = recipe.make_optimizer(steps, steps_per_epoch=num_examples / rows)
    trainer = mt.Trainer(loss, optimizer, global_batch=rows, hooks=[], **options)
    keyed = recipe.augment is not None

    def batches(first: int) -> Any:
        order = {"seed": 0, "distort": recipe.distort, "keyed": keyed}
        return mt.make_batches(data.train, global_batch=rows, first=first, **order)

    began = time.perf_counter()
    state = trainer.fit(recipe.init(key), batches, steps=steps)
    seconds = time.perf_counter() - began
    return trainer.evaluate(recipe.metrics, state, data.test, global_batch=4 * rows), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="digits")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--every", type=int, nargs="*", default=EVERY)
    parser.add_argument("--outer", choices=["diloco", "mean", "both"], default="both")
    given = parser.parse_args()
    mt.configure(simulated_devices=given.devices)
    import optax

    from multitower.recipes import find_recipe

    settings = {"synthetic": "true"} if given.recipe == "cifar10" else {}
    recipe = find_recipe(given.recipe, settings)
    outers = {"diloco": None, "mean": optax.sgd(1.0)}
    runs: list[tuple[str, str, dict[str, Any]]] = [("synchronous", "1", {})]
    for name, outer in outers.items():
        if given.outer in (name, "both"):
            for every in given.every:
                options = {"sync_every": every, "outer_optimizer": outer}
                runs.append((f"H = {every}, {name}", f"1/{every}", options))
    print("| towers meet | bytes sent | test loss | test accuracy | seconds |")
    print("| --- | --- | --- | --- | --- |")
    for name, sent, options in runs:
        where = {"towers": given.towers, "devices": given.devices}
        scores, seconds = train(recipe, given.steps, {**where, **options})
        found = f"{scores['loss']:.4f} | {scores['accuracy']:.4f} | {seconds:.1f}"
        print(f"| {name} | {sent} | {found} |", flush=True)


if __name__ == "__main__":
    main()
