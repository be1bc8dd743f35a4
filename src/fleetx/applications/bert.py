"""Define BERT for pre-training, with the weights, names and results of transformers' `BertForPreTraining` at lower cost.

hidden = layers(embeddings(tokens))
masked = hidden[masked positions]                        about one token in seven: the head sees only these
loss   = mean cross-entropy(decoder(transform(masked)))  in chunks; the logits never exist whole
       + mean cross-entropy(next sentence?)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError, did_you_mean
from ..recompute.chunked_loss import IGNORED, chunked_cross_entropy
from .bert_batch import KEYS, check_inputs, require_batch
from .bert_encoder import LAYER_NORM_EPSILON, BertBody, BertConfig, initialise
from .bert_lean import LayerNorm
from .bert_weights import before_loading, is_tied, tie
from .text_loading import LoadsText


class BertOutput(NamedTuple):
    """Result of a forward: with labels the loss and the sums it is made of; without labels the logits of all tokens."""

    loss: Tensor | None
    prediction_logits: Tensor | None
    seq_relationship_logits: Tensor
    tally: dict[str, Tensor]


def rows_for_heads(input_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the first token of each sample, then the masked ones: all that the heads read of the last layer."""
    samples, tokens = input_ids.shape
    first = torch.arange(0, samples * tokens, tokens, device=input_ids.device)
    return torch.cat([first, positions])


