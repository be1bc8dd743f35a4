"""Local SGD: ranks update on their own and average every k updates (Stich 2019, arXiv 1805.09767).

A large `begin_step` is post-local SGD (Lin et al. 2020, arXiv 1808.07217); outer momentum is DiLoCo (arXiv 2311.08105).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..config.kinds import boolean, choice, integer, integer_among, key, number, optional, power_of_two
from ..dist.predicted_cost import Cost, Link, Shape
from ..engine.slots import Part, PlanContext, Risk, Site, Slot
from ..local_sgd.build import averaging_stages, form_of, notes_of, nothing_saved, require_fit, require_fragments_fit, round_cost
from ..local_sgd.period import FixedPeriod


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Part):
    """Let ranks update on their own and average their weights every `k_steps` updates.

    Examples:
        >>> strategy = fleet.DistributedStrategy(localsgd=X.strategies.LocalSGD(k_steps=4))
        >>> strategy.localsgd_configs["k_steps"]
        4
    """

    name: ClassVar[str] = "localsgd"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    overlaps_backward: ClassVar[bool] = False
    label_key: ClassVar[str] = "k_steps"
    why: ClassVar[str] = (
        "Local SGD averages parameters every few updates instead of reducing gradients; "
        'its wire_dtype "bfloat16" halves the bytes.'
    )

    k_steps: int = key(1, integer(1), "updates between two averagings")
    begin_step: int = key(1, integer(1), "updates that stay dense at the start")
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
    fragments: int = key(1, integer(1), "parts of the model that are averaged in turns, each once in k_steps")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.SHARD, Slot.REDUCE, Slot.AVERAGE})

    def check(self, site: Site) -> None:
        require_fit(self, longest_period=self.k_steps, key="k_steps")
        require_fragments_fit(self, site, fragments=self.fragments, period=self.k_steps)

    def build(self, site: Site) -> Mapping[Slot, Any]:
        return averaging_stages(self, site, FixedPeriod(self.k_steps), fragments=self.fragments)

    def no_effect(self) -> str | None:
        return nothing_saved(self, longest_period=self.k_steps, key="k_steps", write=4)

    @classmethod
    def candidates(cls, context: PlanContext) -> Sequence[Self]:
        # 4 updates in 8 bits send as little as 16 in float32, and the ranks are apart for a quarter of the time.
        return [cls(k_steps=2), cls(k_steps=4), cls(k_steps=4, wire_dtype="int8"), cls(k_steps=8), cls(k_steps=16)]

    def notes(self) -> list[str]:
        return notes_of(self)

    def label(self) -> str:
        return super().label() + form_of(self)

    def wire_cost(self, shapes: Sequence[Shape], link: Link) -> Cost:
        return round_cost(self, shapes, link)

    def updates_per_exchange(self) -> int:
        return self.k_steps

    def steady(self, updates_per_exchange: int = 1) -> Self:
        overlap = min(self.overlap_steps, updates_per_exchange - 1)
        return replace(self, k_steps=updates_per_exchange, begin_step=1, overlap_steps=overlap, fragments=1)

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"k_steps": 1}
