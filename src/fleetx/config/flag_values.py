"""Text of a command line -> the value of a key. The key's own kind decides what the text can mean.

4 -> 4        1e-3 -> 0.001     true -> True      null -> None      float16 -> "float16"      20GB -> "20GB"
a,b -> ["a", "b"]               [a, b], ["a", "b"] and ['a', 'b'] -> the same                 [] -> []
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from .kinds import Kind

# Not YAML's own reading of scalars: there 010 is 8 and 1:30 is 90.
_INTEGER = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def scalar(text: str) -> Any:
    """A number, True, False or None where the text is one; otherwise the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text
    except ValueError:  # Python reads no integer of more than 4,300 digits
        return text


def value_of(flag: str, text: str, kind: Kind) -> Any:
    """The first reading of the text that the kind accepts; the text itself is shown when there is none."""
    for reading in _readings(text):
        try:
            return kind.parse(reading)
        except (ValueError, OverflowError):
            continue
    return kind.check(flag, text)


def accepts(kind: Kind, value: Any) -> bool:
    try:
        kind.parse(value)
    except (ValueError, OverflowError):
        return False
    return True


def _readings(text: str) -> Iterator[Any]:
    yield scalar(text)
    yield text  # `--on_nan_inf off`: a word of the key's own comes before any other meaning of it
    if not text.lstrip().startswith("["):
        elements = [element.strip() for element in text.split(",")]
        yield [scalar(element) for element in elements]
        yield elements
        return
    # JSON first, since YAML reads its escapes of rare characters otherwise.
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        pass  # not JSON: [a, b] is YAML
    try:
        words = yaml.load(text, Loader=yaml.BaseLoader)  # as safe as the safe one, and all its scalars are strings
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        yield [scalar(word) for word in words]
        yield words
