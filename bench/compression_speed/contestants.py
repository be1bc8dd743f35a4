"""The trainings that bench/compression_speed compares: one MLP (bench/lib/mlp.py), SGD with momentum in all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from bench.compression_speed.traffic import powersgd_bytes
from bench.lib.mlp import NEVER, Contestant, Size, ddp, mlp, our_step, plain_step, sent_by_all_reduce
from fleetx import fleet

ALONE, DDP, DENSE, BF16 = "no communication", "torch DDP", "dense (ours)", "bf16_allreduce"
DGC, POWERSGD = "dgc, 99.9 % kept back", "powersgd, rank 4"
EIGHT, FOUR = "quantized_allreduce, 8 bits", "quantized_allreduce, 4 bits"
"""In turns of bench/bytes."""
TORCH_FP16, TORCH_POWERSGD = "torch fp16_compress_hook", "torch powerSGD_hook, rank 4"
TORCH_ONE_BUCKET = f"{TORCH_POWERSGD}, one bucket"
IN_TURNS = (ALONE, DDP, DENSE, BF16, DGC, POWERSGD, TORCH_FP16, TORCH_ONE_BUCKET)
MOMENTUM, SPARSITY, RANK = 0.9, 0.999, 4
DENSE_UPDATES, DENSE_WARM_STEPS, WARM_STEPS = 2, 2, 5
"""The last is above the first: whatever is timed is compressed. torch's hook refuses to begin before its third update."""
SLOW_STEPS, FAST_STEPS = 2, 8
"""Of a block: at 100 Mbit/s a dense step is 4 seconds, and one that sends little a tenth of one."""
ONE_BUCKET_MB = 1024
QUANTISED_MB = 8
"""A message then has the bytes of a float32 one of 32 MB, and the first leaves earlier in backward."""

STRATEGIES: dict[str, tuple[dict[str, Any], int]] = {
    ALONE: ({"localsgd": True, "localsgd_configs": {"k_steps": NEVER}}, FAST_STEPS),
    DENSE: ({}, SLOW_STEPS),
    BF16: ({"bf16_allreduce": True}, SLOW_STEPS),
    DGC: ({"dgc": True, "dgc_configs": {"rampup_begin_step": DENSE_UPDATES, "sparsity": [SPARSITY]}}, FAST_STEPS),
    POWERSGD: ({"powersgd": True, "powersgd_configs": {"rank": RANK, "begin_step": DENSE_UPDATES}}, FAST_STEPS),
    EIGHT: ({"quantized_allreduce": {"bits": 8}, "fuse_grad_size_in_MB": QUANTISED_MB}, SLOW_STEPS),
    FOUR: ({"quantized_allreduce": {"bits": 4}, "fuse_grad_size_in_MB": QUANTISED_MB}, SLOW_STEPS),
}
COMPRESSED = (DGC, POWERSGD)


def ours(name: str, size: Size) -> Contestant:
    strategy, block_steps = STRATEGIES[name]
    warm = WARM_STEPS if name in COMPRESSED else DENSE_WARM_STEPS
    return Contestant(name, our_step(strategy, size, momentum=MOMENTUM), block_steps, 1, 0, warm)


def torch_fp16(size: Size) -> Contestant:
    model = DistributedDataParallel(mlp(size))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    sent = sent_by_all_reduce(size.weights + size.biases, 2)
    return Contestant(TORCH_FP16, plain_step(model, size, momentum=MOMENTUM), SLOW_STEPS, 1, sent, DENSE_WARM_STEPS)


def torch_low_rank(name: str, size: Size) -> Contestant:
    """On gloo the collectives of two buckets overtake each other, and the job dies; with all gradients in one it runs."""
    model = DistributedDataParallel(mlp(size), bucket_cap_mb=ONE_BUCKET_MB if name == TORCH_ONE_BUCKET else None)
    state = torch_powersgd.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=DENSE_UPDATES)
    model.register_comm_hook(state, torch_powersgd.powerSGD_hook)
    sent = round(powersgd_bytes(fleet.worker_num(), RANK, size))
    return Contestant(name, plain_step(model, size, momentum=MOMENTUM), FAST_STEPS, 1, sent, WARM_STEPS)


def contestant(name: str, size: Size) -> Contestant:
    peers: Mapping[str, Callable[[], Contestant]] = {
        DDP: lambda: ddp(block_steps=SLOW_STEPS, size=size, momentum=MOMENTUM),
        TORCH_FP16: lambda: torch_fp16(size),
        TORCH_POWERSGD: lambda: torch_low_rank(name, size),
        TORCH_ONE_BUCKET: lambda: torch_low_rank(name, size),
    }
    return peers[name]() if name in peers else ours(name, size)
