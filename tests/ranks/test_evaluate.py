"""`evaluate`: one answer on all ranks, whatever share of the data each of them has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.applications.evaluate import eval_mode, evaluate, means
from fleetx.applications.resnet import Resnet20
from fleetx.errors import DataError
from harness import raised, run_ranks

SAMPLES = 13


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 3, 8, 8, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator)


def batches(rows: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return [(x[row], y[row]) for row in rows]


def model() -> Resnet20:
    torch.manual_seed(0)
    return Resnet20(width=4, image_size=8)


def evaluate_shard(rank: int, shards: list[list[list[int]]]) -> dict[str, float]:
    return evaluate(model(), batches(shards[rank]))


def evaluate_with_a_bad_label_on_rank_one(rank: int) -> str:
    x, y = data()
    y = y if rank == 0 else torch.full_like(y, 10)
    return raised(lambda: evaluate(model(), [(x, y)]))


def test_unequal_shards_and_batches_give_the_means_over_all_samples_on_every_rank() -> None:
    whole = {name: float(t) for name, t in model().eval().tally(data()).items()}
    shards = [[[0, 1, 2], [3, 4, 5, 6, 7, 8]], [[9, 10, 11, 12]]]
    found = run_ranks(evaluate_shard, 2, shards)
    assert found[0] == found[1]
    assert (found[0]["count"], found[0]["acc1"], found[0]["acc5"]) == (13.0, whole["acc1"] / 13, whole["acc5"] / 13)
    assert found[0]["loss"] == pytest.approx(whole["loss"] / 13, rel=1e-6)  # float32 sums of other batch sizes


def test_a_rank_without_a_batch_takes_part() -> None:
    found = run_ranks(evaluate_shard, 2, [[], [list(range(SAMPLES))]])
    assert found[0] == found[1]
    assert found[0]["count"] == SAMPLES


def test_a_failure_on_one_rank_is_raised_on_all_instead_of_a_wait() -> None:
    good, bad = run_ranks(evaluate_with_a_bad_label_on_rank_one, 2)
    assert bad.startswith("DataError: sample 0 of the batch has label 10")
    assert good.startswith("DataError: the evaluation failed on rank 1: DataError: sample 0 of the batch has label 10")


@pytest.mark.usefixtures("alone")
def test_no_batch_on_any_rank_is_refused() -> None:
    with pytest.raises(DataError, match="no batch on any rank"):
        evaluate(model(), [])


@pytest.mark.usefixtures("alone")
def test_the_mode_of_every_module_and_its_buffers_are_as_before() -> None:
    net = model().train()
    net.bn1.eval()  # frozen on purpose
    before = {name: t.clone() for name, t in net.state_dict().items()}
    evaluate(net, batches([[0, 1], [2]]))
    assert [name for name, m in net.named_modules() if not m.training] == ["bn1"]
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_the_mode_comes_back_after_an_error_too() -> None:
    net = nn.Sequential(nn.Dropout())

    def fail() -> Any:
        with eval_mode(net):
            assert not net[0].training
            raise DataError("a sample")

    with pytest.raises(DataError, match="a sample"):
        fail()
    assert net.training
    assert net[0].training


def test_each_sum_is_divided_by_the_count_before_it() -> None:
    sums = {"count": 4.0, "loss": 2.0, "mlm_acc": 1.0, "pairs": 2.0, "nsp_acc": 1.0}
    assert means(sums) == {"count": 4.0, "loss": 0.5, "mlm_acc": 0.25, "pairs": 2.0, "nsp_acc": 0.5}
    assert str(means({"count": 1.0, "loss": 3.0, "pairs": 0.0, "nsp_acc": 0.0})["nsp_acc"]) == "nan"
