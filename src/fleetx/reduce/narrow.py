"""All-reduce in 16 bits on the wire, for `fp16_allreduce` and `bf16_allreduce`."""

from __future__ import annotations

from typing import final

import torch

from ..dist.comm import Comm, Pending
from ..engine.bucket import Bucket
from ..engine.dense_reduce import KeepsNothing
from ..engine.slots import Step


@final
class NarrowAllReduce(KeepsNothing):
    """Half the bytes: cast the pre-divided gradients, sum, cast back. Float64 gradients are narrowed too."""

    is_plain_sum = True
    carries_tail = False  # a running variance or a byte of a counter must not pass through 16 bits

    def __init__(self, comm: Comm, wire_dtype: torch.dtype) -> None:
        self.comm, self.wire_dtype = comm, wire_dtype

    def start(self, bucket: Bucket, step: Step) -> Pending:
        narrow = bucket.flat.to(self.wire_dtype)

        def widen() -> None:
            bucket.flat.copy_(narrow)

        return self.comm.all_reduce(narrow).then(widen)
