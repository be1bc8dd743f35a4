"""Any state dict as JSON plus tensors, and back: no pickle, nothing guessed.

{"lr": 0.1, "milestones": Counter({30: 1}), "momentum": tensor}
    -> {"lr": 0.1, "milestones": {"$counter": [[30, 1]]}, "momentum": {"$tensor": "optimizer/momentum"}}
       and {"optimizer/momentum": tensor}

What JSON cannot say is an object with one key that begins with "$". A tensor that appears twice (tied weights) is stored once.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError

Json = Any
Tensors = dict[str, Tensor]


@final
class Encoder:
    """Collects the tensors of one or several objects under keys that say where they were found."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Json:
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if type(value) is list:
            return [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
        for kind, tag in _SEQUENCES.items():
            if type(value) is kind:
                items: list[Any] = sorted(value, key=repr) if kind in (set, frozenset) else list(value)
                return {tag: [self.encode(item, f"{path}/{i}") for i, item in enumerate(items)]}
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: str) -> Json:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"$ndarray": [str(value.dtype), self._tensor(_bits_of(value), path)["$tensor"], list(value.shape)]}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {"$numpy": [str(value.dtype), base64.b64encode(value.tobytes()).decode()]}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {"$complex": [repr(value.real), repr(value.imag)]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        raise CheckpointError(
            f"`{path}` is a {type(value).__name__}, which cannot be saved without pickle. Keep it out of the state, or make it "
            "numbers, strings, lists, dicts, arrays or tensors."
        )

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Json:
        pairs = [(key, self.encode(item, f"{path}/{key}")) for key, item in value.items()]
        tag = _MAPPINGS.get(type(value), "$dict")
        is_plain = tag == "$dict" and all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs)
        if is_plain:
            return dict(pairs)
        return {tag: [[self.encode(key, path), item] for key, item in pairs]}

    def _tensor(self, value: Tensor, path: str) -> Json:
        tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"`{path}` is a {tensor.layout} tensor on {tensor.device}; only dense tensors are saved.")
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        key = self._seen.get(same) if tensor.numel() else None
        if key is None:
            key = self._seen[same] = path
            # safetensors has no complex128: a complex tensor travels as pairs of reals.
            self.tensors[path] = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if tensor.is_complex():
            return {"$complex_tensor": key}
        return {"$tensor": key}


def decode(value: Json, fetch: Callable[[str], Tensor]) -> Any:
    """The inverse of `Encoder.encode`; `fetch` gives the tensor of a key."""
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, content, fetch)
    return {key: decode(item, fetch) for key, item in value.items()}


def _decode_tagged(tag: str, content: Json, fetch: Callable[[str], Tensor]) -> Any:
    for kind, its_tag in _MAPPINGS.items():
        if tag == its_tag:
            pairs = {decode(key, fetch): decode(item, fetch) for key, item in content}
            return defaultdict(None, pairs) if kind is defaultdict else kind(pairs)
    for sequence, its_tag in _SEQUENCES.items():
        if tag == its_tag:
            return sequence(decode(item, fetch) for item in content)
    if tag in _LEAVES:
        return _LEAVES[tag](content)
    if tag == "$ndarray":
        name, key, shape = content
        return fetch(key).numpy().view(np.dtype(name)).reshape(shape).copy()
    if tag == "$tensor":
        return fetch(content)
    if tag == "$complex_tensor":
        return torch.view_as_complex(fetch(content).contiguous())
    raise CheckpointError(f"the checkpoint holds a value of kind {tag!r}, which this version does not know.")


_MAPPINGS: dict[Any, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter", defaultdict: "$defaultdict"}
_SEQUENCES: dict[Any, str] = {tuple: "$tuple", torch.Size: "$size", set: "$set", frozenset: "$frozenset", deque: "$deque"}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$numpy": lambda content: np.frombuffer(base64.b64decode(content[1]), dtype=np.dtype(content[0]))[0],
    "$bytes": base64.b64decode,
    "$complex": lambda content: complex(float(content[0]), float(content[1])),
    "$dtype": lambda content: getattr(torch, content),
    "$device": torch.device,
}


def _bits_of(array: Any) -> Tensor:
    """Bytes: torch knows fewer number types than NumPy."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
