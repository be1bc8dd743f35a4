"""`strategy.auto`: measure, foretell every candidate, run the best few and the plain one, choose, and say why.

Every rank comes to the same plan: it rests on numbers that all of them share, and rank 0's is the one that is taken.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from .. import __version__
from ..errors import ConfigError, FleetError, first_line
from ..memory.plan import shown
from ..placement import plain_name
from ..strategies import catalogue
from ..strategies.auto import Auto
from ..trees import tensors_in
from .candidate import MERGES, REDUCERS, RISKS, Candidate, allows, batches_of, every
from .cost import Micro, Reducer, hidden_share, statistical_efficiency
from .link import measured_link
from .measured import Forecast, Measured, Reduced, forecast
from .plan import Plan, Row, differences, from_json, to_json
from .probe import PrecisionProbe, gradients_of, noise_scale, precisions, reduced_by, rule_seconds
from .subject import Subject, raise_if_alone
from .trial import Trial, tried
from .words import rejected

MEASURING_S = 35.0
"""After so long nothing more is measured that could be left out."""
PLANNING_S = 50.0
"""After so long no further trial begins."""
MOST_FAILED = 6
"""Trials that do not come to an end, before no more are begun."""
FAR_SLOWER = 1.5
"""Times as long as the fastest precision's step."""
START_ROWS = 32
"""Where a function makes the batches: the size that is measured first."""
ALIKE = 0.02
"""Plans that differ by less are as good as each other, and the less risky one is taken."""


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants, with the gaps filled in."""

    auto: Auto
    memory: int | None
    share: int | None
    """Rows of one rank in one update; None: as the sample."""


def chosen_plan(subject: Subject, auto: Auto) -> Plan:
    """Collective."""
    _require_sample(subject)
    _require_folder(subject, auto)
    asked = _asked(subject, auto)
    key = key_of(subject, asked)
    kept = _kept_plan(subject, auto, key)
    if kept is not None:
        return kept
    plan = _Planning(subject, asked).plan(key)
    plan = from_json(subject.comm.gather_json(to_json(plan))[0], source="")
    if auto.plan is not None:
        _save(subject, plan, auto.plan)
    return plan


def _require_sample(subject: Subject) -> None:
    without = [rank for rank, has in enumerate(subject.comm.gather_json(subject.sample is not None)) if not has]
    if without:
        given = "given no batch" if len(without) == subject.comm.size else f"given no batch on ranks {without}"
        raise ConfigError(
            f"strategy.auto chooses by running steps, and fleet.distribute(...) was {given}. Write model, optimizer = "
            "fleet.distribute(model, optimizer, strategy, sample=batch), with loss_fn=lambda model, batch: ... where the model "
            "has no method loss(batch)."
        )


def _require_folder(subject: Subject, auto: Auto) -> None:
    """Before a minute is spent on a plan that cannot be written. Rank 0 writes it."""
    folder = Path(auto.plan).parent if auto.plan is not None else None
    mine = folder is None or subject.comm.rank > 0 or os.access(folder, os.W_OK | os.X_OK)
    is_there = subject.comm.gather_json(mine)[0]
    if not is_there:
        raise ConfigError(
            f'auto_configs["plan"] is {auto.plan!r}, and rank 0 cannot write into a folder {str(folder)!r}. Make it first.'
        )


def _asked(subject: Subject, auto: Auto) -> Asked:
    ranks = subject.comm.size
    if callable(subject.sample) and auto.global_batch is None:
        raise ConfigError(
            "sample is a function, which makes a batch of so many rows; how many an update is to have is not said. Write "
            'strategy.auto_configs = {"global_batch": ...}, or give a batch.'
        )
    subject.start_with(max(2, min(START_ROWS, (auto.global_batch or 0) // ranks)))
    share = None
    if auto.global_batch is not None:
        if auto.global_batch % ranks:
            near = auto.global_batch - auto.global_batch % ranks or ranks
            raise ConfigError(
                f'auto_configs["global_batch"] is {auto.global_batch}, which {ranks} ranks cannot share equally. Write {near}.'
            )
        if subject.rows < 2:
            raise ConfigError(
                f'auto_configs["global_batch"] is {auto.global_batch}: micro-batches of other sizes are made of the rows of the '
                f"sample, and its tensors have {sorted(set(subject.rows_of_ranks))} of them on the ranks (0: not as many each). "
                "Give every rank a batch of at least 2 rows, or a function of the number of rows: sample=lambda rows: ..."
            )
        share = auto.global_batch // ranks
    here = _memory_here(subject)
    memory = here if auto.memory is None else auto.memory if here is None else min(auto.memory, here)
    return Asked(auto, memory, share)


def _memory_here(subject: Subject) -> int | None:
    """What the device has for this process; a CPU sets no limit. The least of all ranks."""
    mine = None
    if subject.device.type == "cuda":
        subject.comm.all_reduce(torch.zeros(1, device=subject.device)).wait()  # the buffers of collectives are there then
        torch.cuda.synchronize(subject.device)
        free, _ = torch.cuda.mem_get_info(subject.device)
        mine = free + torch.cuda.memory_reserved(subject.device)
    found = [one for one in subject.comm.gather_json(mine) if one is not None]
    return int(min(found)) if found else None


# --- a plan that is there already -------------------------------------------------------------------------------------------


def key_of(subject: Subject, asked: Asked) -> dict[str, Any]:
    """What a plan is for. Collective: the samples of the ranks may differ in their last batch, and rank 0's counts."""
    model, optimizer = subject.model, subject.optimizer
    lines = [f"{plain_name(name)} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    lines += [f"{plain_name(name)} {type(module).__qualname__}" for name, module in model.named_modules()]
    lines += [type(optimizer).__qualname__]
    is_gpu = subject.device.type == "cuda"
    auto = asked.auto
    key = {
        "model": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
        "sample": [[list(t.shape), str(t.dtype)] for t in tensors_in(subject.batch)],
        "device": torch.cuda.get_device_name(subject.device) if is_gpu else f"{platform.machine()} CPU",
        "ranks": subject.comm.size,
        "torch": torch.__version__,
        "fleetx": __version__,
        "scalars": dict(subject.scalars),
        "asked": {"risk": auto.risk, "trials": auto.trials, "memory": auto.memory, "global_batch": auto.global_batch},
    }
    agreed: dict[str, Any] = subject.comm.gather_json(key)[0]
    return agreed


def _kept_plan(subject: Subject, auto: Auto, key: dict[str, Any]) -> Plan | None:
    """Rank 0 reads it for all; what is wrong with it is wrong for all."""
    if auto.plan is None:
        return None
    text: str | None = None
    problem: str | None = None
    if subject.comm.rank == 0 and os.path.exists(auto.plan):
        try:
            text = Path(auto.plan).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"the plan {auto.plan} cannot be read: {error}."
    text, problem = subject.comm.gather_json([text, problem])[0]
    if problem is not None:
        raise ConfigError(problem)
    if text is None:
        return None
    plan = from_json(text, source=auto.plan)
    other = differences(key, plan.key)
    if not other:
        return plan
    if subject.comm.rank == 0:
        print(f"auto: the plan in {auto.plan} is for something else, and is made anew: {'; '.join(other)}.", flush=True)
    return None


def _save(subject: Subject, plan: Plan, path: str) -> None:
    problem = None
    if subject.comm.rank == 0:
        try:
            plan.save(path)
        except (OSError, UnicodeDecodeError) as error:
            problem = f"the plan cannot be written to {path}: {error}."
    problem = subject.comm.gather_json(problem)[0]
    if problem is not None:
        raise ConfigError(problem)


# --- a new one --------------------------------------------------------------------------------------------------------------


@final
class _Planning:
    def __init__(self, subject: Subject, asked: Asked) -> None:
        self._subject, self._asked, self._auto = subject, asked, asked.auto
        rows = subject.rows
        if asked.share is not None:
            self._batches = batches_of(asked.share, near=rows)
        else:
            self._batches = [(rows, steps) for steps in (MERGES if allows(self._auto.risk, RISKS[-1]) else (1,))]
        self._missing: dict[str, str] = {}
        self._notes: list[str] = []
        self._trials: dict[Candidate, Trial] = {}
        self._rules: dict[str, float | str] = {}
        """Seconds of an update by other rules; or why they cannot be."""
        self._kept_bytes = 0
        self._taken: dict[Candidate, Candidate] = {}
        """What was run for a candidate."""

    def plan(self, key: dict[str, Any]) -> Plan:
        measured = self._measured()
        baseline = self._baseline(measured)
        measured = self._with_overlap(measured, baseline)
        forecasts, refused = self._forecasts(measured)
        if not forecasts:
            raise ConfigError(self._nothing_fits(refused))
        self._run_best(measured, forecasts)
        best = self._best(forecasts)
        return self._written(key, measured, forecasts, best)

    # --- measuring --------------------------------------------------------------------------------------------------------

    def _measured(self) -> Measured:
        subject, memory = self._subject, self._asked.memory
        subject.comm.barrier()
        link = measured_link(subject.comm, subject.device)
        trained = {id(p): p for group in subject.optimizer.param_groups for p in group["params"]}
        gradients = gradients_of(trained.values())
        probes = self._probes(memory)
        units, update_s = probes[0].units, probes[0].update_s
        self._kept_bytes = probes[0].state_bytes
        reduced: list[Reduced] = []
        plain_bytes = 0
        for reducer in self._reducers():
            known = {"link": link, "gradients": gradients, "units": units, "kept_bytes": self._kept_bytes}
            found = self._reduced(reducer, reduced, plain_bytes=plain_bytes, **known)
            if found is not None:
                reduced.append(found[0])
                plain_bytes = plain_bytes or found[1]
        limits = [] if memory is None else sorted({memory - one.lasting_bytes for one in reduced}, reverse=True)
        passes = [probe.pass_of(batch, limits) for probe in probes for batch in dict.fromkeys(b for b, _ in self._batches)]
        scale = None
        if subject.comm.size > 1 and reduced and reduced[0].seconds < 1 and subject.elapsed_s() < MEASURING_S:
            scale = self._noise_scale(units)
        name = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "CPU"
        self._time_rules()
        seconds = subject.elapsed_s()
        return Measured(name, link, gradients, update_s, tuple(passes), tuple(reduced), 1.0, scale, seconds, dict(self._missing))

    def _probes(self, memory: int | None) -> list[PrecisionProbe]:
        """float32 must work; another precision that does not is left out, with what it said. One that is far slower than the
        fastest is measured as it must be, and no more: other batches would not make it the best."""
        grows, batches = self._asked.share is not None, [batch for batch, _ in self._batches]
        names = precisions(self._subject.device) if allows(self._auto.risk, RISKS[1]) else ["float32"]
        probes = {name: PrecisionProbe(self._subject, name, memory=memory, grows=grows) for name in names}
        looks = {name: self._look(probe) for name, probe in probes.items()}
        fastest, best = min(((seconds, name) for name, seconds in looks.items() if seconds), default=(0.0, ""))
        found: list[PrecisionProbe] = []
        for name, probe in probes.items():
            is_slow = looks[name] > FAR_SLOWER * fastest > 0
            if found and is_slow and found[0].fits_somehow(min(batches)):
                told = f"a step takes {looks[name] / fastest:.1f} times as long as in {best} here"
                self._missing.setdefault(name, told)
            if name in self._missing:
                continue
            if found and self._subject.elapsed_s() > MEASURING_S:
                self._missing[name] = "was not measured, for want of time"
                continue
            try:
                probe.run([] if is_slow else batches, is_first=not found)
                found.append(probe)
            except FleetError as error:
                raise_if_alone(error)
                if not found:
                    raise
                self._missing[name] = f"does not run here ({first_line(error)})"
        return found

    def _look(self, probe: PrecisionProbe) -> float:
        try:
            return probe.look()
        except Exception as error:  # `everywhere` has raised on all ranks, each what it knows
            if probe.precision == "float32":
                raise
            self._missing[probe.precision] = f"does not run here ({type(error).__name__}: {first_line(error)})"
            return 0.0

    def _noise_scale(self, units: Mapping[str, nn.Module]) -> float | None:
        try:
            return noise_scale(self._subject, units)
        except FleetError as error:
            raise_if_alone(error)
            self._notes.append(f"the gradient noise scale could not be measured: {first_line(error)}")
            return None

    def _time_rules(self) -> None:
        """What LARS or LAMB would take, where they could take this optimizer's place. They are not chosen: told, no more."""
        for name in ("lars", "lamb"):
            if type(self._subject.optimizer) not in catalogue()[name].inner or self._subject.elapsed_s() > MEASURING_S:
                continue
            try:
                self._rules[name] = rule_seconds(self._subject, name)
            except FleetError as error:
                raise_if_alone(error)
                self._rules[name] = first_line(error)

    def _reducers(self) -> list[Reducer]:
        """Local SGD once, with an averaging in every update: what a longer period costs follows."""
        if self._subject.comm.size == 1:
            return [Reducer()]
        allowed = [one for one in REDUCERS if allows(self._auto.risk, Candidate(reducer=one).risk)]
        return list(dict.fromkeys(Reducer("localsgd", 1) if one.kind == "localsgd" else one for one in allowed))

    def _reduced(self, reducer: Reducer, before: Sequence[Reduced], **known: Any) -> tuple[Reduced, int] | None:
        if before and self._subject.elapsed_s() > MEASURING_S:
            self._missing[reducer.kind] = "was not measured, for want of time"
            return None
        try:
            return reduced_by(self._subject, reducer, **known)
        except FleetError as error:
            raise_if_alone(error)
            if not before:
                raise
            self._missing[reducer.kind] = f"refused: {first_line(error)}"
            return None

    # --- foretelling ------------------------------------------------------------------------------------------------------

    def _forecasts(self, measured: Measured) -> tuple[dict[Candidate, Forecast], dict[str, str]]:
        names = list(dict.fromkeys(one.precision for one in measured.passes))
        reducers = [one for one in REDUCERS if measured.reduced_of(one) is not None]
        found: dict[Candidate, Forecast] = {}
        refused: dict[str, str] = {}
        own = self._asked.share is None
        for candidate in every(names, self._batches, reducers, own_batch=own, risk=self._auto.risk):
            told = forecast(measured, candidate, memory=self._asked.memory)
            if isinstance(told, str):
                refused[candidate.name] = told
            else:
                found[told.candidate] = told
        return found, refused

    def _nothing_fits(self, refused: dict[str, str]) -> str:
        told = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[-4:])
        return (
            f"auto: nothing that the risk allows keeps to {shown(self._asked.memory or 0)} ({told}). Give a smaller "
            'sample, more memory, or a global_batch, which may be made up of smaller micro-batches: auto_configs["global_batch"].'
        )

    # --- running ----------------------------------------------------------------------------------------------------------

    def _baseline(self, measured: Measured) -> Forecast:
        """What the user would have without any strategy: float32, the largest batch that fits, else the cheapest that does."""
        forecasts = [
            told
            for batch, steps in self._batches
            if not isinstance(told := forecast(measured, Candidate("float32", batch, steps), memory=self._asked.memory), str)
            and (self._asked.share is not None or steps == 1)
        ]
        plain = [one for one in forecasts if not one.candidate.recomputes]
        if not forecasts:
            found, refused = self._forecasts(measured)
            if not found:
                raise ConfigError(self._nothing_fits(refused))
            return min(found.values(), key=lambda one: one.seconds_per_sample)
        return max(plain or forecasts, key=lambda one: one.candidate.batch)

    def _try(self, one: Forecast, measured: Measured) -> Trial:
        """As foretold; where that takes more memory when it runs, by a budget, to which recompute corrects its own plan."""
        trial = self._run(one.candidate, one, measured)
        self._taken[one.candidate] = one.candidate
        if trial.failed and one.candidate.recomputed:
            self._taken[one.candidate] = replace(one.candidate, recomputed=())
            trial = self._run(self._taken[one.candidate], one, measured)
        self._trials[one.candidate] = trial
        return trial

    def _run(self, candidate: Candidate, one: Forecast, measured: Measured) -> Trial:
        found, memory = measured.reduced_of(candidate.reducer), self._asked.memory
        kept = self._kept_bytes + (found.lasting_bytes if found is not None else 0)
        trial = tried(self._subject, candidate, memory=memory, expected_s=one.cost.seconds, kept_bytes=kept)
        if not trial.failed and memory is not None and trial.held_bytes > memory:
            return replace(trial, failed=f"{shown(trial.held_bytes)} when it ran")
        return trial

    def _with_overlap(self, measured: Measured, baseline: Forecast) -> Measured:
        """Run the plain one; by how much sooner it is done than its parts one after the other, so much is hidden."""
        trial, candidate = self._try(baseline, measured), baseline.candidate
        exchange = measured.exchange(candidate.reducer)
        one = measured.pass_of(candidate.precision, candidate.batch)
        if trial.failed or exchange is None or one is None or measured.ranks == 1 or not candidate.reducer.is_hidden:
            return measured
        micro = Micro(one.forward_s, one.backward_s, baseline.again_s)
        seconds = trial.seconds - (candidate.merge_steps - 1) * micro.seconds
        return replace(measured, hidden_share=hidden_share(micro, exchange, update_s=measured.update_s, seconds=seconds))

    def _run_best(self, measured: Measured, forecasts: dict[Candidate, Forecast]) -> None:
        """Until so many have run: one that does not makes room for the next, for a while. The best of all is run in any case."""
        worked = failed = 0
        for one in sorted(forecasts.values(), key=lambda one: (one.seconds_per_sample, one.candidate.name)):
            is_late = worked + failed > 0 and self._subject.elapsed_s() > PLANNING_S
            if worked == self._auto.trials or failed == MOST_FAILED or (is_late and (worked or self._has_run())):
                break
            trial = self._trials.get(one.candidate) or self._try(one, measured)
            worked, failed = worked + (not trial.failed), failed + bool(trial.failed)
        if worked < self._auto.trials and self._subject.elapsed_s() > PLANNING_S:
            self._notes.append(f"after {PLANNING_S:.0f} s no further plan was run.")

    def _has_run(self) -> bool:
        return any(not trial.failed for trial in self._trials.values())

    def _best(self, forecasts: dict[Candidate, Forecast]) -> Forecast:
        """The fastest that was run; of those about as fast the least risky."""
        ran = {forecasts[c]: t.seconds / forecasts[c].samples for c, t in self._trials.items() if not t.failed and c in forecasts}
        if not ran:
            told = "; ".join(f"{c.name}: {t.failed}" for c, t in self._trials.items())
            raise ConfigError(f"auto: no plan that was foretold to fit could be run ({told}).")
        limit = min(ran.values()) * (1 + ALIKE)
        good = [one for one, seconds in ran.items() if seconds <= limit]
        return min(good, key=lambda one: (*one.candidate.daring, ran[one]))

    # --- writing ----------------------------------------------------------------------------------------------------------

    def _written(self, key: dict[str, Any], measured: Measured, forecasts: dict[Candidate, Forecast], best: Forecast) -> Plan:
        by_speed = sorted(forecasts.values(), key=lambda one: one.seconds_per_sample)
        run = [one for one in by_speed if one.candidate in self._trials]
        rows = [self._row(one) for one in sorted(run, key=lambda one: self._row(one).seconds / one.samples)]
        why = rejected(
            measured,
            best,
            risk=self._auto.risk,
            memory=self._asked.memory,
            asked_batch=self._asked.share is not None,
            rules=self._rules,
            ran={candidate: trial.seconds for candidate, trial in self._trials.items() if not trial.failed},
        )
        chosen = best.candidate
        strategy = self._subject.strategy(self._taken[chosen].settings(self._asked.memory))
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
            notes=(*self._notes, *_noise_note(measured, best)),
            seconds=self._subject.elapsed_s(),
        )

    def _row(self, one: Forecast) -> Row:
        trial = self._trials[one.candidate]
        ran = not trial.failed
        return Row(
            name=one.candidate.name,
            risk=one.candidate.risk.value,
            predicted_s=one.cost.seconds,
            measured_s=trial.seconds if ran else None,
            samples=one.samples if one.candidate.batch else 0,
            predicted_bytes=one.peak_bytes,
            measured_bytes=trial.peak_bytes if ran else None,
            sent_bytes=trial.bytes_sent if ran else one.cost.bytes_sent,
            note=trial.failed,
        )


def _noise_note(measured: Measured, best: Forecast) -> list[str]:
    if measured.noise_scale is None or not best.candidate.batch:
        return []
    share = statistical_efficiency(best.samples, measured.noise_scale)
    return [
        f"gradient noise scale, roughly: {measured.noise_scale:,.0f} samples; of what a sample teaches in a small batch, one of "
        f"{best.samples:,} still teaches {100 * share:.0f} %. No speed above has that in it."
    ]
