"""Compare docs/architecture.md with the tree: paths, packages, and the layers that import-linter checks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fleetx"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PICTURE = re.findall(r"^```text\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)[0]
PATHS = sorted({span for span in re.findall(r"`([^`\n]+)`", PAGE) if re.fullmatch(r"[\w./]+(/|\.py|\.md|\.toml)", span)})
FROM_ROOT = ("tests/", "docs/", "bench/", "examples/", "src/", "pyproject.toml")


def layers_of_picture() -> list[set[str]]:
    """Return the names of each layer, from top to bottom, without the endings of files."""
    groups = re.split(r"^-+$\n", PICTURE, flags=re.MULTILINE)
    return [{line.split()[0].removesuffix("/").removesuffix(".py") for line in group.splitlines() if line} for group in groups]


def test_the_page_names_many_paths() -> None:
    assert len(PATHS) > 60


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_the_page_exists(path: str) -> None:
    found = (ROOT if path.startswith(FROM_ROOT) else SOURCE) / path
    assert found.is_dir() if path.endswith("/") else found.is_file()


def test_every_package_is_in_the_picture_and_every_entry_exists() -> None:
    entries = [line.split()[0] for line in PICTURE.splitlines() if not line.startswith("-")]
    packages = {f"{init.parent.name}/" for init in SOURCE.glob("*/__init__.py")}
    assert packages == {entry for entry in entries if entry.endswith("/")}
    assert len(entries) == len(set(entries)) and all((SOURCE / entry).exists() for entry in entries)


def test_the_layers_of_the_picture_are_those_that_are_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contract = next(contract for contract in settings["contracts"] if contract["type"] == "layers")
    assert layers_of_picture() == [set(re.split(r" [|:] ", layer)) for layer in contract["layers"]]


def test_the_root_of_the_package_holds_only_public_modules() -> None:
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "fleet.py", "strategy.py", "errors.py"}


def test_names_of_code_in_the_walks_exist() -> None:
    step = (SOURCE / "engine" / "step.py").read_text(encoding="utf-8")
    for name in re.findall(r"`Pipeline\.(\w+)`", PAGE):
        assert f"def {name}(" in step
    build = (SOURCE / "engine" / "setup" / "build.py").read_text(encoding="utf-8")
    assert "class Pipeline" in step and "def compile_strategy(" in build
    assert "CHECKS" in (SOURCE / "doctor" / "examine.py").read_text(encoding="utf-8")
