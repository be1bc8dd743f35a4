"""What an import of FleetX loads beside torch: few packages, each for a reason. All else is imported where it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOADED_BY = """
import json, sys

def packages():
    return {name.partition(".")[0] for name, module in list(sys.modules.items()) if getattr(module, "__file__", None)}

before = packages()
if %(torch)r:
    import torch
    before |= packages()
%(statement)s
print(json.dumps(sorted(packages() - before - sys.stdlib_module_names)))
"""
TIME_LIMIT_S = 120


@pytest.mark.parametrize(
    ("statement", "after_torch", "expected"),
    [
        ("import fleetx", False, ["fleetx"]),
        ("from fleetx import fleet", True, ["fleetx"]),
        ("from fleetx import applications", True, ["PIL", "fleetx"]),
    ],
)
def test_an_import_loads_these_packages_and_no_others(statement: str, after_torch: bool, expected: list[str]) -> None:
    code = LOADED_BY % {"torch": after_torch, "statement": statement}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == expected
