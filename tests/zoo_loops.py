"""The zoo: loops in the shapes that people write, as plain PyTorch for one process.

A loop knows of ranks only that `api.distribute` prepares its model and optimizer, and that its data are this rank's. It returns
what must be the same whatever did the distributing: the weights at its end, what it looked at on the way, its losses.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta, Categorical
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import zoo_nets as nets
from zoo_nets import BATCHES, FEATURES, ROWS, epoch, image_epoch, rows, tokens
from zoo_oracles import Api

EPOCHS = 3


@dataclass
class Outcome:
    weights: Tensor
    """Of all the models of the loop, and of their averages: the same on all ranks."""
    seen: Tensor
    """Gradients, norms and scales that the loop looked at: the same on all ranks."""
    losses: list[float]
    """This rank's own."""


@dataclass
class Notes:
    """What a loop writes down while it runs."""

    seen: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def loss(self, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def look(self, value: Tensor | float) -> None:
        self.seen.append(torch.as_tensor(value).detach().flatten().double())

    def look_at_gradients(self, model: nn.Module) -> None:
        for p in model.parameters():
            if p.grad is not None:
                self.look(p.grad.clone())

    def outcome(self, *models: nn.Module) -> Outcome:
        weights = [p.detach().flatten().double() for model in models for p in model.parameters()]
        return Outcome(torch.cat(weights), torch.cat([torch.zeros(0).double(), *self.seen]), self.losses)


@dataclass(frozen=True)
class Loop:
    name: str
    run: Callable[[Api, int], Outcome]
    no_ddp: str
    """Why DDP cannot run it; empty where it can."""
    under: frozenset[str]
    """The parts of a strategy that it is run under as well."""
    find_unused: bool


LOOPS: dict[str, Loop] = {}


def loop(
    under: str = "", *, no_ddp: str = "", find_unused: bool = False, name: str = "", **settings: Any
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Enter a loop under its own name, or a variant of it under another."""

    def enter(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
        entered = name or run.__name__
        assert entered not in LOOPS
        LOOPS[entered] = Loop(
            entered, lambda api, rank: run(api, rank, **settings), no_ddp, frozenset(under.split()), find_unused
        )
        return run

    return enter


def sgd(params: Iterable[Tensor], lr: float = 0.1) -> SGD:
    return SGD(params, lr=lr, momentum=0.9, weight_decay=1e-3)


# --- the transformers ---------------------------------------------------------------------------------------------------


@loop("amp recompute powersgd")
def nanogpt(api: Api, rank: int) -> Outcome:
    """Accumulation by hand, two groups, a rate set by hand, clipping."""
    notes, accumulation, steps = Notes(), 2, 6
    model = nets.GPT(tied=True, dropout=0.1)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer: Optimizer = AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    model, optimizer = api.distribute(model, optimizer)
    batch = 0
    for step in range(steps):
        rate = 1e-3 + 0.5 * (1 + math.cos(math.pi * step / steps)) * 9e-3
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(accumulation):
            x, y = tokens(rank, batch % BATCHES)
            batch += 1
            _, loss = model(x, y)
            (loss / accumulation).backward()
            notes.loss(loss)
        notes.look(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return notes.outcome(model)


@loop("amp recompute powersgd")
def mingpt(api: Api, rank: int) -> Outcome:
    """One backward, clipping, gradients zeroed through the model."""
    notes = Notes()
    model = nets.GPT(tied=False, dropout=0.0)
    model, optimizer = api.distribute(model, AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1))
    model.train()
    for step in range(EPOCHS * BATCHES):
        x, y = tokens(rank, step % BATCHES)
        _, loss = model(x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        notes.look(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)


# --- adversaries --------------------------------------------------------------------------------------------------------


@loop("recompute")
def dcgan(api: Api, rank: int) -> Outcome:
    """Two backwards for one step of the discriminator; the generator's goes through both nets."""
    notes, criterion = Notes(), nn.BCEWithLogitsLoss()
    netG, netD = nets.image_generator(), nets.image_discriminator()
    optimizerD: Optimizer = Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG: Optimizer = Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    netD, optimizerD = api.distribute(netD, optimizerD)
    netG, optimizerG = api.distribute(netG, optimizerG)
    for _ in range(2):
        for real, _ in image_epoch(rank):
            netD.zero_grad()
            errD_real = criterion(netD(real), torch.ones(ROWS))
            errD_real.backward()
            fake = netG(torch.randn(ROWS, 3, 1, 1))
            errD_fake = criterion(netD(fake.detach()), torch.zeros(ROWS))
            errD_fake.backward()
            notes.look_at_gradients(netD)
            optimizerD.step()
            netG.zero_grad()
            errG = criterion(netD(fake), torch.ones(ROWS))
            errG.backward()
            notes.look_at_gradients(netG)
            optimizerG.step()
            notes.loss(errD_real + errD_fake)
            notes.loss(errG)
    return notes.outcome(netD, netG)


@loop()
def wgan_gp(api: Api, rank: int) -> Outcome:
    """A gradient penalty: autograd.grad within the loss, then a backward through it; the critic takes two steps to one."""
    notes = Notes()
    generator, critic = nets.row_generator(), nets.row_critic()
    optimizer_C: Optimizer = Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    optimizer_G: Optimizer = Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    critic, optimizer_C = api.distribute(critic, optimizer_C)
    generator, optimizer_G = api.distribute(generator, optimizer_G)
    for step in range(8):
        real, _ = rows(rank, step)
        optimizer_C.zero_grad()
        fake = generator(torch.randn(ROWS, 3)).detach()
        mixed = torch.lerp(real, fake, torch.rand(ROWS, 1)).requires_grad_()
        slopes = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
        penalty = ((slopes.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        notes.look_at_gradients(critic)
        optimizer_C.step()
        notes.loss(loss)
        if step % 2:
            optimizer_G.zero_grad()
            (-critic(generator(torch.randn(ROWS, 3))).mean()).backward()
            optimizer_G.step()
    return notes.outcome(critic, generator)


# --- other losses -------------------------------------------------------------------------------------------------------


@loop("merge amp recompute powersgd")
def vae(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.VAE()
    model, optimizer = api.distribute(model, Adam(model.parameters(), lr=1e-2))
    for _ in range(EPOCHS):
        for x, _ in epoch(rank):
            optimizer.zero_grad()
            decoded, mean, log_variance = model(x)
            divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
            loss = F.mse_loss(decoded, x, reduction="sum") + divergence
            loss.backward()
            optimizer.step()
            notes.loss(loss)
    return notes.outcome(model)


@loop("merge amp recompute powersgd")
def siamese(api: Api, rank: int) -> Outcome:
    """Two forwards, one loss."""
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for _ in range(EPOCHS):
        for x, y in epoch(rank):
            first, second = model(x), model(x.flip(0))
            same = (y == y.flip(0)).to(first.dtype)
            distance = F.pairwise_distance(first, second)
            loss = (same * distance.pow(2) + (1 - same) * F.relu(1 - distance).pow(2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            notes.loss(loss)
    return notes.outcome(model)


@loop("merge amp recompute powersgd")
def weight_tying(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.TiedAutoencoder()
    model, optimizer = api.distribute(model, sgd(model.parameters(), lr=0.05))
    for _ in range(EPOCHS):
        for x, _ in epoch(rank):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            notes.loss(loss)
    return notes.outcome(model)


@loop("merge amp recompute powersgd")
def mixup(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.conv_net()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for _ in range(EPOCHS):
        for x, y in image_epoch(rank):
            share, order = Beta(0.4, 0.4).sample(), torch.randperm(len(x))
            out = model(share * x + (1 - share) * x[order])
            loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            notes.loss(loss)
    return notes.outcome(model)


@loop("merge", no_ddp="its forward is not called: a method of the model computes the loss")
def loss_method(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for x, y in epoch(rank):
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)


@loop("recompute", find_unused=True)
def tasks_in_turn(api: Api, rank: int) -> Outcome:
    """One head has no gradient in one step, the other in the next."""
    notes = Notes()
    model = nets.TwoTasks()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for index, (x, y) in enumerate(epoch(rank)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, index % 2), y)
        loss.backward()
        notes.look_at_gradients(model)
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)


# --- recurrent nets -----------------------------------------------------------------------------------------------------


def _carried(net: nets.LanguageModel, model: nn.Module, rank: int, notes: Notes) -> Iterator[None]:
    """Forward and backward of word after word, clipped; the update is the caller's."""
    for _ in range(EPOCHS):
        hidden = net.init_hidden(ROWS)
        for index in range(BATCHES):
            x, y = tokens(rank, index)
            model.zero_grad()
            hidden = (hidden[0].detach(), hidden[1].detach())
            out, hidden = model(x.t(), hidden)
            loss = F.cross_entropy(out.flatten(0, 1), y.t().flatten())
            loss.backward()
            notes.look(clip_grad_norm_(model.parameters(), 0.25))
            notes.loss(loss)
            yield


@loop()
def word_language_model(api: Api, rank: int) -> Outcome:
    """The update is written out; no optimizer ever steps."""
    notes, rate = Notes(), 1.0
    net = nets.LanguageModel()
    model, _ = api.distribute(net, SGD(net.parameters(), lr=rate))
    for _ in _carried(net, model, rank, notes):
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-rate)
    return notes.outcome(model)


@loop("recompute")
def word_language_model_with_optimizer(api: Api, rank: int) -> Outcome:
    notes = Notes()
    net = nets.LanguageModel()
    model, optimizer = api.distribute(net, SGD(net.parameters(), lr=1.0))
    for _ in _carried(net, model, rank, notes):
        optimizer.step()
    return notes.outcome(model)


# --- reinforcement learning ---------------------------------------------------------------------------------------------


def _played(model: nn.Module, rank: int, episode: int) -> tuple[Tensor, Tensor]:
    """A forward for each state of an episode, and then the two losses."""
    said, values, rewards = [], [], []
    states, best = rows(rank, episode)
    for state, right in zip(states, best, strict=True):
        chances, value = model(state)
        choice = Categorical(chances)
        action = choice.sample()
        said.append(choice.log_prob(action))
        values.append(value)
        rewards.append(float(action == right))
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    gains = returns - torch.stack(values)
    return -(torch.stack(said) * gains.detach()).mean(), gains.pow(2).mean()


@loop("merge recompute")
def actor_critic(api: Api, rank: int) -> Outcome:
    """Many forwards, one backward."""
    notes = Notes()
    model = nets.ActorCritic()
    model, optimizer = api.distribute(model, Adam(model.parameters(), lr=1e-2))
    for episode in range(6):
        policy_loss, value_loss = _played(model, rank, episode)
        loss = policy_loss + value_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)


@loop("recompute", no_ddp="its second backward follows no forward, and each leaves one head without a gradient")
def actor_critic_two_backwards(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.ActorCritic()
    model, optimizer = api.distribute(model, Adam(model.parameters(), lr=1e-2))
    for episode in range(6):
        policy_loss, value_loss = _played(model, rank, episode)
        optimizer.zero_grad()
        policy_loss.backward(retain_graph=True)
        value_loss.backward()
        notes.look_at_gradients(model)
        optimizer.step()
        notes.loss(policy_loss + value_loss)
    return notes.outcome(model)


# --- several optimizers, several models, several losses -----------------------------------------------------------------


@loop("merge recompute")
def two_optimizers(api: Api, rank: int) -> Outcome:
    """One model, two optimizers of disjoint parameters, one backward."""
    notes = Notes()
    model = nets.Classifier()
    slow: Optimizer = sgd([*model.inlet.parameters(), *model.blocks.parameters()])
    fast: Optimizer = Adam(model.head.parameters(), lr=1e-2)
    model, slow = api.distribute(model, slow)
    model, fast = api.distribute(model, fast)
    for _ in range(EPOCHS):
        for x, y in epoch(rank):
            slow.zero_grad()
            fast.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            slow.step()
            fast.step()
            notes.loss(loss)
    return notes.outcome(model)


@loop()
def two_optimizers_in_turn(api: Api, rank: int) -> Outcome:
    """Every backward fills the gradients of both; one of them steps."""
    notes = Notes()
    model = nets.Classifier()
    body: Optimizer = sgd([*model.inlet.parameters(), *model.blocks.parameters()])
    head: Optimizer = Adam(model.head.parameters(), lr=1e-2)
    model, body = api.distribute(model, body)
    model, head = api.distribute(model, head)
    for step, (x, y) in enumerate(epoch(rank) * 2):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        notes.look_at_gradients(model)
        (head if step % 2 else body).step()
        notes.loss(loss)
    return notes.outcome(model)


@loop("merge", no_ddp="one call is given one of the two models")
def two_models_one_optimizer(api: Api, rank: int) -> Outcome:
    notes = Notes()
    encoder, decoder = nn.Linear(FEATURES, 3), nn.Linear(3, FEATURES)
    optimizer: Optimizer = Adam(itertools.chain(encoder.parameters(), decoder.parameters()), lr=1e-2)
    encoder, optimizer = api.distribute(encoder, optimizer)
    for x, _ in epoch(rank):
        optimizer.zero_grad()
        loss = F.mse_loss(decoder(torch.tanh(encoder(x))), x)
        loss.backward()
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(encoder, decoder)


@loop("merge recompute")
def backward_of_a_list(api: Api, rank: int) -> Outcome:
    """torch.autograd.backward of several losses at once."""
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for x, y in epoch(rank):
        optimizer.zero_grad()
        out = model(x)
        losses = [F.cross_entropy(out[:4], y[:4]), F.multi_margin_loss(out[4:], y[4:])]
        torch.autograd.backward(losses)
        optimizer.step()
        notes.loss(sum(losses, torch.zeros(())))
    return notes.outcome(model)


@loop(no_ddp="it reduces in the first backward after a forward, and not in those that follow")
def per_sample(api: Api, rank: int) -> Outcome:
    """A backward for each row of one forward."""
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for x, y in epoch(rank):
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none") / len(x)
        for index, loss in enumerate(losses):
            loss.backward(retain_graph=index < len(losses) - 1)
            notes.look_at_gradients(model)
        optimizer.step()
        notes.loss(losses.sum())
    return notes.outcome(model)


# --- averages of weights ------------------------------------------------------------------------------------------------


@loop("amp recompute powersgd")
def ema(api: Api, rank: int) -> Outcome:
    """torch's AveragedModel follows the weights."""
    notes = Notes()
    net = nets.conv_net()
    model, optimizer = api.distribute(net, sgd(net.parameters()))
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(EPOCHS):
        for x, y in image_epoch(rank):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(net)
            notes.loss(loss)
    return notes.outcome(model, averaged)


@loop("recompute")
def ema_by_deepcopy(api: Api, rank: int) -> Outcome:
    """A momentum encoder: a copy without gradients gives the targets."""
    notes = Notes()
    net = nets.Classifier()
    model, optimizer = api.distribute(net, sgd(net.parameters()))
    teacher = copy.deepcopy(net).requires_grad_(False)
    for _ in range(EPOCHS):
        for x, y in epoch(rank):
            with torch.no_grad():
                wanted = teacher(x).softmax(dim=1)
            out = model(x)
            loss = F.cross_entropy(out, y) + 0.5 * F.cross_entropy(out, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for kept, p in zip(teacher.parameters(), net.parameters(), strict=True):
                    kept.lerp_(p, 0.1)
            notes.loss(loss)
    return notes.outcome(model, teacher)


@loop("recompute")
def swa(api: Api, rank: int) -> Outcome:
    """Stochastic weight averaging with its own schedule; BatchNorm statistics are then computed over the same data everywhere."""
    notes = Notes()
    net = nets.conv_net()
    optimizer: Optimizer = sgd(net.parameters())
    model, optimizer = api.distribute(net, optimizer)
    averaged = AveragedModel(net)
    scheduler, swa_scheduler = CosineAnnealingLR(optimizer, T_max=4), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for index in range(4):
        for x, y in image_epoch(rank):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            notes.loss(loss)
        if index >= 2:
            averaged.update_parameters(net)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(image_epoch(0), averaged)
    averaged.eval()
    notes.look(averaged(nets.images(0, 9)[0]))
    return notes.outcome(model, averaged)


class ModelEma:
    """An average of the whole state, kept by hand."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for kept, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            kept.copy_(self.decay * kept + (1.0 - self.decay) * value)


@loop("amp recompute")
def timm(api: Api, rank: int) -> Outcome:
    """Smoothed labels, clipping by value, an average of the state, a rate for every update."""
    notes, updates = Notes(), 0
    net = nets.conv_net()
    optimizer: Optimizer = RMSprop(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    model, optimizer = api.distribute(net, optimizer)
    model_ema = ModelEma(net, decay=0.9)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    scheduler = LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 4))
    for _ in range(EPOCHS):
        model.train()
        for x, y in image_epoch(rank):
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_value_(model.parameters(), 0.05)
            notes.look_at_gradients(model)
            optimizer.step()
            model_ema.update(net)
            updates += 1
            scheduler.step()
            notes.loss(loss)
    notes.look(float(updates))
    return notes.outcome(model, model_ema.module)


# --- accumulation by hand -----------------------------------------------------------------------------------------------


@loop("amp recompute powersgd")
def accumulation(api: Api, rank: int) -> Outcome:
    """Windows of three over four batches: the last one is short."""
    notes, window = Notes(), 3
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for index, (x, y) in enumerate(epoch(rank)):
            loss = F.cross_entropy(model(x), y)
            (loss / window).backward()
            if (index + 1) % window == 0 or index + 1 == BATCHES:
                optimizer.step()
                optimizer.zero_grad()
            notes.loss(loss)
    return notes.outcome(model)


@loop("amp recompute powersgd")
def accumulation_without_sync(api: Api, rank: int) -> Outcome:
    """The habit under DDP: gradients stay local but in the last backward of a window."""
    notes, window = Notes(), 2
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for _ in range(EPOCHS):
        batches = epoch(rank)
        for first in range(0, BATCHES, window):
            with api.no_sync(model):
                for x, y in batches[first : first + window - 1]:
                    loss = F.cross_entropy(model(x), y)
                    (loss / window).backward()
                    notes.loss(loss)
            x, y = batches[first + window - 1]
            loss = F.cross_entropy(model(x), y)
            (loss / window).backward()
            notes.look(clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            notes.loss(loss)
    return notes.outcome(model)


@loop("recompute", no_ddp="its step() would take this rank's own gradients")
def no_sync_until_step(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for x, y in epoch(rank):
        with api.no_sync(model):
            for half in (slice(0, 4), slice(4, 8)):
                loss = F.cross_entropy(model(x[half]), y[half])
                (loss / 2).backward()
                notes.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    return notes.outcome(model)


# --- loss scaling by hand -----------------------------------------------------------------------------------------------


@loop("recompute", name="grad_scaler", overflow=False)
@loop("recompute", name="grad_scaler_with_an_overflow_on_one_rank", overflow=True)
def grad_scaler(api: Api, rank: int, overflow: bool) -> Outcome:
    """Scale, backward, unscale, clip, step, update, schedule."""
    notes = Notes()
    model = nets.Classifier()
    optimizer: Optimizer = AdamW(model.parameters(), lr=1e-2)
    model, optimizer = api.distribute(model, optimizer)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step, (x, y) in enumerate(epoch(rank) * 2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if overflow and rank == 1 and step == 4:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 0.5)
        notes.look(norm if norm.isfinite() else -1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        notes.look(scaler.get_scale())
        notes.loss(loss)
    return notes.outcome(model)


@loop(name="grad_scaler_without_unscale", overflow=False)
@loop(name="grad_scaler_without_unscale_with_an_overflow_on_one_rank", overflow=True)
def grad_scaler_without_unscale(api: Api, rank: int, overflow: bool) -> Outcome:
    """The scaler alone divides, within its step."""
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, (x, y) in enumerate(epoch(rank) * 2):
        loss = F.cross_entropy(model(x), y)
        if overflow and rank == 1 and step == 4:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        notes.look(scaler.get_scale())
        notes.loss(loss)
    return notes.outcome(model)


# --- optimizers with ways of their own ----------------------------------------------------------------------------------


@loop("merge recompute", name="closure_sgd", make=sgd)
@loop("merge recompute", name="closure_adam", make=lambda params: Adam(params, lr=1e-2))
def closure(api: Api, rank: int, make: Callable[[Iterable[Tensor]], Optimizer]) -> Outcome:
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, make(model.parameters()))
    for x, y in epoch(rank) * 2:

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        notes.loss(optimizer.step(evaluate))
    return notes.outcome(model)


class SAM(Optimizer):
    """Sharpness-aware minimisation: climb, look at the gradient there, come back, step."""

    def __init__(self, params: Iterable[Tensor], base: type[Optimizer], radius: float, **settings: Any) -> None:
        super().__init__(params, {"radius": radius, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for _, p in pairs]).norm()
        for group, p in pairs:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=float(group["radius"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("SAM is stepped by first_step() and second_step()")


@loop("recompute")
def sam(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.Classifier()
    optimizer: Any = SAM(model.parameters(), SGD, radius=0.05, lr=0.1, momentum=0.9)
    model, optimizer = api.distribute(model, optimizer)
    for x, y in epoch(rank) * 2:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        notes.loss(loss)
    return notes.outcome(model)


class ScheduleFree(Optimizer):
    """Gradients are taken between the fast weights and their average; `eval()` shows the average, `train()` goes back."""

    def __init__(self, params: Iterable[Tensor], lr: float, share: float) -> None:
        super().__init__(params, {"lr": lr, "share": share, "updates": 0, "training": True})

    def eval(self) -> None:
        self._move(training=False, factor=lambda share: 1 - 1 / share)

    def train(self) -> None:
        self._move(training=True, factor=lambda share: 1 - share)

    @torch.no_grad()
    def _move(self, *, training: bool, factor: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "fast" in self.state[p]:
                        p.lerp_(self.state[p]["fast"], factor(group["share"]))
                group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("optimizer.train() comes before step()")
            group["updates"] += 1
            weight, share = 1 / group["updates"], group["share"]
            for p in group["params"]:
                fast = self.state[p].setdefault("fast", p.clone())
                p.lerp_(fast, weight).add_(p.grad, alpha=group["lr"] * (share * (1 - weight) - 1))
                fast.sub_(p.grad, alpha=group["lr"])


@loop("recompute")
def schedule_free(api: Api, rank: int) -> Outcome:
    notes = Notes()
    net = nets.Classifier()
    optimizer: Any = ScheduleFree(net.parameters(), lr=0.1, share=0.9)
    model, optimizer = api.distribute(net, optimizer)
    for _ in range(EPOCHS):
        optimizer.train()
        for x, y in epoch(rank):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            notes.loss(loss)
        optimizer.eval()
        with torch.no_grad():
            notes.look(net(rows(0, 9)[0]))
    return notes.outcome(model)


# --- frozen parts, and torch's own checkpoint ---------------------------------------------------------------------------


@loop("merge amp")
def frozen_backbone(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.conv_net()
    for module in model[:-1]:
        module.requires_grad_(False)
    model, optimizer = api.distribute(model, sgd(p for p in model.parameters() if p.requires_grad))
    model.eval()  # its statistics are frozen too
    for _ in range(EPOCHS):
        for x, y in image_epoch(rank):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            notes.loss(loss)
    return notes.outcome(model)


@loop("merge amp powersgd", name="checkpoint", kind="non-reentrant", shared=False)
@loop("merge powersgd", name="checkpoint_reentrant", kind="reentrant", shared=False)
@loop("merge", name="checkpoint_of_a_shared_layer", kind="non-reentrant", shared=True)
@loop("merge", name="checkpoint_reentrant_of_a_shared_layer", kind="reentrant", shared=True,
      no_ddp="it refuses a parameter that becomes ready twice")  # fmt: skip
def checkpoint(api: Api, rank: int, kind: str, shared: bool) -> Outcome:
    notes = Notes()
    model = nets.Classifier(checkpointed=kind, shared=shared)
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for _ in range(EPOCHS):
        for x, y in epoch(rank):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            notes.loss(loss)
    return notes.outcome(model)


# --- between the steps --------------------------------------------------------------------------------------------------


@loop("recompute", no_ddp="a forward on one rank waits for the others, to share BatchNorm's statistics")
def evaluation_on_rank_0(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.conv_net()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for index in range(EPOCHS):
        model.train()
        for x, y in image_epoch(rank):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            notes.loss(loss)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                model(nets.images(0, 50 + index)[0])
    return notes.outcome(model)


@loop("recompute")
def best_weights_restored(api: Api, rank: int) -> Outcome:
    """Each second epoch turns out to be worse than the one before, and is taken back."""
    notes = Notes()
    net = nets.Classifier()
    model, optimizer = api.distribute(net, sgd(net.parameters()))
    for index in range(4):
        best = copy.deepcopy(net.state_dict())
        for x, y in epoch(rank):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            notes.loss(loss)
        if index % 2:
            net.load_state_dict(best)
    return notes.outcome(model)


@loop("amp recompute powersgd")
def gradients_logged(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for x, y in epoch(rank) * EPOCHS:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        notes.look(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
        notes.look_at_gradients(model)
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)


@loop("recompute", name="gradients_edited_in_place", rebound=False)
@loop("recompute", name="gradients_replaced", rebound=True)
def gradients_edited(api: Api, rank: int, rebound: bool) -> Outcome:
    """Signs, with noise that all ranks draw alike."""
    notes, noise = Notes(), torch.Generator().manual_seed(5)
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters(), lr=0.01))
    for x, y in epoch(rank) * 2:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            added = 0.1 * torch.randn(p.shape, generator=noise)
            if rebound:
                p.grad = p.grad.sign() + added
            else:
                p.grad.sign_().add_(added)
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)


@loop("merge", name="scheduler_before_distribute", before=True)
@loop("merge", name="scheduler_after_distribute", before=False)
def scheduler_and_distribute(api: Api, rank: int, before: bool) -> Outcome:
    notes = Notes()
    model = nets.Classifier()
    optimizer: Optimizer = sgd(model.parameters())
    if before:
        scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    model, optimizer = api.distribute(model, optimizer)
    if not before:
        scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    for x, y in epoch(rank) * 2:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        notes.loss(loss)
        notes.look(scheduler.get_last_lr()[0])
    return notes.outcome(model)


# --- how gradients are zeroed, and who steps ----------------------------------------------------------------------------


def _to_zeros_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()


def _to_none_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    for p in model.parameters():
        p.grad = None


def _through_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


Zero = Callable[[nn.Module, Optimizer], None]


@loop("merge amp recompute powersgd", name="zero_first", zero=_through_optimizer, first=True)
@loop("merge amp recompute powersgd", name="zero_last", zero=_through_optimizer, first=False)
@loop("merge", name="zero_to_zeros", zero=lambda _, optimizer: optimizer.zero_grad(set_to_none=False), first=True)
@loop("merge", name="zero_model_first", zero=lambda model, _: model.zero_grad(), first=True)
@loop("merge", name="zero_model_last", zero=lambda model, _: model.zero_grad(), first=False)
@loop(name="zero_model_to_zeros_first", zero=lambda model, _: model.zero_grad(set_to_none=False), first=True)
@loop(name="zero_model_to_zeros_last", zero=lambda model, _: model.zero_grad(set_to_none=False), first=False)
@loop(name="zero_by_hand_first", zero=_to_zeros_by_hand, first=True)
@loop(name="zero_by_hand_last", zero=_to_zeros_by_hand, first=False)
@loop(name="none_by_hand_first", zero=_to_none_by_hand, first=True)
@loop(name="none_by_hand_last", zero=_to_none_by_hand, first=False)
@loop(name="zero_never", zero=lambda model, optimizer: None, first=False)
def zeroing(api: Api, rank: int, zero: Zero, first: bool) -> Outcome:
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters(), lr=0.02))
    for x, y in epoch(rank) * EPOCHS:
        if first:
            zero(model, optimizer)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if not first:
            zero(model, optimizer)
        notes.loss(loss)
    return notes.outcome(model)


_RAW = "its wrapper must be called in the model's place"


@loop("merge recompute powersgd", name="nothing_rebound", no_ddp=_RAW, zero=_through_optimizer)
@loop(name="nothing_rebound_zero_model", no_ddp=_RAW, zero=lambda model, _: model.zero_grad())
def nothing_rebound(api: Api, rank: int, zero: Zero) -> Outcome:
    """What distribute returns is not looked at."""
    notes = Notes()
    model = nets.Classifier()
    optimizer = sgd(model.parameters())
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    api.distribute(model, optimizer)
    for x, y in epoch(rank) * EPOCHS:
        zero(model, optimizer)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        notes.loss(loss)
    return notes.outcome(model)


@loop("merge")
def optimizer_not_rebound(api: Api, rank: int) -> Outcome:
    notes = Notes()
    model = nets.Classifier()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model, _ = api.distribute(model, optimizer)
    for x, y in epoch(rank) * 2:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)
