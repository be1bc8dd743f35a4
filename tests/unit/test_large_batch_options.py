"""The options of bench/large_batch's recipe for learning in few updates: each does what it says, and can be switched off."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bench.large_batch.page import explanation
from bench.large_batch.recipe import Recipe, Trial
from bench.large_batch.run import coloured_noise, flags_of, on_device, recipe_of
from bench.large_batch.train import Trainer, make_optimizer
from bench.lib.image_draws import draw, normalise
from bench.lib.resnet9 import Layer, ResNet9, start_as_identity
from bench.lib.whitening import FITTED_IMAGES, Whitening, evenly_spaced, patch_covariance, whitening_filters
from fleetx.errors import ConfigError

CPU = torch.device("cpu")
SGD = Trial("sgd", 16, 0.1, 5e-4)
LARS = Trial("lars", 16, 0.4, 5e-4, lars_coeff=0.02)
LAMB = Trial("lamb", 16, 0.01, 0.02, beta2=0.99)
PLAIN = Recipe(
    hole=0,
    epochs=1,
    micro_batch=16,
    ema_images=64,
    bn_images=32,
    width=2,
    whiten=0,
    dirac=False,
    activation="relu",
    frozen_scale=False,
    norm_lr=1.0,
    alternate_flip=False,
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def smooth_images(count):
    """Bytes whose neighbouring pixels and colours resemble each other, as in photographs."""
    noise = torch.randn(count, 3, 34, 34, generator=torch.Generator().manual_seed(0))
    blurred = F.avg_pool2d(noise, 3, stride=1) + 0.5 * noise[:, :1, 1:-1, 1:-1]
    return (127 + 60 * blurred).clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()


# Whitening


def test_the_covariance_of_patches_is_that_of_numpy():
    images = smooth_images(3)
    windows = np.lib.stride_tricks.sliding_window_view(normalise(images).double().numpy(), (2, 2), axis=(2, 3))
    patches = windows.transpose(1, 4, 5, 0, 2, 3).reshape(12, -1)
    expected = torch.from_numpy(np.cov(patches, bias=True))
    torch.testing.assert_close(patch_covariance(images, 2), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_whitened_patches_have_variance_1_and_no_correlation(size):
    images = smooth_images(40)
    filters = whitening_filters(patch_covariance(images, size), size, epsilon=0.0)
    count = 3 * size * size
    whitened = F.conv2d(normalise(images).double(), filters).transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.cov(whitened[:count]), torch.eye(count).double(), rtol=0, atol=1e-4)  # 1/n, not 1/(n-1)
    # The filters are what is ours, and negatives to the bit. torch sums some channels in another order than others, on some CPUs.
    assert torch.equal(filters[count:], -filters[:count])
    torch.testing.assert_close(whitened[count:], -whitened[:count], rtol=0, atol=1e-12)


def test_a_direction_without_variance_stays_small():
    covariance = torch.diag(torch.tensor([1.0, 0.0, 3.0] * 4, dtype=torch.float64))
    filters = whitening_filters(covariance, 2, epsilon=0.01)[:12].flatten(1)
    lengths = filters.norm(dim=1).tolist()
    assert lengths == pytest.approx([3.01**-0.5] * 4 + [1.01**-0.5] * 4 + [0.01**-0.5] * 4, rel=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_whitening_keeps_height_and_width_and_is_no_parameter(size):
    layer = Whitening(size)
    layer.fit(smooth_images(4))
    assert layer(torch.zeros(2, 3, 8, 8)).shape == (2, 6 * size * size, 8, 8)
    assert not list(layer.parameters()) and layer.filters.any()


def test_whitening_is_fitted_to_images_from_the_whole_list():
    assert len(evenly_spaced(torch.arange(50_000))) == FITTED_IMAGES
    assert evenly_spaced(torch.arange(10), most=4).tolist() == [0, 3, 6, 9] and len(evenly_spaced(torch.arange(7))) == 7


def test_a_run_whitens_by_its_own_training_images_and_leaves_that_alone():
    recipe = replace(PLAIN, whiten=3)
    trainer = Trainer(recipe, CPU)
    images = coloured_noise(64)
    train, other = on_device(images, CPU), on_device(images, CPU)
    other.images.fill_(0)
    trainer.run(SGD, 0, train, other)
    expected = whitening_filters(patch_covariance(train.images, 3), 3).float()
    torch.testing.assert_close(trainer.model.body[0][0].filters, expected, rtol=0, atol=0)


# What a network begins with


def test_a_convolution_begins_as_the_identity_in_its_first_outputs():
    layer, narrowing = Layer(4, 6, activation="relu"), Layer(6, 4, activation="relu")
    before = narrowing.conv.weight.clone(), layer.conv.weight[4:].clone()
    for changed in (layer, narrowing):
        start_as_identity(changed)
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(layer.conv(x)[:, :4], x, rtol=0, atol=0)
    assert torch.equal(narrowing.conv.weight, before[0]) and torch.equal(layer.conv.weight[4:], before[1])


def test_activations_are_those_asked_for():
    x = torch.tensor([-1.0, 2.0])
    for name, expected in {"relu": F.relu(x), "celu": F.celu(x, alpha=0.075), "gelu": F.gelu(x)}.items():
        assert torch.equal(Layer(1, 1, activation=name).activate(x), expected)


# Norm layers and biases


def test_norm_layers_have_their_own_learning_rate_in_all_optimizers():
    model = ResNet9(width=2)
    for trial in (SGD, LARS, LAMB):
        weights, plain = make_optimizer(trial, model, norm_lr=8.0).param_groups
        assert (weights["lr"], plain["lr"]) == (trial.lr, 8 * trial.lr)
        assert {p.dim() for p in weights["params"]} == {2, 4} and {p.dim() for p in plain["params"]} == {1}
        assert len(weights["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_the_schedule_keeps_the_learning_rate_of_norm_layers_apart():
    """What LARS adapts moves by lr * lars_coeff, norms by lr: four times the one and a quarter of the other is norm_lr = 4."""
    split = on_device(coloured_noise(64), CPU)
    factor = Trainer(replace(PLAIN, norm_lr=4.0), CPU).run(LARS, 0, split, split)
    by_hand = Trainer(PLAIN, CPU).run(replace(LARS, lr=1.6, lars_coeff=0.005), 0, split, split)
    plain = Trainer(PLAIN, CPU).run(LARS, 0, split, split)
    assert factor["train_loss"] == by_hand["train_loss"] != plain["train_loss"]


def test_frozen_scales_stay_1_while_biases_learn():
    trainer = Trainer(replace(PLAIN, frozen_scale=True, ema_images=0), CPU)
    split = on_device(coloured_noise(64), CPU)
    for trial in (SGD, LARS, LAMB):
        trainer.run(trial, 0, split, split)
        for layer in (module for module in trainer.model.modules() if isinstance(module, Layer)):
            assert torch.equal(layer.norm.weight, torch.ones_like(layer.norm.weight)) and layer.norm.bias.any()


# Flips


def test_an_image_is_mirrored_in_every_other_epoch():
    random, draws = (draw(40, 4, size=32, hole=8, seed=1, alternate_flip=alternate) for alternate in (False, True))
    mirrored = torch.zeros(4, 40, dtype=torch.bool)
    for epoch in range(4):
        part = slice(40 * epoch, 40 * epoch + 40)
        mirrored[epoch, draws.index[part]] = draws.flip[part]
    assert mirrored[0].any() and not mirrored[0].all()
    assert torch.equal(mirrored[1], ~mirrored[0]) and torch.equal(mirrored[2:], mirrored[:2])
    assert torch.equal(draws.index, random.index) and torch.equal(draws.hole_left, random.hole_left)


# The recipe


@pytest.mark.parametrize(
    "options, message",
    [
        ({"whiten": 4}, "whiten is 4; it must be one of 0, 2, 3"),
        ({"whiten": False}, "whiten is False"),
        ({"activation": "swish"}, "activation is 'swish'; it must be one of relu, celu, gelu"),
        ({"norm_lr": math.nan}, "norm_lr is nan"),
        ({"model": "resnet20", "dirac": True}, "resnet20 has none of the options.*--no-dirac"),
        ({"frozen_scale": True, "zero_init_last_gamma": True}, "keep at 0"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        replace(PLAIN, **options)


def test_every_option_can_be_switched_on_and_off_by_a_flag():
    off = "--whiten 0 --no-dirac --activation relu --no-frozen-scale --norm-lr 1 --no-alternate-flip --hole 0"
    on = "--whiten 2 --dirac --activation gelu --frozen-scale --norm-lr 8 --alternate-flip --hole 8"
    assert recipe_of(flags_of(off.split())) == replace(Recipe(), **{name: asdict(PLAIN)[name] for name in options_of(off)})
    values = dict(whiten=2, dirac=True, activation="gelu", frozen_scale=True, norm_lr=8.0, alternate_flip=True, hole=8)
    assert recipe_of(flags_of(on.split())) == replace(Recipe(), **values)


def options_of(line):
    return [word[2:].removeprefix("no-").replace("-", "_") for word in line.split() if word.startswith("--")]


def test_the_page_tells_the_options_that_were_on():
    text = explanation(asdict(replace(PLAIN, whiten=3, dirac=True, activation="celu", norm_lr=8.0)), {}, None)
    for words in ("patches of 3x3 pixels", "begin as the identity", "CELU (alpha 0.075)", "at 8 times the learning rate"):
        assert words in text
    assert not any(words in explanation(asdict(PLAIN), {}, None) for words in ("patches", "identity", "CELU", "8 times"))
