"""Which modules are compiled, and by whom; and torch.compile of a module's own forward, inside of all patches around it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from ...dist.triton_support import has_triton
from .nested_tensors import map_tensors
from .patching import PatchedForward, patch_innermost, patch_of

CAPTURING = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs, and replay them instead of launching kernel by kernel."""
OLDEST_CAPABILITY = (7, 0)
"""Of a GPU that Triton compiles for."""

SEEN_BY_COUNTING = ("eager", "aot_eager")
"""Backends of torch's compiler that call torch's own operations, whose tensors can be counted on a CPU."""


def compiled_by(module: nn.Module) -> Literal["user", "strategy"] | None:
    """Return who has compiled this very module: the user, by torch.compile(module) or module.compile(), or `strategy.compile`;
    None: it is not."""
    is_wrapper = type(module).__name__ == "OptimizedModule"
    if is_wrapper or getattr(module, "_compiled_call_impl", None) is not None:
        return "user"
    return None if _compiled_in(patch_of(module)) is None else "strategy"


def _compiled_in(patch: Any) -> CompiledForward | None:
    while isinstance(patch, PatchedForward):
        if isinstance(patch.around, CompiledForward):
            return patch.around
        patch = patch.inner
    return None


def inside_of_compiled(model: nn.Module) -> set[nn.Module]:
    """Return the modules below those that `strategy.compile` has compiled: a patch of one of them would be in the graph."""
    compiled = [module for module in model.modules() if compiled_by(module) == "strategy"]
    return {part for module in compiled for part in module.modules() if part is not module}


def backend() -> str:
    """Return the name of the backend that torch.compile uses where none is named."""
    default = getattr(torch.compiler, "get_default_backend", None)  # of newer releases of torch
    found = "inductor" if default is None else default()
    return found if isinstance(found, str) else getattr(found, "__name__", type(found).__name__)


def cannot_compile(device: torch.device) -> str | None:
    """Say what is missing here for torch's compiler to make code for a device; None: nothing."""
    if backend() != "inductor":
        return None
    if device.type == "cuda":
        if not has_triton():
            return "Triton, which writes its kernels, is not installed"
        capability = torch.cuda.get_device_capability(device)
        known = torch.version.hip is not None or capability >= OLDEST_CAPABILITY
        return None if known else f"this GPU has compute capability {capability[0]}.{capability[1]}, and Triton needs 7.0"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler):
        return None
    return f"there is no C++ compiler: `{compiler}` is not found (the variable CXX names another)"


# --- what `strategy.compile` puts into a module ---------------------------------------------------------------------------


def compile_modules(modules: Mapping[str, nn.Module], *, mode: str, dynamic: bool | None) -> None:
    """Compile the forward of each module, as it is without patches: recompute, timers and hooks of the module stay around it.

    Equal modules share their graphs, and so are compiled once. Others do not: torch's compiler gives up on a piece of code of
    which it has made too many graphs."""
    codes: dict[Hashable, types.CodeType] = {}
    for module in modules.values():
        code = codes.setdefault(structure(module), _own_code())
        patch_innermost(module, CompiledForward(code, mode=mode, dynamic=dynamic))


@contextlib.contextmanager
def for_any_size(model: nn.Module) -> Iterator[None]:
    """Let graphs made inside hold for batches of any size, where several sizes are tried: all of them take one path, which is
    compiled once. Afterwards there are none, and the next are as the user has set them."""
    compiled = [one for module in model.modules() if (one := _compiled_in(patch_of(module))) is not None]

    def start_over(*, dynamic: bool | None) -> None:
        codes: dict[int, types.CodeType] = {}  # by identity: all of them are equal
        for code, one in [(id(one.code), one) for one in compiled]:
            one.forget(codes.setdefault(code, _own_code()), dynamic=dynamic)

    own = {one.dynamic for one in compiled}
    start_over(dynamic=True)
    try:
        yield
    finally:
        start_over(dynamic=own.pop() if own else None)


def structure(module: nn.Module) -> Hashable:
    """Describe a module so that equal ones, whose forward makes one graph, are described alike."""
    tensors = [(name, t.shape, t.dtype) for name, t in (*module.named_parameters(), *module.named_buffers())]
    return repr(module), tuple(type(part) for part in module.modules()), tuple(tensors)


def _own_code() -> types.CodeType:
    return _calling(lambda: None).__code__.replace(co_name="forward")  # equal to others, but another object


def _calling(forward: Callable[..., Any]) -> types.FunctionType:
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return call  # type: ignore[return-value]


@final
class CompiledForward:
    """Compiles a module's own forward when it is called first; installed around it by patch_innermost."""

    def __init__(self, code: types.CodeType, *, mode: str, dynamic: bool | None) -> None:
        self._mode = mode
        self.forget(code, dynamic=dynamic)

    def forget(self, code: types.CodeType, *, dynamic: bool | None) -> None:
        """Begin without graphs, which the compiler keeps with a piece of code."""
        self.code, self.dynamic = code, dynamic
        self._forward: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._is_tracing():  # it is a part of a larger graph: torch.export, torch.jit
            return forward(*args, **kwargs)
        if self._compiled is None or forward is not self._forward:
            # The compiler looks at the gradients of what a block is given, and torch warns of that look.
            told = "The .grad attribute of a Tensor that is not a leaf"
            warnings.filterwarnings("ignore", told, module=r"torch\._(dynamo|subclasses)")
            function = types.FunctionType(self.code, globals(), closure=_calling(forward).__closure__)
            self._forward, self._compiled = forward, torch.compile(function, mode=self._mode, dynamic=self.dynamic)
        out = self._compiled(*args, **kwargs)
        return map_tensors(_kept, out) if self._mode in CAPTURING else out


def _kept(tensor: Tensor) -> Tensor:
    """Copy a number out of the memory of a recorded graph, which its next replay writes to: a window keeps its losses longer."""
    return tensor.clone() if tensor.numel() == 1 else tensor
