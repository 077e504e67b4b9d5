"""Declare options: one line states an option's default, range, meaning, unit, symbol and run-config key.

An options class is a frozen dataclass derived from ``Options`` whose fields are made by ``option``. Its
values are checked when it is made. ``takes`` turns a function of an options class into a constructor with the
same arguments, so that signature and class cannot differ:

>>> @dataclass(frozen=True)
... class SmoothingOptions(Options):
...     name: ClassVar[str] = "smoothing"
...     strength: float = option(0.5, "weight of the new value", "(0, 1]", symbol="alpha")
>>> @takes(SmoothingOptions)
... def smoothing(options: SmoothingOptions) -> float:
...     return options.strength
>>> smoothing(strength=0.25)
0.25
>>> smoothing(strength=2)
Traceback (most recent call last):
ValueError: smoothing's strength must be in (0, 1], but got 2
>>> [(key.name, key.default, key.shown, key.help) for key in keys_of({"smoothing": smoothing}).values()]
[('smoothing-strength', 0.5, '(0, 1]', 'weight of the new value (alpha in the paper)')]

The run config's keys are collected from registries, which are dicts from name to constructor (``METHODS``,
``OBJECTIVES``, ``SERVER_OPTIMIZERS``). Further keys come from the parts that every run has, such as local training and
rounds (``fl_bn.run.run_keys.VALUES``).

A constructor's default is neutral, such as a decay of 1. A run config's default is chosen to train well. If the
two differ, ``option(..., run=...)`` states the run config's default:

>>> @dataclass(frozen=True)
... class Schedule(Options):
...     name: ClassVar[str] = "the schedule"
...     prefix: ClassVar[str] = "rate"
...     decay: float = option(1.0, "factor per round", "(0, 1]", run=0.3)
...     after: tuple[int, ...] = option((), "rounds", "ROUND,...", run="", read=lambda text: tuple(map(int, text.split(","))))
>>> Schedule().decay
1.0
>>> build(Schedule, {"rate-decay": 0.3, "rate-after": "5,9"}.__getitem__)
Schedule(decay=0.3, after=(5, 9))
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

from fl_bn.support.names import expected, names_of, nearest, short, visible

Value = str | int | float | bool
Values = str | Collection[str]
LARGEST = 3.4e38  # the largest number of float32, rounded down
OPTION = "option"  # the key under which a dataclass field's metadata hold its ``Option``
REQUIRED = MISSING  # an option's default that says: the constructor has no default, only the run config has one
P = ParamSpec("P")
T = TypeVar("T")
Chosen = TypeVar("Chosen", bound="Options")


Fits = Mapping[str, tuple[Callable[[Any], object], str]]
"""A table of arguments: name -> whether a value fits, and the fitting values in words."""


def refuse(*rules: tuple[object, str]) -> None:
    """Check rules in order, each a pair: whether it applies, and the sentence for the user.

    >>> refuse((1 > 2, "one is too many"), (2 > 1, "two are too many"))
    Traceback (most recent call last):
    ValueError: two are too many

    Raises:
        ValueError: A rule applies. The message is the sentence of the first one that does.
    """
    for applies, sentence in rules:
        if applies:
            raise ValueError(sentence)


def is_a(kind: Any, such: str) -> tuple[Callable[[Any], object], str]:
    """Return the entry of a ``Fits`` table for objects of ``kind``, with an example."""
    return lambda value: isinstance(value, kind), f"an object such as {such}"


def check_fits(table: Fits, given: Mapping[str, Any], whose: str = "", others: str = "") -> None:
    """Check that each value in ``given`` (name -> value) fits ``table``.

    Args:
        table: The table.
        given: The values by name.
        whose: The owner of the values, such as " of client 3", which follows the name in the message.
        others: Other fitting values in words.

    Raises:
        ValueError: A value does not fit.
    """
    for name, value in given.items():
        fits, wanted = table[name]
        if not fits(value):
            raise ValueError(f"{name}{whose} must be {wanted}{others}, but got {short(value)}".replace("\n", " "))


@dataclass(frozen=True)
class Used:
    """Name what an option belongs to. In a run without that, the option has no effect, and setting it is an error.

    Attributes:
        owner: The words after "belongs to", such as "method='fixbn'".
        holds: Returns whether a run config has the owner. It reads the config's values by their keys.
    """

    owner: str
    holds: Callable[[Any], bool]

    def __and__(self, other: Used) -> Used:
        return Used(f"{self.owner}, and to {other.owner}", lambda config: self.holds(config) and other.holds(config))


def used_with(key: str, *values: Value) -> Used:
    """Return the owner ``key`` with one of ``values``.

    >>> used_with("learning-rate-schedule", "step", "exponential").owner
    "learning-rate-schedule='step' or 'exponential'"
    """
    return Used(f"{key}={' or '.join(map(in_config, values))}", lambda config: config[key] in values)


def method_where(owner: str, holds: Callable[[Any, Any], bool]) -> Used:
    """Return the owner of options that belong to some methods.

    Args:
        owner: The methods in words, such as "a method with which clients keep layers".
        holds: ``(method, run config) -> bool``: whether it is such a method.
    """
    return Used(owner, lambda config: holds(config.build_method(), config))


def parses(parse: Callable[[str], object]) -> Callable[[str], bool]:
    """Return a function that returns False for a text for which ``parse`` raises a ValueError, else True."""

    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


def in_config(value: Value) -> str:
    """Return ``value`` as it is written in a run config.

    >>> in_config("fbn"), in_config(True), in_config(0.1)
    ("'fbn'", 'true', '0.1')
    """
    return repr(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value:g}"


_NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


def range_of(text: str) -> Callable[[Any], bool]:
    """Return a function that returns whether a number is finite and within the range that ``text`` describes.

    Args:
        text: ``>= 1``, ``> 0``, ``0..9`` (both ends included), ``(0, 1]``, or a single number. The word ``or`` joins several of
            these: ``0 or >= 2``.

    Raises:
        ValueError: The text is not a range.
    """
    tests = [_range_of(part, text) for part in text.split(" or ")]
    return lambda value: -LARGEST <= value <= LARGEST and any(test(value) for test in tests)


def _range_of(part: str, text: str) -> Callable[[Any], bool]:
    if match := re.fullmatch(rf"(>=?) ({_NUMBER})", part):
        low = float(match[2])
        return (lambda value: value >= low) if match[1] == ">=" else (lambda value: value > low)
    if match := re.fullmatch(rf"({_NUMBER})\.\.({_NUMBER})", part):
        first, last = float(match[1]), float(match[2])
        return lambda value: first <= value <= last
    if match := re.fullmatch(rf"([(\[])({_NUMBER}), ({_NUMBER})([)\]])", part):
        low, high, open_low, open_high = float(match[2]), float(match[3]), match[1] == "(", match[4] == ")"
        return lambda value: low <= value <= high and not (open_low and value == low) and not (open_high and value == high)
    if re.fullmatch(_NUMBER, part):
        only = float(part)
        return lambda value: value == only
    raise ValueError(f"a range must be like '>= 1', '> 0', '0..9', '(0, 1]' or '0 or >= 2', but is {text!r}")


@dataclass(frozen=True)
class Key:
    """Describe one key of the run config.

    Attributes:
        name: The key.
        default: Its default.
        help: Its meaning.
        values: The allowed names, a range of numbers, or a description of the allowed texts.
        accepts: Returns whether a value of the right type is allowed.
        like: Names that may occur in the value. If a name in the value is not one of them, the error suggests the nearest.
    """

    name: str
    default: Value
    help: str
    values: Values
    accepts: Callable[[Any], bool]
    like: Collection[str] = ()

    @property
    def shown(self) -> str:
        """Return the allowed values in words."""
        return self.values if isinstance(self.values, str) else ", ".join(self.values)

    def check(self, value: Any) -> Value:
        """Check a value of the key and return it. An int becomes a float if the key's type is float.

        Raises:
            ValueError: The value is of another type, is out of range, or cannot be written to a file or sent.
        """
        kind = type(self.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            problem = f"{self.name} must be of type {kind.__name__}, but got {short(value)}"
        elif unfit := _unfit(value, kind):
            problem = f"{self.name} must be {unfit}, but got {short(value)}"
        else:
            problem = "" if self.accepts(value) else _out_of_range(self.name, value, self.values, self.help, self.like)
        refuse((problem, problem))
        return float(value) if kind is float else value


def _unfit(value: Any, kind: type) -> str:
    """Return what ``value`` must be so that files and messages can hold it, such as "a finite number"; empty: they can hold it."""
    if kind is float and not abs(value) <= LARGEST:
        return "a finite number"
    if kind is int and not -(2**63) <= value < 2**63:
        return "a whole number of at most 63 bits"
    if kind is str and not visible(value):
        return "a text without control or invisible characters"
    return ""


def _out_of_range(called: str, value: object, values: Values, help: str, like: Collection[str] = ()) -> str:
    """Return the message for a value out of range. If ``help`` explains a special value after a semicolon, the message does, too."""
    if not isinstance(values, str):
        return expected(called, value, values)
    wrong = next((part for part in names_of(value) if part not in like), "") if isinstance(value, str) else ""
    _, _, special = help.partition("; ")
    meaning = f" ({special})" if special and re.match(r"-?\d", special) else ""
    return f"{called} must be {'in ' if values[0] in '([' else ''}{values}, but got {short(value)}{meaning}{nearest(wrong, like)}"


@dataclass(frozen=True)
class Option:
    """Hold the declaration of one option, as ``option`` makes it.

    Attributes:
        default: The constructor's default.
        help: The meaning of the option.
        values: For a number, its range. For a text, the allowed names, or a description of the allowed texts.
        test: Returns whether a value is allowed.
        unit: The unit of a number, in words.
        symbol: The symbol in the paper.
        key: The run-config key. Default: the class's prefix and the field's name.
        unset: The key's value that selects the constructor's default, such as -1 for a default of None, because a run
            config cannot hold None. None: there is no such value.
        otherwise: In words, which value is used if the option is unset. Empty: the constructor's default.
        like: Names that may occur in a text. If a name in the text is not one of them, the error suggests the nearest.
        used: What the option belongs to, beside its class. None: it has an effect whenever its class is used.
        run: The run config's default. None: it is the constructor's default, or ``unset``.
        read: Converts the key's value to the field's value. None: they are the same.
    """

    default: Any
    help: str
    values: Values
    test: Callable[[Any], bool]
    unit: str = ""
    symbol: str = ""
    key: str = ""
    unset: Value | None = None
    otherwise: str = ""
    like: Collection[str] = ()
    used: Used | None = None
    run: Value | None = None
    read: Callable[[Any], Any] | None = None
    hidden: bool = False

    @property
    def in_run(self) -> Any:
        """Return the default of the option's key in the run config. The constructor's default may be another one, such as None."""
        if self.run is not None:
            return self.run
        return self.default if self.unset is None else self.unset

    @property
    def kind(self) -> type:
        """Return the type of the key's value."""
        return type(self.in_run)

    @property
    def meaning(self) -> str:
        """Return help, unit and symbol in one sentence; the meaning of a special value comes last."""
        what, *special = self.help.split("; ", 1)
        unit, symbol = f", {self.unit}" if self.unit else "", f" ({self.symbol} in the paper)" if self.symbol else ""
        return "; ".join([what + unit + symbol, *special])

    def check(self, called: str, value: object) -> None:
        """Check a field's value. If the option has a ``read`` function, nothing is checked here: the field's class does so.

        Args:
            called: The option's name in errors.
            value: The field's value.

        Raises:
            ValueError: The value is of another type, or out of range.
        """
        if self.read is not None or (value is None and self.default is None):
            return
        kind: type = {int: Integral, float: Real}.get(self.kind, self.kind)
        if not isinstance(value, kind) or (isinstance(value, bool) and self.kind is not bool):
            problem = f"{called} must be of type {self.kind.__name__}, but got {short(value)}"
        else:
            problem = "" if self.test(value) else _out_of_range(called, value, self.values, self.help, self.like)
        refuse((problem, problem))

    def as_key(self, name: str) -> Key:
        """Return the run-config key of this option.

        If ``self.unset`` is not None, the key's default is ``self.unset``. This value selects the constructor's default.

        Args:
            name: The key's name.
        """
        if name not in self._keys:
            self._keys[name] = self._as_key(name)
        return self._keys[name]

    @functools.cached_property
    def _keys(self) -> dict[str, Key]:  # every run config asks for the keys, and a sweep makes hundreds of run configs
        return {}

    def _as_key(self, name: str) -> Key:
        if self.unset is None:
            return Key(name, self.in_run, self.meaning, self.values, self.test, self.like)
        shown = f"{_shown(self.unset)} or {self.values}"
        help = f"{self.meaning}; {_shown(self.unset)}: {self.otherwise}" if self.otherwise else self.meaning
        return Key(name, self.unset, help, shown, lambda value: value == self.unset or self.test(value))

    @property
    def left_out(self) -> str:
        """Return, in words, which value is used if the option is not given."""
        return self.otherwise or _shown(self.default)


