"""Rehearse an operator's daily troubles on a real federation: removed and outdated sites, clocks, certificates, disks, queues.

A drill causes one trouble on purpose. It passes if the final model is, bit for bit, that of a run in one process in
which exactly the same replies were missing. Besides, a message must inform the person who has to act. Messages must
name sites, not Flower's node numbers.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from fl_bn_site.certificates import read_certificate
from fl_bn_site.folders import ServerFolder
from fl_bn_site.runs import list_runs
from fl_bn_site.status import status
from tests.deployment.federation import FL_BN, ROOT, Federation, wait_until
from tests.deployment.tls_servers import reissue
from tools.deployment.drills import Running, drained, filled, rounds_done, starts
from tools.deployment.outcomes import Case, Outcome, compare_all, compare_with_gaps

SKEW = 300  # seconds


def site_removed(case: Case) -> Outcome:
    """Add a third site, and remove it at a random moment of a FedBN run.

    The removed site must get no further message. The other sites must finish the run.
    """
    federation, guest = case.federation, f"north-{case.repetition}"
    with _guest(federation, guest):
        config = case.config("fedbn", name=f"removed-{case.repetition}", rounds=8, **{"retry-timeout": 10.0})
        with (running := Running(case, config, until=4)) as (run, moment):
            outcome = Outcome("a site removed in mid-round", case.repetition, "fedbn", moment, f"site {guest} removed")
            said = federation.membership("remove-site", guest)
            time.sleep(1.0)  # a message may have been on its way
            before = _received(federation, guest)
            outcome.what += _end(run.wait(600))
        more = _received(federation, guest) - before
        outcome.expect("the removal is said by name", f"{guest}: shut out" in said)
        outcome.expect(f"{guest} gets nothing more (it got {more} messages)", not more)
        outcome.expect("the server names who is lost", f"site {guest} is lost" in "".join(running.said) or not _gaps(running.said))
        compare_with_gaps(case, config, outcome)
    outcome.expect_names(running.said)
    return outcome


def certificate_expires(case: Case) -> Outcome:
    """Let the server's certificate expire at a random moment of a run, and renew it: during the run, or after it.

    The running server must use the new certificate without a new start by hand. The run must not need ``fl-bn resume``.
    """
    federation, method = case.federation, ("fedbn", "hbn")[case.repetition % 2]
    server = federation.kit / "server"
    config = case.config(method, name=f"expired-{case.repetition}", rounds=50, **{"checkpoint-every": 1})
    model = federation.result(config["name"]) / "model.safetensors"
    federation.stop("server")
    lasts = case.rng.uniform(60.0, 90.0)
    reissue(federation.kit, ["127.0.0.1"], ends=lasts / 86400)
    offline = (federation.kit / "authority").rename(federation.kit / "offline")  # else `fl-bn start` renews the certificate by itself
    ends = read_certificate(server / "server.crt").not_valid_after_utc
    federation.start("server")
    _online(federation, *federation.sites)
    said: list[str] = []
    run = federation.submit(config)
    thread = drained(run, said)
    try:
        wait_until("the certificate ends", lambda: datetime.now(UTC) > ends, 180)
        time.sleep(1.0)
        done = rounds_done(case, config)
        outcome = Outcome("certificate expiring in mid-run", case.repetition, method, f"{done} rounds done")
        if run.poll() is not None:
            raise RuntimeError(f"the run ended before the certificate did:\n{''.join(said)}")
        asked = _command("status", str(server))
        outcome.expect("status says that the certificate has expired", "expired" in asked)
        outcome.expect("a start is refused", "expired" in _command("start", str(server)))
        if case.rng.random() < 0.5:
            outcome.what = "renewed in mid-run, the server took the new certificate, and the run went on by itself"
            time.sleep(case.rng.uniform(0.0, 5.0))
        else:
            wait_until("the last round", model.exists, 300)
            outcome.what = "the run ended by itself, renewed afterwards"
        outcome.expect("renew says until when", "is valid for" in _command("kit", "renew", str(server), "--authority", str(offline)))
        _online(federation, *federation.sites)
        wait_until("the last round", model.exists, 300)
        run.wait(120)
    finally:
        offline.rename(federation.kit / "authority")
        run.kill()
        run.wait()
        thread.join(5)
    outcome.expect("submit ends and says what to do", "fl-bn resume" in "".join(said) or "finished:completed" in "".join(said))
    compare_with_gaps(case, config, outcome)
    outcome.expect_names(said)
    return outcome


def two_at_once(case: Case) -> Outcome:
    """Submit two runs within 1.5 s. A run of FedBN and one of HBN run one after the other; two of FedTAN may run side by side."""
    beside = case.repetition % 2 == 1
    method, other = ("fedtan", "fedtan") if beside else ("fedbn", "hbn")
    one = case.config(method, name=f"one-{case.repetition}")
    two = case.config(other, name=f"two-{case.repetition}", seed=case.repetition + 1)
    configs = [one, two]
    case.rng.shuffle(configs)
    pause = case.rng.uniform(0.0, 1.5) if case.rng.random() < 0.5 else 0.0
    outcome = Outcome("two runs submitted at once", case.repetition, f"{method}, {other}", f"{pause:.1f} s between them")
    said: list[list[str]] = [[], []]
    processes, threads = [], []
    try:
        for config, lines in zip(configs, said, strict=True):
            processes.append(case.federation.submit(config, *(("--parallel", "2") if beside else ())))
            threads.append(drained(processes[-1], lines))
            time.sleep(pause)
        codes = [process.wait(900) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join(5)
    outcome.what = ("beside each other" if beside else "one after the other") + "".join(map(_end, codes))
    waited = [lines for lines in said if any(" waits: " in line for line in lines)]
    if not beside:
        outcome.expect("one waits, and says for whom", len(waited) == 1)
    ports = {case.federation.exchange + n for n in range(4)} & {_port(lines) for lines in said}
    if beside and not waited:
        outcome.expect("each has a port of its own", len(ports) == 2)
    compare_all(case, configs, outcome)
    outcome.expect_names(said[0] + said[1])
    return outcome


def disk_full_under_the_state(case: Case) -> Outcome:
    """Fill the disk with the state of the SuperLink and of the queue, while one run trains and another waits."""
    federation = case.federation
    server = federation.kit / "server"
    first = case.config("fedbn", name=f"first-{case.repetition}", rounds=8)
    second = case.config("fedbn", name=f"second-{case.repetition}", seed=case.repetition + 1)
    outcome = Outcome("disk full under the queue's state", case.repetition, "fedbn", "")
    waiting: subprocess.Popen[str] | None = None
    try:
        with (running := Running(case, first, until=4)) as (run, outcome.moment):
            waiting, lines = federation.submit(second), list[str]()
            thread = drained(waiting, lines)
            wait_until("it waits", lambda: any(" waits: " in line for line in lines) or run.poll() is not None, 120)
            with filled(server / "state"):
                third = _command("submit", str(server), "--run-config", "name='third' rounds=1", timeout=120)
                time.sleep(case.rng.uniform(0.0, 15.0))
            outcome.expect("a submit is refused and says why", "make room on that disk" in third)
            code = run.wait(600)
        outcome.what = f"first{_end(code)}"
        if code:
            outcome.expect("what to type is said", any("fl-bn resume" in line or "Begin it anew" in line for line in running.said))
            _command("resume", str(server), first["name"], timeout=900)
            outcome.what += ", resumed"
        code = waiting.wait(900)
        outcome.what += f"; second waited, and started by itself{_end(code)}"
        thread.join(5)
    finally:
        if waiting is not None:
            waiting.kill()
            waiting.wait()
    outcome.expect("nothing of the refused one is left", "third" not in {run.name for run in list_runs(ServerFolder.read(server))})
    compare_all(case, [first, second], outcome)
    outcome.expect_names(running.said + lines)
    return outcome


def clock_skew(case: Case) -> Outcome:
    """Stop a site during a run, and start it again with a wrong clock; correct the clock later.

    The clock is five minutes ahead, which Flower refuses, or five minutes behind. Only the clock that the site's Python
    processes read is wrong (``skewed/sitecustomize.py``). TLS reads the true clock.
    """
    ahead = case.rng.random() < 0.7
    config = case.config("fedbn", name=f"skew-{case.repetition}", rounds=8, **{"retry-timeout": 20.0})
    clock = {"PYTHONPATH": f"{Path(__file__).with_name('skewed')}:{ROOT}", "FL_BN_SKEW": str(SKEW if ahead else -SKEW)}
    site, federation = case.rng.choice(case.federation.sites), case.federation
    with (running := Running(case, config, until=4)) as (run, moment):
        outcome = Outcome("clock skew of five minutes", case.repetition, "fedbn", moment)
        outcome.what = f"site {site} {'ahead' if ahead else 'behind'}"
        with _changed(federation, site, clock):
            words = "Invalid timestamp" if ahead else "SuperNode ID"
            before = federation.log(f"sites/{site}", "supernode").count(words)
            federation.start(f"sites/{site}")
            wait_until(f"site {site}: {words}", lambda: federation.log(f"sites/{site}", "supernode").count(words) > before, 120)
            if ahead:
                hinted = federation.log(f"sites/{site}", "fl-bn")
                outcome.expect("the site is told that its clock is wrong", "clock" in hinted.lower())
            time.sleep(case.rng.uniform(0.0, 10.0))
        outcome.what += _end(run.wait(600))
    compare_with_gaps(case, config, outcome)
    outcome.expect_names(running.said)
    return outcome


def old_version(case: Case) -> Outcome:
    """Stop a site during a run, and start it again with an old version of fl-bn.

    The server must name the site and refuse it. It must accept the site again once the site has the server's version.
    """
    config = case.config("fedbn", name=f"version-{case.repetition}", rounds=20, **{"retry-timeout": 40.0})  # time for the site to come back
    site, federation = case.rng.choice(case.federation.sites), case.federation
    packages = case.folder / "old-version"
    (packages / "fl_bn-0.0.9.dist-info").mkdir(parents=True, exist_ok=True)
    (packages / "fl_bn-0.0.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: fl-bn\nVersion: 0.0.9\n")
    with (running := Running(case, config, until=4)) as (run, moment):
        outcome = Outcome("a site that comes back with an old version", case.repetition, "fedbn", moment, f"site {site}")
        with _changed(federation, site, {"PYTHONPATH": f"{packages}:{ROOT}"}):
            federation.start(f"sites/{site}")
            refused = re.compile(rf"site {site}('s reply is not used| refused): .* has fl-bn 0\.0\.9, and the server \d")
            wait_until("it is refused", lambda: any(map(refused.search, running.said)) or run.poll() is not None, 240)
            outcome.expect("it is refused by name, and both versions are named", any(map(refused.search, running.said)))
        outcome.what += _end(run.wait(600))
    compare_with_gaps(case, config, outcome)
    outcome.expect_names(running.said)
    return outcome


DAILY: dict[str, Callable[[Case], Outcome]] = {
    "removed": site_removed,
    "expired": certificate_expires,
    "two": two_at_once,
    "state-disk": disk_full_under_the_state,
    "skew": clock_skew,
    "version": old_version,
}


@contextmanager
def _guest(federation: Federation, name: str) -> Iterator[None]:
    """Add the site ``name`` to the federation for the ``with`` block. Remove it afterwards, unless the drill removed it already."""
    federation.add_site(name)
    federation.sites.append(name)
    try:
        yield
    finally:
        federation.sites.remove(name)
        federation.stop(f"sites/{name}")
        with suppress(AssertionError):  # the drill has removed it
            federation.membership("remove-site", name)


@contextmanager
def _changed(federation: Federation, site: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Stop ``site``, and add ``environment`` to its environment variables for the ``with`` block, which may start it.

    Afterwards, start the site with its usual variables, and wait until it is connected again.
    """
    part = f"sites/{site}"
    usual = federation.environment[part]
    federation.stop(part)
    federation.environment[part] = {**usual, **environment}
    try:
        yield
    finally:
        federation.environment[part] = usual
        federation.stop(part)
        before = len(starts(federation, site))
        federation.start(part)
        wait_until(f"site {site} is back", lambda: len(starts(federation, site)) > before, 180)


def _online(federation: Federation, *sites: str) -> None:
    """Wait until ``fl-bn status`` reports that all ``sites`` are online."""
    server = ServerFolder.read(federation.kit / "server")

    def here() -> bool:
        try:
            return {site.name for site in status(server).sites if site.state == "online"} >= set(sites)
        except Exception:  # the SuperLink is starting
            return False

    wait_until(f"{', '.join(sites)} are online", here, 180, pause=2.0)


def _command(*words: str, timeout: float = 180.0) -> str:
    """Run ``fl-bn WORDS``, and return its standard output and error. The exit code is not checked."""
    done = subprocess.run([*FL_BN, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    return done.stdout + done.stderr


def _received(federation: Federation, site: str) -> int:
    return federation.log(f"sites/{site}", "supernode").count("Receiving: ")


def _gaps(lines: list[str]) -> bool:
    return any(" is lost" in line for line in lines)


def _port(lines: list[str]) -> int:
    found = re.search(r"exchange: listening on \S+:(\d+)", "".join(lines))
    return int(found[1]) if found else 0


def _end(code: int) -> str:
    return "; run completed" if code == 0 else f"; run failed ({code})"
