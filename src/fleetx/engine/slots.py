"""The vocabulary of a step: slots, parts that claim them, stages that fill them. No behaviour lives here.

    build once        MODULE    recompute, sync_batch_norm, compile
                      SHARD     none | sharding: each rank makes its share of UPDATE, and has the state of that share alone
    per micro-batch   FORWARD   autocast                          -> loss
                      BACKWARD  plain | fp16 loss scaling         -> param.grad, accumulating
    every k-th        MERGE     how many micro-batches make one update
                      REDUCE    dense | 16-bit | quantised | powersgd | dgc | none
                      CLIP      none | global norm
                      UPDATE    any torch optimizer | lars | lamb | muon (MOMENTUM: a claim, no stage of its own)
                      AVERAGE   none | localsgd | adaptive_localsgd

Two parts that claim one slot are in conflict; nothing else is. That is the whole compatibility table.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from ..dist import predicted_cost
from ..errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

    from ..dist.comm import Comm, Pending
    from .bucket import Bucket
    from .buckets import Buckets
    from .dense_reduce import ReducedInBackward
    from .dry_run import Rehearsal


class Slot(enum.Enum):
    MODULE = "module"
    SHARD = "shard"
    FORWARD = "forward"
    BACKWARD = "backward"
    MERGE = "merge"
    REDUCE = "reduce"
    CLIP = "clip"
    MOMENTUM = "momentum"
    UPDATE = "update"
    AVERAGE = "average"


class Risk(enum.Enum):
    """How far a part may move the result from plain synchronous training."""

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"
    SCHEDULE = "schedule"


@dataclass(frozen=True, slots=True)
class Step:
    """One update. No stage counts by itself: the index is passed in, from 1, the same on every rank."""

    index: int
    lr: float | Tensor | None
    """Learning rate of the first group: a number, a tensor (reading it may wait for the device), or None where there is none."""
    share: float = 1.0
    """What this rank's gradient counts for in the mean."""
    bad_losses: float | Tensor = 0.0
    """Other than 0 where a loss of this rank's window is not finite. Such an update is not made: what was sent for it would be
    lost."""


@dataclass(frozen=True, slots=True)
class Site:
    """All that a part may see while it is built."""

    model: nn.Module
    optimizer: Optimizer
    params: Mapping[str, nn.Parameter]
    comm: Comm
    device: torch.device
    has_sample: bool = False
    """fleet.distribute(...) was given a batch, so that steps can be rehearsed."""
    local_buffers: Sequence[str] = ()
    """Names or patterns of buffers that belong to each rank."""
    parts: Sequence[Part] = ()
    """All parts of the strategy."""


class Backward(Protocol):
    """How a loss becomes gradients."""

    needs_loss: bool
    """A bare `loss.backward()` would go past this stage, and is refused."""
    checks_finite: bool
    """The reduced gradients decide whether the update happens."""

    def scale(self) -> float:
        """Factor on the loss; undone once, in the flat buffer, before anything is reduced."""

    def expects_overflow(self) -> bool:
        """Return whether gradients that are not finite are a matter of this stage's scale, which learns from them."""

    def settle(self, *, finite: bool) -> None:
        """Learn from an update boundary; called on every rank with the same answer (each rank with its own in Local SGD)."""

    def adopt_scale(self, smallest: float) -> None:
        """Go on with the smallest scale of the ranks, which trained alone and have met."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """What a compressor has done to an update's gradients."""

    density: float
    """Numbers on the wire, in those of a dense reduce."""
    residual_norm: Callable[[], float | None]
    """Returns the norm of all that this rank has not sent yet; None once a later update has changed it."""