def option(default: Any, help: str, values: Values = "", check: Callable[[Any], bool] | None = None, **more: Any) -> Any:
    """Declare a field of an options class.

    Args:
        default: The constructor's default. ``REQUIRED``: there is no default. A class, such as ``dict``: its constructor
            makes the default anew for each object.
        help: The meaning of the option.
        values: For a number, its range (``range_of``). For a text, the allowed names, or a description of the allowed texts.
        check: Returns whether a value is allowed. None: ``values`` decides, and allows any text if it is a description.
        more: The other attributes of ``Option``, by name, such as ``unit``, ``key``, ``used`` and ``run``. A ``hidden`` option is an
            argument in Python alone: it has a run-config key only in a run whose ``setup`` declares one.
    """
    spec = Option(default, help, values, check or (lambda value: True), **more)
    if spec.kind is bool:
        spec = replace(spec, values="true, false")
    elif check is None and not isinstance(values, str):
        spec = replace(spec, test=values.__contains__)
    elif check is None and isinstance(values, str) and spec.kind in (int, float):
        spec = replace(spec, test=range_of(values))
    return _field(default, spec)


def _field(default: Any, spec: Option) -> Any:
    if isinstance(default, type):
        return field(default_factory=default, metadata={OPTION: spec})
    return field(default=default, metadata={OPTION: spec})


