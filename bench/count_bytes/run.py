"""Does the byte counter of the report tell the truth? What it counts beside what the link itself has counted.

    python -m bench.cluster.run --hosts 2 bench/count_bytes/run.py                                   every reducer there is
    python -m bench.cluster.run --hosts 3 bench/count_bytes/run.py '{"bf16_allreduce": true}'        these strategies

One rank on each host trains a small MLP. Both counters run from after `fleet.distribute` to the last update, all ranks between
barriers: start-up is in neither. Of the link's bytes those of the headers are taken off (66 for each packet: Ethernet 14, IP 20,
TCP with a timestamp 32); what is left is what was handed to the network. Rank 0 prints one line of JSON for each strategy.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bench.lib.link_bytes import payload_bytes
from fleetx import fleet
from fleetx.engine.slots import Slot
from fleetx.errors import ConfigError
from fleetx.strategies import catalogue

WIDTHS = (512, 1024, 1024)
UPDATES = 12
CONFIGS: dict[str, dict[str, Any]] = {
    "localsgd": {"k_steps": 2},
    "adaptive_localsgd": {"init_k_steps": 2, "max_k_steps": 4},
    "powersgd": {"begin_step": 2},
    "dgc": {"sparsity": [0.99]},
}
"""With their own defaults some would send next to nothing of a model this small."""


def reducers() -> dict[str, dict[str, Any]]:
    """A strategy, as in JSON, for each available part that decides how gradients travel, and for none of them."""
    names = [name for name, part in catalogue().items() if Slot.REDUCE in part().claims()]
    chosen = {name: {name: True, **({f"{name}_configs": CONFIGS[name]} if name in CONFIGS else {})} for name in names}
    return {"dense": {}, **chosen}


def train(strategy: fleet.DistributedStrategy, interface: str) -> tuple[int, int]:
    """Bytes as counted by the reports, and by the link."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*widths) for widths in itertools.pairwise(WIDTHS)))
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), strategy)
    torch.manual_seed(1 + fleet.worker_index())
    fleet.util.barrier()
    before = payload_bytes(interface)
    counted = 0
    for _ in range(UPDATES):
        counted += optimizer.minimize(model(torch.randn(4, WIDTHS[0], device=fleet.device())).square().mean()).bytes_sent
    fleet.util.barrier()  # who is past it has all that the others sent
    return counted, payload_bytes(interface) - before


def main(texts: Sequence[str]) -> int:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is None:
        raise ConfigError("GLOO_SOCKET_IFNAME is not set, so that no link can be read. Run this through bench.cluster.run.")
    fleet.init()
    if fleet.worker_num() != fleet.node_num():
        raise ConfigError(
            f"{fleet.worker_num()} ranks are on {fleet.node_num()} hosts; a link tells of one rank only with one on each."
        )
    for text in texts or [json.dumps(strategy) for strategy in reducers().values()]:
        counted, sent = train(fleet.DistributedStrategy.from_json(text), interface)
        rows = fleet.util.all_gather([counted, sent])
        if fleet.is_first_worker():
            told = {
                "strategy": json.loads(text),
                "counted_bytes": [row[0] for row in rows],
                "link_bytes": [row[1] for row in rows],
            }
            print(json.dumps({**told, "ratios": [round(row[0] / row[1], 4) for row in rows]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
