"""The contestants of bench/bert_memory: transformers' BERT with its own checkpointing, and ours through `fleet.distribute`.

Both: BERT-large, 512 tokens without padding of which 76 (15 %) are masked, the loss of those alone, Adam (fused), dropout 0.1,
torch's scaled dot product attention. transformers gets a label for every token, -100 where none is wanted; ours the masked
positions, as our loaders make batches.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.applications.bert import Bert_large
from fleetx.applications.bert_encoder import BertConfig

BERT_LARGE = {"layers": 24, "hidden": 1024, "heads": 16}

Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Recipe:
    side: str
    amp: bool = False
    recompute: bool = False
    budget: int | None = None

    @staticmethod
    def named(side: str, kind: str) -> Recipe:
        return Recipe(side, amp=kind.startswith("bf16"), recompute=kind.endswith("recompute"))


@dataclass(frozen=True)
class Size:
    options: dict[str, int]
    tokens: int
    masked: int

    def batch(self, side: str, rows: int, device: torch.device) -> Batch:
        """Random tokens, none of them padding; the same number masked in each sentence."""
        generator = torch.Generator(device).manual_seed(1)
        words = self.options.get("vocab_size", 30522)
        ids = torch.randint(5, words, (rows, self.tokens), generator=generator, device=device)
        draws = torch.rand(rows, self.tokens, generator=generator, device=device)
        columns = draws.topk(self.masked, dim=1).indices.sort(dim=1).values
        if side == "hf":
            labels = torch.full_like(ids, -100).scatter(1, columns, ids.gather(1, columns))
            return {"input_ids": ids, "labels": labels}
        positions = (columns + self.tokens * torch.arange(rows, device=device)[:, None]).flatten()
        return {"input_ids": ids, "mlm_positions": positions, "mlm_labels": ids.flatten()[positions]}


LARGE = Size({}, tokens=512, masked=76)
SMALL = Size({"hidden": 32, "layers": 3, "heads": 2, "vocab_size": 97, "max_position": 32}, tokens=32, masked=4)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=1e-5, fused=True)


def their_model(recipe: Recipe, size: Size, device: torch.device) -> nn.Module:
    """transformers' own."""
    import transformers

    ours = BertConfig(**BERT_LARGE | size.options)
    config = transformers.BertConfig(
        vocab_size=ours.vocab_size, hidden_size=ours.hidden, num_hidden_layers=ours.layers, num_attention_heads=ours.heads,
        intermediate_size=ours.feed_forward, max_position_embeddings=ours.max_position, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model: nn.Module = transformers.BertForMaskedLM(config).train()
    if recipe.recompute:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def their_step(recipe: Recipe, size: Size, device: torch.device) -> Step:
    """transformers' model in the usual loop."""
    model = their_model(recipe, size, device)
    optimizer = adam(model)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.amp):
            loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def strategy_of(recipe: Recipe) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy(amp=recipe.amp, recompute=recipe.recompute or recipe.budget is not None)
    if recipe.amp:
        strategy.amp_configs = {"dtype": "bfloat16"}
    if recipe.budget is not None:
        strategy.recompute_configs = {"budget": recipe.budget}
    return strategy


def our_model(size: Size, device: torch.device) -> Any:
    """The loss is of masked tokens alone, as theirs: what only pairs need is frozen."""
    with torch.device(device):
        model: Any = Bert_large(**size.options).train()
    for unused in (model.bert.pooler, model.cls.seq_relationship):
        unused.requires_grad_(False)
    return model


def our_step(
    recipe: Recipe, size: Size, device: torch.device, sample: Batch | None = None, told: Callable[[str], None] | None = None
) -> Step:
    """What a user of this library writes."""
    model = our_model(size, device)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")  # 16 bits are slow on many CPUs
        given = {} if sample is None else {"sample": sample}
        model, optimizer = fleet.distribute(model, adam(model), strategy_of(recipe), **given)
    if told is not None:
        told(printed.getvalue())

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model.loss(batch)
        optimizer.minimize(loss)
        return loss.detach()

    return step
