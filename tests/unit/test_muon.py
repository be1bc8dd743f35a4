"""fleetx.optim.Muon: equal to torch's on matrices, to its rule in float64, and to AdamW on the rest."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleetx.errors import ConfigError
from fleetx.optim import Muon
from fleetx.optim.muon import step_scale
from fleetx.optim.orthogonal import BATCH_MATRICES, batches_of, cost, newton_schulz, orthogonalise, shares_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = [(16, 16), (16, 16), (8, 32), (32, 8), (24, 24), (64, 16), (16, 16)]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter((torch.randn(shape, generator=generator, dtype=torch.float64) / 4).to(dtype)) for shape in shapes]


def put_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for param in params:
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad = torch.empty_like(param).copy_(noise)


def train(optimizer: Any, params: list[nn.Parameter], steps: int = 6) -> list[Tensor]:
    for step in range(steps):
        put_gradients(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


# --- the rule -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 12), (7, 20), (20, 7)])
def test_the_iteration_keeps_singular_vectors_and_brings_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = newton_schulz(matrix, steps=5, dtype=torch.float64)
    inside = left.T @ found @ right.T
    assert 0.6 < float(inside.diagonal().min()) and float(inside.diagonal().max()) < 1.3
    torch.testing.assert_close(inside, inside.diagonal().diag(), rtol=0, atol=1e-12)


def test_a_matrix_of_zeros_stays_zeros() -> None:
    assert not newton_schulz(torch.zeros(4, 6), steps=5).any()


def test_a_batch_of_matrices_and_transposed_ones_is_what_each_gives_alone() -> None:
    tensors = [
        torch.randn(6, 9, dtype=torch.float64),
        torch.randn(9, 6, dtype=torch.float64),
        torch.randn(9, 3, 2, dtype=torch.float64),
    ]
    settings: dict[str, Any] = {"steps": 5, "coefficients": COEFFICIENTS, "dtype": torch.float64}
    together = orthogonalise(tensors, **settings)
    for tensor, found in zip(tensors, together, strict=True):
        assert found.shape == tensor.shape
        torch.testing.assert_close(found, orthogonalise([tensor], **settings)[0], rtol=0, atol=1e-13)


def reference(steps: int, *, lr: float, momentum: float, nesterov: bool, decay: float, adjust: str) -> list[np.ndarray]:
    """Muon in NumPy's float64, tensor by tensor, after the formulas of its page."""
    params = parameters(SHAPES, torch.float64)
    weights = [param.detach().numpy().copy() for param in params]
    means = [np.zeros_like(weight) for weight in weights]
    a, b, c = COEFFICIENTS
    for step in range(steps):
        put_gradients(params, step)
        for i, param in enumerate(params):
            assert param.grad is not None
            gradient = param.grad.numpy()
            means[i] = momentum * means[i] + (1 - momentum) * gradient
            x = momentum * means[i] + (1 - momentum) * gradient if nesterov else means[i]
            rows, columns = x.shape
            x = x.T if rows > columns else x
            x = x / np.linalg.norm(x)
            for _ in range(5):
                squared = x @ x.T
                x = a * x + (b * squared + c * squared @ squared) @ x
            x = x.T if rows > columns else x
            scale = 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
            weights[i] = (1 - lr * decay) * weights[i] - lr * scale * x
    return weights


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_in_float64_it_is_the_rule_of_its_page(nesterov: bool, adjust: str) -> None:
    params = parameters(SHAPES, torch.float64)
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov}
    optimizer = Muon(params, **settings, muon_weight_decay=0.3, adjust_lr_fn=adjust, ns_dtype="float64")
    found = train(optimizer, params)
    for mine, theirs in zip(found, reference(6, **settings, decay=0.3, adjust=adjust), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=0, atol=1e-12)


def test_scales_by_hand() -> None:
    assert step_scale((64, 16), "original") == 2.0 and step_scale((16, 64), "original") == 1.0
    assert step_scale((64, 16), "match_rms_adamw") == pytest.approx(1.6)
    assert step_scale((64, 4, 2, 2), "original") == 2.0  # a convolution of 64 output channels: 64 x 16


