"""Who competes in bench/optimizer_step: our optimizers in each way of using them, and what else one can get."""

from __future__ import annotations

import importlib
import inspect
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.lib.step_clock import Contestant
from bench.optimizer_step.shapes import ONE_NORM_KNOWN, TOUCH_ONCE, TWO_PASS, TWO_PASS_MASTER, Shapes, odd_views
from bench.optimizer_step.usual_loops import UsualLamb, UsualLars
from fleetx.optim import Lamb, Lars

OURS: dict[str, Any] = {"lars": Lars, "lamb": Lamb}
RATES = {"lars": 0.1, "lamb": 1e-3}
MOMENTUM, COEFFICIENT, LARS_DECAY = 0.9, 0.001, 0.0005
BETAS, EPS, LAMB_DECAY = (0.9, 0.999), 1e-6, 0.01
WEIGHT_SCALE, GRADIENT_SCALE = 0.02, 1e-3
GRADIENT_SETS, MIXTURES = 3, 64


class Absent(Exception):
    """This contestant does not exist here; the text is its row."""


@dataclass(frozen=True)
class Missing:
    label: str
    reason: str
    ours: bool = False


Row = Contestant | Missing


def make_ours(family: str, model: nn.Module, lr: float | Tensor, **options: Any) -> Any:
    """The settings that all share; ours finds the exclusions itself."""
    settings: dict[str, Any] = {"momentum": MOMENTUM, "lars_coeff": COEFFICIENT, "lars_weight_decay": LARS_DECAY}
    if family == "lamb":
        settings = {"betas": BETAS, "eps": EPS, "lamb_weight_decay": LAMB_DECAY}
    return OURS[family](model.parameters(), lr=lr, model=model, **settings, **options)


def make_usual(family: str, shapes: Shapes, model: nn.Module, lr: float) -> UsualLars | UsualLamb:
    if family == "lars":
        return UsualLars(*shapes.split(model), lr=lr, momentum=MOMENTUM, coeff=COEFFICIENT, decay=LARS_DECAY)
    return UsualLamb(*shapes.split(model), lr=lr, betas=BETAS, eps=EPS, decay=LAMB_DECAY)


def make_timm(family: str, shapes: Shapes, model: nn.Module, lr: float, *, foreach: bool = False) -> Any:
    """Told which tensors are excluded by groups without decay, as timm does it; its own clipping and epsilon off."""
    try:
        kind = getattr(importlib.import_module("timm.optim"), family.capitalize())
    except Exception as error:  # beside a CPU build of torch its import fails in torchvision, with a RuntimeError
        raise Absent(f"timm cannot be imported: {first_line(error)}") from error
    has_foreach = "foreach" in inspect.signature(kind).parameters
    if foreach and not has_foreach:
        raise Absent(f"timm's {kind.__name__} has no foreach")
    settings: dict[str, Any] = {"betas": BETAS, "eps": EPS, "max_grad_norm": None}
    if family == "lars":
        settings = {"momentum": MOMENTUM, "trust_coeff": COEFFICIENT, "eps": 0.0}
    if has_foreach:
        settings["foreach"] = foreach
    return kind(groups_by_decay(family, shapes, model), lr=lr, **settings)


def make_apex(shapes: Shapes, model: nn.Module) -> Any:
    try:
        kind = importlib.import_module("apex.optimizers").FusedLAMB
        return kind(groups_by_decay("lamb", shapes, model), lr=RATES["lamb"], betas=BETAS, eps=EPS)
    except Exception as error:
        raise Absent(f"apex cannot be used: {first_line(error)}") from error


