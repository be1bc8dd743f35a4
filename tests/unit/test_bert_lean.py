"""What BERT keeps for its backward: a 16-bit stream under amp, a GELU worked out twice; without amp not a bit is changed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from fleetx import fleet
from fleetx.applications.bert import Bert, Bert_base
from fleetx.applications.bert_encoder import BertConfig, BertLayer
from fleetx.applications.bert_lean import LayerNorm, _LinearOfGelu, linear_of_gelu
from fleetx.errors import FleetWarning

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _model(**options: Any) -> Bert:
    torch.manual_seed(0)
    return Bert_base(**{"hidden": 32, "layers": 4, "heads": 2, "vocab_size": 61, "max_position": 16} | options).train()


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    positions = torch.arange(0, 4 * 16, 5)
    return {
        "input_ids": torch.randint(1, 61, (4, 16), generator=generator),
        "mlm_positions": positions,
        "mlm_labels": torch.randint(0, 61, positions.shape, generator=generator),
        "next_sentence_label": torch.tensor([0, 0, 0, 0]),
    }


def _as_torch_alone(model: nn.Module) -> nn.Module:
    """Torch's norms, and modules that are called one by one, as a hook asks for it."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, LayerNorm):
                plain = nn.LayerNorm(child.normalized_shape, eps=child.eps)
                plain.weight, plain.bias = child.weight, child.bias
                setattr(module, name, plain)
        if isinstance(module, BertLayer):
            module.intermediate.register_forward_hook(lambda *_: None)
    return model


def _gradients(model: nn.Module, dtype: torch.dtype | None = None, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
        loss: Tensor = model.loss(_batch())  # type: ignore[operator]
    (loss * scale).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, missing
    return loss.detach(), {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}


def _distributed(model: Bert, **configs: Any) -> Bert:
    strategy = fleet.DistributedStrategy(amp=True, amp_configs=configs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on many CPUs
        model, _ = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    return model


def _residual_types(model: Bert) -> list[torch.dtype]:
    """Of every layer's input and, last, of what the encoder returns."""
    found: list[torch.dtype] = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_pre_hook(lambda module, args: found.append(args[0].dtype))
    model.bert.encoder.register_forward_hook(lambda module, args, out: found.append(out.dtype))
    model.loss(_batch())
    return found


# --- the residual stream


@pytest.mark.parametrize("dtype", HALVES)
def test_under_amp_every_layer_is_given_16_bits(dtype: torch.dtype) -> None:
    model = _distributed(_model(), dtype=str(dtype).removeprefix("torch."))
    assert _residual_types(model) == [dtype] * 5


def test_without_amp_every_layer_is_given_float32() -> None:
    assert _residual_types(_model()) == [torch.float32] * 5


def test_norms_on_the_black_list_of_amp_make_the_stream_float32() -> None:
    assert _residual_types(_distributed(_model(), dtype="bfloat16", custom_black_list=["LayerNorm"])) == [torch.float32] * 5


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_without_autocast_no_bit_of_loss_and_gradients_is_changed(dropout: float) -> None:
    options = {"dropout": dropout, "attention_dropout": dropout}
    loss, gradients = _gradients(_model(**options))
    expected_loss, expected = _gradients(_as_torch_alone(_model(**options)))
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=name)


# Measured, of loss and gradients: 5e-6 and 0.015 in bfloat16, 1e-5 and 0.0014 in float16. With a residual stream in float32 it
# is 5e-6 and 0.006, 4e-6 and 0.0005: each norm and sum of the four layers rounds once more, in both directions.
@pytest.mark.parametrize(("dtype", "loss_off", "gradients_off"), [(torch.bfloat16, 1e-4, 0.03), (torch.float16, 5e-5, 0.003)])
def test_loss_and_gradients_in_16_bits_are_close_to_those_of_float32(
    dtype: torch.dtype, loss_off: float, gradients_off: float
) -> None:
    options = {"dropout": 0.0, "attention_dropout": 0.0}
    expected_loss, expected = _gradients(_model(**options))
    loss, gradients = _gradients(_model(**options), dtype, scale=1024.0)
    torch.testing.assert_close(loss, expected_loss, rtol=loss_off, atol=0)
    for name, gradient in gradients.items():
        # Biases of the keys change no softmax: their true gradient is zero, and what is left is rounding.
        assert (gradient - expected[name]).norm() <= gradients_off * expected[name].norm() + 1e-4, name


@pytest.mark.parametrize("dtype", HALVES)
def test_a_norm_in_16_bits_has_float32_statistics(dtype: torch.dtype) -> None:
    """Rows of 65 and 64: a mean of 64.5 and a deviation of 0.5. In bfloat16 the mean would be 64 or 65, and all else wrong."""
    norm = LayerNorm(1024, eps=1e-12)
    rows = (64 + torch.arange(1024) % 2).float().expand(3, -1)
    with torch.autocast("cpu", dtype):
        normed = norm(rows)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed[0, :4].float(), torch.tensor([-1.0, 1.0, -1.0, 1.0]), rtol=0, atol=2**-8)


