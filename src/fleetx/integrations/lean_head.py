"""Give a model with a large vocabulary a head whose logits are computed on demand, and whose loss is computed in chunks.

    hidden ──> head ──> OnDemandLogits [tokens, vocabulary]      nothing is computed yet
                          .float(), .view(-1, vocabulary)        nothing either
                          cross_entropy(logits, labels)          labelled rows alone, a chunk at a time: no [tokens, vocabulary]
                          anything else                          the logits, computed as the plain head does

The model's own forward stays in charge: it calls the head and the loss as before. Copies and pickles have the plain head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError, FleetError
from ..recompute.chunked_loss import IGNORED, chunked_cross_entropy, dtype_of_products


@final
class OnDemandLogits(Tensor):
    """Stands for `hidden @ weight.T + bias`, which an operation that needs the numbers computes."""

    hidden: Tensor
    head: nn.Linear
    asked: torch.dtype
    """The type that the reader has asked for, by `.float()` or `.to(...)`."""
    version: int
    """Version of the weight when the head was called."""
    products: torch.dtype
    """The type of the products: autocast's, where it was on."""

    @staticmethod
    def __new__(cls, hidden: Tensor, head: nn.Linear, asked: torch.dtype, version: int, products: torch.dtype) -> Self:
        wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=asked, device=hidden.device, requires_grad=wants_grad)
        made.hidden, made.head, made.asked, made.version, made.products = hidden, head, asked, version, products
        return made

    def with_hidden(self, hidden: Tensor) -> OnDemandLogits:
        return OnDemandLogits(hidden, self.head, self.asked, self.version, self.products)

    def with_dtype(self, dtype: torch.dtype) -> OnDemandLogits:
        return OnDemandLogits(self.hidden, self.head, dtype, self.version, self.products)

    def compute(self) -> Tensor:
        """Compute the logits, as the plain head does."""
        if self.head.weight._version != self.version:
            raise FleetError(
                "these logits were not read before the weights changed, so they cannot be computed any more. "
                "Read them (outputs.logits) before the optimizer's step."
            )
        with torch.autocast(self.hidden.device.type, dtype=self.products, enabled=self.products != self.hidden.dtype):
            return F.linear(self.hidden, self.head.weight, self.head.bias).to(self.asked)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _KEPT_LAZY:
            found = _KEPT_LAZY[func](*args, **kwargs)
            if found is not None:
                return found
        return func(*_computed(args), **_computed(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_computed(args), **_computed(dict(kwargs or {})))


def _computed(value: Any) -> Any:
    if isinstance(value, OnDemandLogits):
        return value.compute()
    if isinstance(value, tuple | list):
        return type(value)(_computed(one) for one in value) if type(value) in (tuple, list) else value
    return {key: _computed(one) for key, one in value.items()} if type(value) is dict else value


# --- operations that need no logits: each returns None where it does after all ----------------------------------------------


def _float(logits: Tensor, memory_format: Any = None) -> Tensor | None:
    return logits.with_dtype(torch.float32) if isinstance(logits, OnDemandLogits) and memory_format is None else None


def _to(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Change the type, or stay on the device."""
    given = [*args, *kwargs.values()]
    if not isinstance(logits, OnDemandLogits) or len(given) != 1:
        return None
    target = given[0]
    if isinstance(target, torch.dtype) and target.is_floating_point:
        return logits.with_dtype(target)
    stays = isinstance(target, torch.device | str) and torch.device(target) in (
        logits.hidden.device,
        torch.device(logits.hidden.device.type),
    )
    return logits if stays else None


def _contiguous(logits: Tensor, memory_format: Any = torch.contiguous_format) -> Tensor | None:
    return logits if isinstance(logits, OnDemandLogits) and memory_format is torch.contiguous_format else None


def _reshaped(logits: Tensor, *shape: Any) -> Tensor | None:
    """Reshape all dimensions but the vocabulary."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size) else shape
    if not isinstance(logits, OnDemandLogits) or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    # A last -1 stands for the vocabulary only where the others say so by themselves.
    if sizes[-1] != logits.head.weight.shape[0]:
        return None
    return logits.with_hidden(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _sliced(logits: Tensor, index: Any) -> Tensor | None:
    """Take some rows: slices and numbers in front, none of the vocabulary."""
    if not isinstance(logits, OnDemandLogits):
        return None
    places = list(index) if isinstance(index, tuple) else [index]
    if not all(place is Ellipsis or type(place) in (slice, int) for place in places):
        return None
    rows = logits.dim() - 1
    if Ellipsis in places:
        where = places.index(Ellipsis)
        places[where : where + 1] = [slice(None)] * (logits.dim() - len(places) + 1)
    if len(places) > rows:
        if len(places) != rows + 1 or places.pop() != slice(None):
            return None
    return logits.with_hidden(logits.hidden[tuple(places)])


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not isinstance(logits, OnDemandLogits) or not plain or reduction not in ("mean", "sum") or logits.dim() != 2:
        return None
    if target.dim() != 1 or target.is_floating_point() or len(target) != len(logits.hidden):
        return None  # torch's own computes it, or says what is wrong with the labels
    labelled = (target != ignore_index).nonzero().squeeze(1)
    head = logits.head
    labels = target[labelled].long()
    # Torch's own raises an error for labels outside of the vocabulary; -100 in `labels` would be ignored by ours.
    if ignore_index != IGNORED and bool((labels == IGNORED).any()):
        return None
    total, _ = chunked_cross_entropy(logits.hidden[labelled], head.weight, head.bias, labels, dtype=logits.products)
    loss = total / len(labelled) if reduction == "mean" else total
    return loss.to(torch.float32 if torch.is_autocast_enabled(loss.device.type) else logits.asked)


_KEPT_LAZY: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    Tensor.__getitem__: _sliced,
    F.cross_entropy: _cross_entropy,
}
_DESCRIBING = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "is_cuda", "ndim", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.__len__, Tensor.element_size),
}


class Linear(nn.Linear):
    """A head that returns OnDemandLogits. It has the name of torch's own, which its copies and pickles are."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(input)
        products = dtype_of_products(input)
        return OnDemandLogits(input, self, products, self.weight._version, products)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.Linear,), *super().__reduce_ex__(protocol)[2:]


def lean(model: nn.Module) -> nn.Module:
    """Compute the head and its loss on labelled tokens alone and in chunks, in place; return the model.

    For a model of transformers with an output embedding (BERT, RoBERTa, GPT-2, Llama, Qwen, ...): the value of the loss, the
    gradients, names and outputs stay; `outputs.logits` is computed when it is read. Call it before `fleet.distribute`. Where a
    part of the model needs all logits (softcapping, label smoothing), they are computed as before.

        model = fleetx.integrations.transformers.lean(GPT2LMHeadModel.from_pretrained("gpt2"))
    """
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    if type(head) is Linear:
        return model
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"lean(model) needs a model whose get_output_embeddings() is a torch.nn.Linear; that of {type(model).__name__} is "
            f"{type(head).__name__ if head is not None else 'None'}. Give it a transformers model with a language modelling head."
        )
    if head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__:
        raise ConfigError(
            "lean(model) found hooks, or a changed forward, on the head of the model. Call it first, before what adds them."
        )
    head.__class__ = Linear
    return model
