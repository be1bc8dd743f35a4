"""What `param.grad` shows under sharding, after a reduce: this rank has the mean of its share alone, elsewhere what it sent.

Calls that mean the same for a share as for the whole work as under DDP: the norm of the whole tensor, which all ranks know, and
scaling, clamping and zeroing in place. So `clip_grad_norm_` in a script stays right. All others are refused: they would see
numbers of this rank alone. Autograd itself, which adds gradients below Python, is not concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from ..errors import ConfigError

FACTS = frozenset(
    "shape dtype device layout is_cuda is_cpu is_sparse is_meta is_mkldnn is_quantized is_nested requires_grad grad_fn is_leaf "
    "_version ndim nbytes itemsize names".split()
)
"""Properties of a tensor that do not depend on its numbers."""
QUESTIONS = frozenset(
    "size dim numel nelement stride is_contiguous element_size storage_offset is_complex is_floating_point requires_grad_ "
    "detach_ __hash__ __len__".split()
)
"""Methods that do not."""
NORMS = frozenset("vector_norm linalg_vector_norm norm".split())
SCALINGS = frozenset("mul_ div_ __imul__ __itruediv__ _foreach_mul_ _foreach_div_".split())
CLAMPS = frozenset("clamp_ clip_ _foreach_clamp_min_ _foreach_clamp_max_".split())
ZEROS = frozenset("zero_ _foreach_zero_".split())


class Norms(Protocol):
    """What is known of the tensors that were reduced."""

    def norm_of(self, place: int) -> Tensor | None:
        """Return the norm of the whole tensor; None where it is not known."""

    def scale(self, place: int, factor: float | Tensor) -> None:
        """Note that the tensor is multiplied by `factor` on all ranks."""

    def clear(self, place: int) -> None:
        """Note that the tensor is zero on all ranks, whatever it was."""

    def forget(self, place: int) -> None:
        """Note that the norm is not known any more."""


class GradientShare(Tensor):
    """A gradient of which this rank has reduced its share alone, while it is `closed`; else a plain tensor."""

    closed: bool = False
    place: int = 0
    """Among all parameters, in the order of the buckets."""
    known: Norms
    name: str = ""
    own: Tensor | None = None
    """This rank's part of the reduced gradient, in memory order; None: it has none."""
    allocate: Callable[[], None]
    """Gives the whole gradient memory, where it has none."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        shares = [share for share in _shares_in([*args, *given.values()]) if share.closed]
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if not shares or _is_harmless(func, name):
                return func(*args, **given)
            if name in ("__repr__", "__str__", "__format__"):
                return f"<a share of the gradient of {shares[0].name}, {tuple(shares[0].shape)}>"
            if name == "detach" or (name == "__get__" and _property(func) == "data"):
                return _same(shares[0])
            if name in NORMS or name == "_foreach_norm":
                return _norms(shares, args, given, is_list=name == "_foreach_norm")
            if any(share.closed for share in _shares_in([*args[1:], *given.values()])):
                raise ConfigError(_refusal(shares[0], name))  # not what is written to, but what is read
            if name in SCALINGS and not given and _is_one_number(args[1] if len(args) > 1 else None):
                for share in shares:
                    share.known.scale(share.place, args[1] if name in ("mul_", "__imul__", "_foreach_mul_") else 1.0 / args[1])
                return _on_own(func, args, given)
            if name in CLAMPS:
                for share in shares:
                    share.known.forget(share.place)
                return _on_own(func, args, given)
            if name in ZEROS:
                for share in shares:
                    share.allocate()
                    share.known.clear(share.place)
                    if share.own is not None:
                        share.own.zero_()
                open_shares(shares)
                return func(*args, **given)
        raise ConfigError(_refusal(shares[0], name))


def _on_own(func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """Do in place on this rank's part alone what is asked for a gradient, or for a list of them."""
    first = args[0]
    if isinstance(first, GradientShare):
        if first.own is not None:
            func(first.own, *args[1:], **given)
        return first
    plain = [item.own if isinstance(item, GradientShare) and item.closed else item for item in first]
    own = [item for item in plain if item is not None]
    if own:
        func(own, *args[1:], **given)
    return None


