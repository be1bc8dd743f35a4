"""Resnet50, VGG16, Resnet20: what they compute, against plain functions of the state dict; memory formats, copies, blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fleetx.applications.image_model import ImageModel
from fleetx.applications.resnet import Resnet20, Resnet50
from fleetx.applications.vgg import VGG16
from fleetx.engine.modules.patching import patch_forward
from fleetx.errors import DataError

Weights = dict[str, Tensor]
MODELS = [Resnet50, VGG16, Resnet20]


def randomised(model: ImageModel) -> ImageModel:
    """Float64, and BatchNorm entries far from 1 and 0, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in model.double().state_dict().items():
        if name.endswith("running_var") or (name.endswith("weight") and tensor.dim() == 1):
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
        elif tensor.dim() == 1 and tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def images(count: int, size: int) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def norm(weights: Weights, name: str, x: Tensor, training: bool) -> Tensor:
    mean, var, scale, shift = (weights[f"{name}.{k}"] for k in ("running_mean", "running_var", "weight", "bias"))
    if training:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    shaped = [t.view(1, -1, 1, 1) for t in (mean, var, scale, shift)]
    return (x - shaped[0]) / (shaped[1] + 1e-5).sqrt() * shaped[2] + shaped[3]


def reference_block(weights: Weights, name: str, x: Tensor, stride: int, training: bool) -> Tensor:
    bottleneck = f"{name}.conv3.weight" in weights
    strides = [1, stride, 1] if bottleneck else [stride, 1]
    out = x
    for i, step in enumerate(strides, 1):
        kernel = weights[f"{name}.conv{i}.weight"]
        out = norm(weights, f"{name}.bn{i}", F.conv2d(out, kernel, stride=step, padding=kernel.shape[-1] // 2), training)
        out = out.clamp(min=0) if i < len(strides) else out
    if f"{name}.downsample.0.weight" in weights:
        x = norm(weights, f"{name}.downsample.1", F.conv2d(x, weights[f"{name}.downsample.0.weight"], stride=stride), training)
    elif stride != 1:
        x = x[:, :, ::stride, ::stride]
        x = torch.cat([x, x.new_zeros(x.shape[0], out.shape[1] - x.shape[1], *x.shape[2:])], 1)
    return (out + x).clamp(min=0)


def reference_resnet(weights: Weights, x: Tensor, depths: list[int], training: bool = False) -> Tensor:
    large = weights["conv1.weight"].shape[-1] == 7
    x = F.conv2d(x, weights["conv1.weight"], stride=2 if large else 1, padding=3 if large else 1)
    x = norm(weights, "bn1", x, training).clamp(min=0)
    x = F.max_pool2d(x, 3, 2, padding=1) if large else x
    for row, depth in enumerate(depths, 1):
        for block in range(depth):
            x = reference_block(weights, f"layer{row}.{block}", x, 2 if row > 1 and block == 0 else 1, training)
    return x.mean((2, 3)) @ weights["fc.weight"].T + weights["fc.bias"]


def reference_vgg(weights: Weights, x: Tensor) -> Tensor:
    for place in range(31):
        if f"features.{place}.weight" in weights:
            x = F.conv2d(x, weights[f"features.{place}.weight"], weights[f"features.{place}.bias"], padding=1).clamp(min=0)
        elif place in (4, 9, 16, 23, 30):
            x = F.max_pool2d(x, 2)
    x = x.mean((2, 3))
    for place in (0, 3, 6):
        x = x @ weights[f"classifier.{place}.weight"].T + weights[f"classifier.{place}.bias"]
        x = x.clamp(min=0) if place < 6 else x
    return x


@pytest.mark.parametrize("size", [32, 45, 64])
def test_resnet50_computes_what_its_weights_say(size: int) -> None:
    model = randomised(Resnet50(7, image_size=size)).eval()
    expected = reference_resnet(model.state_dict(), images(2, size), [3, 4, 6, 3])
    torch.testing.assert_close(model(images(2, size)), expected, rtol=1e-9, atol=1e-9)


def test_vgg16_computes_what_its_weights_say_at_32_and_at_63_pixels() -> None:
    model = randomised(VGG16(7, image_size=32)).eval()
    for size in (32, 63):
        expected = reference_vgg(model.state_dict(), images(2, size))
        torch.testing.assert_close(model(images(2, size)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [False, True])
def test_resnet20_computes_what_its_weights_say(training: bool) -> None:
    model = randomised(Resnet20()).train(training)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    for size in (32, 13):
        expected = reference_resnet(weights, images(4, size), [3, 3, 3], training)
        torch.testing.assert_close(model(images(4, size)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [Resnet50, VGG16])
@pytest.mark.parametrize("size", [64, 224])
def test_large_images_pass_through(make: Callable[..., nn.Module], size: int) -> None:
    with torch.device("meta"):
        assert make(image_size=size)(torch.empty(2, 3, size, size)).shape == (2, 1000)


def test_images_that_vgg16_cannot_halve_five_times_are_refused() -> None:
    with pytest.raises(DataError, match=r"the images are \[31, 40\] pixels; VGG16 halves them five times: 32 a side at least"):
        VGG16(5, image_size=32).loss((torch.zeros(2, 3, 31, 40), torch.zeros(2).long()))


# --- channels_last, copies, names of blocks


@pytest.mark.parametrize("make", [Resnet50, VGG16, Resnet20])
def test_channels_last_weights_lie_so_hold_the_same_values_and_give_the_same_logits(make: Any) -> None:
    torch.manual_seed(0)
    plain = make(5, image_size=32).eval()
    torch.manual_seed(0)
    model = make(5, image_size=32, channels_last=True).eval()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=0, atol=0)
        assert tensor.dim() != 4 or tensor.is_contiguous(memory_format=torch.channels_last)
    # Another order of the same float32 sums.
    torch.testing.assert_close(model(images(2, 32).float()), plain(images(2, 32).float()), rtol=1e-4, atol=1e-4)


def test_activations_follow_the_weights_into_channels_last() -> None:
    model = Resnet20(channels_last=True)
    seen = []
    model.get_submodule("layer3.2").register_forward_hook(lambda _m, _args, out: seen.append(out))
    model(images(2, 32).float())
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()


@pytest.mark.parametrize("make", MODELS)
def test_every_checkpoint_is_a_module_that_runs_once_and_in_the_order_listed(make: Any) -> None:
    model = make(5, image_size=32).eval()
    ran: list[str] = []
    for name in model.checkpoints:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    model(images(1, 32).float())
    assert ran == model.checkpoints
    assert len(ran) == {Resnet50: 16, VGG16: 5, Resnet20: 9}[make]


@pytest.mark.parametrize("make", MODELS)
def test_a_deep_copy_is_independent_of_its_original(make: Any) -> None:
    model = make(5, image_size=32).eval()
    twin = copy.deepcopy(model)
    before = model(images(1, 32).float())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    torch.testing.assert_close(model(images(1, 32).float()), before, rtol=0, atol=0)
    torch.testing.assert_close(twin(images(1, 32).float()), torch.zeros(1, 5), rtol=0, atol=0)


def test_vgg16_runs_the_layers_that_stand_in_features_also_after_one_was_replaced_appended_or_sliced() -> None:
    model = VGG16(5, image_size=32).eval()
    x = images(1, 32).float()
    whole = model.features(x)
    torch.testing.assert_close(model.features[10:](model.features[:10](x)), whole, rtol=0, atol=0)
    model.features[28] = nn.Identity()
    assert not torch.equal(model.features(x), whole)
    model.features.append(nn.Threshold(1e9, 4.0))
    torch.testing.assert_close(model.features(x), torch.full_like(whole, 4.0), rtol=0, atol=0)


def saved_bytes(model: ImageModel, batch: Any) -> tuple[int, Tensor]:
    """What the forward keeps for the backward, weights aside, and the loss."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.loss(batch)
    return sum(kept.values()), loss


@pytest.mark.parametrize("make", [VGG16, Resnet20])
def test_recomputing_the_checkpoints_keeps_the_gradients_and_less_than_half_of_the_memory(make: Any) -> None:
    torch.manual_seed(0)
    model = make(5, image_size=32)
    twin = copy.deepcopy(model)
    for name in twin.checkpoints:
        patch_forward(twin.get_submodule(name), lambda forward, x: checkpoint(forward, x, use_reentrant=False))
    batch = images(3, 32).float(), torch.arange(3)
    losses = []
    kept = []
    for one in (model, twin):
        torch.manual_seed(1)  # the dropout of VGG16
        size, loss = saved_bytes(one, batch)
        loss.backward()
        kept.append(size)
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=0, msg=name)
    assert kept[1] < 0.5 * kept[0]
