"""A due update passes few files: a reader who follows it opens no more than these."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fleetx
from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.harness import run_ranks

SOURCE = Path(fleetx.__file__).parent
MOST_FILES = 12
READ_FIRST = {"engine/step.py", "engine/window.py", "engine/buckets.py"}
"""Files that docs/architecture.md asks to read, beside engine/slots.py, which runs in no update, and the slot's stage."""


def files_of_an_update(rank: int, strategy: dict[str, Any], momentum: float) -> set[str]:
    """Train past the first updates, which make more checks, and list the files of this library that one more passes."""
    warnings.simplefilter("ignore", FleetWarning)  # 16 bits may be slower here
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy))

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 3]))

    while optimizer.pipeline.index < 3 or not optimizer.due:
        optimizer.minimize(loss())
    passed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            passed.add(frame.f_code.co_filename)

    last = loss()  # its forward is the user's part
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        report = optimizer.minimize(last)
    finally:
        sys.setprofile(before)
    assert report.due and report.updated
    return {str(path.relative_to(SOURCE)) for path in map(Path, passed) if path.is_relative_to(SOURCE)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_due_update_of_plain_training_passes_at_most_twelve_files(ranks: int) -> None:
    for files in run_ranks(files_of_an_update, ranks, {}, 0.0):
        assert len(files) <= MOST_FILES, sorted(files)
        assert files >= READ_FIRST | {"engine/dense_reduce.py"}


def test_amp_merging_and_dgc_add_their_own_files_only() -> None:
    own = {"strategies/amp.py", "reduce/compressor.py", "reduce/dgc.py", "reduce/top_k.py"}
    dgc = {"min_numel": 1, "sparsity": [0.9]}
    strategy = {"amp": {"dtype": "bfloat16"}, "gradient_merge": {"k_steps": 2}, "dgc": dgc}
    for files in run_ranks(files_of_an_update, 2, strategy, 0.9):
        assert len(files - own) <= MOST_FILES, sorted(files)
        assert files >= READ_FIRST | {"reduce/dgc.py"}
