"""Find a head that makes a number for every token and word, and say how it needs less memory."""

from __future__ import annotations

from torch import nn

LARGE_VOCABULARY = 8192
"""Words from which on the logits of all tokens weigh."""


def advice_on_head(model: nn.Module) -> str:
    """Return a sentence, after a space, with the line to write for a model of transformers whose head is the plain one and whose
    vocabulary is large; else nothing."""
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    if type(head) is not nn.Linear or head.out_features < LARGE_VOCABULARY or "forward" in vars(head):
        return ""
    return (
        f" The head of this model makes {head.out_features:,} numbers for each token, labelled or not: "
        "fleetx.integrations.transformers.lean(model), before fleet.distribute(...), makes those of labelled tokens alone, with "
        "the same loss and gradients."
    )