class Reduce(Protocol):
    """How one bucket of true gradients becomes the same mean on all ranks."""

    is_linear: bool
    """Reducing what was reduced once more, with new gradients added, gives the same as reducing these alone and adding."""
    is_plain_sum: bool
    """Gradients are summed on the wire as they are, so that each share could as well be sent to the rank that updates it."""
    wire_dtype: torch.dtype | None
    """Type in which they travel then; None: their own."""
    carries_tail: bool
    """The last bucket's own collective also moves the tail (buffers, flags), in the bucket's own type."""

    def is_local(self) -> bool:
        """Return whether the coming update is made by each rank alone: nothing is reduced, and nothing may be decided
        together."""

    def leave_shares(self) -> bool:
        """Leave each rank the mean of its share of every bucket alone, from now on; return False where this stage cannot.

        Called before `attach`, and not where parameters may be unused: whether one gets a gradient is then known to none."""

    def attach(self, buckets: Buckets) -> None:
        """Prepare for these buckets; called once, before the first update."""

    def start(self, bucket: Bucket, step: Step) -> Pending: ...
    def refuse_again(self) -> None:
        """Raise if an update that was reduced cannot be added to and reduced once more."""

    def keeps_state(self) -> bool:
        """Return whether something of each parameter is kept from update to update, now or once it compresses."""

    def used(self, used: list[bool] | None) -> list[bool] | None:
        """Return which parameters have a gradient now, in bucket order; `used`: those that some rank used. None: all have."""

    def nonfinite(self) -> Tensor | None:
        """Return whether something was not finite in what was just reduced, on the device; None where the gradients tell."""

    def kept(self) -> Kept | None:
        """Return what the report of the update just reduced shows of this stage; None where all is sent."""

    def state_dict(self) -> dict[str, Any]: ...
    def check_state_dict(self, state: Mapping[str, Any], index: int) -> None: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def forget(self) -> None:
        """Clear what was kept: a state without it was loaded."""


