"""fleetx.integrations.transformers.lean against the plain models of transformers: loss, gradients, outputs, memory, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fleetx import fleet
from fleetx.errors import ConfigError, FleetError
from fleetx.integrations.lean_head import OnDemandLogits, lean

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS, ROWS, LENGTH = 97, 3, 8
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
DROPLESS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {**NO_DROPOUT, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": WORDS}
MODELS: dict[str, Callable[[], Any]] = {
    "BERT": lambda: transformers.BertForPreTraining(transformers.BertConfig(**SMALL, **DROPLESS)),
    "BERT for words": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **DROPLESS)),
    "RoBERTa": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL, **DROPLESS)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=1)),
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **ENDS, num_key_value_heads=2)),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, **ENDS, num_key_value_heads=2)),
}
CAUSAL = ("GPT-2", "Llama", "Qwen2")
OUTPUT = {"BERT": "prediction_logits"}


def _model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


def _batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(5, WORDS, (ROWS, LENGTH), generator=generator)
    labels = words.where(torch.rand(words.shape, generator=generator) < 0.4, -100)
    more = {"next_sentence_label": torch.tensor([0, 1, 1])} if name == "BERT" else {}
    return {"input_ids": words, "labels": labels, **more}


def _expected_loss(name: str, model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss in float64 from all logits; transformers rounds logits to float32 in between."""
    found = model(**{key: value for key, value in batch.items() if key == "input_ids"})
    logits, labels = found[OUTPUT.get(name, "logits")], batch["labels"]
    if name in CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))
    return loss + F.cross_entropy(found.seq_relationship_logits, batch["next_sentence_label"]) if name == "BERT" else loss


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return [grad for grad in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) if grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_those_of_all_logits_in_float64(name: str) -> None:
    model, batch = _model(name), _batch(name)
    expected = _expected_loss(name, model, batch)
    wanted = _gradients(model, expected)
    found = lean(model)(**batch)
    # The loss itself is rounded to float32 where the model asks for logits in float32, as transformers' own is.
    torch.testing.assert_close(found.loss.double(), expected, rtol=0, atol=1e-10 if found.loss.dtype == torch.float64 else 1e-6)
    gradients = _gradients(model, found.loss)
    assert len(gradients) == len(wanted)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_keep_their_names_and_logits_are_computed_when_read(name: str) -> None:
    model, batch = _model(name, torch.float32), _batch(name)
    plain = model(**batch)
    keys = list(model.state_dict())
    found = lean(model)(**batch)
    assert list(found.keys()) == list(plain.keys()) and list(model.state_dict()) == keys
    logits = found[OUTPUT.get(name, "logits")]
    assert isinstance(logits, OnDemandLogits) and logits.shape == (ROWS, LENGTH, WORDS) and logits.dtype == torch.float32
    theirs = plain[OUTPUT.get(name, "logits")]
    for read in (lambda one: one.detach(), lambda one: one.argmax(-1), lambda one: one * 2, lambda one: one.softmax(-1)):
        torch.testing.assert_close(read(logits), read(theirs), rtol=0, atol=0)
    # Of some rows alone, whose products may be summed in another order.
    torch.testing.assert_close(logits[:, -1] * 2, theirs[:, -1] * 2, rtol=0, atol=1e-6)
    assert torch.equal(torch.from_numpy(logits.detach().numpy()), theirs.detach())


def test_no_tensor_of_all_tokens_and_words_is_ever_made() -> None:
    model, batch = _model("GPT-2", torch.float32), _batch("GPT-2")
    every = ROWS * LENGTH * WORDS
    assert _largest_result(lambda: model(**batch).loss.backward()) >= every
    labelled = int((batch["labels"][:, 1:] != -100).sum())
    weight = model.lm_head.weight.numel()
    assert _largest_result(lambda: lean(model)(**batch).loss.backward()) <= max(labelled * WORDS, weight) < every


def _largest_result(work: Callable[[], Any]) -> int:
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    with Largest() as seen:
        work()
    return seen.elements


