"""Declare options: one line states an option's default, range, meaning and run-config key.

An options class is a frozen dataclass derived from ``Options`` whose fields are
made by ``option``. Making one checks its values. ``takes`` turns a function of an
options class into a constructor with the same arguments:

>>> @dataclass(frozen=True)
... class SmoothingOptions(Options):
...     name: ClassVar[str] = "smoothing"
...     strength: float = option(0.5, "weight of the new value (alpha in the paper)", "(0, 1]")
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

The run config's keys are collected from registries, dicts from name to constructor
such as ``METHODS``, and from the parts that every run has, such as local training
(``fl_bn.app.run_keys.VALUES``).

A constructor's default is neutral, such as a decay of 1. A run config's default is
chosen to train well. If the two differ, ``option(..., run=...)`` states the run
config's default:

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
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

from fl_bn.support.names import expected, names_of, nearest, short, visible

Value = str | int | float | bool
LARGEST = 3.4e38  # the largest number of float32, rounded down
OPTION = "option"  # the key under which a dataclass field's metadata hold its ``Option``
REQUIRED = MISSING  # an option's default that says: the constructor has no default, only the run config has one
P = ParamSpec("P")
T = TypeVar("T")
Chosen = TypeVar("Chosen", bound="Options")


Fits = Mapping[str, tuple[Callable[[Any], object], str]]
"""Name -> whether a value fits, and the fitting values in words."""


def refuse(*rules: tuple[object, str]) -> None:
    """Check rules in order. The first that applies raises ``ValueError`` with its sentence.

    >>> refuse((1 > 2, "one is too many"), (2 > 1, "two are too many"))
    Traceback (most recent call last):
    ValueError: two are too many
    """
    for applies, sentence in rules:
        if applies:
            raise ValueError(sentence)


def is_a(kind: Any, such: str) -> tuple[Callable[[Any], object], str]:
    """Return the entry of a ``Fits`` table for objects of ``kind``, with an example."""
    return lambda value: isinstance(value, kind), f"an object such as {such}"


def check_fits(table: Fits, given: Mapping[str, Any], whose: str = "", others: str = "") -> None:
    """Raise ``ValueError`` unless each value in ``given`` (name -> value) fits ``table``.

    ``whose`` follows the name, such as " of client 3". ``others`` are other fitting
    values in words.
    """
    for name, value in given.items():
        fits, wanted = table[name]
        if not fits(value):
            raise ValueError(f"{name}{whose} must be {wanted}{others}, but got {short(value)}".replace("\n", " "))


@dataclass(frozen=True)
class Used:
    """Name what an option belongs to. Without it, setting the option is an error.

    Attributes:
        owner: The words after "belongs to", such as "method='fixbn'".
        holds: Returns whether a run config, whose values it reads by key, has the
            owner.
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


def in_config(value: Value) -> str:
    """Return ``value`` as it is written in a run config.

    >>> in_config("fbn"), in_config(True), in_config(0.1)
    ("'fbn'", 'true', '0.1')
    """
    return repr(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value:g}"


def range_of(text: str) -> Callable[[Any], bool]:
    """Return a function that tells whether a number is finite and within the range ``text``.

    The text is ``>= 1``, ``> 0``, ``0..9`` (with both ends), ``(0, 1]``, a single
    number, or several of these with ``or``: ``0 or >= 2``. Another text raises
    ``ValueError``.
    """
    tests = [_interval(part, text) for part in text.split(" or ")]
    return lambda value: -LARGEST <= value <= LARGEST and any(test(value) for test in tests)


def _interval(part: str, text: str) -> Callable[[Any], bool]:
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    if not re.fullmatch(rf">=? {number}|{number}(\.\.{number})?|[(\[]{number}, {number}[)\]]", part):
        raise ValueError(f"a range must be like '>= 1', '> 0', '0..9', '(0, 1]' or '0 or >= 2', but is {text!r}")
    ends = [float(end) for end in re.findall(number, part)]
    low, high = ends[0], math.inf if part[0] == ">" else ends[-1]
    without = {low} if part.startswith(("> ", "(")) else set()
    without |= {high} if part.endswith(")") else set()
    return lambda value: low <= value <= high and value not in without


