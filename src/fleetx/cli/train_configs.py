"""`parse_train_configs()`: read a training script's common flags, and every key of the strategy, from the command line.

train.py --lr 0.1 --batch_size 64 --lars.lars_coeff 0.01 --amp --steps 20
         `--------- ours -------' `--- the strategy's keys ----' `-------' left to the caller, in configs.rest

A key of a part switches the part on. `--strategy FILE` is read first, at any position, and flags change it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..config.kinds import Kind, boolean, integer, key, number, require
from ..errors import ConfigError, did_you_mean
from ..strategies import catalogue
from ..strategy import COMMUNICATION, DIAGNOSTICS, GUARDS, SCALARS, DistributedStrategy

# --- from the text of a flag to the value of its key, as the key's kind allows ------------------------------------------
# 4 -> 4        1e-3 -> 0.001     true -> True      null -> None      float16 -> "float16"      20GB -> "20GB"
# a,b -> ["a", "b"]               [a, b], ["a", "b"] and ['a', 'b'] -> the same                 [] -> []

# Not parsed as YAML scalars: in YAML 010 is 8 and 1:30 is 90.
_INTEGER = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def scalar(text: str) -> Any:
    """Parse a number, True, False or None; return any other text unchanged."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text
    except ValueError:  # Python reads no integer of more than 4,300 digits
        return text


def value_of(flag: str, text: str, kind: Kind) -> Any:
    """Return the first interpretation of the text that the kind accepts; if none fits, the error shows the text."""
    for reading in _readings(text):
        try:
            return kind.parse(reading)
        except (ValueError, OverflowError):
            continue
    return kind.check(flag, text)


def accepts(kind: Kind, value: Any) -> bool:
    try:
        kind.parse(value)
    except (ValueError, OverflowError):
        return False
    return True


def _readings(text: str) -> Iterator[Any]:
    yield scalar(text)
    yield text  # `--on_nan_inf off`: a word of the key itself comes before other meanings
    if not text.lstrip().startswith("["):
        elements = [element.strip() for element in text.split(",")]
        yield [scalar(element) for element in elements]
        yield elements
        return
    # JSON before YAML, which decodes some of its escapes differently.
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        pass  # not JSON: [a, b] is YAML
    try:
        words = yaml.load(text, Loader=yaml.BaseLoader)  # as safe as SafeLoader; all scalars are strings
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        yield [scalar(word) for word in words]
        yield words


# --- flags of a training script -----------------------------------------------------------------------------------------

RESUME_FOLDER = "checkpoints"
BOOLEANS = frozenset({"true", "false", "True", "False"})
NEAR_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "1", "0", "t", "f", "none", "null"})


def _text(what: str) -> Kind:
    def parse(value: Any) -> str:
        require(isinstance(value, str) and value != "")
        return str(value)

    return Kind(what, parse)


@dataclass(kw_only=True)
class TrainConfigs:
    """The flags of a training script. Defaults are Fleet's, unless the script passes its own."""

    lr: float = key(1e-4, number(above=0.0), "learning rate")
    momentum: float = key(0.9, number(0.0, below=1.0), "momentum of SGD")
    beta1: float = key(0.9, number(0.0, below=1.0), "decay of Adam's first moment")
    beta2: float = key(0.997, number(0.0, below=1.0), "decay of Adam's second moment")
    epsilon: float = key(1e-9, number(0.0), "added to Adam's denominator")
    batch_size: int = key(32, integer(1), "samples in a micro-batch of one worker")
    epochs: int = key(1, integer(1), "passes over the data")
    data: str | None = key(None, _text("a folder, a file, or the name of built-in data"), "what to train on")
    resume: str | None = key(None, _text("a folder"), f"continue from this folder (without a value: {RESUME_FOLDER})")
    strategy: DistributedStrategy = field(default_factory=DistributedStrategy)
    rest: list[str] = field(default_factory=list)

    def refuse_rest(self) -> None:
        """Raise on the first unknown flag and suggest the nearest name; for scripts without flags of their own."""
        if self.rest:
            name, _, _ = self.rest[0].removeprefix("--").partition("=")
            hint = did_you_mean(name.replace("-", "_"), _flags())
            raise ConfigError(f"unknown argument {self.rest[0]!r}.{hint} See --help.")


OWN: dict[str, Kind] = {f.name: f.metadata["kind"] for f in dataclasses.fields(TrainConfigs) if "kind" in f.metadata}
STRATEGY_FILE = _text("a file that ends in .yaml, .yml or .json")


