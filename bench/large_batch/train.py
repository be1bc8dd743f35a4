"""One run of bench/large_batch: a model trained from a seed with the settings of a trial, then its accuracy.

    every update    k micro-batches: draw, augment, [forward, backward]   gradients add up to their mean
                    optimizer.step, moving average of the weights         the learning rate is a function of the update's index

What stands in brackets is captured once as a CUDA graph and replayed by all trials: weights, buffers and gradients keep their
places, and a new trial writes its own initial values there. BatchNorm sees one micro-batch whatever the batch is: the
gradients are those of a job in which each worker has one micro-batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.large_batch.recipe import Recipe, Trial, ema_keep, lr_at
from bench.lib.image_draws import Draws, draw, micro_batch, normalise
from bench.lib.resnet9 import ResNet9
from fleetx.applications import Resnet20
from fleetx.errors import ConfigError
from fleetx.optim import Lamb, Lars

LOOKS = 30  # at the loss, in one run: each waits for the device
CHANCE = 100 / 10
STUCK_SHARE, STUCK_UPDATES = 0.4, 50
STUCK_LOSS = 2.29  # one of ln 10 = 2.303 says the same of all ten classes
WARMUP_RUNS = 3


@dataclass(frozen=True)
class Split:
    """Images on the device: bytes [N, 32, 32, 3] and labels [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def make_model(recipe: Recipe) -> nn.Module:
    if recipe.model == "resnet20":
        return Resnet20(width=recipe.width, zero_init_last_gamma=recipe.zero_init_last_gamma)
    return ResNet9(
        width=recipe.width,
        zero_init_last_gamma=recipe.zero_init_last_gamma,
        whiten=recipe.whiten,
        activation=recipe.activation,
        dirac=recipe.dirac,
        frozen_scale=recipe.frozen_scale,
    )


def learnt_groups(model: nn.Module, lr: float, norm_lr: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights, then norm layers and biases, each at its learning rate; what is frozen is in neither."""
    learnt = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    weights = [pair for pair in learnt if pair[1].dim() > 1]
    plain = [pair for pair in learnt if pair[1].dim() <= 1]
    return {"params": weights, "lr": lr}, {"params": plain, "lr": lr * norm_lr}


def make_optimizer(trial: Trial, model: nn.Module, *, norm_lr: float = 1.0) -> torch.optim.Optimizer:
    """Norm layers and biases are without weight decay in all three; LARS and LAMB do not adapt them either."""
    weights, plain = learnt_groups(model, trial.lr, norm_lr)
    if trial.optimizer == "lars":
        return Lars(
            [weights, plain],
            trial.lr,
            trial.momentum,
            lars_coeff=trial.lars_coeff,
            lars_weight_decay=trial.weight_decay,
            model=model,
        )
    if trial.optimizer == "lamb":
        betas = (trial.momentum, trial.beta2)
        return Lamb([weights, plain], trial.lr, betas, lamb_weight_decay=trial.weight_decay, model=model)
    groups = [{**weights, "weight_decay": trial.weight_decay}, {**plain, "weight_decay": 0.0}]
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.SGD(groups, trial.lr, trial.momentum, nesterov=trial.momentum > 0, fused=on_gpu or None)


class Trainer:
    """A model and its captured micro-step, for any number of trials one after the other."""

    def __init__(self, recipe: Recipe, device: torch.device, *, compiled: bool = False) -> None:
        self.recipe, self.device = recipe, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = make_model(recipe).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.floats = [value for value in self.model.state_dict().values() if value.is_floating_point()]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.gradients = [parameter.grad for parameter in self.parameters]
        shape = (recipe.micro_batch, 3, 32, 32)
        self.images = torch.zeros(shape, dtype=self.dtype, device=device).to(memory_format=torch.channels_last)
        self.labels = torch.zeros(recipe.micro_batch, dtype=torch.long, device=device)
        self.share = torch.ones((), device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.forward: Callable[[Tensor], Tensor] = torch.compile(self.model) if compiled else self.model
        self.micro_step = self._capture() if device.type == "cuda" else self._forward_backward

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)  # a weight cast in another replay would be stale

    def _forward_backward(self) -> None:
        with self._autocast():
            logits = self.forward(self.images)
        loss = F.cross_entropy(logits.float(), self.labels, label_smoothing=self.recipe.label_smoothing) * self.share
        loss.backward()
        self.loss_sum += loss.detach()

    def _capture(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):  # libraries choose and allocate here what must not happen during a capture
                self._forward_backward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._forward_backward()
        return graph.replay

    def _restart(self, seed: int, train: Split) -> None:
        """Fresh initial weights in the places that the captured graph knows. Nothing but `train` is looked at for them."""
        torch.manual_seed(seed)
        fresh = make_model(self.recipe).state_dict()
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(fresh[name])
        if isinstance(self.model, ResNet9):
            self.model.fit_whitening(train.images)
        self._zero()
        self.loss_sum.zero_()

    def _zero(self) -> None:
        torch._foreach_zero_(self.gradients)

    def run(self, trial: Trial, seed: int, train: Split, check: Split) -> dict[str, Any]:
        """Train on `train`, count on `check`. A run that fails to learn is stopped and counts as chance."""
        start = time.perf_counter()
        self._restart(seed, train)
        self.model.train()
        recipe = self.recipe
        samples = draw(len(train), recipe.epochs, size=32, hole=recipe.hole, seed=seed, alternate_flip=recipe.alternate_flip)
        draws = samples.to(self.device)
        updates, average, loss, stopped = self._updates(trial, train, draws)
        figures: dict[str, Any] = {"updates": updates, "train_loss": loss, "stopped": stopped}
        if stopped is None:
            known = train.images[draws.index[: self.recipe.bn_images]]
            last = ema = self._accuracies(check, known)
            if average is not None:
                torch._foreach_copy_(self.floats, average)
                ema = self._accuracies(check, known)
            figures |= {"accuracy": ema[0], "accuracy_two_views": ema[1], "accuracy_last": last[0]}
        else:
            figures |= {"accuracy": CHANCE, "accuracy_two_views": CHANCE, "accuracy_last": CHANCE}
        return figures | {"seconds": round(time.perf_counter() - start, 2)}

    def _updates(self, trial: Trial, train: Split, draws: Draws) -> tuple[int, list[Tensor] | None, float | None, str | None]:
        """Number of updates, the averaged weights and buffers, the last loss seen, and why the run was stopped early."""
        recipe = self.recipe
        micro_steps = whole_micro_steps(trial.batch, recipe.micro_batch)
        updates = recipe.updates(len(train), trial.batch)
        optimizer = make_optimizer(trial, self.model, norm_lr=recipe.norm_lr)
        peaks = [group["lr"] for group in optimizer.param_groups]
        average = [value.detach().clone() for value in self.floats] if recipe.ema_images else None
        look_every = max(1, updates // LOOKS)
        loss, since = math.nan, 0
        for update in range(updates):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = lr_at(update, updates, peak=peak, warmup_share=trial.warmup_share, decay=trial.decay)
            self.share.fill_(1 / micro_steps)
            for micro in range(update * micro_steps, (update + 1) * micro_steps):
                part = draws.slice(micro * recipe.micro_batch, (micro + 1) * recipe.micro_batch)
                self._show(train, part)
                self.micro_step()
            optimizer.step()
            self._zero()
            if average is not None:
                torch._foreach_lerp_(average, self.floats, 1 - ema_keep(trial.batch, recipe.ema_images))
            since += 1
            if since == look_every or update == updates - 1:
                loss, since = float(self.loss_sum) / since, 0
                self.loss_sum.zero_()
                stopped = why_stop(loss, update + 1, updates)
                if stopped:
                    return update + 1, average, finite(loss), stopped
        return updates, average, finite(loss), None

    def _show(self, train: Split, part: Draws) -> None:
        images, labels = micro_batch(train.images, train.labels, part, hole=self.recipe.hole, dtype=self.dtype)
        self.images.copy_(images)
        self.labels.copy_(labels)

    @torch.no_grad()
    def _accuracies(self, check: Split, known: Tensor) -> tuple[float, float]:
        """In percent, of the images as they are, and of the sum of logits over an image and its mirror image.

        With BatchNorm's statistics over `known` for the present weights; if that is empty, the running ones.
        """
        if len(known):
            self._estimate_statistics(known)
        self.model.eval()
        right = torch.zeros(2, dtype=torch.long, device=self.device)
        for start in range(0, len(check), self.recipe.micro_batch):
            part = slice(start, start + self.recipe.micro_batch)
            images = normalise(check.images[part], self.dtype)
            with self._autocast():
                logits, mirrored = self.model(images), self.model(images.flip(3))
            answers = torch.stack([logits.argmax(1), (logits.float() + mirrored.float()).argmax(1)])
            right += (answers == check.labels[part]).sum(1)
        one_view, two_views = (100 * int(count) / len(check) for count in right)
        return one_view, two_views

    def _estimate_statistics(self, images: Tensor) -> None:
        norms = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm2d)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over the batches that follow
        self.model.train()
        for part in images.split(self.recipe.micro_batch):
            with self._autocast():
                self.model(normalise(part, self.dtype))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def whole_micro_steps(batch: int, micro_batch: int) -> int:
    if batch % micro_batch:
        raise ConfigError(f"a batch of {batch} is not made of micro-batches of {micro_batch}; choose --micro-batch to divide it.")
    return batch // micro_batch


def why_stop(loss: float, made: int, updates: int) -> str | None:
    """A sentence when a run cannot become anything, after `made` of its updates."""
    if not math.isfinite(loss):
        return "the loss became NaN or infinite"
    if made >= max(STUCK_UPDATES, STUCK_SHARE * updates) and loss > STUCK_LOSS:
        return f"the loss was still {loss:.3f} after {made} of {updates} updates"
    return None


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
