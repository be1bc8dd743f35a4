"""What the user asks for: one switch per part, its settings beside it, nothing that is not checked."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

from .config.kinds import Kind, boolean, choice, integer, names, number, once
from .engine.setup.strategy_tables import overview, slot_table
from .engine.slots import Part
from .errors import ConfigError, did_you_mean
from .strategies import catalogue

if TYPE_CHECKING:
    from .strategies.switches import Keywords, Switches
else:
    Switches = object


def whole_if_integral(kind: Kind) -> Kind:
    """Print whole floats as integers in tables and files: 32 stays 32, 0.5 stays 0.5."""

    def parse(value: Any) -> int | float:
        parsed = kind.parse(value)
        return int(parsed) if parsed == int(parsed) else float(parsed)

    return Kind(kind.allowed, parse, kind.hint)


class Scalar(NamedTuple):
    """A setting that belongs to no part."""

    default: Any
    kind: Kind
    doc: str


COMMUNICATION = {
    "fuse_grad_size_in_MB": Scalar(
        32, whole_if_integral(number(above=0.0)), "size of a bucket: gradients are sent in such pieces while backward goes on"
    ),
    "find_unused_parameters": Scalar(
        False, boolean(), "parameters may stay without a gradient; otherwise that is an error which names them"
    ),
    "local_buffers": Scalar(
        [],
        names("memory.*", "hidden"),
        "names or patterns of buffers that belong to each worker: never averaged; all others are kept equal",
    ),
}
GUARDS = {
    "on_nan_inf": Scalar(
        "stop",
        choice("stop", "skip", "off"),
        "a loss or gradient that is NaN or infinite: stop with an error, skip that update, or off: let it pass",
    ),
    "desync_check_steps": Scalar(
        100, integer(0), "updates between two checks that all workers still hold the same model; 0: no check"
    ),
}
DIAGNOSTICS = {
    "noise_scale_steps": Scalar(
        0, integer(0), "updates between two measurements of the gradient noise scale, which tells the useful batch; 0: none"
    ),
}
SCALARS = COMMUNICATION | GUARDS | DIAGNOSTICS


ELSEWHERE = {
    "gradient_merge": ("gradient_accumulation", "gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps"),
    "amp": ("fp16", "bf16", "float16", "bfloat16", "autocast", "mixed_precision", "precision"),
    "sharding": ("zero", "zero1", "zero2", "zero_optimization", "fsdp"),
    "clip_norm": ("grad_clip", "gradient_clipping", "gradient_clip_val", "clip_grad_norm", "max_grad_norm"),
    "recompute": ("gradient_checkpointing", "activation_checkpointing", "checkpointing", "remat"),
    "localsgd": ("diloco", "fedavg", "post_local_sgd"),
    "compile": ("torch_compile", "inductor"),
    "powersgd": ("power_sgd",),
    "sync_batch_norm": ("sync_bn", "syncbn", "convert_sync_batchnorm"),
}
"""What other libraries call a switch."""


def _elsewhere(name: str) -> str:
    """Return a sentence with the name that a switch has here, or nothing."""
    own = next((own for own, others in ELSEWHERE.items() if name.lower() in others), None)
    return f" Here it is called `{own}`." if own is not None else ""


class UnknownSettingError(ConfigError, AttributeError):
    """No such attribute. An AttributeError too, so that `hasattr` and `getattr` with a default keep their meaning."""


class FrozenList(list[Any]):
    """A setting that is a list, as it reads back. Changing it in place would be a write without a check: refused, not lost."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            "a list in a strategy is not changed in place. Assign a new one: strategy.x = [...], or "
            'strategy.x_configs["key"] = [...]'
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