def shared(kind: type, name: str, default: Any, read: Callable[[Any], Any] | None = None) -> Any:
    """Return a dataclass field whose value comes from the run-config key of another class's option.

    Args:
        kind: The class that declares the option.
        name: The option's field in ``kind``.
        default: The constructor's default in the class that gets the field.
        read: Converts the key's value to the field's value. None: they are the same.
    """
    return _field(default, replace(_keyed(kind, name), default=default, read=read))


def declared(kind: type, name: str) -> Any:
    """Return a dataclass field for an option that another class declares. The default is the run config's, not the constructor's.

    Args:
        kind: The class that declares the option.
        name: The option's field in ``kind``.
    """
    spec = replace(_keyed(kind, name), hidden=False)
    return _field(spec.in_run, spec)


def _keyed(kind: type, name: str) -> Option:
    spec = own_options(kind)[name]
    return replace(spec, key=_key(kind, name, spec))


class Options:
    """Serve as the base of options classes. Making an object checks the values of its options.

    Attributes:
        name: The name by which errors call the method or part that has the options.
        prefix: The beginning of the options' keys in the run config. None: the name.
    """

    name: ClassVar[str] = ""
    prefix: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for field_name, spec in own_options(cast(Any, type(self))).items():
            if getattr(self, field_name) is None and spec.unset is not None and spec.default is not REQUIRED:
                object.__setattr__(self, field_name, spec.default)
            spec.check(f"{self.name}'s {field_name}", getattr(self, field_name))