def parse_train_configs(
    argv: Sequence[str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    parser: argparse.ArgumentParser | None = None,
) -> TrainConfigs:
    """Read the common flags, and every key of the strategy, from `argv` (default: the command line, which is not changed).

    `defaults` are the script's own: `{"lr": 0.1, "strategy": DistributedStrategy(lars=True)}`. A `--strategy FILE` replaces that
    strategy. Unknown words are left in `configs.rest`, in order; so is everything from `--` on. `parser` is the script's own
    parser, which reads `configs.rest` later: `--help` shows its flags too.

    Examples:
        >>> configs = X.parse_train_configs(["--lr", "0.1", "--amp", "true"])
        >>> configs.lr, configs.strategy.amp
        (0.1, True)
    """
    own, strategy = _checked_defaults({} if defaults is None else defaults)
    _check_parser(parser)
    given, rest = _scan(_checked_argv(argv), TrainConfigs(**own, strategy=strategy), parser)
    if "strategy" in given:
        strategy = _load(given.pop("strategy"))
    own |= {name: given.pop(name) for name in list(given) if name in OWN}
    _apply(given, strategy)
    return TrainConfigs(**own, strategy=strategy, rest=rest)


def _checked_argv(argv: Sequence[str] | None) -> list[str]:
    if argv is None:
        return sys.argv[1:]
    if not isinstance(argv, (list, tuple)) or not all(isinstance(word, str) for word in argv):
        raise ConfigError(f'argv is {argv!r}; it must be a list of words, such as ["--lr", "0.1"].')
    return list(argv)


def _checked_defaults(defaults: Mapping[str, Any]) -> tuple[dict[str, Any], DistributedStrategy]:
    if not isinstance(defaults, Mapping):
        raise ConfigError(f'defaults is {defaults!r}; it must be a dict, such as {{"lr": 0.1}}.')
    known = [*OWN, "strategy"]
    for name in defaults:
        if name not in known:
            raise ConfigError(f"defaults has no {name!r}.{did_you_mean(str(name), known)} Its names are: {', '.join(known)}.")
    strategy = defaults.get("strategy", DistributedStrategy())
    if not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f'defaults["strategy"] is {strategy!r}; it must be a DistributedStrategy.')
    own = {
        name: kind.check(f'defaults["{name}"]', defaults[name])
        for name, kind in OWN.items()
        if name in defaults and not (defaults[name] is None and name in ("data", "resume"))
    }
    return own, strategy.copy()


def _check_parser(parser: object) -> None:
    if parser is None:
        return
    if not isinstance(parser, argparse.ArgumentParser):
        raise ConfigError(f"parser is {parser!r}; it must be the script's own argparse.ArgumentParser.")
    for flag in (flag for action in parser._actions for flag in action.option_strings):
        if flag.removeprefix("--").replace("-", "_") in _flags():
            raise ConfigError(
                f"the script's parser has {flag}, which parse_train_configs reads itself: the parser would never get it. "
                "Give it another name."
            )


def _flags() -> dict[str, Kind]:
    """Return the kind of every flag, by name without dashes."""
    flags = OWN | {"strategy": STRATEGY_FILE} | {name: scalar.kind for name, scalar in SCALARS.items()}
    for name, part in catalogue().items():
        flags[name] = boolean()
        flags.update({f"{name}.{f.name}": f.metadata["kind"] for f in dataclasses.fields(part)})
    return flags


def _scan(argv: list[str], defaults: TrainConfigs, parser: argparse.ArgumentParser | None) -> tuple[dict[str, Any], list[str]]:
    """Separate known flags, with the last value of each, from all other words."""
    flags, given, rest = _flags(), dict[str, Any](), list[str]()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return given, [*rest, word, *words]
        if word in ("-h", "--help"):
            print(_help(defaults, parser), end="")
            raise SystemExit(0)
        flag, has_value, text = word.partition("=")
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or name not in flags:
            _refuse_near_miss(flag, name, flags)
            rest.append(word)
        else:
            given[name] = value_of(flag, text, flags[name]) if has_value else _next_value(flag, name, flags[name], words)
    return given, rest


def _next_value(flag: str, name: str, kind: Kind, words: list[str]) -> Any:
    """Read the value of a flag without `=` from the next word; switches and --resume may have none."""
    if accepts(kind, True):
        following = words[0] if words else ""
        if following in BOOLEANS:
            return value_of(flag, words.pop(0), kind)
        # Other words after a switch stay in `rest`; with `off` among them, `--amp off` would switch amp on.
        if following.lower() in NEAR_BOOLEANS:
            raise ConfigError(f"{flag} is followed by {following!r}; write {flag} true or {flag} false.")
        return True
    if name == "resume" and (not words or words[0].startswith("-")):
        return RESUME_FOLDER
    if not words or words[0].startswith("--"):
        raise ConfigError(f"{flag} needs a value: {kind.allowed}.")
    return value_of(flag, words.pop(0), kind)


