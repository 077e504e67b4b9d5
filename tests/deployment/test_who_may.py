"""What docs/who-may-do-what.md forbids is tried."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_bn_site.packages import unpack
from tests.deployment.inner import KitPlan, SiteFolder, create
from tests.deployment.test_signing import package_of

ROOT = Path(__file__).parents[2]
KEY, APP, STRANGER = 21001, 21002, 21003  # users who need no entry anywhere


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A site's folder for two users, below folders that all may enter."""
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        create(KitPlan("127.0.0.1", ["a"]), base / "kit")
        folder = base / "kit/sites/a"
        (folder / "former.key").write_bytes((folder / "site.key").read_bytes())
        for above in (base, base / "kit", base / "kit/sites"):
            above.chmod(0o755)
        subprocess.run(["sh", str(ROOT / "deploy/systemd/site-users.sh"), str(folder), str(KEY), str(APP)], check=True, timeout=60)
        site, code = SiteFolder.read(folder), package_of({"app.py": "x = 1"})
        for name in ("accepted", "audit"):  # what the gate writes
            (site.node_dir / name).mkdir(mode=0o700)
            (site.node_dir / name / "file").write_text("{}")
        unpack(site.packages, code, "").rename(site.packages / "package")
        (site.state_dir / "local-layers").write_text("a site's own")
        for owner, files in ((KEY, (*site.node_dir.rglob("*"), *site.packages.rglob("*"))), (APP, site.state_dir.rglob("*"))):
            for file in files:
                os.chown(file, owner, owner)
        yield folder


def may(user: int, what: str, path: Path) -> bool:
    """Whether ``user`` may ``read``, ``write`` (a file, or a new one in a folder) or ``delete`` ``path``: a process of theirs tries."""
    code = {
        "read": 'cat "$1"',
        "write": 'if [ -d "$1" ]; then : >>"$1/new"; else : >>"$1"; fi',
        "delete": 'mv "$1" "$1.gone" && mv "$1.gone" "$1"',
    }[what]
    done = subprocess.run(
        ["/bin/sh", "-c", code, "sh", str(path)],
        user=user, group=user, extra_groups=[], env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        cwd="/", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0 or "ermission denied" in done.stderr, done.stderr
    return done.returncode == 0


MAY = [  # user, what, path in the site's folder
    (KEY, "read", "site.key"), (APP, "read", "site.toml"), (APP, "read", "policy.toml"), (APP, "write", "state"), (APP, "write", "run"),
    (APP, "read", "state/local-layers"), (APP, "read", "packages/package/app.py"),
    *((KEY, "write", name) for name in ("node", "node/accepted", "node/audit")),
]  # fmt: skip
MAY_NOT = [
    (APP, "read", "site.key"), (APP, "read", "former.key"), (APP, "write", ""), (APP, "write", "node"), (KEY, "read", "state/local-layers"),
    (APP, "write", "submitters"), (APP, "write", "submitters/submitter.pub"),
    *((APP, what, name) for what in ("write", "delete") for name in ("site.toml", "policy.toml", "ca.crt", "site.pub", "start.sh")),
    *((APP, what, name) for what in ("write", "delete") for name in ("packages", "packages/package", "packages/package/app.py")),
    *((APP, what, f"node/{name}") for what in ("read", "write") for name in ("accepted", "accepted/file", "audit", "audit/file")),
    *((STRANGER, "read", name) for name in ("site.key", "site.toml", "policy.toml", "state/local-layers", "packages/package/app.py")),
    (STRANGER, "read", "node/audit/file"), (STRANGER, "write", "run"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="files for three users: needs root")
def test_each_user_may_do_what_the_page_says_and_no_more(folder: Path) -> None:
    """The app reads no key, changes neither who the site is, its policy nor a package, and trusts nobody; the SuperNode reads no state."""
    assert [of for of in MAY if not may(*of[:2], folder / of[2])] == []
    assert [of for of in MAY_NOT if may(*of[:2], folder / of[2])] == []


def test_the_units_give_key_and_app_to_two_users() -> None:
    server, node, app = ((ROOT / f"deploy/systemd/{name}.service").read_text() for name in ("fl-bn-server", "fl-bn-site", "fl-bn-app"))
    assert re.search(r"(?m)^User=fl-bn$[^\0]*--only supernode", node)
    assert re.search(r"(?m)^User=fl-bn-app$[^\0]*--only clientapp", app)
    assert re.search(r"(?m)^InaccessiblePaths=.*site\.key", app)
    assert [re.findall(r"(?m)^ReadWritePaths=(.+)$", unit)[0].replace("/var/lib/fl-bn/site/", "") for unit in (node, app)] == [
        "node packages",
        "state run",
    ]
    for line in ("MemoryMax=", "CPUQuota=", "TasksMax=", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet=\n"):
        assert [f"\n{line}" in unit for unit in (server, node, app)] == [True] * 3, line
