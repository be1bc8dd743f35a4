"""The applications under the strategies: on several ranks, saved and resumed, each as one process with the joined batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fleetx import fleet
from fleetx.applications import Bert, Bert_base, Resnet20
from fleetx.applications.bert import labelled_positions
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks

TINY = {"hidden": 12, "layers": 2, "heads": 3, "feed_forward": 20, "vocab_size": 23, "max_position": 16}
WORDS = TINY["vocab_size"]
STILL = {"dropout": 0.0, "attention_dropout": 0.0}
ROWS = 8


def bert(dtype: torch.dtype = torch.float64, **options: Any) -> Bert:
    torch.manual_seed(0)
    return Bert_base(**TINY | options).to(dtype)


def tokens() -> dict[str, Tensor]:
    """Eight sentences with unequal numbers of masked tokens; rows 2 and 3 have none."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, WORDS, (ROWS, 9), generator=generator)
    attention = torch.ones(ROWS, 9, dtype=torch.int64)
    attention[5, 6:] = ids[5, 6:] = 0
    masked = (torch.rand(ROWS, 9, generator=generator) < 0.4) & (ids > 0)
    masked[2:4] = False
    labels = torch.where(masked, torch.randint(0, WORDS, (ROWS, 9), generator=generator), -100)
    return {"input_ids": ids, "attention_mask": attention, "labels": labels, "next_sentence_label": torch.arange(ROWS) % 2}


def part(rows: slice, *, pairs: bool = True) -> dict[str, Tensor]:
    """Some rows of it, as a loader makes them."""
    batch = {name: value[rows] for name, value in tokens().items()}
    positions, labels = labelled_positions(batch.pop("labels"))
    if not pairs:
        del batch["next_sentence_label"]
    return batch | {"mlm_positions": positions, "mlm_labels": labels}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def distributed(model: Any, optimizer: torch.optim.Optimizer, **strategy: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        return fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy))


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


# --- BERT: the weighted mean over micro-batches and ranks


def two_windows_of_two(rank: int) -> list[dict[str, Tensor]]:
    """Micro-batches of two rows: one of rank 0 has no masked token at all."""
    model = bert(**STILL)
    model, optimizer = distributed(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        gradient_merge=True, gradient_merge_configs={"k_steps": 2}, clip_norm=True, clip_norm_configs={"max_norm": 0.5},
        find_unused_parameters=True,
    )  # fmt: skip
    seen = []
    for _ in range(2):
        for micro in range(2):
            batch = part(slice(4 * rank + 2 * micro, 4 * rank + 2 * micro + 2), pairs=False)
            optimizer.minimize(model.loss(batch), weight=len(batch["mlm_labels"]))
        seen.append(weights(model))
    return seen


def test_micro_batches_weighted_by_their_masked_tokens_equal_the_whole_batch_in_one_process() -> None:
    plain = bert(**STILL)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        plain.loss(part(slice(0, ROWS), pairs=False)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        expected.append(weights(plain))
    for seen in run_ranks(two_windows_of_two, 2):
        for one, other in zip(seen, expected, strict=True):
            assert_same(one, other, atol=1e-9)


def tokens_alone(rank: int) -> str:
    model = bert(**STILL)
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return raised(lambda: optimizer.minimize(model.loss(part(slice(4 * rank, 4 * rank + 4), pairs=False))))


def test_without_sentence_labels_the_unused_heads_are_named() -> None:
    for message in run_ranks(tokens_alone, 2):
        assert "bert.pooler.dense.weight" in message and "find_unused_parameters" in message


# --- BERT: precision


def one_update(rank: int, strategy: dict[str, Any]) -> dict[str, Tensor]:
    model = bert(torch.float32, **STILL)
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=1.0), **strategy)
    report = optimizer.minimize(model.loss(part(slice(4 * rank, 4 * rank + 4))))
    assert report.updated and not report.skipped
    return weights(model)


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        ({"bf16_allreduce": True}, 0.01),
        ({"fp16_allreduce": True}, 0.002),
        ({"amp": True, "amp_configs": {"dtype": "bfloat16"}}, 0.03),
        ({"amp": True, "amp_configs": {"dtype": "float16"}}, 0.01),
        ({"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 2.0**16}, "fp16_allreduce": True}, 0.01),
    ],
    ids=["bf16_allreduce", "fp16_allreduce", "amp_bf16", "amp_fp16", "amp_fp16_large_scale"],
)
def test_one_update_in_16_bits_is_close_to_that_of_float32(strategy: dict[str, Any], tolerance: float) -> None:
    start, (plain, _) = weights(bert(torch.float32, **STILL)), run_ranks(one_update, 2, {})
    first, second = run_ranks(one_update, 2, strategy)
    assert_same(first, second)
    for name, moved in first.items():
        expected = plain[name] - start[name]
        # Biases of the keys change no softmax: their true gradient is zero, and what is left is rounding.
        assert (moved - plain[name]).norm() <= tolerance * expected.norm() + 1e-4, name


# --- BERT: saved and resumed


