"""Read and check the folders of a kit (``fl-bn kit create``), which has one folder per machine.

The lines of a folder's TOML file become fields of a dataclass.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

import tomli_w

from fl_bn.support.client_names import SITE
from fl_bn.support.durable import hold
from fl_bn.support.names import unknown

EXCHANGE_PORTS = 4  # the default number of ports for the layer-wise exchange, which firewalls must let through
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]\"\\]+):([0-9]{1,5})")
HOST = re.compile(r"\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+")


class FolderError(ValueError):
    """Signal that a folder of a kit, a certificate, a key, a passphrase or a project is wrong or missing. The message says which."""


def host_port(address: str) -> tuple[str, int]:
    """Split an address into host and port.

    Args:
        address: HOST:PORT, such as ``fl.example.org:9092``, or ``[::1]:9092`` for an IPv6 address.

    Returns:
        The host (an IPv6 address without its brackets) and the port.

    Raises:
        ValueError: The address is not HOST:PORT.
    """
    match = ADDRESS.fullmatch(address)
    if not match or not 0 < int(match[2]) < 65536:
        raise ValueError(f"must be HOST:PORT with a port of 1..65535, e.g. fl.example.org:9092, but got {address!r}")
    return match[1].strip("[]"), int(match[2])


def site_name(name: str) -> str:
    """Check the name of a site or a submitter, and return it.

    Raises:
        ValueError: The name does not begin with a letter or digit, or has a character that is not allowed in the name of a folder.
    """
    if not SITE.fullmatch(name):
        raise ValueError(f"must begin with a letter or digit, and have only letters, digits, '.', '_' and '-', but got the name {name!r}")
    return name


def site_names(names: Sequence[str]) -> None:
    """Check the names of all sites.

    Raises:
        ValueError: There is none, or two differ in no letter but in upper and lower case, or one is not allowed.
    """
    for name in names:
        site_name(name)
    if not names or len({name.casefold() for name in names}) < len(names):
        raise ValueError(f"must be at least one name, and the names must differ even in lower case, but got {', '.join(names) or 'none'}")


def _must(holds: Callable[[Any], object], expected: str) -> Callable[[Any], None]:
    """Return a check of a line's value: it raises ValueError where ``holds`` is false for the value, and says what was ``expected``."""

    def check(value: Any) -> None:
        if not holds(value):
            raise ValueError(f"must be {expected}, but got {value!r}")

    return check


def _is_host(text: str) -> bool:
    """Return whether ``text`` is HOST or HOST:PORT."""
    try:
        return bool(HOST.fullmatch(text) or host_port(text))
    except ValueError:
        return False


def _are_folders(folders: tuple[str, ...]) -> bool:
    return all(folder and os.pathsep not in folder for folder in folders)


_port = _must(lambda port: 0 < port < 65536, "1..65535")
_some = _must(lambda number: number >= 1, "at least 1")
_seconds = _must(lambda seconds: seconds > 0, "above 0 seconds")
_device = _must(re.compile(r"auto|cpu|cuda(:\d+)?").fullmatch, "auto, cpu, cuda, cuda:1, ...")  # as the key device of a run config
_given = _must(bool, "a text that is not empty")
_code = _must(_are_folders, f"paths of folders without {os.pathsep}")
_hosts = _must(lambda text: all(map(_is_host, filter(None, map(str.strip, text.split(","))))), "HOST or HOST:PORT, separated by commas")


def _line(text: str, default: Any = MISSING, check: Callable[[Any], object] = lambda value: None) -> Any:
    """Declare one line of a TOML file as a field of a dataclass.

    Args:
        text: The meaning of the line, which becomes the comment beside it in the file.
        default: The value where the file lacks the line; MISSING: the file must have the line.
        check: Takes the value of the line, and raises ValueError where the value is not allowed.
    """
    return field(default=default, metadata={"help": text, "check": check}, kw_only=True)