class Shard(Protocol):
    """Divide the update between the ranks: each has the optimizer's state of its share, and updates that share for all."""

    rank: int
    """This rank's number among those that divide each bucket between them."""
    shares: int
    """How many these are."""
    frees: bool
    """Whether a rank keeps its share of the gradients alone."""
    scatters: bool
    """Whether each rank gets the mean of its share of the gradients alone; set by `reduce_by`."""
    merges_shares: bool
    """Whether gradients are reduced in every micro-step of a window, which then keeps this rank's shares alone."""
    holds_weights: bool
    """Whether this rank has its share of the weights alone, between two forwards."""

    def in_buckets(self, params: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        """Return what lies in the buckets in the place of the parameters."""

    def reduce_by(self, reduce: Reduce, *, may_miss: bool) -> Reduce:
        """Return the stage that brings each rank the mean of its share alone; or `reduce`, where that leaves the mean on all.

        `may_miss`: parameters may be unused."""

    def dress(self, view: Tensor) -> Tensor:
        """Return the same memory as `param.grad` shows it: where only a share of it holds the mean, reading it is refused."""

    def attach(self, buckets: Buckets, update: Optimizer, *, given: Optimizer) -> None:
        """Once, before the first update. `given`: what was given to fleet.distribute, in whose place `update` may be."""

    def measure_norms(self) -> Tensor:
        """Return the global norm of the gradients just reduced, and keep that of each tensor. Every rank is here."""

    def current_norm(self) -> Tensor:
        """Return that norm as it is after what the script has done to the gradients since; no rank is asked."""

    def not_finite(self) -> list[str]:
        """Return the names of the gradients whose norm was not finite, the same on all ranks."""

    def note_factor(self, factor: Tensor) -> None:
        """Note what clipping has multiplied all gradients by."""

    def cut_state(self) -> None:
        """Keep this rank's share of a whole state that was loaded into the optimizer."""

    def whole_state_dict(self) -> dict[str, Any]:
        """Gather the optimizer's state dict in torch's plain form, on the CPU. Every rank is here."""

    def parts_state_dict(self) -> dict[str, Any]:
        """Return that state dict with `Parts` in the place of what is divided; no shares travel. Every rank is here."""

    def own_state(self) -> AbstractContextManager[None]:
        """Let `state_dict()` of the optimizer give this rank's share, which it refuses otherwise."""

    collected: dict[str, Any] | None
    """The state dict of parts, while a checkpoint is taken; else None."""

    def let_go(self) -> None:
        """Keep no memory of gradients: the pair has ended."""

    def step(self, closure: Callable[[], Any] | None) -> None:
        """Make this rank's share of the update, then send it to the others and receive theirs. Every rank is here."""


class Clip(Protocol):
    def __call__(self, flats: Sequence[Tensor], norm: Tensor) -> Tensor:
        """Limit the gradients in place, given their global norm; what they were multiplied by."""


@dataclass(frozen=True, slots=True)
class News:
    """What a rank reports to the others at an averaging: of the update just over, and of earlier ones not reported yet."""

    loss: Tensor | None = None
    weight: float | None = None
    """Sum of the weights of this update's micro-batches; None where the run gives none."""
    scale: float = 1.0
    stops: int = 0
    failed_at: int = 0
    missing: int = 0
    flips: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    """Whether weights have changed by themselves, and a mark of what the last averaging has left; a call waits for the device."""


class Average(Protocol):
    needs_loss: bool
    """A bare `loss.backward()` is refused."""

    @property
    def period(self) -> int | None: ...

    keeps_ranks_equal: bool
    """Whether the last round has left the same weights on all of its ranks."""
    waits: dict[int, float] | None

    def attach(self, *, update: Optimizer, on_round: Callable[[list[Any]], None]) -> None: ...
    def meets(self, index: int) -> bool:
        """Return whether ranks may tell each other of themselves after the update with this index."""

    def __call__(self, step: Step, news: News) -> bool:
        """Act after every update, made or skipped, on every rank. Return whether a round among all ranks was settled."""

    def average_now(self, step: Step, news: News) -> None: ...
    def mean_shown(self, index: int) -> AbstractContextManager[None]: ...
    def refuse_inside(self) -> None:
        """Raise while the mean of all ranks is shown in place of a rank's own weights."""

    def check_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def forget(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Merge:
    """How many micro-batches make one update, and whether their gradients are averaged or summed."""

    micro_steps: int = 1
    mean: bool = True


@dataclass(slots=True)
class Stages:
    """What fills the slots of a step."""

    merge: Merge
    backward: Backward
    reduce: Reduce
    clip: Clip | None
    update: Optimizer
    average: Average | None
    shard: Shard | None = None
    in_backward: ReducedInBackward | None = None
    """REDUCE, where it is done inside backward by a wrapper of the model's."""

    def after_reduce(self) -> str | None:
        """Name the part that acts between the reduced gradients and the next forward, beside the update itself; None: none."""
        if self.merge.micro_steps > 1:
            return "gradient_merge"
        if self.clip is not None:
            return "clip_norm"
        if self.backward.checks_finite:
            return "amp"
        return None if self.average is None else "localsgd"


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What `auto` knows when it asks a part which of its settings are worth trying."""

    ranks: int
    """Ranks that train together, at least 2: one rank alone is planned without reducers."""
    device_type: str = "cpu"
    """Type of the ranks' device, as torch spells it."""
    shapes: Sequence[predicted_cost.Shape] = ()
    """Shapes of the gradients, the dimension that is outermost in memory first."""
    lacks_memory: bool = False
    """Whether a step of plain training, with nothing computed again, takes more memory than there is."""


@dataclass(frozen=True, kw_only=True)
class Part(abc.ABC):
    """Hold what a user asked for: one final subclass per file of `strategies/`, its fields the keys of `<name>_configs`."""

    name: ClassVar[str]
    risk_class: ClassVar[Risk]
    talks_in_backward: ClassVar[bool] = False
    """Whether it has collectives of its own inside backward; buckets are then reduced after it, never in between."""
    changes_forward: ClassVar[bool] = False
    """Whether it acts in the forward of the model without a claim to a slot of it."""
    inner: ClassVar[tuple[type[Optimizer], ...]] = ()
    """Optimizers whose place this part takes; empty: it works with any."""
    why: ClassVar[str] = ""
    """One sentence for a conflict message: why this part needs the slots it claims."""
    overlaps_backward: ClassVar[bool] = True
    """Whether its messages travel during backward, as those of plain training do; False: they begin after it."""
    hidden_part: ClassVar[float] = 1.0
    """Share of its messages that travels during backward, where they overlap it."""
    label_key: ClassVar[str] = ""
    """Key of the setting that tells candidates of this part apart in a plan ("dgc 0.999"; of a list its last); empty: the name
    says it all."""
    planning_note: ClassVar[str] = ""
    """One sentence for a plan that does not take this part, after its figures: why `auto` does not try it, or when it pays."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                its_keys = f"Its keys are: {', '.join(known)}." if known else "It has no keys."
                raise ConfigError(f"{cls.__name__} has no key {key!r}.{did_you_mean(key, known)} {its_keys}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            where = f'{self.name}_configs["{field.name}"]'
            value = field.metadata["kind"].check(where, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @abc.abstractmethod
    def claims(self) -> frozenset[Slot]: ...

    @property
    def divides_weights(self) -> bool:
        """Whether these settings leave each rank a share of the weights alone, between two forwards."""
        return False

    def check(self, site: Site) -> None:  # noqa: B027 - most parts fit every site
        """Refuse what this part cannot work with, before the model is touched. Every rank is here, with equal settings."""

    def place(self, site: Site) -> None:  # noqa: B027 - most parts leave the parameters as they are
        """Put other parameters in the place of the model's, in the optimizer's groups too, once all ranks hold the same weights;
        they are looked up again afterwards. Every rank is here."""

    @abc.abstractmethod
    def build(self, site: Site) -> Mapping[Slot, Any]:
        """Make the stages for the claimed slots. MODULE and FORWARD are applied to the model here and need no stage."""

    def rehearse(self, rehearsal: Rehearsal) -> None:  # noqa: B027 - most parts know all they need beforehand
        """Run steps of the sample that leave no trace, once the pair is ready to train, and settle what depends on them."""

    def notes(self) -> list[str]:
        """Return sentences for `strategy.explain()`: what these settings cost and gain, with the numbers filled in."""
        return []

    def cuts_graphs(self, *, by_user: bool) -> str | None:
        """Return a sentence where compiled code cannot hold what this part does in a forward: the reason, and what it costs. It
        is shown when a compiled model begins to train. `by_user`: the user has compiled it, and not `strategy.compile`."""
        return None

    def no_effect(self) -> str | None:
        """Return a sentence, with the line to write, where these settings leave training as it is without the part; else None.
        It is shown by `strategy.explain()` and, when training begins, by worker 0."""
        return None

    @classmethod
    def neutral(cls) -> dict[str, Any] | None:
        """Return the settings at which this part must equal plain synchronous training, if there are any."""
        return {}

    # --- What `auto` asks: pure functions of the settings -----------------------------------------------------------------

    @classmethod
    def candidates(cls, context: PlanContext) -> Sequence[Self]:
        """Settings worth trying, from the mildest to the strongest; none where `auto` is not to choose this part."""
        return ()

    def wire_cost(self, shapes: Sequence[predicted_cost.Shape], link: predicted_cost.Link) -> predicted_cost.Cost:
        """Predict bytes and seconds of one exchange of gradients of these shapes; by default those of plain training."""
        return predicted_cost.dense(predicted_cost.numel(shapes), link)

    def kept_bytes(self, *, state_bytes: int, ranks: int) -> int:
        """Predict the bytes of a rank that last from update to update beyond those of plain training, whose optimizer keeps
        `state_bytes`; below 0 where the part saves some. Others are measured."""
        return 0

    def updates_per_exchange(self) -> int:
        """Updates from one exchange to the next, at the start."""
        return 1

    def steady(self, updates_per_exchange: int = 1) -> Self:
        """Return these settings for updates that are only timed: without what is different at the start of a training, and with
        so many updates from one exchange to the next, where the part has such a period."""
        return self

    def label(self) -> str:
        """Name this part and its main setting, as the names of plans have them."""
        if not self.label_key:
            return self.name
        value = getattr(self, self.label_key)
        last = value[-1] if isinstance(value, list) else value
        return f"{self.name} {last:g}" if isinstance(last, int | float) else f"{self.name} {last}"


def conflicts(parts: Iterable[tuple[str, frozenset[Slot]]]) -> dict[Slot, list[str]]:
    """Return the slots claimed more than once, each with its claimants in the order given."""
    claimants: dict[Slot, list[str]] = {}
    for name, slots in parts:
        for slot in slots:
            claimants.setdefault(slot, []).append(name)
    return {slot: claimants[slot] for slot in Slot if len(claimants.get(slot, [])) > 1}
