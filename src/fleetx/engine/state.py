"""All that a pair's training state is, beyond the model: taken between two micro-steps, put back to the bit.

inner       the torch optimizer's own state dict, and the name of each parameter it counts by number
outside     trained parameters that no module has
window      the micro-steps of a half-filled window: gradients summed so far, losses, weights
stages      what each part of the strategy remembers (loss scale, residuals, ...)
buffers     large ones that this rank has written to since the ranks last had the same, and names of those that are its own
common      the floating buffers after the last update, from which the ranks' changes are averaged; a skip goes back to them
noise_scale the running means of the gradient noise scale
strategy    the settings, which a run that loads compares with its own (strategy_record.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..config.text import listed
from ..errors import CheckpointError
from .local_shard import whose
from .optimizer import FleetOptimizer
from .setup.optimizer_state import SHARES, check_optimizer_state, load_optimizer_state, optimizer_state
from .setup.placement import OUTSIDE, plain_name
from .slots import Shard
from .step import Pipeline
from .window import Window

STAGES = ("backward", "reduce", "average")


def training_state(optimizer: FleetOptimizer) -> dict[str, Any]:
    """Return a tree of live tensors: copy what must not change. No collective."""
    pipeline = optimizer.pipeline
    pipeline.refuse_inside_averaged()
    window = pipeline.window
    pipeline.settle()
    pipeline.outcomes.learn()
    if pipeline.outcomes.refused_step is not None:  # as all ranks know, of which each raises by itself
        raise CheckpointError(
            f"update {pipeline.outcomes.refused_step} was not made: its loss or gradients are not finite. Nothing is saved; the "
            "weights are those before it. Look at the data and the learning rate; the next backward says more, and "
            'strategy.on_nan_inf = "skip" leaves such updates out.'
        )
    is_foreign = window.closed and window.shared  # left by another pair's loss: a GAN's generator, in the discriminator
    if not is_foreign and (window.entered or window.closed or window.broken or pipeline.buckets.has_new()):
        raise CheckpointError(
            "the optimizer holds gradients that step() has not taken yet. "
            "Save after optimizer.step() or optimizer.minimize(loss)."
        )
    if is_foreign:
        window = Window()
    gradients = {name: g for bucket in pipeline.buckets for name, g in bucket.gradients().items()} if window.micro_steps else {}
    return {
        "inner": _inner_state(optimizer),
        "names": parameter_names(optimizer),
        "counters": counters(pipeline),
        "window": {
            "micro_steps": window.micro_steps,
            "losses": list(window.losses),
            "weights": list(window.weights),
            "gradients": gradients,
            **({} if window.sums is None else {"sums": list(window.sums), "filled": list(window.filled or [])}),
        },
        "stages": {name: _stage_state(pipeline, name) for name in STAGES},
        "common": common_buffers(pipeline),
        **_buffers_state(pipeline),
        "good": good_buffers(pipeline),
        "outside": {name: param.detach() for name, param in _outside(pipeline).items()},
        "noise_scale": pipeline.meter.state_dict(),
        "strategy": _strategy_of(optimizer),
    }


def _inner_state(optimizer: FleetOptimizer) -> dict[str, Any]:
    """Return the state of the optimizer inside: under sharding in parts if these were collected, else this rank's share."""
    shard = optimizer.pipeline.stages.shard
    if shard is None:
        return optimizer_state(optimizer.update)
    if shard.collected is not None:
        return optimizer_state(optimizer.update, shard.collected)
    with shard.own_state():
        return {SHARES: True, **optimizer_state(optimizer.update)}


@contextlib.contextmanager
def shares_collected(objects: Iterable[Any]) -> Iterator[None]:
    """Learn what sharded optimizers have on all ranks, for a checkpoint that any number of ranks can load. Collective."""
    shards: list[Shard] = []
    try:
        for held in objects:
            whole = held.gather_state(as_parts=True) if isinstance(held, FleetOptimizer) else None
            if whole is not None:
                shards.append(held.pipeline.stages.shard)
                shards[-1].collected = whole
        yield
    finally:
        for shard in shards:
            shard.collected = None


def _strategy_of(optimizer: FleetOptimizer) -> dict[str, Any] | None:
    """Return the record of the strategy, with the batches of a plan of auto's."""
    if optimizer.strategy_record is None:
        return None
    plan = optimizer.plan
    batches = None if plan is None else {"micro_batch": plan.micro_batch, "merge_steps": plan.merge_steps, "chosen": plan.chosen}
    return {**optimizer.strategy_record, "plan": batches}