class Settings(MutableMapping[str, Any]):
    """A live view of `<name>_configs`: every write is checked, no key comes or goes.

    Lists read back frozen.
    """

    def __init__(self, part: type[Part]) -> None:
        default = part()
        self._name = f"{part.name}_configs"
        self._kinds: dict[str, Kind] = {field.name: field.metadata["kind"] for field in dataclasses.fields(part)}
        self._defaults = {key: getattr(default, key) for key in self._kinds}
        self._values = dict(self._defaults)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise ConfigError(f'settings are keys, not attributes. Write strategy.{self._name}["{name}"] = {value!r}')
        super().__setattr__(name, value)

    def _known(self, key: object) -> str:
        if not isinstance(key, str) or key not in self._kinds:
            valid = ", ".join(self._kinds)
            raise ConfigError(f"{self._name} has no key {key!r}.{did_you_mean(str(key), self._kinds)} Its keys are: {valid}.")
        return key

    def __getitem__(self, key: str) -> Any:
        value = self._values[self._known(key)]
        return FrozenList(value) if isinstance(value, list) else value

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        raise ConfigError(
            f"{self._name} keeps all its keys; {key!r} cannot be deleted. Its default is {self._defaults[self._known(key)]!r}."
        )

    def __contains__(self, key: object) -> bool:
        return key in self._kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        theirs = {key: list(value) if isinstance(value, tuple) else value for key, value in other.items()}
        return self._values == theirs

    def __repr__(self) -> str:
        return repr(self.plain())

    def update(self, *sources: Any, **named: Any) -> None:
        # All or nothing: a bad key must not leave half of an assignment behind.
        given = dict(*sources, **named)
        checked = {self._known(key): self._kinds[key].check(f'{self._name}["{key}"]', given[key]) for key in given}
        self._values.update(checked)

    def replace(self, given: Any) -> None:
        """Apply `strategy.x_configs = {...}`: keys not named keep their value, a list replaces the one before."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"{self._name} is {given!r}; it must be a dict with some of the keys: {', '.join(self._kinds)}.")
        self.update(given)

    def become(self, given: Mapping[str, Any]) -> None:
        """Apply `strategy.x = {...}`: these settings, and the default of every key not named."""
        self.update({**self._defaults, **given})

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {key: copy.deepcopy(value) for key, value in self._values.items() if value != self._defaults[key]}

    def plain(self) -> dict[str, Any]:
        """Return a plain dict, lists as lists, that shares nothing with this view."""
        return copy.deepcopy(self._values)


class _Signature:
    """The keywords of `DistributedStrategy`, for `help` and for notebooks that complete them."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        kind = inspect.Parameter.KEYWORD_ONLY
        values = DistributedStrategy()._values.items()
        shown = ((name, value.plain() if isinstance(value, Settings) else value) for name, value in values)
        return inspect.Signature([inspect.Parameter(name, kind, default=value) for name, value in shown])


