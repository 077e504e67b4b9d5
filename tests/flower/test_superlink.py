"""The repair of Flower 1.25's SuperLink: an answer that a message's tensors are not there yet is no error."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import ConfigRecord

import fl_bn.flower
from fl_bn.flower.compat import find

SCRIPT = Path(fl_bn.flower.__file__).with_name("superlink.py")


@pytest.mark.pinned("Flower 1.25's SuperLink is repaired, and no other runs")
@pytest.mark.parametrize(("database", "name"), [(":flwr-in-memory:", "InMemoryLinkState"), ("state.db", "SqliteLinkState")])
def test_no_bytes_are_no_error_and_others_are_counted(
    database: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    kind = find(name)
    monkeypatch.chdir(tmp_path)
    link = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()
    assert isinstance(link, kind)
    run = link.create_run("id", "0.1", "0" * 64, {}, "federation", ConfigRecord(), None)
    with pytest.raises(ValueError, match="cannot be zero"):  # control: Flower 1.25.0 as it is
        link.store_traffic(run, bytes_sent=0, bytes_recv=0)
    monkeypatch.setattr(kind, "store_traffic", kind.store_traffic)  # undone at the end
    runpy.run_path(str(SCRIPT))["repair"](kind)
    link.store_traffic(run, bytes_sent=0, bytes_recv=0)
    link.store_traffic(run, bytes_sent=5, bytes_recv=0)
    link.store_traffic(run, bytes_sent=1, bytes_recv=2)
    found = link.get_run(run)
    assert found is not None
    assert (found.bytes_sent, found.bytes_recv) == (6, 2)


@pytest.mark.pinned("Flower 1.25's SuperLink is repaired, and no other runs")
def test_it_is_flowers_own_program_otherwise() -> None:
    help_of = [[sys.executable, "-P", str(SCRIPT)], [str(Path(sys.executable).with_name("flower-superlink"))]]
    ours, theirs = (subprocess.run([*argv, "--help"], capture_output=True, text=True, check=True).stdout for argv in help_of)
    assert "--enable-supernode-auth" in ours
    assert ours.split()[2:] == theirs.split()[2:]
