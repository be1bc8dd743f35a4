"""The advice to compute a large head on labelled tokens alone: for whom it is, and where it is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.engine.modules.large_head import LARGE_VOCABULARY, advice_on_head
from fleetx.errors import ConfigError
from fleetx.integrations.lean_head import lean


class Words(nn.Module):
    """As models of transformers have it."""

    def __init__(self, words: int = LARGE_VOCABULARY, *, hidden: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(2)))
        self.head = nn.Linear(hidden, words)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))


def test_it_is_for_a_plain_head_of_a_large_vocabulary() -> None:
    assert "makes 8,192 numbers for each token" in advice_on_head(Words())
    assert advice_on_head(Words(LARGE_VOCABULARY - 1)) == advice_on_head(nn.Linear(4, LARGE_VOCABULARY)) == ""
    assert advice_on_head(lean(Words())) == ""


@pytest.mark.usefixtures("alone")
def test_budgets_and_plans_give_it() -> None:
    model, x = Words(), torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = fleet.DistributedStrategy(recompute={"budget": 1000})
    with pytest.raises(ConfigError, match=r"no plan keeps to it.*transformers\.lean\(model\)"):
        fleet.distribute(model, optimizer, strategy, sample=x, loss_fn=loss_of)
    with pytest.raises(ConfigError, match=r"a batch of 1 needs.*transformers\.lean\(model\)"):
        fleet.find_batch(model, optimizer, sample=x, loss_fn=loss_of, budget=1000)


@pytest.mark.usefixtures("alone")
def test_a_backward_that_runs_out_of_memory_says_what_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, gives_it in ((Words(), True), (Words(10), False)):
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = loss_of(model, torch.randn(8, 4))

        def out_of_memory(_: Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        model.head.weight.register_hook(out_of_memory)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
            optimizer.minimize(loss)
        [note] = caught.value.__notes__
        assert "fleet.find_batch(...) finds what fits." in note and ("lean(model)" in note) == gives_it
