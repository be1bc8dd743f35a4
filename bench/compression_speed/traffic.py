"""What one rank sends in an update of the MLP of bench/compression_speed, by ranks: why DGC stops paying, and PowerSGD not."""

from __future__ import annotations

from bench.lib.mlp import USUAL, Size
from fleetx.dist import predicted_cost
from fleetx.reduce.dgc import entries_sent


def among(ranks: int) -> predicted_cost.Link:
    return predicted_cost.Link(ranks, bytes_per_s=1.0)


def dense_bytes(ranks: int, item_bytes: int = predicted_cost.FLOAT32_BYTES, size: Size = USUAL) -> float:
    return predicted_cost.dense(size.weights + size.biases, among(ranks), item_bytes=item_bytes).bytes_sent


def dgc_bytes(ranks: int, sparsity: float = 0.999, size: Size = USUAL) -> float:
    """Biases are too small to be worth it, and travel dense."""
    chosen = size.layers * entries_sent(size.width**2, sparsity) * predicted_cost.ENTRY_BYTES
    return predicted_cost.all_gather(chosen, among(ranks)).bytes_sent + predicted_cost.dense(size.biases, among(ranks)).bytes_sent


def powersgd_bytes(ranks: int, rank: int = 4, size: Size = USUAL) -> float:
    matrices = [(size.width, size.width)] * size.layers
    return predicted_cost.low_rank(matrices, among(ranks), rank=rank, dense_numel=size.biases).bytes_sent
