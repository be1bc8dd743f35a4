"""The trained model as one plain safetensors file, with the user's own keys: three lines of plain torch load it.

state = safetensors.torch.load_file("model.safetensors")
model = MyModel()
model.load_state_dict(state)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .folder import sync_folder, write_tensors


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """On the CPU, each with memory of its own: tied weights are written under both names."""
    state = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}  # of a compiled model
    strangers = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strangers:
        raise CheckpointError(f"`{strangers[0]}` in the model's state dict is not a tensor; a safetensors file cannot hold it.")
    return {name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in state.items()}


def write_model(model: nn.Module, path: Path) -> None:
    """Aside, synced, renamed: whatever was at `path` stays until the new file is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder of this file's own: safetensors makes a nameless file beside the one it writes, and a kill would leave that too.
    mine = f".writing-{hashlib.sha256(path.name.encode()).hexdigest()[:16]}-"
    for entry in list(os.scandir(path.parent)):
        if entry.name.startswith(mine):
            shutil.rmtree(entry.path, ignore_errors=True)
    aside = path.with_name(mine + uuid.uuid4().hex)
    aside.mkdir()
    try:
        write_tensors(aside / "model", plain_tensors(model), metadata={"format": "pt"})
        if path.is_file():
            shutil.copymode(path, aside / "model")
        os.replace(aside / "model", path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(path.parent)