@dataclass(frozen=True)
class Option:
    """Declare one option: a field of an options class, and its key in the run config.

    Attributes:
        name: The run-config key.
        default: The run config's default, of the key's type.
        neutral: The constructor's default.
        help: The meaning. That of a special value comes last, after a semicolon.
        values: For a number, its range. For a text, the allowed names or texts.
        accepts: Returns False, or raises a ValueError, for a value of the right
            type that is not allowed.
        unset: The key's value that selects the constructor's default, such as -1
            for None.
        like: Names that may occur in a text, the nearest of which an error
            suggests.
        used: What the option belongs to, beside its class. None: nothing else.
        read: Converts the key's value to the field's value. None: they are the
            same.
        hidden: Whether it is an argument in Python alone, with a key only if a
            run's ``setup`` declares one.
    """

    name: str
    default: Any
    help: str
    values: str | Collection[str]
    accepts: Callable[[Any], object]
    neutral: Any
    unset: Value | None = None
    like: Collection[str] = ()
    used: Used | None = None
    read: Callable[[Any], Any] | None = None
    hidden: bool = False
    field: str = ""

    @property
    def shown(self) -> str:
        """Return the key's allowed values in words."""
        values = self.values if isinstance(self.values, str) else ", ".join(self.values)
        return values if self.unset is None else f"{_shown(self.unset)} or {values}"

    def allows(self, value: Any) -> bool:
        """Return whether a value of the right type is allowed."""
        try:
            return self.accepts(value) is not False
        except ValueError:
            return False

    def check(self, value: Any, called: str = "") -> Value:
        """Return a value in the key's type. Errors name it ``called``, or its key.

        Raises:
            ValueError: The value is of another type, out of range, or cannot be
                written to a file or sent.
        """
        called, kind = called or self.name, type(self.default)
        if not isinstance(value, {int: Integral, float: Real}.get(kind, kind)) or isinstance(value, bool) is not (kind is bool):
            raise ValueError(f"{called} must be of type {kind.__name__}, but got {short(value)}")
        if (kind is int and not -(2**63) <= value < 2**63) or (kind is str and not visible(value)):
            wanted = "a whole number of at most 63 bits" if kind is int else "a text without control or invisible characters"
            raise ValueError(f"{called} must be {wanted}, but got {short(value)}")
        if value == self.unset or self.allows(value):
            return cast(Value, kind(value))
        if not isinstance(self.values, str):
            raise ValueError(expected(called, value, self.values))
        wrong = next((part for part in names_of(value) if part not in self.like), "") if kind is str else ""
        inside = "in " if self.shown[0] in "([" else ""
        raise ValueError(f"{called} must be {inside}{self.shown}, but got {short(value)}{nearest(wrong, self.like)}")


def option(
    neutral: Any,
    help: str,
    values: str | Collection[str] = "",
    check: Callable[[Any], object] | None = None,
    *,
    key: str = "",
    run: Value | None = None,
    unset: Value | None = None,
    **more: Any,
) -> Any:
    """Declare a field of an options class.

    Args:
        neutral: The constructor's default. ``REQUIRED``: none. A class, such as
            ``dict``: its constructor makes the default anew for each object.
        help: The meaning of the option.
        values: For a number, its range (``range_of``). For a text, the allowed
            names or texts.
        check: Returns False, or raises a ValueError, for a value that is not
            allowed. None: ``values`` decides, or ``read``.
        key: The run-config key. Default: the class's prefix and the field's name.
        run: The run config's default. None: ``unset``, or the constructor's
            default.
        unset: The key's value that selects the constructor's default.
        more: The other attributes of ``Option``, by name.
    """
    default = next(value for value in (run, unset, neutral) if value is not None)
    if check is None and not isinstance(values, str):
        check = values.__contains__
    elif check is None and type(default) in (int, float):
        check = range_of(cast(str, values))
    values = "true, false" if type(default) is bool else values
    return _field(Option(key, default, help, values, check or more.get("read") or (lambda value: True), neutral, unset, **more))


def _field(spec: Option) -> Any:
    if isinstance(spec.neutral, type):
        return field(default_factory=spec.neutral, metadata={OPTION: spec})
    return field(default=spec.neutral, metadata={OPTION: spec})


def declared(kind: type, name: str, neutral: Any = REQUIRED, read: Callable[[Any], Any] | None = None) -> Any:
    """Return a dataclass field for the option ``name`` of the class ``kind``.

    ``neutral`` is its constructor's default, by default the run config's. ``read``
    converts the key's value.
    """
    spec = own_options(kind)[name]
    if neutral is REQUIRED:
        return _field(replace(spec, neutral=spec.default, hidden=False))
    return _field(replace(spec, neutral=neutral, read=read))