def check_training_state(optimizer: FleetOptimizer, state: Mapping[str, Any]) -> None:
    """Raise if this state is another pair's; nothing is changed."""
    optimizer.pipeline.refuse_inside_averaged()
    mine, saved = parameter_names(optimizer), state["names"]
    if sorted(mine) != sorted(saved):
        only_saved, only_mine = sorted(set(saved) - set(mine)), sorted(set(mine) - set(saved))
        raise CheckpointError(
            "the checkpoint's optimizer trains other parameters than this one. "
            f"Only in the checkpoint: {_some(only_saved)}; only here: {_some(only_mine)}."
        )
    check_optimizer_state(optimizer.update, _by_our_numbers(state["inner"], saved, mine))
    merge, done = optimizer.pipeline.stages.merge, state["window"]["micro_steps"]
    if done >= merge.micro_steps:
        raise CheckpointError(
            f"the checkpoint was saved with {done} micro-batches in a merge window; this run merges {merge.micro_steps}. "
            'Resume with the old gradient_merge_configs["k_steps"], or save after an update.'
        )
    _check_sums(optimizer.pipeline, state["window"].get("sums"))
    _check_buffers(optimizer.pipeline, state)
    for name in STAGES:
        theirs, ours = state["stages"].get(name) or {}, _stage_state(optimizer.pipeline, name)
        if theirs and name == "average":
            _check_average(optimizer.pipeline, theirs)
        elif theirs and name == "reduce":
            _check_reduce(optimizer.pipeline, theirs, index=int(state["counters"]["index"]))
        elif theirs and set(theirs) != set(ours):
            raise CheckpointError(
                f"the checkpoint holds the state of another {name} stage ({', '.join(sorted(theirs))}) than this strategy's "
                f"({', '.join(sorted(ours)) or 'none'}). Resume with the strategy that saved it."
            )


def _check_sums(pipeline: Pipeline, saved: list[Tensor] | None) -> None:
    """Raise where a merge window was saved as shares of other buckets than this run has, or this run keeps none."""
    mine = [tuple(reduced.shape) for reduced in pipeline.buckets.reduced]
    if saved is not None and (not pipeline.merges_shares or [tuple(one.shape) for one in saved] != mine):
        raise CheckpointError(
            "it was saved inside a merge window of which each rank keeps its share (merge_sharded), with other settings than "
            "this run's. Resume with the strategy that saved it, or save after an update."
        )


def _check_reduce(pipeline: Pipeline, saved: Mapping[str, Any], *, index: int) -> None:
    mine = _stage_state(pipeline, "reduce").get("kind")
    if mine == saved["kind"]:
        pipeline.stages.reduce.check_state_dict(saved, index)
    elif any(saved["shares"].values()):
        now = f"strategy.{mine}" if mine else "a strategy that keeps nothing back"
        raise CheckpointError(
            f"it was saved under strategy.{saved['kind']}, with gradients that were kept back, and this run has {now}: they "
            f"would be lost. Resume with strategy.{saved['kind']} = True."
        )


def _check_average(pipeline: Pipeline, saved: Mapping[str, Any]) -> None:
    if pipeline.stages.average is None:
        raise CheckpointError(
            "it was saved under Local SGD, and this strategy has none. Resume with the strategy that saved it; or write the "
            "average there, by fleet.save_model(path, model, optimizer), and start from that file."
        )
    pipeline.stages.average.check_state_dict(saved)


def _buffers_state(pipeline: Pipeline) -> dict[str, list[str]]:
    tail = pipeline.buckets.tail
    return {"changed_tables": tail.tables.changed(), "local_buffers": sorted(tail.local)} if tail is not None else {}


def _check_buffers(pipeline: Pipeline, saved: Mapping[str, Any]) -> None:
    """Raise where the lists of local buffers differ: one that was each rank's own has no common value, from which changes could
    be averaged."""
    tail = pipeline.buckets.tail
    lost = sorted(set(saved.get("local_buffers", [])) - tail.local) if tail is not None else []
    if lost:
        raise CheckpointError(
            f"buffer `{plain_name(lost[0])}` was each rank's own in the run that saved it, and this strategy would average it. "
            f'Resume with strategy.local_buffers = ["{plain_name(lost[0])}"{", ..." if len(lost) > 1 else ""}].'
        )


def _outside(pipeline: Pipeline) -> dict[str, Tensor]:
    """Trained parameters that belong to no module, and are in no model's state dict."""
    named = {name: param for bucket in pipeline.buckets for name, param in zip(bucket.names, bucket.params, strict=True)}
    return {name: param for name, param in named.items() if name.startswith(OUTSIDE)}


