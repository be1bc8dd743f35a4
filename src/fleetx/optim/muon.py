"""Muon (K. Jordan 2024; Liu et al. 2025, arXiv 2502.16982), for matrices; AdamW for the rest, in the same optimizer.

    m = momentum * m + (1 - momentum) * g
    u = momentum * m + (1 - momentum) * g      with Nesterov momentum; without it u = m
    o = the orthogonal matrix nearest to u, by a Newton-Schulz iteration in bfloat16
    p = (1 - lr * decay) * p - lr * scale * o

The scale depends on the shape of the matrix alone: "original" is sqrt(max(1, rows / columns)), as in torch.optim.Muon;
"match_rms_adamw" is 0.2 * sqrt(max(rows, columns)), by which a step is as large as one of AdamW at the same learning rate.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ..config.kinds import boolean, choice, integer, names, number, numbers
from ..dist.comm import Comm
from ..engine.setup.own_optimizer import Shares, Update, load_in_place
from ..errors import ConfigError
from .gathered import Gathered
from .matrix_rule import DEFAULT_EXCLUDE, Choice, Tensor2D, choose, description, doubts, require_words_in_names, tensors_of_groups
from .options import refuse_near_misses, refuse_no_rate
from .orthogonal import COEFFICIENTS, batches_of, cost, matrix_shape, orthogonalise, shares_of
from .param_groups import moves, require_distinct_names
from .work import as_number

SCALES = ("original", "match_rms_adamw")
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
"""In which the iteration may run."""
TAKES = (torch.float32, torch.bfloat16, torch.float64)


def step_scale(shape: Sequence[int], adjust: str) -> float:
    """Return what the learning rate is multiplied by for a tensor of this shape, seen as a matrix."""
    rows, columns = matrix_shape(shape)
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def move_momentum(buffers: list[Tensor], grads: list[Tensor], *, momentum: float) -> None:
    """Move the means of gradients, in place."""
    torch._foreach_lerp_(buffers, grads, 1 - momentum)


def directions(buffers: list[Tensor], grads: list[Tensor], *, momentum: float, nesterov: bool) -> list[Tensor]:
    """Return what is orthogonalised: the means, or with Nesterov momentum where they will be after one more such gradient."""
    return list(torch._foreach_lerp(grads, buffers, momentum)) if nesterov else buffers


def apply_steps(params: list[Tensor], steps: list[Tensor], *, lr: float | Tensor, decay: float, scales: list[float]) -> None:
    """Decay matrices and move them by their orthogonalised directions, in place."""
    if decay:
        torch._foreach_mul_(params, 1 - lr * decay)
    for scale in dict.fromkeys(scales):
        some = [param for param, its in zip(params, scales, strict=True) if its == scale]
        moves_by = [step.to(param.dtype) for param, step, its in zip(params, steps, scales, strict=True) if its == scale]
        if isinstance(lr, Tensor):
            torch._foreach_add_(some, torch._foreach_mul(moves_by, -lr * scale))
        else:
            torch._foreach_add_(some, moves_by, alpha=-lr * scale)


@final
@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter that Muon updates."""

    group: dict[str, Any]
    whole: Tensor
    """The parameter itself."""
    trained: Tensor
    """What is changed here: the same, or this rank's share of it."""

    @property
    def has_gradient(self) -> bool:
        return self.whole.grad is not None

    @property
    def shape(self) -> tuple[int, int]:
        return matrix_shape(self.whole.shape)

    def way(self) -> tuple[Any, ...]:
        """Return what must be equal for matrices to be orthogonalised by one product."""
        group, whole = self.group, self.whole
        return group["ns_dtype"], group["ns_steps"], tuple(group["ns_coefficients"]), whole.dtype, whole.device

    def kind(self) -> tuple[torch.dtype, torch.device]:
        """Return the type and the device of its orthogonalised direction."""
        return TYPES[self.group["ns_dtype"]], self.whole.device


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Which matrices are orthogonalised together, and by which rank: numbers of matrices, the same on all ranks."""

    batches: list[list[int]]
    shares: list[list[int]]
    """Of each rank, by numbers of batches."""

    @staticmethod
    def of(matrices: Sequence[Matrix], *, ranks: int) -> Plan:
        by_way: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for place, matrix in enumerate(matrices):
            by_way[matrix.way()].append(place)
        batches = [
            [same[i] for i in batch]
            for same in by_way.values()
            for batch in batches_of([matrices[place].shape for place in same])
        ]
        costs = [sum(cost(*matrices[place].shape) for place in batch) for batch in batches]
        return Plan(batches, shares_of(costs, ranks))


@final
class Muon(Update):
    """Muon for matrices and convolutions, AdamW for the rest. `params`: tensors, named tensors, or groups.

    Without names and `model`, tensors of two dimensions and more are orthogonalised. With names, what looks like an embedding or
    a head is not; with `model`, its layers decide. `use_muon` (True or False) in a group decides for all its parameters.
    `betas`, `eps`, `weight_decay` and those after are AdamW's; `lr` is that of both.

    Examples:
        >>> optimizer = X.optim.Muon(model.named_parameters(), lr=0.02)
        >>> criterion(model(x), y).backward()
        >>> optimizer.step()
    """

    state_suits_inner: ClassVar[bool] = False
    rule_settings: ClassVar[tuple[str, ...]] = (
        "nesterov",
        "ns_steps",
        "ns_coefficients",
        "ns_dtype",
        "muon_weight_decay",
        "adjust_lr_fn",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        muon_weight_decay: float = 0.1,
        *,
        adjust_lr_fn: str = "original",
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        ns_dtype: str = "bfloat16",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        exclude: Sequence[str] = DEFAULT_EXCLUDE,
        model: nn.Module | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            raise ConfigError("Muon was given a model as its parameters. Write Muon(model.named_parameters(), ..., model=model).")
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"model is {type(model).__name__}; it must be the nn.Module that holds the parameters.")
        self.exclude = names("embedding", "head").check("exclude", exclude)
        self._model = model
        self._known: list[list[Tensor2D]] = []
        self._decided_by: list[Any] = []
        self.choices: list[list[Choice]] = []
        """Of every parameter, group by group."""
        self._wholes: list[Tensor] = []
        self._comm: Comm | None = None
        self._plan: Plan | None = None
        self._planned_for: list[Any] = []
        rule = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "muon_weight_decay": muon_weight_decay}
        way = {"adjust_lr_fn": adjust_lr_fn, "ns_coefficients": tuple(ns_coefficients), "ns_dtype": ns_dtype, "use_muon": None}
        of_adamw = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        of_both = {"lr": lr, "maximize": maximize, "foreach": foreach, "capturable": capturable, "fused": fused}
        super().__init__(params, {**rule, **way, **of_adamw, **of_both})
        require_words_in_names(self.exclude, itertools.chain(*self._known))

    def share_over(self, comm: Comm | None) -> None:
        """Divide the matrices between these ranks, which have equal gradients and all make each step; None: do all here."""
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._plan = None

    # --- groups and choices -----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check(len(self.param_groups) - 1, self.param_groups[-1])
            known = tensors_of_groups(self.param_groups, self._model)
            require_distinct_names(known)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._known = known
        self._hold()

    def adopt_groups(self, groups: list[dict[str, Any]], settings: dict[str, Any]) -> None:  # type: ignore[override]
        for place, group in enumerate(groups):
            group.update(settings)
            self._check(place, group)
        self.param_groups = groups
        self._hold()

    def _hold(self) -> None:
        """Note the parameters, in whose place shares may be while a step is made, and choose for each."""
        self._wholes = [param for group in self.param_groups for param in group["params"]]
        self._decide()

    def _check(self, place: int, group: dict[str, Any]) -> None:
        of_adamw = ("decoupled_weight_decay", "differentiable")
        refuse_near_misses("Muon", place, group, [*self.defaults, *of_adamw])
        refuse_no_rate(place, group["lr"])
        if group.get("differentiable"):
            raise ConfigError(f"group {place} has differentiable=True, and Muon's step has no gradient. Leave it out.")
        number(0.0, below=1.0).check("momentum", group["momentum"])
        boolean().check("nesterov", group["nesterov"])
        integer(1, 99).check("ns_steps", group["ns_steps"])
        numbers(number(), count=3).check("ns_coefficients", group["ns_coefficients"])
        choice(*TYPES).check("ns_dtype", group["ns_dtype"])
        choice(*SCALES).check("adjust_lr_fn", group["adjust_lr_fn"])
        for key in ("muon_weight_decay", "weight_decay", "eps"):
            number(0.0).check(key, group[key])
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigError(f"betas is {betas!r}; it must be two numbers, such as (0.9, 0.999).")
        for index, beta in enumerate(betas):
            if not isinstance(beta, Tensor):
                number(0.0, below=1.0).check(f"betas[{index}]", beta)
        if group.get("use_muon") is not None:
            boolean().check("use_muon", group["use_muon"])
        for param in group["params"]:
            _require_type(param)

    def _decide(self) -> None:
        self.choices = [
            [self._choice(group, known) for known in of_group]
            for group, of_group in zip(self.param_groups, self._known, strict=True)
        ]
        self._decided_by = self._deciding()
        self._plan = None

    def _deciding(self) -> list[Any]:
        return [group.get("use_muon") for group in self.param_groups]

    def _choice(self, group: dict[str, Any], known: Tensor2D) -> Choice:
        said = group.get("use_muon")
        if said is None:
            return choose(known, self.exclude)
        if said and len(known.shape) < 2:
            return Choice(False, "one dimension or less, though its group says use_muon=True")
        return Choice(said, f"its group says use_muon={said}")

    def parameters_with_choices(self) -> Iterator[tuple[dict[str, Any], Tensor, str, Choice]]:
        """Iterate over group, parameter, name and choice, in the order of the groups."""
        count = itertools.count()
        for group, known, choices in zip(self.param_groups, self._known, self.choices, strict=True):
            for param, one, chosen in zip(group["params"], known, choices, strict=True):
                unnamed = f"parameter {next(count)}"
                yield group, param, one.name or unnamed, chosen

    def flags_by_name(self) -> dict[str, dict[str, bool]]:
        return {name: {"use_muon": chosen.by_muon} for _, _, name, chosen in self.parameters_with_choices()}

    def describe(self) -> str:
        """Return a table with one line per parameter: which optimizer updates it, and why."""
        return description((name, param, chosen) for _, param, name, chosen in self.parameters_with_choices())

    def doubts(self) -> list[str]:
        """Return what may have been chosen wrongly, and what to write then."""
        return doubts(((name, param, chosen) for _, param, name, chosen in self.parameters_with_choices()), self.exclude)

    # --- one update -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for place, group in enumerate(self.param_groups):
            refuse_no_rate(place, group["lr"])
        if self._deciding() != self._decided_by:
            self._decide()
        self._refuse_gradients()  # before the first collective, and before anything is changed
        matrices = self._matrices()
        plan = self._current_plan(matrices)
        self._move_momentum(matrices)
        if self._comm is None:
            for batch in plan.batches:
                self._apply(self._orthogonalise([matrices[place] for place in batch]))
            self._step_adamw()
        else:
            gathered = self._orthogonalise_share(matrices, plan, self._comm)
            self._step_adamw()  # while the last pieces travel
            self._apply_gathered(matrices, plan, gathered)
        return loss

    def _refuse_gradients(self) -> None:
        for _, param, name, _ in self.parameters_with_choices():
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise ConfigError(
                    f"the gradient of {name} is sparse, and Muon and AdamW need all of it. Build its embedding with sparse=False."
                )

    def _matrices(self) -> list[Matrix]:
        """Return the matrices in the order of the groups, the same on all ranks: also those without a gradient now."""
        found = [(group, param, chosen.by_muon) for group, param, _, chosen in self.parameters_with_choices()]
        wholes = [param for _, param, _ in found] if self.shares is None else self._wholes
        return [
            Matrix(group, whole, param)
            for (group, param, by_muon), whole in zip(found, wholes, strict=True)
            if by_muon and moves(whole)
        ]

    def _current_plan(self, matrices: Sequence[Matrix]) -> Plan:
        planned_for = [(id(matrix.whole), matrix.way()) for matrix in matrices]
        if self._plan is None or planned_for != self._planned_for:
            self._plan = Plan.of(matrices, ranks=1 if self._comm is None else self._comm.size)
            self._planned_for = planned_for
        return self._plan

    def _lists(self, matrices: Iterable[Matrix]) -> Iterator[tuple[dict[str, Any], list[Matrix], list[Tensor], list[Tensor]]]:
        """Iterate over groups, their matrices that have a gradient here, momentum and gradients."""
        found = [matrix for matrix in matrices if matrix.trained.grad is not None]
        for _, same in itertools.groupby(found, key=lambda matrix: id(matrix.group)):
            of_group = list(same)
            group = of_group[0].group
            grads = [matrix.trained.grad for matrix in of_group if matrix.trained.grad is not None]
            buffers = [self._momentum_of(matrix.trained) for matrix in of_group]
            yield group, of_group, buffers, list(torch._foreach_neg(grads)) if group["maximize"] else grads

    def _momentum_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # AdamW, which may hold this state, takes none without
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _move_momentum(self, matrices: Sequence[Matrix]) -> None:
        for group, of_group, buffers, grads in self._lists(matrices):
            move_momentum(buffers, grads, momentum=group["momentum"])
            torch._foreach_add_([self.state[matrix.trained]["step"] for matrix in of_group], 1)

    def _directions(self, matrices: Iterable[Matrix]) -> dict[int, Tensor]:
        """Return what is orthogonalised, or this rank's shares of that, by the ids of the parameters."""
        found: dict[int, Tensor] = {}
        for group, of_group, buffers, grads in self._lists(matrices):
            moved = directions(buffers, grads, momentum=group["momentum"], nesterov=group["nesterov"])
            found |= {id(matrix.whole): direction for matrix, direction in zip(of_group, moved, strict=True)}
        return found

    def _orthogonalise(self, batch: Sequence[Matrix], known: dict[int, Tensor] | None = None) -> list[tuple[Matrix, Tensor]]:
        """Return the matrices of a batch that have gradients, each with its orthogonalised direction. `known`: directions that
        were gathered."""
        found = [matrix for matrix in batch if matrix.has_gradient]
        if not found:
            return []
        moved = self._directions(found) if known is None else known
        group = found[0].group
        steps = orthogonalise(
            [moved[id(matrix.whole)] for matrix in found],
            steps=group["ns_steps"],
            coefficients=group["ns_coefficients"],
            dtype=TYPES[group["ns_dtype"]],
        )
        return list(zip(found, steps, strict=True))

    def _apply(self, pairs: Iterable[tuple[Matrix, Tensor]]) -> None:
        for _, same in itertools.groupby(pairs, key=lambda pair: id(pair[0].group)):
            of_group = list(same)
            group = of_group[0][0].group
            apply_steps(
                [matrix.trained for matrix, _ in of_group],
                [step for _, step in of_group],
                lr=as_number(group["lr"]),
                decay=group["muon_weight_decay"],
                scales=[step_scale(matrix.whole.shape, group["adjust_lr_fn"]) for matrix, _ in of_group],
            )

    # --- one update, shared out -------------------------------------------------------------------------------

    def _orthogonalise_share(self, matrices: Sequence[Matrix], plan: Plan, comm: Comm) -> dict[Any, Gathered]:
        """Orthogonalise this rank's batches, and start to send them. Every rank is here, with the same matrices."""
        mine = [[matrices[place] for place in plan.batches[batch]] for batch in plan.shares[comm.rank]]
        known = None if self.shares is None else self._gather_directions(self.shares, matrices, mine)
        gathered: dict[Any, Gathered] = {}
        # One kind after the other: were two streams filled in turns, by the costs of a rank's own batches, one rank would start a
        # piece of the first where another starts one of the second, and both would receive what they did not expect.
        for kind, lengths in _lengths(matrices, plan).items():
            gathered[kind] = Gathered(comm, lengths, dtype=kind[0], device=kind[1])
            for batch in (batch for batch in mine if batch[0].kind() == kind):
                steps = {id(matrix.whole): step for matrix, step in self._orthogonalise(batch, known)}
                for matrix in batch:
                    gathered[kind].put(steps.get(id(matrix.whole)), matrix.whole.numel())
            gathered[kind].start_rest()
        return gathered

    def _gather_directions(self, shares: Shares, matrices: Sequence[Matrix], mine: list[list[Matrix]]) -> dict[int, Tensor]:
        """Return whole directions of this rank's batches, of which each rank has its shares."""
        parts, wanted = self._directions(matrices), {id(matrix.whole) for batch in mine for matrix in batch}
        known: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(matrix.kind()[0] for matrix in matrices):
            among = [matrix.whole for matrix in matrices if matrix.kind()[0] is dtype]
            known |= shares.gather_whole(parts, among=among, wanted=wanted, dtype=dtype)
        return known

    def _apply_gathered(self, matrices: Sequence[Matrix], plan: Plan, gathered: dict[Any, Gathered]) -> None:
        streams = {kind: stream.streams() for kind, stream in gathered.items()}
        for rank, share in enumerate(plan.shares):
            begins: defaultdict[Any, int] = defaultdict(int)
            for batch in share:
                pairs = []
                for matrix in (matrices[place] for place in plan.batches[batch]):
                    kind, numel = matrix.kind(), matrix.whole.numel()
                    step: Tensor | None = streams[kind][rank][begins[kind] :][:numel].view(matrix.whole.shape)
                    begins[kind] += numel
                    if self.shares is not None and step is not None:
                        step = self.shares.own_part(matrix.whole, step)
                    if step is not None and matrix.has_gradient:
                        pairs.append((matrix, step))
                self._apply(pairs)

    def _step_adamw(self) -> None:
        for group, choices in zip(self.param_groups, self.choices, strict=True):
            pairs = zip(group["params"], choices, strict=True)
            params = [param for param, chosen in pairs if not chosen.by_muon and param.grad is not None]
            if not params:
                continue
            states = [self._state_of(param, group) for param in params]
            adamw(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
                [state["step"] for state in states],
                foreach=group.get("foreach"),
                capturable=group.get("capturable", False),
                fused=group.get("fused"),
                amsgrad=group["amsgrad"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return AdamW's state of one parameter, which is created at its first update as torch creates it."""
        state: dict[str, Any] = self.state[param]
        if "step" not in state:
            on_device = group.get("capturable") or group.get("fused")
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
            names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
            state |= {name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in names}
        return state

    # --- state ------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of Muon; one of AdamW alone, whose groups have no Muon settings, is refused."""
        missing = sorted({key for group in state_dict["param_groups"] for key in self.rule_settings if key not in group})
        if missing:
            raise ConfigError(
                f"this is the state of another optimizer than Muon: its groups have no {', '.join(missing)}. Load a state that "
                "Muon has saved."
            )
        load_in_place(self, super().load_state_dict, state_dict)
        self._decide()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as torch does, without hooks and the group of ranks: a copy orthogonalises all by itself."""
        left_out = ("step", "_opt_called", "_fleetx_owner")
        own = {k: v for k, v in self.__dict__.items() if not k.startswith("_optimizer_") and k not in left_out}
        return {**own, "_comm": None, "_plan": None}


def _require_type(param: Tensor) -> None:
    if param.dtype is torch.float16:
        raise ConfigError(
            "Muon takes no float16 parameters: in float16 the momentum of small gradients is 0. Keep float32 parameters, and "
            "write strategy.amp = True, or torch.autocast, for 16-bit products."
        )
    if param.dtype not in TAKES:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in TAKES)
        raise ConfigError(f"Muon takes parameters of {listed}; one is {str(param.dtype).removeprefix('torch.')}.")


def _lengths(matrices: Sequence[Matrix], plan: Plan) -> dict[Any, list[int]]:
    """Return the lengths of all ranks' streams, of each kind, in an order that is the same on all ranks."""
    found: dict[Any, list[int]] = {matrix.kind(): [0] * len(plan.shares) for matrix in matrices}
    for rank, share in enumerate(plan.shares):
        for place in itertools.chain.from_iterable(plan.batches[batch] for batch in share):
            found[matrices[place].kind()][rank] += matrices[place].whole.numel()
    return found
