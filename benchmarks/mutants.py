"""Mutation testing: do tests turn red when the code is wrong?

    make mutants MODULE=engines/reduction [ARGS="--number 40 --seed 0 --jobs 2"]

Cosmic Ray puts one small bug at a time into a copy of the repository. Of the places in the module
that it can change, `--number` are drawn, and for each place one of its changes. The tests are the
everyday ones of the module's own file, or those that TESTS names. A mutant that survives
shows a missing test, or changes nothing that anybody can see. The exit code is 1 if more than a
tenth survive.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db

ROOT = Path(__file__).resolve().parents[1]
ENOUGH = 0.9
TIMEOUT_S = 600

# The tests of a module whose own file is not all that guards it.
TESTS = {
    "checks/along_rows": ["checks/test_first_look", "trials/test_check"],
    "checks/counts": ["checks/test_first_look", "trials/test_check"],
    "checks/places": ["checks/test_places"],
    "checks/row_flow": ["checks/test_first_look", "checks/test_places", "trials/test_check"],
    "cli/resume": ["cli/test_wiring", "cli/test_resume"],
    "cli/train": [
        "cli/test_wiring",
        "cli/test_config_file::test_a_recipe_must_be_named_once",
        "cli/test_resume",
        "cli/test_main",
    ],
    "engines/exchanges": [
        "engines/test_exchanges::test_collectives_are_those_of_jax[psum]",
        "engines/test_exchanges::test_collectives_are_those_of_jax[one after another]",
        "engines/test_exchanges::test_negative_zeros_and_nans_arrive_as_they_are",
        "engines/test_exchanges::test_one_nan_comes_of_many",
    ],
    "engines/collectives": ["engines/test_exchanges"],
    "engines/reduction": [
        "engines/test_reduction",
        "engines/test_same_bits::test_same_bits_for_seven_towers",
    ],
    "engines/rounds": [
        "engines/test_exchanges::test_collectives_that_do_not_need_each_other_share_a_round",
        "engines/test_exchanges::test_collectives_are_those_of_jax[psum]",
        "engines/test_exchanges::test_collectives_are_those_of_jax[one after another]",
        "engines/test_exchanges::test_collectives_are_those_of_jax[axis_index]",
        "engines/test_exchanges::test_one_nan_comes_of_many",
        "engines/test_exchanges::test_trap_gradients_through_collectives_are_those_of_the_whole_batch[pmean]",
    ],
    "engines/same_bits": [
        "steps/test_train::test_trap_mean_of_means",
        "engines/test_same_bits::test_same_bits_for_seven_towers",
        "engines/test_same_bits::test_same_bits_with_towers_strided_over_devices",
        "engines/test_same_bits::test_same_bits_with_nan_and_infinity_of_both_signs",
        "engines/test_exchanges::test_trap_rows_that_only_fill_up_never_meet_others",
        "engines/test_same_bits::test_same_bits_even_when_a_row_is_nan",
        "proof/test_verification",
    ],
    "engines/spmd": [
        "engines/test_exchanges::test_collectives_are_those_of_jax[psum]",
        "engines/test_exchanges::test_collectives_are_those_of_jax[one after another]",
        "engines/test_exchanges::test_collectives_are_those_of_jax[all_gather of flags]",
        "steps/test_train::test_model_state_is_averaged_or_taken_from_the_first_tower",
        "functions/test_autodiff::test_law_l2_inside_other_transformations[jit-6]",
        "functions/test_autodiff::test_argnums_and_in_axes_as_in_jax",
        "steps/test_clip_norm::test_large_leaves_in_buffers_of_their_own",
        "functions/test_parallel",
    ],
    "functions/autodiff": [
        "functions/test_autodiff::test_argnums_and_in_axes_as_in_jax",
        "functions/test_autodiff::test_gradients_come_home_to_a_bound_parameter",
        "functions/test_autodiff::test_a_function_as_argument_compiles_once",
        "functions/test_autodiff::test_a_loop_that_calls_it_anew_compiles_once",
        "functions/test_autodiff::test_law_l2_inside_other_transformations[jit-None]",
        "functions/test_autodiff::test_flags_strings_and_functions_are_handed_on[4]",
        "models/test_closures::test_a_global_batch_is_named",
        "models/test_flax_nnx::test_law_l2_gradients_are_what_nnx_gives",
        "functions/test_autodiff",
    ],
    "functions/gradient_job": ["functions/test_autodiff", "functions/test_ratio"],
    "functions/ratio": ["functions/test_ratio", "steps/test_ratio"],
    "models/closures": [
        "models/test_closures",
        "models/test_flax_nnx::test_a_module_that_is_read_as_a_global",
    ],
    "models/dependencies": ["models/test_dependencies", "models/test_closures"],
    "models/opening": ["models/test_closures"],
    "stages/cutting": ["stages/test_chain"],
    "stages/layout": ["stages/test_layout"],
    "stages/order": ["stages/test_layout", "stages/test_chain"],
    "steps/optimizing/clipping": ["steps/test_clip_norm"],
    "steps/job": [
        "steps/test_train::test_equals_sgd_with_momentum_in_numpy",
        "steps/test_sharded_replay::test_one_step_for_two_models",
        "steps/test_train::test_a_skipped_step_leaves_nothing_but_its_number",
        "steps/test_train::test_model_state_that_a_loss_returns_may_be_a_number",
        "steps/test_ratio::test_a_masked_loss_and_its_metrics",
        "steps/test_ratio::test_the_losses_of_towers",
        "steps/test_ratio::test_metrics_that_are_sums_need_full_towers",
        "steps/test_train::test_trap_mean_of_means",
        "steps/test_train::test_model_state_is_averaged_or_taken_from_the_first_tower",
        "steps/test_train::test_trap_an_empty_tower_turns_the_loss_to_nan",
        "training/test_trainer::test_hooks_hear_of_towers_and_evaluations",
        "checks/test_first_look::test_batch_norm_without_towers_is_told_once",
        "checks/test_first_look::test_each_entry_point_warns_once",
    ],
    "steps/blocks/state": [
        "steps/test_sharded_replay",
        "steps/state/test_changed_state",
        "steps/test_sharded_update",
    ],
    "steps/blocks/update": [
        "steps/test_sharded_replay",
        "steps/test_sharded_update",
        "steps/test_clip_norm",
    ],
    "steps/local/calls": ["steps/test_local_calls"],
    "steps/local/job": ["steps/test_local_updates", "steps/test_local_loops"],
    "steps/local/looped": ["steps/test_local_loops"],
    "steps/local/meeting": ["steps/test_local_updates"],
    "steps/local/runner": ["steps/test_local_updates", "steps/test_local_calls"],
    "steps/local/state": ["steps/test_local_updates", "steps/test_local_loops"],
    "steps/local/way": [
        "steps/test_local_updates",
        "steps/test_local_calls",
        "steps/test_local_loops",
        "checks/test_first_look::test_towers_that_exchange_nothing_are_not_told_to_add_up_a_state",
    ],
    **{
        f"steps/rotation/{name}": ["steps/test_rotation"]
        for name in ("runner", "stale", "state", "sums", "turns")
    },
    "steps/shards/job": ["steps/test_shards", "steps/test_ratio"],
    **{
        f"steps/staged/{name}": ["steps/test_stages"]
        for name in ("job", "runner", "state", "update", "updates")
    },
    "steps/staged/first": ["steps/test_stages", "steps/test_unmade"],
    "steps/staged/weights": ["steps/test_ratio", "steps/test_stages"],
    "steps/state/changes": ["steps/state/test_changed_state"],
    "steps/state/leaves": ["steps/state/test_leaves", "training/checkpoints/test_checkpoint"],
    "towers/rows": [
        "towers/test_rows",
        "project/test_bad_input::test_wrong_use",
        "functions/test_parallel",
    ],
    "towers/split": ["towers/test_feeding", "functions/test_parallel", "engines/test_same_bits"],
    "training/trainer": [
        "training/test_trainer",
        "training/test_same_run::test_the_number_of_stages_counts_where_there_are_any",
    ],
}


def main() -> int:
    """Makes, tries and counts the mutants of a module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="the interpreter that runs the tests")
    parser.add_argument("module", help="such as engines/reduction")
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    module = Path("src/multitower", options.module.removesuffix(".py") + ".py")
    source = (ROOT / module).read_text()
    tests = tests_of(Path(options.module))
    mutants = draw(module, source, options.number, options.seed)
    print(f"{module}: {len(mutants)} mutants; {' '.join(tests)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        copies: Queue[Path] = Queue()
        timeout_s = TIMEOUT_S
        for number in range(options.jobs):
            copies.put(copy_to(Path(directory, str(number))))

        def is_killed(code: str) -> bool:
            copy = copies.get()
            try:
                (copy / module).write_text(code)
                return not passes(options.python, copy, tests, timeout_s)
            finally:
                copies.put(copy)

        start_s = time.monotonic()
        if is_killed(source):
            sys.exit("The tests fail without any mutant.")
        timeout_s = 30 + 4 * (time.monotonic() - start_s)  # a mutant that hangs fills the memory
        with ThreadPoolExecutor(options.jobs) as pool:
            killed = list(pool.map(is_killed, mutants))
    for code, is_dead in zip(mutants, killed, strict=True):
        if not is_dead:
            lines = difflib.unified_diff(source.splitlines(), code.splitlines(), n=1, lineterm="")
            print("survives:", *list(lines)[2:], sep="\n    ")
    print(f"{module}: {sum(killed)} of {len(killed)} killed")
    return 0 if sum(killed) >= ENOUGH * len(killed) else 1


def draw(module: Path, source: str, number: int, seed: int) -> list[str]:
    """The sources of mutants, one at each of `number` places."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        database = stack.enter_context(use_db(Path(directory, "db"), WorkDB.Mode.create))
        init([ROOT / module], database, {})
        found = [item.mutations[0] for item in database.work_items]
    # Types, options such as frozen=True, and zip(strict=True), an assertion of ours: no test can
    # tell, nor should it.
    unseen = [
        ((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset))
        for node in ast.walk(ast.parse(source))
        for one in (
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
            *getattr(node, "decorator_list", ()),
            node.value if isinstance(node, ast.keyword) and node.arg == "strict" else None,
            node if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING" else None,
        )
        if one is not None
    ]
    places: dict[tuple[int, int], list] = {}
    for mutation in found:
        is_unseen = any(start <= mutation.start_pos < end for start, end in unseen)
        if not is_unseen and "Decorator" not in mutation.operator_name:
            places.setdefault(mutation.start_pos, []).append(mutation)
    generator = random.Random(seed)
    order = sorted(places)
    generator.shuffle(order)
    drawn: dict[tuple[int, int], str] = {}
    for place in order:
        if len(drawn) == number:
            break
        m = generator.choice(places[place])
        code = mutate_code(source, get_operator(m.operator_name)(**m.operator_args), m.occurrence)
        if is_python(code):
            drawn[place] = code
    return [drawn[place] for place in sorted(drawn)]


def is_python(code: str) -> bool:
    """Cosmic Ray takes the star of a signature for a product."""
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def tests_of(module: Path) -> list[str]:
    """What is run, in this order."""
    names = TESTS.get(module.as_posix(), [f"{module.parent}/test_{module.name}"])
    files = [name.partition("::") for name in names]  # a test of a file may be named, too
    places = [f"tests/{name}.py{colons}{test}" for name, colons, test in files]
    missing = [name for name, *_ in files if not (ROOT / f"tests/{name}.py").exists()]
    if missing:
        sys.exit(f"{', '.join(missing)}: no such tests. Name those of {module} in TESTS.")
    return places


def copy_to(directory: Path) -> Path:
    """What git tracks, as it is now."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in names.split("\0")[:-1]:
        if (ROOT / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    return directory


def passes(python: str, copy: Path, tests: list[str], timeout_s: float) -> bool:
    """Whether all tests do; one that hangs does not."""
    try:
        program = subprocess.run(
            [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return program.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
