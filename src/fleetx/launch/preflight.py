"""Check the script once before any rank starts, so that a mistake in it is one message instead of one per rank."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tokenize
import warnings
import zipfile
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

from ..errors import LaunchError
from .console import escape

WIDTH = 120


class NoInput(LaunchError):
    """The script or module does not exist, or cannot be read."""


class DoesNotCompile(LaunchError):
    """The script cannot be compiled."""


def check_working_folder() -> None:
    """Raise if the working folder was removed: relative paths, logs and imports need it."""
    try:
        os.getcwd()
    except OSError as error:
        raise NoInput(f"the working folder is gone: {error.strerror}. Change to one that exists.") from error


def check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir():
        raise NoInput(f"{target!r} is a folder; name the script in it, such as {str(path / 'train.py')!r}.")
    if not path.exists():
        raise NoInput(f"there is no script {target!r}; the working folder is {os.getcwd()}.")
    if not path.is_file():
        raise NoInput(f"{target!r} is not a regular file, so that every rank could read it.")
    compile_file(path)


def check_module(name: str, search_path: Iterable[str]) -> None:
    """Find and compile a module as a rank will, with the working folder first on the path."""
    before = sys.path[:]
    sys.path[:] = list(search_path)
    try:
        spec = _find_main(name)
    finally:
        sys.path[:] = before
    if spec.origin is not None and spec.origin.endswith(".py"):
        compile_file(Path(spec.origin))


def _find_main(name: str) -> ModuleSpec:
    spec = find_without_import(name) or _find_by_import(name)
    if spec is None:
        raise NoInput(f"there is no module {name!r} to be found from {os.getcwd()}.")
    if spec.submodule_search_locations is None:
        return spec
    main = find_without_import(f"{name}.__main__") or _find_by_import(f"{name}.__main__")
    if main is None:
        raise NoInput(f"{name!r} is a package without a __main__ module; name the module in it to run.")
    return main


def find_without_import(name: str) -> ModuleSpec | None:
    """Find a module like importlib.util.find_spec, but without importing its parent packages, which may import torch or print."""
    spec, places = None, None
    if not all(name.split(".")):
        return None
    importlib.invalidate_caches()
    for depth in range(1, name.count(".") + 2):
        partial = ".".join(name.split(".")[:depth])
        try:
            candidates = (finder.find_spec(partial, places) for finder in sys.meta_path)
            spec = next((candidate for candidate in candidates if candidate is not None), None)
        except KeyError:  # inside a folder without __init__.py, whose path is looked up in its parent, which is not imported
            return None
        if spec is None or (partial != name and spec.submodule_search_locations is None):
            return None
        places = spec.submodule_search_locations
    return spec


def _find_by_import(name: str) -> ModuleSpec | None:
    """Find a module whose package computes its path on import."""
    with contextlib.suppress(Exception, SystemExit):
        return importlib.util.find_spec(name)
    return None


def compile_file(path: Path) -> None:
    try:
        if zipfile.is_zipfile(path) or path.read_bytes()[:4] == importlib.util.MAGIC_NUMBER:
            return  # Python runs these too; they are compiled already
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks print them
            compile(source, str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise NoInput(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    except SyntaxError as error:
        raise DoesNotCompile(describe_syntax_error(error, path)) from error
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:  # NUL bytes, a wrong encoding, endless nesting
        raise DoesNotCompile(f"{path}: not Python: {escape(str(error))}.") from error


def describe_syntax_error(error: SyntaxError, path: Path) -> str:
    """Format file and line as editors open them, the error, the source line, and a caret below the place."""
    what = f"{type(error).__name__}: {escape(error.msg)}"
    if error.lineno is None:
        return f"{path}: {what}"
    lines = [f"{path}:{error.lineno}: {what}"]
    text = (error.text or "").rstrip().expandtabs(1)
    code = text.lstrip()
    if code:
        lines.append(f"    {escape(code)[:WIDTH]}")
        column = (error.offset or 0) - 1 - (len(text) - len(code))
        if 0 <= column < WIDTH:
            lines.append(f"    {' ' * column}^")
    return "\n".join(lines)