@dataclass(frozen=True)
class Folder:
    """Hold the settings of a folder of the kit, which are in a TOML file there.

    Every field other than ``path`` is a line of that file. Relative paths in the file start at the folder; the
    fields hold absolute paths.

    Attributes:
        path: The folder.
        file: The name of the TOML file.
    """

    path: Path
    file = ""

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read and check the TOML file of the folder at ``path``.

        Raises:
            FolderError: The file is missing or is not TOML, or a line is unknown, missing, of a wrong type or out
                of range.
        """
        folder = Path(path).absolute()
        source = folder / cls.file
        try:
            values = tomllib.loads(source.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise FolderError(f"{folder} has no {cls.file}: expected a folder written by `fl-bn kit create`") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise FolderError(f"{source} cannot be read: {error}") from error
        known = {_kebab(spec): spec for spec in cls.lines()}
        for name in values:
            if name not in known:
                raise FolderError(f"{source}: {unknown('line', name, known)}")
        types = get_type_hints(cls)
        checked = {spec.name: _value(source, name, spec, types[spec.name], values) for name, spec in known.items()}
        try:
            return cls(folder, **checked)
        except ValueError as error:
            raise FolderError(f"{source}: {error}") from error

    @classmethod
    def lines(cls) -> list[Field[Any]]:
        """Return the dataclass fields that stand for lines of the file: all but ``path``."""
        return [spec for spec in fields(cls) if spec.name != "path"]


@dataclass(frozen=True)
class ServerFolder(Folder):
    """Hold the settings of ``kit/server``, the folder for the machine with the SuperLink.

    Raises:
        ValueError: The last port of the layer-wise exchange is above 65535.
    """

    superlink: str = _line("the name by which sites reach this machine; it is in server.crt", check=_given)
    fleet: str = _line("where sites connect", "0.0.0.0:9092", host_port)
    control: str = _line(
        "where runs are submitted: whoever reaches this may start runs and register sites, so this machine only",
        "127.0.0.1:9093",
        host_port,
    )
    serverappio: str = _line("plaintext in Flower 1.25, so this machine only", "127.0.0.1:9091", host_port)
    exchange_host: str = _line(
        "the layer-wise exchange listens in the ServerApp; sites reach it by this name, which is in server.crt", check=_given
    )
    exchange_port: int = _line("the first port of the layer-wise exchange", 9095, _port)
    exchange_ports: int = _line("how many ports, from exchange-port on: each run that is going on has its own", EXCHANGE_PORTS, _some)
    exchange_timeout: float = _line("seconds that an exchange waits for late sites, after half of them wait", 30.0, _seconds)
    sites: tuple[str, ...] = _line("who takes part in runs; each has a key in sites/", check=site_names)
    state: Path = _line("the SuperLink's database and files; relative paths start at this folder", "state", _given)
    results: Path = _line("each run makes a folder here", "results", _given)
    allow_modules: str = _line("installed modules whose functions a run config may name, separated by commas", "")
    app: Path | None = _line("folder of the fl-bn project that is submitted; empty: the one that is installed (editable)", "")

    file = "server.toml"

    def __post_init__(self) -> None:
        if self.last_exchange_port > 65535:
            raise ValueError(
                f"the last port of the exchange, exchange-port + exchange-ports - 1, must be below 65536, but is {self.last_exchange_port}"
            )

    @property
    def last_exchange_port(self) -> int:
        """Return the last of the ports for the layer-wise exchange (FedTAN, exact statistics)."""
        return self.exchange_port + self.exchange_ports - 1

    @property
    def authority(self) -> Path:
        """Return the certificate file of the kit's authority."""
        return self.path / "ca.crt"

    @property
    def certificate(self) -> Path:
        """Return the certificate file of the server."""
        return self.path / "server.crt"

    @property
    def key(self) -> Path:
        """Return the private key file of the server."""
        return self.path / "server.key"

    @property
    def nodes_file(self) -> Path:
        """Return the file that says which Flower node each site has now. ServerApps read this file."""
        return self.state / "nodes.json"

    @property
    def keys_file(self) -> Path:
        """Return the file that says as which Flower node each public key was registered."""
        return self.state / "keys.json"

    @property
    def submitted_file(self) -> Path:
        """Return the file with a line for each run that was submitted from this folder."""
        return self.state / "submitted.jsonl"

    def public_key(self, site: str) -> Path:
        """Return the file in which the server keeps the public key of ``site``."""
        return self.path / "sites" / f"{site}.pub"


