"""On a GPU: two gloo ranks share it, one NCCL rank has it alone, and both do what the CPU does. Skipped without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning
from harness import run_ranks
from models import batch, cnn, learnable_images

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
    "fp16": {"amp": True, "amp_configs": {"dtype": "float16"}},
    "fp16_merge_clip": {
        "amp": True, "amp_configs": {"dtype": "float16"}, "clip_norm": True,
        "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2},
    },
    "bf16_wire": {"bf16_allreduce": True},
    "sync_bn": {"sync_batch_norm": True},
    "unused": {"find_unused_parameters": True},
}  # fmt: skip
TOLERANCE = {"plain": 1e-4, "bf16_wire": 1e-2, "sync_bn": 1e-4, "unused": 1e-4}


def _train(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = cnn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, ours = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    losses = []
    for micro in range(12):
        x, y = (t.to(fleet.device()) for t in learnable_images(2 * micro + rank))
        report = ours.minimize(F.cross_entropy(model(x), y))
        losses.append(report.loss)
    state = torch.cat([t.detach().double().cpu().flatten() for t in model.state_dict().values()])
    return {"state": state, "losses": losses, "device": str(next(model.parameters()).device), "skipped": report.skipped}


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_gloo_ranks_sharing_a_gpu_equal_the_cpu(name: str) -> None:
    on_cpu = run_ranks(_train, 2, STRATEGIES[name], env={"FLEETX_DEVICE": "cpu"})
    on_gpu = run_ranks(_train, 2, STRATEGIES[name], env={"FLEETX_DEVICE": "cuda"})
    assert {r["device"] for r in on_gpu} == {"cuda:0"} and {r["device"] for r in on_cpu} == {"cpu"}
    torch.testing.assert_close(on_gpu[0]["state"], on_gpu[1]["state"], rtol=0, atol=0)
    tolerance = TOLERANCE.get(name, 3e-2)
    torch.testing.assert_close(on_gpu[0]["state"], on_cpu[0]["state"], rtol=tolerance, atol=tolerance)


def _overflow(rank: int) -> dict[str, Any]:
    model = cnn()
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "float16", "decr_every_n_nan_or_inf": 1})
    model, ours = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), strategy)
    reports = []
    for step in range(4):
        x, y = (t.to(fleet.device()) for t in batch(2 * step + rank, shape=(1, 6, 6)))
        loss = F.cross_entropy(model(x), y) * (float("inf") if step == 1 and rank == 1 else 1.0)
        report = ours.minimize(loss)
        reports.append((report.due, report.updated, report.loss_scale))
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return {"reports": reports, "finite": finite, "state": torch.cat([p.detach().cpu().flatten() for p in model.parameters()])}


def test_an_overflow_on_one_rank_is_agreed_on_the_gpu_too() -> None:
    ranks = run_ranks(_overflow, 2, env={"FLEETX_DEVICE": "cuda"})
    for rank in ranks:
        assert rank["reports"] == [(True, True, 32768.0), (True, False, 32768.0), (True, True, 16384.0), (True, True, 16384.0)]
        assert rank["finite"]
    torch.testing.assert_close(ranks[0]["state"], ranks[1]["state"], rtol=0, atol=0)


NCCL_SCRIPT = """
import json, torch
from torch.nn import functional as F
from models import cnn, learnable_images
from fleetx import fleet, world
fleet.init()
model = cnn()
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                                    fleet.DistributedStrategy(amp=True, gradient_merge=True, clip_norm=True))
for step in range(6):
    x, y = (t.to(fleet.device()) for t in learnable_images(step))
    report = optimizer.minimize(F.cross_entropy(model(x), y))
import torch.distributed as dist
print(json.dumps({"comm": type(world.current().comm).__name__, "backend": str(dist.get_backend_config()), "loss": report.loss,
                  "updated": report.updated, "device": str(fleet.device())}))
"""


def test_one_nccl_rank_runs_the_same_code_path(tmp_path: Path) -> None:
    script = tmp_path / "nccl.py"
    script.write_text(NCCL_SCRIPT)
    tests = Path(__file__).parent.parent
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    env["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent / "src")])
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["comm"] == "TorchComm" and "nccl" in said["backend"] and said["device"] == "cuda:0" and said["updated"]
