"""Trainer: from a loss function to a finished, resumable run."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from multitower.errors import ArgumentError, CheckpointError, refuse_foreign
from multitower.functions.objective import Reduction
from multitower.hardware.devices import DeviceSpec
from multitower.processes.leaving import hosts_of_all
from multitower.processes.run_lock import held_for_all, held_run_directory
from multitower.processes.together import is_first
from multitower.steps.local.options import LocalState
from multitower.steps.loss import LossFunction
from multitower.steps.parts import EmaDecay
from multitower.steps.rotation.options import StaleScale, Updates
from multitower.steps.state.train_state import TrainState, check_is_state, state_of
from multitower.steps.step import TrainStep
from multitower.steps.train import train_step
from multitower.towers.leaves import as_python
from multitower.training.checkpoints.checkpoint import Checkpoints
from multitower.training.fitting.early_stopping import RULE, EarlyStopping, Patience
from multitower.training.progress import Hook, Progress, epoch_of
from multitower.training.scoring.evaluation import evaluate
from multitower.training.scoring.prediction import predict

if TYPE_CHECKING:
    import optax

    from multitower.training.console import Display
    from multitower.training.fitting.beginning import FitArguments
    from multitower.training.fitting.trainer_parts import TrainerParts

Batches = Callable[[int], Iterator[Any]]


class Trainer:
    """The training loop: steps, checkpoints, resume, signals, checks for NaN, evaluation.

    Args:
        loss_fn: as for `multitower.train_step`.
        optimizer: an optax optimizer; its schedules count updates.
        run_dir: directory of the run; checkpoints are kept in `run_dir/checkpoints`. None, the
            default, keeps nothing on disk.
        devices: as for `multitower.devices`.
        towers: the number of towers. With it, a run has the same bits on any number of devices,
            even if it is stopped and resumed on another number.
        global_batch: rows of a full batch, over all towers; by default those of the first batch.
        ema_decay: as for `multitower.train_step`.
        model_state_from: as for `multitower.train_step`.
        checkpoint_every: steps from one checkpoint to the next; the last step is always saved.
            Without a `run_dir` nothing is, and a number here or for `keep_last` causes a warning.
        keep_last: how many checkpoints to keep.
        keep_best: name of a score of `Trainer.evaluate`. The state with the best score so far is
            also kept in `run_dir/best`. None, the default, keeps no best state.
        best: `"max"` if a higher score is better, `"min"` if a lower one is.
        on_nonfinite: what to do if the loss or a parameter is not finite. `"stop"` ends the run
            with an error and keeps the last good checkpoint; `"skip"` makes no update in that step,
            on all towers together, and continues.
        check_replicas_every: check that all devices hold the same variables every so many steps,
            after the first step and before every save; 0 for never.
        clip_norm: as for `multitower.train_step`: the global norm to clip gradients to.
        compute_dtype: as for `multitower.train_step`: `jnp.bfloat16` or `jnp.float16` for mixed
            precision. Float16 steps whose gradients overflow are skipped, also with `"stop"`.
        reduction: as for `multitower.train_step`: `"sum"` for summed losses.
        shard_update: as for `multitower.train_step`: split the optimizer state over the devices.
        shard_params: as for `multitower.train_step`: split the parameters, too.
        stages: as for `multitower.train_step`: cut the model into parts on different devices.
        layout: as for `multitower.train_step`: (replicas of the model, devices of each).
        interleave: as for `multitower.train_step`: place neighbouring stages on different devices.
        remat: as for `multitower.train_step`: with `stages`, `False` keeps intermediate values
            instead of computing them again in the backward pass.
        steps_per_call: as for `multitower.train_step`: make up to this many updates in one call.
            A call ends early where a checkpoint, a test phase or a check of the devices is due. A
            signal stops the run after a call, with several processes after this or the next call.
            Batches are copied to the devices ahead, for more than one call. The default is one
            update per call.
            With `sync_every` and several processes the default is `sync_every`, but at most 16, so
            that processes exchange nothing within a call; hooks are then called for all steps of a
            call together.
        sync_every: as for `multitower.train_step`: local updates, with a meeting of the towers
            after every so many steps. `evaluate` scores the parameters of the last meeting.
        outer_optimizer: as for `multitower.train_step`: makes the update at a meeting.
        local_state: as for `multitower.train_step`: `"keep"` or `"average"`.
        updates: as for `multitower.train_step`: `"asynchronous"` for updates in a fixed rotation.
        max_staleness: as for `multitower.train_step`.
        rotation: as for `multitower.train_step`.
        stale_scale: as for `multitower.train_step`.
        momentum_correction: as for `multitower.train_step`.
        extra_metrics: as for `multitower.train_step`: `"gradient_norm"` and `"learning_rate"`.
        early_stopping: a `multitower.EarlyStopping`: end the run when a score of its test phases no
            longer improves. None for never.
        profile: numbers of the first and the last step of a trace, for example (10, 13). JAX's
            profiler writes it to `run_dir/profile`, with the memory in use after these steps.
        hooks: a list of functions, or one function, called with a `Progress` after every step and
            evaluation. If a hook has a method `flush`, it is called before a checkpoint is saved.
            By default, `fit` shows its progress on stderr, in process 0; `hooks=[]` shows nothing.

    Attributes:
        hooks: the list of hooks.
        stopped: why the last `fit` ended early, in words; None if it did not.

    Raises:
        ArgumentError: an option has a wrong value, or two options exclude each other.
        DeviceError: as for `multitower.train_step`.
        RunError: `profile` is an empty range of steps.

    Example:
        >>> import itertools, jax.numpy as jnp, numpy as np, optax
        >>> import multitower as mt
        >>> def losses(w, batch):
        ...     return (w * batch["x"] - 3 * batch["x"]) ** 2
        >>> def batches(first):
        ...     for number in itertools.count(first):
        ...         yield {"x": np.random.default_rng(number).normal(size=16).astype("f")}
        >>> trainer = mt.Trainer(losses, optax.sgd(0.1), towers=8, global_batch=16)
        >>> state = trainer.fit(jnp.float32(0.0), batches, steps=100)
        >>> round(float(state.params), 3)
        3.0
    """

    @refuse_foreign(
        has_aux="A loss may return (loss, metrics) as it is.",
        callbacks="Functions to be called after every step are hooks=.",
        max_steps="Say it to fit: fit(..., steps=).",
        max_epochs="Say it to fit: fit(..., epochs=).",
        batch_size="The rows of a full batch, over all towers, are global_batch=.",
    )
    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: "optax.GradientTransformation",
        *,
        run_dir: str | Path | None = None,
        devices: DeviceSpec | None = None,
        towers: int | None = None,
        global_batch: int | None = None,
        ema_decay: EmaDecay | None = None,
        model_state_from: Literal["mean", "first"] = "mean",
        checkpoint_every: int = 1000,
        keep_last: int = 3,
        keep_best: str | None = None,
        best: Literal["max", "min"] = "max",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        check_replicas_every: int = 1000,
        clip_norm: float | None = None,
        compute_dtype: Any = None,
        reduction: Reduction = "mean",
        shard_update: bool = False,
        shard_params: bool = False,
        stages: int | None = None,
        layout: tuple[int, int] | None = None,
        interleave: bool = False,
        remat: bool = True,
        steps_per_call: int | None = None,
        sync_every: int | None = None,
        outer_optimizer: "optax.GradientTransformation | None" = None,
        local_state: LocalState = "keep",
        updates: Updates = "synchronous",
        max_staleness: int | None = None,
        rotation: Sequence[int] | None = None,
        stale_scale: StaleScale | None = None,
        momentum_correction: bool = False,
        extra_metrics: Sequence[str] = (),
        early_stopping: EarlyStopping | None = None,
        profile: tuple[int, int] | None = None,
        hooks: Sequence[Hook] | Hook | None = None,
    ) -> None:
        from multitower.training.fitting.settings import (  # noqa: PLC0415 (importing stays quick)
            Kept,
            as_hooks,
            check_settings,
            settings_that_decide,
            steps_per_call_of,
        )

        kept = Kept(run_dir, checkpoint_every, keep_last, keep_best, best, profile)
        check_settings(kept, on_nonfinite, check_replicas_every, early_stopping)
        if run_dir is not None:  # also if the program changes its working directory later
            run_dir = Path(run_dir).absolute()
        options: dict[str, Any] = {
            "devices": devices,
            "towers": towers,
            "global_batch": global_batch,
            "ema_decay": ema_decay,
            "model_state_from": model_state_from,
            "clip_norm": clip_norm,
            "compute_dtype": compute_dtype,
            "reduction": reduction,
            "shard_update": shard_update,
            "shard_params": shard_params,
            "stages": stages,
            "layout": layout,
            "interleave": interleave,
            "remat": remat,
            "steps_per_call": steps_per_call_of(steps_per_call, sync_every),
            "sync_every": sync_every,
            "outer_optimizer": outer_optimizer,
            "local_state": local_state,
            "updates": updates,
            "max_staleness": max_staleness,
            "rotation": rotation,
            "stale_scale": stale_scale,
            "momentum_correction": momentum_correction,
            "extra_metrics": extra_metrics,
        }
        options = {name: as_python(value) for name, value in options.items()}
        self._settings = settings_that_decide(options, on_nonfinite)
        if early_stopping is not None:
            self._settings[RULE] = early_stopping.in_words()
        skip = on_nonfinite == "skip"
        self.step: TrainStep = train_step(
            loss_fn, optimizer, diagnostics=True, skip_nonfinite=skip, **options
        )
        self._loss = LossFunction.of(loss_fn)
        self.hooks = as_hooks(hooks)
        self.stopped: str | None = None
        self._is_shown = hooks is None
        self._display: Display | None = None
        self._early_stopping = early_stopping
        self._patience: Patience | None = None
        self._steps_per_epoch: Any = None
        self._num_steps = 0  # of the newest `fit`
        self._options = options
        self._optimizer = optimizer
        self._profile = profile
        self._checkpoint_every = checkpoint_every
        self._on_nonfinite = on_nonfinite
        self._keep_last = keep_last
        self._directory = None if run_dir is None else run_dir / "checkpoints"
        self._best = None
        if run_dir is not None and keep_best is not None:
            from multitower.training.checkpoints.best import BestCheckpoint  # noqa: PLC0415 (importing stays quick)

            self._best = BestCheckpoint(run_dir / "best", keep_best, best)
        # Asynchronous updates have one copy of a leaf: there is nothing to compare.
        self._check_replicas_every = check_replicas_every if updates == "synchronous" else 0

    @refuse_foreign(
        hooks="Give them to the trainer: Trainer(..., hooks=[...]).",
        callbacks="Give the trainer hooks: Trainer(..., hooks=[...]).",
        early_stopping="Give it to the trainer: Trainer(..., early_stopping=...).",
        validation_data="Pass evaluate=, a function of the state, and evaluate_every=.",
        max_steps="Pass steps=.",
        batch_size="The batches decide, see multitower.make_batches(..., global_batch=).",
    )
    def fit(
        self,
        params: Any,
        batches: Batches,
        *,
        steps: int | None = None,
        epochs: float | None = None,
        steps_per_epoch: float | None = None,
        model_state: Any = None,
        rng: Any = None,
        resume: bool = False,
        allow_previous: bool = False,
        allow_changes: bool = False,
        about: Mapping[str, Any] | None = None,
        evaluate: Callable[[TrainState], Any] | None = None,
        evaluate_every: int | None = None,
    ) -> TrainState:
        """Trains until `steps` updates have been made, from the start or from a checkpoint.

        Args:
            params: the initial parameters, or a function without arguments that returns them (see
                `TrainStep.init`). A resume uses their shapes and dtypes, not their values; but an
                Equinox module must have the integers, flags and keys that it had when the run
                began.
            batches: `batches(first)` returns an iterator over the batches of steps first,
                first + 1, ..., counted from 0. A batch must depend on its number only, so that a
                resume gets the same batches.
            steps: updates in all, over the first run and all resumes. To extend a finished run,
                pass more steps and `resume=True`.
            epochs: passes over the data in all, instead of `steps`: the run makes
                `ceil(epochs * steps_per_epoch)` updates.
            steps_per_epoch: for `epochs` and for `Progress.epoch`: the number of examples divided
                by the rows of a batch; it need not be whole. By default it is the attribute
                `steps_per_epoch` of `batches` or of the iterator that it returns, as
                `multitower.make_batches` has it.
            model_state: as for `TrainStep.init`.
            rng: as for `TrainStep.init`.
            resume: continue from the newest checkpoint, if there is one.
            allow_previous: if the newest checkpoint is damaged, continue from the one before.
            allow_changes: continue although towers, batch size, optimizer or another option that
                determines the results differs from that of the checkpoint.
            about: JSON values to keep with every checkpoint, such as the configuration.
            evaluate: the test phase, a function that is called with the state; usually it calls
                `Trainer.evaluate`.
            evaluate_every: steps from one test phase to the next; 0 for none, which is also the
                default, with a warning if `evaluate` is given; likewise for a number of steps that
                this fit does not reach. A run that is resumed at the step of a test phase begins
                with this phase, which may not have been made before. A finished run does not repeat
                its last one.

        Returns:
            The state after the last step, also if the run ended early. `restore(best=True)` reads
            the best state. `trainer.stopped` is the reason if the run ended early.

        Raises:
            ArgumentError: not exactly one of `steps` and `epochs` is given, or an epoch's size is
                not known; `batches` is not a function of one argument, or returns no iterator;
                `resume` without a `run_dir`; `early_stopping` without a test phase; or the
                processes of a run have different settings.
            NonFiniteError: the loss or a parameter is not finite, with `on_nonfinite="stop"`.
            Interrupted: the process received SIGTERM or SIGINT. The step was finished and, with a
                `run_dir`, saved.
            CheckpointError: a checkpoint cannot be written or read.
            RunError: there are checkpoints or a best state and `resume` is false, or the
                checkpoints are of a run with other settings; another run uses `run_dir`; or the
                iterator of batches ended before `steps`. The steps so far are then saved, with a
                `run_dir` and one process; as they are if the iterator raises an error of its own.

        Example:
            >>> import jax.numpy as jnp, numpy as np, optax
            >>> import multitower as mt
            >>> losses = lambda w, batch: (w - batch["x"]) ** 2
            >>> data = {"x": np.full(16, 3.0, np.float32)}
            >>> batches = lambda first: mt.make_batches(data, global_batch=8, seed=0, first=first)
            >>> trainer = mt.Trainer(losses, optax.sgd(0.1), devices=2, hooks=[])
            >>> int(trainer.fit(jnp.float32(0.0), batches, epochs=1.5).step)
            3
        """
        from multitower.towers.same_call import check_alike  # noqa: PLC0415 (likewise)
        from multitower.training.checkpoints.about import check_about  # noqa: PLC0415 (importing stays quick)
        from multitower.training.fitting.beginning import (  # noqa: PLC0415 (importing stays quick)
            FitArguments,
            check_batches,
            check_no_test_phase,
            refuse_best_of_before,
            warn_of_a_last_meeting,
        )
        from multitower.training.fitting.epochs import steps_of_run  # noqa: PLC0415 (likewise)
        from multitower.training.fitting.fit import train  # noqa: PLC0415 (likewise)
        from multitower.training.same_run import describe_run, in_words  # noqa: PLC0415 (likewise)

        check_batches(batches)
        if resume and self._directory is None:
            raise ArgumentError(
                "fit(resume=True), and this trainer keeps no checkpoints: give it a run_dir, or "
                "leave resume out."
            )
        check_about(about or {})
        self._loss.check_extras(model_state, rng, "trainer.fit(..., ")
        steps = steps_of_run(steps, epochs, steps_per_epoch, batches)
        if not evaluate_every:
            is_forgotten = evaluate is not None and evaluate_every is None
            check_no_test_phase(self._best, self._early_stopping, is_forgotten=is_forgotten)
        elif self._best is not None and callable(evaluate):
            evaluate = self._best.watched(evaluate)
        warn_of_a_last_meeting(steps, self._options["sync_every"])
        if self._profile is not None:
            from multitower.training.profile import check_profile  # noqa: PLC0415 (likewise)

            check_profile(self._profile, steps)
        if self.step.placement.spans_processes:
            hosts_of_all()  # a process that fails later can then name the host of a missing one
        self.stopped = None
        given = FitArguments(
            batches=batches,
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            resume=resume,
            allow_previous=allow_previous,
            allow_changes=allow_changes,
            about=about or {},
            evaluate=evaluate,
            evaluate_every=evaluate_every or 0,
        )
        state = self.step.init(params, model_state=model_state, rng=rng)
        run = describe_run(
            self._optimizer, state.kept.params_shapes(), self._settings, self.step.untrained
        )
        check_alike("fit", {**self._rhythm(given), **in_words(run)}, self.step.placement)
        with self._checkpoints() as checkpoints:
            if checkpoints is not None and not checkpoints.steps():
                refuse_best_of_before(self._best, given)
            return train(self._parts(), state, run, checkpoints, given)

    def restore(
        self, params: Any, *, model_state: Any = None, rng: Any = None, best: bool = False
    ) -> TrainState:
        """Reads the newest checkpoint, or the best one, without training.

        Args:
            params: as for `fit`; only shapes and dtypes of weights are used.
            model_state: as for `fit`.
            rng: as for `fit`.
            best: read the state that `keep_best` kept.

        Returns:
            The state after the last step that was saved, or the best one.

        Raises:
            CheckpointError: there is no run directory, no checkpoint, or it cannot be read.
            RunError: an Equinox module has other integers, flags or keys than that of the run.

        Example:
            >>> import itertools, tempfile, jax.numpy as jnp, numpy as np, optax
            >>> import multitower as mt
            >>> losses, zero = (lambda w, x: (w - x) ** 2), jnp.float32(0.0)
            >>> with tempfile.TemporaryDirectory() as run_dir:
            ...     trainer = mt.Trainer(losses, optax.sgd(0.1), run_dir=run_dir, hooks=[])
            ...     _ = trainer.fit(zero, lambda first: itertools.repeat(np.ones(8)), steps=2)
            ...     int(trainer.restore(zero).step)
            2
        """
        if self._directory is None:
            raise CheckpointError("this trainer keeps no checkpoints: give it a run_dir.")
        directory = self._directory.parent / "best" if best else self._directory
        if not directory.exists():
            why = "no state has been kept as the best: that takes keep_best= and evaluate_every="
            raise CheckpointError(
                f"{directory} does not exist: {why if best else 'no complete checkpoint yet'}."
            )
        from multitower.training.same_run import check_same_arrays, describe_arrays  # noqa: PLC0415 (importing stays quick)

        with Checkpoints(directory, read_only=True) as checkpoints:
            self._loss.check_extras(model_state, rng, "trainer.restore(..., ")
            like = self.step.init(params, model_state=model_state, rng=rng)
            number, state, _ = checkpoints.restore(like=like)
            now = describe_arrays(self.step.untrained)
            check_same_arrays(checkpoints.run_of(number), now, directory)
            return state

    def model(self, state: TrainState, *, ema: bool | None = None) -> Any:
        """Returns the model that `evaluate` scores, with the moving average or the parameters.

        Args:
            state: from `fit` or `restore` of this trainer.
            ema: True for the moving average, False for the parameters; by default the moving
                average, if there is one.

        Returns:
            The average or the parameters; or the NNX or Equinox module with these weights, in
            training mode. Call `model.eval()` or `eqx.nn.inference_mode(model)` before you use it
            for predictions. `evaluate` and `predict` do so.

        Raises:
            ArgumentError: `ema=True`, and there is no moving average.
            StateError: it is not a state.

        Example:
            >>> import itertools, jax.numpy as jnp, numpy as np, optax
            >>> import multitower as mt
            >>> losses = lambda w, x: (w - x) ** 2
            >>> trainer = mt.Trainer(losses, optax.sgd(0.5), devices=2, ema_decay=0.5, hooks=[])
            >>> ones = lambda first: itertools.repeat(np.ones(8))
            >>> state = trainer.fit(jnp.float32(0.0), ones, steps=1)
            >>> float(trainer.model(state)), float(trainer.model(state, ema=False))
            (0.5, 1.0)
        """
        check_is_state(
            state,
            "the trainer",
            "pass that of fit or restore; for parameters call mt.evaluate or mt.predict",
        )
        if ema and state.ema_params is None:
            raise ArgumentError(
                "model(state, ema=True): this state has no moving average. Make the trainer with "
                "ema_decay=, such as ema_decay=0.999, or leave ema out."
            )
        return self.step.model(state if ema is False else _scored(state))

    @refuse_foreign(
        global_batch="Say how many rows to score at a time, such as global_batch=256.",
        batch_size="The rows to score at a time, over all towers, are global_batch=.",
    )
    def evaluate(
        self,
        metrics: Callable[..., Any],
        state: TrainState,
        dataset: Any,
        *,
        global_batch: int,
    ) -> dict[str, Any]:
        """Scores a data set with the moving average of the parameters, or else the parameters.

        Args:
            metrics: `metrics(params, batch)` returns a dict with one number per row for each name,
                or an `mt.ratio` with one entry per row. It may take keyword-only `model_state`. If
                the loss takes a module, so does `metrics`, in evaluation mode (see
                `multitower.evaluate`).
            state: from `fit` or `restore`, or what `fit` passes to its test phase.
            dataset: a pytree of NumPy arrays with one example per row on axis 0, or an iterator of
                such batches (see `multitower.evaluate`).
            global_batch: rows to score at a time.

        Returns:
            For each name the mean over all examples, each counted once. Hooks are called with those
            of these means that are numbers, not with arrays. With `keep_best` the state is saved if
            it is the best so far. To score data that must not decide this, call
            `multitower.evaluate(metrics, trainer.model(state), ...)`.

        Raises:
            MultitowerError: as `multitower.evaluate`.

        Example:
            >>> import itertools, jax.numpy as jnp, numpy as np, optax
            >>> import multitower as mt
            >>> losses = lambda w, x: (w - x) ** 2
            >>> trainer = mt.Trainer(losses, optax.sgd(0.5), devices=2, hooks=[])
            >>> ones = lambda first: itertools.repeat(np.ones(8))
            >>> state = trainer.fit(jnp.float32(0.0), ones, steps=1)
            >>> errors = lambda w, x: {"error": jnp.abs(w - x)}
            >>> trainer.evaluate(errors, state, np.arange(5, dtype=np.float32), global_batch=2)
            {'error': 1.4}
        """
        from multitower.training.scoring.as_trained import scored_as_trained  # noqa: PLC0415 (importing stays quick)

        scores = scored_as_trained(
            evaluate,
            self._options,
            (metrics, self.model(state)),
            dataset,
            global_batch=global_batch,
            model_state=state.model_state,
        )
        number = int(state.step)  # host-device sync
        epoch = epoch_of(number, self._steps_per_epoch)
        numbers = {name: score for name, score in scores.items() if not np.ndim(score)}
        num_steps = max(number, self._num_steps)
        self._tell(Progress("test", number, num_steps, numbers, state=state, epoch=epoch))
        if self._patience is not None:
            self._patience.see(number, numbers)
        if self._best is not None:
            from multitower.training.same_run import describe_arrays  # noqa: PLC0415 (importing stays quick)

            self._best.offer(number, state, numbers, describe_arrays(self.step.untrained))
        return scores

    @refuse_foreign(
        global_batch="Say how many rows to compute at a time, such as global_batch=256.",
        batch_size="The rows to compute at a time, over all towers, are global_batch=.",
    )
    def predict(
        self, fn: Callable[..., Any], state: TrainState, data: Any, *, global_batch: int
    ) -> Any:
        """Returns the outputs for every row, with the moving average or else the parameters.

        By default, progress is shown on a terminal; `hooks=[]` shows nothing.

        Args:
            fn: `fn(params, batch)` returns a pytree of arrays with one entry per row on axis 0. If
                the loss takes a module, so does `fn`, in evaluation mode.
            state: from `fit` or `restore` of this trainer.
            data: a pytree of arrays with one example per row on axis 0, or an iterator of such
                batches.
            global_batch: rows to compute at a time.

        Returns:
            As `multitower.predict`: NumPy arrays with one entry per row, in the order of the rows.

        Raises:
            MultitowerError: as `multitower.predict`.

        Example:
            >>> import itertools, jax.numpy as jnp, numpy as np, optax
            >>> import multitower as mt
            >>> losses = lambda w, x: (w - x) ** 2
            >>> trainer = mt.Trainer(losses, optax.sgd(0.5), devices=2, hooks=[])
            >>> ones = lambda first: itertools.repeat(np.ones(8))
            >>> state = trainer.fit(jnp.float32(0.0), ones, steps=1)
            >>> trainer.predict(lambda w, x: w * x, state, np.arange(3.0), global_batch=2).tolist()
            [0.0, 1.0, 2.0]
        """
        from multitower.training.console import shown_rows  # noqa: PLC0415 (importing stays quick)
        from multitower.training.scoring.as_trained import scored_as_trained  # noqa: PLC0415 (likewise)

        with shown_rows(data, self._is_shown and is_first()) as progress:
            return scored_as_trained(
                predict,
                self._options,
                (fn, self.model(state)),
                data,
                global_batch=global_batch,
                model_state=state.model_state,
                progress=progress,
            )

    def _rhythm(self, given: "FitArguments") -> dict[str, Any]:
        """What decides at which steps processes save and test together, by name.

        Not what ends a run early: process 0 decides that for all.
        """
        best = self._best
        rhythm = {
            "steps": given.steps,
            "resume": given.resume,
            "with a run_dir": self._directory is not None,
            "checkpoint_every": self._checkpoint_every,
            "evaluate_every": given.evaluate_every,
            "check_replicas_every": self._check_replicas_every,
            "steps_per_call": self._options["steps_per_call"],
            "keep_best": None if best is None else [best.metric, best.mode],
        }
        return {name: as_python(value) for name, value in rhythm.items()}

    def _parts(self) -> "TrainerParts":
        from multitower.training.fitting.trainer_parts import TrainerParts  # noqa: PLC0415 (importing stays quick)
        from multitower.training.profile import Profile  # noqa: PLC0415 (likewise)

        return TrainerParts(
            self.step,
            self._options,
            self._checkpoint_every,
            self._on_nonfinite,
            self._check_replicas_every,
            self._early_stopping,
            self.hooks,
            self._tell,
            self._end,
            Profile((self._directory or Path()).parent / "profile", self._profile),
            self._while_it_runs,
        )

    def _end(self, reason: str) -> None:
        self.stopped = reason
        if self._display is not None:
            self._display.say(reason)

    @contextmanager
    def _while_it_runs(
        self, patience: Patience | None, steps_per_epoch: Any, steps: tuple[int, int]
    ) -> Generator[None]:
        """Counts test phases while the run lasts, and shows progress unless the user gave hooks."""
        self._patience, self._steps_per_epoch = patience, steps_per_epoch
        first, self._num_steps = steps
        try:
            if not self._is_shown or not is_first():
                yield
                return
            from multitower.training.console import shown_on_stderr  # noqa: PLC0415 (importing stays quick)

            last = self._num_steps
            with shown_on_stderr(last) as self._display:
                if 0 < first < last:
                    self._display.say(f"continuing after step {first} of {last}")
                yield
        finally:
            self._patience = self._display = None

    @contextmanager
    def _checkpoints(self) -> Generator[Checkpoints | None]:
        if self._directory is None:
            yield None
            return
        run_dir = self._directory.parent
        with suppress(OSError):  # Checkpoints raises a better error
            run_dir.mkdir(parents=True, exist_ok=True)
        held = held_for_all if self.step.placement.spans_processes else held_run_directory
        with (
            held(run_dir, nested=True),  # the command line may hold this lock already
            Checkpoints(self._directory, keep_last=self._keep_last) as checkpoints,
        ):
            yield checkpoints

    @property
    def best(self) -> tuple[int, dict[str, float]] | None:
        """Step and scores of the state that `keep_best` kept; None if there is none."""
        return None if self._best is None else self._best.scores()

    def _tell(self, progress: Progress) -> None:
        for hook in self.hooks:
            hook(progress)
        if self._display is not None:
            self._display.show(progress)


def _scored(state: TrainState) -> TrainState:
    """The state with the average, if it has one, in place of its parameters."""
    average = state.ema_params
    if average is None:
        return state
    return state_of(state.kept.shared()._replace(params=average), state.kept.origin)
