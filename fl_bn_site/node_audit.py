"""Write the SuperNode's own audit log: one line for each message that the SuperNode itself answers with an error.

The site's audit log belongs to the user of the ClientApp, and the SuperNode can neither read nor change it. So the
SuperNode has a log of its own, in the same form, which the ClientApp can neither read nor change.

``supernode.py`` runs this file by its path, since the package around it would import torch.
"""

from __future__ import annotations

import logging
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
if TYPE_CHECKING or __package__:
    from fl_bn_site import audit, leaving
else:
    beside = runpy.run_path(str(HERE / "policy.py"))["beside"]
    audit, leaving = beside("audit"), beside("leaving")

BY = "supernode"  # the field ``by`` of each line
REFUSAL = "<class 'fl_bn_site.policy.NotAllowed'>"  # begins the error of a run that the policy refuses


def write_errors(names: dict[str, Any], folder: Path, run_of: Callable[[Any, int], Any]) -> None:
    """Change Flower's SuperNode so that it logs each error that it makes itself, before the error can leave.

    Where the line of the log cannot be written, the SuperNode sends an error about that instead.

    Args:
        names: The globals of the module with Flower's main loop. All errors of the SuperNode go through its
            ``_insert_message``.
        folder: The folder of the log.
        run_of: A function of the SuperNode's state and a run's id. It returns Flower's record of the run; None: not known.
    """
    insert, asked_once = names["_insert_message"], names["ErrorCode"].CLIENT_APP_RAISED_EXCEPTION  # the server does not ask again

    def inserted(reply: Any, state: Any, store: Any) -> None:
        try:
            audit.append(folder, line_of(reply, run_of(state, reply.metadata.run_id)))
        except audit.AuditError as error:
            logging.getLogger("flwr").error("%s", error)
            reply.error.__dict__.update(_code=asked_once, _reason=f"{type(error)}:<'{error}'>")
        insert(reply, state, store)

    names["_insert_message"] = inserted


def line_of(reply: Any, run: Any) -> dict[str, Any]:
    """Return the fields of the line about an error that the SuperNode sends in place of an answer.

    Args:
        reply: Flower's message with the error.
        run: Flower's record of the run; None: not known.
    """
    asks, config = reply.metadata, getattr(run, "override_config", None) or {}
    refused = str(reply.error.reason or "").startswith(REFUSAL)
    return {
        "run": str(asks.run_id),
        "name": leaving.text(config.get("name") or None),
        "submitter": None,
        "code": getattr(run, "fab_hash", None) or None,
        "message": leaving.text(asks.message_type),
        "id": asks.reply_to_message_id,
        "round": int(asks.group_id) if asks.group_id.isdecimal() else None,
        "method": leaving.text(config.get("method")),
        **leaving.answered(asks.message_type, reply, "refused" if refused else "failed"),
        "by": BY,
    }
