"""What an error for want of memory ends with: what would fit, in the numbers of the run, without what is on already."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fleetx import fleet
from fleetx.engine.memory_advice import Held, advice, advise, budget_within, lacks_memory, ways_out
from tests.helpers.harness import run_ranks

GIB = 2**30
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.7 GiB of which 1.1 GiB is free."


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_for_want_of_memory_are_known(error: BaseException, lacks: bool) -> None:
    assert lacks_memory(error) is lacks


def test_the_advice_has_the_numbers_of_the_run() -> None:
    first, *ways, last = advice(on=(), device="cuda:0", total_bytes=32 * GIB, held=Held(2 * GIB, 2 * GIB, 4 * GIB))
    assert first == (
        "fleetx: out of memory: cuda:0 has 32 GiB; weights take 2 GiB, gradients 2 GiB, the optimizer's state 4 GiB, and a batch "
        "comes on top. What makes room:"
    )
    assert len(ways) == 3 and 'recompute_configs = {"budget": "28GiB"}' in ways[1] and 'budget="28GiB"' in ways[2]
    assert "strategy.amp = True" in ways[0] and "fleetx plan --estimate" in last


def test_what_is_on_already_is_not_advised() -> None:
    told = "\n".join(ways_out(on=("amp", "recompute", "gradient_merge"), total_bytes=8 * GIB, held=Held(GIB)))
    assert "strategy.amp" not in told and "strategy.gradient_merge" not in told
    assert '"offload"] = True' in told and 'budget="7GiB"' in told


def test_where_the_weights_alone_are_too_many_no_batch_is_advised() -> None:
    assert ways_out(on=(), total_bytes=GIB, held=Held(GIB)) == [
        "no batch is small enough: a smaller model, or a device with more memory"
    ]


def test_a_budget_leaves_a_tenth_and_is_read_back() -> None:
    assert (budget_within(32 * GIB), budget_within(2 * GIB)) == ("28GiB", "1843MiB")


def advised_in_training(rank: int) -> list[str]:
    model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB
    model, optimizer = fleet.distribute(model, torch.optim.Adam(model.parameters()))
    optimizer.minimize(model(torch.ones(2, 1024)).sum())
    error = torch.OutOfMemoryError(CUDA)
    again = advise(error)
    assert advise(error) == again and error.__notes__ == ["\n".join(again)], "noted once"
    assert advise(ValueError("no such sample")) == []
    return again


def test_weights_gradients_and_state_are_those_of_this_process() -> None:
    [[first, *_]] = run_ranks(advised_in_training, 1)
    assert "weights take 4 MiB, gradients 4 MiB, the optimizer's state 8 MiB, and a batch comes on top" in first


def test_a_plain_script_ends_with_the_advice_below_its_traceback() -> None:
    script = (
        "import torch\nfrom fleetx import fleet\nmodel = torch.nn.Linear(4, 2)\n"
        "model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "optimizer.minimize(model(torch.ones(1 << 55, 4)).sum())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "DefaultCPUAllocator" in ended.stderr
    told = ended.stderr[ended.stderr.index("fleetx: out of memory: the host has") :]
    assert "strategy.recompute = True" in told and "fleet.find_batch(" in told
