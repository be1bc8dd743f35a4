"""Mixed precision: autocast over the outermost forward, and for float16 a loss scale that skips overflowing updates."""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn

from ..config.kinds import boolean, choice, integer, key, names, number, optional
from ..engine.modules.nested_tensors import map_tensors
from ..engine.modules.patching import Outermost, patch_forward
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import ConfigError, did_you_mean, warn_user
from ..recompute.units import is_called

SMALLEST_SCALE = 1.0


def next_scale(scale: float, good: int, bad: int, *, finite: bool, config: Amp) -> tuple[float, int, int]:
    """Shrink after `decr_every_n_nan_or_inf` overflows in a row, grow after `incr_every_n_steps` clean updates: Fleet's rule."""
    if not config.use_dynamic_loss_scaling:
        return scale, 0, 0
    if finite:
        if good + 1 < config.incr_every_n_steps:
            return scale, good + 1, 0
        grown = scale * config.incr_ratio
        return (grown if grown < torch.finfo(torch.float32).max else scale), 0, 0
    if bad + 1 < config.decr_every_n_nan_or_inf:
        return scale, 0, bad + 1
    return max(scale * config.decr_ratio, SMALLEST_SCALE), 0, 0


@final
class LossScaling:
    """Fill BACKWARD for float16. The scale is undone in the flat buffer, before anything is reduced or kept."""

    needs_loss = True
    checks_finite = True

    def __init__(self, config: Amp) -> None:
        self._config = config
        self._scale, self._good, self._bad = config.init_loss_scaling, 0, 0

    def scale(self) -> float:
        return self._scale

    def expects_overflow(self) -> bool:
        # Not without end: data that is NaN itself would be skipped silently to the end of the run.
        must_shrink = self._config.use_dynamic_loss_scaling and self._bad + 1 >= self._config.decr_every_n_nan_or_inf
        return not (must_shrink and self._scale <= SMALLEST_SCALE)

    def settle(self, *, finite: bool) -> None:
        self._scale, self._good, self._bad = next_scale(self._scale, self._good, self._bad, finite=finite, config=self._config)

    def adopt_scale(self, smallest: float) -> None:
        self._scale = min(self._scale, smallest)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "good": self._good, "bad": self._bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scale, self._good, self._bad = float(state["scale"]), int(state["good"]), int(state["bad"])