@pytest.mark.parametrize(
    ("how", "kwargs"),
    [
        ("smoothing", {"label_smoothing": 0.1}),
        ("weights", {"weight": torch.linspace(0.5, 1.5, WORDS, dtype=torch.float64)}),
        ("each", {"reduction": "none"}),
        ("sum", {"reduction": "sum"}),
        ("another ignored label", {"ignore_index": 7}),
        ("mean", {}),
    ],
)
def test_a_loss_of_the_users_own_is_that_of_the_plain_logits(how: str, kwargs: dict[str, Any]) -> None:
    model, batch = _model("GPT-2"), _batch("GPT-2")
    labels = batch["input_ids"].clone()
    labels[0, :4] = 7
    expected = F.cross_entropy(model(batch["input_ids"]).logits.flatten(0, 1), labels.flatten(), **kwargs).sum()
    logits = lean(model)(batch["input_ids"]).logits
    found = F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), **kwargs).sum()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    for mine, theirs in zip(_gradients(model, found), _gradients(model, expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_wrong_labels_are_the_errors_of_torch() -> None:
    model = lean(_model("GPT-2"))
    logits = model(_batch("GPT-2")["input_ids"]).logits.view(-1, WORDS)
    with pytest.raises(ValueError, match="Expected input batch_size"):
        F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))
    with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"):
        F.cross_entropy(logits, torch.full((ROWS * LENGTH,), WORDS))


def test_no_labelled_token_gives_nan_as_torch_does_and_gradients_of_zero_for_a_sum() -> None:
    model, words = lean(_model("GPT-2")), _batch("GPT-2")["input_ids"]
    labels = torch.full((ROWS * LENGTH,), -100)
    assert F.cross_entropy(model(words).logits.view(-1, WORDS), labels).isnan()
    total = F.cross_entropy(model(words).logits.view(-1, WORDS), labels, reduction="sum")
    assert total == 0 and all(not grad.any() for grad in _gradients(model, total))


def test_copies_and_pickles_have_the_plain_head_and_words_are_generated_alike() -> None:
    model, words = _model("GPT-2", torch.float32), _batch("GPT-2")["input_ids"]
    lean(model.eval())
    assert isinstance(model.lm_head, nn.Linear) and repr(model.lm_head).startswith("Linear(")
    assert model.lm_head.weight is model.transformer.wte.weight
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert type(plain.lm_head) is nn.Linear and plain.lm_head.weight is plain.transformer.wte.weight
        with torch.no_grad():
            assert torch.equal(plain(words).logits, model(words).logits.detach())
        ours, theirs = (one.generate(words[:1], max_new_tokens=4, do_sample=False, pad_token_id=1) for one in (model, plain))
        assert torch.equal(ours, theirs)
    assert lean(model) is model


def test_logits_that_are_read_after_the_weights_changed_are_an_error() -> None:
    model, batch = lean(_model("GPT-2", torch.float32)), _batch("GPT-2")
    found = model(**batch)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(FleetError, match="Read them"):
        found.logits.argmax(-1)


@pytest.mark.filterwarnings("ignore:amp:fleetx.errors.FleetWarning")
def test_under_fleet_with_amp_and_recompute_a_batch_trains_as_with_all_logits() -> None:
    losses = []
    for prepare in (lambda one: one, lean):
        model, batch = prepare(_model("BERT", torch.float32)), _batch("BERT")
        strategy = fleet.DistributedStrategy(amp=True, recompute=True)
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        losses.append([optimizer.minimize(model(**batch).loss).loss for _ in range(4)])
        assert model(**batch).prediction_logits.float().dtype == torch.float32
    assert losses[1][3] < losses[1][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=2e-2)  # bfloat16: 8 bits


def test_a_model_without_a_plain_head_is_refused_and_so_is_one_that_was_changed() -> None:
    with pytest.raises(ConfigError, match=r"get_output_embeddings\(\) is a torch.nn.Linear; that of Linear is None"):
        lean(nn.Linear(2, 2))
    model = _model("GPT-2")
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks, or a changed forward"):
        lean(model)
