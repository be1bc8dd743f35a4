"""The trained model as one plain safetensors file, with the user's own keys: three lines of plain torch load it.

state = safetensors.torch.load_file("model.safetensors")
model = MyModel()
model.load_state_dict(state)
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import CheckpointError
from .folder import sync_file, sync_folder


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """On the CPU, each with memory of its own: tied weights are written under both names."""
    state = model.state_dict()
    strangers = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strangers:
        raise CheckpointError(f"`{strangers[0]}` in the model's state dict is not a tensor; a safetensors file cannot hold it.")
    return {name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in state.items()}


def write_model(model: nn.Module, path: Path) -> None:
    """Aside, synced, renamed: whatever was at `path` stays until the new file is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".saving-{uuid.uuid4().hex}")  # not longer than 255 characters, however long the file's own name
    try:
        save_file(plain_tensors(model), aside, metadata={"format": "pt"})
        sync_file(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)
