"""Trainer: from a loss function to a finished, resumable run."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from multitower.errors import ArgumentError, CheckpointError, refuse_foreign, warn
from multitower.functions.objective import Reduction
from multitower.hardware.devices import DeviceSpec
from multitower.processes.leaving import hosts_of_all
from multitower.processes.run_lock import held_for_all, held_run_directory
from multitower.processes.together import is_first
from multitower.steps.local.options import LocalState
from multitower.steps.loss import LossFunction
from multitower.steps.parts import EmaDecay
from multitower.steps.rotation.options import StaleScale, Updates
from multitower.steps.state.train_state import TrainState, check_is_state
from multitower.steps.step import TrainStep
from multitower.steps.train import train_step
from multitower.training.checkpoints.best import BestCheckpoint, warn_of_worst
from multitower.training.checkpoints.checkpoint import Checkpoints
from multitower.training.fitting.early_stopping import RULE, EarlyStopping, Patience
from multitower.training.progress import Hook, Progress, epoch_of
from multitower.training.scoring.chunks import Repeatable
from multitower.training.scoring.evaluation import evaluate
from multitower.training.scoring.prediction import predict

if TYPE_CHECKING:
    import optax

    from multitower.training.console import Display
    from multitower.training.fitting.fit import Around

Batches = Callable[[int], Iterator[Any]]


class Trainer:
    """The training loop: steps, checkpoints, resume, signals, checks for NaN, evaluation.

    Args:
        loss_fn: as for `multitower.train_step`.
        optimizer: an optax optimizer; its schedules count updates.
        run_dir: keep checkpoints in `run_dir/checkpoints`; None for none.
        devices: as for `multitower.devices`.
        towers: the number of towers. With it, a run has the same bits on any number of devices,
            also if it is stopped and resumed on another number.
        global_batch: rows of a full batch.
        ema_decay: as for `multitower.train_step`.
        model_state_from: as for `multitower.train_step`.
        checkpoint_every: steps from one checkpoint to the next; the last step is always saved.
        keep_last: how many checkpoints to keep.
        keep_best: name of a score. The state with the best score so far is kept in `run_dir/best`,
            beside the checkpoints. None to keep none.
        best: `"max"` if a higher score is better, `"min"` if a lower one is.
        on_nonfinite: `"stop"` ends the run and keeps the last good checkpoint; `"skip"` makes no
            update in that step and continues, on all towers together.
        check_replicas_every: compare the devices' variables every so many steps, after the first
            step and before every save; 0 for never.
        clip_norm: as for `multitower.train_step`: the global norm to clip gradients to.
        compute_dtype: as for `multitower.train_step`: `jnp.bfloat16` or `jnp.float16` for mixed
            precision. Float16 steps whose gradients overflow are skipped, also with `"stop"`.
        reduction: as for `multitower.train_step`: `"sum"` for summed losses.
        shard_update: as for `multitower.train_step`: split the optimizer state over the devices.
        shard_params: as for `multitower.train_step`: split the parameters too.
        stages: as for `multitower.train_step`: cut the model into parts on different devices.
        layout: as for `multitower.train_step`: (replicas of the model, devices of each).
        interleave: as for `multitower.train_step`: place neighbouring stages on different devices.
        remat: as for `multitower.train_step`: with `stages`, `False` computes nothing twice.
        steps_per_call: as for `multitower.train_step`: make up to this many updates in one call.
            Calls end where a checkpoint, a test phase or a comparison of devices is due; a signal
            stops the run after a call, over several processes after that or the next one. There,
            with `sync_every`, the default is `sync_every`, but 16 at most, so that processes
            exchange nothing within a call; hooks then hear of all steps of a call together.
            Batches of a call that are not used up lie on the devices beside those of the next one.
            1 makes one update in each call.
        sync_every: as for `multitower.train_step`: local updates, with a meeting of the towers
            after every so many steps. What is scored are the parameters of the last meeting.
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
        hooks: functions, or one, that are called with a `Progress` after every step and evaluation;
            if one has a method `flush`, it is called before a checkpoint is saved. By default,
            `fit` shows its progress on stderr, in process 0; `hooks=[]` shows nothing.

    Attributes:
        hooks: the list of hooks.
        stopped: why the last `fit` ended early, in words; None if it did not.

    Raises:
        ArgumentError: an option has a wrong value.
        CheckpointError: `run_dir` cannot be written.

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
        _check_one_of("on_nonfinite", on_nonfinite, ("stop", "skip"))
        _check_one_of("best", best, ("max", "min"))
        if keep_best is not None and run_dir is None:
            raise ArgumentError(f"keep_best={keep_best!r} needs a run_dir to keep it in.")
        if keep_best is not None:
            warn_of_worst("keep_best", keep_best, best)
        if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"early_stopping={early_stopping!r}: pass mt.EarlyStopping('accuracy', patience=3)."
            )
        if checkpoint_every < 1 or keep_last < 1 or check_replicas_every < 0:
            raise ArgumentError(
                f"checkpoint_every={checkpoint_every} and keep_last={keep_last} must be 1 or more, "
                f"check_replicas_every={check_replicas_every} 0 or more."
            )
        if profile is not None:
            from multitower.training.profile import check_profile  # noqa: PLC0415 (importing stays quick)

            check_profile(profile)
            if run_dir is None:
                raise ArgumentError(f"profile={profile} needs a run_dir to write to.")
        from multitower.training.fitting.settings import (  # noqa: PLC0415 (importing stays quick)
            settings_that_decide,
            steps_per_call_of,
        )

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
        self._settings = settings_that_decide(options, on_nonfinite)
        if early_stopping is not None:
            self._settings[RULE] = early_stopping.in_words()
            warn_of_worst(RULE, early_stopping.score, early_stopping.best)
        skip = on_nonfinite == "skip"
        self.step: TrainStep = train_step(
            loss_fn, optimizer, diagnostics=True, skip_nonfinite=skip, **options
        )
        self._loss = LossFunction.of(loss_fn)
        self.hooks = _as_hooks(hooks)
        self.stopped: str | None = None
        self._is_shown = hooks is None
        self._display: Display | None = None
        self._early_stopping = early_stopping
        self._patience: Patience | None = None
        self._steps_per_epoch: Any = None
        self._options = options
        self._optimizer = optimizer
        self._profile = profile
        self._checkpoint_every = checkpoint_every
        self._on_nonfinite = on_nonfinite
        self._keep_last = keep_last
        self._directory = None if run_dir is None else Path(run_dir) / "checkpoints"
        self._best = None
        if run_dir is not None and keep_best is not None:
            self._best = BestCheckpoint(Path(run_dir) / "best", keep_best, best)
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
        evaluate_every: int = 0,
    ) -> TrainState:
        """Trains until so many updates have been made, from the start or from a checkpoint.

        Args:
            params: the initial parameters, or a function without arguments that returns them (see
                `TrainStep.init`); on a resume their values are not used. An Equinox module must
                then have the integers, flags and keys that it had when the run began.
            batches: `batches(first)` returns an iterator of the batches of step first, first + 1,
                ... A batch must depend on its number alone, so that a resume gets the same ones.
            steps: updates in all, over the first run and all resumes. More than a finished run has
                made extend it, with `resume=True`.
            epochs: passes over the data in all, instead of `steps`: the run makes
                `ceil(epochs * steps_per_epoch)` updates.
            steps_per_epoch: for `epochs`, and for `Progress.epoch`: the examples divided by the
                rows of a batch, which need not be whole. By default what `batches`, or the iterator
                that it returns, has as attribute `steps_per_epoch`, like those of
                `multitower.make_batches`.
            model_state: as for `TrainStep.init`.
            rng: as for `TrainStep.init`.
            resume: continue from the newest checkpoint, if there is one.
            allow_previous: if the newest checkpoint is damaged, continue from the one before.
            allow_changes: continue although towers, batch size, optimizer or another option that
                determines the results differs from that of the checkpoint.
            about: JSON values to keep with every checkpoint, such as the configuration.
            evaluate: a test phase, called with the state; usually it calls `Trainer.evaluate`.
            evaluate_every: steps from one test phase to the next; 0 for none. A run that goes on
                from the step of a test phase begins with it: it may not have been made. A finished
                run does not make its last one again.

        Returns:
            The state after the last step, also if the run ended early; `restore(best=True)` reads
            the best one. `trainer.stopped` says why it ended early.

        Raises:
            ArgumentError: not exactly one of `steps` and `epochs` is given, or an epoch's size is
                not known; `batches` is no function of a step; `resume` without a `run_dir`;
                `early_stopping` without a test phase.
            NonFiniteError: the loss or a parameter is not finite, with `on_nonfinite="stop"`.
            Interrupted: SIGTERM or SIGINT came; the step was finished and saved, or the test phase
                after the last step was.
            CheckpointError: a checkpoint cannot be written or read.
            RunError: there are checkpoints or a best state and `resume` is false, or the
                checkpoints are of a run with other settings; another run uses `run_dir`; or the
                batches ran out.
        """
        from multitower.training.fitting.beginning import (  # noqa: PLC0415 (importing stays quick)
            Resume,
            check_batches,
            refuse_best_of_before,
        )
        from multitower.training.fitting.epochs import steps_of_run  # noqa: PLC0415 (likewise)
        from multitower.training.fitting.fit import FitCall  # noqa: PLC0415 (likewise)
        from multitower.training.same_run import describe_run  # noqa: PLC0415 (likewise)

        check_batches(batches)
        if resume and self._directory is None:
            raise ArgumentError(
                "fit(resume=True), and this trainer keeps no checkpoints: give it a run_dir, or "
                "leave resume out."
            )
        self._loss.check_extras(model_state, rng, "trainer.fit(..., ")
        steps = steps_of_run(steps, epochs, steps_per_epoch, batches)
        self._check_test_phase(evaluate_every)
        self._warn_of_a_last_meeting(steps)
        if self._profile is not None:
            from multitower.training.profile import check_profile  # noqa: PLC0415 (likewise)

            check_profile(self._profile, steps)
        if self.step.placement.spans_processes:
            hosts_of_all()  # so that the last line of a process names the host of a missing one
        self.stopped = None
        how = Resume(steps, resume, allow_previous, allow_changes)
        call = FitCall(batches, steps_per_epoch, how, about or {}, evaluate, evaluate_every)
        state = self.step.init(params, model_state=model_state, rng=rng)
        given = (self._settings, self.step.untrained)
        run = describe_run(self._optimizer, state.params_shapes(), *given)
        with self._checkpoints() as checkpoints:
            if checkpoints is not None and not checkpoints.steps():
                refuse_best_of_before(self._best, how)
            return self._around().run(state, run, checkpoints, call)

    def restore(
        self, params: Any, *, model_state: Any = None, rng: Any = None, best: bool = False
    ) -> TrainState:
        """Reads the newest checkpoint, or the best one, without training.

        Args:
            params: as for `fit`; the values of weights are not used.
            model_state: as for `fit`.
            rng: as for `fit`.
            best: read the state that `keep_best` kept.

        Returns:
            The state after the last step that was saved, or the best one.

        Raises:
            CheckpointError: there is no run directory, no checkpoint, or it cannot be read.
            RunError: an Equinox module has other integers, flags or keys than that of the run.
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
        """Returns what `evaluate` scores: the moving average or the parameters, or their module.

        Args:
            state: of `fit` or `restore` of this trainer.
            ema: True for the moving average, False for the parameters; by default the moving
                average, if there is one.

        Returns:
            The average or the parameters. For an NNX or Equinox module the module with these
            weights, in training mode: call `model.eval()`, or `eqx.nn.inference_mode(model)`,
            before you call it yourself. `evaluate` and `predict` do so.

        Raises:
            ArgumentError: `ema=True`, and there is no moving average.
            StateError: it is not a state.
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
        """Scores a data set with the moving average of the parameters, or the parameters.

        Args:
            metrics: `metrics(params, batch)` returns a dict with one number per row for each name,
                or `mt.ratio` of such; it may take keyword-only `model_state`. Where the loss gets a
                module it gets one too, in evaluation mode (see `multitower.evaluate`).
            state: what to score.
            dataset: a pytree of NumPy arrays with one example per row, or an iterator of such
                batches (see `multitower.evaluate`).
            global_batch: rows to score at a time.

        Returns:
            For each name the mean over all examples, each counted once. Hooks are called with the
            numbers among these means, without the arrays, and with `keep_best` the state is kept
            if it is the best so far. To score other data than those that decide, use
            `multitower.evaluate(metrics, trainer.model(state), ...)`.

        Raises:
            MultitowerError: as `multitower.evaluate`.
        """
        scores = self._in_stages(
            evaluate,
            (metrics, self.model(state)),
            dataset,
            global_batch=global_batch,
            model_state=state.model_state,
        )
        number = int(state.step)  # host-device sync
        epoch = epoch_of(number, self._steps_per_epoch)
        numbers = {name: score for name, score in scores.items() if not np.ndim(score)}
        self._tell(Progress("test", number, number, numbers, state=state, epoch=epoch))
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
        """Returns the outputs for every row, of the moving average or of the parameters.

        By default, a terminal shows how far it is; `hooks=[]` shows nothing.

        Args:
            fn: `fn(params, batch)` returns a pytree of arrays with one entry per row. Where the
                loss gets a module it gets one too, in evaluation mode.
            state: of `fit` or `restore` of this trainer.
            data: a pytree of arrays with one example per row, or an iterator of such batches.
            global_batch: rows to compute at a time.

        Returns:
            As `multitower.predict`: NumPy arrays with one entry per row, in the order of the rows.

        Raises:
            MultitowerError: as `multitower.predict`.
        """
        from multitower.training.console import shown_rows  # noqa: PLC0415 (importing stays quick)

        with shown_rows(data, self._is_shown and is_first()) as progress:
            return self._in_stages(
                predict,
                (fn, self.model(state)),
                data,
                global_batch=global_batch,
                model_state=state.model_state,
                progress=progress,
            )

    def _around(self) -> "Around":
        from multitower.training.fitting.fit import Around  # noqa: PLC0415 (importing stays quick)
        from multitower.training.profile import Profile  # noqa: PLC0415 (likewise)

        return Around(
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

    def _check_test_phase(self, evaluate_every: int) -> None:
        if self._best is not None and not evaluate_every:
            warn(
                f"keep_best={self._best.metric!r}: this fit makes no test phase, and no state is "
                "kept unless you call trainer.evaluate yourself. Pass fit(evaluate=..., "
                "evaluate_every=...), with a function that calls trainer.evaluate."
            )
        if self._early_stopping is not None and not evaluate_every:
            raise ArgumentError(
                f"early_stopping={self._early_stopping.score!r} needs a test phase: pass "
                "fit(evaluate=..., evaluate_every=...), with a function that calls "
                "trainer.evaluate."
            )

    def _end(self, reason: str) -> None:
        self.stopped = reason
        if self._display is not None:
            self._display.say(reason)

    @contextmanager
    def _while_it_runs(
        self, patience: Patience | None, steps_per_epoch: Any, steps: tuple[int, int]
    ) -> Generator[None]:
        """Has test phases counted, and shows the progress unless the user has hooks."""
        self._patience, self._steps_per_epoch = patience, steps_per_epoch
        try:
            if not self._is_shown or not is_first():
                yield
                return
            from multitower.training.console import shown_on_stderr  # noqa: PLC0415 (importing stays quick)

            first, last = steps
            with shown_on_stderr(last) as self._display:
                if 0 < first < last:
                    self._display.say(f"continuing after step {first} of {last}")
                yield
        finally:
            self._patience = self._display = None

    def _warn_of_a_last_meeting(self, steps: int) -> None:
        every = self._options["sync_every"]
        if every is not None and (left := steps % every):
            warn(
                f"steps={steps} is no multiple of sync_every={every}: the last {left} steps of "
                "every tower are not in the parameters of the state, which are those of the last "
                f"meeting. Make {steps - left + every} steps."
            )

    def _in_stages(
        self, run: Callable[..., Any], given: tuple[Any, Any], data: Any, **how: Any
    ) -> Any:
        """As `evaluate` or `predict`; in stages, if the function can be cut like the loss."""
        batches = Repeatable(data)
        where = {name: self._options[name] for name in ("devices", "towers")}
        if self._options["stages"] is not None:
            stages = {name: self._options[name] for name in ("stages", "layout", "interleave")}
            try:
                return run(*given, batches.again(), **how, **where, **stages)
            except ArgumentError as error:
                if not batches.can_repeat:  # it is of a later batch, and those before it are gone
                    raise
                what = "the metrics" if run is evaluate else "the function"
                warn(f"{what}: {error} As it is, every device gets the whole model.")
        return run(*given, batches.again(), **how, **where)

    @contextmanager
    def _checkpoints(self) -> Generator[Checkpoints | None]:
        if self._directory is None:
            yield None
            return
        run_dir = self._directory.parent
        with suppress(OSError):  # Checkpoints says what is wrong with it
            run_dir.mkdir(parents=True, exist_ok=True)
        held = held_for_all if self.step.placement.spans_processes else held_run_directory
        with (
            held(run_dir, nested=True),  # the command line may hold it already
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
    """A state with what is scored as its parameters; what towers keep apart is not joined."""
    average = state.ema_params
    if average is None:
        return state
    return TrainState(state.shared()._replace(params=average), origin=state.origin)


def _as_hooks(hooks: Any) -> list[Hook]:
    """The hooks that a user gives: a list of them, one alone, or None."""
    if hooks is None:
        return []
    is_list = isinstance(hooks, Iterable) and not callable(hooks)
    found: list[Any] = list(hooks) if is_list else [hooks]
    for hook in found:
        if isinstance(hook, EarlyStopping):
            raise ArgumentError(f"hooks has an EarlyStopping: pass it as early_stopping={hook!r}.")
        if not callable(hook):
            raise ArgumentError(f"hooks has {hook!r}: a hook is a function of an mt.Progress.")
    return found


def _check_one_of(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ArgumentError(f"{name}={value!r}: say {' or '.join(map(repr, words))}.")
