"""The zoo: loops in the shapes that people write, as plain PyTorch for one process.

A loop knows of ranks only that `api.distribute` prepares its model and optimizer, and that its data are this rank's. It returns
what must be the same whatever did the distributing: the weights at its end, what it looked at on the way, its losses.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta, Categorical
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.zoo import nets
from tests.zoo.nets import BATCHES, FEATURES, ROWS, epoch, image_epoch, rows, tokens
from tests.zoo.optimizers import SAM, ModelEma, ScheduleFree, sgd
from tests.zoo.oracles import Api
from tests.zoo.register import Notes, Outcome, loop

EPOCHS = 3


# --- the transformers ---------------------------------------------------------------------------------------------------


@loop("merge amp recompute dense")
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


@loop("merge amp recompute powersgd")
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


@loop("amp recompute powersgd")
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


@loop("powersgd")
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


@loop("amp recompute powersgd")
def gan_with_frozen_discriminator(api: Api, rank: int) -> Outcome:
    """requires_grad of the discriminator is off while the generator learns."""
    notes, criterion = Notes(), nn.BCEWithLogitsLoss()
    netG, netD = nets.row_generator(), nets.row_critic()
    optimizer_G: Optimizer = Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_D: Optimizer = Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    netG, optimizer_G = api.distribute(netG, optimizer_G)
    netD, optimizer_D = api.distribute(netD, optimizer_D)
    yes, no = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    for real, _ in epoch(rank) * 2:
        fake = netG(torch.randn(ROWS, 3))
        for p in netD.parameters():
            p.requires_grad = False
        optimizer_G.zero_grad()
        loss_G = criterion(netD(fake), yes)
        loss_G.backward()
        optimizer_G.step()
        for p in netD.parameters():
            p.requires_grad = True
        optimizer_D.zero_grad()
        loss_D = 0.5 * (criterion(netD(real), yes) + criterion(netD(fake.detach()), no))
        loss_D.backward()
        notes.look_at_gradients(netD)
        optimizer_D.step()
        notes.loss(loss_G)
        notes.loss(loss_D)
    return notes.outcome(netG, netD)


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


@loop("merge")
def maml(api: Api, rank: int) -> Outcome:
    """A step of an inner loop, and a backward through it."""
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, Adam(model.parameters(), lr=1e-2))
    for x, y in epoch(rank) * 2:
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(functional_call(model, weights, (x[:4],)), y[:4])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: p - 0.1 * slope for (name, p), slope in zip(weights.items(), slopes, strict=True)}
        loss = F.cross_entropy(functional_call(model, fast, (x[4:],)), y[4:])
        loss.backward()
        notes.look_at_gradients(model)
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)


@loop("merge recompute", find_unused=True)
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


@loop(name="word_language_model", dropped=False)
@loop(name="word_language_model_optimizer_dropped", dropped=True)
def word_language_model(api: Api, rank: int, dropped: bool) -> Outcome:
    """The update is written out; no optimizer ever steps, and perhaps no reference to it is left."""
    notes, rate = Notes(), 1.0
    net = nets.LanguageModel()
    model, optimizer = api.distribute(net, SGD(net.parameters(), lr=rate))
    if dropped:
        del optimizer
    for _ in _carried(net, model, rank, notes):
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-rate)
    return notes.outcome(model)


@loop("merge recompute")
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


@loop("merge amp recompute powersgd")
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


@loop("merge recompute", no_ddp="its second backward follows no forward, and each leaves one head without a gradient")
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


@loop(no_ddp="its second backward follows no forward, and each leaves parameters without a gradient")
def actor_critic_backwards_of_inputs(api: Api, rank: int) -> Outcome:
    """Each loss gives gradients to its own head alone."""
    notes = Notes()
    net = nets.ActorCritic()
    model, optimizer = api.distribute(net, Adam(net.parameters(), lr=1e-2))
    for episode in range(6):
        policy_loss, value_loss = _played(model, rank, episode)
        optimizer.zero_grad()
        policy_loss.backward(retain_graph=True, inputs=[*net.body.parameters(), *net.actor.parameters()])
        value_loss.backward(inputs=list(net.critic.parameters()))
        notes.look_at_gradients(model)
        optimizer.step()
        notes.loss(policy_loss + value_loss)
    return notes.outcome(model)


# --- several optimizers, several models, several losses -----------------------------------------------------------------


@loop("merge amp recompute powersgd")
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


@loop("recompute powersgd")
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


@loop("recompute")
def gradient_surgery(api: Api, rank: int) -> Outcome:
    """The gradients of two losses are taken apart, turned away from each other, and put back."""
    notes = Notes()
    model = nets.Classifier()
    model, optimizer = api.distribute(model, sgd(model.parameters()))
    for x, y in epoch(rank) * 2:
        found = []
        for criterion in (F.cross_entropy, F.multi_margin_loss):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            found.append([p.grad.clone() for p in model.parameters()])
            notes.loss(loss)
        for p, first, second in zip(model.parameters(), *found, strict=True):
            overlap = (first * second).sum()
            if overlap < 0:
                first = first - overlap / second.pow(2).sum() * second
            p.grad = first + second
        notes.look_at_gradients(model)
        optimizer.step()
    return notes.outcome(model)


@loop("merge", no_ddp="it reduces in the first backward after a forward, and not in those that follow")
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


@loop("merge amp recompute powersgd")
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


@loop("merge recompute")
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


@loop("merge recompute powersgd")
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


@loop("merge amp recompute powersgd", name="closure_sgd", make=sgd)
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


@loop("amp recompute powersgd")
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