def groups_by_decay(family: str, shapes: Shapes, model: nn.Module) -> list[dict[str, Any]]:
    adapted, excluded = shapes.split(model)
    decay = LARS_DECAY if family == "lars" else LAMB_DECAY
    return [{"params": adapted, "weight_decay": decay}, {"params": excluded, "weight_decay": 0.0}]


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def put(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def new_gradients(optimizer: Any, params: Sequence[Tensor], sets: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
    """Before each step other tensors at other addresses: each time another mixture of the sets, so that no table comes twice."""
    chance = random.Random(0)
    mixtures = [[chance.choice(choices) for choices in zip(*sets, strict=True)] for _ in range(MIXTURES)]
    turn = 0

    def prepare() -> None:
        nonlocal turn
        turn += 1
        optimizer.zero_grad(set_to_none=True)
        put(params, mixtures[turn % MIXTURES])

    return prepare


class Arena:
    """One family of optimizers over the tensors of one model. The float32 gradients are shared; no contestant writes to them."""

    def __init__(self, shapes: Shapes, family: str, device: torch.device) -> None:
        self.shapes, self.family, self.device = shapes, family, device
        self.gradients = self.random_gradients()

    @property
    def name(self) -> str:
        return f"{self.shapes.name}_{self.family}"

    def random_gradients(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        shapes = [p.shape for p in self.shapes.on_meta.parameters()]
        return [torch.randn(shape, device=self.device, dtype=dtype).mul_(GRADIENT_SCALE) for shape in shapes]

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        model = self.shapes.model(self.device, dtype)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(0.0, WEIGHT_SCALE)
        put(list(model.parameters()), self.gradients if dtype == torch.float32 else self.random_gradients(dtype))
        return model

    def plain(
        self, label: str, make: Callable[[nn.Module], Any], *, ours: bool = False, floor: int | None = None
    ) -> list[Contestant]:
        """An optimizer over a model of its own, with the shared gradients."""
        bytes_moved = TWO_PASS[self.family].total(self.shapes) if floor is None else floor
        return [Contestant(label, make(self.model()).step, floor_bytes=bytes_moved, ours=ours)]

    # Ours

    def ours_by_gradients(self) -> list[Contestant]:
        """One optimizer, four ways to have gradients and learning rates."""
        model = self.model()
        params = list(model.parameters())
        optimizer = make_ours(self.family, model, RATES[self.family])
        sets = [self.gradients, *(self.random_gradients() for _ in range(GRADIENT_SETS - 1))]
        views = odd_views(params)
        for view, gradient in zip(views, self.gradients, strict=True):
            view.copy_(gradient)
        rates = [RATES[self.family] * (1 + 0.01 * i) for i in range(MIXTURES)]
        turn = 0

        def change_rate() -> None:
            nonlocal turn
            turn += 1
            for group in optimizer.param_groups:
                group["lr"] = rates[turn % MIXTURES]

        common: dict[str, Any] = {"floor_bytes": TWO_PASS[self.family].total(self.shapes), "ours": True}

        def keep() -> None:
            put(params, self.gradients)

        return [
            Contestant("ours", optimizer.step, ready=keep, **common),
            Contestant("ours, new gradients", optimizer.step, new_gradients(optimizer, params, sets), **common),
            Contestant("ours, odd offsets", optimizer.step, ready=lambda: put(params, views), **common),
            Contestant("ours, changing lr", optimizer.step, change_rate, ready=keep, **common),
        ]

    def ours_in_graph(self) -> list[Contestant]:
        model = self.model()
        optimizer = make_ours(self.family, model, RATES[self.family])
        floor = TWO_PASS[self.family].total(self.shapes)
        graph = captured(optimizer.step)
        return [Contestant("ours, CUDA graph", graph.replay, floor_bytes=floor, ours=True, keeps=(model, optimizer))]

    def ours_with_master(self) -> list[Contestant]:
        optimizer = make_ours(self.family, self.model(torch.bfloat16), RATES[self.family])
        floor = TWO_PASS_MASTER[self.family].total(self.shapes)
        return [Contestant("ours, bf16 and master", optimizer.step, floor_bytes=floor, ours=True)]

    def ours_with(self, label: str, *, floor: int | None = None, **options: Any) -> list[Contestant]:
        return self.plain(
            label, lambda model: make_ours(self.family, model, RATES[self.family], **options), ours=True, floor=floor
        )

    def ours_given_norms(self, *, carry_norms: bool) -> list[Contestant]:
        """The norms have been measured by another pass over the gradients, a reducer's or a clip's; giving them is timed."""
        model = self.model()
        params = list(model.parameters())
        optimizer = make_ours(self.family, model, RATES[self.family], carry_norms=carry_norms)
        norms = torch.stack(torch._foreach_norm(self.gradients)).unbind()

        def step() -> None:
            optimizer.take_gradient_norms(params, norms)
            optimizer.step()

        floor = (TOUCH_ONCE if carry_norms else ONE_NORM_KNOWN)[self.family].total(self.shapes)
        label = "ours, both norms known" if carry_norms else "ours, given norms"
        return [Contestant(label, step, floor_bytes=floor, ours=True)]

    # Others

    def others(self) -> list[tuple[str, Callable[[], list[Contestant]]]]:
        """torch's own, for scale: they do less, and touch each byte once."""
        once = TOUCH_ONCE[self.family].total(self.shapes)
        rate = RATES[self.family]

        def make(**kind: bool) -> Callable[[nn.Module], Any]:
            if self.family == "lars":
                return lambda model: torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM, **kind)
            return lambda model: torch.optim.AdamW(model.parameters(), rate, **kind)  # type: ignore[arg-type]

        fused, foreach = (f"torch {'SGD' if self.family == 'lars' else 'AdamW'} {kind}" for kind in ("fused", "foreach"))
        return [
            (fused, lambda: self.plain(fused, make(fused=True), floor=once)),
            (foreach, lambda: self.plain(foreach, make(foreach=True), floor=once)),
        ]

    def torch_has_none(self) -> list[Contestant]:
        raise Absent(f"torch.optim has no {self.family.upper()}")

    def timm(self, *, foreach: bool) -> list[Contestant]:
        label = "timm foreach" if foreach else "timm"
        return self.plain(label, lambda m: make_timm(self.family, self.shapes, m, RATES[self.family], foreach=foreach))

    def usual(self) -> list[Contestant]:
        return self.plain("usual loop", lambda m: make_usual(self.family, self.shapes, m, RATES[self.family]))

    def apex(self) -> list[Contestant]:
        if self.family == "lars":
            raise Absent("apex has no fused LARS")
        return self.plain("apex FusedLAMB", lambda model: make_apex(self.shapes, model))


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """One step in a graph, after some in which kernels are compiled and state is made."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def attempt(label: str, make: Callable[[], list[Contestant]], *, ours: bool) -> list[Row]:
    """Its rows, or one that says why there are none: a peer that is not there costs no other the run."""
    try:
        return list(make())
    except Absent as reason:
        return [Missing(label, str(reason))]
    except Exception as error:
        if ours:
            traceback.print_exc()
        return [Missing(label, first_line(error), ours=ours)]


def on_gpu(arena: Arena) -> list[Row]:
    rows = attempt("ours", arena.ours_by_gradients, ours=True)
    rows += attempt("ours, CUDA graph", arena.ours_in_graph, ours=True)
    rows += attempt("ours, bf16 and master", arena.ours_with_master, ours=True)
    if arena.family == "lars":
        floor = ONE_NORM_KNOWN["lars"].total(arena.shapes)
        label = "ours, carried norms"
        rows += attempt(label, lambda: arena.ours_with(label, floor=floor, carry_norms=True), ours=True)
        rows += attempt("ours, given norms", lambda: arena.ours_given_norms(carry_norms=False), ours=True)
        rows += attempt("ours, both norms known", lambda: arena.ours_given_norms(carry_norms=True), ours=True)
    rows += attempt("ours, foreach", lambda: arena.ours_with("ours, foreach", foreach=True, fused=False), ours=True)
    rows += attempt("timm", lambda: arena.timm(foreach=False), ours=False)
    rows += attempt("timm foreach", lambda: arena.timm(foreach=True), ours=False)
    rows += attempt("apex", arena.apex, ours=False)
    return rows + _of_torch(arena)


def on_cpu(arena: Arena) -> list[Row]:
    rows = attempt("ours", lambda: arena.ours_with("ours", foreach=True), ours=True)
    rows += attempt("our loop", lambda: arena.ours_with("our loop", foreach=False, fused=False), ours=True)
    rows += attempt("usual loop", arena.usual, ours=False)
    rows += attempt("timm", lambda: arena.timm(foreach=False), ours=False)
    return rows + _of_torch(arena)


def _of_torch(arena: Arena) -> list[Row]:
    rows: list[Row] = attempt("torch", arena.torch_has_none, ours=False)
    for label, make in arena.others():
        rows += attempt(label, make, ours=False)
    return rows
