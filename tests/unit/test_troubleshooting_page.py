"""The troubleshooting page: every text it quotes is one that the library, or torch, can print."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

import fleetx
from fleetx import fleet
from tests.helpers.documents import ROOT, read_blocks
from tests.helpers.quoted import is_said, plain

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OTHERS = "From torch, NCCL, gloo and the system"
ONLY_WITH_CUDA = ("torch.OutOfMemoryError", "Watchdog caught", "Duplicate GPU", "ncclSystemError")
"""Said by libraries that a CPU build of torch has not."""


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def quoted(heading: str) -> list[str]:
    return [plain(block.text) for block in read_blocks(sections()[heading]) if block.language == "text"]


OURS = [text for heading in sections() if heading != OTHERS for text in quoted(heading)]


def test_there_are_entries_in_every_group_and_none_twice() -> None:
    assert 40 <= len(OURS) <= 70
    assert len({*OURS}) == len(OURS)
    assert all(quoted(heading) for heading in sections() if heading != "None of these")


@pytest.mark.parametrize("text", OURS)
def test_a_quoted_text_is_in_the_source(text: str) -> None:
    conflict = re.match(r"(\w+) and (\w+) both claim ", text)
    if conflict is not None:
        said = fleet.DistributedStrategy(**dict.fromkeys(conflict.groups(), True)).explain()
        assert f"Conflict: {text}" in said.splitlines()
    else:
        assert is_said(text), f"no message says: {text}"


def test_a_text_that_no_message_says_is_found_out() -> None:
    assert not is_said("strategy.lars takes the place of torch.optim.SGD; the one you have is AdamW.")
    assert not is_said("this window is already reduced. Call optimizer.step() first.")
    assert not is_said("the ranks do not meet at this place: …")


def test_every_entry_says_what_to_do() -> None:
    for heading, text in sections().items():
        entries = re.findall(r"^```text\n.*?^```\n\n(.*?)(?=\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
        assert len(entries) == len(quoted(heading))
        assert all(re.search(r"\S\. \*\*Do:\*\* \S.*\.$", plain(entry)) for entry in entries), heading


def test_texts_of_torch_are_in_torch() -> None:
    theirs = [text.removesuffix("…").strip() for text in quoted(OTHERS) if not text.startswith(ONLY_WITH_CUDA)]
    assert len(theirs) >= 4
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        assert [text for text in theirs if binary.find(text.encode()) < 0] == []


def test_the_kinds_of_error_are_those_that_there_are() -> None:
    named = set(re.findall(r"`(?:fleetx\.errors\.)?(\w+(?:Error|Conflict|Warning))`", PAGE.split("\n## ")[0]))
    kinds = {name for name, value in vars(fleetx.errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert named == kinds