@functools.cache
def own_options(kind: type) -> dict[str, Option]:
    """Return the options of a dataclass, by the names of their fields."""
    return {spec.name: spec.metadata[OPTION] for spec in fields(kind) if OPTION in spec.metadata}


def takes(options: Callable[P, Chosen]) -> Callable[[Callable[[Chosen], T]], Callable[P, T]]:
    """Return a decorator for a function that takes one options object.

    The decorated function takes the object's fields as arguments instead, and makes the object itself. So
    ``@takes(FixBNOptions)`` on ``fixbn(options)`` lets users write ``fixbn(freeze_after=3)``.

    Args:
        options: The class of the options object.
    """

    def decorate(build: Callable[[Chosen], T]) -> Callable[P, T]:
        @functools.wraps(build)
        def constructor(*args: P.args, **kwargs: P.kwargs) -> T:
            return build(options(*args, **kwargs))

        constructor.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
        constructor.options = options  # type: ignore[attr-defined]
        return constructor

    return decorate


def options_by_key(constructor: object) -> dict[str, tuple[str, Option]]:
    """Return, for a constructor, a dict: run-config key -> (name of the field, option). It is empty if there are no options."""
    kind = constructor if isinstance(constructor, type) and is_dataclass(constructor) else getattr(constructor, "options", None)
    return {} if kind is None else _by_key(kind, hidden=False)


