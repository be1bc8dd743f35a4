"""REDUCE under Local SGD: dense until the averaging has begun, afterwards nothing: each rank keeps its own gradients."""

from __future__ import annotations

from typing import final

from ..dist.comm import Comm, Pending
from ..engine.bucket import Bucket
from ..engine.dense import DenseAllReduce, KeepsNothing
from ..engine.slots import Step
from .engine import Averaging


@final
class DenseAtFirst(KeepsNothing):
    carries_tail = True

    def __init__(self, comm: Comm, averaging: Averaging) -> None:
        self._dense, self._averaging = DenseAllReduce(comm), averaging

    def is_local(self) -> bool:
        return self._averaging.begun

    def start(self, bucket: Bucket, step: Step) -> Pending:
        return Pending(None) if self.is_local() else self._dense.start(bucket, step)
