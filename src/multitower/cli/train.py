"""`multitower train RECIPE`."""

import contextlib
import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import tyro

from multitower.cli.console import say
from multitower.cli.finish import finish
from multitower.cli.flags.config_file import Config, read_config_file
from multitower.cli.flags.groups import (
    ASYNCHRONOUS,
    LOCAL,
    NO_LAID_OUT_STAGES,
    NOT_LOCAL,
    STAGES,
    SYNCHRONOUS,
    AsynchronousFlags,
    LaidOutStageFlags,
    LocalFlags,
)
from multitower.cli.flags.settings import collect_settings, download_data
from multitower.cli.flags.shared import (
    BatchSize,
    ClipNorm,
    ComputeDtype,
    Data,
    Devices,
    EarlyStopping,
    EmaDecay,
    Epochs,
    ExtraMetrics,
    FileOrDirectory,
    MinDelta,
    OnNonfinite,
    Seed,
    SetOptions,
    ShardParams,
    ShardUpdate,
    Simulate,
    Steps,
    Synthetic,
    WholeNumber,
    flag,
    one_of,
    switch,
    typed,
)
from multitower.cli.starting.devices import start_devices
from multitower.cli.starting.together import ALONE, TOGETHER, Together
from multitower.errors import MultitowerError, RunError
from multitower.processes.leaving import HEARTBEAT_S
from multitower.processes.run_lock import held_for_all, held_run_directory
from multitower.processes.together import by_first, is_first
from multitower.recipes.catalog import SHIPPED, find_recipe
from multitower.recipes.from_file import is_file_name
from multitower.runs.directory import (
    RESULT,
    fresh_run_directory,
    make_run_directory,
    remove_refused,
    run_found_in,
    write_config,
)
from multitower.runs.options import RunOptions
from multitower.steps.rotation.options import RotationOptions
from multitower.towers.placement import place


def train(
    recipe: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="RECIPE",
            help=f"What to train: {', '.join(SHIPPED)}, or your own recipe, FILE.py.",
            help_behavior_hint="(default: the recipe of --config)",
        ),
    ] = None,
    *,
    config: Annotated[
        FileOrDirectory,
        flag(
            "FILE",
            "Read settings from this JSON or TOML file, such as the config.json of a run; flags "
            "take precedence.",
            "none",
        ),
    ] = None,
    devices: Devices = None,
    simulate: Simulate = None,
    towers: Annotated[
        WholeNumber,
        flag(
            "T",
            "Split every batch into T towers: the result then has the same bits on any number of "
            "devices.",
            "one per device, which is faster",
        ),
    ] = None,
    steps: Steps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    tower_batch: Annotated[
        WholeNumber, flag("N", "Take N examples per step and tower.", "see --batch-size")
    ] = None,
    data: Data = None,
    synthetic: Synthetic = False,
    download: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch(
            "Download the data set first, to --data or to your cache directory; existing files are "
            "kept."
        ),
    ] = False,
    set_options: SetOptions = (),
    checkpoint_every: Annotated[
        WholeNumber, flag("N", "Save a checkpoint every N steps and after the last step.", "1000")
    ] = None,
    keep_last: Annotated[WholeNumber, flag("N", "Keep the newest N checkpoints.", "3")] = None,
    evaluate_every: Annotated[
        WholeNumber, flag("N", "Score the test set every N steps and at the end.", "at the end")
    ] = None,
    keep_best: Annotated[
        str | None,
        flag("NAME", "Keep the state with the best test score NAME in DIR/best.", "none"),
    ] = None,
    early_stopping: EarlyStopping = None,
    min_delta: MinDelta = None,
    best: Annotated[
        str | None,
        one_of("max", "min"),
        flag("max|min", "Whether a high or a low score is better.", "max"),
    ] = None,
    seed: Seed = None,
    shard_update: ShardUpdate = False,
    shard_params: ShardParams = False,
    steps_per_call: Annotated[
        WholeNumber,
        flag(
            "K",
            "Without --towers: make up to K updates in one call, which saves the host's time. With "
            "--sync-every also with --towers and over processes.",
            "one; H, but 16 at most, with --sync-every H over processes",
        ),
    ] = None,
    clip_norm: ClipNorm = None,
    ema_decay: EmaDecay = None,
    on_nonfinite: OnNonfinite = None,
    compute_dtype: ComputeDtype = None,
    log: Annotated[
        str | None,
        flag(
            "NAMES",
            "Log to these services too: wandb, mlflow, trackio; separate them by commas.",
            "metrics.jsonl and TensorBoard files",
        ),
    ] = None,
    extra_metrics: ExtraMetrics = None,
    profile: Annotated[
        str | None,
        flag("N:M", "Write a trace of steps N to M to DIR/profile, from JAX's profiler.", "none"),
    ] = None,
    run_dir: Annotated[
        FileOrDirectory, flag("DIR", "Write to this directory.", "runs/RECIPE-DATE-TIME")
    ] = None,
    force: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Overwrite the run in --run-dir."),
    ] = False,
    resume: Annotated[
        str | None,
        one_of("auto"),
        flag(
            "auto",
            "Resume the run in --run-dir if there is one, for clusters that start a job again with "
            "the same command.",
            "start a new run",
        ),
    ] = None,
    in_stages: Annotated[LaidOutStageFlags, STAGES] = NO_LAID_OUT_STAGES,
    local: Annotated[LocalFlags, LOCAL] = NOT_LOCAL,
    in_turns: Annotated[AsynchronousFlags, ASYNCHRONOUS] = SYNCHRONOUS,
    together: Annotated[Together, TOGETHER] = ALONE,
) -> None:
    """Train a recipe on all devices and score it. Writes DIR/result.json and DIR/report.html."""
    file = Config(None, {}, {}) if config is None else read_config_file(config)
    name = _recipe_name(recipe, file, config)
    settings = collect_settings(set_options, data, synthetic, before=file.settings)
    chosen = find_recipe(name, settings)
    given = {
        **typed(
            devices=devices,
            towers=towers,
            steps=steps,
            epochs=epochs,
            global_batch=batch_size,
            checkpoint_every=checkpoint_every,
            keep_last=keep_last,
            evaluate_every=evaluate_every,
            keep_best=keep_best,
            best=best,
            seed=seed,
            shard_update=shard_update,
            shard_params=shard_params,
            clip_norm=clip_norm,
            ema_decay=ema_decay,
            on_nonfinite=on_nonfinite,
            compute_dtype=compute_dtype,
            steps_per_call=steps_per_call,
            log=log,
            profile=profile,
            early_stopping=early_stopping,
            min_delta=min_delta,
            extra_metrics=extra_metrics,
        ),
        **in_stages.options(),
        **local.options(),
        **in_turns.options(),
    }
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in given:
            given.setdefault(other, None)  # a flag takes the place of what the file says
    options = RunOptions(**{**file.options, **given})
    if simulate is not None:
        options = dataclasses.replace(options, devices=None)
    if resume and (run_dir is None or force):
        raise RunError(
            "--resume auto goes on with the run in --run-dir DIR, which must be named, and "
            "--force throws it away: leave --force out."
        )
    where = start_devices(options.devices, simulate, options.towers, together=together)
    if download:
        by_first(lambda: str(download_data(chosen)))
        if not is_first():  # which may be on another machine
            download_data(chosen)
    if tower_batch is not None:
        options = _with_tower_batch(options, tower_batch, batch_size)
    about = {"recipe": name, "settings": settings, "options": dataclasses.asdict(options)}
    if resume and run_dir is not None:
        found = by_first(lambda: run_found_in(run_dir, about))
        if found == "finished":
            say(f"{run_dir} is finished: {run_dir / RESULT} holds its result.")
            return
        if found == "begun":
            say(f"resuming {chosen.name} from {run_dir} on {where}")
            with held_for_all(run_dir, wait_s=2 * HEARTBEAT_S):
                finish(run_dir, chosen, options, resume=True)
            return
    say(f"training {chosen.name} on {where}")
    with _new_directory(run_dir, chosen.name, about, force=force) as directory:
        finish(directory, chosen, options)


