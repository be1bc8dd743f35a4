"""Convert any state dict to JSON plus tensors and back, without pickle; unsupported types are refused.

{"lr": 0.1, "milestones": Counter({30: 1}), "momentum": tensor}
    -> {"lr": 0.1, "milestones": {"$counter": [[30, 1]]}, "momentum": {"$tensor": "optimizer/momentum"}}
       and {"optimizer/momentum": tensor}

A value JSON cannot hold becomes an object with one key that begins with "$". A tensor found twice (tied weights) is stored once.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ..engine.setup.optimizer_state import Parts
from ..errors import CheckpointError

PART = " @"
"""What stands before the first and last element in the key of a part of a divided tensor."""
_PART = re.compile(rf"{PART}\d+-\d+$")
Json = Any
Tensors = dict[str, Tensor]


@final
class Encoder:
    """Encodes objects and collects their tensors under keys that name the place in the object."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Json:
        if value is None or isinstance(value, (bool, str)):
            return value
        if type(value) is int:
            return value if value.bit_length() <= _PLAIN_INT_BITS else {"$int": f"{value:x}"}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, Parts):
            return self._parts(value, path)
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
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"$ndarray": [str(value.dtype), self._tensor(_bits_of(value), path)["$tensor"], list(value.shape)]}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"$numpy": [str(value.dtype), base64.b64encode(value.tobytes()).decode()]}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {"$complex": [repr(value.real), repr(value.imag)]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value) is deque:
            return {"$deque": [value.maxlen, [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]]}
        raise CheckpointError(
            f"`{path}` is a {type(value).__name__}, which cannot be saved without pickle. Keep it out of the state, or make it "
            "numbers, strings, lists, dicts, arrays or tensors."
        )

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Json:
        pairs = [(key, self.encode(item, f"{path}/{key}")) for key, item in value.items()]
        tag = _MAPPINGS.get(type(value), "$dict")
        is_plain = tag == "$dict" and all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs)
        if is_plain and not isinstance(value, defaultdict):
            return dict(pairs)
        encoded = [[self.encode(key, path), item] for key, item in pairs]
        if isinstance(value, defaultdict):
            return {"$defaultdict": [_name_of_factory(value, path), encoded]}
        return {tag: encoded}

    def _tensor(self, value: Tensor, path: str) -> Json:
        tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"`{path}` is a {tensor.layout} tensor on {tensor.device}; only dense tensors are saved.")
        # A conjugate or negated view shares another tensor's memory but has different values.
        tensor = tensor.resolve_conj().resolve_neg()
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        key = self._seen.get(same) if tensor.numel() else None
        if key is None:
            key = self._seen[same] = self._free_key(path)
            # safetensors has no complex128: a complex tensor is stored as pairs of reals.
            self.tensors[key] = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if tensor.is_complex():
            return {"$complex_tensor": key}
        return {"$tensor": key}

    def _parts(self, value: Parts, path: str) -> Json:
        """Name all parts alike on all ranks, and take those that this one is to write."""
        named = [(start, stop, f"{path}{PART}{start}-{stop}", tensor) for start, stop, tensor in value.pieces]
        self.tensors |= {key: tensor.detach().reshape(-1) for _, _, key, tensor in named if tensor is not None}
        return {"$parts": [list(value.shape), list(value.stride), [[start, stop, key] for start, stop, key, _ in named]]}

    def _free_key(self, path: str) -> str:
        """Return an unused key: two places may have one path, as in {"a": {"b": x}, "a/b": y} or with the keys 1 and "1"."""
        readable = path.encode("utf-8", "backslashreplace").decode()  # safetensors refuses lone surrogates
        key, number = readable, 1
        while key in self.tensors or key == "__metadata__":  # safetensors reserves this name
            number += 1
            key = f"{readable}#{number}"
        return key