def test_a_float64_model_is_not_touched_by_autocast() -> None:
    plain, model = _as_torch_alone(_model().double()), _model().double()
    with torch.autocast("cpu", torch.bfloat16):
        one, other = model(**_batch()), plain(**_batch())
    assert one.loss is not None and one.loss.dtype == other.loss.dtype == torch.float64


# --- the GELU that is not kept


def test_the_linear_layer_of_a_gelu_has_the_right_first_and_second_gradients() -> None:
    torch.manual_seed(0)
    inputs, weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (5, 4), (5,)))
    assert torch.autograd.gradcheck(_LinearOfGelu.apply, (inputs, weight, bias, False))
    assert torch.autograd.gradgradcheck(_LinearOfGelu.apply, (inputs, weight, bias, False))


@pytest.mark.parametrize("frozen", [[], ["weight"], ["bias"], ["weight", "bias"], ["inputs"]])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_linear_layer_of_a_gelu_has_the_bits_of_the_two_in_a_row(dtype: torch.dtype, frozen: list[str]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 24)
    hidden = torch.randn(3, 7, 48).to(dtype)
    results = []
    for function in (linear_of_gelu, lambda inputs, layer: layer(F.gelu(inputs))):
        layer.weight.requires_grad_("weight" not in frozen)
        layer.bias.requires_grad_("bias" not in frozen)
        inputs = hidden.clone().requires_grad_("inputs" not in frozen)
        layer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = function(inputs, layer)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype))
        results.append((out.detach(), inputs.grad, layer.weight.grad, layer.bias.grad))
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_backward_that_comes_twice_gives_the_same_twice() -> None:
    layer, inputs = nn.Linear(8, 4), torch.randn(3, 8, requires_grad=True)
    out = linear_of_gelu(inputs, layer).sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, inputs), first, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["intermediate", "intermediate.dense", "output", "output.dense", "output.LayerNorm"])
def test_a_hook_on_any_part_of_a_layer_is_called_and_changes_nothing(name: str) -> None:
    expected, _ = _gradients(_model())
    model, calls = _model(), []
    model.bert.encoder.layer[1].get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    loss, _ = _gradients(model)
    assert calls == [name]
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)


def test_under_amp_the_gelu_is_still_worked_out_twice_unless_a_part_of_it_is_black_listed() -> None:
    for black, plain in (([], True), (["*.intermediate"], False), (["*.output.dense"], False), (["*.layer.0"], True)):
        layer = _distributed(_model(), dtype="bfloat16", custom_black_list=black).bert.encoder.layer[0]
        assert layer._is_plain() is plain, black


@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_recomputing_every_layer_changes_no_bit_of_the_gradients(dtype: torch.dtype | None) -> None:
    expected_loss, expected = _gradients(_model(), dtype)
    model = _model()
    for layer in model.bert.encoder.layer:
        inner = layer.forward
        layer.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
    loss, gradients = _gradients(model, dtype)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=name)