@contextlib.contextmanager
def _new_directory(
    run_dir: Path | None, name: str, about: dict[str, Any], *, force: bool
) -> Generator[Path]:
    """The directory of a new run, held while it trains; removed if the run is refused.

    Args:
        run_dir: where; None for `runs/NAME-DATE-TIME`, which alone is removed.
        name: of the recipe.
        about: goes to its `config.json`.
        force: whether a run that is there already may be overwritten.
    """

    def make() -> str:
        directory = (
            fresh_run_directory(Path("runs"), name)
            if run_dir is None
            else make_run_directory(run_dir, overwrite=force)
        )
        held.enter_context(held_run_directory(directory))  # before another run's config is lost
        write_config(directory, about)
        return str(directory)

    with contextlib.ExitStack() as held:
        directory = Path(by_first(make))
        try:
            yield directory
        except MultitowerError:
            if run_dir is None and is_first():
                remove_refused(directory)
            raise


def _recipe_name(recipe: str | None, file: Config, path: Path | None) -> str:
    if recipe is None and file.recipe is None:
        raise RunError(f"name a recipe: {', '.join(SHIPPED)}, or your own recipe, FILE.py.")
    # Absolute, so that a resume finds it from anywhere.
    full = lambda name: str(Path(name).absolute()) if is_file_name(name) else name
    name = full(recipe or file.recipe or "")
    if file.recipe is not None and recipe is not None and name != full(file.recipe):
        raise RunError(f"{path} is of the recipe {file.recipe}: leave {recipe} out, or --config.")
    return name


def _with_tower_batch(options: RunOptions, tower_batch: int, batch_size: int | None) -> RunOptions:
    if batch_size is not None:
        raise RunError(
            f"both --batch-size {batch_size} and --tower-batch {tower_batch}: the batch size is "
            "the tower batch times the number of towers. Give one of them."
        )
    towers = options.towers or len(place(options.devices, None).devices)
    if options.asynchronous:  # those of a group share the rows of an update
        towers //= RotationOptions(options.max_staleness, None, None).num_groups(towers)
    return dataclasses.replace(options, global_batch=tower_batch * towers)
