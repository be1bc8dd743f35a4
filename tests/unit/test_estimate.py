"""Memory estimated on tensors without data: what a real step has in use, to the byte where no kernel differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fleetx.applications import Bert_large, Resnet20
from fleetx.auto.estimate import PlanMemory, _peak, estimated, state_share, with_fakes, without_data
from fleetx.cli.main import main
from fleetx.errors import ConfigError
from fleetx.recompute.batches import rows_of
from fleetx.recompute.memory_probe import Counter

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "bert_memory.json"


class Net(nn.Module):
    """Embeds tokens and selects those with a label, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.head = nn.Linear(32, 11)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden, labels = self.words(batch[0]), batch[1].flatten()
        for block in self.blocks:
            hidden = hidden + block(hidden)
        wanted = (labels >= 0).nonzero().flatten()
        return F.cross_entropy(self.head(hidden.flatten(0, 1)[wanted]), labels[wanted])


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.arange(rows * 16).reshape(rows, 16) % 11
    return words, words.masked_fill(words > 3, -1)


def in_use(model: Net, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Bytes in use at the peak of a real step, beyond weights, gradients and the batch."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    counter = Counter()
    counter.add_known([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
    held = counter.now
    with counter:
        model.loss(batch).backward()
    return counter.peak - held


@pytest.mark.parametrize("rows", [4, 64])
def test_a_step_without_data_has_the_bytes_of_a_real_one(rows: int) -> None:
    real, model, fakes = Net(), Net(), FakeTensorMode(allow_non_fake_inputs=True)
    with_fakes(model, fakes)
    assert _peak(model, tokens(rows), lambda net, batch: net.loss(batch), fakes, {}, amp=False) == in_use(real, tokens(rows))


def test_weights_gradients_and_state_are_counted() -> None:
    net = Net()
    net.words.weight.requires_grad_(False)
    count = sum(p.numel() for p in net.parameters())
    found = estimated(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad]), tokens(8))
    assert (found.parameters, found.weights) == (count, 4 * count)
    assert (found.gradients, found.state) == (4 * (count - 11 * 32), 8 * (count - 11 * 32)) and found.rows == 8


def test_16_bits_and_blocks_computed_again_need_less() -> None:
    found = estimated(Net(), torch.optim.SGD(Net().parameters(), lr=0.1), tokens(8))
    plain, amp, again, both = found.plans
    assert [one.name for one in found.plans] == ["float32", "amp", "recompute", "amp + recompute"] and not found.notes
    assert both.bytes_per_row < min(amp.bytes_per_row, again.bytes_per_row) < plain.bytes_per_row


@pytest.mark.parametrize(
    ("optimizer", "share"),
    [
        (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), 0.0),
        (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9), 1.0),
        (torch.optim.AdamW([nn.Parameter(torch.ones(2))]), 2.0),
        (torch.optim.Adam([nn.Parameter(torch.ones(2))], amsgrad=True), 3.0),
    ],
)
def test_the_state_is_that_of_an_update(optimizer: torch.optim.Optimizer, share: float) -> None:
    assert state_share(optimizer) == share


def test_the_most_rows_lie_on_the_line() -> None:
    plan = PlanMemory("amp", 100.0, 7.0)
    assert (plan.at(3), plan.most_rows(121), plan.most_rows(120), plan.most_rows(50)) == (121, 3, 2, 0)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        out = self.linear(batch).sum()
        return out if out.item() > 0 else -out


def test_a_model_that_reads_numbers_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"cannot be run on tensors without data.* leave --estimate out"):
        estimated(Reads(), torch.optim.SGD(Reads().parameters(), lr=0.1), torch.ones(4, 4))


def test_the_command_prints_a_table_and_refuses_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--estimate", "Resnet20", "--batch", "16", "--memory", "1GB"]) == 0
    out, count = capsys.readouterr().out, sum(p.numel() for p in Resnet20().parameters())
    assert out.startswith(f"Resnet20: {count:,} parameters. Kept whatever the batch: weights 1.03 MiB, gradients 1.03 MiB")
    assert "memory at 16 rows" in out and "most rows in 953.67 MiB" in out and "amp + recompute" in out
    assert main(["plan", "--estimate", "Resnet20", "--trials", "3"]) == 2
    assert "--trials is for a plan that is measured" in capsys.readouterr().err


@pytest.mark.campaign
def test_bert_large_is_estimated_as_it_was_measured_on_a_gpu() -> None:
    """Within a sixth, of what a sentence of 512 tokens adds; and of what is there without any."""
    cells = json.loads(MEASURED.read_text())["cells"]
    with without_data():
        model = Bert_large()
    words = torch.arange(4 * 512).reshape(4, 512) % 1000
    labels = words.masked_fill(torch.rand(4, 512, generator=torch.Generator().manual_seed(0)) > 0.15, -100)
    batch = rows_of({"input_ids": words, "labels": labels, "next_sentence_label": torch.zeros(4, dtype=torch.long)}, 4)
    found = estimated(model, torch.optim.AdamW(model.parameters()), batch)
    for plan, cell in zip(found.plans, ("ours-fp32", "ours-bf16", "ours-fp32_recompute", "ours-bf16_recompute"), strict=True):
        assert plan.bytes_per_row == pytest.approx(cells[cell]["bytes_per_sentence"], rel=1 / 6), plan.name
        assert found.kept + plan.bytes_of_no_row == pytest.approx(cells[cell]["bytes_of_no_sentence"], rel=1 / 6), plan.name
