"""Recompute on two ranks: the same bits as without it, and the same collectives; no rank is asked twice, none waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.recompute_nets import NETS, WIDTH, Chain, ConvNet, Inner, Net, Norm, call_three_times
from tests.helpers.recompute_runs import Trace, assert_ran_again, assert_same, distribute, rows, seed, train

SYNC = {"sync_batch_norm": True}
BF16 = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
FP16 = {"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 256.0}}
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "merged": 2}


class Branching(nn.Module):
    """The unit `branch` is used by rank 0 alone, with a buffer and random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = Norm(), Norm(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.branch(x) if fleet.worker_index() == 0 else x)


MORE: dict[str, Net] = {
    "branching": Net(Branching, ("first", "branch")),
    "norm layers themselves": Net(ConvNet, ("blocks.0.norm", "blocks.1.mean_norm", "head")),
    "a norm called three times": Net(lambda: Chain(Norm(), call_three_times), ("unit",)),
    "everything": Net(lambda: Chain(nn.Sequential(Norm(), Inner(), Norm())), ("unit",)),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("torch transformer", {}),
    "encoder and decoder": ("encoder and decoder", {}),
    "python and numpy": ("python and numpy", {}),
    "norms apart": ("convolutions", {}),
    "norms joined": ("convolutions", SYNC),
    "norms joined in a u-net": ("u-net", SYNC),
    "norms joined, merged": ("convolutions", SYNC | MERGED),
    "norms joined, bfloat16": ("u-net", SYNC | BF16),
    "norms joined, float16": ("convolutions", SYNC | FP16),
    "norms joined, three calls": ("a norm called three times", SYNC),
    "norms joined, two in a unit": ("everything", SYNC),
    "norms joined, units themselves": ("norm layers themselves", SYNC),
    "unused on one rank": ("branching", {"find_unused_parameters": True}),
    "lars": ("convolutions", {"lars": True, "lars_configs": {"lars_coeff": 0.1}} | SYNC),
    "dgc": ("encoder and decoder", {"dgc": True, "dgc_configs": {"rampup_begin_step": 2, "sparsity": [0.9], "min_numel": 64}}),
    "localsgd": ("convolutions", {"localsgd": True, "localsgd_configs": {"k_steps": 2}}),
    "localsgd, merged, bfloat16": ("u-net", {"localsgd": True, "localsgd_configs": {"k_steps": 2}} | MERGED | BF16),
}


def _plain(trace: Trace) -> Trace:
    """Arrays travel between processes as bytes; tensors would each take a file descriptor."""
    for step in (*trace.gradients, *trace.states):
        step.update({name: value.numpy() for name, value in step.items()})  # type: ignore[misc]
    trace.losses = [float(loss) for loss in trace.losses]  # type: ignore[misc]
    return trace


def _with_and_without(rank: int, name: str, settings: dict[str, Any]) -> tuple[Trace, Trace]:
    net = (NETS | MORE)[name]
    return tuple(_plain(train(net, recompute, rank=rank, size=2, **settings)) for recompute in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_end_with_the_bits_and_the_collectives_of_training_without(case: str) -> None:
    name, settings = CASES[case]
    for ours, without in run_ranks(_with_and_without, 2, name, settings):
        for step in (*ours.gradients, *ours.states, *without.gradients, *without.states):
            step.update({key: torch.as_tensor(np.asarray(value)) for key, value in step.items()})
        assert_same(ours, without)
        if name != "norm layers themselves":  # of single layers no runs are counted
            assert_ran_again(ours, without)
        assert sum(ours.bytes_sent) > 0 and ours.collectives


def _joined_norm(rank: int, recompute: bool) -> tuple[list[float], int]:
    """BatchNorm over both ranks' rows, written down: one of two rows here, one of three there."""
    seed()
    net = Chain(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh()), lambda unit, x: unit(x))
    model, optimizer = distribute(net, ["unit"] if recompute else None, **SYNC)
    x, y = rows(rank, 2 + rank)
    optimizer.minimize(F.cross_entropy(model(x), y), weight=len(x))
    norm = model.unit[0]
    return [*norm.running_mean.tolist(), *norm.running_var.tolist()], int(norm.num_batches_tracked)


def test_a_joined_norm_computed_again_has_the_statistics_of_all_rows_counted_once() -> None:
    seed()
    model = Chain(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh()))
    hidden = torch.tanh(model.first(torch.cat([rows(0, 2)[0], rows(1, 3)[0]]))).detach()
    expected = [*(0.1 * hidden.mean(0)).tolist(), *(0.9 + 0.1 * hidden.var(0)).tolist()]
    for found, batches in run_ranks(_joined_norm, 2, True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
        assert batches == 1
    assert run_ranks(_joined_norm, 2, True) == run_ranks(_joined_norm, 2, False)


def _two_backwards(rank: int, recompute: bool) -> Any:
    seed()
    model, optimizer = distribute(Chain(nn.Sequential(Norm(), Inner())), ["unit"] if recompute else None, **SYNC)

    def loop() -> None:
        for step in range(3):
            x, y = rows(2 * step + rank)
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    said = raised(loop)
    return said, optimizer.pipeline.comm.bytes_sent, model.unit[0].enter.weight.detach().numpy().tobytes()


def test_two_backwards_of_one_forward_meet_the_same_collectives() -> None:
    assert run_ranks(_two_backwards, 2, True) == run_ranks(_two_backwards, 2, False)


def _refused(rank: int) -> str:
    return raised(lambda: distribute(ConvNet(), ["blocks.7"]))


def test_a_wrong_name_is_refused_on_every_rank() -> None:
    said = run_ranks(_refused, 2)
    assert said[0] == said[1] and said[0].startswith("ConfigError: recompute_configs") and "`blocks.7`" in said[0]
