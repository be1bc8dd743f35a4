"""A loop that Ray Train runs in its workers, and that runs anywhere else; as a script, the driver: ray_runs.py FOLDER.

Every worker writes what it saw to FOLDER/rank-N.json, and once it has failed and was started again to resumed-N.json. Ray sends
its functions by value, since they are a script's.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

UPDATES = 14
STRATEGIES: dict[str, dict[str, dict[str, Any]]] = {
    "neutral": {},
    "lars": {"lars": {}},
    "gradient_merge": {"gradient_merge": {"k_steps": 2}},
    "localsgd": {"localsgd": {"k_steps": 2}},
}


def strategy_of(parts: dict[str, dict[str, Any]]) -> Any:
    from fleetx import fleet

    strategy = fleet.DistributedStrategy()
    for name, configs in parts.items():
        setattr(strategy, name, True)
        setattr(strategy, f"{name}_configs", configs)
    return strategy


def make_pair() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


def make_batches(rank: int) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(70 + rank)
    batches = [torch.randn(4, 8, generator=generator) for _ in range(UPDATES)]
    return [(x, (x[:, :3].sum(1, keepdim=True) > 0).float()) for x in batches]


def loss_of(net: Any, batch: Any) -> Any:
    import torch

    return torch.nn.functional.binary_cross_entropy_with_logits(net(batch[0]), batch[1])


def weights_of(net: Any) -> list[float]:
    return [value for param in net.parameters() for value in param.detach().flatten().tolist()]


def train(rank: int, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The user's loop, with the one call."""
    from fleetx import fleet

    net, given = make_pair()
    net, optimizer = fleet.distribute(net, given, strategy_of(parts))
    losses = [optimizer.minimize(loss_of(net, batch)).loss for batch in make_batches(rank)]
    optimizer.average()
    return {"losses": losses, "weights": weights_of(net)}


def train_as_ray_does(rank: int) -> dict[str, Any]:
    """Ray's own way: the model in DDP."""
    import ray.train.torch

    net, optimizer = make_pair()
    net = ray.train.torch.prepare_model(net)
    losses = []
    for batch in make_batches(rank):
        loss = loss_of(net, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights_of(net), "class": type(net).__name__}


def save_and_fail(rank: int, folder: str) -> None:
    """Half of the updates, a checkpoint that is handed to Ray, and an error: Ray starts the workers again."""
    import ray.train

    from fleetx import fleet

    net, given = make_pair()
    net, optimizer = fleet.distribute(net, given, strategy_of(STRATEGIES["localsgd"]))
    for batch in make_batches(rank)[: UPDATES // 2]:
        optimizer.minimize(loss_of(net, batch))
    fleet.save_checkpoint(f"{folder}/saved", step=UPDATES // 2, model=net, optimizer=optimizer)
    mine = ray.train.Checkpoint.from_directory(f"{folder}/saved") if fleet.is_first_worker() else None
    ray.train.report({"step": UPDATES // 2}, checkpoint=mine)
    raise RuntimeError("half of the way")


def go_on(rank: int, found: Any) -> dict[str, Any]:
    from fleetx import fleet

    net, given = make_pair()
    net, optimizer = fleet.distribute(net, given, strategy_of(STRATEGIES["localsgd"]))
    with found.as_directory() as path:
        step = fleet.load_checkpoint(path, model=net, optimizer=optimizer).step
    for batch in make_batches(rank)[step:]:
        optimizer.minimize(loss_of(net, batch))
    optimizer.average()
    return {"step": step, "weights": weights_of(net)}


def wrapped_by_ray(parts: dict[str, dict[str, Any]], **options: Any) -> str:
    import ray.train.torch

    from fleetx import fleet

    net, given = make_pair()
    try:
        fleet.distribute(ray.train.torch.prepare_model(net, **options), given, strategy_of(parts))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def ask_to_stop() -> dict[str, Any]:
    """Not in the main thread, and no pair is asked: each call is a question to all ranks."""
    import warnings

    from fleetx import fleet

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        answers = [fleet.should_stop() for _ in range(2)]
    return {"answers": answers, "heard": [str(warning.message) for warning in heard]}


def in_a_worker(config: dict[str, Any]) -> None:
    import ray.train
    import torch

    from fleetx import fleet

    torch.set_num_threads(1)
    fleet.init()
    rank, folder, found = fleet.worker_index(), config["folder"], ray.train.get_checkpoint()
    if found is not None:
        return write(f"{folder}/resumed-{rank}.json", go_on(rank, found))
    told = {
        "place": [fleet.worker_num(), fleet.node_num(), fleet.local_rank(), str(fleet.device())],
        "endpoints": len(set(fleet.worker_endpoints())),
        "stop": ask_to_stop(),
        "ray": train_as_ray_does(rank),
        **{name: train(rank, parts) for name, parts in STRATEGIES.items()},
        "wrapped": wrapped_by_ray(STRATEGIES["localsgd"]),
        "unwrapped": wrapped_by_ray(STRATEGIES["localsgd"], parallel_strategy=None),
    }
    write(f"{folder}/rank-{rank}.json", told)
    return save_and_fail(rank, folder)


def write(path: str, told: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(told, file)


def drive(folder: str) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, logging_level="error")
    trainer = TorchTrainer(
        in_a_worker,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/storage", name="run", failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    drive(sys.argv[1])