def steps(model: Any, optimizer: Any, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        start = (2 * step + 4 * rank) % ROWS
        optimizer.minimize(model.loss(part(slice(start, start + 2))))


def trained_and_resumed(rank: int, folder: str) -> list[dict[str, Tensor]]:
    """Stopped in the middle of a window, with dropout on: the rest must draw the same numbers."""
    strategy = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2},
                "amp": True, "amp_configs": {"dtype": "float16"}}  # fmt: skip
    model = bert(torch.float32)
    model, optimizer = distributed(model, torch.optim.AdamW(model.parameters(), lr=0.01), **strategy)
    torch.manual_seed(3 + rank)
    steps(model, optimizer, rank, 0, 3)
    fleet.save_checkpoint(folder, step=3, model=model, optimizer=optimizer)
    steps(model, optimizer, rank, 3, 8)
    straight = weights(model)
    other = Bert_base(**TINY)
    other, optimizer = distributed(other, torch.optim.AdamW(other.parameters(), lr=0.01), **strategy)
    found = fleet.load_checkpoint(folder, model=other, optimizer=optimizer)
    assert found is not None and found.step == 3
    assert other.cls.predictions.decoder.weight is other.bert.embeddings.word_embeddings.weight
    steps(other, optimizer, rank, 3, 8)
    return [straight, weights(other)]


def test_bert_with_adamw_resumed_inside_a_merge_window_continues_to_the_bit(tmp_path: Path) -> None:
    ranks = run_ranks(trained_and_resumed, 2, str(tmp_path))
    for straight, resumed in ranks:
        assert_same(straight, resumed)
        assert_same(straight, ranks[0][0])


@pytest.mark.usefixtures("alone")
def test_a_saved_bert_loads_here_and_in_transformers_and_comes_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = bert(torch.float32, **STILL)
    model, optimizer = distributed(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(3):
        optimizer.minimize(model.loss(part(slice(0, ROWS))))
    batch = part(slice(0, ROWS))
    expected = model.eval().loss(batch).detach()
    fleet.save_model(tmp_path / "model.safetensors", model, optimizer)

    ours = Bert_base(**TINY).eval()
    ours.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(ours.loss(batch).detach(), expected, rtol=0, atol=0)

    transformers.BertConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=23,
        max_position_embeddings=16, architectures=["BertForPreTraining"],
    ).save_pretrained(tmp_path)  # fmt: skip
    theirs, info = transformers.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(theirs.eval()(**tokens()).loss.detach(), expected, rtol=0, atol=1e-5)

    theirs.save_pretrained(tmp_path / "back")
    back = Bert_base(**TINY).eval()
    back.load_state_dict(load_file(tmp_path / "back" / "model.safetensors"))
    assert_same(weights(back), weights(ours))


@pytest.mark.usefixtures("alone")
def test_a_copy_of_a_distributed_bert_is_tied_and_independent() -> None:
    model = bert(torch.float32, **STILL)
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.5), amp=True)
    average = copy.deepcopy(model)
    before = weights(average)
    optimizer.minimize(model.loss(part(slice(0, ROWS))))
    assert_same(weights(average), before)
    for one in (model, average):
        assert one.cls.predictions.decoder.weight is one.bert.embeddings.word_embeddings.weight
        assert one.cls.predictions.decoder.bias is one.cls.predictions.bias
    assert average.cls.predictions.bias is not model.cls.predictions.bias


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("frozen", ["bert.embeddings", "bert.encoder.layer.0.attention.self.query", "bert", "cls.predictions"])
def test_frozen_parts_stay_and_the_rest_moves_as_without_the_strategy(frozen: str) -> None:
    def half_frozen() -> Bert:
        model = bert(**STILL)
        model.get_submodule(frozen).requires_grad_(False)
        return model

    plain = half_frozen()
    sgd = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5)
    plain.loss(part(slice(0, ROWS))).backward()
    sgd.step()
    model = half_frozen()
    model, optimizer = distributed(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))
    optimizer.minimize(model.loss(part(slice(0, ROWS))))
    assert_same(weights(model), weights(plain), atol=1e-12)
    start = weights(bert(**STILL))
    moved = {name for name, tensor in weights(model).items() if not torch.equal(tensor, start[name])}
    assert moved and not any(name.startswith(frozen) for name in moved)


# --- ResNet


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 3, 9, 13, generator=generator, dtype=torch.float64), torch.arange(ROWS) % 5


def resnet(channels_last: bool = False) -> Resnet20:
    torch.manual_seed(0)
    return Resnet20(5, width=4, image_size=9, channels_last=channels_last, label_smoothing=0.1).double()


def train_resnet(channels_last: bool, take: Callable[[Tensor], Tensor], strategy: dict[str, Any]) -> dict[str, Tensor]:
    model = resnet(channels_last)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    model, optimizer = distributed(model, sgd, **strategy)
    x, y = images()
    for _ in range(3):
        optimizer.minimize(model.loss((take(x), take(y))), weight=len(take(y)))
    if channels_last:
        kernel = model.get_parameter("layer2.1.conv1.weight")
        assert kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous()
    return weights(model)


def train_resnet_on_a_share(rank: int, channels_last: bool) -> dict[str, Tensor]:
    rows = slice(0, 3) if rank == 0 else slice(3, ROWS)
    return train_resnet(channels_last, lambda t: t[rows], {"sync_batch_norm": True})


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.usefixtures("alone")
def test_resnet20_with_synchronised_norms_on_unequal_shares_equals_one_process(channels_last: bool) -> None:
    expected = train_resnet(False, lambda t: t, {})
    first, second = run_ranks(train_resnet_on_a_share, 2, channels_last)
    assert_same(first, second)
    assert_same(first, expected, atol=1e-9)
