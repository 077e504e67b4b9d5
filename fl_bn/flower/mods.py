"""Refuse ClientApps that cannot work with an fl-bn strategy: those with some of Flower's mods, or with a ``client_fn``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.clientapp import ClientApp

from fl_bn.flower.compat import has_client_fn, mods_around, mods_of, names_in_flower

NOISE = (
    "for noise take fl-bn's own application with secure-aggregation=true and dp-noise (docs/privacy.md), or opacus in your training loop "
    "(docs/how-to/opacus.md)"
)
SUMS = "for secure sums take fl-bn's own application with secure-aggregation=true (docs/privacy.md)"
ONE_RECORD = "it clips a reply as one record with all of the model's arrays, but fl-bn's replies have several records with shared tensors"
WORKFLOW = "it waits for the SecAgg+ workflow of Flower's older API, which no strategy of fl-bn starts"
CLIENT_FN = (
    "a ClientApp with a client_fn answers no question of an fl-bn strategy: write legacy_client_app(client_fn, method) in its place, or "
    "make it ClientApp(), call answer(app, ...), and use training(...) in @app.train() (docs/start/flower-app.md)"
)
CANNOT = "cannot be a mod of this app"
REFUSED = {
    "fixedclipping_mod": f"{ONE_RECORD}; {NOISE}",
    "adaptiveclipping_mod": f"{ONE_RECORD}; {NOISE}",
    "LocalDpMod": f"{ONE_RECORD}; {NOISE}",
    "secaggplus_mod": f"{WORKFLOW}; {SUMS}",
    "secagg_mod": f"{WORKFLOW}; {SUMS}",
}
"""Name of a refused mod of Flower's -> why it is refused, and what to use instead."""


def refused_name(mod: Any) -> str:
    """Return Flower's name of a mod that is refused; empty for any other mod."""
    named = names_in_flower(getattr(mod, "func", mod))  # functools.partial
    return next((name for name in named if name in REFUSED), "")


def allowed(mods: Iterable[Any]) -> list[Any]:
    """Return those of ``mods`` that are not refused."""
    return [mod for mod in mods if not refused_name(mod)]


def check_handlers(app: ClientApp) -> None:
    """Check that message handlers can be registered with ``app``.

    Raises:
        ValueError: the app was made with a ``client_fn``.
    """
    if has_client_fn(app):
        raise ValueError(CLIENT_FN)


def check_mods(app: ClientApp) -> None:
    """Check that an app and its train and evaluate handlers have no mod that cannot work with fl-bn.

    Raises:
        ValueError: they have such a mod. The message names it.
    """
    mods = [*mods_of(app), *mods_around(app, "train.default"), *mods_around(app, "evaluate.default")]
    if names := [name for mod in mods if (name := refused_name(mod))]:
        raise ValueError(about(names[0]))


def about(name: str) -> str:
    """Return the error message that refuses the mod called ``name``."""
    return f"{name} {CANNOT}: {REFUSED[name]}"


def named_in(why: str) -> str:
    """Find out whether a refused mod or a ``client_fn`` caused a client's error.

    A user's own mod can call a refused mod. ``check_mods`` cannot see this, but the error of the refused mod contains its name.

    Args:
        why: the client's error.

    Returns:
        The message that refuses the mod or the ``client_fn``; empty: the error has another cause.
    """
    if "Invalid message type: query" in why:
        return CLIENT_FN
    return next((about(name) for name in REFUSED if any(f"{name} {words}" in why for words in (CANNOT, "expects", "requires"))), "")
