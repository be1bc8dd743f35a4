"""`strategy.auto`: measure, predict every candidate, run the best few and the plain one, choose, and say why.

Every rank comes to the same plan: it rests on numbers that all of them share, and rank 0's is the one that is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

from ..config.progress import progress
from ..config.text import binary
from ..engine.modules.large_head import advice_on_head
from ..errors import ConfigError
from ..strategies.auto import Auto
from . import candidate as candidates
from .candidate import Candidate, every
from .cost import Micro, hidden_share, statistical_efficiency
from .explain import compiling_pays, rejected
from .measurements import Forecast, Measured, forecast
from .plan import Plan, Row, from_json, to_json
from .plan_file import kept_plan, key_of, require_folder, save
from .request import Asked, asked_for, require_sample
from .run_measurements import Measuring
from .subject import Subject
from .trial import Trial, tried

PLANNING_S = 50.0
"""Seconds after which no further trial begins."""
CORRECTIONS, STEP_DOWN = 2, 0.02
"""Smaller budgets that are tried for a plan that took too much, and the least share by which each is smaller."""
MOST_FAILED = 6
"""Trials that may fail before no more are begun."""
DISAGREE = 1.5
"""Ratio of a slow update's time to a fast one's, from which on a plan is said to be measured unstably."""
ALIKE = 0.02
"""Plans that differ by less are as good as each other, and the less risky one is taken."""


def chosen_plan(subject: Subject, auto: Auto) -> Plan:
    """Plan, or read the plan of a file. Collective."""
    require_sample(subject)
    require_folder(subject, auto)
    asked = asked_for(subject, auto)
    key = key_of(subject, auto)
    kept = kept_plan(subject, auto, key)
    if kept is not None:
        return kept
    with progress("auto", is_shown=subject.comm.rank == 0) as subject.tell:
        plan = _Planning(subject, asked).plan(key)
    plan = from_json(subject.comm.gather_json(to_json(plan))[0], source="")
    if auto.plan is not None:
        save(subject, plan, auto.plan)
    return plan


@final
class _Planning:
    def __init__(self, subject: Subject, asked: Asked) -> None:
        self._subject, self._asked, self._auto, self._fixed = subject, asked, asked.auto, subject.fixed
        self._measuring, self._batches = Measuring(subject, asked), asked.batches(subject.rows)
        self._notes: list[str] = []
        self._trials: dict[Candidate, Trial] = {}
        self._taken: dict[Candidate, tuple[Candidate, int | None]] = {}
        """The candidate that was run in place of each, and the budget of its recompute."""

    def plan(self, key: dict[str, Any]) -> Plan:
        measured = self._measuring.run()
        baseline = self._baseline(measured)
        measured = self._with_overlap(measured, baseline)
        forecasts, refused = self._forecasts(measured)
        if not forecasts:
            raise ConfigError(self._nothing_fits(refused))
        self._run_best(measured, forecasts)
        best = self._best(forecasts)
        return self._written(key, measured, forecasts, best)

    # --- predictions ------------------------------------------------------------------------------------------------------

    def _forecasts(self, measured: Measured) -> tuple[dict[Candidate, Forecast], dict[str, str]]:
        of_user = self._fixed.reducer
        every_reducer = [of_user] if of_user else candidates.offered(measured.context)
        reducers = [one for one in every_reducer if measured.reduced_of(one) is not None]
        found: dict[Candidate, Forecast] = {}
        refused: dict[str, str] = {}
        own = self._asked.share is None
        kept = self._fixed.names
        wanted = every(
            measured.precisions,
            self._batches,
            reducers,
            own_batch=own,
            risk=self._auto.risk,
            kept=kept,
            compiled=measured.compiled,
        )
        for candidate in wanted:
            predicted = self._forecast(measured, candidate)
            if isinstance(predicted, str):
                refused[candidate.name] = predicted
            else:
                found[predicted.candidate] = predicted
        return found, refused

    def _forecast(self, measured: Measured, candidate: Candidate) -> Forecast | str:
        return forecast(measured, candidate, memory=self._asked.memory, total_steps=self._auto.total_steps)

    def _nothing_fits(self, refused: dict[str, str]) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[-4:])
        return (
            f"auto: nothing that the risk allows keeps to {binary(self._asked.memory or 0)} ({reasons}). Give a smaller "
            'sample, more memory, or a global_batch, which may be made up of smaller micro-batches: auto_configs["global_batch"].'
            f"{advice_on_head(self._subject.model)}"
        )

    # --- running ----------------------------------------------------------------------------------------------------------

    def _baseline(self, measured: Measured) -> Forecast:
        """Predict what the user would have without `auto`: float32 and dense but for the parts that are set, with the largest
        batch that fits without recompute, else the largest that fits with it."""
        fixed, own_steps = self._fixed, self._fixed.merge_steps or 1
        plain_of = Candidate(fixed.precision or "float32", reducer=fixed.reducer or candidates.DENSE, kept=fixed.names)
        forecasts = [
            predicted
            for batch, steps in self._batches
            if (self._asked.share is not None or steps == own_steps)
            and not isinstance(predicted := self._forecast(measured, replace(plain_of, batch=batch, merge_steps=steps)), str)
        ]
        plain = [one for one in forecasts if not one.candidate.recomputes]
        if not forecasts:
            found, refused = self._forecasts(measured)
            if not found:
                raise ConfigError(self._nothing_fits(refused))
            return min(found.values(), key=lambda one: one.seconds_per_sample)
        return max(plain or forecasts, key=lambda one: one.candidate.batch)

    def _try(self, one: Forecast, measured: Measured) -> Trial:
        """Run a candidate as predicted; where recompute takes more memory than that when it runs, as allocators do, run it with a
        budget that is as much smaller."""
        candidate, budget = one.candidate, self._asked.memory
        self._subject.tell(f"running plan {len(self._trials) + 1}, {candidate.name}")
        trial = self._run(candidate, budget, one, measured)
        for _ in range(CORRECTIONS):
            if budget is None or not candidate.recomputes or not trial.lacked_memory or self._fixed.recompute is not None:
                break
            over = max(0, trial.held_bytes - budget)
            candidate, budget = replace(candidate, recomputed=()), budget - int(max(1.5 * over, STEP_DOWN * budget))
            trial = self._run(candidate, budget, one, measured)
        self._trials[one.candidate], self._taken[one.candidate] = trial, (candidate, budget)
        return trial

    def _of_what_ran(self, one: Forecast, measured: Measured) -> Forecast:
        """Predict again by the plan of recompute that ran. A budget may come to another than the first forecast rests on: torch's
        allocator holds more than what is in use, and a plan that keeps to the memory with that may be a tighter one."""
        trial, found = self._trials[one.candidate], measured.reduced_of(one.candidate.reducer)
        if trial.failed or trial.settled is None or found is None:
            return one
        settled = replace(trial.settled, peak_bytes=trial.settled.peak_bytes - found.lasting_bytes)
        predicted = forecast(measured, one.candidate, settled=settled, total_steps=self._auto.total_steps)
        return one if isinstance(predicted, str) else replace(predicted, candidate=one.candidate)

    def _run(self, candidate: Candidate, budget: int | None, one: Forecast, measured: Measured) -> Trial:
        found, memory = measured.reduced_of(candidate.reducer), self._asked.memory
        kept = self._measuring.kept_bytes + (found.lasting_bytes if found is not None else 0)
        trial = tried(self._subject, candidate, memory=budget, expected_s=one.cost.seconds, kept_bytes=kept)
        if not trial.failed and memory is not None and trial.held_bytes > memory:
            return replace(trial, failed=f"{binary(trial.held_bytes)} when it ran", lacked_memory=True)
        return trial

    def _with_overlap(self, measured: Measured, baseline: Forecast) -> Measured:
        """Run the plain plan: as much of the wire is hidden as it ends sooner than its parts would one after the other."""
        trial, candidate = self._try(baseline, measured), baseline.candidate
        exchange = measured.exchange(candidate.reducer)
        one = measured.pass_of(candidate)
        if trial.failed or exchange is None or one is None or measured.ranks == 1 or not candidate.reducer.is_hidden:
            return measured
        micro = Micro(one.forward_s, one.backward_s, self._of_what_ran(baseline, measured).again_s)
        seconds = trial.seconds - (candidate.merge_steps - 1) * micro.seconds
        return replace(measured, hidden_share=hidden_share(micro, exchange, update_s=measured.update_s, seconds=seconds))

    def _run_best(self, measured: Measured, forecasts: dict[Candidate, Forecast]) -> None:
        """Run the fastest until enough have worked: each that fails makes room for the next. One is run in any case."""
        worked = failed = 0
        for one in sorted(forecasts.values(), key=lambda one: (one.seconds_per_sample, one.candidate.name)):
            is_late = worked + failed > 0 and self._subject.elapsed_s() > self._limit_s
            if worked == self._auto.trials or failed == MOST_FAILED or (is_late and (worked or self._has_run())):
                break
            trial = self._trials.get(one.candidate) or self._try(one, measured)
            worked, failed = worked + (not trial.failed), failed + bool(trial.failed)
        if worked < self._auto.trials and self._subject.elapsed_s() > self._limit_s:
            self._notes.append(f"after {self._limit_s:.0f} s no further plan was run.")

    @property
    def _limit_s(self) -> float:
        """Seconds after which no further trial begins: what compiled blocks take to be measured, and to be tried once, on top."""
        return PLANNING_S + 2 * self._measuring.compiling_s

    def _has_run(self) -> bool:
        return any(not trial.failed for trial in self._trials.values())

    def _best(self, forecasts: dict[Candidate, Forecast]) -> Forecast:
        """Return the fastest that was run; of those about as fast the least risky."""
        known = [(forecasts[c], t) for c, t in self._trials.items() if not t.failed and c in forecasts]
        ran = {one: (trial.seconds + one.once_s) / one.samples for one, trial in known}
        if not ran:
            reasons = "; ".join(f"{c.name}: {t.failed}" for c, t in self._trials.items())
            raise ConfigError(f"auto: no plan that was predicted to fit could be run ({reasons}).")
        limit = min(ran.values()) * (1 + ALIKE)
        good = [one for one, seconds in ran.items() if seconds <= limit]
        return min(good, key=lambda one: (*one.candidate.risk_order, ran[one]))

    # --- writing ----------------------------------------------------------------------------------------------------------

    def _written(self, key: dict[str, Any], measured: Measured, forecasts: dict[Candidate, Forecast], best: Forecast) -> Plan:
        by_speed = sorted(forecasts.values(), key=lambda one: one.seconds_per_sample)
        run = [(one, self._row(one, measured)) for one in by_speed if one.candidate in self._trials]
        rows = [row for _, row in sorted(run, key=lambda pair: pair[1].seconds / pair[0].samples)]
        why = rejected(
            measured,
            self._of_what_ran(best, measured),
            risk=self._auto.risk,
            memory=self._asked.memory,
            asked_batch=self._asked.share is not None,
            rules=self._measuring.rules,
            fixed=self._fixed,
            ran={candidate: trial.seconds for candidate, trial in self._trials.items() if not trial.failed},
        )
        chosen = best.candidate
        taken, budget = self._taken[chosen]
        strategy = self._subject.strategy(taken.settings(budget))
        if self._asked.share is not None:
            self._notes.append(f"give {chosen.batch} rows to each micro-step; {chosen.merge_steps} of them make one update.")
        return Plan(
            strategy=strategy,
            chosen=chosen.name,
            rows=tuple(rows),
            rejected=why,
            key=key,
            micro_batch=chosen.batch if self._asked.share is not None else 0,
            merge_steps=chosen.merge_steps,
            measured=measured,
            memory=self._asked.memory,
            notes=(
                *self._measuring.notes,
                *self._notes,
                *compiling_pays(measured, best, memory=self._asked.memory, total_steps=self._auto.total_steps),
                *_noise_note(measured, best),
                *([advice.strip()] if (advice := advice_on_head(self._subject.model)) else []),
                *unstable(self._trials),
            ),
            seconds=self._subject.elapsed_s(),
        )

    def _row(self, one: Forecast, measured: Measured) -> Row:
        trial, predicted = self._trials[one.candidate], self._of_what_ran(one, measured)
        ran = not trial.failed
        return Row(
            name=one.candidate.name,
            risk=one.candidate.risk.value,
            predicted_s=predicted.cost.seconds,
            measured_s=trial.seconds if ran else None,
            samples=one.samples if one.candidate.batch else 0,
            predicted_bytes=predicted.peak_bytes,
            measured_bytes=trial.peak_bytes if ran else None,
            sent_bytes=trial.bytes_sent if ran else one.cost.bytes_sent,
            note=trial.failed,
        )


def unstable(trials: Mapping[Candidate, Trial]) -> list[str]:
    """Caution where updates of one plan took times that disagree: another run may then choose another plan."""
    spreads = [(c.name, trial.spread_s) for c, trial in trials.items() if trial.spread_s[1] > DISAGREE * trial.spread_s[0] > 0]
    if not spreads:
        return []
    told = "; ".join(f"{name} {1e3 * low:,.1f} / {1e3 * high:,.1f} ms" for name, (low, high) in spreads)
    return [f"measurements unstable: {told}. Something else uses this machine; plans about as fast may come in another order."]


def _noise_note(measured: Measured, best: Forecast) -> list[str]:
    if measured.noise_scale is None or not best.candidate.batch:
        return []
    share = statistical_efficiency(best.samples, measured.noise_scale)
    return [
        f"gradient noise scale, roughly: {measured.noise_scale:,.0f} samples; of what a sample teaches in a small batch, one of "
        f"{best.samples:,} still teaches {100 * share:.0f} %. No speed above has that in it."
    ]
