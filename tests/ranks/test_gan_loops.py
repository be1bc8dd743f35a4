"""Guards two pairs in one loop, as a GAN has: neither touches the other's gradients, and each counts its own bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.sidecar import ALARMS
from tests.helpers.harness import run_ranks
from tests.helpers.joined_batch import STEPS, assert_trained_alike, sgd, weights
from tests.helpers.models import batch


def _gan_nets() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    return generator, discriminator


def _gan_rows(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(2 * step + rank, dtype=torch.float64)[0], batch(500 + 2 * step + rank, shape=(3,), dtype=torch.float64)[0]


def _losses_of_d(generator: nn.Module, discriminator: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    # Not detached: the discriminator's minimize must leave the generator alone by itself.
    return F.softplus(discriminator(generator(noise))).mean() + F.softplus(-discriminator(real)).mean()


def _gan(rank: int) -> dict[str, Any]:
    generator, discriminator = _gan_nets()
    merged = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    generator, g_optimizer = fleet.distribute(generator, sgd(generator))
    discriminator, d_optimizer = fleet.distribute(discriminator, sgd(discriminator), merged)
    due, touched = [], False
    for step in range(STEPS):
        real, noise = _gan_rows(rank, step)
        d_loss = _losses_of_d(generator, discriminator, real, noise)
        due.append(d_optimizer.minimize(d_loss).due)
        touched |= any(p.grad is not None for p in generator.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in discriminator.parameters()]
        g_optimizer.minimize(F.softplus(-discriminator(generator(noise))).mean())
        for p, was in zip(discriminator.parameters(), before, strict=True):
            touched |= (p.grad is None) != (was is None) or (was is not None and not torch.equal(p.grad, was))  # type: ignore[arg-type]
    return {"weights": torch.cat([weights(generator), weights(discriminator)]), "due": due, "touched": touched}


def test_two_pairs_of_a_gan_never_touch_each_other() -> None:
    ranks = run_ranks(_gan, 2)
    generator, discriminator = _gan_nets()
    g_optimizer, d_optimizer = sgd(generator), sgd(discriminator)
    kept: list[Tensor] = []
    for step in range(STEPS):
        (real0, noise0), (real1, noise1) = _gan_rows(0, step), _gan_rows(1, step)
        real, noise = torch.cat([real0, real1]), torch.cat([noise0, noise1])
        d_params, g_params = list(discriminator.parameters()), list(generator.parameters())
        grads = torch.autograd.grad(_losses_of_d(generator, discriminator, real, noise), d_params)
        kept = [a + b / 2 for a, b in zip(kept, grads, strict=True)] if kept else [g / 2 for g in grads]
        if step % 2:
            for p, g in zip(d_params, kept, strict=True):
                p.grad = g
            d_optimizer.step()
            kept = []
        for p, g in zip(
            g_params, torch.autograd.grad(F.softplus(-discriminator(generator(noise))).mean(), g_params), strict=True
        ):
            p.grad = g
        g_optimizer.step()
    reference = torch.cat([weights(generator), weights(discriminator)])
    assert_trained_alike([seen["weights"] for seen in ranks], reference)
    for seen in ranks:
        assert seen["due"] == [False, True] * (STEPS // 2)
        assert not seen["touched"]


def _bare_gan(rank: int) -> Tensor:
    generator, discriminator = _gan_nets()
    generator, g_optimizer = fleet.distribute(generator, sgd(generator))
    discriminator, d_optimizer = fleet.distribute(discriminator, sgd(discriminator))
    for step in range(STEPS):
        real, noise = _gan_rows(rank, step)
        discriminator.zero_grad()  # what the generator's backward left behind
        F.softplus(-discriminator(real)).mean().backward()
        F.softplus(discriminator(generator(noise).detach())).mean().backward()
        d_optimizer.step()
        d_optimizer.zero_grad()
        generator.zero_grad()
        F.softplus(-discriminator(generator(noise))).mean().backward()
        g_optimizer.step()
        g_optimizer.zero_grad()
    return torch.cat([weights(generator), weights(discriminator)])


def test_a_gan_written_as_in_torchs_own_example_trains_as_in_one_process() -> None:
    # The DCGAN tutorial: bare backwards, and zero_grad() of the modules, before each half.
    ranks = run_ranks(_bare_gan, 2)
    generator, discriminator = _gan_nets()
    g_optimizer, d_optimizer = sgd(generator), sgd(discriminator)
    for step in range(STEPS):
        (real0, noise0), (real1, noise1) = _gan_rows(0, step), _gan_rows(1, step)
        real, noise = torch.cat([real0, real1]), torch.cat([noise0, noise1])
        discriminator.zero_grad()
        F.softplus(-discriminator(real)).mean().backward()
        F.softplus(discriminator(generator(noise).detach())).mean().backward()
        d_optimizer.step()
        generator.zero_grad()
        F.softplus(-discriminator(generator(noise))).mean().backward()
        g_optimizer.step()
    assert_trained_alike(ranks, torch.cat([weights(generator), weights(discriminator)]))


def _gan_bytes(rank: int) -> list[tuple[int, int]]:
    generator, discriminator = _gan_nets()
    strategy = fleet.DistributedStrategy(desync_check_steps=0)
    generator, g_optimizer = fleet.distribute(generator, sgd(generator), strategy)
    discriminator, d_optimizer = fleet.distribute(discriminator, sgd(discriminator), strategy)
    sent = []
    for step in range(3):
        real, noise = _gan_rows(rank, step)
        d_report = d_optimizer.minimize(_losses_of_d(generator, discriminator, real, noise))
        g_report = g_optimizer.minimize(F.softplus(-discriminator(generator(noise))).mean())
        sent.append((d_report.bytes_sent, g_report.bytes_sent))
    return sent


def test_each_pair_reports_the_bytes_it_sent_itself() -> None:
    generator, discriminator = _gan_nets()
    expected = tuple(sum(p.nbytes for p in net.parameters()) + 4 * ALARMS for net in (discriminator, generator))
    for sent in run_ranks(_gan_bytes, 2):
        assert sent[1:] == [expected, expected]  # the first step also compares the ranks' batches
