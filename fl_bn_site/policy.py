"""Read the policy of a site, ``policy.toml``, and check whether a run is allowed by it.

The policy says in which runs the site takes part. The gate (``gate.py``) makes the checks before it unpacks anything of a
run's package (Flower's FAB archive). The code that a run brings takes no part in these checks. A line that the file lacks
allows everything, but for ``allow-code``, which is then ``signed``. Without the file every run is refused.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_bn_site import signing
from fl_bn_site.packages import PackageError, files_of

# package.module:function, found in linear time; whatever is not ASCII may be in a name
FUNCTION = re.compile("(?<!N)N+:(?![0-9.])N+".replace("N", r"[^\x00-\x2d/:-@\[-^`{-\x7f]"))
SIGNED, INSTALLED, ANY = "signed", "installed", "any"
CODE = (SIGNED, INSTALLED, ANY)
SUBMITTERS = "submitters"  # the folder beside the policy with the public keys of those who sign runs
PACKAGE = "fl_bn/"  # the files of a run that allow-code = "installed" compares with those of the site
BATCHES = ("batch-size", "hbn-stat-samples")  # keys for how many samples a statistic summarises; 0 or -1: decided at the site
HERE = Path(__file__).parents[1] / "fl_bn"  # the package fl_bn that is installed beside this one
GB = 1 << 30  # bytes


class PolicyError(ValueError):
    """Signal that the policy file cannot be read, or a line of it is wrong. The message names the file and the line."""


class NotAllowed(Exception):
    """Signal that the policy of the site does not allow a run or a reply. The message quotes the line of the policy."""


@dataclass(frozen=True)
class Policy:
    """Hold the lines of ``policy.toml``. The value None allows everything.

    Attributes:
        allow_methods: The values of the run-config key ``method`` that are allowed.
        allow_modules: The modules whose functions a run config may name. A package allows its submodules, too.
        allow_code: ``signed`` allows the runs that one of ``trusted_submitters`` signed; ``installed`` allows only
            code that equals the fl-bn that is installed here; ``any`` allows whatever the server sends.
        trusted_submitters: The submitters whose signatures the site accepts: those whose keys are in ``submitters`` beside the file.
        max_memory: The memory in GB (2**30 bytes) that the process of each message may use for data.
        min_samples: The smallest number of samples that a statistic or a reply may summarise; 0: no limit.
        max_evaluations: The largest number of evaluations that this site answers in one run.
        max_unknown_rounds: For secure sums with methods such as FedBN, where clients keep tensors of their own. The largest
            number of earlier rounds in which other clients trained such tensors, but this site took no part. If there were
            more of these rounds, the site refuses the sum. None: no limit.
    """

    allow_methods: tuple[str, ...] | None = None
    allow_modules: tuple[str, ...] | None = None
    allow_code: str = SIGNED
    trusted_submitters: tuple[signing.Submitter, ...] = ()
    max_memory: float | None = None
    min_samples: int = 0
    max_evaluations: int | None = None
    max_unknown_rounds: int | None = None

    @classmethod
    def read(cls, file: Path) -> Policy:
        """Read the policy in ``file``.

        Raises:
            PolicyError: The file cannot be read, a line is unknown, or its value is not allowed.
        """
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise PolicyError(f"{file} cannot be read: {error}") from error
        for name, value in values.items():
            if name not in LINES:
                raise PolicyError(f"{file}: unknown line {name!r}: expected one of {', '.join(LINES)}")
            allowed, expected = LINES[name]
            if not allowed(value):
                raise PolicyError(f"{file}: {name} must be {expected}, but got {value!r}")
        lines: dict[str, Any] = {}
        for name, value in values.items():
            lines[name.replace("-", "_")] = tuple(value) if isinstance(value, list) else value
        read = cls(**lines, trusted_submitters=submitters_in(file.parent / SUBMITTERS))
        if read.allow_code == SIGNED and not read.trusted_submitters:
            raise PolicyError(f'{file}: allow-code = "signed" needs keys of submitters in {SUBMITTERS}/: `fl-bn kit trust` adds one')
        return read

    def check_package(self, package: bytes, run_config: Mapping[str, Any], installed: Path = HERE) -> signing.Signature | None:
        """Check by ``allow_code`` whether the code of a run may run here. This method neither writes nor runs files of the package.

        Where ``allow_code`` is ``installed``, the site runs its own fl-bn. Then the run must bring the same version, since
        two versions would give different results. The caller checks whether the signature came with another run before.

        Args:
            package: The package of the run, as a zip file.
            run_config: The run config, with the defaults of the package.
            installed: The folder of the package ``fl_bn`` that is installed here.

        Returns:
            The valid signature of the run; None: the policy asks for no signature.

        Raises:
            NotAllowed: The policy does not allow the code. The package is another one than the installed, or too large, or cannot be
                read. Or nobody whom the site trusts has signed it.
        """
        if self.allow_code == INSTALLED:
            self._check_installed(package, installed)
        if self.allow_code != SIGNED:
            return None
        try:
            return signing.check(hashlib.sha256(package).hexdigest(), run_config, self.trusted_submitters)
        except signing.NotSigned as error:
            raise NotAllowed(f"{self.has_code()}, but {error}") from error

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
                for name in FUNCTION.finditer(value) if isinstance(value, str) and key not in signing.OF_SERVER else ():
                    module = name[0].partition(":")[0]
                    if not any(f"{module}.".startswith(f"{allowed}.") for allowed in self.allow_modules):
                        raise _refusal("allow-modules", self.allow_modules, f"the run config names {key}={name[0]!r}")
        for key in BATCHES:
            value = run_config.get(key)  # an app of another may have a text there
            if isinstance(value, int | float) and 0 < value < self.min_samples:
                raise _refusal("min-samples", self.min_samples, f"statistics would summarise fewer, by {key}={run_config[key]}")

    def _check_installed(self, package: bytes, installed: Path) -> None:
        """Check that a package has the same files of fl-bn as the folder ``installed``."""
        try:
            files = files_of(package)
        except PackageError as error:
            raise _refusal("allow-code", self.allow_code, str(error)) from error
        sent = {name: content for name, content in files.items() if name.startswith(PACKAGE) and name.endswith(".py")}
        if f"{PACKAGE}__init__.py" not in sent:
            raise _refusal("allow-code", self.allow_code, "the run brings an app that is not fl-bn's")
        mine = {PACKAGE + path.relative_to(installed).as_posix(): path for path in installed.rglob("*.py")}
        for name, content in sorted(sent.items()):
            if name not in mine or mine[name].read_bytes() != content:
                differs = f"the file {name} of the run differs from this site's: install the server's version of fl-bn here"
                raise _refusal("allow-code", self.allow_code, differs)

    def check_leaving(self, sections: Mapping[str, Mapping[str, int]], samples: int = 0) -> None:
        """Check whether a reply, or a vector of a layer-wise exchange, summarises enough samples.

        Args:
            sections: The sections as the audit log has them: what the log says of the samples is what is checked. A vector of
                an exchange must have a known number of them.
            samples: The number of samples that the whole reply summarises; 0: none, or the reply does not tell this number.

        Raises:
            NotAllowed: The reply, or one of its sections, summarises fewer than ``min_samples``.
        """
        behind = {f"the section {name}": of.get("samples", 0) for name, of in sections.items() if "samples" in of or name == "exchange"}
        for what, number in ({"the reply": samples} | behind if samples else behind).items():
            if number < self.min_samples:
                raise _refusal("min-samples", self.min_samples, f"{what} summarises {number or 'an unknown number of'} samples")

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


def _refusal(line: str, allowed: object, reason: str) -> NotAllowed:
    shown = ", ".join(map(str, allowed)) or "nothing" if isinstance(allowed, tuple) else allowed
    return NotAllowed(f"this site's policy has {line} = {shown}, but {reason}")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is str for item in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


LINES: dict[str, tuple[Callable[[Any], bool], str]] = {  # line -> whether it may have a value, and which values it may have
    "allow-methods": (_is_texts, "a list of texts in quotes"),
    "allow-modules": (_is_texts, "a list of texts in quotes"),
    "allow-code": (lambda value: value in CODE, f"{', '.join(CODE[:-1])} or {CODE[-1]}"),
    "max-memory": (lambda value: type(value) in (int, float) and 0 < value < 1e6, "a number of GB above 0, below a million"),
    "min-samples": (lambda value: _is_count(value) and value > 0, "a whole number above 0"),
    "max-evaluations": (_is_count, "a whole number of at least 0 (0 allows none)"),
    "max-unknown-rounds": (_is_count, "a whole number of at least 0 (0 allows none)"),
}


def submitters_in(folder: Path) -> tuple[signing.Submitter, ...]:
    """Return the submitters whose public keys, NAME.pub, are in a folder. A hidden file is none.

    Raises:
        PolicyError: A file cannot be read, or is no public key.
    """
    found = []
    for file in sorted(folder.glob("[!.]*.pub")):
        try:
            found.append(signing.read_submitter(file.stem, file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise PolicyError(f"{file}: {error}") from error
    return tuple(found)