class Products(TorchDispatchMode):
    """Counts the operations of matrix products and attention. Torch's own counter hooks all modules, which has an effect here."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        self.operations += count(*args, **(kwargs or {}), out_val=out) if count is not None else 0
        return out


def _products(model: Bert, **recompute: Any) -> tuple[list[Tensor], int]:
    """Losses and weights after two updates, and matrix products of the last one; through fleet.distribute, which recomputes."""
    strategy = fleet.DistributedStrategy(**recompute)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    torch.manual_seed(5)
    optimizer.minimize(model.loss(_batch()))
    with Products() as counter:
        optimizer.minimize(model.loss(_batch()))
    return [tensor.clone() for tensor in model.state_dict().values()], counter.operations


def test_a_layer_that_recompute_runs_again_has_the_same_bits_without_its_last_product(alone: None) -> None:
    plain, products = _products(_model(dropout=0.1))
    again, more = _products(_model(dropout=0.1), recompute=True)
    for ours, theirs in zip(again, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    width, tokens, layers, attention = 32, 4 * 16, 4, 2 * 2 * 4 * 16 * 16 * 32
    of_a_layer = 2 * tokens * (3 + 1 + 4) * width**2 + attention  # query, key, value; output; the first of the two wide ones
    wanted = len(_batch()["mlm_positions"]) + 4
    of_the_last = 2 * tokens * 3 * width**2 + attention + 2 * wanted * (1 + 4) * width**2
    assert more - products == (layers - 1) * of_a_layer + of_the_last


@pytest.mark.parametrize("which", ["layer", "inner", "replaced", "dropout", "norm"])
def test_where_a_hook_looks_at_a_layer_it_is_whole_and_recompute_changes_no_bit(which: str, alone: None) -> None:
    def watched() -> tuple[Bert, list[Tensor]]:
        model, seen = _model(dropout=0.1), []
        layer = model.bert.encoder.layer[1]
        if which == "replaced":
            model.bert.encoder.layer[2] = Whole(model.bert.encoder.layer[2])
        if which == "dropout":  # what it returns is saved, and must be there the second time
            layer.output.dropout.register_forward_hook(lambda module, args, out: out.tanh())
        if which == "norm":
            layer.output.LayerNorm = Counting(layer.output.LayerNorm)
        watched = {"inner": layer.output, "replaced": model.bert.encoder.layer[2]}.get(which, layer)
        watched.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
        return model, seen

    (plain, of_plain), (again, of_again) = watched(), watched()
    of_weights = [_products(model, **how)[0] for model, how in ((plain, {}), (again, {"recompute": True}))]
    for ours, theirs in zip(of_weights[1], of_weights[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(of_again[0], of_plain[0], rtol=0, atol=0)


def test_the_second_run_has_the_weights_that_functional_call_gave_the_first(alone: None) -> None:
    """Also of the norm that the layer before has left to it."""
    gradients = []
    for recompute in (False, True):
        model, strategy = _model(), fleet.DistributedStrategy(recompute=recompute)
        model, _ = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        weights = {name: (1.5 * p).detach().requires_grad_() for name, p in model.named_parameters()}
        torch.manual_seed(5)
        loss = torch.func.functional_call(model, weights, (), _batch()).loss
        gradients.append(torch.autograd.grad(loss, list(weights.values()), allow_unused=True))
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_a_layer_on_amps_black_list_keeps_its_norm_in_float32() -> None:
    model = _distributed(_model(), dtype="bfloat16", custom_black_list=["bert.encoder.layer.1"])
    seen = []
    model.bert.encoder.layer[1].output.LayerNorm.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model.loss(_batch())
    assert seen == [torch.float32]


class Counting(nn.Module):
    """A norm that counts its calls, and adds noise of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.generator = inner, torch.Generator().manual_seed(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(hidden) + 0.01 * torch.randn(hidden.shape, generator=self.generator)  # type: ignore[no-any-return]


class Whole(nn.Module):
    """A user's own layer, which knows of no norm that was left to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, mask: Tensor | None, rows: Tensor | None = None) -> Tensor:
        return 0.5 * self.inner(hidden, mask, rows)  # type: ignore[no-any-return]


# --- bytes


def _saved_bytes(layer: BertLayer, hidden: Tensor, dtype: torch.dtype | None) -> int:
    """What the backward of a layer keeps, each storage once, parameters left out; copies of them are in it."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes(), tensor  # the tensor, so that its place is not given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast(hidden.device.type, dtype) if dtype else contextlib.nullcontext():
            layer(hidden, None)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_a_layer_keeps_the_bytes_that_were_counted_by_hand(dtype: torch.dtype | None) -> None:
    """64 tokens, 32 wide, 2 heads; one unit is 64 x 32 values of the stream's type.

    Kept: input 1, query key value 3, attended 1, mask 1, sum 1, normed 1, GELU's input 4, mask 1, sum 1 = 14 units (a GPU keeps
    masks in bytes: 13 in 16 bits, 12.5 in float32). Mean and deviation of two norms and the softmax's normaliser of two heads,
    float32: 6 values a token. Copies of weights: query, key and value side by side, 3 x 32 x 32; under autocast of the other
    three matrices too, 12 x 32 x 32 together. Torch alone keeps the GELU's result, 4 units, and under autocast both sums in
    float32, 2 units more; its norms on the CPU have the same statistics.
    """
    torch.manual_seed(0)
    layer = BertLayer(BertConfig(hidden=32, layers=1, heads=2, attention_dropout=0.0)).train()
    item = dtype.itemsize if dtype else 4
    hidden = torch.randn(1, 64, 32, dtype=dtype, requires_grad=True)
    unit, small, copies = 64 * 32 * item, 6 * 64 * 4, (12 if dtype else 3) * 32 * 32 * item
    assert _saved_bytes(layer, hidden, dtype) == 14 * unit + small + copies
    _as_torch_alone(layer)
    # Its stream is float32, and the copy of its input in 16 bits is what it keeps.
    assert _saved_bytes(layer, hidden.detach().float().requires_grad_(), dtype) == (20 if dtype else 18) * unit + small + copies


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler, of its own doing
def test_under_autocast_the_whole_loss_compiles_into_one_graph() -> None:
    model = _model(dropout=0.0, attention_dropout=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**_batch()).loss
        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**_batch()).loss
    torch.testing.assert_close(loss, expected, rtol=0.005, atol=0)  # the loss itself is taken in another way when compiled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_on_a_gpu_masks_are_kept_in_bytes(dtype: torch.dtype | None) -> None:
    """Units as above of 256 tokens, 64 wide; two masks of a byte each value. A few seeds of dropout are allowed for."""
    layer = BertLayer(BertConfig(hidden=64, layers=1, heads=2)).train().cuda()
    item = dtype.itemsize if dtype else 4
    hidden = torch.randn(1, 256, 64, dtype=dtype, device="cuda", requires_grad=True)
    expected = (12 * item + 2) * 256 * 64 + 6 * 256 * 4 + (12 if dtype else 3) * 64 * 64 * item
    assert abs(_saved_bytes(layer, hidden, dtype) - expected) <= 4096


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_on_a_gpu_the_gradients_are_close_to_those_of_a_cpu(dtype: torch.dtype | None) -> None:
    _, expected = _gradients(_model(dropout=0.0, attention_dropout=0.0))
    model = _model(dropout=0.0, attention_dropout=0.0).cuda()
    with torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
        loss = model.loss({name: value.cuda() for name, value in _batch().items()})
    (loss * 1024).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        off = (parameter.grad.cpu() / 1024 - expected[name]).norm()
        assert off <= (0.06 if dtype else 1e-4) * expected[name].norm() + 1e-4, name