def decode(value: Json, fetch: Callable[[str], Tensor]) -> Any:
    """Invert `Encoder.encode`; `fetch` returns the tensor of a key."""
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
            return kind({decode(key, fetch): decode(item, fetch) for key, item in content})
    for sequence, its_tag in _SEQUENCES.items():
        if tag == its_tag:
            return sequence(decode(item, fetch) for item in content)
    if tag == "$defaultdict":
        return defaultdict(_FACTORIES[content[0]], {decode(key, fetch): decode(item, fetch) for key, item in content[1]})
    if tag == "$deque":
        return deque((decode(item, fetch) for item in content[1]), maxlen=content[0])
    if tag in _LEAVES:
        return _LEAVES[tag](content)
    if tag == "$ndarray":
        name, key, shape = content
        return fetch(key).numpy().view(_number_type(name)).reshape(shape).copy()
    if tag == "$tensor":
        return fetch(content)
    if tag == "$parts":
        return _joined(*content, fetch=fetch)
    if tag == "$complex_tensor":
        return torch.view_as_complex(fetch(content).contiguous())
    raise CheckpointError(f"the checkpoint holds a value of kind {tag!r}, which this version does not know.")


def is_part(key: str) -> bool:
    """Return whether a tensor of this key is a part of one that was divided between ranks."""
    return _PART.search(key) is not None


def _joined(shape: list[int], stride: list[int], pieces: list[Any], *, fetch: Callable[[str], Tensor]) -> Tensor:
    """Put the parts of a tensor together; they are all of its elements, in the order of its memory."""
    end = 0
    for start, stop, _ in pieces:
        if start != end or stop <= start:
            raise CheckpointError(f"the parts of a tensor leave a gap: one ends at {end}, the next goes from {start} to {stop}.")
        end = stop
    flat = torch.cat([fetch(key) for *_, key in pieces]) if pieces else torch.empty(0)
    strides = sorted(zip(stride, shape, strict=True), reverse=True)
    if flat.numel() != end or end != math.prod(shape) or [s for s, n in strides if n > 1] != _dense_strides(strides):
        raise CheckpointError(
            f"the parts of a tensor of {tuple(shape)} have {flat.numel()} elements, laid out by {tuple(stride)}."
        )
    return flat.as_strided(tuple(shape), tuple(stride)).contiguous()


def _dense_strides(dims: list[tuple[int, int]]) -> list[int]:
    """Return the strides of a tensor without gaps whose dimensions come in this order, of those with several elements."""
    lengths = [length for _, length in dims if length > 1]
    return [math.prod(lengths[place + 1 :]) for place in range(len(lengths))]


def _torch_dtype(name: Json) -> torch.dtype:
    """Return torch's number type of this name: a file must not reach the rest of what torch holds, such as `torch.load`."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the checkpoint names {name!r} as a number type of torch, and it is none.")
    return found


def _number_type(name: Json) -> np.dtype[Any]:
    """Return NumPy's number type of this name; types of objects and records hold more than numbers."""
    try:
        found = np.dtype(name) if isinstance(name, str) else None
    except TypeError:
        found = None
    if found is None or found.kind not in "biufc":
        raise CheckpointError(f"the checkpoint names {name!r} as a number type of NumPy, and it is none.")
    return found


_PLAIN_INT_BITS = 2048
"""Longer integers are stored in hexadecimal: Python refuses to print very long ones in decimal."""
_MAPPINGS: dict[Any, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_SEQUENCES: dict[Any, str] = {tuple: "$tuple", torch.Size: "$size", set: "$set", frozenset: "$frozenset"}
_FACTORIES: dict[str, Any] = {"": None, **{kind.__name__: kind for kind in (int, float, str, list, dict, set)}}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$int": lambda content: int(content, 16),
    "$float": float,
    "$numpy": lambda content: np.frombuffer(base64.b64decode(content[1]), dtype=_number_type(content[0]))[0],
    "$bytes": base64.b64decode,
    "$complex": lambda content: complex(float(content[0]), float(content[1])),
    "$dtype": lambda content: _torch_dtype(content),
    "$device": torch.device,
}


def _name_of_factory(value: defaultdict[Any, Any], path: str) -> str:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise CheckpointError(
        f"`{path}` is a defaultdict of {value.default_factory!r}, which cannot be saved without pickle. "
        f"Make it a dict, or a defaultdict of {', '.join(filter(None, _FACTORIES))}."
    )


def _bits_of(array: Any) -> Tensor:
    """Return the array as a tensor of bytes: torch has fewer number types than NumPy."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
