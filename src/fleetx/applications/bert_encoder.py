"""Define BERT's encoder: embeddings, layers, pooler. Parameters are named as in transformers, so that public weights load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.modules.patching import patch_of
from ..errors import ConfigError
from ..recompute.replay import result_is_unwanted
from .bert_lean import LayerNorm, in_matmul_dtype, linear_of_gelu
from .bert_weights import before_loading_body

LAYER_NORM_EPSILON = 1e-12
INITIAL_DEVIATION = 0.02


@final
@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The size of a BERT, and its dropout.

    Examples:
        >>> X.applications.BertConfig(layers=2).layers
        2
    """

    vocab_size: int = 30522
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int | None = None  # None: four times `hidden`
    max_position: int = 512
    sentence_types: int = 2
    padding_id: int = 0
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.feed_forward is None and type(self.hidden) is int:
            object.__setattr__(self, "feed_forward", 4 * self.hidden)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("dropout"):
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
                    raise ConfigError(f"{field.name} is {value!r}; it must be a number of at least 0 and below 1.")
            elif type(value) is not int or value < (field.name != "padding_id"):
                raise ConfigError(f"{field.name} is {value!r}; it must be a whole number of at least 1 (padding_id: of 0).")
        if self.hidden % self.heads:
            raise ConfigError(f"hidden is {self.hidden} and heads is {self.heads}; heads must divide hidden.")
        if self.padding_id >= self.vocab_size:
            raise ConfigError(f"padding_id is {self.padding_id}; it must be below vocab_size, {self.vocab_size}.")


def initialise(module: nn.Module) -> None:
    """Initialise as BERT does: normal weights, zero biases, a zero vector for padding. LayerNorm keeps torch's values."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


def flat_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """Flatten [samples, tokens, width] to [rows, width]; a row is sample * tokens + token."""
    return hidden.flatten(0, 1).index_select(0, rows)


@final
class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden, padding_idx=config.padding_id)
        self.position_embeddings = nn.Embedding(config.max_position, config.hidden)
        self.token_type_embeddings = nn.Embedding(config.sentence_types, config.hidden)
        self.LayerNorm = LayerNorm(config.hidden, eps=LAYER_NORM_EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            positions = self.position_embeddings.weight[: input_ids.shape[1]]
        else:
            positions = self.position_embeddings(position_ids)
        if token_type_ids is None:
            types = self.token_type_embeddings.weight[0]
        else:
            types = self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(self.word_embeddings(input_ids) + types + positions))  # type: ignore[no-any-return]


def is_untouched(module: nn.Module) -> bool:
    """Check that the module has no hooks and no patched forward, so that its result may be computed without calling it.

    A patch with `only_outermost` does nothing on a call from inside the model, such as this one.
    """
    patch = patch_of(module)
    untouched = "forward" not in vars(module) if patch is None else patch.only_outermost
    return untouched and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Check for hooks of this module or hooks of all modules."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or bool(torch.nn.modules.module._has_any_global_hook())


def is_plain(layer: nn.Module) -> bool:
    """Check for an unchanged torch.nn.Linear with a bias: not replaced (adapters), hooked or patched."""
    return type(layer) is nn.Linear and layer.bias is not None and is_untouched(layer)


def projections(hidden: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Apply each layer to `hidden`; plain layers in one product, with a third of the kernels in forward and backward."""
    if not all(is_plain(layer) for layer in layers):
        return [layer(hidden) for layer in layers]
    weight = torch.cat([cast(Tensor, layer.weight) for layer in layers])
    bias = torch.cat([cast(Tensor, layer.bias) for layer in layers])
    return F.linear(hidden, weight, bias).chunk(len(layers), dim=-1)


@final
class BertSelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = in_matmul_dtype(hidden)
        query, key, value = (
            projected.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for projected in projections(hidden, (self.query, self.key, self.value))
        )
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, mask, dropout).transpose(1, 2).flatten(2)