def hidden_options(constructor: object) -> dict[str, tuple[str, Option]]:
    """Return what ``options_by_key`` does, for the options that are arguments in Python alone, by the keys that they would have."""
    kind = constructor if isinstance(constructor, type) and is_dataclass(constructor) else getattr(constructor, "options", None)
    return {} if kind is None else _by_key(kind, hidden=True)


@functools.cache
def _by_key(kind: Any, hidden: bool) -> dict[str, tuple[str, Option]]:
    return {_key(kind, name, spec): (name, spec) for name, spec in own_options(kind).items() if spec.hidden == hidden}


def _key(kind: Any, name: str, spec: Option) -> str:
    if spec.key:
        return spec.key
    prefix = kind.name if kind.prefix is None else kind.prefix
    return kebab(f"{prefix}-{name}" if prefix else name)


def build(constructor: Callable[..., T], value_of: Callable[[str], Value], **computed: Any) -> T:
    """Call a constructor with the run config's values of its options.

    Args:
        constructor: A dataclass with options, or a function decorated by ``takes``.
        value_of: Returns the run config's value of a key.
        computed: Further arguments, whose values do not come from one key. They take precedence over the run config.

    Returns:
        The constructor's result.
    """
    arguments = dict(computed)
    for key, (name, spec) in options_by_key(constructor).items():
        if name in arguments or (spec.unset is not None and value_of(key) == spec.unset):
            continue
        arguments[name] = value_of(key) if spec.read is None else spec.read(value_of(key))
    return constructor(**arguments)


def keys_of(registry: Mapping[str, object]) -> dict[str, Key]:
    """Return the run-config keys of all constructors of a registry, by name.

    Args:
        registry: Name -> constructor.

    Raises:
        ValueError: Two constructors declare one key with different defaults or allowed values.
    """
    return dict(_keys_of(tuple(registry.items())))


@functools.lru_cache(maxsize=64)  # every run config asks for the keys, and a sweep makes hundreds of run configs
def _keys_of(registry: tuple[tuple[str, object], ...]) -> dict[str, Key]:
    takers: dict[str, dict[str, Option]] = {}
    for name, constructor in registry:
        for key, (_, spec) in options_by_key(constructor).items():
            takers.setdefault(key, {})[name] = spec
    merged_keys = {}
    for key, specs in takers.items():
        keys = {name: spec.as_key(key) for name, spec in specs.items()}
        same_key(*keys.values())
        merged_keys[key] = replace(next(iter(keys.values())), help=_help(specs, everyone=len(specs) == len(registry)))
    return merged_keys


def same_key(*keys: Key) -> None:
    """Check that declarations of one key agree.

    Raises:
        ValueError: Two declarations differ in the default or in the allowed values.
    """
    for other in keys[1:]:
        if (other.default, other.shown) != (keys[0].default, keys[0].shown):
            variants = " and ".join(f"{_shown(key.default)} of {key.shown}" for key in (keys[0], other))
            raise ValueError(f"the run-config key {other.name!r} is declared twice, with different defaults or values: {variants}")


def _help(specs: Mapping[str, Option], everyone: bool) -> str:
    """Return the help text of one key: its meaning for each constructor, without repeating equal meanings.

    Args:
        specs: Name of a constructor -> its option.
        everyone: Whether all constructors of the registry take the key.
    """
    meanings = _grouped((spec.meaning, name) for name, spec in specs.items())
    all_meanings = "; ".join(f"{', '.join(names)}: {text}" for text, names in meanings.items())
    text = next(iter(meanings)) if everyone and len(meanings) == 1 else all_meanings
    left_out = _grouped((spec.left_out, name) for name, spec in specs.items() if spec.unset is not None)
    if not left_out:
        return text
    default = next(iter(left_out)) if len(left_out) == 1 else ", ".join(f"{what} ({', '.join(names)})" for what, names in left_out.items())
    return f"{text}; {_shown(next(iter(specs.values())).unset)}: {default}"


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text, name in pairs:
        groups.setdefault(text, []).append(name)
    return groups


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def kebab(name: str) -> str:
    """Return ``name`` with hyphens in place of underscores."""
    return name.replace("_", "-")
