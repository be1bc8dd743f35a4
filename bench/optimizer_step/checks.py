"""Is what is timed also right? Ours against itself in float64 on the CPU, against its other ways to run, and against others.

A problem is one model's tensors with their first values and five gradients, the same for all. Among the adapted tensors
one is all zeros and one has no gradient to speak of: their trust ratio is 1. The measure is the largest difference within a
tensor over the largest value there, of the worst tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.optimizer_step.contestants import (
    GRADIENT_SCALE,
    WEIGHT_SCALE,
    Absent,
    first_line,
    make_ours,
    make_timm,
    make_usual,
    put,
)
from bench.optimizer_step.shapes import Shapes, odd_views

STEPS = 5
CHANGING_RATES = {"lars": (2.0, 4.0, 3.0, 1.0, 0.5), "lamb": (0.001, 0.01, 0.008, 0.004, 0.002)}
CPU = torch.device("cpu")
ROUNDING = 2e-6
"""float32 against float64 or another order of operations, five steps."""
SAME_FORMULA = 1e-6
"""Two of our ways to run, in float32."""
EXACT = 1e-12
"""Two formulas in float64."""

Outcome = dict[str, Tensor]
"""Parameters by name, and their state as `name/key`."""


class Problem:
    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.shapes = shapes
        chance = torch.Generator().manual_seed(5)
        named = list(shapes.on_meta.named_parameters())
        self.names = [name for name, _ in named]
        self.values = [torch.randn(p.shape, generator=chance).mul_(WEIGHT_SCALE) for _, p in named]
        self.gradients = [[torch.randn(p.shape, generator=chance).mul_(GRADIENT_SCALE) for _, p in named] for _ in range(STEPS)]
        adapted = [i for i, name in enumerate(self.names) if name not in shapes.excluded]
        self.values[adapted[1]].zero_()
        for gradients in self.gradients:
            gradients[adapted[2]].zero_()
        self.values = [value.to(device) for value in self.values]
        self.gradients = [[gradient.to(device) for gradient in gradients] for gradients in self.gradients]

    def model(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        model = self.shapes.model(device, dtype)
        with torch.no_grad():
            for param, value in zip(model.parameters(), self.values, strict=True):
                param.copy_(value)
        return model


@dataclass(frozen=True)
class Way:
    """One way to take the five steps."""

    make: Callable[[nn.Module, Any], Any]
    device: torch.device
    dtype: torch.dtype = torch.float32
    rates: Sequence[float] = ()
    views: Callable[[Sequence[Tensor]], list[Tensor]] = lambda params: [torch.empty_like(p) for p in params]
    rate_on_device: bool = False
    in_graph: bool = False
    give_norms: bool = False


def set_rate(optimizer: Any, rate: float) -> None:
    if not hasattr(optimizer, "param_groups"):
        optimizer.lr = rate
        return
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def take_steps(problem: Problem, way: Way, *, rounded: torch.dtype | None = None) -> tuple[Outcome, Any]:
    """Gradients stay where they are and are overwritten before each step, as a graph needs it."""
    model = problem.model(way.device, way.dtype)
    params = list(model.parameters())
    places = way.views(params)
    put(params, places)
    if rounded:
        for param in params:
            param.data.copy_(param.data.to(rounded))
    first = torch.tensor(way.rates[0], device=way.device) if way.rate_on_device else way.rates[0]
    optimizer = way.make(model, first)
    step: Callable[[], object] = optimizer.step
    for i, (rate, gradients) in enumerate(zip(way.rates, problem.gradients, strict=True)):
        for place, gradient in zip(places, gradients, strict=True):
            place.copy_(gradient.to(rounded) if rounded else gradient)
        set_rate(optimizer, rate)
        if way.in_graph and i == 1:
            step = graph_of(optimizer)
        if way.give_norms:
            optimizer.take_gradient_norms(params, torch._foreach_norm(places))
        step()
    return outcome(problem, model, optimizer), optimizer


def graph_of(optimizer: Any) -> Callable[[], object]:
    """After a first step outside, by which kernels and state are there. Capturing itself changes nothing."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def outcome(problem: Problem, model: nn.Module, optimizer: Any) -> Outcome:
    found = {name: p.detach() for name, p in zip(problem.names, model.parameters(), strict=True)}
    state = getattr(optimizer, "state", {})
    for name, param in zip(problem.names, model.parameters(), strict=True):
        for key, value in state.get(param, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.ndim:
                found[f"{name}/{key}"] = value.detach()
    return found


def difference(found: Outcome, wanted: Outcome, *, state: bool = True) -> float:
    """Of the worst tensor. NaN counts as infinitely far."""
    worst = 0.0
    for name, right in wanted.items():
        if not state and "/" in name:
            continue
        a, b = found[name].double(), right.to(found[name].device).double()
        scale = b.abs().max().item()
        apart = (a - b).abs().max().item() / (scale or 1.0)
        worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def equal_bits(found: Outcome, wanted: Outcome) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def close(value: float, limit: float) -> dict[str, Any]:
    return {"ok": value <= limit, "difference": float(f"{value:.3g}"), "limit": limit}


class Checks:
    """All of one family over one model. Each check is a row: ok, and the number behind it."""

    def __init__(self, problem: Problem, family: str, device: torch.device) -> None:
        self.problem, self.family, self.device = problem, family, device
        self.rates = CHANGING_RATES[family]
        self.constant = (CHANGING_RATES[family][2],) * STEPS

    def way(self, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Way:
        ours = {key: options.pop(key) for key in ("foreach", "fused", "carry_norms") if key in options}
        options.setdefault("rates", self.rates)
        return Way(lambda model, lr: make_ours(self.family, model, lr, **ours), device or self.device, dtype, **options)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is timed first: kernels on a GPU, foreach elsewhere."""
        plain, optimizer = take_steps(self.problem, self.way())
        yield "exclusions", self.exclusions(optimizer)
        exact, _ = take_steps(self.problem, self.way(device=CPU, dtype=torch.float64, foreach=False, fused=False))
        yield "float64_loop", close(difference(plain, exact), ROUNDING)
        again, _ = take_steps(self.problem, self.way())
        yield "two_runs_equal_bits", {"ok": equal_bits(plain, again)}
        kinds: dict[str, Callable[[], dict[str, Any]]] = {"usual_loop_float64": lambda: self.usual(exact), "timm": self.timm}
        if self.device.type == "cuda":
            kinds |= {
                "foreach": lambda: self.against(plain, SAME_FORMULA, foreach=True, fused=False),
                "odd_offsets": lambda: self.against(plain, SAME_FORMULA, views=odd_views),
                "bf16_master": self.master,
                "graph_equal_bits": lambda: self.graph(rates=self.constant),
                "graph_follows_lr_equal_bits": lambda: self.graph(rates=self.rates, rate_on_device=True),
                "no_synchronisation": self.no_synchronisation,
            }
            if self.family == "lars":
                kinds |= {
                    "carried_norms": lambda: self.against(plain, SAME_FORMULA, carry_norms=True),
                    "given_norms": lambda: self.against(plain, SAME_FORMULA, give_norms=True),
                    "both_norms_known": lambda: self.against(plain, SAME_FORMULA, carry_norms=True, give_norms=True),
                }
        else:
            kinds["foreach_float64"] = lambda: self.against(exact, EXACT, dtype=torch.float64, foreach=True)
        for name, check in kinds.items():
            yield name, judged(check)

    def against(self, plain: Outcome, limit: float, **options: Any) -> dict[str, Any]:
        other, _ = take_steps(self.problem, self.way(**options))
        return close(difference(plain, other), limit)

    def exclusions(self, optimizer: Any) -> dict[str, Any]:
        ratios = optimizer.trust_ratios()
        adapted = set() if ratios is None else set(ratios.by_name)
        return {"ok": adapted == set(self.problem.names) - self.problem.shapes.excluded, "adapted": len(adapted)}

    def usual(self, exact: Outcome) -> dict[str, Any]:
        """In float64: torch's norm of a large float32 tensor on a CPU is right to four digits only."""
        shapes = self.problem.shapes
        way = Way(lambda model, lr: make_usual(self.family, shapes, model, lr), self.device, torch.float64, self.rates)
        other, _ = take_steps(self.problem, way)
        return close(difference(other, exact, state=False), EXACT)

    def timm(self) -> dict[str, Any]:
        """At one learning rate: timm's LARS scales its whole history by the rate of the day, ours does not."""
        shapes, dtype = self.problem.shapes, torch.float32 if self.device.type == "cuda" else torch.float64
        theirs = Way(lambda model, lr: make_timm(self.family, shapes, model, lr), self.device, dtype, self.constant)
        other, _ = take_steps(self.problem, theirs)
        ours, _ = take_steps(self.problem, self.way(dtype=dtype, rates=self.constant))
        return close(difference(ours, other, state=False), ROUNDING)

    def master(self) -> dict[str, Any]:
        """The float32 copy is compared with float64 from the same rounded values; the parameter is the copy, rounded."""
        narrow, _ = take_steps(self.problem, self.way(dtype=torch.bfloat16), rounded=torch.bfloat16)
        reference = self.way(dtype=torch.float64, foreach=False, fused=False)
        exact, _ = take_steps(self.problem, reference, rounded=torch.bfloat16)
        masters = {name: narrow[f"{name}/master"] for name in self.problem.names}
        rounded = all(torch.equal(narrow[name], masters[name].bfloat16()) for name in self.problem.names)
        row = close(difference(masters, {name: exact[name] for name in self.problem.names}), ROUNDING)
        return {**row, "ok": row["ok"] and rounded, "parameters_are_rounded_masters": rounded}

    def graph(self, **options: Any) -> dict[str, Any]:
        eager, _ = take_steps(self.problem, self.way(**options))
        replayed, _ = take_steps(self.problem, self.way(**options, in_graph=True))
        return {"ok": equal_bits(replayed, eager), "difference": difference(replayed, eager)}

    def no_synchronisation(self) -> dict[str, Any]:
        """In steps with kept and with new gradients; torch raises where the host would wait."""
        model = self.problem.model(self.device, torch.float32)
        params = list(model.parameters())
        optimizer = make_ours(self.family, model, self.rates[0])
        sets = [[torch.randn_like(p) for p in params] for _ in range(2)]
        for gradients in (sets[0], sets[0]):
            put(params, gradients)
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            for gradients in (sets[0], sets[1]):
                put(params, gradients)
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return {"ok": True}


def judged(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is not there to be compared with is no failure; what breaks is one."""
    try:
        return check()
    except Absent as reason:
        return {"ok": None, "reason": str(reason)}
    except Exception as error:
        return {"ok": False, "reason": first_line(error)}
