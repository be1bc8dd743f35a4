"""Share between LARS and LAMB: groups and their spellings, flags per parameter, state, and the choice between three ways to run.

loop       the pure function, tensor by tensor       foreach=False, fused=False: the reference
foreach    list operations, cut to the cache         the default, on any device
fused      one kernel over the whole model           the default on CUDA, where Triton is there
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from ..config.kinds import boolean, names, number
from ..engine.setup.own_optimizer import Update, load_in_place
from ..errors import ConfigError
from .list_ops import Numbers, as_vector
from .options import (
    Default,
    in_own_names,
    refuse_arguments,
    refuse_near_misses,
    refuse_no_rate,
    refuse_without_effect,
    refuse_without_kernels,
)
from .param_groups import (
    FROZEN,
    Flags,
    ParamInfo,
    description,
    exclusion,
    info_of_groups,
    moves,
    require_distinct_names,
    require_own_model,
    require_words_mean_something,
)
from .trust_ratio_report import TrustRatios
from .work import NARROW, Work, gather, write_back


class Layerwise(Update, abc.ABC):
    """Abstract torch optimizer that scales each tensor's step by a trust ratio."""

    spellings: ClassVar[Mapping[str, str]]
    """Names that users of other optimizers may write, each with our own."""
    instead: ClassVar[Mapping[str, str]]
    """What to write instead of arguments that other optimizers have."""
    decay_key: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]
    """Names of the state tensors that have the parameter's shape."""
    counts_steps: ClassVar[bool]
    carry_norms: bool = False

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        synonyms: Mapping[str, Any],
        exclude: Sequence[str],
        model: nn.Module | None,
        foreach: bool | None,
        fused: bool | None,
    ) -> None:
        kind = type(self).__name__
        self.exclude = names().check("exclude_from_weight_decay", exclude)
        self._model = model
        self._want_foreach, self._want_fused = _checked_choice(foreach, fused)
        self._infos: list[list[ParamInfo]] = []
        self._decided_by: list[tuple[Any, ...]] = []
        self.flags: list[list[Flags]] = []
        """Flags of every parameter, group by group."""
        self._complete = False
        self._ratios: TrustRatios | None = None
        self._kernels: Any = None
        self._kernels_device: torch.device | None = None
        if isinstance(params, nn.Module):
            raise ConfigError(f"{kind} was given a model as its parameters. Write {kind}(model.parameters(), ..., model=model).")
        defaults = {**defaults, **self._checked_defaults(defaults, synonyms)}
        self._required = tuple(defaults)  # copied now: torch adds keys of its own to `defaults` when a state is loaded
        super().__init__(params, {**defaults, "decay": None, "adapt": None})
        self._complete = True
        devices = {param.device for group in self.param_groups for param in group["params"]}
        if self.carry_norms or fused:
            refuse_without_kernels(devices, carry_norms=self.carry_norms, foreach=foreach, fused=fused)
        require_own_model(self._infos, model)
        require_words_mean_something(self.exclude, [k for group in self._infos for k in group], complete=True)

    def _checked_defaults(self, defaults: Mapping[str, Any], synonyms: Mapping[str, Any]) -> dict[str, Any]:
        kind = type(self)
        unknown = [name for name in synonyms if name not in self.spellings]
        known = list(inspect.signature(kind).parameters) if unknown else []
        refuse_arguments(kind.__name__, unknown, known=known, instead=self.instead)
        given = {key: value for key, value in defaults.items() if not isinstance(value, Default)}
        plain = {key: float(value) for key, value in defaults.items() if isinstance(value, Default)}
        return {**plain, **in_own_names({**given, **synonyms}, self.spellings, where=f"{kind.__name__}(...)")}

    # --- what a rule supplies ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def check_group(self, group: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    def update_one_by_one(self, work: Work) -> list[Tensor]:
        """Update tensor by tensor, by the pure function; return the trust ratio of each."""

    @abc.abstractmethod
    def prepare(self, work: Work) -> tuple[Any, Numbers]:
        """Do by list operations all that comes before the trust ratios; return what `apply` goes on with, and the norms that
        make the ratios: of the parameters, then of what each is compared with. The norms of tensors that are not adapted are
        not used."""

    @abc.abstractmethod
    def apply(self, work: Work, ready: Any, lengths: Numbers) -> list[Tensor]:
        """Update by list operations, given those norms; return vectors of trust ratios of adapted tensors."""

    def after_kernels(self) -> None:
        """Drop what was accepted for one step alone."""

    def default_adapt(self, group: dict[str, Any], flags: Flags) -> Flags:
        return flags

    # --- groups and flags -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # torch refuses others
            param_group = in_own_names(param_group, self.spellings, where=f"group {len(self.param_groups)}")
        super().add_param_group(param_group)
        try:
            self._check(len(self.param_groups) - 1, self.param_groups[-1])
            infos = [*self._infos, *info_of_groups(self.param_groups[-1:], self._model)]
            require_distinct_names(infos)
            require_words_mean_something(self.exclude, [k for group in infos for k in group], complete=self._complete)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._infos = infos
        self._decide_flags()

    def adopt_groups(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
        """Take over another optimizer's group dicts themselves: schedulers and the user refer to them."""
        for place, group in enumerate(groups):
            group.update(settings)
            self._check(place, group)
        self.param_groups = groups
        self._decide_flags()

    def _check(self, place: int, group: dict[str, Any]) -> None:
        kind = type(self).__name__
        refuse_without_effect(kind, place, group, self.spellings)
        refuse_near_misses(kind, place, group, [*self._required, *self.spellings, "decay", "adapt"])
        if not isinstance(group["lr"], Tensor):
            number(0.0).check("lr", group["lr"])
        elif group["lr"].numel() != 1:
            raise ConfigError(f"lr is a tensor of {group['lr'].numel()} elements; it must have one.")
        boolean().check("maximize", group["maximize"])
        for flag in ("decay", "adapt"):
            if group.get(flag) is not None:
                boolean().check(flag, group[flag])
        self.check_group(group)
        for param in group["params"]:
            if not param.is_floating_point():
                raise ConfigError(f"{kind} takes real floating-point parameters; one is {param.dtype}.")

    def _decide_flags(self) -> None:
        self.flags = [
            [self._decide(group, info) for info in of_group]
            for group, of_group in zip(self.param_groups, self._infos, strict=True)
        ]
        self._decided_by = self._deciding()
        self._kernels = None

    def parameters_with_flags(self) -> Iterator[tuple[dict[str, Any], Tensor, str, Flags]]:
        """Iterate over group, parameter, name and flags, in the order of the groups."""
        number_of_parameter = itertools.count()
        for group, infos, flags in zip(self.param_groups, self._infos, self.flags, strict=True):
            for param, info, flags_of in zip(group["params"], infos, flags, strict=True):
                unnamed = f"parameter {next(number_of_parameter)}"
                yield group, param, info.name or unnamed, flags_of

    def _decide(self, group: dict[str, Any], info: ParamInfo) -> Flags:
        reason = exclusion(info, self.exclude)
        flags = Flags(reason is None, reason is None, reason or "not excluded")
        explicit = {key: group[key] for key in ("decay", "adapt") if group.get(key) is not None}
        if "decay" in explicit:
            flags = dataclasses.replace(flags, decay=explicit["decay"])
        flags = dataclasses.replace(self.default_adapt(group, flags), **explicit)
        if explicit:
            listed = ", ".join(f"{key}={value}" for key, value in explicit.items())
            flags = dataclasses.replace(flags, why=f"its group says {listed}")
        return flags

    def _deciding(self) -> list[tuple[Any, ...]]:
        """Return the group settings that flags depend on: a schedule, or loading a state, may change them."""
        keys = ("decay", "adapt", "always_adapt")
        return [(*map(group.get, keys), group[self.decay_key] > 0) for group in self.param_groups]

    def flags_by_name(self) -> dict[str, dict[str, bool]]:
        return {name: {"decay": flags.decay, "adapt": flags.adapt} for _, _, name, flags in self.parameters_with_flags()}

    def describe(self) -> str:
        """Return a table with one line per parameter: is it decayed, is it adapted, and why."""
        return description(
            (name, param, dataclasses.replace(flags, decay=flags.decay and group[self.decay_key] > 0) if moves(param) else FROZEN)
            for group, param, name, flags in self.parameters_with_flags()
        )

    def trust_ratios(self) -> TrustRatios | None:
        """Return the last update's trust ratios; None before the first update, or where no tensor is adapted."""
        return self._ratios

    # --- one update -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for place, group in enumerate(self.param_groups):
            refuse_no_rate(place, group["lr"])
            refuse_without_effect(type(self).__name__, place, group, self.spellings)
        if self._deciding() != self._decided_by:
            self._decide_flags()
        kernels = self._fused()
        if kernels is not None:
            try:
                self._ratios = kernels.step(self)
            finally:  # also after a step that was refused
                self.after_kernels()
            return loss
        if self.carry_norms:
            raise ConfigError("carry_norms=True saves the kernels a pass, and they do not run here. Leave it out.")
        names: list[str] = []
        ratios: list[Tensor] = []
        for part, values in self._update_shares() if self.sum_over_ranks is not None else self._update_whole():
            if part.adapt:
                names += part.names
                ratios += values
        write_back(self)
        self._ratios = TrustRatios(names, ratios) if names else None
        return loss

    def _update_whole(self) -> Iterator[tuple[Work, list[Tensor]]]:
        for work in gather(self):
            for part in work.cut():
                if self._want_foreach is False:
                    yield part, self.update_one_by_one(part)
                else:
                    yield part, self.apply(part, *self.prepare(part))

    def _update_shares(self) -> Iterator[tuple[Work, list[Tensor]]]:
        """Update this rank's shares of tensors by the norms of whole tensors.

        Every rank is here, also one whose shares have no gradient: the norms are summed in one vector with two entries for each
        parameter, in the order of the groups, which is the same on all ranks."""
        assert self.sum_over_ranks is not None
        parts = [part for work in gather(self) for part in work.cut()]
        ready = [self.prepare(part) for part in parts]
        count = sum(len(group["params"]) for group in self.param_groups)
        device = self.param_groups[0]["params"][0].device
        squares = torch.zeros(2, count, dtype=torch.float64, device=device)
        for part, (_, lengths) in zip(parts, ready, strict=True):
            if part.adapt:
                squares[:, part.places] = as_vector(lengths, device).square().view(2, -1)
        whole = self.sum_over_ranks(squares).sqrt()
        on_cpu = device.type == "cpu"
        for part, (state, _) in zip(parts, ready, strict=True):
            lengths = whole[:, part.places].flatten()
            yield part, self.apply(part, state, lengths.tolist() if on_cpu else lengths.to(part.params[0].dtype))

    def _fused(self) -> Any:
        """Return the kernels where they are wanted and possible, else None; chosen again when parameters were replaced."""
        kernels = self.kernels()
        if kernels is not None and not kernels.still_fits():
            self._kernels = None
            kernels = self.kernels()
        return kernels

    def kernels(self) -> Any:
        """Return the kernels where they are wanted and possible, else None."""
        if self._want_fused is False or self._want_foreach or self.sum_over_ranks is not None:
            return None
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        if device is None:
            return None
        if self._kernels is None or self._kernels_device != device:
            from .kernels import choose_kernels

            self._kernels, self._kernels_device = choose_kernels(self, required=self._want_fused is True), device
        return self._kernels or None

    def takes_found_inf(self) -> bool:
        return self.kernels() is not None

    def refuse_sparse(self, name: str) -> NoReturn:
        raise ConfigError(
            f"the gradient of {name} is sparse, and {type(self).__name__} needs the norm of all of it. "
            "Build its embedding with sparse=False."
        )

    # --- state ------------------------------------------------------------------------------------------------

    def state_of(self, param: Tensor, *, count_on: torch.device) -> dict[str, Any]:
        """Return the state of one parameter, which is created at its first update."""
        state: dict[str, Any] = self.state[param]
        if not state:
            wide = torch.float32 if param.dtype in NARROW else param.dtype
            if self.counts_steps:
                state["step"] = torch.zeros((), dtype=torch.float32, device=count_on)
            for name in self.moments:
                state[name] = torch.zeros_like(param, dtype=wide, memory_format=torch.preserve_format)
        if param.dtype in NARROW and "master" not in state:  # also after loading the state of a float32 run
            state["master"] = param.detach().to(torch.float32)
        for name, value in state.items():
            if name != "step" and (value.stride() != param.stride() or value.device != param.device):
                state[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)  # kernels walk memory
        if self.counts_steps and state["step"].device != count_on:
            state["step"] = state["step"].to(count_on)  # it was saved by one of the other ways to run
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and restore the float32 state of 16-bit parameters, which torch casts to the parameter's type."""
        self._refuse_foreign(state_dict)
        load_in_place(self, super().load_state_dict, state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        order = [number for group in state_dict["param_groups"] for number in group["params"]]
        for saved, param in zip(order, params, strict=True):
            if param.dtype in NARROW:
                for name, value in state_dict["state"].get(saved, {}).items():
                    if isinstance(value, Tensor) and name != "step":
                        self.state[param][name] = value.to(param.device, torch.float32, copy=True)
        self._decide_flags()

    def _refuse_foreign(self, state_dict: Mapping[str, Any]) -> None:
        missing = sorted({key for group in state_dict["param_groups"] for key in self._required if key not in group})
        if missing:
            raise ConfigError(
                f"this is the state of another optimizer than {type(self).__name__}: its groups have no {', '.join(missing)}. "
                f"Load a state that {type(self).__name__} has saved."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as torch does, without hooks and without a `step` wrapped by a scheduler. A copy chooses its kernels itself."""
        left_out = ("step", "_opt_called", "_fleetx_owner")
        own = {k: v for k, v in self.__dict__.items() if not k.startswith("_optimizer_") and k not in left_out}
        return {**own, "_kernels": None, "_ratios": None}


def _checked_choice(foreach: bool | None, fused: bool | None) -> tuple[bool | None, bool | None]:
    """Check the types of both options, and refuse both together."""
    for name, value in (("foreach", foreach), ("fused", fused)):
        if value is not None:
            boolean().check(name, value)
    if foreach and fused:
        raise ConfigError("foreach=True and fused=True are two ways to run one update. Set one of them, or neither.")
    return foreach, fused