def _refuse_near_miss(flag: str, name: str, flags: Mapping[str, Kind]) -> None:
    """Raise on an unknown flag that begins with the name of a part: left in `rest`, it would be lost."""
    if not flag.startswith("--"):
        return
    part, dot, entry = name.partition(".")
    plain = part.removesuffix("_configs")
    if plain in catalogue() and (dot or plain != part):
        keys = [known for known in flags if known.startswith(f"{plain}.")]
        listed = f" Its keys are: {', '.join(f'--{known}' for known in keys)}." if keys else f" It is a switch: --{plain}."
        raise ConfigError(f"there is no flag {flag}.{did_you_mean(f'{plain}.{entry}', keys)}{listed}")
    if dot and (hint := did_you_mean(part, [known for known in catalogue() if f"{known}.{entry}" in flags])):
        raise ConfigError(f"there is no strategy `{part}` for {flag}.{hint}")


def _load(path: str) -> DistributedStrategy:
    try:
        return DistributedStrategy.load(path)
    except OSError as error:
        raise ConfigError(f"--strategy {path} cannot be read: {error.strerror or error}.") from None


def _apply(given: Mapping[str, Any], strategy: DistributedStrategy) -> None:
    """Set scalars and switches, then keys. A part that is switched off is reset to its defaults: its keys have no effect."""
    keys = {name: value for name, value in given.items() if "." in name}
    for name, value in given.items():
        if name not in keys:
            setattr(strategy, name, value)
        if value is False and name in catalogue():
            _switch_off(name, [known for known in keys if known.startswith(f"{name}.")], strategy)
    for name, value in keys.items():
        part, _, entry = name.partition(".")
        setattr(strategy, part, True)
        getattr(strategy, f"{part}_configs")[entry] = value


def _switch_off(name: str, keys: Sequence[str], strategy: DistributedStrategy) -> None:
    if keys:
        raise ConfigError(f"--{name} false and --{keys[0]} contradict each other: a key switches its part on. Keep one of them.")
    if dataclasses.fields(catalogue()[name]):
        setattr(strategy, f"{name}_configs", dict(getattr(DistributedStrategy(), f"{name}_configs")))


def _help(configs: TrainConfigs, script: argparse.ArgumentParser | None) -> str:
    """Generate the help text from the strategy's keys, so that both always agree."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags] [flags of the script]",
        description="A flag is written --name value or --name=value, with - or _ between its words.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
        parents=[] if script is None else [script],
        add_help=False,
        allow_abbrev=False,
    )
    for title, description, rows in _groups(configs):
        group = parser.add_argument_group(title, description)
        for name, kind, doc, default in rows:
            is_switch = accepts(kind, True)
            about = doc if is_switch else f"{doc}; {kind.allowed}"
            shown = "none" if default is None else str(default)
            group.add_argument(
                f"--{name}",
                nargs="?" if is_switch or name == "resume" else None,
                metavar="true|false" if is_switch else "VALUE",
                help=f"{about} (default: {shown})".strip().replace("%", "%%"),
            )
    return parser.format_help()


Row = tuple[str, Kind, str, Any]


def _groups(configs: TrainConfigs) -> Iterator[tuple[str, str | None, list[Row]]]:
    docs = {f.name: f.metadata["doc"] for f in dataclasses.fields(TrainConfigs) if "doc" in f.metadata}
    yield "training", None, [(name, kind, docs[name], getattr(configs, name)) for name, kind in OWN.items()]
    file: Row = ("strategy", STRATEGY_FILE, "the strategy; flags change it", None)
    yield "the strategy", "A key of a part switches the part on.", [file]
    for name, part in catalogue().items():
        lines = (sys.modules[part.__module__].__doc__ or "").splitlines()
        settings = getattr(configs.strategy, f"{name}_configs", {})
        rows: list[Row] = [(name, boolean(), "switches it on or off", getattr(configs.strategy, name))]
        rows += [(f"{name}.{f.name}", f.metadata["kind"], f.metadata["doc"], settings[f.name]) for f in dataclasses.fields(part)]
        yield name, " ".join(lines[:1]) or None, rows
    for title, scalars in {"communication": COMMUNICATION, "guards": GUARDS, "diagnostics": DIAGNOSTICS}.items():
        yield title, None, [(name, one.kind, one.doc, getattr(configs.strategy, name)) for name, one in scalars.items()]
