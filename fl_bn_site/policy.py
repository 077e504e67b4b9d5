"""Read the policy of a site, ``policy.toml``, and check whether a run is allowed by it.

The policy says in which runs the site takes part. ``app_host.py``, which is installed at the site, makes the
checks before it loads any code of a run. The code that a run brings takes no part in these checks. A
line that the file lacks allows everything. ``Policy.decide`` decides by ``allow-code`` whose code may run. ``admission.py`` calls this
method in the SuperNode, too, before the site stores anything of the run's package (Flower's FAB archive).

This module imports only the standard library, so that other programs of the site can load it by its path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any


def beside(name: str) -> ModuleType:
    """Load the module ``name`` of this folder by its path. Import it as ``NAME_of_this_site``, a name that no run uses."""
    own = f"{name}_of_this_site"
    if own not in sys.modules:
        spec = importlib.util.spec_from_file_location(own, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[own] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[own])
    return sys.modules[own]


if TYPE_CHECKING or __package__:
    from fl_bn_site import signing
else:
    signing = beside("signing")

FILE = "policy.toml"
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:function
SIGNED, INSTALLED, ANY = "signed", "installed", "any"
CODE = (SIGNED, INSTALLED, ANY)
SUBMITTERS = "submitters"  # the folder beside the policy with the public keys of those who sign runs
PACKAGE = "fl_bn/"  # the files of a run that allow-code = "installed" compares with those of the site
BATCHES = ("batch-size", "hbn-stat-samples")  # keys for how many samples a statistic summarises; 0 or -1: decided at the site
MOST_BYTES = 64 << 20  # the largest size of an unpacked package; Flower sends at most 10 MiB, packed
GB = 1 << 30  # bytes


class PolicyError(ValueError):
    """Signal that the policy file cannot be read, or a line of it is wrong. The message names the file and the line."""


class NotAllowed(Exception):
    """Signal that the policy of the site does not allow a run or a reply. The message quotes the line of the policy."""


@dataclass(frozen=True)
class Decision:
    """Hold the policy's decision on the code of one run, for logs and records.

    Attributes:
        allow_code: The value of the policy's line ``allow-code``; empty: the run is refused since the policy is wrong,
            or a file could not be read or written.
        code: The SHA-256 of the run's package; empty where ``allow_code`` is empty.
        signature: The valid signature of the run; None: the policy asks for no signature, or the run is refused.
        refusal: Why the run is refused, as a sentence; empty: the run is allowed.
    """

    allow_code: str
    code: str
    signature: signing.Signature | None = None
    refusal: str = ""

    @property
    def submitter(self) -> str:
        """Return the name of the submitter who signed the run; empty: ``signature`` is None."""
        return self.signature.submitter.name if self.signature else ""

    def enforce(self) -> None:
        """Raise NotAllowed where the run is refused."""
        if self.refusal:
            raise NotAllowed(self.refusal)


@dataclass(frozen=True)
class Policy:
    """Hold the lines of ``policy.toml``. The value None allows everything.

    Attributes:
        allow_methods: The values of the run-config key ``method`` that are allowed.
        allow_modules: The modules whose functions a run config may name. A package allows its submodules, too.
        allow_code: ``signed`` allows the runs that one of ``trusted_submitters`` signed; ``installed`` allows only
            code that equals the fl-bn that is installed here; ``any`` allows whatever the server sends.
        trusted_submitters: The submitters whose signatures the site accepts.
        max_memory: The memory in GB (2**30 bytes) that the process of each message may use for data.
        min_samples: The smallest number of samples that a statistic or a reply may summarise; 0: no limit.
        max_evaluations: The largest number of evaluations that this site answers in one run.
        max_unknown_rounds: For secure sums with methods such as FedBN, where clients keep tensors of their own. The largest
            number of earlier rounds in which other clients trained such tensors, but this site took no part. If there were
            more of these rounds, the site refuses the sum. None: no limit.
    """

    allow_methods: tuple[str, ...] | None = None
    allow_modules: tuple[str, ...] | None = None
    allow_code: str = ANY
    trusted_submitters: tuple[signing.Submitter, ...] = ()
    max_memory: float | None = None
    min_samples: int = 0
    max_evaluations: int | None = None
    max_unknown_rounds: int | None = None

    @classmethod
    def read(cls, file: Path | None) -> Policy:
        """Read the policy in ``file``. None, or a file that does not exist, allows everything.

        Raises:
            PolicyError: The file cannot be read, a line is unknown, or its value is not allowed.
        """
        if file is None or not file.exists():
            return cls()
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise PolicyError(f"{file} cannot be read: {error}") from error
        known = {spec.name.replace("_", "-"): spec.name for spec in fields(cls)}
        if others := sorted(values.keys() - known.keys()):
            raise PolicyError(f"{file}: unknown line {others[0]!r}: expected one of {', '.join(known)}")
        read = cls(**{known[name]: _check_line(file, name, value) for name, value in values.items()})
        if read.allow_code == SIGNED and not read.trusted_submitters:
            raise PolicyError(f'{file}: allow-code = "signed" needs trusted-submitters, who may sign runs: `fl-bn kit trust` adds one')
        return read

    def decide(self, fab_hash: str, fab: bytes, config: Mapping[str, Any], package: Path, now: float | None = None) -> Decision:
        """Decide by ``allow_code`` whether the code of a run may run here. This method neither writes nor runs files of ``fab``.

        ``admission.py`` checks whether the signature came with another run before.

        Args:
            fab_hash: The SHA-256 of the package, as the server says.
            fab: The package of the run, as a zip file.
            config: The run config with which the run was submitted.
            package: The folder of the package ``fl_bn`` that is installed here.
            now: The time, in seconds since 1970; None: now.
        """
        code = hashlib.sha256(fab).hexdigest()
        try:
            if fab_hash != code:
                raise NotAllowed(f"{self.has_code()}, but the package of the run has another hash than the server says")
            self.check_code(fab, package)
            if self.allow_code != SIGNED:
                return Decision(self.allow_code, code)
            return Decision(SIGNED, code, signature=signing.check(code, config, self.trusted_submitters, now))
        except NotAllowed as error:
            return Decision(self.allow_code, code, refusal=str(error))
        except signing.NotSigned as error:
            return Decision(self.allow_code, code, refusal=f"{self.has_code()}, but {error}")

    def has_code(self) -> str:
        """Return the beginning of a refusal by ``allow_code``, such as ``this site's policy has allow-code = signed``."""
        return f"this site's policy has allow-code = {self.allow_code}"

    def check_run(self, run_config: Mapping[str, Any]) -> None:
        """Check whether the policy allows a run with this run config.

        Raises:
            NotAllowed: The policy does not allow the method, a function, or a number of samples in the run config.
        """
        if self.allow_methods is not None and run_config.get("method") not in self.allow_methods:
            raise _refusal("allow-methods", self.allow_methods, f"the run's method is {run_config.get('method')!r}")
        if self.allow_modules is not None:
            for key, value in run_config.items():
                for name in FUNCTION.finditer(value) if isinstance(value, str) else ():
                    module = name[0].partition(":")[0]
                    if not any(f"{module}.".startswith(f"{allowed}.") for allowed in self.allow_modules):
                        raise _refusal("allow-modules", self.allow_modules, f"the run config names {key}={name[0]!r}")
        for key in BATCHES:
            if 0 < int(run_config.get(key, 0)) < self.min_samples:
                raise _refusal(
                    "min-samples",
                    self.min_samples,
                    f"the run config has {key}={run_config[key]}, so statistics would summarise fewer samples",
                )

    def check_code(self, fab: bytes, package: Path) -> None:
        """Check whether the policy allows the code of a run. Call this method before any of that code is loaded.

        Where ``allow_code`` is ``installed``, the site runs its own fl-bn. Then the run must bring the same version, since
        two versions would give different results.

        Args:
            fab: The app that the run brings, as a zip file.
            package: The folder of the package ``fl_bn`` that is installed here.

        Raises:
            NotAllowed: Only installed code is allowed, and the app of the run has other files, is too large or cannot be read.
        """
        if self.allow_code != INSTALLED:
            return
        try:
            with zipfile.ZipFile(io.BytesIO(fab)) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
                    raise _refusal("allow-code", self.allow_code, f"the unpacked package of the run has more than {MOST_BYTES >> 20} MiB")
                sent = {name: archive.read(name) for name in archive.namelist() if name.startswith(PACKAGE) and name.endswith(".py")}
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise _refusal("allow-code", self.allow_code, f"the package of the run cannot be read: {error}") from error
        if f"{PACKAGE}__init__.py" not in sent:
            raise _refusal("allow-code", self.allow_code, "the run brings an app that is not fl-bn's")
        mine = {PACKAGE + path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
        for name, content in sorted(sent.items()):
            if name not in mine or mine[name].read_bytes() != content:
                raise _refusal(
                    "allow-code",
                    self.allow_code,
                    f"the file {name} of the run differs from this site's: install the server's version of fl-bn here",
                )

    def check_reply(self, samples: int | None, counts: Mapping[str, int]) -> None:
        """Check whether a reply summarises enough samples.

        Args:
            samples: The number of samples that the reply summarises; None: the reply does not tell this number.
            counts: Name of a count tensor -> the number of values per channel that the statistics summarise; 0: the layer
                did not run.

        Raises:
            NotAllowed: The reply, or one of its statistics, summarises fewer than ``min_samples``.
        """
        if samples is not None and 0 < samples < self.min_samples:
            raise _refusal("min-samples", self.min_samples, f"the reply summarises {samples} samples")
        for name, count in counts.items():
            if 0 < count < self.min_samples:
                raise _refusal("min-samples", self.min_samples, f"the statistic {name} summarises {count} values")

    def limits(self, node_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``node_config`` with those limits of the policy that the ClientApp itself enforces.

        Where ``node_config`` already has the same limit, the result has the stricter of the two.
        """
        limits = dict(node_config)
        if self.min_samples:
            limits["min-samples"] = max(self.min_samples, limits.get("min-samples", 0))
        for name, most in (("max-evaluations", self.max_evaluations), ("max-unknown-rounds", self.max_unknown_rounds)):
            if most is not None:
                limits[name] = min(most, limits.get(name, most))
        return limits

    def memory(self) -> int | None:
        """Return ``max_memory`` in bytes; None: no limit."""
        return None if self.max_memory is None else int(self.max_memory * GB)


def summary_of(reply: Any) -> tuple[int | None, dict[str, int]]:
    """Return how many samples a reply summarises, and how many values its statistics summarise.

    Returns:
        samples: The number of samples; None: the reply does not tell it.
        counts: Name of a count tensor -> the largest number of values per channel that the layer's statistics summarise.
    """
    if reply.has_error():
        return None, {}
    samples = [record["samples"] for record in reply.content.metric_records.values() if "samples" in record]
    moments = reply.content.array_records.get("fl-bn/moments", {})
    counts = {name: int(array.numpy().max()) for name, array in moments.items() if name.endswith("count")}
    return (int(samples[0]) if samples else None), counts


def _submitter(file: Path, item: str) -> signing.Submitter:
    """Return the submitter that one item of ``trusted-submitters`` stands for.

    The item is either a public key, followed by the name of its owner, or only a name. The key of a name is read from the
    file ``submitters/NAME.pub`` beside the policy.
    """
    try:
        if item.startswith(signing.KIND):
            return signing.read_submitter(" ".join(item.split()[2:]) or "a key of the policy", item)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", item):
            raise ValueError(f"a name begins with a letter or digit, and has only letters, digits, '.', '_' and '-', but got {item!r}")
        path = file.parent / SUBMITTERS / f"{item}.pub"
        try:
            return signing.read_submitter(item, path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from error
    except ValueError as error:
        raise PolicyError(f"{file}: trusted-submitters: {error}") from error


def _refusal(line: str, allowed: object, reason: str) -> NotAllowed:
    shown = ", ".join(map(str, allowed)) or "nothing" if isinstance(allowed, tuple) else allowed
    return NotAllowed(f"this site's policy has {line} = {shown}, but {reason}")


def _check_line(file: Path, name: str, value: Any) -> Any:
    """Return the value of the line ``name``, with lists as tuples.

    Raises:
        PolicyError: The value is not allowed. The message names ``file`` and the line.
    """

    def wrong(expected: str) -> PolicyError:
        return PolicyError(f"{file}: {name} must be {expected}, but got {value!r}")

    if name in ("allow-methods", "allow-modules"):
        if not isinstance(value, list) or not all(type(item) is str for item in value):
            raise wrong("a list of texts in quotes")
        return tuple(value)
    if name == "allow-code":
        if value not in CODE:
            raise wrong(f"{', '.join(CODE[:-1])} or {CODE[-1]} (which was `sent` in earlier versions)")
        return value
    if name == "trusted-submitters":
        if not isinstance(value, list) or not all(type(item) is str for item in value):
            raise wrong(f"a list of names (each with a file {SUBMITTERS}/NAME.pub) or of public keys")
        return tuple(_submitter(file, item) for item in value)
    if name in ("max-evaluations", "max-unknown-rounds"):
        if type(value) is not int or value < 0:
            raise wrong("a whole number of at least 0 (0 allows none)")
        return value
    if type(value) not in ((int,) if name == "min-samples" else (int, float)) or not value > 0:
        raise wrong("a whole number above 0" if name == "min-samples" else "a number of GB above 0")
    return value
