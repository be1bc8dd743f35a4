"""Check versions of Python, torch, fleetx and its dependencies, and the extras. Pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .facts import Facts, Package
from .finding import Finding, note, ok, problem

TESTED_TORCH = ("2.10", "2.15")
"""First and last version of torch that the tests have run with; `make test-newest` runs them with the newest."""
_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*(?:\(?\s*>=\s*([0-9][0-9.]*)[^;]*)?(?:;.*?extra\s*==\s*['\"]([^'\"]+)['\"].*)?"
)


def parse_requirement(text: str) -> Package | None:
    """Parse "scikit-learn>=1.4; extra == 'demo'" into a Package without an installed version."""
    match = _REQUIREMENT.match(text)
    return Package(match[1], match[2] or "", None, match[3] or "") if match else None


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers by which versions are compared: "2.13.0+cpu" gives (2, 13, 0)."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def is_older(version: str, least: str) -> bool:
    own, wanted = numbers(version), numbers(least)
    length = max(len(own), len(wanted))
    return own + (0,) * (length - len(own)) < wanted + (0,) * (length - len(wanted))


def check(facts: Facts) -> Iterable[Finding]:
    topic, software = "versions", facts.software
    if is_older(software.python, software.wanted_python):
        fix = f"make a virtual environment with Python {software.wanted_python} or later"
        yield problem(topic, f"Python {software.python} is too old", fix)
    if software.torch_error:
        yield problem(topic, f"torch cannot be imported: {software.torch_error}", "pip install --force-reinstall torch")
    hard = [package for package in software.packages if not package.extra]
    for package in hard:
        wanted = f"{package.name}>={package.wanted}" if package.wanted else package.name
        if package.version is None:
            yield problem(topic, f"{package.name} is not installed", f'pip install "{wanted}"')
        elif package.wanted and is_older(package.version, package.wanted):
            yield problem(topic, f"{package.name} {package.version} is too old", f'pip install "{wanted}"')
    yield from _own(facts)
    yield from _torch(hard)
    there = ", ".join(f"{package.name} {package.version}" for package in hard if package.version is not None)
    yield ok(topic, f"fleetx {software.fleetx}, Python {software.python}" + (f", {there}" if there else ""))


def _torch(packages: Iterable[Package]) -> Iterable[Finding]:
    """Say which versions of torch are tested; a newer one may well work."""
    first, last = TESTED_TORCH
    installed = next((one.version for one in packages if one.name == "torch"), None)
    if installed is None or is_older(installed, first):
        return
    if numbers(installed)[:2] > numbers(last):
        what = f"torch {installed} is newer than what fleetx was tested with: {first} to {last}"
        yield note("versions", what, f'if something fails: pip install "torch=={last}.*"')
    else:
        yield ok("versions", f"torch {installed} is in the tested range, {first} to {last}")


def _own(facts: Facts) -> Iterable[Finding]:
    software = facts.software
    if software.installed is None:
        what = "fleetx runs from its sources and is not installed: its requirements were not checked"
        yield note("versions", what, "pip install -e .")
    elif software.installed != software.fleetx:
        what = f"the fleetx that runs is {software.fleetx}, the installed one {software.installed}"
        yield note("versions", what, "pip install -e . once more, or take the other one off PYTHONPATH")


def check_extras(facts: Facts) -> Iterable[Finding]:
    extras = dict.fromkeys(package.extra for package in facts.software.packages if package.extra not in ("", "dev"))
    there, missing = [], []
    for extra in extras:
        absent = [one.name for one in facts.software.packages if one.extra == extra and one.version is None]
        old = [
            one.name
            for one in facts.software.packages
            if one.extra == extra and one.version and is_older(one.version, one.wanted)
        ]
        if old:
            yield note("extras", f"{extra}: {', '.join(old)} too old", f'pip install --upgrade "fleetx[{extra}]"')
        elif absent:
            missing.append(f"{extra} ({', '.join(absent)})")
        else:
            there.append(extra)
    if there:
        yield ok("extras", f"installed: {', '.join(there)}")
    if missing:
        yield ok("extras", f'not installed: {"; ".join(missing)}. To install one: pip install "fleetx[NAME]"')


def check_triton(facts: Facts) -> Iterable[Finding]:
    names = {package.name for package in facts.software.packages if package.version is not None}
    if facts.devices.gpus and "triton" not in names:
        yield note("versions", "triton is not installed: LARS, LAMB and DGC use torch's slower operations", "pip install triton")