@final
class BertResidual(nn.Module):
    """Compute the post-norm residual LayerNorm(before + dropout(linear(hidden)))."""

    def __init__(self, inputs: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden)
        self.LayerNorm = LayerNorm(config.hidden, eps=LAYER_NORM_EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.joined(self.dense(hidden), before)

    def joined(self, update: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.added(update, before))  # type: ignore[no-any-return]

    def added(self, update: Tensor, before: Tensor) -> Tensor:
        return before + self.dropout(update)  # type: ignore[no-any-return]


@final
class BertAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertResidual(config.hidden, config)

    def forward(self, hidden: Tensor, mask: Tensor | None, rows: Tensor | None = None) -> Tensor:
        context = self.self(hidden, mask)
        if rows is not None:
            context, hidden = flat_rows(context, rows), flat_rows(hidden, rows)
        return self.output(context, hidden)  # type: ignore[no-any-return]


@final
class GeluLinear(nn.Module):
    """Apply a linear layer, then the exact GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.gelu(self.dense(hidden))


@final
class BertLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.feed_forward or 4 * config.hidden
        self.attention = BertAttention(config)
        self.intermediate = GeluLinear(config.hidden, width)
        self.output = BertResidual(width, config)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        rows: Tensor | None = None,
        *,
        norm: nn.Module | None = None,
        leaves_norm: bool = False,
    ) -> Tensor:
        """Run the layer; with `rows` only those flattened tokens get a result, while attention still reads all.

        `norm`: the last norm of the layer before, if that layer left it out; `leaves_norm`: leave this layer's own to the next.
        """
        hidden = hidden if norm is None else norm(hidden)
        attended = self.attention(hidden, mask, rows)
        if not self._is_plain():
            return self.output(self.intermediate(attended), attended)  # type: ignore[no-any-return]
        wide = self.intermediate.dense(attended)
        if not leaves_norm:
            return self.output.joined(linear_of_gelu(wide, self.output.dense), attended)
        update = linear_of_gelu(wide, self.output.dense, is_unwanted=result_is_unwanted(self))
        return self.output.added(update, attended)

    def can_leave_norm(self) -> bool:
        """Check whether the next layer may apply this layer's last norm: no hook or patch reads or converts the whole result,
        and the operations after the last product do not save it."""
        patch = patch_of(self)
        is_of_the_whole = "forward" in vars(self) if patch is None else patch.is_of_the_whole
        if has_hooks(self) or is_of_the_whole:
            return False
        dropout = self.output.dropout
        ours = type(self.output.LayerNorm) in (LayerNorm, nn.LayerNorm) and type(dropout) is nn.Dropout and is_untouched(dropout)
        return ours and self._is_plain()

    def _is_plain(self) -> bool:
        """Check whether GELU and the linear layer after it may be fused: their modules are then not called."""
        ours = type(self.intermediate) is GeluLinear and type(self.output) is BertResidual
        return ours and is_untouched(self.intermediate) and is_untouched(self.output) and is_plain(self.output.dense)


@final
class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.layers))

    def forward(self, hidden: Tensor, mask: Tensor | None, rows: Tensor | None = None) -> Tensor:
        """Return all tokens [B, S, hidden], or only some `rows` of the last layer [R, hidden]: the rest is not computed."""
        last, norm = len(self.layer) - 1, None
        for number, layer in enumerate(self.layer):
            leaves_norm = isinstance(layer, BertLayer) and layer.can_leave_norm()
            if norm is not None and not leaves_norm:
                hidden = norm(hidden)
            left = {"norm": norm, "leaves_norm": True} if leaves_norm else {}
            hidden = layer(hidden, mask, rows if number == last else None, **left)
            norm = cast(BertLayer, layer).output.LayerNorm if leaves_norm else None
        return hidden if norm is None else norm(hidden)


@final
class BertPooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)

    def forward(self, first: Tensor) -> Tensor:
        """Pool the first token of each sample, [B, hidden]."""
        return torch.tanh(self.dense(first))


@final
class BertBody(nn.Module):
    """Hold everything below the heads: `bert.` in the state dict."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config)
        self.register_load_state_dict_pre_hook(before_loading_body)  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the last layer's hidden states, for all tokens or for `rows` of them.

        `attention_mask` None means that no token is padding: then flash attention runs.
        """
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        return self.encoder(self.embeddings(input_ids, token_type_ids, position_ids), mask, rows)  # type: ignore[no-any-return]
