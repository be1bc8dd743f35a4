"""The rows of bench/compression_table: one training, and what travels in each of its updates.

synchronous     gradients as they are, 32 bits for each number
bf16            the same in 16 bits (bf16_allreduce)
dgc             the largest thousandth of what has not been sent yet (DGC); dense in the warm-up, then a ramp
powersgd        two thin matrices in place of each gradient (PowerSGD); dense in the warm-up
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.localsgd_table.methods import SYNCHRONOUS, doc
from fleetx.errors import ConfigError

BF16, DGC, POWERSGD = "bf16", "dgc", "powersgd"
METHODS = (SYNCHRONOUS, BF16, DGC, POWERSGD)
RAMP = (0.984375, 0.996)
"""What comes before the last sparsity, as in the paper of DGC, whose first ones are below what a warm-up hides."""


@dataclass(frozen=True)
class Settings:
    """Each field is a flag of the bench."""

    sparsity: float = field(default=0.999, metadata=doc("share of the entries that DGC keeps back, after its ramp"))
    ramp_share: float = field(default=0.05, metadata=doc("share of the run in which DGC becomes as sparse, after the warm-up"))
    min_numel: int = field(default=16384, metadata=doc("tensors with fewer elements are dense under DGC"))
    clip_norm: float = field(default=0.0, metadata=doc("DGC's local clipping threshold; 0: none"))
    rank: int = field(default=4, metadata=doc("of PowerSGD's factors"))

    def __post_init__(self) -> None:
        for name in ("min_numel", "rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        for name, below in {"sparsity": 1.0, "ramp_share": 1.0, "clip_norm": float("inf")}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
                raise ConfigError(f"{name} is {value!r}; it must be a number of at least 0 and below {below:g}.")

    def strategy_of(self, method: str, *, updates: int, warmup: int) -> dict[str, Any]:
        """Compressed from the first update after the warm-up on: gradients of a young network change too fast to be late."""
        if method == SYNCHRONOUS:
            return {}
        if method == BF16:
            return {"bf16_allreduce": True}
        if method == POWERSGD:
            return {"powersgd": True, "powersgd_configs": {"rank": self.rank, "begin_step": warmup}}
        ramp = {"rampup_begin_step": warmup, "rampup_step": max(1, round(updates * self.ramp_share))}
        sparsity = [*(share for share in RAMP if share < self.sparsity), self.sparsity]
        clip = {"clip_norm": self.clip_norm} if self.clip_norm else {}
        return {"dgc": True, "dgc_configs": {**ramp, "sparsity": sparsity, "min_numel": self.min_numel, **clip}}

    def label_of(self, method: str) -> str:
        return {
            SYNCHRONOUS: "synchronous (ours)",
            BF16: "`bf16_allreduce`",
            DGC: f"`dgc`, {100 * self.sparsity:g} % kept back",
            POWERSGD: f"`powersgd`, rank {self.rank}",
        }[method]

    def lr_share_of(self, method: str) -> float:
        """All learn at the rate of the synchronous training."""
        return 1.0
