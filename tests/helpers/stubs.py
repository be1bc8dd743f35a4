"""Write the stubs of `fleetx.strategies` from the parts, for type checkers and editors: `python -m tests.helpers.stubs`.

__init__.pyi     each part as a class with typed settings, and its settings as a TypedDict
switches.pyi     what DistributedStrategy inherits: its switches and settings, as keywords and as attributes
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetx import strategies
from fleetx.engine.slots import Part
from fleetx.strategies import catalogue
from fleetx.strategy import SCALARS

FOLDER = Path(strategies.__file__).parent
WRITTEN = '"""Written by `make types` from the parts in this folder; not by hand."""\n\n'
PARTS = """
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypedDict

from ..engine.slots import Part, Site, Slot

def catalogue() -> dict[str, type[Part]]:
    {catalogue}

class _BuiltPart(Part):
    def claims(self) -> frozenset[Slot]: ...
    def build(self, site: Site) -> Mapping[Slot, Any]: ...

"""
SWITCHES = """
from collections.abc import Sequence
from os import PathLike
from typing import Generic, Literal, Self, TypedDict, TypeVar, overload

from . import {names}

Read = TypeVar("Read")
Write = TypeVar("Write")

class Setting(Generic[Read, Write]):
    @overload
    def __get__(self, instance: None, owner: type[object]) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[object]) -> Read: ...
    def __set__(self, instance: object, value: Write) -> None: ...

"""


def parts() -> list[type[Part]]:
    return sorted(catalogue().values(), key=lambda part: part.__name__)


def quoted(text: str, indent: str) -> str:
    """A docstring. Raw, since the texts are of Python that has read its escapes already."""
    lines = text.splitlines()
    if len(lines) == 1:
        return f'{indent}"""{text}{" " * text.endswith(chr(34))}"""\n'
    body = "\n".join(indent + line if line else "" for line in lines[1:])
    return f'{indent}"""{lines[0]}\n{body}\n{indent}"""\n'


def default_of(field: dataclasses.Field[Any]) -> str:
    return "..." if field.default is dataclasses.MISSING else repr(field.default)


def part_stub(part: type[Part]) -> Iterator[str]:
    fields = dataclasses.fields(part)
    yield f"@dataclass(frozen=True, kw_only=True)\nclass {part.__name__}(_BuiltPart):\n"
    yield quoted(inspect.getdoc(part) or "", "    ") + "\n"
    for field in fields:
        yield f"    {field.name}: {field.type}\n" + quoted(field.metadata["doc"], "    ")
    given = ", ".join(f"{field.name}: {field.metadata['kind'].hint} = {default_of(field)}" for field in fields)
    yield f"    def __init__(self{', *, ' * bool(fields)}{given}) -> None: ...\n\n"
    if fields:
        yield f"class {part.__name__}Settings(TypedDict, total=False):\n"
        yield f'    """Settings of `{part.name}` as a dict; keys left out keep their value, or their default."""\n'
        for field in fields:
            yield f"    {field.name}: {field.metadata['kind'].hint}\n" + quoted(field.metadata["doc"], "    ")
        yield "\n"


def parts_stub() -> str:
    text = inspect.getdoc(catalogue) or ""
    names = [part.__name__ for part in parts()] + [f"{part.__name__}Settings" for part in parts() if dataclasses.fields(part)]
    exported = f"__all__ = {sorted([*names, 'catalogue'])!r}\n\n"
    head = PARTS.format(catalogue=quoted(text, "    ").strip())
    return WRITTEN + head + exported + "".join(line for part in parts() for line in part_stub(part))


def has_settings(part: type[Part]) -> bool:
    return bool(dataclasses.fields(part))


def taken(part: type[Part]) -> str:
    """Type of what a switch takes."""
    return f"bool | {part.__name__}Settings | {part.__name__}" if has_settings(part) else f"bool | {part.__name__}"


def values_stub(part: type[Part]) -> Iterator[str]:
    yield f"class {part.__name__}Values(TypedDict):\n"
    yield f'    """Settings of `{part.name}` as they read back: all keys."""\n'
    yield from (f"    {field.name}: {field.metadata['kind'].hint}\n" for field in dataclasses.fields(part))


def keyword_stub(part: type[Part]) -> Iterator[str]:
    yield f"    {part.name}: {taken(part)}\n"
    if has_settings(part):
        yield f"    {part.name}_configs: {part.__name__}Settings\n"


def switch_stub(part: type[Part]) -> Iterator[str]:
    yield f"    {part.name}: Setting[bool, {taken(part)}]\n"
    yield quoted((inspect.getdoc(part) or "").splitlines()[0], "    ")
    if has_settings(part):
        yield f"    {part.name}_configs: Setting[{part.__name__}Values, {part.__name__}Settings]\n"
        keys = "\n".join(f"- `{field.name}`: {field.metadata['doc']}" for field in dataclasses.fields(part))
        yield quoted(f"Settings of `{part.name}`, each checked when it is written.\n\n{keys}", "    ")


def switches_stub() -> str:
    with_settings = [part for part in parts() if has_settings(part)]
    names = [part.__name__ for part in parts()] + [f"{part.__name__}Settings" for part in with_settings]
    lines = [WRITTEN, SWITCHES.format(names=", ".join(names))]
    lines += [line for part in with_settings for line in values_stub(part)]
    lines += ["class Keywords(TypedDict, total=False):\n", *(line for part in parts() for line in keyword_stub(part))]
    lines += [f"    {name}: {scalar.kind.hint}\n" for name, scalar in SCALARS.items()]
    lines += ["\nclass Switches:\n", *(line for part in parts() for line in switch_stub(part))]
    lines += [f"    {name}: {scalar.kind.hint}\n{quoted(scalar.doc, '    ')}" for name, scalar in SCALARS.items()]
    return "".join(lines)


def formatted(text: str, name: str) -> str:
    for command in (("check", "--fix-only", "--select", "I"), ("format",)):
        words = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(FOLDER / name), "-"]
        text = subprocess.run(words, input=text, capture_output=True, text=True, check=True).stdout
    return text


def stubs() -> dict[str, str]:
    """The texts of both files by name."""
    return {name: formatted(text, name) for name, text in (("__init__.pyi", parts_stub()), ("switches.pyi", switches_stub()))}


if __name__ == "__main__":
    for name, text in stubs().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
