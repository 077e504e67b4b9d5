"""What docs/who-may-do-what.md forbids is tried."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_bn_site.packages import Packages
from tests.deployment.inner import KitPlan, SiteFolder, commands, create
from tests.deployment.test_signing import package_of

ROOT = Path(__file__).parents[2]
KEY, APP, STRANGER = 21001, 21002, 21003  # users who need no entry anywhere
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="files for three users: needs root")


# Files of a site without containers


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """A site's folder for two users, below folders that all may enter."""
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        create(KitPlan("127.0.0.1", ["a"]), base / "kit")
        folder = base / "kit/sites/a"
        for above in (base, base / "kit", base / "kit/sites"):
            above.chmod(0o755)
        script = ROOT / "deploy/systemd/site-users.sh"
        subprocess.run(["sh", str(script), str(folder), str(KEY), str(APP)], check=True, timeout=60)
        (folder / "state/local-layers").write_text("a site's own")
        os.chown(folder / "state/local-layers", APP, APP)
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
    (KEY, "read", "site.key"), (APP, "read", "site.toml"), (APP, "read", "policy.toml"), (APP, "write", "state"),
    (APP, "read", "state/local-layers"), (KEY, "write", "node"),
]  # fmt: skip
MAY_NOT = [
    (APP, "read", "site.key"), (APP, "write", ""), (APP, "write", "node"), (KEY, "read", "state/local-layers"),
    (APP, "write", "submitters"), (APP, "write", "submitters/submitter.pub"),
    *((APP, what, name) for what in ("write", "delete") for name in ("site.toml", "policy.toml", "ca.crt", "site.pub", "start.sh")),
    *((STRANGER, "read", name) for name in ("site.key", "site.toml", "policy.toml", "state/local-layers")),
]  # fmt: skip


@root_only
def test_each_user_may_do_what_the_page_says_and_no_more(site: Path) -> None:
    """The app reads no key, changes neither who the site is nor its policy, and trusts nobody; the SuperNode reads no state."""
    assert [of for of in MAY if not may(*of[:2], site / of[2])] == []
    assert [of for of in MAY_NOT if may(*of[:2], site / of[2])] == []


@root_only
@pytest.mark.parametrize("name", ["accepted", "audit"])
def test_the_app_does_not_reach_what_the_gate_writes(site: Path, name: str) -> None:
    folder = SiteFolder.read(site).node_dir / name
    folder.mkdir(mode=0o700)
    (folder / "file").write_text("{}")
    for path in (folder, folder / "file"):
        os.chown(path, KEY, KEY)
    assert not any(may(APP, what, path) for what in ("read", "write") for path in (folder, folder / "file"))
    assert may(KEY, "write", folder)
    assert not may(STRANGER, "read", folder / "file")


@root_only
def test_the_app_reads_packages_and_changes_none(site: Path) -> None:
    folder = SiteFolder.read(site)
    package = Packages(folder.packages).unpack(package_of({"app.py": "x = 1"}), "")
    for path in (package, package / "app.py"):
        os.chown(path, KEY, KEY)
    assert may(APP, "read", package / "app.py")
    for path in (folder.packages, package, package / "app.py"):
        assert not may(APP, "write", path), path
        assert not may(APP, "delete", path), path
    assert not may(STRANGER, "read", package / "app.py")
    assert may(APP, "write", folder.apps_socket.parent)
    assert not may(STRANGER, "write", folder.apps_socket.parent)


def test_the_app_is_not_told_where_the_key_is(tmp_path: Path) -> None:
    create(KitPlan("127.0.0.1", ["a"]), tmp_path / "kit")
    folder = SiteFolder.read(tmp_path / "kit/sites/a")
    (node,), (app,) = commands(folder, "supernode"), commands(folder, "clientapp")
    assert (str(folder.private_key) in str(node), str(folder.private_key) in str(app)) == (True, False)
    with pytest.raises(ValueError, match="--only"):
        commands(folder, "serverapp")


def test_the_units_give_key_and_app_to_two_users() -> None:
    node, app = ((ROOT / f"deploy/systemd/{name}.service").read_text() for name in ("fl-bn-site", "fl-bn-app"))
    assert re.findall(r"(?m)^User=(.+)$", node + app) == ["fl-bn", "fl-bn-app"]
    assert re.search(r"(?m)^InaccessiblePaths=.*site\.key", app)
    assert re.findall(r"(?m)^ReadWritePaths=(.+)$", node + app) == [
        "/var/lib/fl-bn/site/node /var/lib/fl-bn/site/packages",
        "/var/lib/fl-bn/site/state /var/lib/fl-bn/site/run",
    ]
    assert ("--only supernode" in node, "--only clientapp" in app) == (True, True)
    for unit in (node, app, (ROOT / "deploy/systemd/fl-bn-server.service").read_text()):
        for line in ("MemoryMax", "CPUQuota", "TasksMax"):
            assert re.search(rf"(?m)^{line}=\d", unit), line
        for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes", "CapabilityBoundingSet="):
            assert re.search(rf"(?m)^{line}$", unit), line
