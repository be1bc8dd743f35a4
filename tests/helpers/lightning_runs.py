"""LightningModules on two ranks, for Lightning's own DDP and for FleetStrategy; and a plain fleet loop on the same batches."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BATCH = 112, 4
"""14 batches a rank and epoch."""


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(x, (x[:, :3].sum(1, keepdim=True) > 0).float())


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(net(batch[0]), batch[1])


def scheduled(net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.7)


def weights_of(net: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def make_module(*, manual: bool = False) -> Any:
    """A plain LightningModule; `manual` optimization where asked for."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, manual: bool) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.net = make_net()
            self.losses: list[float] = []
            self.rates: list[float] = []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                due = getattr(optimizer, "due", True)
                optimizer.step()
                if due:
                    self.lr_schedulers().step()
            self.trained_as = type(self.trainer.model)
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.log("val", loss_of(self.net, batch), sync_dist=True)
            self.shown = weights_of(self.net)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = scheduled(self.net)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module(manual)


def make_gan(toggles: bool = True) -> Any:
    """Two optimizers, each for a child of its own; without toggling the first loss reaches both."""
    import lightning.pytorch as pl

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(5)
            self.generator, self.discriminator = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], _: int) -> None:
            first, second = self.optimizers()
            if toggles:
                self.toggle_optimizer(first)
            self._update(first, -self.discriminator(self.generator(batch[0])).mean())
            if toggles:
                self.untoggle_optimizer(first)
            made = self.generator(batch[0]).detach()
            judged = self.discriminator(made).square().mean() + (self.discriminator(batch[0]) - 1).square().mean()
            self._update(second, judged)
            self.trained_as = type(self.trainer.model)

        def _update(self, optimizer: Any, loss: Tensor) -> None:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(child.parameters(), lr=0.05) for child in (self.generator, self.discriminator)]

    return Gan()


def refuse_to_start_processes(*_: Any) -> None:
    """Lightning would start this process's own command again, which is all of the tests, beside those that run already."""
    raise AssertionError("Lightning was used outside of as_launched(rank): it does not see that its processes are started")


def make_trainer(strategy: Any, folder: str, **settings: Any) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    _SubprocessScriptLauncher._call_children_scripts = refuse_to_start_processes  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    small = {"max_epochs": 1, "accelerator": "cpu", "devices": 2, "limit_val_batches": 0, "enable_checkpointing": False}
    return pl.Trainer(**(quiet | small | {"strategy": strategy, "default_root_dir": folder} | settings))


def make_loader() -> DataLoader[Any]:
    return DataLoader(make_data(), BATCH)


@contextlib.contextmanager
def as_launched(rank: int) -> Iterator[None]:
    """Lightning finds its processes started, as under a launcher; it would also change torch's threads."""
    variables = {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's hints on loader workers, and the like
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def fit(rank: int, strategy: Any, folder: str, *, module: Any = None, ckpt_path: str | None = None, **settings: Any) -> Any:
    """The module after training, and the Trainer."""
    with as_launched(rank):
        module, trainer = module or make_module(), make_trainer(strategy, folder, **settings)
        trainer.fit(module, make_loader(), DataLoader(make_data(), 28), ckpt_path=ckpt_path)
    return module, trainer


def plain_loop(rank: int, strategy: Any, epochs: int = 1, clip: float | None = None) -> dict[str, Any]:
    """The same batches in the same order, by hand."""
    from fleetx import fleet

    net = make_net()
    given, scheduler = scheduled(net)
    net, optimizer = fleet.distribute(net, given, strategy)
    sampler: DistributedSampler[Any] = DistributedSampler(make_data(), 2, rank)  # as Lightning puts one in
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(make_data(), BATCH, sampler=sampler):
            loss = loss_of(net, batch)
            losses.append(loss.item())
            optimizer.backward(loss)
            if clip is not None and optimizer.due:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            if optimizer.step().due:
                scheduler.step()
            optimizer.zero_grad()
        if optimizer.flush().due:
            scheduler.step()
    optimizer.average()
    return {"losses": losses, "weights": weights_of(net)}


def outcome(module: Any, trainer: Any) -> dict[str, Any]:
    return {
        "losses": module.losses,
        "weights": weights_of(module),
        "rates": getattr(module, "rates", None),
        "global_step": trainer.global_step,
        "is_bare": getattr(module, "trained_as", None) is type(module),
    }
