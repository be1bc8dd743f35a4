"""BERT's shared tensors and its layers, in the hands of users: other files, other devices, hooks and black lists."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.applications import Bert, Bert_base
from fleetx.errors import FleetWarning
from fleetx.recompute.chunked_loss import chunked_cross_entropy

TINY = {"hidden": 12, "layers": 2, "heads": 3, "feed_forward": 20, "vocab_size": 23, "max_position": 16}


def bert() -> Bert:
    torch.manual_seed(0)
    return Bert_base(**TINY).eval()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 23, (3, 9), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "mlm_positions": torch.tensor([1, 5, 11, 20]), "mlm_labels": torch.tensor([3, 7, 0, 22])}


def is_one_tensor(model: Any) -> bool:
    head = model.cls.predictions
    return head.decoder.weight is model.bert.embeddings.word_embeddings.weight and head.decoder.bias is head.bias


def test_shared_tensors_are_one_after_a_change_of_type_and_after_leaving_the_meta_device() -> None:
    with torch.device("meta"):
        empty = Bert_base(**TINY)
    for model in (bert().double(), bert().to(torch.bfloat16), empty.to_empty(device="cpu")):
        assert is_one_tensor(model)
        assert "cls.predictions.decoder.weight" not in dict(model.named_parameters())


def test_a_decoder_of_its_own_weights_and_heads_of_another_kind_are_left_to_the_user() -> None:
    model = bert()
    own = model.cls.predictions.decoder.weight = nn.Parameter(torch.ones(23, 12))
    assert model.double().cls.predictions.decoder.weight is own
    model.cls = nn.Identity()
    assert model.half().bert.embeddings.word_embeddings.weight.dtype == torch.float16


def test_the_weights_of_a_run_that_diverged_load_as_they_are() -> None:
    model = bert()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[3, 2] = torch.nan
    other = bert()
    other.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert other.cls.predictions.decoder.weight[3].isnan().nonzero().tolist() == [[2]]


def test_a_decoder_rounded_to_16_bits_is_not_taken_for_the_embedding() -> None:
    state = bert().state_dict()
    state["cls.predictions.decoder.weight"] = state["cls.predictions.decoder.weight"].half()
    with pytest.raises(RuntimeError, match="decoder.weight differs from bert.embeddings.word_embeddings.weight"):
        bert().load_state_dict(state)


def test_a_file_of_the_body_alone_loads_into_it_with_the_old_names_too() -> None:
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor + 1
        for name, tensor in bert().bert.state_dict().items()
    } | {"embeddings.position_ids": torch.arange(16)[None]}
    model = bert()
    model.bert.load_state_dict(old)
    for name, tensor in bert().bert.state_dict().items():
        torch.testing.assert_close(model.bert.state_dict()[name], tensor + 1, rtol=0, atol=0, msg=name)
    assert is_one_tensor(model)
    with pytest.raises(RuntimeError, match='Unexpected key.*"embeddings.numbers"'):
        model.bert.load_state_dict(old | {"embeddings.numbers": torch.ones(1)})


def test_a_projection_without_a_bias_takes_the_place_of_one_whose_bias_is_zero() -> None:
    model, expected = bert(), bert().loss(batch())
    first = model.bert.encoder.layer[0].attention.self
    plain = nn.Linear(12, 12, bias=False)
    plain.weight = first.query.weight
    first.query = plain
    torch.testing.assert_close(model.loss(batch()), expected, rtol=0, atol=1e-6)


def test_a_hook_of_the_decoder_sees_the_loss() -> None:
    model = bert()
    seen: list[Any] = []
    model.cls.predictions.decoder.register_forward_hook(lambda module, args, out: seen.append((args[0].shape, out[0].item())))
    loss = model.loss(batch()).item()
    assert seen == [((4, 12), pytest.approx(4 * loss, rel=1e-6))]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("black", [[], ["cls.predictions.decoder"]])
def test_the_decoder_on_the_black_list_of_amp_is_computed_in_float32(black: list[str]) -> None:
    model = bert()
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16", "custom_black_list": black})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        model, _ = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    seen: list[tuple[Tensor, Tensor]] = []
    decoder = model.cls.predictions.decoder
    decoder.register_forward_hook(lambda module, args, out: seen.append((args[0].detach().float(), out[0].detach())))
    model.loss(batch())
    [(hidden, loss)] = seen
    in_float32, _ = chunked_cross_entropy(hidden, decoder.weight.detach(), decoder.bias.detach(), batch()["mlm_labels"])
    assert torch.equal(loss, in_float32) == bool(black)
