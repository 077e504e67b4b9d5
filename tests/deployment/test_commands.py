"""Command lines, against the parsers of the pinned Flower; registration and submission, against its own checks and a stand-in for it."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tomli
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.build import build_fab_from_disk
from flwr.common.args import try_obtain_root_certificates, try_obtain_server_certificates
from flwr.common.config import parse_config_args
from flwr.server.app import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode, _try_setup_client_authentication
from typer.testing import CliRunner

from fl_bn.cli.main import app as cli
from fl_bn.flower.secagg.workflow import is_key
from fl_bn_site.commands import SUPERLINK, SUPERNODE, prepare, superlink
from fl_bn_site.control import Control, register_sites
from fl_bn_site.gate import Site, options
from tests.deployment.inner import (
    ConfigError,
    ControlError,
    KitPlan,
    ServerFolder,
    SiteFolder,
    commands,
    create,
    environment,
    flower_config,
    node_config,
    parse_overrides,
    read_public,
    run_config,
    stage,
    write_site_key,
)
from tests.listed import listed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """In a folder whose name shells and configs stumble over."""
    create(KitPlan("fl.example.org", ["A", "B"], exchange_port=9195), tmp_path / "St. Mary's kit")
    return tmp_path / "St. Mary's kit"


@pytest.fixture
def server(kit: Path) -> ServerFolder:
    return ServerFolder.read(kit / "server")


def test_flower_accepts_the_superlink(kit: Path, server: ServerFolder) -> None:
    command, folder = superlink(server), kit / "server"
    args = _parse_args_run_superlink().parse_args(command.argv[command.argv.index(str(SUPERLINK)) + 1 :])
    assert (args.insecure, args.enable_supernode_auth, args.isolation) == (False, True, "process")
    assert (args.control_api_address, args.serverappio_api_address) == ("127.0.0.1:9093", "127.0.0.1:9091")
    assert (args.database, args.storage_dir) == (str(folder / "state/superlink.db"), str(folder / "state/superlink-files"))
    assert try_obtain_server_certificates(args) == tuple((folder / name).read_bytes() for name in ("ca.crt", "server.crt", "server.key"))


def test_flower_accepts_the_supernode_and_reads_its_node_config(kit: Path) -> None:
    file, folder = kit / "sites/B/site.toml", kit / "sites/B"
    file.write_text(file.read_text().replace('dataset = ""', 'dataset = "npz"').replace('data-path = ""', 'data-path = "my data.npz"'))
    site = SiteFolder.read(folder)
    gate, programs = options(list(commands(site)[0].argv[4:]))
    assert gate == Site(*(folder / name for name in ("node", "policy.toml", "node/audit", "packages", "run/apps.sock")))
    supernode = programs["the SuperNode"]
    args = _parse_args_run_supernode().parse_args(supernode[supernode.index(str(SUPERNODE)) + 3 :])
    assert (args.superlink, args.isolation, args.clientappio_api_address) == ("fl.example.org:9092", "process", "127.0.0.1:9094")
    assert args.insecure is False
    assert try_obtain_root_certificates(args, args.superlink) == (folder / "ca.crt").read_bytes()
    assert _try_setup_client_authentication(args) is not None
    expected = {"site": "B", "device": "auto", "dataset": "npz", "exchange-addresses": "fl.example.org"}
    paths = {"state-dir": str(folder / "state"), "data-path": str(folder / "my data.npz")}
    assert parse_config_args([args.node_config]) == node_config(site) == expected | paths


def test_each_role_has_its_own_flower_home_and_no_telemetry(kit: Path, server: ServerFolder) -> None:
    prepare(server)
    assert (kit / "server/state").stat().st_mode & 0o777 == 0o700
    for command, state in (
        (superlink(server), kit / "server/state"),
        (commands(SiteFolder.read(kit / "sites/A"))[0], kit / "sites/A/node"),
        (commands(SiteFolder.read(kit / "sites/A"))[1], kit / "sites/A/state"),
    ):
        told = environment(command.env)
        assert told["FLWR_HOME"].startswith(str(state))
        assert told["FLWR_TELEMETRY_ENABLED"] == "0"
        assert Path(told["PATH"].split(":")[0], "flower-superexec").exists(), "Flower starts it by name"


def test_configs_come_back_as_they_were() -> None:
    values = dict(enumerate([1, 0.5, 1e-9, True, "St. Mary's", 'say "a"', "", "k=v w='1'", r"back\slash", "äß"]))
    config = {f"key-{place}": value for place, value in values.items()}
    assert parse_config_args([flower_config(config)]) == parse_overrides(flower_config(config)) == config


@listed("value", ["both \" and '", "\\ and '", "two\nlines"])
def test_configs_refuse_what_they_would_change(value: str) -> None:
    with pytest.raises(ValueError, match="key"):
        flower_config({"key": value})


def test_what_is_submitted_is_what_flower_would_send_without_environments_and_kits(tmp_path: Path) -> None:
    create(KitPlan("fl.example.org", ["A"]), tmp_path / "project/my-kit")
    (tmp_path / "project/pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name in ("server_app/app.py", "mine/net.py", "docs/guide.md", "env/pyvenv.cfg", "env/lib/torch.py", ".git/x.py", "data/big.npz"):
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text("")
    with stage(tmp_path / "project") as app:
        names = {path.relative_to(app).as_posix() for path in app.rglob("*") if path.is_file()}
        sent = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).namelist()
    assert names == {"pyproject.toml", "server_app/app.py", "mine/net.py"}, "docs are not sent, as pyproject.toml says"
    assert {"server_app/app.py", "mine/net.py"} <= set(sent)


def test_what_is_sent_of_this_project_has_no_tests_and_says_of_which_commit_it_is() -> None:
    with stage(ROOT) as app:
        sent = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app)))
        folders = {name.partition("/")[0] for name in sent.namelist() if "/" in name}
        told = sent.read("fl_bn/commit.toml").decode() if (ROOT / ".git").exists() else 'commit = "none"'
    assert folders == {"fl_bn", "client_app", "server_app", ".info"}
    assert tomli.loads(told)["commit"].removesuffix("+").isalnum()
    assert not (ROOT / "fl_bn/commit.toml").exists(), "the checkout itself is left alone"


def test_run_config_follows_from_the_folder_and_the_user_wins(kit: Path, server: ServerFolder) -> None:
    config = run_config(server, "method='fedtan' rounds=2")
    assert (config["clients"], config["output"], config["method"], config["rounds"]) == (2, str(kit / "server/results"), "fedtan", 2)
    for wrong in ("method='hbm'", "round=2", "rounds"):
        with pytest.raises(ConfigError):
            run_config(server, wrong)


def test_registration_waits_for_the_superlink_and_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ServerFolder
) -> None:
    away = ControlError("the SuperLink at 127.0.0.1:9093 is unavailable")
    former = tmp_path / "former.pub"
    write_site_key(former.with_suffix(".key"), former, "former")
    (server.path / "sites/former").mkdir()
    (server.path / "sites/former/C.pub.20261122T101112").write_bytes(former.read_bytes())
    known = {"B": 4, "former": 6}
    keys = {"B": server.public_key("B"), "former": former}
    server.state.mkdir()
    server.keys_file.write_text(json.dumps({read_public(keys[name]).hex(): node for name, node in known.items()}))
    nodes = [{"node-id": str(node), "status": "online", "offline-at": "N/A"} for node in (4, 5, 6)]
    asked: list[tuple[str, ...]] = []

    def ask(control: Control, *words: str) -> dict[str, Any]:
        asked.append(words)
        if len(asked) in (1, 6):
            raise away
        return {"nodes": nodes, "node-id": 7}

    monkeypatch.setattr(Control, "ask", ask)
    out = "shut out: no site of server.toml has this key"
    expected = [("a key of no site", out), ("C", out), ("A", "registered"), ("B", "was registered already")]
    assert list(register_sites(server, wait=30)) == expected
    assert [words[1:3] for words in asked[2:]] == [("unregister", "5"), ("unregister", "6"), ("register", str(server.public_key("A")))]
    assert json.loads(server.nodes_file.read_text()) == {"A": 7, "B": 4}
    with pytest.raises(ControlError):
        list(register_sites(server, wait=-1))


def rsa(path: Path) -> None:
    public = generate_private_key(65537, 2048).public_key()
    path.write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


@listed("breaks", [Path.unlink, lambda path: path.write_text("ecdsa-sha2-nistp384 garbled"), rsa], ids=["missing", "garbled", "rsa"])
def test_a_key_that_cannot_be_read_is_named_at_once(tmp_path: Path, breaks: Any) -> None:
    create(KitPlan("fl.example.org", ["A", "B"]), tmp_path / "kit")
    server = ServerFolder.read(tmp_path / "kit/server")
    breaks(server.public_key("B"))
    with pytest.raises(ControlError, match=r"sites/B\.pub"):
        list(register_sites(server))
    shown = CliRunner().invoke(cli, ["register", str(server.path)])
    assert (shown.exit_code, "sites/B.pub: " in shown.output) == (1, True), shown.output


def test_a_key_on_a_binary_curve_is_refused() -> None:
    """In a secure sum by fl-bn, and at registration by Flower 1.25's SuperLink: cryptography below 45 has an advisory for such keys."""
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, uses_nist_ec_curve

    for curve, known in ((ec.SECT409R1(), False), (ec.SECP384R1(), True)):
        key = ec.generate_private_key(curve).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        assert is_key(key) == uses_nist_ec_curve(bytes_to_public_key(key)) == known
