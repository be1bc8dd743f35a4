"""Copies and pickles of a module that fleetx has changed in place: plain, with nothing of fleetx in them.

Patched forwards and our hooks lie in the module's own `__dict__`, and `torch.save(model)`, `pickle.dumps(model)` and
`copy.deepcopy(model)` take that as it is. An entry of a dict cannot pickle itself as nothing, and `__getstate__` or
`__reduce_ex__` are looked up on the class, which is the user's and stays as it is. `copyreg` is the place that Python has for
this: a reducer registered for a class is asked before the class itself, by pickle (and so by torch.save, multiprocessing, Ray)
and by copy alike. Ours asks the class, `__reduce__` and `__getstate__` of the user included, and takes out of the answer what
is ours. The module itself is not touched: it may be in training, in another thread.
"""

from __future__ import annotations

import copyreg
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, final

from torch import nn

ABSENT = object()
"""Stands for an attribute that the module's `__dict__` has not."""
SIDE_TABLES = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_state_dict_hooks": (),
    "_state_dict_pre_hooks": (),
    "_load_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
"""Where a module keeps its hooks, and what it notes about them elsewhere, under the same keys."""
DEPTH = 3
"""How far into the containers of a state that the user's own `__getstate__` has made."""
STAND_IN = "_fleetx_stand_in"
"""Attribute of a function that calls a StandIn, which copies have, or leave out, in the function's place."""
_MARK = "_fleetx_left_out"
Hook = TypeVar("Hook", bound=Callable[..., Any])


class StandIn(ABC):
    """An instance attribute of ours, in the place of what the user had there."""

    place: ClassVar[str]
    """The attribute's name. Under another name it is the user's reference to it, and pickles as it does itself."""

    @abstractmethod
    def replaced(self) -> Any:
        """Return what a copy has in this place; ABSENT: nothing."""


def left_out(hook: Hook) -> Hook:
    """Mark a hook of ours: copies of the module do not have it. Call `keep_copies_plain` where it is registered."""
    setattr(hook, _MARK, True)
    return hook


def keep_copies_plain(module: nn.Module) -> None:
    """Make copies and pickles of this module, and of others of its class, leave out what is ours."""
    kind = type(module)
    known = copyreg.dispatch_table.get(kind)
    if not isinstance(known, _Reducer):
        copyreg.pickle(kind, _Reducer(kind, known))


@final
class _Reducer:
    """What copyreg calls for each module of one class."""

    def __init__(self, kind: type[nn.Module], known: Callable[[Any], Any] | None) -> None:
        self._known = known
        """The user's own, registered earlier."""
        usual = kind.__getstate__ is nn.Module.__getstate__ and kind.__reduce__ is object.__reduce__
        self._depth = 1 if usual and known is None and kind.__reduce_ex__ is object.__reduce_ex__ else DEPTH

    def __call__(self, module: nn.Module) -> Any:
        # Protocol 2 is that of torch.save; objects answer all higher ones alike, unless they hold buffers of their own.
        answer = module.__reduce_ex__(2) if self._known is None else self._known(module)
        if isinstance(answer, str) or len(answer) < 3:
            return answer
        return (*answer[:2], _without_ours(answer[2], self._depth), *answer[3:])


def _without_ours(state: Any, depth: int) -> Any:
    """Return the value without what is ours: the same object if nothing in it is."""
    if depth < 0:
        return state
    if type(state) is tuple or type(state) is list:  # (state, slots), or what the user's own method has made
        items = [_without_ours(item, depth - 1) for item in state]
        return type(state)(items) if any(a is not b for a, b in zip(items, state, strict=True)) else state
    if type(state) is not dict:
        return state
    plain = _without_hooks(state)
    for name, value in state.items():
        stand_in = getattr(value, STAND_IN, value) if type(value) is types.FunctionType else value
        if isinstance(stand_in, StandIn) and name == stand_in.place:
            plain[name] = stand_in.replaced()
        elif stand_in is not value:
            plain[name] = stand_in
        elif depth > 1:
            plain[name] = _without_ours(plain[name], depth - 1)
    kept = {name: value for name, value in plain.items() if value is not ABSENT}
    return kept if len(kept) < len(state) or any(kept[name] is not state[name] for name in kept) else state


def _without_hooks(state: dict[Any, Any]) -> dict[Any, Any]:
    plain = dict(state)
    for table, notes in SIDE_TABLES.items():
        hooks = state.get(table)
        ours = {key for key, hook in hooks.items() if getattr(hook, _MARK, False)} if isinstance(hooks, Mapping) else set()
        for name in (table, *notes) if ours else ():
            plain[name] = type(state[name])((key, value) for key, value in state[name].items() if key not in ours)
    return plain
