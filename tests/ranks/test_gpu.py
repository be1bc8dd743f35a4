"""On a GPU: two gloo ranks share it, one NCCL rank has it alone, and both do what the CPU does. Skipped without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning
from fleetx.strategies import catalogue
from tests.helpers.fitting import fitting
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, learnable_images

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
    "lars": {"lars": True},
    "lamb": {"lamb": True},
    "lars_fp16_merge_clip": {
        "lars": True, "amp": True, "amp_configs": {"dtype": "float16"}, "clip_norm": True,
        "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2},
    },
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 3}},
    "localsgd_overlap": {"localsgd": True, "localsgd_configs": {"k_steps": 4, "overlap_steps": 2, "outer_momentum": 0.5}},
    "localsgd_fp16": {
        "localsgd": True, "localsgd_configs": {"k_steps": 3, "wire_dtype": "bfloat16", "average_state": True},
        "amp": True, "amp_configs": {"dtype": "float16"},
    },
    "adaptive_localsgd": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2}},
    "localsgd_lamb": {"localsgd": True, "localsgd_configs": {"k_steps": 3}, "lamb": True},
    "dgc": {"dgc": True, "dgc_configs": {"rampup_begin_step": 2, "sparsity": [0.9], "min_numel": 64}},
    "dgc_fp16_merge": {
        "dgc": True, "dgc_configs": {"rampup_begin_step": 1, "sparsity": [0.5, 0.9], "rampup_step": 3, "min_numel": 64},
        "amp": True, "amp_configs": {"dtype": "float16"}, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2},
    },
    "quantised": {"quantized_allreduce": {"bits": 4, "block": 16}},
    "quantised_fp16_small_buckets": {
        "quantized_allreduce": True, "fuse_grad_size_in_MB": 0.002, "amp": True, "amp_configs": {"dtype": "float16"},
    },
    "powersgd": {"powersgd": True, "powersgd_configs": {"begin_step": 2, "rank": 2, "min_compression": 1.0}},
    "powersgd_fp16": {
        "powersgd": True, "powersgd_configs": {"begin_step": 0, "rank": 1, "min_compression": 1.0},
        "amp": True, "amp_configs": {"dtype": "float16"},
    },
}  # fmt: skip
TOLERANCE = {
    "plain": 1e-4, "bf16_wire": 1e-2, "sync_bn": 1e-4, "unused": 1e-4, "lars": 1e-3, "lamb": 1e-2,
    "localsgd": 1e-4, "localsgd_overlap": 1e-4, "adaptive_localsgd": 1e-3, "localsgd_lamb": 1e-2,
}  # fmt: skip
"""LAMB as Adam: where a gradient is rounding noise, so is the direction of a full step."""


def _train(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = cnn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        parts = [name for name in settings if name in catalogue()]
        optimizer = fitting(parts, model.parameters(), lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
        model, ours = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    losses = []
    for micro in range(12):
        x, y = (t.to(fleet.device()) for t in learnable_images(2 * micro + rank))
        report = ours.minimize(F.cross_entropy(model(x), y))
        losses.append(report.loss)
    with ours.averaged():  # the ranks' own, where they do not train alone
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
from tests.helpers.models import cnn, learnable_images
from fleetx import fleet
from fleetx.dist import world
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
    root = Path(__file__).parents[2]
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src")])
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["comm"] == "TorchComm" and "nccl" in said["backend"] and said["device"] == "cuda:0" and said["updated"]


def _dropout_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 4))


def _resumable(rank: int, folder: str, dtype: str, first: int, last: int) -> tuple[list[torch.Tensor], float]:
    """Micro-steps `first` to `last`, in windows of three; what was there before comes from the checkpoint, if there is one."""
    amp = {"dtype": dtype, "incr_every_n_steps": 2}
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 3}, amp=True, amp_configs=amp)
    torch.manual_seed(50 + rank + 1000 * first)
    model = _dropout_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        model, ours = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01), strategy)
    if first:
        assert fleet.load_checkpoint(folder, model=model, optimizer=ours) == (first, {})
    else:
        torch.manual_seed(7 + rank)
    for micro in range(first, last):
        x, y = (t.to(fleet.device()) for t in batch(2 * micro + rank))
        ours.minimize(F.cross_entropy(model(x), y))
    if not first and last < 20:
        fleet.save_checkpoint(folder, step=last, async_save=True, model=model, optimizer=ours)
        for micro in range(3):  # must not change what is being written
            x, y = (t.to(fleet.device()) for t in batch(micro))
            ours.minimize(F.cross_entropy(model(x), y))
        assert fleet.load_checkpoint(folder, model=_dropout_net().to(fleet.device()), optimizer=ours) is not None  # waits for it
    state = [*model.state_dict().values(), *(t for s in ours.state_dict()["state"].values() for t in s.values())]
    return [t.detach().cpu().clone() for t in state], torch.rand(1, device=fleet.device()).item()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_run_resumed_in_mid_window_has_the_bits_of_an_undisturbed_one_on_the_gpu(dtype: str, tmp_path: Path) -> None:
    on_gpu = {"FLEETX_DEVICE": "cuda"}
    whole = run_ranks(_resumable, 2, str(tmp_path), dtype, 0, 20, env=on_gpu)
    run_ranks(_resumable, 2, str(tmp_path), dtype, 0, 11, env=on_gpu)
    resumed = run_ranks(_resumable, 2, str(tmp_path), dtype, 11, 20, env=on_gpu)
    for (mine, my_next), (theirs, their_next) in zip(resumed, whole, strict=True):
        assert my_next == their_next
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def _guarded(rank: int, what: str) -> tuple[str, int]:
    strategy = fleet.DistributedStrategy(desync_check_steps=4, on_nan_inf="off" if what == "stop" else "stop")
    model = _dropout_net()
    model, ours = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), strategy)
    done = 0

    def train() -> None:
        nonlocal done
        for step in range(12):
            x, y = (t.to(fleet.device()) for t in batch(2 * step + rank))
            if what == "nan" and step == 5 and rank == 1:
                x = x * float("nan")
            ours.minimize(F.cross_entropy(model(x), y))
            done += 1
            if step == 5 and rank == 1:
                if what == "drift":
                    with torch.no_grad():
                        model[4].weight[0, 0] += 1e-4
                if what == "stop":
                    os.kill(os.getpid(), signal.SIGTERM)
            if fleet.should_stop():
                return

    return raised(train), done


@pytest.mark.parametrize(
    ("what", "told", "done"),
    [
        ("nothing", "nothing raised", 12),
        ("nan", "FleetError: update 6 was not made: its loss or gradients are not finite. Losses: nan on rank 1.", 6),
        ("drift", "FleetError: after update 8 the ranks no longer hold the same model. Unlike rank 0: rank 1 in 4.weight", 9),
        ("stop", "nothing raised", 8),
    ],
)
def test_guards_and_requests_to_stop_work_on_the_gpu(what: str, told: str, done: int) -> None:
    """What ranks tell each other, and what became of an update, is heard when the next backward begins."""
    for said, count in run_ranks(_guarded, 2, what, env={"FLEETX_DEVICE": "cuda"}):
        assert said.startswith(told)
        assert count == done
