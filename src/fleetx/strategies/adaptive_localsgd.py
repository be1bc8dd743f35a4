"""Adaptive Local SGD: the period follows the loss and the learning rate (Wang and Joshi 2019, AdaComm, arXiv 1810.08313)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..config.kinds import boolean, choice, integer, integer_among, key, number, optional, power_of_two
from ..dist.predicted_cost import Cost, Link, Shape
from ..engine.slots import Part, Risk, Site, Slot
from ..local_sgd.build import averaging_stages, form_of, notes_of, nothing_saved, require_fit, round_cost
from ..local_sgd.period import AdaptivePeriod


@dataclass(frozen=True, kw_only=True)
class AdaptiveLocalSGD(Part):
    """Average weights after a period that follows the loss and the learning rate.

    Examples:
        >>> strategy = fleet.DistributedStrategy(adaptive_localsgd=X.strategies.AdaptiveLocalSGD(max_k_steps=8))
        >>> strategy.adaptive_localsgd_configs["max_k_steps"]
        8
    """

    name: ClassVar[str] = "adaptive_localsgd"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    overlaps_backward: ClassVar[bool] = False
    label_key: ClassVar[str] = "init_k_steps"
    planning_note: ClassVar[str] = (
        "was not tried: its period follows the loss over many updates. Periods of localsgd stand for it."
    )
    why: ClassVar[str] = "Adaptive Local SGD averages parameters every few updates instead of reducing gradients."

    init_k_steps: int = key(1, integer(1), "period at the start")
    begin_step: int = key(1, integer(1), "updates that stay dense at the start")
    max_k_steps: int = key(16, integer(1), "the period never grows past this")
    formula: str = key("paper", choice("paper", "fleet"), '"fleet" puts init_k_steps inside the square root')
    # The keys from here on are those of localsgd: its older spelling with `auto` carries them over one by one.
    outer_lr: float = key(1.0, number(above=0.0), "learning rate of the outer optimizer; 1 takes the average as it is")
    outer_momentum: float = key(0.0, number(0.0, below=1.0), "momentum of the outer optimizer; above 0 is DiLoCo")
    outer_nesterov: bool = key(False, boolean(), "Nesterov's form of the outer momentum")
    average_state: bool = key(False, boolean(), "average the optimizer state along with the parameters")
    wire_dtype: str = key(
        "float32", choice("float32", "bfloat16", "float16", "int8", "int4"), "type in which changes of parameters travel"
    )
    overlap_steps: int = key(0, integer(0), "updates that go on while an averaging is under way")
    across_nodes_every: int = key(1, integer(1), "averagings from one among all ranks to the next; others stay inside a node")
    top_k: int | None = key(None, optional(integer(1)), "largest entries of each chunk that are sent; None: all are")
    chunk: int = key(4096, power_of_two(2, 65536), "entries of a chunk, of which top_k are sent")
    value_bits: int = key(32, integer_among(2, 4, 8, 32), "bits of an entry that top_k sends, beside its place")
    error_decay: float = key(1.0, number(above=0.0, maximum=1.0), "what is left of a change that was kept back, a round later")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.SHARD, Slot.REDUCE, Slot.AVERAGE})

    def check(self, site: Site) -> None:
        require_fit(self, longest_period=self.max_k_steps, key="max_k_steps")

    def build(self, site: Site) -> Mapping[Slot, Any]:
        speaks = site.comm.rank == 0
        period = AdaptivePeriod(self.init_k_steps, most=self.max_k_steps, formula=self.formula, speaks=speaks)
        return averaging_stages(self, site, period)

    def no_effect(self) -> str | None:
        return nothing_saved(self, longest_period=self.max_k_steps, key="max_k_steps", write=16)

    def notes(self) -> list[str]:
        return notes_of(self)

    def label(self) -> str:
        return super().label() + form_of(self)

    def wire_cost(self, shapes: Sequence[Shape], link: Link) -> Cost:
        return round_cost(self, shapes, link)

    def updates_per_exchange(self) -> int:
        return self.init_k_steps

    def steady(self, updates_per_exchange: int = 1) -> Self:
        period, overlap = updates_per_exchange, min(self.overlap_steps, updates_per_exchange - 1)
        return replace(self, init_k_steps=period, max_k_steps=period, begin_step=1, overlap_steps=overlap)

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"init_k_steps": 1, "max_k_steps": 1}
