"""Resnet50, VGG16, Resnet20: names, shapes and initial values of their weights, the arguments, and torchvision beside them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fleetx.applications.resnet import Resnet20, Resnet50
from fleetx.applications.vgg import VGG16
from fleetx.errors import ConfigError


def shapes_of(make: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Names and shapes in order, without the memory or the time to fill them."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in make().state_dict().items()}


# --- names and shapes


def norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    entries = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{entry}": (width,) for entry in entries} | {f"{name}.num_batches_tracked": ()}


def resnet50_shapes(classes: int, stem: int) -> dict[str, tuple[int, ...]]:
    expected: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, stem, stem)} | norm_shapes("bn1", 64)
    inputs = 64
    for row, (width, depth) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(depth):
            name = f"layer{row}.{block}"
            for i, (a, b, kernel) in enumerate([(inputs, width, 1), (width, width, 3), (width, 4 * width, 1)], 1):
                expected |= {f"{name}.conv{i}.weight": (b, a, kernel, kernel)} | norm_shapes(f"{name}.bn{i}", b)
            if block == 0:
                expected |= {f"{name}.downsample.0.weight": (4 * width, inputs, 1, 1)}
                expected |= norm_shapes(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    return expected | {"fc.weight": (classes, 2048), "fc.bias": (classes,)}


def vgg16_shapes(classes: int, inputs: int) -> dict[str, tuple[int, ...]]:
    places = [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    expected: dict[str, tuple[int, ...]] = {}
    for place, a, b in zip(places, widths[:-1], widths[1:], strict=True):
        expected |= {f"features.{place}.weight": (b, a, 3, 3), f"features.{place}.bias": (b,)}
    for place, a, b in [(0, inputs, 4096), (3, 4096, 4096), (6, 4096, classes)]:
        expected |= {f"classifier.{place}.weight": (b, a), f"classifier.{place}.bias": (b,)}
    return expected


@pytest.mark.parametrize(("image_size", "stem"), [(224, 7), (64, 7), (63, 3), (32, 3)])
def test_resnet50_has_the_public_names_shapes_and_order_with_a_small_stem_below_64_pixels(image_size: int, stem: int) -> None:
    found = shapes_of(lambda: Resnet50(12, image_size=image_size))
    assert list(found.items()) == list(resnet50_shapes(12, stem).items())


@pytest.mark.parametrize(("image_size", "inputs"), [(224, 25088), (64, 25088), (63, 512), (32, 512)])
def test_vgg16_has_the_public_names_shapes_and_order_with_a_small_classifier_below_64_pixels(
    image_size: int, inputs: int
) -> None:
    found = shapes_of(lambda: VGG16(12, image_size=image_size))
    assert list(found.items()) == list(vgg16_shapes(12, inputs).items())


@pytest.mark.parametrize(("make", "count"), [(Resnet50, 25_557_032), (VGG16, 138_357_544), (Resnet20, 269_722)])
def test_the_number_of_parameters_is_the_published_one(make: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == count


def test_resnet20_doubles_its_width_twice_from_the_one_given() -> None:
    found = shapes_of(lambda: Resnet20(width=4))
    assert [found[f"layer{row}.2.conv2.weight"][0] for row in (1, 2, 3)] == [4, 8, 16]
    assert not any("downsample" in name for name in found)


# --- initial weights


@pytest.mark.parametrize("make", [lambda: Resnet50(5, image_size=32), Resnet20])
def test_the_seed_decides_the_initial_weights(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    first = make().state_dict()
    torch.manual_seed(1)
    again = make().state_dict()
    other = make().state_dict()
    for name, tensor in first.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_convolutions_begin_with_variance_two_over_outputs_times_kernel() -> None:
    torch.manual_seed(0)
    weight = Resnet50(5, image_size=32).get_parameter("layer3.1.conv2.weight").detach()  # 256 x 256 x 3 x 3
    assert float(weight.std()) == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
    assert abs(float(weight.mean())) < 1e-3


def test_vgg16_begins_with_zero_biases_and_linear_weights_of_deviation_one_hundredth() -> None:
    model = VGG16(5, image_size=32)
    assert all(int(p.count_nonzero()) == 0 for name, p in model.named_parameters() if name.endswith("bias"))
    assert float(model.get_parameter("classifier.3.weight").detach().std()) == pytest.approx(0.01, rel=0.01)
    assert float(model.get_parameter("features.28.weight").detach().std()) == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


@pytest.mark.parametrize(("make", "last", "blocks"), [(Resnet50, "bn3", 16), (Resnet20, "bn2", 9)])
def test_a_zero_last_gamma_makes_every_block_its_shortcut_and_touches_nothing_else(
    make: type[Resnet50 | Resnet20], last: str, blocks: int
) -> None:
    torch.manual_seed(0)
    model = make(image_size=32, zero_init_last_gamma=True)
    torch.manual_seed(0)
    plain = make(image_size=32)
    zeroed = [f"{name}.{last}.weight" for name in model.checkpoints]
    assert len(zeroed) == blocks
    for name, tensor in model.state_dict().items():
        expected = torch.zeros_like(tensor) if name in zeroed else plain.state_dict()[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    x = torch.rand(2, model.get_submodule("layer1.1").conv1.in_channels, 8, 8)  # type: ignore[union-attr]
    torch.testing.assert_close(model.get_submodule("layer1.1")(x), x, rtol=0, atol=0)


# --- arguments


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Resnet50, {"num_classes": 0}, "num_classes of Resnet50 is 0; it must be an integer of at least 1"),
        (Resnet50, {"num_classes": True}, "num_classes of Resnet50 is True"),
        (Resnet50, {"num_classes": 10.0}, "num_classes of Resnet50 is 10.0"),
        (Resnet50, {"image_size": 31}, "image_size of Resnet50 is 31; it must be an integer of at least 32"),
        (VGG16, {"image_size": "224"}, "image_size of VGG16 is '224'"),
        (Resnet20, {"image_size": 7}, "image_size of Resnet20 is 7; it must be an integer of at least 8"),
        (Resnet20, {"width": 0}, "width of Resnet20 is 0"),
        (Resnet50, {"zero_init_last_gamma": 1}, "zero_init_last_gamma of Resnet50 is 1; it must be True or False"),
        (VGG16, {"channels_last": "yes"}, "channels_last of VGG16 is 'yes'"),
        (Resnet50, {"label_smoothing": float("nan")}, "label_smoothing of Resnet50 is nan"),
        (Resnet50, {"label_smoothing": 1.0}, "label_smoothing of Resnet50 is 1.0; it must be .* below 1"),
        (VGG16, {"dropout": -0.1}, "dropout of VGG16 is -0.1"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(make: Any, arguments: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        make(**arguments)


# --- torchvision, where it can be imported


def torchvision_models() -> Any:
    try:
        return importlib.import_module("torchvision.models")
    except Exception as error:  # beside a CPU build of torch its import fails with a RuntimeError
        pytest.skip(f"torchvision cannot be imported: {type(error).__name__}")


@pytest.mark.parametrize(("make", "name"), [(Resnet50, "resnet50"), (VGG16, "vgg16")])
def test_torchvision_has_the_same_initial_weights_and_logits_and_loads_both_ways(make: Any, name: str) -> None:
    models = torchvision_models()
    torch.manual_seed(5)
    ours = make(20).eval()
    torch.manual_seed(5)
    theirs = getattr(models, name)(num_classes=20).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for entry, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[entry], tensor, rtol=0, atol=0)
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    torch.manual_seed(6)
    other = make(20).eval()
    ours.load_state_dict(getattr(models, name)(num_classes=20).state_dict(), strict=True)
    theirs.load_state_dict(other.state_dict(), strict=True)
    torch.testing.assert_close(theirs(x), other(x), rtol=0, atol=0)
