"""Compiled models: one graph with every part of a strategy, however and whenever they were compiled, and uncompiled numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.applications import Bert_base
from fleetx.errors import FleetWarning
from tests.helpers.compiled_runs import Blocks, Seen, batches, loss_by_method, loss_of_call, train

pytestmark = [
    pytest.mark.usefixtures("alone", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch's own, while it compiles
]
BFLOAT16 = {"dtype": "bfloat16"}
PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "amp": {"amp": BFLOAT16},
    "amp with a black list": {"amp": BFLOAT16 | {"custom_black_list": ["LayerNorm", "head"]}},
    "lars": {"lars": True},
    "lamb": {"lamb": True, "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0)},
    "muon": {"muon": True, "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01)},
    "gradient_merge": {"gradient_merge": {"k_steps": 2}},
    "localsgd": {"localsgd": {"k_steps": 2}},
    "adaptive_localsgd": {"adaptive_localsgd": {"init_k_steps": 2}},
    "dgc": {"dgc": {"rampup_begin_step": 2, "sparsity": [0.5], "min_numel": 64}},
    "powersgd": {"powersgd": {"begin_step": 2, "rank": 2, "min_compression": 1.0}},
    "quantized_allreduce": {"quantized_allreduce": {"bits": 4, "block": 16}},
    "fp16_allreduce": {"fp16_allreduce": True},
    "bf16_allreduce": {"bf16_allreduce": True},
    "amp float16": {"amp": {"dtype": "float16"}},
    "clip_norm": {"clip_norm": True},
    "sharding": {"sharding": True},
    "recompute": {"recompute": True},
    "amp and recompute": {"amp": BFLOAT16, "recompute": True},
}


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def wrapped(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def by_block(model: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model  # type: ignore[no-any-return]


def assert_alike(compiled: Seen, plain: Seen) -> None:
    """aot_eager runs torch's kernels on decomposed operations, whose sums may be of another order: some roundings apart. In
    bfloat16 (8 bits) one of them moves a gradient by 2**-9, and four updates of lr 0.1 by less than a hundredth."""
    torch.testing.assert_close(compiled.losses, plain.losses, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(compiled.weights, plain.weights, rtol=0, atol=1e-2)


@pytest.mark.parametrize("parts", PARTS)
def test_a_model_compiled_in_place_is_one_graph_with(parts: str) -> None:
    seen = train(Blocks, before=in_place, **PARTS[parts])
    assert (seen.graphs, seen.breaks) == (1, {})
    assert_alike(seen, train(Blocks, **PARTS[parts]))


ORDERS: dict[str, tuple[dict[str, Any], int]] = {
    "torch.compile(model) before": ({"before": wrapped, "loss": loss_of_call}, 1),
    "torch.compile(model) after": ({"after": wrapped, "loss": loss_of_call}, 1),
    "model.compile() after": ({"after": in_place}, 1),
    "block.compile() before": ({"before": by_block}, 1),
    "block.compile() after": ({"after": by_block}, 1),
}


@pytest.mark.parametrize("order", ORDERS)
def test_amp_and_recompute_are_in_the_graph_whenever_it_is_compiled(order: str) -> None:
    how, graphs = ORDERS[order]
    seen = train(Blocks, **how, **PARTS["amp and recompute"])
    assert (seen.graphs, seen.breaks) == (graphs, {})
    assert_alike(seen, train(Blocks, **PARTS["amp and recompute"]))


def test_a_monitor_breaks_no_graph(tmp_path: Path) -> None:
    with fleet.Monitor(tmp_path / "run", show=False, tensorboard=False):
        seen = train(Blocks, before=in_place, amp=BFLOAT16)
    assert (seen.graphs, seen.breaks) == (1, {})


def bert() -> nn.Module:
    torch.manual_seed(0)
    return Bert_base(hidden=32, layers=3, heads=2, vocab_size=100)


def bert_loss(model: nn.Module, _: Any) -> Tensor:
    tokens, places = torch.arange(16).view(2, 8), torch.tensor([1, 9, 12])
    batch = {"input_ids": tokens, "mlm_positions": places, "mlm_labels": places + 2, "next_sentence_label": torch.tensor([0, 1])}
    return model.loss(batch)  # type: ignore[operator, no-any-return]


def test_our_bert_is_one_graph() -> None:
    seen = train(bert, before=in_place, loss=bert_loss, amp=BFLOAT16, recompute=True)
    assert (seen.graphs, seen.breaks) == (1, {})
    assert_alike(seen, train(bert, loss=bert_loss, amp=BFLOAT16, recompute=True))


class Normed(nn.Module):
    """A running mean, which computing again must not move twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unit = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.unit(x))  # type: ignore[no-any-return]


def test_buffers_in_a_graph_count_each_batch_once() -> None:
    recompute = {"recompute": {"checkpoints": ["unit"]}, "loss": loss_of_call}
    seen, plain = train(Normed, before=in_place, **recompute), train(Normed, loss=loss_of_call)
    assert (seen.graphs, seen.breaks) == (1, {})
    torch.testing.assert_close(seen.weights, plain.weights, rtol=1e-5, atol=1e-6)  # float32, four updates


class Stretch(nn.Module):
    """Its head is computed in float32 on purpose, by a module that is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.kinds: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.head(hidden.float())
        self.kinds += [hidden.dtype, out.dtype]
        return out


def test_a_compiled_part_keeps_to_the_models_own_float32() -> None:
    model = Stretch()
    model.head.compile(backend="aot_eager")
    with warnings.catch_warnings(action="ignore", category=FleetWarning):
        model, optimizer = fleet.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(amp=BFLOAT16)
        )
    for x, _ in batches(2):
        optimizer.minimize(model(x).square().mean())
    assert model.kinds == [torch.bfloat16, torch.float32] * 2
    assert model.head(batches(1)[0][0]).dtype == torch.float32  # by itself: autocast, and float32 outputs


def _told(make: Callable[[], nn.Module], **how: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_loudly(make, **how)
    return [str(one.message) for one in caught if issubclass(one.category, FleetWarning)]


def train_loudly(make: Callable[[], nn.Module], *, before: Any, loss: Any, **strategy: Any) -> None:
    model = before(make())
    model, optimizer = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(**strategy), loss_fn=loss
    )
    for batch in batches(2):
        optimizer.minimize(loss(model, batch))


def test_a_method_that_goes_past_torch_compile_is_told_once() -> None:
    told = _told(Blocks, before=wrapped, loss=loss_by_method)
    assert len(told) == 1 and "runs uncompiled" in told[0] and "model.compile()" in told[0]
    assert _told(Blocks, before=wrapped, loss=loss_of_call) == []


def test_what_cuts_graphs_is_told_once_with_its_reason_and_price() -> None:
    told = _told(Normed, before=in_place, loss=loss_of_call, recompute={"checkpoints": ["unit"], "offload": True})
    assert len([text for text in told if "not into one graph" in text and "Name the modules" in text]) == 1
    assert _told(Normed, before=in_place, loss=loss_of_call, recompute={"checkpoints": ["unit"]}) == []
