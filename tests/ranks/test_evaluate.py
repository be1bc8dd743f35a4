"""`evaluate`: one answer on all ranks, whatever share of the data each of them has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.applications.evaluate import eval_mode, evaluate, means
from fleetx.applications.resnet import Resnet20
from fleetx.errors import ConfigError, DataError
from tests.helpers.harness import raised, run_ranks

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


class Counter(nn.Module):
    """A user's own model: `tally` returns the batch itself."""

    def tally(self, batch: Any) -> Any:
        return batch


def evaluate_a_vector_on_rank_one(rank: int) -> str:
    return raised(lambda: evaluate(Counter(), [{"count": 2, "loss": torch.zeros(()) if rank == 0 else torch.zeros(2)}]))


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


def test_three_ranks_of_which_one_has_nothing_count_exactly() -> None:
    whole = {name: float(t) for name, t in model().eval().tally(data()).items()}
    found = run_ranks(evaluate_shard, 3, [[[0]], [], [[1, 2, 3], list(range(4, SAMPLES))]])
    assert found[0] == found[1] == found[2]
    assert (found[0]["count"], found[0]["acc1"], found[0]["acc5"]) == (13.0, whole["acc1"] / 13, whole["acc5"] / 13)


def test_a_rank_without_a_batch_takes_part() -> None:
    found = run_ranks(evaluate_shard, 2, [[], [list(range(SAMPLES))]])
    assert found[0] == found[1]
    assert found[0]["count"] == SAMPLES


def test_a_failure_on_one_rank_is_raised_on_all_instead_of_a_wait() -> None:
    good, bad = run_ranks(evaluate_with_a_bad_label_on_rank_one, 2)
    assert bad.startswith("DataError: sample 0 of the batch has label 10")
    assert good.startswith("DataError: the evaluation failed on rank 1: DataError: sample 0 of the batch has label 10")


def test_a_tally_that_cannot_be_added_up_on_one_rank_is_an_error_on_all() -> None:
    good, bad = run_ranks(evaluate_a_vector_on_rank_one, 2)
    assert bad.startswith("DataError: `tally` returned a tensor of shape [2] as `loss`; it must be one number")
    assert good.startswith("DataError: the evaluation failed on rank 1: DataError: `tally` returned a tensor of shape [2]")


@pytest.mark.usefixtures("alone")
def test_the_tally_of_any_module_may_hold_numbers_and_tensors_of_any_type() -> None:
    first = {"count": 3, "loss": torch.tensor(1.5, dtype=torch.bfloat16)}
    assert evaluate(Counter(), [first, {"count": torch.tensor(1), "loss": 0.5}]) == {"count": 4.0, "loss": 0.5}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("tallies", "message"),
    [
        ([{"loss": 1.0, "count": 2}], r"returned \['loss', 'count'\]; it must return a dict whose first entry is `count`"),
        ([{}], r"returned \[\]; it must return a dict"),
        ([3.0], "returned float; it must return a dict"),
        ([{"count": 2, "acc1": True}], "returned True as `acc1`; it must be one number"),
        ([{"count": 2, "acc1": None}], "returned None as `acc1`; it must be one number"),
        ([{"count": 2, "a": 1.0}, {"count": 2}], r"returned \['count'\] for one batch and \['count', 'a'\] for those before"),
    ],
)
def test_a_tally_whose_means_would_be_wrong_is_refused(tallies: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        evaluate(Counter(), tallies)


@pytest.mark.usefixtures("alone")
def test_a_model_without_a_tally_is_told_what_to_write() -> None:
    with pytest.raises(ConfigError, match="Linear has no `tally`. Give it a method tally.batch. that returns sums"):
        evaluate(nn.Linear(2, 2), [torch.zeros(1, 2)])


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
