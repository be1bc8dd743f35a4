"""Build what a TARGET names: model, optimizer, sample and loss function."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import applications
from ..applications.bert import Bert
from ..applications.image_model import LARGE_IMAGE, ImageModel
from ..engine.setup.bind import LossFn
from ..errors import ConfigError, did_you_mean, first_line
from .plan import APPLICATIONS

ROWS, LARGE_ROWS = 32, 8
TOKENS = 128
MASKED_SHARE = 0.15
IGNORED = -100
Making: TypeAlias = Callable[[], AbstractContextManager[None]]


@final
@dataclass(frozen=True, slots=True)
class Target:
    model: nn.Module
    optimizer: Optimizer
    sample: Any
    loss_fn: LossFn | None = None


def target_of(text: str, *, rows: int | None, rank: int, making: Making = contextlib.nullcontext) -> Target:
    """Build a target. `rank` seeds the random sample, which differs between ranks like real data; `making` is entered while the
    model of an application is made."""
    if text in APPLICATIONS:
        return application(text, rows=rows, rank=rank, making=making)
    if rows is not None:
        raise ConfigError(f"--batch is for applications; the sample of {text} is what its function returns.")
    return _checked(text, _called(text, _function(text)))


# --- applications -------------------------------------------------------------------------------------------------------


def application(name: str, *, rows: int | None = None, rank: int = 0, making: Making = contextlib.nullcontext) -> Target:
    torch.manual_seed(0)
    with making():
        model = getattr(applications, name)()
    random = torch.Generator().manual_seed(1 + rank)
    if isinstance(model, ImageModel):
        side = model.image_size
        count = rows or (LARGE_ROWS if side >= LARGE_IMAGE else ROWS)
        images = torch.randn(count, 3, side, side, generator=random)
        labels = torch.randint(model.num_classes, (count,), generator=random)
        return Target(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), (images, labels))
    return Target(model, torch.optim.AdamW(model.parameters(), lr=1e-4), _sentences(model, rows or LARGE_ROWS, random))


def _sentences(model: Bert, rows: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Make masked sentences. Labels have the shape of the tokens: every tensor must have one row per sample to vary the batch."""
    words = torch.randint(model.config.vocab_size, (rows, TOKENS), generator=random)
    is_masked = torch.rand(rows, TOKENS, generator=random) < MASKED_SHARE
    is_masked[:, 0] = True
    follows = torch.randint(2, (rows,), generator=random)
    return {"input_ids": words, "labels": words.masked_fill(~is_masked, IGNORED), "next_sentence_label": follows}


# --- module:function ----------------------------------------------------------------------------------------------------


def _function(text: str) -> Callable[[], Any]:
    module_name, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ConfigError(f"{text!r} is not module:function, as train:make is.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{text}: importing {module_name} failed: {_error_text(error)}") from error
        raise ConfigError(f"{text}: there is no module {error.name!r} to be found from {os.getcwd()}.") from None
    except Exception as error:
        raise ConfigError(f"{text}: importing {module_name} failed: {_error_text(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        has = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{text}: {module_name} has no function {name!r}.{did_you_mean(name, has)}")
    return function  # type: ignore[no-any-return]  # what it returns is checked


def _called(text: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise ConfigError(f"{text} failed: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    """Format an error with the line that raised it instead of the whole traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{place}"


def _checked(text: str, returned: Any) -> Target:
    wanted = "(model, optimizer, sample) or (model, optimizer, sample, loss_fn)"
    if not isinstance(returned, tuple) or len(returned) not in (3, 4):
        shown = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise ConfigError(f"{text} returned {shown}; it must return {wanted}.")
    target = Target(*returned)
    for name, value, kind in (("model", target.model, nn.Module), ("optimizer", target.optimizer, Optimizer)):
        if not isinstance(value, kind):
            raise ConfigError(f"{text} returned {type(value).__name__} as the {name}; it must return {wanted}.")
    if target.sample is None:
        raise ConfigError(f"{text} returned None as the sample; it must return {wanted}.")
    return target
