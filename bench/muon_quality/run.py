"""Whether Muon reaches a lower loss than AdamW in equally many steps: a small byte-level GPT on Python's own sources, on a CPU.

    python -m bench.muon_quality.run               some three minutes on a core
    python -m bench.muon_quality.run --smoke       a few steps, nothing is kept

Both optimizers get the same trials: each learning rate of RATES once, with one seed; the best one three times, with seeds that
were in no trial. Warm-up and decay are equal. Figures are losses on held-out text after the same number of steps, in nats
for each byte. It is a small model on one machine: it shows that the optimizer works, and nothing of large ones.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.results import publish
from fleetx import fleet
from fleetx.optim import schedules

WIDTH, LAYERS, HEADS, CONTEXT = 96, 3, 4, 48
RATES = {kind: (0.002, 0.004, 0.008, 0.016) for kind in ("adamw", "muon")}
BATCHES = (16,)
STEPS = {16: 200}
SEEDS, TRIAL_SEED = (1, 2, 3), 0
TEXT_BYTES, HELD_OUT = 4_000_000, 400_000
DECAY, BETAS = 0.1, (0.9, 0.95)


def text() -> Tensor:
    """Read the top folder of Python's library, file after file in the order of names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    read = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:TEXT_BYTES]
    return torch.frombuffer(bytearray(read), dtype=torch.uint8).long()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.lm_head(self.norm(x))
        return found


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def windows_of(data: Tensor, starts: Tensor) -> Tensor:
    return data[starts[:, None] + torch.arange(CONTEXT + 1)]


def train(kind: str, rate: float, *, batch: int, steps: int, seed: int, data: Tensor) -> dict[str, float]:
    """Train one model; the data that a seed draws is the same for both optimizers."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(1000 + seed)
    model: nn.Module = GPT()
    given = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)
    strategy = fleet.DistributedStrategy(clip_norm=True, desync_check_steps=0)
    if kind == "muon":
        strategy.muon, strategy.muon_configs = True, {"muon_weight_decay": DECAY}
    with contextlib.redirect_stdout(None):
        model, optimizer = fleet.distribute(model, given, strategy)
    schedule = schedules.Polynomial(optimizer, total_steps=steps, warmup_steps=steps // 10)
    training, begin = data[:-HELD_OUT], time.perf_counter()
    for _ in range(steps):
        starts = torch.randint(len(training) - CONTEXT - 1, (batch,), generator=draw)
        optimizer.minimize(loss_of(model, windows_of(training, starts)))
        schedule.step()
    seconds = time.perf_counter() - begin
    return {"loss": held_out_loss(model, data[-HELD_OUT:]), "seconds": round(seconds, 2)}


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Tensor) -> float:
    starts = torch.arange(0, len(data) - CONTEXT - 1, 4 * CONTEXT)
    parts = [loss_of(model, windows_of(data, some)).item() * len(some) for some in starts.split(256)]
    return round(sum(parts) / len(starts), 4)


def compare(batch: int, steps: int, data: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": steps}
    for kind, rates in RATES.items():
        trials = {rate: train(kind, rate, batch=batch, steps=steps, seed=TRIAL_SEED, data=data) for rate in rates}
        best = min(trials, key=lambda rate: trials[rate]["loss"])
        runs = [train(kind, best, batch=batch, steps=steps, seed=seed, data=data) for seed in SEEDS]
        losses = [run["loss"] for run in runs]
        found[kind] = {"trials": trials, "rate": best, "runs": runs, "mean_loss": round(statistics.mean(losses), 4)}
        print(f"batch {batch}, {kind}: rate {best:g}, losses {losses}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps of each; nothing is kept")
    smoke = parser.parse_args().smoke
    fleet.init()
    data = text()
    steps = {batch: 4 if smoke else count for batch, count in STEPS.items()}
    figures = {str(batch): compare(batch, steps[batch], data) for batch in BATCHES}
    if not smoke:
        publish("muon_quality", {"model": f"GPT {LAYERS}x{WIDTH}, {CONTEXT} bytes", "batches": figures})


if __name__ == "__main__":
    main()
