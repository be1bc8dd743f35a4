"""Sums of bits: one flipped bit is told from what a script writes; nothing else is an alarm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleetx.engine.checks.flips import COPIED_BYTES, PARTS, FlipWatch, bit_of, flipped, mark_of, sum_words, word_views

WIDTHS = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip a bit in memory, as a fault would: torch does not see it."""
    row = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    row.view(torch.uint8).numpy()[place * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def sums_of(tensors: list[Tensor]) -> Tensor:
    return sum_words([word_views(t) for t in tensors], torch.zeros(len(tensors), PARTS, dtype=torch.int64))


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("numel", [64, 67, 1000, 4099])
def test_every_flip_is_told_with_its_bit(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(numel)
    tensors = [torch.randn(numel).to(dtype), torch.randn(80).to(dtype)]
    before, chance = sums_of(tensors), np.random.default_rng(numel)
    known = torch.ones(2, dtype=torch.bool)
    for bit in range(8 * WIDTHS[dtype]):
        for place in [0, numel - 1, *chance.integers(numel, size=3).tolist()]:
            flip(tensors[0], place, bit)
            change = flipped(before, sums_of(tensors), known)
            flip(tensors[0], place, bit)
            assert (change != 0).sum() == 1 and (change[0] != 0).any(), (bit, place)
            assert bit_of(int(change.sum()), WIDTHS[dtype]) == bit
            assert mark_of(before) != mark_of(before + change), "the mark differs too"
    assert torch.equal(sums_of(tensors), before)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "slice"])
def test_memory_is_summed_in_any_layout(layout: str) -> None:
    image = torch.randn(8, 4, 3, 3)
    made = {
        "channels_last": lambda: image.to(memory_format=torch.channels_last),
        "transposed": lambda: torch.randn(20, 30).t(),
        "slice": lambda: torch.randn(101)[1:],
    }[layout]()
    before = sums_of([made])
    flip(made, 50, 30)
    assert (flipped(before, sums_of([made]), torch.ones(1, dtype=torch.bool)) != 0).sum() == 1


SUMMED = COPIED_BYTES // 4 + 8
"""Elements of a float32 tensor that is summed; smaller ones are copied."""
SCRIPTS = {
    "scaled by two": lambda w: w.data.mul_(2),
    "clamped": lambda w: w.data.clamp_(-0.1, 0.1),
    "a row zeroed": lambda w: w.data[3].zero_(),
    "all set": lambda w: w.data.fill_(1.0),
    "signs": lambda w: w.data.neg_(),
    "in place": lambda w: w.mul_(2),
    "a number in place": lambda w: w[0, 0].mul_(2),
    "replaced": lambda w: setattr(w, "data", w.data * 2),
}


@pytest.mark.parametrize("numel", [64, 256, 1000, SUMMED])
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_writes_is_no_alarm(script: str, numel: int) -> None:
    torch.manual_seed(1)
    model = nn.Linear(numel // 8, 8)
    watch = FlipWatch(dict(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=0.1), is_on=True)
    for _ in range(20):
        watch.take(are_equal=True)
        with torch.no_grad():
            SCRIPTS[script](model.weight)
        watch.look()
        nn.init.normal_(model.weight)
    assert watch.news()[0] == 0.0


def watched() -> tuple[FlipWatch, Tensor]:
    model = nn.Linear(16, 16)
    return FlipWatch(dict(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=0.1), is_on=True), model.weight


@pytest.mark.parametrize(("bit", "told"), [(16, 1.0), (30, 1.0), (31, 1.0), (15, 0.0)])
def test_flips_in_the_upper_half_of_a_number_are_told(bit: int, told: float) -> None:
    watch, weight = watched()
    watch.take(are_equal=False)
    flip(weight, 100, bit)
    watch.look()
    assert watch.news()[0] == told


@pytest.mark.parametrize("numel", [65, 1003, SUMMED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_flip_is_told_in_copied_and_in_summed_tensors_with_its_name(numel: int, dtype: torch.dtype) -> None:
    params = {
        name: nn.Parameter(torch.randn(size).to(dtype)) for name, size in (("small", 101), ("this", numel), ("large", SUMMED))
    }
    watch = FlipWatch(params, torch.optim.SGD(params.values(), lr=0.1), is_on=True)
    for place, bit in ((0, 8 * dtype.itemsize - 1), (numel - 1, 8 * dtype.itemsize - 2)):
        watch.take(are_equal=True)
        mark = watch.news()[1]
        flip(params["this"], place, bit)
        watch.look()
        assert watch.news() == (1.0, mark)
        assert watch._flips() == [f"bit {bit} of a number in `this`"]
        watch.take(are_equal=True)
        assert watch.news()[1] != mark, "ranks that hold other bits have another mark"
        watch.forget()


def test_two_flips_at_once_in_copies_are_taken_for_a_script() -> None:
    watch, weight = watched()
    watch.take(are_equal=False)
    flip(weight, 10, 30)
    flip(weight, 200, 29)
    watch.look()
    assert watch.news()[0] == 0.0


def test_a_tensor_that_was_moved_is_watched_where_it_is() -> None:
    watch, weight = watched()
    watch.take(are_equal=False)
    weight.data = weight.data.clone()
    watch.look()
    watch.take(are_equal=False)
    flip(weight, 100, 30)
    watch.look()
    assert (watch.news()[0], watch.looks) == (1.0, 1)


def test_time_that_is_used_up_is_not_spent() -> None:
    watch, weight = watched()
    watch.most_time, watch.spent = 0.0, 1.0
    watch.take(are_equal=True)  # after an averaging always: the ranks compare what it has left
    watch.take(are_equal=False)
    flip(weight, 100, 30)
    watch.look()
    assert (watch.news()[0], watch.looks, watch.passed_over) == (0.0, 0, 1)


def test_a_loaded_checkpoint_is_no_alarm() -> None:
    watch, weight = watched()
    watch.take(are_equal=True)
    flip(weight, 100, 30)
    watch.forget()
    watch.look()
    assert watch.news() == (0.0, 0.0)