@final
class Autocast(Outermost):
    """Fill FORWARD: autocast from the outermost module call to its end, then float32 outputs.

    torch's compiler traces it into the graph of what it compiles, like the model's own lines."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.device_type, self.dtype = device_type, dtype

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with self.under_way(), torch.autocast(self.device_type, self.dtype):
            yield

    def is_inside(self) -> bool:
        # The flag, and not autocast's own state alone: a model may switch autocast off for a stretch on purpose.
        return self.is_under_way() or torch.is_autocast_enabled(self.device_type)

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_inside():
            return forward(*args, **kwargs)
        with self.context():
            out = forward(*args, **kwargs)
        return map_tensors(_to_float32, out)

    def around_black(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(_to_float32, args), map_tensors(_to_float32, kwargs)
        with self.under_way(), torch.autocast(self.device_type, enabled=False):
            return forward(*args, **kwargs)


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def black_modules(model: nn.Module, wanted: list[str]) -> list[nn.Module]:
    """Find modules by qualified name, pattern or class; a name that matches nothing is an error."""
    named = [(name.removeprefix("_orig_mod."), module) for name, module in model.named_modules() if name]
    found: dict[int, nn.Module] = {}
    for entry in wanted:
        matches = [m for name, m in named if fnmatch.fnmatchcase(name, entry) or type(m).__name__ == entry]
        if not matches:
            known = {name for name, _ in named} | {type(m).__name__ for _, m in named}
            raise ConfigError(
                f'amp_configs["custom_black_list"] names `{entry}`; no module or class has that name.'
                + did_you_mean(entry, known)
            )
        found.update((id(m), m) for m in matches)
    return list(found.values())


def slowdown(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the time of a small convolution and matrix product in `dtype`, relative to float32; above 1 means slower."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        conv, x = nn.Conv2d(16, 16, 3, padding=1).to(device), torch.randn(4, 16, 16, 16, device=device)
        linear, rows = nn.Linear(256, 256).to(device), torch.randn(64, 256, device=device)

    def seconds(enabled: bool) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            with torch.autocast(device.type, dtype, enabled=enabled):
                (conv(x).float().mean() + linear(rows).float().mean()).backward()
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(True) / seconds(False)


@dataclass(frozen=True, kw_only=True)
class Amp(Part):
    """Compute the forward in 16 bits; for float16 the loss is scaled, and updates that overflow are skipped.

    Examples:
        >>> strategy = fleet.DistributedStrategy(amp=X.strategies.Amp(dtype="bfloat16"))
        >>> strategy.amp_configs["dtype"]
        'bfloat16'
    """

    name: ClassVar[str] = "amp"
    risk_class: ClassVar[Risk] = Risk.ROUNDING
    why: ClassVar[str] = "It sets the precision of the forward and, for float16, scales the loss."

    dtype: str | None = key(None, optional(choice("bfloat16", "float16")), "16-bit type; None: bfloat16 where the device has it")
    init_loss_scaling: float = key(32768.0, number(above=0.0), "first loss scale (float16)")
    incr_every_n_steps: int = key(1000, integer(1), "clean updates before the scale grows")
    decr_every_n_nan_or_inf: int = key(2, integer(1), "overflows in a row before it shrinks")
    incr_ratio: float = key(2.0, number(above=1.0), "growth factor")
    decr_ratio: float = key(0.5, number(above=0.0, below=1.0), "shrink factor")
    use_dynamic_loss_scaling: bool = key(True, boolean(), "False keeps the first scale")
    custom_black_list: list[str] = key([], names("head", "LayerNorm"), "modules (names, patterns) or classes kept in float32")

    def torch_dtype(self) -> torch.dtype:
        if self.dtype is not None:
            return torch.bfloat16 if self.dtype == "bfloat16" else torch.float16
        has_bfloat16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bfloat16 else torch.float16

    def claims(self) -> frozenset[Slot]:
        is_float16 = self.torch_dtype() == torch.float16
        return frozenset({Slot.FORWARD, Slot.BACKWARD} if is_float16 else {Slot.FORWARD})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        dtype = self.torch_dtype()
        if site.device.type == "cpu" and site.comm.rank == 0:
            _warn_if_slow(site.device, dtype)
        autocast = Autocast(site.device.type, dtype)
        black = black_modules(site.model, self.custom_black_list)
        for module in black:
            patch_forward(module, autocast.around_black, is_of_the_whole=True)
        for module in outermost_candidates(site.model):
            patch_forward(module, autocast.around, only_outermost=True)
        stages: dict[Slot, Any] = {Slot.FORWARD: autocast}
        if dtype == torch.float16:
            stages[Slot.BACKWARD] = LossScaling(self)
        return stages

    def steady(self, updates_per_exchange: int = 1) -> Self:
        # An update that overflows is skipped, and takes less time.
        return replace(self, init_loss_scaling=1.0) if self.torch_dtype() == torch.float16 else self

    @classmethod
    def neutral(cls) -> dict[str, Any] | None:
        return None


def outermost_candidates(model: nn.Module) -> list[nn.Module]:
    """List modules whose call may be the outermost: a loss method may call a child and never the model itself."""
    return [module for module in model.modules() if is_called(module)]


def _warn_if_slow(device: torch.device, dtype: torch.dtype) -> None:
    ratio = slowdown(device, dtype)
    if ratio > 1.1:
        name = str(dtype).removeprefix("torch.")
        warn_user(
            f"amp: {name} takes {ratio:.1f} times as long as float32 on this {device.type}. It saves memory here, not time.",
        )
