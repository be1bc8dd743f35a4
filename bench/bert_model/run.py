"""Is `Bert_large` faster than transformers' `BertForPreTraining`? Whole training steps in turn, the median of paired ratios.

    python -m bench.bert_model.run            on a GPU: bfloat16 autocast, fused AdamW, 32 x 512 and 64 x 128 tokens
    python -m bench.bert_model.run --smoke    a tiny model on the CPU, to see that it runs

Both get the same tokens, without padding, and 15 % of them masked: ours by position, as our loaders make batches, transformers
one label per token, -100 elsewhere. Both start from the same weights. `speedup` is their time over ours, both in a bare loop;
`speedup_through_fleet` their time over that of `fleet.distribute(...)` with amp and `optimizer.minimize(model.loss(batch))`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.lib.results import publish
from fleetx import fleet
from fleetx.applications.bert import Bert_large

GOAL = 1.1
MASKED_SHARE = 0.15
BATCHES = 4
SHAPES = {"32x512": (32, 512), "64x128": (64, 128)}
TINY = {"hidden": 32, "layers": 2, "heads": 2, "vocab_size": 211}


def make_models(options: dict[str, int], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Ours and theirs, with the same weights."""
    import transformers

    torch.manual_seed(0)
    ours = Bert_large(**options).to(device).train()
    size = ours.config
    config = transformers.BertConfig(
        vocab_size=size.vocab_size, hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        intermediate_size=size.feed_forward, max_position_embeddings=size.max_position, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.BertForPreTraining(config).to(device).train()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def make_batches(
    vocabulary: int, rows: int, length: int, device: torch.device
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Random tokens: (ours, theirs) of the same content."""
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for _ in range(BATCHES):
        common = {
            "input_ids": torch.randint(5, vocabulary, (rows, length), generator=generator),
            "token_type_ids": (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous(),
            "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
        }
        masked = torch.randperm(rows * length, generator=generator)[: max(1, int(MASKED_SHARE * rows * length))].sort().values
        words = torch.randint(5, vocabulary, (len(masked),), generator=generator)
        labels = torch.full((rows * length,), -100).index_put((masked,), words).view(rows, length)
        ours, theirs = common | {"mlm_positions": masked, "mlm_labels": words}, common | {"labels": labels}
        pairs.append(tuple({name: value.to(device) for name, value in batch.items()} for batch in (ours, theirs)))
    return pairs  # type: ignore[return-value]


def stepper(model: nn.Module, batches: list[dict[str, Tensor]], device: torch.device) -> Callable[[], Tensor]:
    """One whole training step for each call: forward, backward, update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    count = 0

    def step() -> Tensor:
        nonlocal count
        batch, count = batches[count % len(batches)], count + 1
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fleet_stepper(model: nn.Module, batches: list[dict[str, Tensor]], device: torch.device) -> Callable[[], Tensor]:
    """The same step through `fleet.distribute` with amp: what a user of this library runs, its guards included."""
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        model, optimizer = fleet.distribute(model, optimizer, strategy)
    turns = itertools.cycle(batches)

    def step() -> Tensor:
        loss: Tensor = model.loss(next(turns))  # type: ignore[operator]
        optimizer.minimize(loss)
        return loss.detach()

    return step


def seconds(step: Callable[[], Tensor], steps: int, device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - start) / steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_mebibytes(step: Callable[[], Tensor], device: torch.device) -> float | None:
    """Above what lies there already, the two models and their optimizers."""
    if device.type != "cuda":
        return None
    wait(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    wait(device)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def compare(ours: nn.Module, theirs: nn.Module, shape: tuple[int, int], args: argparse.Namespace) -> dict[str, Any]:
    """Blocks in turn, the order swapped each time, so that drift of a shared machine falls on both."""
    pairs = make_batches(ours.config.vocab_size, *shape, args.device)  # type: ignore[union-attr, arg-type]
    our_step = stepper(ours, [mine for mine, _ in pairs], args.device)
    their_step = stepper(theirs, [other for _, other in pairs], args.device)
    fleet_step = fleet_stepper(copy.deepcopy(ours), [mine for mine, _ in pairs], args.device)
    first_losses = round(our_step().item(), 3), round(their_step().item(), 3)
    for step in (our_step, their_step, fleet_step):
        seconds(step, args.warmup, args.device)
    memory = peak_mebibytes(our_step, args.device), peak_mebibytes(their_step, args.device)
    steps = {"ours": our_step, "transformers": their_step, "fleet": fleet_step}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for block in range(args.blocks):
        for name in sorted(steps, reverse=bool(block % 2)):
            times[name].append(seconds(steps[name], args.steps, args.device))

    def ratios(name: str) -> list[float]:
        return [other / mine for mine, other in zip(times[name], times["transformers"], strict=True)]

    return {
        "speedup": round(statistics.median(ratios("ours")), 4),
        "speedup_quartiles": [round(q, 4) for q in statistics.quantiles(ratios("ours"), n=4)[::2]],
        "speedup_through_fleet": round(statistics.median(ratios("fleet")), 4),
        **{f"{name}_ms": round(statistics.median(taken) * 1e3, 3) for name, taken in times.items()},
        "ours_step_mib": memory[0],
        "transformers_step_mib": memory[1],
        "first_loss": first_losses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU; nothing is kept")
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=6, help="steps in a block")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--name", default="bert_model", help="name of the results file")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU here; --smoke runs a tiny model on the CPU")
    args.device = torch.device("cpu" if args.smoke else "cuda")
    if args.smoke:
        args.blocks, args.steps, args.warmup = 2, 1, 1

    import transformers

    figures: dict[str, Any] = {"transformers": transformers.__version__, "goal": GOAL}
    for name in args.shapes.split(","):
        rows, length = (2, 16) if args.smoke else SHAPES[name]
        ours, theirs = make_models(TINY if args.smoke else {}, args.device)
        figures[name] = compare(ours, theirs, (rows, length), args)
        print(f"{name:8} {figures[name]}", flush=True)
        del ours, theirs
        gc.collect()
    reached = all(figures[name]["speedup"] >= GOAL for name in args.shapes.split(","))
    if args.smoke:
        return 0
    publish(args.name, figures | {"reached": reached})
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
