"""Command lines and configs, against the parsers of the pinned Flower; what is submitted; keys that are refused."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import tomli
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.build import build_fab_from_disk
from flwr.common import inflatable_utils
from flwr.common.args import try_obtain_root_certificates, try_obtain_server_certificates
from flwr.common.config import parse_config_args
from flwr.server.app import _parse_args_run_superlink
from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode, _try_setup_client_authentication
from typer.testing import CliRunner

from fl_bn.cli.main import app as cli
from fl_bn.flower.secagg.workflow import is_key
from fl_bn_site.commands import SUPERLINK, commands, environment, node_config, superlink
from fl_bn_site.control import lines_of
from fl_bn_site.gate import Site, options
from fl_bn_site.programs import LOST, OVER, SUPERNODE
from fl_bn_site.submit import how_to_go_on, submit
from tests.deployment import tls_servers
from tests.deployment.inner import ConfigError, KitPlan, ServerFolder, SiteFolder, create, flower_config, parse_overrides, run_config, stage
from tests.refusals import naming

ROOT = Path(__file__).parents[2]


def test_flower_accepts_the_superlink_and_the_supernode(server: ServerFolder, site: SiteFolder) -> None:
    """With TLS, authentication, a home of its own for each, and no telemetry."""
    command = superlink(server)
    args = _parse_args_run_superlink().parse_args(command.argv[command.argv.index(str(SUPERLINK)) + 1 :])
    assert (args.insecure, args.enable_supernode_auth, args.isolation) == (False, True, "process")
    assert (args.control_api_address, args.serverappio_api_address) == ("127.0.0.1:9093", "127.0.0.1:9091")
    files = tuple((server.path / name).read_bytes() for name in ("ca.crt", "server.crt", "server.key"))
    assert try_obtain_server_certificates(args) == files

    tls_servers.write_line(site.path / "site.toml", "dataset", "npz")
    tls_servers.write_line(site.path / "site.toml", "data-path", "my data.npz")
    site = SiteFolder.read(site.path)
    gate, _, programs = options(list(commands(site)[0].argv[4:]))
    assert gate == Site(*(site.path / name for name in ("node", "policy.toml", "node/audit", "packages", "run/apps.sock")))
    args = _parse_args_run_supernode().parse_args(programs[SUPERNODE])
    assert (args.superlink, args.isolation, args.clientappio_api_address) == ("fl.example.org:21092", "process", "127.0.0.1:9094")
    assert try_obtain_root_certificates(args, args.superlink) == files[0]
    assert (args.insecure, _try_setup_client_authentication(args) is None) == (False, False)
    expected = {"site": "A", "device": "auto", "dataset": "npz", "exchange-addresses": "x.example.org"}
    paths = {"state-dir": str(site.path / "state"), "data-path": str(site.path / "my data.npz")}
    assert parse_config_args([args.node_config]) == node_config(site) == expected | paths

    for one, state in zip((command, *commands(site)), (server.state, site.path / "node", site.path / "state"), strict=True):
        told, quiet = environment(one.env), {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0", "OMP_WAIT_POLICY": "passive"}
        assert (Path(told["FLWR_HOME"]).is_relative_to(state), told | quiet) == (True, told)
        assert Path(told["PATH"].split(":")[0], "flower-superexec").exists(), "Flower starts it by name"
    assert [str(site.private_key) in " ".join(one.argv) for one in commands(site)] == [True, False], "the app is not told where the key is"
    said = Path(start_client_internal.__file__).read_text()
    assert (LOST in said, OVER in said) == (True, True), "what the SuperNode ends at"
    assert "early_stop.wait(sleep_time)" in Path(inflatable_utils.__file__).read_text(), "the wait for a tensor that is shortened"


def test_configs_come_back_as_they_were_or_are_refused() -> None:
    values = dict(enumerate([1, 0.5, 1e-9, True, "St. Mary's", 'say "a"', "", "k=v w='1'", r"back\slash", "äß"]))
    config = {f"key-{place}": value for place, value in values.items()}
    assert parse_config_args([flower_config(config)]) == parse_overrides(flower_config(config)) == config
    for value in ("both \" and '", "\\ and '", "two\nlines"):  # what they would change
        with naming("key"):
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


def test_run_config_follows_from_the_folder_and_the_user_wins(server: ServerFolder) -> None:
    config = run_config(server, "method='fedtan' rounds=2")
    assert (config["clients"], config["output"], config["method"], config["rounds"]) == (2, str(server.results), "fedtan", 2)
    with naming("--sites"):
        submit(server, "rounds=1", sites="A,B,A")
    (server.results / "a run/checkpoints").mkdir(parents=True)
    (server.results / "a run/checkpoints/round-1.safetensors").touch()
    assert how_to_go_on(server, "a run", modules=Path("my nets")).endswith(" 'a run' --app 'my nets'"), "it can be pasted"
    for wrong in ("method='hbm'", "round=2", "rounds"):
        with pytest.raises(ConfigError):
            run_config(server, wrong)


def test_a_line_that_cannot_be_read_is_named_and_the_others_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "submitted.jsonl"
    assert lines_of(file, "run") == []
    file.write_bytes(b'{"run": 1}\n{"run": 2, "conf\n\xff\n[12]\n{}\n{"run": 3}\n{"run": 4')  # the last one is being written
    assert lines_of(file, "run") == [{"run": 1}, {"run": 3}]
    told = capsys.readouterr().err
    assert [number for number in range(1, 9) if f"{file}: line {number} " in told] == [2, 3, 4, 5]


def test_a_key_that_cannot_be_read_is_named_at_once(server: ServerFolder) -> None:
    rsa = generate_private_key(65537, 2048).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    for breaks in (lambda path: path.write_bytes(rsa), lambda path: path.write_text("ecdsa-sha2-nistp384 garbled"), Path.unlink):
        breaks(server.public_key("B"))
        shown = CliRunner().invoke(cli, ["register", str(server.path)])
        assert (shown.exit_code, "sites/B.pub: " in shown.output) == (1, True), shown.output


def test_a_key_on_a_binary_curve_is_refused() -> None:
    """In a secure sum by fl-bn, and at registration by Flower 1.25's SuperLink: cryptography below 45 has an advisory for such keys."""
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, uses_nist_ec_curve

    for curve, known in ((ec.SECT409R1(), False), (ec.SECP384R1(), True)):
        key = ec.generate_private_key(curve).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        assert is_key(key) == uses_nist_ec_curve(bytes_to_public_key(key)) == known
