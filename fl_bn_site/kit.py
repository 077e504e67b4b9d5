"""Make a kit, which has one folder with settings and keys per machine of a deployment: ``fl-bn kit create``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fl_bn.support.durable import write
from fl_bn_site.certificates import alternative_name, make_authority, make_server, write_site_key
from fl_bn_site.days import MOST_DAYS, SERVER_DAYS
from fl_bn_site.folders import EXCHANGE_PORTS, ServerFolder, SiteFolder, render, site_name, site_names
from fl_bn_site.guides import kit_file, kit_readme, server_guide, site_guide
from fl_bn_site.policy import SUBMITTERS
from fl_bn_site.signing import Submitter
from fl_bn_site.submitters import hand_out, public_key, write_submitter_key

PUB = ".pub"  # suffix of a public key file
LOCAL = ("localhost", "127.0.0.1", "::1")  # names under which the server's own machine submits runs


class KitError(ValueError):
    """Signal that a kit cannot be made or changed with these values."""


@dataclass(frozen=True)
class KitPlan:
    """Describe the kit to make.

    Attributes:
        superlink: The host name or IP address by which sites reach the server, without a port.
        sites: The names of the sites. Their order is the order of the clients.
        exchange_host: The host name or IP address by which sites reach the layer-wise exchange (FedTAN, exact statistics),
            without a port; empty: as ``superlink``.
        also: Further host names and IP addresses for which the server's certificate is valid.
        days: The days for which the server's certificate is valid.
        fleet_port: The port to which SuperNodes connect.
        exchange_port: The first port of the layer-wise exchange.
        submitters: The submitters whose signatures every site accepts. For a name, a key pair is made. For a public key
            file NAME.pub, the submitter NAME has made the key pair already.

    Raises:
        KitError: A host, a name, a port or the number of days is not allowed.
    """

    superlink: str
    sites: Sequence[str]
    exchange_host: str = ""
    also: Sequence[str] = ()
    days: int = SERVER_DAYS
    fleet_port: int = 9092
    exchange_port: int = 9095
    submitters: Sequence[str] = ("submitter",)

    def __post_init__(self) -> None:
        try:
            for host in (self.superlink, self.exchange_host or self.superlink, *self.also):
                alternative_name(host)
            for name in map(submitter_name, self.submitters):
                site_name(name)
            site_names(self.sites)
        except ValueError as error:
            raise KitError(f"hosts and names: {error}") from error
        if not self.submitters or len(set(map(submitter_name, self.submitters))) < len(self.submitters):
            names = ", ".join(self.submitters) or "none"
            raise KitError(f"a kit needs at least one submitter, and their names must differ, but got {names}")
        ports = (self.fleet_port, self.exchange_port, self.exchange_port + EXCHANGE_PORTS - 1)
        if not 1 <= self.days <= MOST_DAYS:
            raise KitError(f"days must be 1..{MOST_DAYS}, but got {self.days}")
        if not all(0 < port < 65536 for port in ports):
            raise KitError("ports must be 1..65535, but got {} for SuperNodes, and {} to {} for the layer-wise exchange".format(*ports))


def submitter_name(item: str) -> str:
    """Return the name of a submitter. ``item`` is the name itself, or the path of a file NAME.pub."""
    return Path(item).stem if item.endswith(PUB) else item


def joined(host: str, port: int) -> str:
    """Join host and port to HOST:PORT. An IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def create(plan: KitPlan, output: Path) -> None:
    """Make all keys and certificates of a kit, and write its folders: all of them, or none.

    Args:
        plan: The kit.
        output: The folder of the kit, which may exist, but must hold no files.

    Raises:
        KitError: ``output`` holds files. They could be keys, which are never overwritten.
        FolderError: The public key file of a submitter cannot be read.
    """
    if output.is_file() or any(path.is_file() for path in output.rglob("*")):
        raise KitError(f"{output} holds files already, and keys are never overwritten: give another --output, or move it away first")
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".unfinished-", dir=output) as folder:
        _fill(plan, Path(folder))
        for part in sorted(Path(folder).iterdir()):
            part.rename(output / part.name)


def _fill(plan: KitPlan, output: Path) -> None:
    """Make a kit in the empty folder ``output``."""
    authority_folder, server = output / "authority", output / "server"
    for folder in (authority_folder, server, server / "sites", *(output / "sites" / site for site in plan.sites)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    exchange = plan.exchange_host or plan.superlink
    authority = make_authority("fl-bn federation", plan.days)
    authority.write(authority_folder / "ca.crt", authority_folder / "ca.key")
    ca = (authority_folder / "ca.crt").read_bytes()

    make_server(authority, (plan.superlink, exchange, *LOCAL, *plan.also), plan.days).write(server / "server.crt", server / "server.key")
    write(server / "ca.crt", ca, 0o666)
    text = render(
        ServerFolder,
        superlink=plan.superlink,
        fleet=f"0.0.0.0:{plan.fleet_port}",
        exchange_host=exchange,
        exchange_port=plan.exchange_port,
        sites=list(plan.sites),
    )
    write(server / ServerFolder.file, text.encode(), 0o666)
    _script(server / "start.sh")
    _script(server / "run.sh")
    write(server / "GUIDE.md", server_guide(plan.fleet_port, plan.exchange_port).encode(), 0o666)

    submitters = [
        public_key(submitter_name(item), Path(item)) if item.endswith(PUB) else write_submitter_key(output / SUBMITTERS / item, item)
        for item in plan.submitters
    ]
    hand_out(submitters, server)
    fleet = joined(plan.superlink, plan.fleet_port)
    for name in plan.sites:
        folder = output / "sites" / name
        write_site(folder, name, fleet, joined(exchange, plan.exchange_port), ca, submitters)
        write(server / "sites" / f"{name}.pub", (folder / "site.pub").read_bytes(), 0o666)
    write(output / "README.md", kit_readme(plan.sites, [name for name in plan.submitters if not name.endswith(PUB)]).encode(), 0o666)


def write_site(folder: Path, name: str, fleet: str, exchange: str, ca: bytes, submitters: Sequence[Submitter]) -> None:
    """Fill the empty folder of a site: key pair, the authority's certificate, site.toml, policy, guide and script.

    Args:
        folder: The folder of the site.
        name: The name of the site.
        fleet: The address to which SuperNodes connect, HOST:PORT.
        exchange: The first address of the layer-wise exchange, HOST:PORT.
        ca: The certificate of the kit's authority, in PEM.
        submitters: The submitters whose signatures the site accepts.
    """
    write_site_key(folder / "site.key", folder / "site.pub", name)
    write(folder / "ca.crt", ca, 0o666)
    server, exchange_host = (address.rpartition(":")[0] for address in (fleet, exchange))
    other = "" if exchange_host == server else exchange_host
    write(folder / SiteFolder.file, render(SiteFolder, site=name, superlink=fleet, exchange_addresses=other).encode(), 0o666)
    write(folder / "policy.toml", kit_file("policy.toml").encode(), 0o666)
    hand_out(submitters, folder)
    _script(folder / "start.sh")
    write(folder / "GUIDE.md", site_guide(name, fleet, exchange).encode(), 0o666)


def _script(path: Path) -> None:
    """Write the script of ``kit_files`` that has the name of ``path``, and make it executable for everybody."""
    write(path, kit_file(path.name).encode(), 0o666)
    path.chmod(0o755)
