"""Compile: torch.compile of the repeated blocks of a model, or of the whole of it, in place and inside of all other parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.kinds import boolean, choice, key, optional
from ..dist.agree import Failures, run_on_all
from ..engine.modules.compiling import CAPTURING, cannot_compile, compile_modules, compiled_by
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import ConfigError, warn_user
from ..recompute.units import natural_units

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")


@dataclass(frozen=True, kw_only=True)
class Compile(Part):
    """Compile the forward of blocks or of the whole model, and with it their backward.

    Examples:
        >>> strategy = fleet.DistributedStrategy(amp=True, compile=X.strategies.Compile(scope="model"))
        >>> strategy.compile_configs["scope"]
        'model'
    """

    name: ClassVar[str] = "compile"
    risk_class: ClassVar[Risk] = Risk.ROUNDING
    changes_forward: ClassVar[bool] = True

    scope: str = key("blocks", choice("blocks", "model"), "each repeated block by itself, equal ones once; or the whole model")
    mode: str = key("default", choice(*MODES), "what torch.compile aims at; those with recorded CUDA graphs need static shapes")
    dynamic: bool | None = key(
        None, optional(boolean()), "one graph for all shapes; None: once a shape changes; False: one for each shape"
    )

    def claims(self) -> frozenset[Slot]:
        return frozenset()  # what it compiles goes on to be called as before: recompute and others act around it

    def check(self, site: Site) -> None:
        def here() -> None:
            _refuse_compiled(site.model)
            self.refuse_capturing(site)
            self.modules(site.model)
            missing = cannot_compile(site.device)
            if missing is not None:
                raise ConfigError(
                    f"strategy.compile cannot compile for this {site.device.type}: {missing}. Install it, or leave compile out."
                )

        def fails(failures: Failures) -> Exception:
            rank, said = failures.first
            return failures.own or ConfigError(f"{said} (rank {rank})")

        run_on_all(site.comm, here, fails=fails, catches=ConfigError)  # machines differ in what is installed

    def refuse_capturing(self, site: Site) -> None:
        """CUDA graphs are replayed at fixed addresses, forward before backward, with nothing of the host in between."""
        if self.mode not in CAPTURING:
            return
        told = f'compile_configs["mode"] is "{self.mode}", which records CUDA graphs'
        others = {part.name: part for part in site.parts}
        if site.device.type != "cuda":
            raise ConfigError(f'{told}, and the device is a {site.device.type}. Write "mode": "default".')
        if self.dynamic:
            raise ConfigError(f'{told} of fixed shapes, and "dynamic" is True. Write "dynamic": None, or "mode": "default".')
        if "recompute" in others and (self.scope == "blocks" or others["recompute"].cuts_graphs(by_user=True) is not None):
            raise ConfigError(
                f"{told}, and recompute runs blocks again between those of backward, over what their first run has left. Write "
                '"mode": "default"; or "scope": "model" with modules named in recompute_configs["checkpoints"], which one graph '
                "can hold."
            )
        if "sync_batch_norm" in others and site.comm.size > 1:
            raise ConfigError(
                f'{told}, and sync_batch_norm asks the other ranks in the middle of a forward. Write "mode": "default".'
            )

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return what is compiled, by name: the units that recompute knows, or the model itself."""
        every = {"": model} | {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        names = [""] if self.scope == "model" else natural_units(model) or [""]
        found: dict[int, tuple[str, nn.Module]] = {}
        for name in names:
            if any(isinstance(part, torch.jit.ScriptModule) for part in every[name].modules()):
                raise ConfigError(
                    f"strategy.compile cannot take `{name or type(model).__name__}`: it is a TorchScript module, or holds one, "
                    "which is compiled already. Leave it unscripted, or leave compile out."
                )
            found.setdefault(id(every[name]), (name, every[name]))  # a module that stands in two places is one
        return dict(found.values())

    def build(self, site: Site) -> Mapping[Slot, Any]:
        if site.comm.rank == 0 and getattr(getattr(site.model, "config", None), "use_cache", False) is True:
            warn_user(
                "compile: model.config.use_cache is True, so each block writes to a cache that training never reads, "
                "at a place of its own: equal blocks cannot share a graph, and torch's compiler gives up after some of them. "
                "Write model.config.use_cache = False before fleet.distribute(...), and True again before generating."
            )
        compile_modules(self.modules(site.model), mode=self.mode, dynamic=self.dynamic)
        return {}

    @classmethod
    def neutral(cls) -> dict[str, Any] | None:
        return None


def _refuse_compiled(model: nn.Module) -> None:
    found = next((name for name, module in model.named_modules() if compiled_by(module) == "user"), None)
    if found is not None:
        which = f"`{found}` of the model" if found else "the model"
        raise ConfigError(
            f"strategy.compile is on, and {which} is compiled already, by torch.compile(...) or .compile(). Keep one of the two."
        )
