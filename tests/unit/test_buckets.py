"""Flat buckets: layout, views, and who owns a gradient when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fleetx.dist.comm import Pending
from fleetx.engine.bucket import Bucket
from fleetx.engine.buckets import Buckets, global_norm
from fleetx.engine.layout import bucket_lengths, bucket_runs
from fleetx.errors import ConfigError
from tests.helpers.harness import make_fake_comm


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 120))
def test_every_tensor_is_in_exactly_one_bucket_and_no_bucket_passes_its_cap_but_for_a_single_large_tensor(
    sizes: list[int], cap: int
) -> None:
    lengths = bucket_lengths(sizes, cap=cap)
    assert sum(lengths) == len(sizes) and min(lengths) >= 1
    start = 0
    for length in lengths:
        run = sizes[start : start + length]
        assert sum(run) <= cap or length == 1
        start += length


def test_a_bucket_holds_one_type() -> None:
    named = [("a", nn.Parameter(torch.zeros(4))), ("b", nn.Parameter(torch.zeros(4).half())), ("c", nn.Parameter(torch.zeros(4)))]
    runs = bucket_runs(named, bucket_bytes=2**20)
    assert [[name for name, _ in run] for run in runs] == [["a", "c"], ["b"]]


def test_views_keep_the_strides_of_their_parameters() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    bucket = Bucket(0, [("w", weight), ("b", nn.Parameter(torch.zeros(5)))], tail_numel=2)
    assert bucket.views[0].stride() == weight.stride()
    assert bucket.flat.numel() == 4 * 3 * 2 * 2 + 5 and bucket.tail.numel() == 2
    bucket.views[1].fill_(7.0)
    assert bucket.flat[-5:].tolist() == [7.0] * 5


def test_the_norm_of_16_bit_buckets_is_summed_in_float32() -> None:
    flats = [torch.full((4,), 60000.0).half(), torch.full((2,), 3.0)]
    torch.testing.assert_close(global_norm(flats), torch.tensor((4 * 60000.0**2 + 18.0) ** 0.5), rtol=1e-3, atol=0)


def _buckets(model: nn.Module) -> Buckets:
    return Buckets(dict(model.named_parameters()), bucket_bytes=2**20, tail=None, carries_tail=True, comm=make_fake_comm())


def _reduced(buckets: Buckets) -> None:
    buckets.arm(lambda bucket: Pending(None), factor=1.0)
    buckets.close()


def test_after_backward_every_gradient_is_a_view_of_its_bucket() -> None:
    model = nn.Linear(3, 2)
    buckets = _buckets(model)
    model(torch.ones(1, 3)).sum().backward()
    buckets.keep()
    (bucket,) = buckets
    assert all(p.grad is view for p, view in zip(bucket.params, bucket.views, strict=True))
    assert bucket.flat.tolist() == [1.0] * 8


def test_a_second_backward_adds_in_place_and_zero_grad_of_the_model_in_between_loses_nothing() -> None:
    model = nn.Linear(3, 2)
    buckets = _buckets(model)
    model(torch.ones(1, 3)).sum().backward()
    buckets.keep()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    buckets.keep()
    assert next(iter(buckets)).flat.tolist() == [2.0] * 8


def test_a_backward_thrown_away_before_a_micro_step_is_counted_leaves_no_trace() -> None:
    model = nn.Linear(3, 2)
    buckets = _buckets(model)
    model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    buckets.keep()
    assert next(iter(buckets)).flat.tolist() == [1.0] * 8


def test_a_parameter_without_gradient_counts_as_zero_not_as_last_windows_value() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})
    buckets = _buckets(model)
    (model["a"](torch.ones(1, 2)) + model["b"](torch.ones(1, 2))).sum().backward()
    _reduced(buckets)
    buckets.finish_window(recycle=False)
    buckets.zero()
    model["a"](torch.ones(1, 2)).sum().backward()
    _reduced(buckets)
    assert buckets.missing() == ["b.weight"]
    (bucket,) = buckets
    assert bucket.flat.tolist() == [0.0, 0.0, 1.0, 1.0]  # reversed order: b, then a


def test_a_gradient_is_added_to_the_last_updates_as_in_torch_unless_that_was_zeroed() -> None:
    model = nn.Linear(3, 2)
    buckets = _buckets(model)
    model(torch.ones(1, 3)).sum().backward()
    _reduced(buckets)
    buckets.finish_window(recycle=False)
    model(torch.ones(1, 3)).sum().backward()
    _reduced(buckets)
    assert next(iter(buckets)).flat.tolist() == [2.0] * 8
    buckets.finish_window(recycle=False)
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    buckets.keep()
    assert next(iter(buckets)).flat.tolist() == [1.0] * 8


def test_a_bare_gradient_of_a_bucket_that_our_backward_does_not_reach_is_kept() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})
    buckets = Buckets(dict(model.named_parameters()), bucket_bytes=1, tail=None, carries_tail=True, comm=make_fake_comm())
    model["b"](torch.ones(1, 2)).sum().backward()  # bare, as an auxiliary loss
    buckets.begin()
    buckets.arm(lambda bucket: Pending(None), factor=1.0)
    buckets.expect(reduces=True)
    model["a"](torch.ones(1, 2)).sum().backward()
    buckets.close()
    assert buckets.missing() == []
    assert [bucket.flat.tolist() for bucket in buckets] == [[1.0, 1.0], [1.0, 1.0]]


def test_hooks_of_discarded_buckets_refuse_while_there_are_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    buckets = _buckets(model)
    del buckets
    monkeypatch.setattr("fleetx.engine.buckets.is_initialized", lambda: True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="was discarded, since neither the model .* nor the optimizer was kept"):
            model(torch.ones(1, 3)).sum().backward()
    monkeypatch.undo()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad._base is None


def test_complete_buckets_start_in_index_order_whatever_the_order_of_arrival() -> None:
    """Registered first, used first: its gradient comes last. Registered in the wrong order, it comes early, and must wait."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    buckets = Buckets(dict(model.named_parameters()), bucket_bytes=1, tail=None, carries_tail=True, comm=make_fake_comm())
    assert len(buckets) == 3
    started: list[int] = []

    def start(bucket: Bucket) -> Pending:
        started.append(bucket.index)
        return Pending(None)

    buckets.arm(start, factor=1.0)
    buckets.expect(reduces=True)
    x = torch.ones(1, 2)
    model[0](model[1](model[2](x))).sum().backward()  # gradients arrive 0, 1, 2; buckets are 2, 1, 0
    assert started == [0, 1, 2]
