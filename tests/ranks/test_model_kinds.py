"""Guards models of many kinds: channels-last, compiled, tied, of two types, half frozen, and of Hugging Face."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.joined_batch import (
    STEPS,
    assert_equal_on_all_ranks,
    assert_trained_alike,
    ddp_on_images,
    images_of,
    joined_rows,
    net,
    plain_loop,
    quiet_about_speed,
    rows_of,
    sgd,
    weights,
)
from tests.helpers.models import cnn, flat_state, mlp


def _channels_last(rank: int) -> tuple[Tensor, list[bool]]:
    model = cnn().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model, optimizer = fleet.distribute(model, sgd(model))
    kept = []
    for step in range(STEPS):
        x, y = images_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y))
        kept += [p.grad is not None and p.grad.stride() == p.stride() for p in model.parameters()]
        kept.append(model[3].weight.grad.is_contiguous(memory_format=torch.channels_last))  # type: ignore[union-attr, operator]
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), kept


def test_a_channels_last_model_keeps_its_strides_in_the_gradients() -> None:
    ours = run_ranks(_channels_last, 2)
    assert_trained_alike([trained for trained, _ in ours], run_ranks(ddp_on_images, 2)[0])
    assert all(all(kept) for _, kept in ours)


def _compiled(rank: int, amp: bool, how: str) -> tuple[Tensor, bool]:
    quiet_about_speed()
    bare = net() if not amp else mlp()
    model: nn.Module = torch.compile(bare, backend="eager") if how == "wrapped before" else bare  # type: ignore[assignment]
    strategy = fleet.DistributedStrategy(amp=amp, amp_configs={"dtype": "bfloat16"}) if amp else fleet.DistributedStrategy()
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    called: Any = torch.compile(model, backend="eager") if how == "wrapped after" else model
    if how == "in place after":
        model.compile(backend="eager")
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(called(x.to(bare[0].weight.dtype)), y))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    if how == "wrapped before":
        model.load_state_dict({f"_orig_mod.{name}": tensor for name, tensor in state.items()})
    return weights(model), list(state) == list(bare.state_dict())


def _uncompiled_amp(rank: int) -> Tensor:
    quiet_about_speed()
    model = mlp()
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x.float()), y))
    return weights(model)


@pytest.mark.parametrize("how", ["wrapped before", "wrapped after", "in place after"])
@pytest.mark.parametrize("amp", [False, True])
def test_a_model_compiled_before_or_after_distribute_trains_as_uncompiled(amp: bool, how: str) -> None:
    ranks = run_ranks(_compiled, 2, amp, how)
    assert all(keys_are_plain for _, keys_are_plain in ranks)
    assert_trained_alike([trained for trained, _ in ranks], run_ranks(_uncompiled_amp, 2)[0] if amp else plain_loop())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


def _tied(rank: int) -> tuple[Tensor, bool]:
    model = Tied()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model), model.leave.weight is model.enter.weight


def test_tied_parameters_stay_tied_and_count_once() -> None:
    ranks = run_ranks(_tied, 2)
    assert all(still_tied for _, still_tied in ranks)
    assert_trained_alike([trained for trained, _ in ranks], plain_loop(Tied))


class Mixed(nn.Module):
    """Two types, a parameter that is one number, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.wide = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.tanh(self.narrow(x.float())).double()) * self.temperature + self.empty.sum().double()


def _mixed(rank: int) -> list[Tensor]:
    model = Mixed()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return [p.detach() for p in model.parameters()]


def test_parameters_of_two_types_and_of_one_number_or_none_train_together() -> None:
    ranks = run_ranks(_mixed, 2)
    model = Mixed()
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all_ranks(ranks)
    for ours, reference in zip(ranks[0], model.parameters(), strict=True):
        assert ours.dtype == reference.dtype
        torch.testing.assert_close(ours, reference.detach(), rtol=1e-6, atol=1e-6)  # float32 is in the path of all of them


def _half_frozen() -> nn.Sequential:
    model = net()
    model[2].requires_grad_(False)
    return model


def _frozen(rank: int) -> tuple[Tensor, bool]:
    model = _half_frozen()
    if rank == 1:
        with torch.no_grad():
            model[2].weight.fill_(7.0)  # type: ignore[operator]
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model), model[2].weight.grad is None


def test_frozen_parameters_come_from_rank_0_and_do_not_train() -> None:
    ranks = run_ranks(_frozen, 2)
    assert all(without_gradient for _, without_gradient in ranks)
    assert_trained_alike([trained for trained, _ in ranks], plain_loop(_half_frozen))


def _tiny_bert() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the library says about itself is not ours to judge
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForSequenceClassification(config)


def _tokens(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 40, (4, 10), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, 3, (4,), generator=generator),
    }


def _hugging_face(rank: int) -> dict[str, Any]:
    given = _tiny_bert().double()
    keys = list(given.state_dict())
    cls = type(given)
    model, optimizer = fleet.distribute(given, torch.optim.AdamW(given.parameters(), lr=1e-3))
    for step in range(STEPS):
        optimizer.minimize(model(**_tokens(rank, step)).loss)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        # The library itself writes on rank 0 alone.
        saved = rank > 0 or torch.equal(flat_state(cls.from_pretrained(folder)), flat_state(model))
    return {
        "weights": weights(model),
        "the same object": model is given and isinstance(model, cls) and type(model) is cls,
        "keys": list(model.state_dict()) == keys,
        "saved": saved,
    }


def test_a_hugging_face_model_trains_and_stays_itself() -> None:
    ranks = run_ranks(_hugging_face, 2)
    model = _tiny_bert().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        first, second = _tokens(0, step), _tokens(1, step)
        model(**{name: torch.cat([first[name], second[name]]) for name in first}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for seen in ranks:
        assert seen["the same object"]
        assert seen["keys"]
        assert seen["saved"]
    assert_equal_on_all_ranks([seen["weights"] for seen in ranks])
    # Adam divides by the root of a tiny square: rounding in a near-zero gradient grows, up to about lr * 1e-12 / 1e-8.
    torch.testing.assert_close(ranks[0]["weights"], weights(model), rtol=0, atol=1e-9)


def _hugging_face_amp(rank: int) -> dict[str, Any]:
    import inspect

    quiet_about_speed()
    model = _tiny_bert()
    with torch.no_grad():
        plain = model(**_tokens(0, 77))
    signature = str(inspect.signature(model.forward))
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    model, optimizer = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3), strategy)
    with torch.no_grad():
        first = model(**_tokens(0, 77))
    for step in range(2):
        optimizer.minimize(model(**_tokens(rank, step)).loss)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return {
        "type": type(first) is type(plain),
        "keys": list(first.keys()) == list(plain.keys()),
        "dtype": str(first.logits.dtype),
        "attribute and key": torch.equal(first.logits, first["logits"]),
        "error": float((first.logits - plain.logits).abs().max()),
        "signature": str(inspect.signature(model.forward)) == signature,
    }


def test_a_hugging_face_model_under_amp_returns_its_own_output_type_in_float32() -> None:
    for seen in run_ranks(_hugging_face_amp, 2):
        assert seen["type"]
        assert seen["keys"]
        assert seen["dtype"] == "torch.float32"
        assert seen["attribute and key"]
        assert 0 < seen["error"] < 0.05  # 8 bits of mantissa, logits of size 1: it did compute in bfloat16


def test_the_signature_of_forward_survives_amp() -> None:
    # Hugging Face's generate and Trainer read it to decide which arguments the model takes.
    assert all(seen["signature"] for seen in run_ranks(_hugging_face_amp, 2))