class Options:
    """Serve as the base of options classes. Making an object checks its options' values.

    Attributes:
        name: The name of the method or part that has the options, in errors.
        prefix: The beginning of the options' keys. None: the name.
    """

    name: ClassVar[str] = ""
    prefix: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for name, spec in own_options(cast(Any, type(self))).items():
            value = getattr(self, name)
            if spec.read is not None:
                continue  # the class checks the field's value
            if spec.unset is not None and spec.neutral is not REQUIRED and (value is None or value == spec.unset):
                object.__setattr__(self, name, spec.neutral)
            elif value is not None or spec.neutral is not None:
                spec.check(value, f"{self.name}'s {name}")


@functools.cache
def own_options(kind: type) -> dict[str, Option]:
    """Return the options of a dataclass, by the names of their fields."""
    prefix = getattr(kind, "prefix", "")
    prefix = getattr(kind, "name", "") if prefix is None else prefix
    options = {one.name: one.metadata[OPTION] for one in fields(cast(Any, kind)) if OPTION in one.metadata}
    return {
        name: replace(spec, name=spec.name or kebab(f"{prefix}-{name}" if prefix else name), field=name) for name, spec in options.items()
    }


def takes(options: Callable[P, Chosen]) -> Callable[[Callable[[Chosen], T]], Callable[P, T]]:
    """Return a decorator for a function that takes one object of the class ``options``.

    The decorated function takes the object's fields instead. So
    ``@takes(FixBNOptions)`` on ``fixbn(options)`` lets users write
    ``fixbn(freeze_after=3)``.
    """

    def decorate(build: Callable[[Chosen], T]) -> Callable[P, T]:
        @functools.wraps(build)
        def constructor(*args: P.args, **kwargs: P.kwargs) -> T:
            return build(options(*args, **kwargs))

        constructor.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
        constructor.options = options  # type: ignore[attr-defined]
        return constructor

    return decorate


def options_by_key(constructor: object, hidden: bool = False) -> dict[str, Option]:
    """Return a constructor's options by run-config keys, or with ``hidden`` the hidden ones."""
    kind = constructor if isinstance(constructor, type) and is_dataclass(constructor) else getattr(constructor, "options", None)
    return {} if kind is None else _by_key(kind, hidden)


@functools.cache
def _by_key(kind: Any, hidden: bool) -> dict[str, Option]:
    return {spec.name: spec for spec in own_options(kind).values() if spec.hidden == hidden}


def build(constructor: Callable[..., T], value_of: Callable[[str], Value], **computed: Any) -> T:
    """Call a constructor with the run config's values, which ``value_of`` returns by key.

    ``computed`` are arguments that do not come from one key. They take precedence.
    """
    arguments = dict(computed)
    for key, spec in options_by_key(constructor).items():
        if spec.field not in arguments:
            arguments[spec.field] = value_of(key) if spec.read is None else spec.read(value_of(key))
    return constructor(**arguments)


def keys_of(registry: Mapping[str, object]) -> dict[str, Option]:
    """Return the run-config keys of a registry's constructors (name -> constructor).

    If they mean different things, the help says which means what. If their defaults
    or allowed values differ, ``ValueError`` is raised.
    """
    return dict(_keys_of(tuple(registry.items())))


@functools.lru_cache(maxsize=64)  # every run config asks for the keys, and a sweep makes hundreds of run configs
def _keys_of(registry: tuple[tuple[str, object], ...]) -> dict[str, Option]:
    takers: dict[str, dict[str, Option]] = {}
    for name, constructor in registry:
        for key, spec in options_by_key(constructor).items():
            takers.setdefault(key, {})[name] = spec
    merged: dict[str, Option] = {}
    for key, specs in takers.items():
        meanings: dict[str, list[str]] = {}
        for name, spec in specs.items():
            same_key(merged.setdefault(key, spec), spec)
            meanings.setdefault(spec.help, []).append(name)
        if len(meanings) > 1 or len(specs) < len(registry):
            text = "; ".join(f"{', '.join(names)}: {meaning}" for meaning, names in meanings.items())
            merged[key] = replace(merged[key], help=text)
    return merged


def same_key(one: Option, other: Option) -> None:
    """Raise ``ValueError`` unless two options of one key have one default and allowed values."""
    if (other.default, other.shown) != (one.default, one.shown):
        variants = " and ".join(f"{_shown(spec.default)} of {spec.shown}" for spec in (one, other))
        raise ValueError(f"the run-config key {other.name!r} is declared twice, with different defaults or values: {variants}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def kebab(name: str) -> str:
    """Return ``name`` with hyphens in place of underscores."""
    return name.replace("_", "-")
