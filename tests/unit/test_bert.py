"""BERT beside transformers' `BertForPreTraining`, its batches, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fleetx import fleet
from fleetx.applications.bert import Bert, Bert_base, Bert_large, labelled_positions
from fleetx.applications.bert_encoder import BertConfig, is_plain
from fleetx.errors import ConfigError, DataError, FleetWarning

TINY = {"hidden": 12, "layers": 2, "heads": 3, "feed_forward": 20, "vocab_size": 23, "max_position": 16}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _ours(dtype: torch.dtype = torch.float64, **options: Any) -> Bert:
    torch.manual_seed(0)
    return Bert_base(**TINY | options).to(dtype).eval()


def _theirs(dtype: torch.dtype = torch.float64) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=23,
        max_position_embeddings=16, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.BertForPreTraining(config).to(dtype).eval()


def _batch(*, padded: bool = True, rows: int = 3, length: int = 9) -> dict[str, Tensor]:
    """Token 0 is padding; labels are one for each token, -100 where there is none."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, 23, (rows, length), generator=generator)
    batch = {"input_ids": ids, "token_type_ids": torch.randint(0, 2, (rows, length), generator=generator)}
    if padded:
        batch["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
        batch["attention_mask"][1, 6:] = ids[1, 6:] = 0
    masked = (torch.rand(rows, length, generator=generator) < 0.4) & (ids > 0)
    batch["labels"] = torch.where(masked, torch.randint(0, 23, (rows, length), generator=generator), -100)
    batch["next_sentence_label"] = torch.arange(rows) % 2
    return batch


def _by_position(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same batch as the loaders make it."""
    positions, labels = labelled_positions(batch["labels"])
    rest = {name: value for name, value in batch.items() if name != "labels"}
    return rest | {"mlm_positions": positions, "mlm_labels": labels}


def _unlabelled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if "label" not in name}


# --- beside transformers


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_logits_loss_and_gradients_equal_those_of_transformers(dtype: torch.dtype, tolerance: float, padded: bool) -> None:
    ours, theirs, batch = _ours(dtype), _theirs(dtype), _batch(padded=padded)
    ours.load_state_dict(theirs.state_dict())
    expected, logits = theirs(**batch), ours(**_unlabelled(batch))
    torch.testing.assert_close(logits.prediction_logits, expected.prediction_logits, rtol=0, atol=tolerance)
    torch.testing.assert_close(logits.seq_relationship_logits, expected.seq_relationship_logits, rtol=0, atol=tolerance)
    loss = ours.loss(_by_position(batch))
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=tolerance)
    loss.backward()
    expected.loss.backward()
    for (name, mine), (other_name, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=tolerance, msg=name)


def test_state_dicts_load_both_ways_under_the_same_names() -> None:
    ours, theirs = _ours(), _theirs()
    assert {n: t.shape for n, t in ours.state_dict().items()} == {n: t.shape for n, t in theirs.state_dict().items()}
    theirs.load_state_dict(ours.state_dict())
    batch = _batch()
    expected = theirs(**batch).loss
    other = _ours()
    other.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(other.loss(batch), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("ours", "sizes"), [
    (Bert_base, {}),
    (Bert_large, {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}),
])  # fmt: skip
def test_sizes_and_names_are_those_of_the_public_models(ours: Any, sizes: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        mine, theirs = ours(), transformers.BertForPreTraining(transformers.BertConfig(**sizes))
    assert sum(p.numel() for p in mine.parameters()) == theirs.num_parameters()
    assert {n: t.shape for n, t in mine.state_dict().items()} == {n: t.shape for n, t in theirs.state_dict().items()}
    assert [n for n, _ in mine.named_parameters()] == [n for n, _ in theirs.named_parameters()]


def test_the_base_model_has_110_106_428_parameters() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Bert_base().parameters()) == 110_106_428


# --- weights


def test_decoder_and_embedding_are_one_tensor_also_in_a_copy_and_after_an_assigning_load() -> None:
    model = _ours()
    twin = copy.deepcopy(model)
    twin.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    for one in (model, copy.deepcopy(model), twin):
        assert one.cls.predictions.decoder.weight is one.bert.embeddings.word_embeddings.weight
        assert one.cls.predictions.decoder.bias is one.cls.predictions.bias
    assert twin.cls.predictions.bias is not model.cls.predictions.bias


def test_files_with_the_old_names_and_each_shared_tensor_once_load() -> None:
    model = _ours()
    torch.nn.init.normal_(model.cls.predictions.bias)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in model.state_dict().items()
        if name not in ("cls.predictions.decoder.weight", "cls.predictions.bias")
    } | {"bert.embeddings.position_ids": torch.arange(16)[None]}
    names = list(old)
    other = _ours(vocab_size=23)
    torch.nn.init.zeros_(other.bert.embeddings.word_embeddings.weight)
    other.load_state_dict(old)
    assert list(old) == names, "the caller's dict is left as it was"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0, msg=name)


def test_a_file_whose_decoder_is_not_its_embedding_is_refused() -> None:
    state = _ours().state_dict()
    state["cls.predictions.decoder.weight"] = state["cls.predictions.decoder.weight"] + 1
    with pytest.raises(RuntimeError, match="decoder.weight differs from bert.embeddings.word_embeddings.weight"):
        _ours().load_state_dict(state)


def test_weights_start_normal_and_the_padding_row_and_biases_at_zero() -> None:
    torch.manual_seed(0)
    model = Bert_base(hidden=128, layers=1, heads=2, vocab_size=400)
    query = model.bert.encoder.layer[0].attention.self.query
    assert query.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert query.bias.abs().max().item() == 0.0
    assert model.bert.embeddings.word_embeddings.weight[0].abs().max().item() == 0.0
    assert model.bert.embeddings.word_embeddings.weight[1:].std().item() == pytest.approx(0.02, rel=0.03)


# --- the loss


def test_labels_by_token_and_by_position_give_the_same_loss() -> None:
    model, batch = _ours(), _batch()
    torch.testing.assert_close(model.loss(batch), model.loss(_by_position(batch)), rtol=0, atol=0)


def test_the_head_on_masked_positions_equals_the_full_head() -> None:
    model, batch = _ours(), _batch()
    logits = model(**_unlabelled(batch))
    mlm = torch.nn.functional.cross_entropy(logits.prediction_logits.flatten(0, 1), batch["labels"].flatten())
    nsp = torch.nn.functional.cross_entropy(logits.seq_relationship_logits, batch["next_sentence_label"])
    torch.testing.assert_close(model.loss(batch), mlm + nsp, rtol=0, atol=1e-12)


def test_the_loss_keeps_no_tensor_of_all_tokens_times_all_words() -> None:
    model, batch = _ours(vocab_size=997), _batch(rows=4, length=16)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    masked = int((batch["labels"] != -100).sum())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(batch)
    assert 997 * 12 in kept, "the decoder's own gradient is"
    assert masked * 997 > max(kept), (masked, max(kept))


def test_a_batch_without_sentence_labels_has_the_loss_of_its_tokens_alone() -> None:
    model, batch = _ours(), _batch()
    tokens, pairs = dict(batch), _unlabelled(batch) | {"next_sentence_label": batch["next_sentence_label"]}
    del tokens["next_sentence_label"]
    torch.testing.assert_close(model.loss(tokens) + model.loss(pairs), model.loss(batch), rtol=0, atol=1e-12)


def test_a_batch_without_masked_tokens_has_a_token_loss_of_zero_and_finite_gradients() -> None:
    model, batch = _ours().train(), _batch()
    batch["labels"].fill_(-100)
    del batch["next_sentence_label"]
    loss = model.loss(batch)
    loss.backward()
    assert loss.item() == 0.0
    grads = {name: p.grad for name, p in model.named_parameters()}
    missing = [name for name, grad in grads.items() if grad is None]
    assert missing == [n for n in grads if "pooler" in n or "seq_relationship" in n]
    assert all(grad.abs().max().item() == 0.0 for grad in grads.values() if grad is not None)


def test_masked_labels_of_minus_100_fill_up_a_batch_without_changing_it() -> None:
    model, batch = _ours(), _by_position(_batch())
    filled = batch | {
        "mlm_positions": torch.cat([batch["mlm_positions"], torch.zeros(3, dtype=torch.int64)]),
        "mlm_labels": torch.cat([batch["mlm_labels"], torch.full((3,), -100)]),
    }
    torch.testing.assert_close(model.loss(filled), model.loss(batch), rtol=0, atol=1e-12)


def test_positions_given_one_by_one_equal_the_usual_ones() -> None:
    model, batch = _ours(), _batch()
    positions = torch.arange(9).expand(3, 9)
    torch.testing.assert_close(model.loss(batch | {"position_ids": positions}), model.loss(batch), rtol=0, atol=1e-12)
    assert model.loss(batch | {"position_ids": positions.flip(1)}).item() != model.loss(batch).item()


def test_no_mask_and_a_mask_of_ones_are_the_same() -> None:
    model, batch = _ours(), _batch(padded=False)
    ones = batch | {"attention_mask": torch.ones(3, 9, dtype=torch.bool)}
    torch.testing.assert_close(model.loss(ones), model.loss(batch | {"attention_mask": None}), rtol=0, atol=1e-12)


def test_padding_does_not_change_what_the_other_tokens_see() -> None:
    model, batch = _ours(), _batch()
    before = model(**_unlabelled(batch)).prediction_logits
    batch["input_ids"][1, 6:] = 5
    torch.testing.assert_close(model(**_unlabelled(batch)).prediction_logits[1, :6], before[1, :6], rtol=0, atol=1e-12)


# --- measures


def test_tally_sums_what_the_logits_say() -> None:
    model, batch = _ours(), _batch()
    logits = model(**_unlabelled(batch))
    right = (logits.prediction_logits.argmax(dim=2) == batch["labels"]).sum().item()
    pairs_right = (logits.seq_relationship_logits.argmax(dim=1) == batch["next_sentence_label"]).sum().item()
    tally = model.tally(batch)
    assert list(tally) == ["count", "loss", "mlm_acc", "pairs", "nsp_loss", "nsp_acc"]
    count = (batch["labels"] != -100).sum().item()
    assert (tally["count"].item(), tally["pairs"].item()) == (count, 3)
    assert (tally["mlm_acc"].item(), tally["nsp_acc"].item()) == (right, pairs_right)
    total = tally["loss"] / tally["count"] + tally["nsp_loss"] / tally["pairs"]
    torch.testing.assert_close(total, model.loss(batch).detach(), rtol=0, atol=1e-12)
    assert not any(value.requires_grad for value in tally.values())


def test_accuracy_of_a_learned_batch_is_one() -> None:
    model, batch = _ours(torch.float32, dropout=0.0, attention_dropout=0.0).train(), _by_position(_batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
    assert {name: share.item() for name, share in model.accuracy(batch).items()} == {"mlm_acc": 1.0, "nsp_acc": 1.0}
    assert list(model.accuracy(batch | {"next_sentence_label": None})) == ["mlm_acc"]


# --- with strategies and torch's tools


def test_checkpoints_name_the_layers_in_order() -> None:
    model = _ours()
    assert model.checkpoints == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert [model.get_submodule(name) for name in model.checkpoints] == list(model.bert.encoder.layer)


def test_recomputing_every_layer_and_the_head_changes_no_bit_of_the_gradients() -> None:
    batch = _by_position(_batch())

    def gradients(recompute: bool) -> list[Tensor]:
        model = _ours(torch.float32).train()
        for module in [model.get_submodule(n) for n in model.checkpoints] + [model.cls.predictions] if recompute else []:
            inner = module.forward
            module.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
        torch.manual_seed(5)
        model.loss(batch).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("float16", 0.005)])
def test_under_amp_one_update_is_close_to_that_of_float32(alone: None, dtype: str, tolerance: float) -> None:
    plain, batch = _ours(torch.float32), _by_position(_batch())
    model = copy.deepcopy(plain)
    plain.loss(batch).backward()
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": dtype})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    seen: list[torch.dtype] = []
    model.bert.encoder.layer[0].intermediate.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    loss = model.loss(batch)
    assert loss.dtype == torch.float32 and seen == [getattr(torch, dtype)]
    report = optimizer.minimize(loss)
    assert report.updated and not report.skipped
    start = dict(_ours(torch.float32).named_parameters())
    plain_grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        grad, moved = plain_grads[name], start[name].detach() - parameter.detach()
        assert grad is not None
        # Biases of the keys change no softmax: their true gradient is zero, and what is left is rounding.
        assert (moved - grad).norm() <= tolerance * grad.norm() + 1e-4, name


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler, of its own doing
def test_the_whole_loss_compiles_into_one_graph() -> None:
    model, batch = _ours(), _by_position(_batch())
    expected = model.loss(batch)
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    parameters = list(model.parameters())
    for one, other in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_hooked_replaced_and_patched_projections_are_called_and_give_the_same() -> None:
    batch = _by_position(_batch())
    expected = _ours().loss(batch)
    calls: list[str] = []

    class Adapter(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            calls.append("replaced")
            return super().forward(hidden)

    model = _ours()
    first, second = (model.bert.encoder.layer[i].attention.self for i in range(2))
    adapter = Adapter(12, 12).double()
    adapter.load_state_dict(first.query.state_dict())
    first.query = adapter
    second.value.register_forward_hook(lambda *_: calls.append("hooked"))
    plain_forward = second.key.forward
    second.key.forward = lambda hidden: calls.append("patched") or plain_forward(hidden)
    torch.testing.assert_close(model.loss(batch), expected, rtol=0, atol=1e-12)
    assert sorted(calls) == ["hooked", "patched", "replaced"]


def test_under_amp_the_projections_stay_one_product_unless_one_of_them_is_black_listed() -> None:
    for black, plain in (([], [True] * 3), (["*.query"], [False, True, True])):
        model = _ours(torch.float32)
        strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16", "custom_black_list": black})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on many CPUs
            model, _ = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        attention = model.bert.encoder.layer[0].attention.self
        assert [is_plain(layer) for layer in (attention.query, attention.key, attention.value)] == plain


def test_the_last_layer_is_computed_for_the_rows_that_are_wanted_alone() -> None:
    model, batch = _ours(), _by_position(_batch())
    shapes: list[tuple[int, ...]] = []
    for layer in model.bert.encoder.layer:
        layer.intermediate.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    model.loss(batch)
    assert shapes == [(3, 9, 12), (3 + len(batch["mlm_positions"]), 12)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("padded", [True, False])
def test_on_a_gpu_loss_backward_and_tally_never_wait_for_the_device(padded: bool) -> None:
    plain = _ours(torch.float32, hidden=32, heads=2)
    model = copy.deepcopy(plain).cuda()
    batch = _by_position(_batch(padded=padded))
    plain.loss(batch).backward()
    on_device = {name: value.cuda() for name, value in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        model.loss(on_device)  # the first call loads kernels, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(on_device)
            model.tally(on_device)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(loss.item(), plain.loss(batch).item(), rtol=0.02, atol=0)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad.cpu()).norm() <= 0.03 * one.grad.norm() + 1e-4, name


# --- what is refused


@pytest.mark.parametrize(("options", "message"), [
    ({"drop_out": 0.2}, "Bert_base was given `drop_out`; its options are .*Did you mean `dropout`"),
    ({"dropout": float("nan")}, "dropout is nan; it must be a number of at least 0 and below 1"),
    ({"dropout": True}, "dropout is True"),
    ({"attention_dropout": 1.0}, "attention_dropout is 1.0"),
    ({"layers": True}, "layers is True; it must be a whole number of at least 1"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"hidden": "768"}, "hidden is '768'"),
    ({"hidden": 10, "heads": 3}, "hidden is 10 and heads is 3; heads must divide hidden"),
    ({"padding_id": 23, "vocab_size": 23}, "padding_id is 23; it must be below vocab_size, 23"),
])  # fmt: skip
def test_options_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bert_base(**options)


@pytest.mark.parametrize(("change", "message"), [
    ({"input_ids": torch.ones(3, 17, dtype=torch.int64)}, "holds 17 tokens per sample; .* 16 positions.*max_position=17"),
    ({"input_ids": torch.full((3, 9), 23)}, "input_ids holds 23; allowed are 0 to 22 .vocab_size=23"),
    ({"input_ids": torch.full((3, 9), -1)}, "input_ids holds -1"),
    ({"input_ids": torch.ones(3, 9)}, "input_ids is of torch.float32; .*input_ids.long()"),
    ({"input_ids": torch.ones(9, dtype=torch.int64)}, r"input_ids has shape \(9,\); it must be \[samples, tokens\]"),
    ({"input_ids": None}, "it must hold `input_ids`"),
    ({"token_type_ids": torch.full((3, 9), 2)}, "token_type_ids holds 2; allowed are 0 to 1"),
    ({"attention_mask": torch.ones(3, 8)}, r"attention_mask has shape \(3, 8\); beside these input_ids it must be \(3, 9\)"),
    ({"attention_mask": torch.full((3, 9), -1e4)}, "attention_mask holds -10000.0; it must be 1 for a token and 0 for padding"),
    ({"position_ids": torch.full((3, 9), 16)}, "position_ids holds 16; allowed are 0 to 15"),
    ({"mlm_positions": torch.tensor([27]), "mlm_labels": torch.tensor([1])}, "mlm_positions holds 27; allowed are 0 to 26"),
    ({"mlm_positions": torch.tensor([2]), "mlm_labels": torch.tensor([23])}, "mlm_labels holds 23; allowed are 0 to 22, or -100"),
    ({"mlm_positions": torch.tensor([2, 3]), "mlm_labels": torch.tensor([1])}, "both must be .masked tokens."),
    ({"mlm_positions": None}, "come together"),
    ({"labels": torch.full((3, 9), -100)}, "both `labels` and `mlm_labels`; keep one"),
    ({"next_sentence_label": torch.tensor([0, 1, 2])}, "next_sentence_label holds 2; allowed are 0 to 1, or -100"),
    ({"input_id": torch.ones(3, 9)}, "the batch holds `input_id`; .*Did you mean `input_ids`"),
    ({"mlm_positions": None, "mlm_labels": None, "next_sentence_label": None}, "the batch has no labels"),
])  # fmt: skip
def test_a_batch_that_cannot_be_is_a_data_error_that_says_why(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _ours().loss(_by_position(_batch()) | change)


def test_a_batch_that_is_no_dict_is_refused() -> None:
    with pytest.raises(DataError, match="must be a dict with `input_ids` and labels; this is a list"):
        _ours().loss([torch.ones(3, 9)])


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="Bert was given dict; it takes a BertConfig"):
        Bert({"hidden": 12})  # type: ignore[arg-type]


def test_the_config_is_frozen_and_told_by_the_model() -> None:
    model = _ours()
    assert isinstance(model, Bert) and model.config == BertConfig(**TINY)
    assert BertConfig(hidden=24).feed_forward == 96
