"""Dense all-reduce: the mean over ranks in the gradients' own type, where no part fills REDUCE."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ..dist.comm import Comm, Pending
from .bucket import Bucket
from .slots import Kept, Step

if TYPE_CHECKING:
    from .buckets import Buckets


class KeepsNothing(abc.ABC):
    """What all reducers share that send whole gradients."""

    is_linear = True
    is_plain_sum = False
    wire_dtype: torch.dtype | None = None

    def is_local(self) -> bool:
        return False

    def leave_shares(self) -> bool:
        return False

    def attach(self, buckets: Buckets) -> None:
        return None

    @abc.abstractmethod
    def start(self, bucket: Bucket, step: Step) -> Pending: ...

    def refuse_again(self) -> None:
        return None

    def keeps_state(self) -> bool:
        return False

    def used(self, used: list[bool] | None) -> list[bool] | None:
        return used

    def kept(self) -> Kept | None:
        return None

    def nonfinite(self) -> Tensor | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state_dict(self, state: Mapping[str, Any], index: int) -> None:
        return None

    def forget(self) -> None:
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


class ReducedInBackward(KeepsNothing):
    """Base of REDUCE where a wrapper of the model does it inside backward (DDP, FSDP2): it starts nothing."""

    carries_tail = False  # what the wrapper sends has no room for it
    allows_unused: bool

    def start(self, bucket: Bucket, step: Step) -> Pending:
        return Pending(None)

    @abc.abstractmethod
    def after_backward(self) -> None:
        """Count what was sent in the micro-step that is over."""

    @abc.abstractmethod
    def require_done(self, missing: Sequence[str]) -> None:
        """Raise before an update if a rank would go on with gradients of its own. `missing`: names of those that did not come."""

    @abc.abstractmethod
    def compare(self, buckets: Buckets) -> None:
        """Look, where every rank is, at what was reduced."""

    @abc.abstractmethod
    def give_up(self) -> None:
        """Leave the wrapper as it was: the pair has ended."""


@final
class DenseAllReduce(KeepsNothing):
    """Sum in place; buckets come pre-divided, so the sum is the mean. Starts as soon as a bucket is complete."""

    carries_tail = True
    is_plain_sum = True

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def start(self, bucket: Bucket, step: Step) -> Pending:
        return self.comm.all_reduce(bucket.wire)
