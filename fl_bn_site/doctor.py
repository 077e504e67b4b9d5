"""Check a machine of a deployment before a run, and say what to repair: ``fl-bn doctor FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

from fl_bn.app.checks import machine
from fl_bn.app.checks.run import run, site_experiment
from fl_bn.support.finding import Finding, guard, guard_each, reason
from fl_bn_site import checks
from fl_bn_site.commands import node_config, of_1_25
from fl_bn_site.folders import FolderError, ServerFolder, SiteFolder, host_port, in_use, read_folder
from fl_bn_site.supervisor import LOCK
from fl_bn_site.verify import verify


def diagnose(folder: Path, overrides: str = "") -> Iterator[Finding]:
    """Check this machine, its folder of the kit, and whether a run could take place here.

    Args:
        folder: The server's folder, or a site's.
        overrides: Keys of the run config, as for ``fl-bn submit``.

    Yields:
        One finding per check. A fault is a finding, too: this function raises nothing.
    """
    yield guard("packages", machine.packages)
    try:
        kit_folder = read_folder(folder)
    except (FolderError, OSError) as error:
        yield Finding("fail", "folder", reason(error), "give the folder kit/server or kit/sites/NAME, or correct that file")
        return
    shared = "one port for sites and operators"
    yield guard("flower", lambda: Finding("ok", "flower", f"a version for deployments{'' if of_1_25() else f', with {shared}'}"))
    findings = _site(kit_folder, overrides) if isinstance(kit_folder, SiteFolder) else _server(kit_folder, overrides)
    yield from guard_each("folder", lambda: findings)


def _site(site: SiteFolder, overrides: str) -> Iterator[Finding]:
    node = node_config(site)
    sys.path[:0] = [folder for folder in site.code if folder not in sys.path]  # as the ClientApp has them
    host, port = host_port(site.superlink)
    yield Finding("ok", "folder", f"{site.path}: site {site.site}")
    yield from guard_each("kit", lambda: verify(site.path))
    yield guard("gpu", lambda: machine.gpu(site.device, "site.toml"))
    yield guard("state-dir", lambda: machine.storage("state-dir", site.state_dir))
    if site.audit is not None:  # else it is in the folder of the gate
        yield guard("audit", lambda: machine.storage("audit", site.audit_log))
    yield guard("policy", lambda: _policy(site.policy))
    running = in_use(site.node_dir / LOCK)
    yield guard("clientappio", lambda: checks.port_free("clientappio", site.clientappio, "clientappio in site.toml", running=running))
    yield guard("proxy", lambda: checks.proxy(host))
    yield from guard_each("superlink", lambda: checks.connection(host, port, site.root_certificates))
    yield from guard_each("run config", lambda: site_experiment(overrides, node))


def _policy(file: Path) -> Finding:
    from fl_bn_site.policy import ANY, Policy, PolicyError

    try:
        policy = Policy.read(file)
    except PolicyError as error:
        return Finding("fail", "policy", str(error), "correct it: until then this site refuses every run")
    lines = {spec.name.replace("_", "-"): getattr(policy, spec.name) for spec in fields(policy)}
    lines["trusted-submitters"] = ", ".join(map(str, policy.trusted_submitters)) or ()
    set_here = [f"{name} = {value}" for name, value in lines.items() if value != getattr(Policy(), name.replace("-", "_"))]
    text = f"{file}: {'; '.join(set_here)}"
    if policy.allow_code == ANY:
        what = f"{text}. The policy is open: whoever holds the server runs any code here, on this site's data"
        return Finding("warn", "policy", what, 'write allow-code = "signed", or allow-code = "installed"')
    return Finding("ok", "policy", text)


def _server(server: ServerFolder, overrides: str) -> Iterator[Finding]:
    yield Finding("ok", "folder", f"{server.path}: the server of {', '.join(server.sites)}")
    yield from guard_each("kit", lambda: verify(server.path))
    yield guard("state", lambda: machine.storage("state", server.state))
    yield guard("results", lambda: machine.storage("results", server.results))
    running = in_use(server.path / LOCK)
    addresses = {"fleet": server.fleet, "exchange-port": f"0.0.0.0:{server.exchange_port}"}
    if of_1_25():  # later, sites reach the fleet and users the control at one port
        addresses |= {"control": server.control, "serverappio": server.serverappio}
        yield guard("exposure", lambda: checks.exposure(server))
    for line, address in addresses.items():
        yield guard(line, partial(checks.port_free, line, address, f"{line} in server.toml", running=running))
    yield guard("superlink name", lambda: checks.resolves(server.superlink))
    yield from guard_each("run config", lambda: _server_run(server, overrides))


def _server_run(server: ServerFolder, overrides: str) -> Iterator[Finding]:
    from fl_bn_site.submit import run_config

    values = run_config(server, overrides)
    if values["clients"] != len(server.sites):
        what = f"the run config has clients={values['clients']}, but server.toml names {len(server.sites)} sites: they would refuse the run"
        yield Finding("fail", "clients", what, "leave clients out of --run-config")
    yield from run(values)