# --- torch's ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_on_matrices_it_is_torchs_muon_to_bfloat16(adjust: str, nesterov: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 5, "adjust_lr_fn": adjust}
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    mine = train(Muon(ours, muon_weight_decay=0.2, **settings), ours)
    other = train(torch.optim.Muon(theirs, weight_decay=0.2, **settings), theirs)
    for a, b in zip(mine, other, strict=True):
        # Of six steps, each 0.02 * scale * o: an entry of o is below 1, and bfloat16 keeps 8 bits of it.
        torch.testing.assert_close(a, b, rtol=0, atol=6 * 0.02 * 1.6 * 2**-7)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_its_defaults_on_matrices_are_torchs() -> None:
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    for a, b in zip(train(Muon(ours), ours), train(torch.optim.Muon(theirs), theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=6 * 1e-3 * 2 * 2**-7)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}, {"maximize": True}]
)
def test_the_rest_has_the_bits_of_torchs_adamw(options: dict[str, Any]) -> None:
    shapes: list[tuple[int, ...]] = [(5,), (), (33,)]
    ours, theirs = parameters(shapes), parameters(shapes)
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2, **options}
    mine, other = train(Muon(ours, **settings), ours), train(torch.optim.AdamW(theirs, **settings), theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_maximizing_is_minimizing_the_negative() -> None:
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    up, down = Muon(ours, maximize=True), Muon(theirs)
    for step in range(3):
        put_gradients(ours, step)
        put_gradients(theirs, step)
        for param in theirs:
            assert param.grad is not None
            param.grad.neg_()
        up.step()
        down.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_convolution_is_a_matrix_of_its_output_channels_in_any_memory_order() -> None:
    weight = parameters([(6, 3, 2, 2)], torch.float64)
    flat = [nn.Parameter(weight[0].detach().reshape(6, 12).clone())]
    last = [nn.Parameter(weight[0].detach().clone().to(memory_format=torch.channels_last))]
    found = [train(Muon(params, ns_dtype="float64"), params)[0] for params in (weight, flat, last)]
    torch.testing.assert_close(found[0].reshape(6, 12), found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-13)
    assert last[0].is_contiguous(memory_format=torch.channels_last)


# --- in a loop of the user's own ------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))


def test_a_loaded_state_goes_on_with_the_same_bits() -> None:
    model = net()
    optimizer = Muon(model.named_parameters(), model=model, lr=0.02)
    params = list(model.parameters())
    train(optimizer, params, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    last = train(optimizer, params, 3)

    other = net()
    other.load_state_dict(weights)
    resumed = Muon(other.named_parameters(), model=other, lr=0.5)
    resumed.load_state_dict(saved)
    again = train(resumed, list(other.parameters()), 3)
    assert resumed.param_groups[0]["lr"] == 0.02
    assert all(torch.equal(a, b) for a, b in zip(last, again, strict=True))


def test_state_is_in_torchs_plain_form() -> None:
    model = net()
    optimizer = Muon(model.named_parameters(), model=model)
    train(optimizer, list(model.parameters()), 1)
    state = optimizer.state_dict()["state"]
    assert {number: sorted(held) for number, held in state.items()} == {
        number: ["momentum_buffer", "step"] if number in (0, 4) else ["exp_avg", "exp_avg_sq", "step"] for number in range(8)
    }


def test_a_scheduler_moves_both_halves_and_a_closure_is_called_once() -> None:
    model = net()
    optimizer = Muon(model.named_parameters(), model=model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0 and len(calls) == 1
    scheduler.step()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_rate_that_is_a_tensor_gives_the_step_of_the_number() -> None:
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    mine, other = train(Muon(ours, lr=torch.tensor(0.02)), ours), train(Muon(theirs, lr=0.02), theirs)
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_group_says_who_updates_it() -> None:
    params = parameters([(4, 4), (4, 4)])
    optimizer = Muon([{"params": params[:1], "use_muon": False}, {"params": params[1:], "lr": 0.5}], lr=0.1)
    train(optimizer, params, 1)
    assert "exp_avg" in optimizer.state[params[0]] and "momentum_buffer" in optimizer.state[params[1]]
    assert optimizer.describe().splitlines()[1:] == [
        "parameter 0  4x4    AdamW      its group says use_muon=False",
        "parameter 1  4x4    Muon       no name: chosen by its dimensions alone",
    ]


def test_a_matrix_without_a_gradient_stays_as_it_is() -> None:
    params = parameters([(4, 4), (4, 4)])
    optimizer = Muon(params)
    put_gradients(params, 0)
    params[0].grad = None
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert torch.equal(before[0], params[0]) and not torch.equal(before[1], params[1])
    assert params[0] not in optimizer.state


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.float16))]), "Muon takes no float16 parameters"),
        (lambda: Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]), "one is complex64"),
        (lambda: Muon([nn.Parameter(torch.ones(2, 2))], momentum=1.0), "momentum is 1.0; it must be"),
        (lambda: Muon([nn.Parameter(torch.ones(2, 2))], ns_steps=0), "ns_steps is 0; it must be an integer of at least 1"),
        (lambda: Muon([nn.Parameter(torch.ones(2, 2))], ns_dtype="float16"), "ns_dtype is 'float16'; it must be one of"),
        (
            lambda: Muon([nn.Parameter(torch.ones(2, 2))], ns_coefficients=(1.0, 2.0)),
            "it must be a list of 3, each element a finite number",
        ),
        (lambda: Muon([nn.Parameter(torch.ones(2, 2))], adjust_lr_fn="keller"), "adjust_lr_fn is 'keller'"),
        (lambda: Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "use_mion": True}]), "Did you mean `use_muon`?"),
        (lambda: Muon(net()), "Write Muon(model.named_parameters(), ..., model=model)."),
        (lambda: Muon(net().named_parameters(), exclude=["heads"]), "exclude names 'heads'; no parameter's name contains it."),
    ],
)
def test_what_it_cannot_do_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert said in str(refused.value)