class DistributedStrategy(Switches):
    """The strategy of a run: a switch for each part, the part's settings beside it, and settings that belong to no part.

    A switch takes `True`, a dict of settings, or the typed part; keywords and attributes are the same. A dict or a part says all
    settings: keys that it does not name have their default. An assignment to `<name>_configs` changes the keys that it names.

    Examples:
        >>> strategy = fleet.DistributedStrategy(amp=True, localsgd={"k_steps": 4})
        >>> strategy.dgc = X.strategies.DGC(sparsity=[0.99])
        >>> strategy.dgc_configs["min_numel"] = 1024
        >>> fleet.DistributedStrategy(gradient_marge=True)
        Traceback (most recent call last):
        ...
        fleetx.strategy.UnknownSettingError: DistributedStrategy has no setting `gradient_marge`. Did you mean `gradient_merge`?
    """

    _values: dict[str, Any]
    __signature__ = _Signature()

    def __init__(self, **settings: Unpack[Keywords]) -> None:
        values: dict[str, Any] = {}
        for name, part in catalogue().items():
            values[name] = False
            if dataclasses.fields(part):
                values[f"{name}_configs"] = Settings(part)
        values.update({name: copy.copy(scalar.default) for name, scalar in SCALARS.items()})
        object.__setattr__(self, "_values", values)
        for name, value in settings.items():
            if f"{name}_configs" in settings and not isinstance(value, bool):
                raise ConfigError(f"the settings of `{name}` are given twice, in {name} and in {name}_configs. Keep one of them.")
            setattr(self, name, value)

    def _get(self, name: str) -> Any:
        # Python asks for names of its own, `__setstate__` among them, before `_values` is there.
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._values[self._known(name)]
        return FrozenList(value) if isinstance(value, list) else value

    def _set(self, name: str, value: Any) -> None:
        current = self._values[self._known(name)]
        if isinstance(current, Settings):
            current.replace(value)
        elif name in SCALARS:
            self._values[name] = SCALARS[name].kind.check(name, value)
        else:
            self._switch(name, value)

    if not TYPE_CHECKING:  # checkers know each setting by its name (strategies/switches.pyi), so that they find unknown ones
        __getattr__ = _get
        __setattr__ = _set

    def _switch(self, name: str, value: Any) -> None:
        """Switch a part on or off. A dict or a typed part says all its settings; True and False leave them."""
        part, settings = catalogue()[name], self._settings(name)
        if isinstance(value, bool):
            self._values[name] = value
            return
        if isinstance(value, part):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(part)}
        elif not isinstance(value, Mapping):
            taken = f"True, False, a dict of its settings, or fleetx.strategies.{part.__name__}(...)"
            raise ConfigError(f"{name} is {value!r}; it must be {taken}.")
        if settings is not None:
            settings.become(value)
        elif value:
            raise ConfigError(f"{name} is {dict(value)!r}; this strategy has no settings. Write {name}=True.")
        self._values[name] = True

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def _known(self, name: object) -> str:
        if not isinstance(name, str) or name not in self._values:
            switches = [known for known in self._values if not known.endswith("_configs")]
            hint = _elsewhere(str(name)) or did_you_mean(str(name), self._values)
            hint = hint or f" Its settings are: {', '.join(switches)}; and for each switch its `_configs`."
            raise UnknownSettingError(f"DistributedStrategy has no setting `{name}`.{hint}")
        return name

    def _settings(self, name: str) -> Settings | None:
        settings: Settings | None = self._values.get(f"{name}_configs")
        return settings

    def _part(self, name: str) -> Part:
        settings = self._settings(name)
        return catalogue()[name](**(settings.plain() if settings is not None else {}))

    def parts(self) -> list[Part]:
        """Return the parts that are switched on, with their settings; settings of a switch that is off are an error."""
        for name in catalogue():
            settings = self._settings(name)
            if settings is not None and settings.changed() and not self._values[name]:
                raise ConfigError(f"{name}_configs is set, but `{name}` is off. Write `strategy.{name} = True` to use it.")
        enabled = [name for name in catalogue() if self._values[name]]
        if set(enabled) == {"auto", "localsgd"} and self._is_older_spelling():
            return [self._adaptive_by_its_older_spelling()]
        return [self._part(name) for name in enabled]

    def _is_older_spelling(self) -> bool:
        """Return whether `localsgd` and `auto` alone mean adaptive_localsgd, which has no fragments."""
        settings = self._settings("localsgd")
        in_turns = settings is not None and settings.plain()["fragments"] > 1
        return not in_turns and not self._values["auto_configs"].changed()

    def _adaptive_by_its_older_spelling(self) -> Part:
        """Build the part meant by `localsgd` and `auto` alone. With settings of `auto`, with fragments, or beside another part,
        `auto` plans around `localsgd`."""
        settings = self._settings("localsgd")
        carried = settings.plain() if settings is not None else {}
        carried.pop("fragments", None)
        carried["init_k_steps"] = carried.pop("k_steps")
        return catalogue()["adaptive_localsgd"](**carried)

    def explain(self) -> str:
        """Show which part fills which slot of a step, where parts collide, and what is not built yet."""
        parts = self.parts()
        kept = [part.name for part in parts if part.name != "auto"]
        plans = [f"auto: keeps {', '.join(kept)} as set, and plans the rest."] if kept and len(kept) < len(parts) else []
        return "\n".join([slot_table(parts), *plans])

    def copy(self) -> Self:
        return copy.deepcopy(self)

    def __copy__(self) -> Self:
        return self.copy()  # a shallow copy would share its settings, and writing one would write both

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, DistributedStrategy) else NotImplemented

    def __repr__(self) -> str:
        """Return one line: what differs from the defaults, as it is written in Python."""
        written: dict[str, Any] = {}
        for name in catalogue():
            settings = self._settings(name)
            changed = settings.changed() if settings is not None else {}
            if self._values[name]:
                written[name] = changed or True
            elif changed:
                written[f"{name}_configs"] = changed
        written |= {name: self._values[name] for name, scalar in SCALARS.items() if self._values[name] != scalar.default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in written.items())})"

    def __str__(self) -> str:
        titles = {"Communication Flags": COMMUNICATION, "Guards": GUARDS, "Diagnostics": DIAGNOSTICS}
        return overview(self.to_dict(), scalars=titles)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what is on with all its settings, what is off only where it was changed, and the scalars."""
        plain: dict[str, Any] = {}
        for name in catalogue():
            settings = self._settings(name)
            if self._values[name]:
                plain[name] = True
            if settings is not None and (self._values[name] or settings.changed()):
                plain[f"{name}_configs"] = settings.plain()
        return plain | {name: copy.copy(self._values[name]) for name in SCALARS}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        if not isinstance(plain, Mapping):
            raise ConfigError(
                f"A strategy is a mapping of settings, such as {{'amp': True}}; this is {plain!r}. A file is read by "
                "DistributedStrategy.load(path)."
            )
        strategy = cls()
        for name, value in plain.items():
            setattr(strategy, strategy._known(name), value)
        return strategy

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(_read("JSON", lambda: json.loads(text, object_pairs_hook=once, parse_constant=_refuse_constant)))

    def to_yaml(self) -> str:
        import yaml  # late: a strategy is mostly written in Python, and an import must be quick

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        from .config.strict_yaml import load

        return cls.from_dict(_read("YAML", lambda: load(text)))

    def save(self, path: str | os.PathLike[str]) -> None:
        text = self.to_json() if _is_json(path) else self.to_yaml()
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        read = cls.from_json if _is_json(path) else cls.from_yaml
        try:
            return read(Path(path).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text: {error}.") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that can be used")


def _read(language: str, read: Any) -> Any:
    try:
        return read()
    except Exception as error:  # whatever a hostile document breaks, the user hears that it is the document
        raise ConfigError(f"This is not a strategy in {language}: {str(error) or type(error).__name__}") from None


def _is_json(path: str | os.PathLike[str]) -> bool:
    suffix = Path(path).suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{path} ends in {suffix!r}; a strategy file ends in .json, .yaml or .yml.")
    return suffix == ".json"
