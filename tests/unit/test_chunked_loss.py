"""The chunked cross-entropy against torch's own, and what it keeps in memory."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fleetx.recompute import chunked_loss
from fleetx.recompute.chunked_loss import chunked_cross_entropy, padded, rows_per_chunk

ROWS, WIDTH, WORDS = 7, 5, 11


def _inputs(rows: int = ROWS, dtype: torch.dtype = torch.float64, words: int = WORDS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((rows, WIDTH), (words, WIDTH), (words,))
    )
    labels = torch.randint(0, words, (rows,), generator=generator)
    return hidden, weight, bias, labels


def _reference(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="sum")


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 1000, None])
def test_loss_and_gradients_equal_those_of_the_whole_for_every_chunk_size(rows: int | None) -> None:
    hidden, weight, bias, labels = _inputs()
    labels[2] = -100
    loss, correct = chunked_cross_entropy(hidden, weight, bias, labels, rows=rows)
    expected = _reference(hidden, weight, bias, labels)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    on_top = F.linear(hidden, weight, bias).argmax(dim=1) == labels
    assert correct.item() == on_top.sum().item()
    ours = torch.autograd.grad(loss * 0.3, (hidden, weight, bias))
    theirs = torch.autograd.grad(expected * 0.3, (hidden, weight, bias))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_gradcheck_agrees_with_finite_differences() -> None:
    hidden, weight, bias, labels = _inputs()
    assert torch.autograd.gradcheck(lambda *args: chunked_cross_entropy(*args, labels, rows=3)[0], (hidden, weight, bias))


def test_no_rows_give_a_loss_of_zero_and_gradients_of_zero() -> None:
    hidden, weight, bias, labels = _inputs(rows=0)
    loss, correct = chunked_cross_entropy(hidden, weight, bias, labels)
    loss.backward()
    assert (loss.item(), correct.item()) == (0.0, 0)
    assert hidden.grad is not None and hidden.grad.shape == (0, WIDTH)
    assert weight.grad is not None and bias.grad is not None
    assert weight.grad.abs().sum().item() == bias.grad.abs().sum().item() == 0.0


def test_rows_that_are_all_ignored_give_zero_too() -> None:
    hidden, weight, bias, labels = _inputs()
    loss, correct = chunked_cross_entropy(hidden, weight, bias, labels.fill_(-100), rows=2)
    loss.backward()
    assert (loss.item(), correct.item()) == (0.0, 0)
    assert hidden.grad is not None and hidden.grad.abs().sum().item() == 0.0


def test_a_label_whose_probability_is_zero_in_floating_point_has_a_finite_loss() -> None:
    hidden = torch.tensor([[1.0]])
    loss, _ = chunked_cross_entropy(hidden, torch.tensor([[500.0], [0.0]]), torch.zeros(2), torch.tensor([1]))
    assert loss.item() == 500.0


def test_chunks_are_equal_and_as_few_as_the_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 4 * 100 * 10)  # ten rows of a hundred words
    assert [rows_per_chunk(rows, 100) for rows in (0, 1, 10, 11, 20, 21)] == [1, 1, 10, 6, 10, 7]
    assert rows_per_chunk(5, 10**6) == 1


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_of_rows_times_words_is_kept_for_the_backward(grad: bool) -> None:
    hidden, weight, bias, labels = _inputs(rows=64, words=50)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.set_grad_enabled(grad), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_cross_entropy(hidden, weight, bias, labels, rows=16)
    assert sorted(kept) == ([50, 50 * WIDTH, 64 * WIDTH] if grad else [])


def test_logits_of_more_rows_than_a_chunk_never_exist() -> None:
    hidden, weight, bias, labels = _inputs(rows=64, words=50)
    largest = _largest_result(lambda: chunked_cross_entropy(hidden, weight, bias, labels, rows=16)[0].backward())
    assert largest == 16 * 50
    assert _largest_result(lambda: _reference(hidden, weight, bias, labels).backward()) == 64 * 50


def _largest_result(work: Any) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    with Largest() as seen:
        work()
    return seen.elements


def test_a_graph_that_is_kept_gives_the_same_gradients_twice() -> None:
    hidden, weight, bias, labels = _inputs()
    loss, _ = chunked_cross_entropy(hidden, weight, bias, labels)
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight, bias))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_recomputing_in_the_backward_changes_no_bit() -> None:
    hidden, weight, bias, labels = _inputs(dtype=torch.float32)
    plain = torch.autograd.grad(chunked_cross_entropy(hidden, weight, bias, labels, rows=3)[0], (hidden, weight, bias))
    loss, _ = checkpoint(lambda h: chunked_cross_entropy(h, weight, bias, labels, rows=3), hidden, use_reentrant=False)
    for one, other in zip(plain, torch.autograd.grad(loss, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_frozen_weights_leave_the_gradient_of_the_rest_as_it_is() -> None:
    hidden, weight, bias, labels = _inputs()
    expected = torch.autograd.grad(_reference(hidden, weight, bias, labels), hidden)[0]
    loss, _ = chunked_cross_entropy(hidden, weight.detach(), bias.detach(), labels)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], expected, rtol=0, atol=1e-12)


def test_columns_added_for_alignment_have_no_probability() -> None:
    weight, bias = padded(torch.ones(70, 3), torch.ones(70), torch.bfloat16)
    assert weight.shape == (128, 3) and weight.dtype == torch.bfloat16
    assert bias.dtype == torch.float32 and bias.exp().sum().item() == pytest.approx(70 * math.e)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_under_autocast_the_products_are_16_bit_and_loss_and_gradients_float32(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, bias, labels = _inputs(rows=40, dtype=torch.float32, words=70)
    with torch.autocast("cpu", dtype):
        loss, _ = chunked_cross_entropy(hidden, weight, bias, labels, rows=16)
    expected = _reference(hidden, weight, bias, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    ours = torch.autograd.grad(loss, (hidden, weight, bias))
    theirs = torch.autograd.grad(expected, (hidden, weight, bias))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() <= tolerance * other.norm()


def test_in_float16_the_gradient_of_an_unlikely_word_survives_without_a_loss_scale() -> None:
    """exp(-16) is 1.1e-7, not twice the smallest float16: unscaled it would be off by 6%."""
    weight, bias = torch.zeros(3, 1, requires_grad=True), torch.tensor([16.0, 0.0, 0.0], requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss, _ = chunked_cross_entropy(torch.ones(1, 1), weight, bias, torch.tensor([0]))
    loss.backward()
    assert bias.grad is not None and weight.grad is not None
    expected = math.exp(-16) / (1 + 2 * math.exp(-16))
    torch.testing.assert_close(bias.grad[1].item(), expected, rtol=2e-3, atol=0)
    torch.testing.assert_close(weight.grad[1].item(), expected, rtol=2e-3, atol=0)


def test_float64_stays_float64_under_autocast() -> None:
    hidden, weight, bias, labels = _inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = chunked_cross_entropy(hidden, weight, bias, labels)
    torch.testing.assert_close(loss, _reference(hidden, weight, bias, labels), rtol=0, atol=1e-12)


def test_a_copy_of_a_module_that_uses_it_computes_with_its_own_weights() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WORDS)

        def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return chunked_cross_entropy(hidden, self.linear.weight, self.linear.bias, labels)[0]

    hidden, _, _, labels = _inputs(dtype=torch.float32)
    head = Head()
    twin = copy.deepcopy(head)
    twin(hidden, labels).backward()
    assert head.linear.weight.grad is None and twin.linear.weight.grad is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 40])
def test_on_a_gpu_it_agrees_with_float32(dtype: torch.dtype, rows: int) -> None:
    inputs = _inputs(rows=rows, dtype=torch.float32, words=70)
    hidden, weight, bias = (tensor.detach().cuda().requires_grad_() for tensor in inputs[:3])
    labels = inputs[3].cuda()
    with torch.autocast("cuda", dtype):
        loss, _ = chunked_cross_entropy(hidden, weight, bias, labels, rows=16)
    expected = _reference(hidden, weight, bias, labels)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    ours = torch.autograd.grad(loss, (hidden, weight, bias))
    for mine, other in zip(ours, torch.autograd.grad(expected, (hidden, weight, bias)), strict=True):
        assert (mine - other).norm() <= 2e-2 * other.norm()
