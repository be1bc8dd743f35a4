"""Guards several models or optimizers at once: two optimizers of one model, two models under one, a GAN, unlike strategies."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.ddp_loops import STEPS, loss_of, sgd, small_buckets, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, mlp


def _two_optimizers(rank: int, api: str) -> Tensor:
    inner = mlp(torch.float64)
    model: Any = inner
    first = torch.optim.SGD(inner[:2].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(inner[2:].parameters(), lr=0.01)
    if api == "fleetx":
        fleet.distribute(model, first, small_buckets())
        fleet.distribute(model, second, small_buckets())
    else:
        model = DistributedDataParallel(inner)
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        loss_of(model, rank, step).backward()
        nn.utils.clip_grad_norm_(inner.parameters(), 0.2)
        first.step()
        second.step()
    return weights(inner)


def test_two_optimizers_on_one_model_train_as_under_ddp() -> None:
    mine, theirs = run_ranks(_two_optimizers, 2, "fleetx"), run_ranks(_two_optimizers, 2, "ddp")
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=1e-12)


def _two_models(rank: int) -> tuple[list[str], bool]:
    encoder, decoder, loose = cnn(), cnn(), nn.Parameter(torch.ones(1))
    caught = []
    for params in ([*encoder.parameters(), *decoder.parameters()], [*encoder.parameters(), loose]):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fleet.distribute(encoder, torch.optim.SGD(params, lr=0.1))
        caught.append("; ".join(str(w.message) for w in seen if issubclass(w.category, FleetWarning)))
    both = nn.ModuleList([encoder, decoder])
    both, optimizer = fleet.distribute(both, torch.optim.SGD(both.parameters(), lr=0.1))
    x, y = batch(rank, shape=(1, 6, 6))
    (F.cross_entropy(encoder(x), y) + F.cross_entropy(decoder(x), y)).backward()
    optimizer.step()
    statistics = fleet.util.all_gather(decoder[1].running_mean)
    return caught, torch.equal(statistics[0], statistics[1])


def test_a_second_model_with_statistics_under_one_optimizer_is_told_and_a_module_list_keeps_them_equal() -> None:
    (told, loose), equal = run_ranks(_two_models, 2)[0]
    assert "BatchNorm2d with buffers" in told and "torch.nn.ModuleList([model, other])" in told
    assert loose == "" and equal


def _gan_nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)


def _gan_saved(rank: int, folder: str) -> tuple[bool, str]:
    generator, discriminator = _gan_nets()
    generator, g = fleet.distribute(generator, sgd(generator), small_buckets())
    discriminator, d = fleet.distribute(discriminator, sgd(discriminator), small_buckets())
    noise = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    discriminator.zero_grad()
    F.softplus(discriminator(generator(noise).detach())).mean().backward()
    d.step()
    F.softplus(-discriminator(generator(noise))).mean().backward()
    g.step()
    before = weights(discriminator)
    fleet.save_model(f"{folder}/d.safetensors", discriminator, d)
    return torch.equal(before, weights(discriminator)), raised(
        lambda: fleet.save_checkpoint(folder, step=1, model=discriminator, optimizer=d)
    )


def test_saving_after_the_generators_half_leaves_the_discriminator_as_it_is(tmp_path: Any) -> None:
    assert run_ranks(_gan_saved, 2, str(tmp_path)) == [(True, "nothing raised")] * 2


def _gan_merged(rank: int) -> list[str]:
    generator, discriminator = _gan_nets()
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    generator, g = fleet.distribute(generator, sgd(generator), small_buckets(**merged))
    discriminator, d = fleet.distribute(discriminator, sgd(discriminator), small_buckets(**merged))
    noise = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def train(spelling: str) -> None:
        for _ in range(4):
            discriminator.zero_grad()
            F.softplus(discriminator(generator(noise).detach())).mean().backward()
            d.step()
            loss = F.softplus(-discriminator(generator(noise))).mean()
            loss.backward() if spelling == "bare" else g.backward(loss)
            g.step()

    return [raised(lambda: train("optimizer.backward")), raised(lambda: train("bare"))]


def test_a_gan_under_gradient_merge_is_told_to_say_whose_loss_it_is() -> None:
    for ours, bare in run_ranks(_gan_merged, 2):
        assert ours == "nothing raised"
        assert bare.startswith("ConfigError: a backward of another pair's loss has reached this model inside a merge window"), (
            bare
        )
        assert "optimizer.backward(loss)" in bare


def _unlike_forward(rank: int) -> list[str]:
    model = mlp(torch.float64)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:]))
    amp = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="amp: ")  # slower on this CPU
        fleet.distribute(model, first, fleet.DistributedStrategy(**amp))
        refused = raised(lambda: fleet.distribute(model, second, fleet.DistributedStrategy()))
        alike = raised(lambda: fleet.distribute(model, second, fleet.DistributedStrategy(**amp)))
    return [refused, alike]


def test_two_optimizers_of_one_model_must_agree_on_what_acts_in_its_forward() -> None:
    for refused, alike in run_ranks(_unlike_forward, 2):
        assert refused.startswith("ConfigError: this model has another optimizer already"), refused
        assert "`amp` and none of them" in refused
        assert alike == "nothing raised"


def _alone_beside_dense(rank: int) -> tuple[Tensor, Tensor]:
    model = mlp(torch.float64)
    alone, dense = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:]))
    _, face = fleet.distribute(model, alone, fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4}))
    fleet.distribute(model, dense, fleet.DistributedStrategy())
    for step in range(12):
        alone.zero_grad()
        dense.zero_grad()
        loss_of(model, rank, step).backward()
        alone.step()
        dense.step()
    face.average()
    return weights(model[:2]), weights(model[2:])


def test_one_optimizer_may_let_ranks_train_alone_beside_one_that_does_not() -> None:
    (first, second), (other_first, other_second) = run_ranks(_alone_beside_dense, 2)
    torch.testing.assert_close(first, other_first, rtol=0, atol=0)
    torch.testing.assert_close(second, other_second, rtol=0, atol=0)


def _unlike_shared_layer(rank: int) -> str:
    layer = nn.Linear(4, 4)
    one, two = nn.Sequential(nn.Linear(4, 4), layer), nn.Sequential(layer, nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="amp: ")  # slower on this CPU
        amp = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
        _pair_of_one = fleet.distribute(one, torch.optim.SGD(one.parameters(), lr=0.1), amp)
        own = torch.optim.SGD(two[1].parameters(), lr=0.1)
        return raised(lambda: fleet.distribute(two, own, fleet.DistributedStrategy()))


def test_a_layer_shared_with_a_model_of_another_precision_is_named() -> None:
    for refused in run_ranks(_unlike_shared_layer, 2):
        assert refused.startswith("ConfigError: `0` of this model is in another distributed one already"), refused