def _shares_in(args: Iterable[Any]) -> list[GradientShare]:
    found: list[GradientShare] = []
    for arg in args:
        if isinstance(arg, GradientShare):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += _shares_in(arg)
    return found


def _property(func: Callable[..., Any]) -> str:
    """Return the name of the property whose getter or setter this is."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _is_harmless(func: Callable[..., Any], name: str) -> bool:
    return (_property(func) in FACTS) if name in ("__get__", "__set__") else name in QUESTIONS


def _same(share: GradientShare) -> GradientShare:
    """Return another tensor of the same memory, as scripts ask for before `norm(2)` or `mul_`."""
    other: GradientShare = torch.Tensor._make_subclass(GradientShare, share)  # also where there is no memory
    other.known, other.own, other.allocate = share.known, share.own, share.allocate
    other.place, other.name, other.closed = share.place, share.name, True
    return other


def _is_one_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _norms(shares: Sequence[GradientShare], args: Sequence[Any], given: Mapping[str, Any], *, is_list: bool) -> Any:
    """Return the norms of the whole tensors, as torch would of plain ones: Euclidean, over all of each."""
    order = given.get("ord", given.get("p", args[1] if len(args) > 1 else 2.0))
    over = [value for key, value in given.items() if key in ("dim", "keepdim", "out", "dtype")] + list(args[2:])
    norms = [share.known.norm_of(share.place) for share in shares]
    if order not in (2, 2.0, "fro", None) or any(value not in (None, False) for value in over) or any(n is None for n in norms):
        raise ConfigError(_refusal(shares[0], "a norm of another kind, or after clamping,"))
    kept = [norm.to(share.dtype) for norm, share in zip(norms, shares, strict=True) if norm is not None]
    return tuple(kept) if is_list else kept[0]


SCALER = (
    "a GradScaler by hand beside strategy.sharding: it would judge this rank's share of the gradients alone. Write "
    'strategy.amp = True with amp_configs = {"dtype": "float16"} instead of the scaler.'
)


def _refusal(share: GradientShare, call: str) -> str:
    if "unscale" in call:
        return SCALER
    return (
        f"{call} of the gradient of `{share.name}`: under strategy.sharding this rank has the mean of its share of it alone. The "
        "Euclidean norm, torch.nn.utils.clip_grad_norm_, clip_grad_value_ and scaling in place work; for clipping there is "
        "strategy.clip_norm too. To look at whole gradients, leave strategy.sharding out for that run."
    )


def make_share(view: Tensor, known: Norms) -> GradientShare:
    """Return the same memory as a share: no view in autograd's sense, as the views of a bucket are none."""
    share: GradientShare = torch.empty(0, dtype=view.dtype, device=view.device).as_subclass(GradientShare)
    with torch._C.DisableTorchFunctionSubclass():
        share.set_(view.untyped_storage(), int(view.storage_offset()), view.shape, view.stride())
    share.known, share.allocate = known, lambda: None
    return share


def close_shares(views: Iterable[Tensor]) -> None:
    """Note that the reduce is over: what is no share of this rank's is no gradient."""
    for view in views:
        if isinstance(view, GradientShare):
            view.closed = True


def open_shares(views: Iterable[Tensor]) -> None:
    """Note that new gradients of this rank alone may come."""
    for view in views:
        if isinstance(view, GradientShare):
            view.closed = False


def is_closed(view: Tensor) -> bool:
    """Return whether this rank has reduced its share of it alone."""
    return isinstance(view, GradientShare) and view.closed


def refuse_added(name: str) -> NoReturn:
    raise ConfigError(
        f"a backward has added to the gradient of `{name}` that the last update has left: under strategy.sharding this rank "
        "has its share of that alone. Call optimizer.zero_grad() after each step()."
    )


def forget_norm(view: Tensor) -> None:
    """Note that a script has put other numbers in the place of what was reduced."""
    if is_closed(view):
        view.known.forget(view.place)  # type: ignore[attr-defined]


def write_whole(view: Tensor, values: Tensor) -> None:
    """Write values that a script has put in place of a gradient, of which it has the whole."""
    forget_norm(view)
    with torch._C.DisableTorchFunctionSubclass():
        view.copy_(values)
