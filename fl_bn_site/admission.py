"""Refuse runs in the SuperNode, before the site stores, unpacks or imports their packages (Flower's FAB archives).

The SuperNode checks every message by the site's policy. The SuperNode holds the site's key, and runs no code that the server
sends. So the code of a run can change neither the decision nor the files that record accepted signatures.
A refused message gets an error as its answer. The error names the line of the policy that refuses the run.

``supernode.py`` loads this file by its path, since the package around it would import torch.
"""

from __future__ import annotations

import logging
import runpy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "fl_bn"  # the package fl_bn that is installed beside this one
if TYPE_CHECKING or __package__:
    from fl_bn_site import policy as policies
    from fl_bn_site import signing
else:
    policies = runpy.run_path(str(HERE / "policy.py"))["beside"]("policy")
    signing = policies.signing


class Refused(Exception):
    """Signal that a message belongs to a run that the site refuses."""


class Admission:
    """Decide on the runs whose messages reach a site.

    Args:
        policy: The site's policy file.
        accepted: The folder of the files that record which run came with which signature.
    """

    def __init__(self, policy: Path, accepted: Path) -> None:
        self.policy, self.accepted = policy, signing.Accepted(accepted)
        self._decided: dict[int, tuple[Any, Any, Any]] = {}  # run id -> the policy, the record of the run, and the decision on both

    def decide(self, run_id: int, run: Any, package: Callable[[], bytes], now: float | None = None) -> Any:
        """Decide whether a run may take place here. The policy is read anew each time.

        Args:
            run_id: Flower's id of the run, as the message has it.
            run: Flower's record of the run. A record that was asked for again is another one, and is decided on anew.
            package: A function that returns the run's package (FAB archive). It is called only where the policy or the
                record is new, or the signature has expired.
            now: The time, in seconds since 1970; None: the present time.

        Returns:
            The decision (``policy.Decision``).
        """
        now = time.time() if now is None else now
        try:
            policy = policies.Policy.read(self.policy)
            before = self._decided.get(run_id)
            if before and before[0] == policy and before[1] is run and not (before[2].signature and now > before[2].signature.until):
                return before[2]
            decision = policy.decide(run.fab_hash, package(), run.override_config, PACKAGE, now)
            if decision.signature:
                self.accepted.admit(run_id, decision.signature, decision.code)
        except policies.PolicyError as error:
            return policies.Decision("", "", refusal=str(error))
        except signing.NotSigned as error:
            decision = policies.Decision(policy.allow_code, decision.code, refusal=f"{policy.has_code()}, but {error}")
        except OSError as error:
            return policies.Decision("", "", refusal=f"this site cannot write down that it accepted the run: {error}")
        self._decided[run_id] = policy, run, decision
        _log(run_id, decision)
        return decision


def _log(run: int, decision: Any) -> None:
    if decision.refusal:
        logging.getLogger("flwr").warning("run %s is refused: %s", run, decision.refusal)
    else:
        by = f"signed by {decision.signature.submitter}, " if decision.signature else ""
        logging.getLogger("flwr").info("run %s is admitted: %sallow-code = %s, code %s", run, by, decision.allow_code, decision.code)


def refuse_runs(names: dict[str, Any], admission: Admission, fail: Callable[..., None], known: dict[int, Any] | None = None) -> None:
    """Change Flower's main loop of a SuperNode so that every message is checked before Flower stores it.

    Args:
        names: The globals of the module with the main loop.
        admission: Decides on runs.
        fail: Answers the messages of a run with an error: ``supernode.fail``.
        known: A dict with the run of the latest message, replaced at every message: run id -> Flower's record of the run, with
            the hash of the package that came. A refused run is entered, too. None: the caller needs no such dict.
    """
    take_in = names["_pull_and_store_message"]

    def checked(**of: Any) -> int | None:
        state, told = of["state"], list[Any]()

        # Each call asks the server once for a run and its package, so that Flower takes in the same package that was checked.
        @lru_cache
        def get_run(run_id: int) -> Any:
            return state.get_run(run_id) or of["get_run"](run_id)

        @lru_cache
        def get_fab(code: str, run_id: int) -> Any:
            return of["get_fab"](code, run_id)

        def package(run_id: int, run: Any) -> bytes:
            kept = of["ffs"].get(run.fab_hash) if state.get_run(run_id) else None
            content: bytes = kept[0] if kept else get_fab(run.fab_hash, run_id).content
            return content

        def receive() -> Any:
            if (received := of["receive"]()) is None:
                return None
            run_id = received[0].metadata.run_id
            run = get_run(run_id)
            decision = admission.decide(run_id, run, lambda: package(run_id, run))
            if known is not None:
                known.clear()  # a SuperNode works on one message at a time
                known[run_id] = replace(run, fab_hash=decision.code)
            if decision.refusal:
                told[:] = received[0], decision.refusal
                raise Refused
            return received

        try:
            run_id: int | None = take_in(**of | {"receive": receive, "get_run": get_run, "get_fab": get_fab})
        except Refused:
            message, why = told
            state.store_message(message)
            fail(state, message.metadata.run_id, why)
            try:
                of["confirm_message_received"](message.metadata.run_id, message.metadata.message_id)
            except Exception as error:  # the error is sent to the server nevertheless
                logging.getLogger("flwr").warning("the server could not be informed that the message arrived: %s", error)
            run_id = message.metadata.run_id
        return run_id

    names["_pull_and_store_message"] = checked