def labelled_positions(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Convert one label per token (-100: ignored) to positions and labels. Waits for a GPU: the count decides a shape."""
    positions = (labels.flatten() != IGNORED).nonzero().squeeze(1)
    return positions, labels.flatten().index_select(0, positions)


def mean(total: Tensor, count: Tensor) -> Tensor:
    """Divide; zero, not NaN, where `count` is 0."""
    return total / count.clamp(min=1)


@final
class PredictionTransform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.LayerNorm = LayerNorm(config.hidden, eps=LAYER_NORM_EPSILON)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(F.gelu(self.dense(hidden)))  # type: ignore[no-any-return]


@final
class WordDecoder(nn.Linear):
    """Compute logits or the loss, both in `forward`, so that hooks and a strategy that keeps this layer in float32 apply."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor] | Tensor:  # type: ignore[override]
        """Return logits; or, given labels, their summed cross-entropy and the number predicted right."""
        if labels is None:
            return super().forward(hidden)
        return chunked_cross_entropy(hidden, self.weight, self.bias, labels)


@final
class PredictionHead(nn.Module):
    """Predict words from hidden states. `decoder` shares the embedding's weight, and this module's bias."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.transform = PredictionTransform(config)
        self.decoder = WordDecoder(config.hidden, config.vocab_size)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor] | Tensor:
        return self.decoder(self.transform(hidden), labels)  # type: ignore[no-any-return]


@final
class PretrainingHeads(nn.Module):
    """Hold the two heads, `cls.` in the state dict; they are called separately."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = PredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden, 2)


@final
class Bert(LoadsText, nn.Module):
    """A BERT with its two pre-training heads. `.loss(batch)` is the loss to minimise; `.checkpoints` names the layers.

    Examples:
        >>> model = X.applications.Bert(X.applications.BertConfig(hidden=32, layers=1, heads=2))
        >>> model.checkpoints
        ['bert.encoder.layer.0']
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if not isinstance(config, BertConfig):
            raise ConfigError(f"Bert was given {type(config).__name__}; it takes a BertConfig, as Bert_base(layers=2) makes one.")
        self.config = config
        self.bert = BertBody(config)
        self.cls = PretrainingHeads(config)
        self.apply(initialise)
        tie(self)
        self.register_load_state_dict_pre_hook(before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(tie)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Bert:
        """Tie shared weights again after `.to()`, `.to_empty()` and others, which may give each name its own tensor."""
        tied = is_tied(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tied:
            tie(self)
        return self

    @property
    def checkpoints(self) -> list[str]:
        return [f"bert.encoder.layer.{index}" for index in range(self.config.layers)]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        mlm_positions: Tensor | None = None,
        mlm_labels: Tensor | None = None,
    ) -> BertOutput:
        """Labels of masked tokens are `mlm_labels` at `mlm_positions` (row * tokens + column), or one in `labels` for each token.

        The losses are computed in here too, so that one autocast around this call covers everything.
        """
        given = (input_ids, attention_mask, token_type_ids, position_ids, labels, next_sentence_label, mlm_positions, mlm_labels)
        check_inputs(self.config, dict(zip(KEYS, given, strict=True)))
        if labels is not None:
            mlm_positions, mlm_labels = labelled_positions(labels)
        rows = None if mlm_positions is None else rows_for_heads(input_ids, mlm_positions)
        hidden = self.bert(input_ids, attention_mask, token_type_ids, position_ids, rows)
        first = hidden[:, 0] if rows is None else hidden[: len(input_ids)]
        sentence_logits = self.cls.seq_relationship(self.bert.pooler(first))
        losses: list[Tensor] = []
        tally: dict[str, Tensor] = {}
        if mlm_labels is not None:
            loss, tally = self._masked_loss(hidden[len(input_ids) :], mlm_labels)
            losses.append(loss)
        if next_sentence_label is not None:
            loss, sums = sentence_loss(sentence_logits, next_sentence_label.long())
            losses.append(loss)
            tally |= sums
        if not losses:
            return BertOutput(None, self.cls.predictions(hidden), sentence_logits, tally)
        return BertOutput(torch.stack(losses).sum(), None, sentence_logits, tally)

    def _masked_loss(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total, correct = self.cls.predictions(hidden, labels.long())
        count = (labels != IGNORED).sum()
        return mean(total, count), {"count": count, "loss": total.detach(), "mlm_acc": correct}

    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of masked tokens, plus the mean loss of sentence pairs where `next_sentence_label` is given.

        Without it the pooler gets no gradient: then set strategy.find_unused_parameters = True.
        """
        loss = self(**require_batch(batch)).loss
        return loss  # type: ignore[no-any-return]

    @torch.no_grad()
    def tally(self, batch: Any) -> dict[str, Tensor]:
        """Return sums over a batch: `loss` and `mlm_acc` of `count` tokens, `nsp_loss` and `nsp_acc` of `pairs`."""
        sums = self(**require_batch(batch)).tally
        zero = torch.zeros((), dtype=torch.float64, device=batch["input_ids"].device)
        names = ("count", "loss", "mlm_acc", "pairs", "nsp_loss", "nsp_acc")
        return {name: sums[name].double() if name in sums else zero for name in names}

    def accuracy(self, batch: Any) -> dict[str, Tensor]:
        """Return the shares of masked tokens and of sentence pairs predicted right, for the labels that the batch has."""
        tally, batch = self.tally(batch), require_batch(batch)
        shares = {}
        if batch.get("labels") is not None or batch.get("mlm_labels") is not None:
            shares["mlm_acc"] = mean(tally["mlm_acc"], tally["count"])
        if batch.get("next_sentence_label") is not None:
            shares["nsp_acc"] = mean(tally["nsp_acc"], tally["pairs"])
        return shares


def sentence_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the next-sentence loss: the mean over the pairs, and the sums it is made of."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    pairs = (labels != IGNORED).sum()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return mean(total, pairs), {"pairs": pairs, "nsp_loss": total.detach(), "nsp_acc": correct}


def Bert_base(**options: Any) -> Bert:  # noqa: N802
    """Make a BERT of 12 layers, 768 wide: 110 million parameters. Options are those of `BertConfig`.

    Examples:
        >>> model = X.applications.Bert_base(layers=1)
        >>> model.config.hidden
        768
    """
    return Bert(_config("Bert_base", {"layers": 12, "hidden": 768, "heads": 12} | options))


def Bert_large(**options: Any) -> Bert:  # noqa: N802
    """Make a BERT of 24 layers, 1024 wide: 336 million parameters. Options are those of `BertConfig`.

    Examples:
        >>> model = X.applications.Bert_large(layers=1)
        >>> model.config.hidden
        1024
    """
    return Bert(_config("Bert_large", {"layers": 24, "hidden": 1024, "heads": 16} | options))


def _config(maker: str, options: dict[str, Any]) -> BertConfig:
    known = [field.name for field in fields(BertConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"{maker} was given `{name}`; its options are {', '.join(known)}.{did_you_mean(name, known)}")
    return BertConfig(**options)