def test_a_sparse_gradient_is_refused_before_anything_has_moved() -> None:
    matrix, table = nn.Parameter(torch.ones(3, 3)), nn.Embedding(4, 3, sparse=True)
    optimizer = Muon([("matrix", matrix), ("embedding.weight", table.weight)])
    (table(torch.tensor([1])) @ matrix).sum().backward()
    with pytest.raises(ConfigError, match=r"the gradient of embedding.weight is sparse"):
        optimizer.step()
    assert torch.equal(matrix, torch.ones(3, 3)) and not optimizer.state


def test_a_state_of_adamw_is_refused() -> None:
    params = parameters([(4, 4)])
    with pytest.raises(ConfigError, match="the state of another optimizer than Muon"):
        Muon(params).load_state_dict(torch.optim.AdamW(params).state_dict())


# --- how the work divides -------------------------------------------------------------------------------------------------


def test_batches_hold_equal_shapes_and_do_not_depend_on_ranks() -> None:
    assert batches_of([(4, 8), (8, 4), (4, 4), (8, 4)]) == [[0, 1, 3], [2]]
    assert [len(batch) for batch in batches_of([(4, 4)] * (2 * BATCH_MATRICES + 1))] == [BATCH_MATRICES, BATCH_MATRICES, 1]
    assert [len(batch) for batch in batches_of([(1024, 4096)] * 4)] == [2, 2]


def test_the_dearest_batch_goes_first_to_the_rank_with_the_least() -> None:
    assert shares_of([5.0, 1.0, 4.0, 3.0, 1.0], 2) == [[0, 1, 4], [2, 3]]
    assert shares_of([1.0, 1.0], 3) == [[0], [1], []]
    assert cost(2, 3) == cost(3, 2) == 4 * (6 + 2)
