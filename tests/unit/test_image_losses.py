"""Image models: the loss, top-1 and top-5 accuracy, the sums of an evaluation, and batches that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fleetx.applications.image_model import topk_correct
from fleetx.applications.resnet import Resnet20
from fleetx.errors import ConfigError, DataError


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def digits(count: int) -> tuple[Tensor, Tensor]:
    """8x8 pixels as they are, the grey repeated as three colours."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    pixels = torch.tensor(data.images[:count], dtype=torch.float32)
    return (pixels / 16 - 0.3).unsqueeze(1).expand(-1, 3, 8, 8).contiguous(), torch.tensor(data.target[:count])


def test_the_loss_is_cross_entropy_with_label_smoothing_by_hand() -> None:
    model = Resnet20(3, image_size=8, label_smoothing=0.3).double().eval()
    x, labels = images(4), torch.tensor([0, 1, 2, 1])
    log_p = model(x).log_softmax(1)
    target = F.one_hot(labels, 3).double() * 0.7 + 0.1
    torch.testing.assert_close(model.loss((x, labels)), -(target * log_p).sum(1).mean(), rtol=1e-12, atol=0)
    assert model.loss((x, labels.int())).dtype == torch.float64


def test_the_loss_of_16_bit_logits_is_taken_in_float32() -> None:
    model = Resnet20(image_size=8).bfloat16().eval()
    batch = images(4).bfloat16(), torch.tensor([0, 1, 2, 9])
    loss = model.loss(batch)
    torch.testing.assert_close(loss, F.cross_entropy(model(batch[0]).float(), batch[1]), rtol=0, atol=0)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("label", [-1, 10, -100])
def test_a_label_out_of_range_is_named_with_its_sample_and_what_is_allowed(label: int) -> None:
    model = Resnet20(image_size=8)
    with pytest.raises(DataError, match=f"sample 2 of the batch has label {label}; labels must be from 0 to 9"):
        model.loss((images(4).float(), torch.tensor([0, 9, label, 3])))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2, 3, 8, 8), "was given float32 of shape .2, 3, 8, 8.; a batch is a pair"),
        ([torch.zeros(2, 3, 8, 8)] * 3, "was given a list of 3; a batch is a pair"),
        ({"images": 1}, "was given a dict; a batch is a pair"),
        ((torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2).long()), "images are uint8 .* normalised floats"),
        ((torch.zeros(2, 1, 8, 8), torch.zeros(2).long()), "images are float32 of shape .2, 1, 8, 8."),
        ((torch.zeros(2, 3, 8, 8), torch.zeros(3).long()), "labels are int64 of shape .3.; they must be integers of shape .2."),
        ((torch.zeros(2, 3, 8, 8), torch.zeros(2)), "labels are float32 of shape .2."),
        ((torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.bool)), "labels are bool of shape .2."),
        ((torch.zeros(0, 3, 8, 8), torch.zeros(0).long()), "no samples"),
    ],
)
def test_a_batch_that_is_no_pair_of_images_and_labels_is_refused_with_its_shape(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Resnet20(image_size=8).loss(batch)


def test_topk_counts_the_rows_whose_label_is_among_the_k_largest() -> None:
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.1, 0.9, 0.5], [0.1, 0.9, 0.5], [3.0, 2.0, 1.0]])
    labels = torch.tensor([1, 2, 0, 2])
    assert [int(n) for n in topk_correct(logits, labels, (1, 2, 3))] == [1, 2, 4]
    assert [int(n) for n in topk_correct(logits, labels, (5,))] == [4]


def test_topk_agrees_with_torch_topk_where_no_two_logits_are_equal() -> None:
    logits = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(200)]).float()
    labels = torch.arange(200) % 40
    for k in (1, 5, 39):
        hits = (logits.topk(k, 1).indices == labels.unsqueeze(1)).sum()
        assert int(topk_correct(logits, labels, (k,))[0]) == int(hits)


def test_equal_logits_are_right_for_the_lower_classes_alone_and_nan_never() -> None:
    labels = torch.arange(10)
    assert [int(n) for n in topk_correct(torch.zeros(10, 10), labels, (1, 5))] == [1, 5]
    assert [int(n) for n in topk_correct(torch.full((10, 10), torch.nan), labels, (1, 10))] == [0, 0]
    assert int(topk_correct(torch.tensor([[1.0, torch.nan]]), torch.tensor([0]), (1,))[0]) == 0


@pytest.mark.parametrize("k", [0, -1, True, 1.0])
def test_a_k_that_is_no_positive_integer_is_refused(k: Any) -> None:
    with pytest.raises(ConfigError, match="k of topk_correct is"):
        topk_correct(torch.zeros(1, 3), torch.tensor([0]), (k,))


def test_a_tally_holds_sums_without_gradient_and_accuracy_their_means() -> None:
    model = Resnet20(image_size=8, label_smoothing=0.1).eval()
    x, labels = images(7).float(), torch.arange(7)
    tally, logits = model.tally((x, labels)), model(x)
    assert [(name, t.dtype, t.requires_grad) for name, t in tally.items()] == [
        (name, torch.float64, False) for name in ("count", "loss", "acc1", "acc5")
    ]
    assert float(tally["count"]) == 7
    assert float(tally["loss"]) == pytest.approx(7 * model.loss((x, labels)).item(), rel=1e-6)
    assert float(tally["acc1"]) == int((logits.argmax(1) == labels).sum())
    means = model.accuracy((x, labels))
    assert {name: float(t) for name, t in means.items()} == {name: float(tally[name]) / 7 for name in ("acc1", "acc5")}


def test_with_three_classes_all_are_among_the_first_five() -> None:
    model = Resnet20(3, image_size=8).eval()
    assert float(model.accuracy((images(4).float(), torch.tensor([0, 1, 2, 2])))["acc5"]) == 1.0


def test_twenty_steps_on_digits_lower_the_loss_of_resnet20_to_less_than_a_half() -> None:
    torch.manual_seed(0)
    model = Resnet20(image_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, labels = digits(320)
    losses = []
    for step in range(20):
        rows = slice(step % 5 * 64, step % 5 * 64 + 64)
        loss = model.loss((x[rows], labels[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_tally_never_wait_for_the_gpu(smoothing: float) -> None:
    model = Resnet20(image_size=8, label_smoothing=smoothing).cuda()
    batch = images(8).float().cuda(), torch.arange(8, device="cuda")
    model.loss(batch).backward()  # the first call may wait, while libraries load
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.loss(batch).backward()
        sums = model.eval().tally(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(sums["count"]) == 8