@dataclass(frozen=True)
class SiteFolder(Folder):
    """Hold the settings of ``kit/sites/NAME``, the folder for the machine of one site.

    ``code`` and ``data_path`` have absolute paths, with one exception. Where ``dataset`` names a function
    (``package.module:function``), ``data_path`` is the text of the line, unchanged. The function receives this text.
    """

    site: str = _line("this site's name", check=site_name)
    superlink: str = _line("where the server is", check=host_port)
    root_certificates: Path = _line(
        "the authority that signed the server's certificate; relative paths start at this folder", "ca.crt", _given
    )
    private_key: Path = _line("the key that proves who this site is; it never leaves this machine", "site.key", _given)
    exchange_addresses: str = _line(
        "where the layer-wise exchange may be: HOST or HOST:PORT, separated by commas; empty: at the host in superlink", "", _hosts
    )
    dataset: str = _line(
        "this site's own data: npz, folder, csv, package.module:function; empty: its share of the run's (rehearsal)",
        "",
    )
    data_path: str = _line("where these data are; npz and CSV files are separated by commas", "")
    code: tuple[str, ...] = _line("folders with modules of this site's own, for dataset = package.module:function, say", (), _code)
    allow_modules: str = _line("installed modules whose functions a run config may name, besides the app's own; separated by commas", "")
    share_label_counts: bool = _line("whether this site tells the server how many samples of each class it has, for labels.png", True)
    device: str = _line("auto (a GPU if there is one), cpu, cuda:1, ...", "auto", _device)
    state_dir: Path = _line("what must survive a crash of this machine (local layers, momentum): back it up", "state", _given)
    clientappio: str = _line("plaintext in Flower 1.25, so this machine only", "127.0.0.1:9094", host_port)
    policy: Path = _line("the policy: in which runs this site takes part; without the file, in none", "policy.toml", _given)
    audit: Path | None = _line("folder of the audit log, which says what left this site; empty: node/audit", "")

    file = "site.toml"

    def __post_init__(self) -> None:
        if self.data_path and ":" not in self.dataset:
            parts = [str(_within(self.path, part.strip())) for part in self.data_path.split(",")]
            object.__setattr__(self, "data_path", ",".join(parts))
        object.__setattr__(self, "code", tuple(str(_within(self.path, folder)) for folder in self.code))

    @property
    def audit_log(self) -> Path:
        """Return the folder of the audit log."""
        return self.audit or self.node_dir / "audit"

    @property
    def node_dir(self) -> Path:
        """Return the folder of the gate and the SuperNode: their state, the audit log, and which run came with which signature."""
        return self.path / "node"

    @property
    def packages(self) -> Path:
        """Return the folder in which the gate unpacks the packages of runs."""
        return self.path / "packages"

    @property
    def apps_socket(self) -> Path:
        """Return the socket on which the program that runs the apps hears the gate."""
        return self.path / "run" / "apps.sock"


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one command at a time choose names of runs, change who takes part, or register sites: others wait for it.

    The lock is on the folder itself, so that it needs no file that another user could not open.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def in_use(lock: Path) -> bool:
    """Return whether another process has locked the file at ``lock``, which need not exist."""
    try:
        with lock.open() as file:
            hold(file, shared=True)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def read_folder(path: Path | str) -> ServerFolder | SiteFolder:
    """Read a folder of the kit, the server's or a site's.

    Raises:
        FolderError: The folder at ``path`` is neither the server's nor a site's, or its TOML file is wrong.
    """
    for kind in (ServerFolder, SiteFolder):
        if (Path(path) / kind.file).exists():
            return kind.read(path)
    raise FolderError(f"{path} is not a folder of a kit: expected server.toml (kit/server) or site.toml (kit/sites/NAME) in it")


def render(kind: type[Folder], **values: object) -> str:
    """Return the text of a folder's TOML file, with the meaning of each line in a comment beside it.

    Args:
        kind: ``ServerFolder`` or ``SiteFolder``.
        values: Values of fields, by name. The other fields have their defaults.

    Raises:
        TypeError: ``values`` names a field that the file does not have.
    """
    lines = []
    for spec in kind.lines():
        value = values.pop(spec.name, spec.default)
        lines.append((f"{_kebab(spec)} = {one_line(value)}", spec.metadata["help"]))
    if values:
        raise TypeError(f"expected fields of {kind.file}, but got {', '.join(values)}")
    width = min(40, max(len(line) for line, _ in lines))
    return "".join(f"{line:<{width}}  # {text}\n" for line, text in lines)


def _kebab(spec: Field[Any]) -> str:
    return spec.name.replace("_", "-")


def one_line(value: object) -> str:
    """Return ``value`` in TOML, on one line, so that a comment fits beside it.

    ``tomli_w.dumps`` would put each item of a list on a line of its own.
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(one_line(item) for item in value)}]"
    return tomli_w.dumps({"value": str(value) if isinstance(value, Path) else value}).removeprefix("value = ").rstrip("\n")


def _within(folder: Path, path: str) -> Path:
    """Return ``path`` as an absolute path. A relative ``path`` starts at ``folder``."""
    return (folder / Path(path).expanduser()).absolute()


def _value(source: Path, name: str, spec: Field[Any], type_hint: Any, values: dict[str, Any]) -> Any:
    """Return the value of one line, checked and converted to the type of its field.

    Args:
        source: The TOML file, for messages; relative paths start at its folder.
        name: The name of the line.
        spec: The field.
        type_hint: The type of the field.
        values: The values of the file.

    Raises:
        FolderError: The line is missing, of a wrong type, or its value is not allowed.
    """
    if name not in values and spec.default is MISSING:
        raise FolderError(f"{source}: the line {name} is missing ({spec.metadata['help']})")
    value = values.get(name, list(spec.default) if isinstance(spec.default, tuple) else spec.default)
    kind: type = type_hint if type_hint in (int, float, bool) else list if type_hint == tuple[str, ...] else str
    value = float(value) if kind is float and type(value) is int else value
    texts: list[Any] = value if isinstance(value, list) else [value] if kind is str else []
    if not (type(value) is kind and all(type(text) is str for text in texts)):
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes", list: "a list of texts"}
        raise FolderError(f"{source}: {name} must be {kinds[kind]}, but got {value!r}")
    if any(re.search(r"[\"\\\n\r]", text) for text in texts):
        raise FolderError(f'{source}: {name} must not contain ", \\ or line breaks (Flower cannot pass them on), but got {value!r}')
    value = tuple(texts) if kind is list else value
    try:
        spec.metadata["check"](value)
    except ValueError as error:
        raise FolderError(f"{source}: {name} {error}") from error
    if type_hint is Path or type_hint == Path | None:
        return _within(source.parent, texts[0]) if value else None
    return value