@torch.no_grad()
def load_training_state(optimizer: FleetOptimizer, state: Mapping[str, Any]) -> None:
    pipeline, window = optimizer.pipeline, state["window"]
    inner = _by_our_numbers(state["inner"], state["names"], parameter_names(optimizer))
    load_optimizer_state(optimizer.update, inner)
    if pipeline.stages.shard is not None and SHARES not in inner:
        pipeline.stages.shard.cut_state()
    load_counters(pipeline, state["counters"])
    device = next(iter(pipeline.buckets)).flat.device
    pipeline.window = Window(
        losses=[loss.to(device) for loss in window["losses"]],
        weights=list(window["weights"]),
        micro_steps=window["micro_steps"],
        sums=[one.to(device, copy=True) for one in window["sums"]] if "sums" in window else None,
        filled=list(window["filled"]) if "filled" in window else None,
    )
    pipeline.buckets.zero()
    if window["micro_steps"] and "sums" not in window:
        for bucket in pipeline.buckets:
            bucket.resume(window["gradients"])
    for name in STAGES:
        stage, saved = getattr(pipeline.stages, name), state["stages"].get(name)
        if name == "reduce":
            _load_reduce(pipeline, saved)
        elif stage is not None and saved:
            stage.load_state_dict(saved)
        elif stage is pipeline.stages.average and pipeline.stages.average is not None:
            pipeline.stages.average.forget()
    load_common_buffers(pipeline, state["common"], state.get("good"))
    if pipeline.buckets.tail is not None:
        pipeline.buckets.tail.tables.resume(state.get("changed_tables", []))
    for name, param in _outside(pipeline).items():
        if name in state.get("outside", {}):
            param.copy_(state["outside"][name])
    pipeline.meter.load_state_dict(state.get("noise_scale"), device)


def _load_reduce(pipeline: Pipeline, saved: Mapping[str, Any] | None) -> None:
    stage = pipeline.stages.reduce
    if saved and saved["kind"] == stage.state_dict().get("kind"):
        stage.load_state_dict(saved)
    else:
        stage.forget()


def parameter_names(optimizer: FleetOptimizer) -> list[str]:
    """List the names in the order by which the optimizer's state dict numbers its parameters."""
    buckets = optimizer.pipeline.buckets
    known = {id(whose(p)): name for bucket in buckets for name, p in zip(bucket.names, bucket.params, strict=True)}
    known |= {id(p): name for name, p in optimizer.frozen.items()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [known.get(id(p), f"(number {number}, frozen, outside the model)") for number, p in enumerate(params)]


def _stage_state(pipeline: Pipeline, name: str) -> dict[str, Any]:
    stage = getattr(pipeline.stages, name)
    return {} if stage is None else dict(stage.state_dict())


def _by_our_numbers(inner: Mapping[str, Any], saved: list[str], mine: list[str]) -> dict[str, Any]:
    """Renumber the saved state by this run's parameters. The name is what tells them: two of one shape mix silently."""
    if saved == mine:
        return dict(inner)
    number = {name: i for i, name in enumerate(mine)}
    to_ours = {old: number[name] for old, name in enumerate(saved)}
    groups = [{**group, "params": [to_ours[old] for old in group["params"]]} for group in inner["param_groups"]]
    expected = [len(group["params"]) for group in groups]
    starts = [sum(expected[:i]) for i in range(len(expected))]
    for group, start, length in zip(groups, starts, expected, strict=True):
        if sorted(group["params"]) != list(range(start, start + length)):
            raise CheckpointError("the checkpoint's optimizer has other parameter groups than this one. Build the same groups.")
        group["params"] = sorted(group["params"])
    return {**inner, "state": {to_ours[old]: value for old, value in inner["state"].items()}, "param_groups": groups}


def _some(names: list[str]) -> str:
    return listed(names, 5) or "none"


# --- what the pipeline itself remembers between two windows -------------------------------------------------------------


def counters(pipeline: Pipeline) -> dict[str, Any]:
    """Return the numbers of updates and the usual weight; equal on all ranks, except where they train alone."""
    return {"index": pipeline.index, "skipped": pipeline.skipped, **pipeline.weighing.counters()}


def load_counters(pipeline: Pipeline, saved: Mapping[str, Any]) -> None:
    """Go on counting from these."""
    pipeline.settle()
    pipeline.checks.forget()
    pipeline.outcomes.restart(skipped=int(saved["skipped"]))
    pipeline.index, pipeline.dropped = int(saved["index"]), 0
    pipeline.weighing.load_counters(saved)


def common_buffers(pipeline: Pipeline) -> dict[str, Tensor] | None:
    """Return the floating buffers after the last update: the ranks' changes are averaged from them, a skip goes back to them."""
    tail = pipeline.buckets.tail
    return pipeline.checks.finite.good() if tail is None else tail.common()


def good_buffers(pipeline: Pipeline) -> dict[str, Tensor] | None:
    """Return the floating buffers after the last update of a rank that trains alone: its own."""
    return pipeline.checks.finite.good() if pipeline.trains_alone else None


def load_common_buffers(pipeline: Pipeline, common: Mapping[str, Tensor] | None, good: Mapping[str, Tensor] | None) -> None:
    """Go on from these buffers; None: from what the model's buffers hold now."""
    if pipeline.buckets.tail is not None:
        pipeline.buckets.tail.resume(common)
    pipeline.checks.finite.resume(good if pipeline.trains_alone else common)
