"""The zoo: habits. One line or two of a loop, in the ways that people write them; the rest is as plain as can be."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.zoo import nets
from tests.zoo.nets import BATCHES, epoch, image_epoch
from tests.zoo.optimizers import sgd
from tests.zoo.oracles import Api
from tests.zoo.register import Notes, Outcome, loop

EPOCHS = 3


# --- accumulation by hand -----------------------------------------------------------------------------------------------


@loop("merge amp recompute dense")
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


@loop("merge amp recompute powersgd")
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


# --- between the steps --------------------------------------------------------------------------------------------------


@loop("merge recompute", no_ddp="a forward on one rank waits for the others, to share BatchNorm's statistics")
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


@loop("merge recompute")
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
            p.grad.zero_()


def _detached_and_to_zeros(model: nn.Module, optimizer: Optimizer) -> None:
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
@loop("merge", name="zero_model_to_zeros_first", zero=lambda model, _: model.zero_grad(set_to_none=False), first=True)
@loop("merge", name="zero_model_to_zeros_last", zero=lambda model, _: model.zero_grad(set_to_none=False), first=False)
@loop("merge", name="zero_by_hand_first", zero=_to_zeros_by_hand, first=True)
@loop("merge", name="zero_by_hand_last", zero=_to_zeros_by_hand, first=False)
@loop(name="zero_by_hand_detached", zero=_detached_and_to_zeros, first=True)
@loop("merge", name="none_by_hand_first", zero=_to_none_by_hand, first=True)
@loop("merge", name="none_by_hand_last", zero=_to_none_by_hand, first=False)
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
    model = nets.conv_net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model, _ = api.distribute(model, optimizer)
    for x, y in image_epoch(rank) * 2:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        notes.loss(loss)
    return notes.outcome(model)


class WarmUp:
    """Holds an optimizer, and sets its rate before each step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.updates = optimizer, 0

    def step(self) -> None:
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(self.updates**-0.5, self.updates * 4**-1.5)
        self.optimizer.step()


@loop(name="wrapper_before_distribute", before=True)
@loop("merge", name="wrapper_after_distribute", before=False)
def wrapper(api: Api, rank: int, before: bool) -> Outcome:
    """A class of the user's steps the optimizer that it was given."""
    notes = Notes()
    model = nets.Classifier()
    optimizer: Optimizer = AdamW(model.parameters(), lr=0.0)
    warm_up = WarmUp(optimizer)
    model, optimizer = api.distribute(model, optimizer)
    if not before:
        warm_up = WarmUp(optimizer)
    for x, y in epoch(rank) * 2:
        warm_up.optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        warm_up.step()
        notes.loss(loss)
    return notes.outcome(model)
