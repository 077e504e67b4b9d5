"""Check the machine: Python and packages, GPU, memory, disks."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import tempfile
import warnings
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from fl_bn.support.finding import Finding

PACKAGES = ("flwr", "torch", "grpcio", "protobuf")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"  # the versions that the tests ran with; only a checkout has this file
TIME_ERROR = 5  # result of adjtimex if no time service sets this clock
LITTLE = 1 << 30  # a warning is due below these bytes of memory, GPU memory or disk
GB = 1 << 30
# file systems that are lost with a reboot or with their container
LOST = {"tmpfs": "memory", "ramfs": "memory", "overlay": "a container's own layer"}
INSTALL = "install again, in this environment: pip install -c constraints.txt -e '.[deployment,report,vision]'"


def python() -> Finding:
    """Compare Python's version with fl-bn's ``requires-python``."""
    from packaging.specifiers import SpecifierSet

    needed, here = SpecifierSet(metadata("fl-bn")["Requires-Python"]), platform.python_version()
    if not needed.contains(here, prereleases=True):
        return Finding("fail", "python", f"this is Python {here}, but fl-bn needs {needed}", f"make a new environment with Python {needed}")
    return Finding("ok", "python", f"{here} (needed: {needed})")


def package(name: str, constraints: Path = CONSTRAINTS) -> Finding:
    """Compare a package's version with fl-bn's requirement, and with the versions that were tested.

    Args:
        name: The package.
        constraints: The checkout's list of tested versions, if there is such a file.
    """
    from packaging.version import Version

    needed = _requirement(name)
    try:
        here = version(name)
    except PackageNotFoundError:
        return Finding("fail", name, f"it is not installed, but fl-bn needs {name} {needed}".rstrip(), INSTALL)
    if not _contains(needed, here):
        return Finding("fail", name, f"{here} is installed, but fl-bn needs {needed}", INSTALL)
    tested = _pins(constraints).get(name, "")
    if tested and Version(here).public != Version(tested).public:
        return Finding("warn", name, f"{here} is installed, but {tested} was tested", f"if anything misbehaves, {INSTALL}")
    return Finding("ok", name, here + (f" (needed: {needed})" if needed else "") + (", as tested" if tested else ""))


def _contains(needed: str, here: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(needed).contains(here, prereleases=True)


@lru_cache(maxsize=8)
def _requirement(name: str) -> str:
    """Return the versions of ``name`` that fl-bn or its extra ``deployment`` requires, e.g. ``>=1.25,<1.26``; empty: any version."""
    from packaging.requirements import Requirement

    stated = [Requirement(line) for line in requires("fl-bn") or ()]
    of_name = [requirement for requirement in stated if requirement.name.lower() == name]
    for requirement in sorted(of_name, key=lambda requirement: requirement.marker is None):  # the extra's is the narrower one
        if requirement.marker is None or requirement.marker.evaluate({"extra": "deployment"}):
            return ",".join(sorted((str(part) for part in requirement.specifier), reverse=True))
    return ""


def _pins(constraints: Path) -> dict[str, str]:
    if not constraints.is_file():
        return {}
    lines = (line.partition("==") for line in constraints.read_text().splitlines() if "==" in line)
    return {name.strip().lower().replace("_", "-"): pinned.strip() for name, _, pinned in lines}


def gpu(device: str, where: str) -> Finding:
    """Check whether the device exists, has free memory, and runs a kernel.

    Args:
        device: The device, as in the run config.
        where: The file or option in which the user set the device, for the finding.
    """
    import torch

    with warnings.catch_warnings(record=True) as warned:  # an old driver, say
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    request = f"device={device} ({where})"
    if device == "cpu":
        return Finding("ok", "gpu", f"{request}: {os.cpu_count()} cores")
    why = "; ".join(str(warning.message) for warning in warned)
    if torch.version.cuda is None:
        why = f"this torch, {torch.__version__}, is built without CUDA"
    if device == "auto" and count == 0:
        if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
            return Finding(
                "warn",
                "gpu",
                f"{request}: this machine has an NVIDIA driver, but torch sees no GPU{f' ({why})' if why else ''}: training is on the CPU",
                "see whether nvidia-smi works, and whether torch is built for that driver; or set the device to cpu",
            )
        return Finding("ok", "gpu", f"{request}: no GPU, so training is on the CPU ({os.cpu_count()} cores)")
    index = 0 if device == "auto" else torch.device(device).index or 0
    if index >= count:
        return Finding(
            "fail",
            "gpu",
            f"{request}, but torch sees {f'only {count}' if count else 'no'} GPU{'s' if count > 1 else ''}{f' ({why})' if why else ''}",
            "name a GPU that exists (counted from 0), or auto or cpu; if this one should exist, see whether nvidia-smi shows it",
        )
    torch.ones(1, device=f"cuda:{index}").sum().item()
    free, total = torch.cuda.mem_get_info(index)
    text = f"{request}: {torch.cuda.get_device_name(index)}, {free / GB:.1f} of {total / GB:.1f} GB free"
    if free < LITTLE:
        return Finding("warn", "gpu", text, "end other programs that use it (nvidia-smi lists them), or name another device")
    return Finding("ok", "gpu", text)


def memory(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Check how much memory Linux could give to a new process, in a container too.

    Args:
        proc: The folder in which the kernel describes the machine.
        group: The folder in which the kernel describes the container.
    """
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    try:
        limit = int((group / "memory.max").read_text())  # "max" is a ValueError: no limit
        free, total = min(free, limit - int((group / "memory.current").read_text())), min(total, limit)
    except (OSError, ValueError):
        pass
    text = f"{free / GB:.1f} of {total / GB:.1f} GB are free"
    if free < LITTLE:
        return Finding("warn", "memory", text, "end other programs; torch, the data and a copy of the model need more")
    return Finding("ok", "memory", text)


def storage(check: str, folder: Path, mounts: Path = Path("/proc/mounts")) -> Finding:
    """Check whether a folder can be written and read back, how much room it has, and whether its files survive a reboot.

    Args:
        check: The name of the check.
        folder: The folder.
        mounts: The file in which the kernel lists file systems.
    """
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    shown = str(folder) if existing == folder else f"{folder} (not made yet; {existing} was tried)"
    try:
        _write_and_remove(existing)
        free = shutil.disk_usage(existing).free
    except OSError as error:
        name = f"{existing}: {error.strerror}" if error.strerror else str(error)
        return Finding(
            "fail",
            check,
            f"{shown} cannot be written or read back: {name}",
            "give this user write access, make room, or name another folder",
        )
    text = f"{shown} is writable, a file was written, synced and read back; {free / GB:.1f} GB are free"
    kind = _file_system(existing.resolve(), mounts)
    if kind in LOST:
        return Finding(
            "warn",
            check,
            f"{text}; but it lies in {LOST[kind]} ({kind}), so its files are lost with a reboot or with the container",
            "name a folder on a disk, or mount a volume there",
        )
    if free < LITTLE:
        return Finding("warn", check, text, "make room: checkpoints and models of many rounds gather there")
    return Finding("ok", check, text)


def _write_and_remove(folder: Path) -> None:
    content = os.urandom(1 << 16)
    with tempfile.NamedTemporaryFile(prefix=".fl-bn-doctor-", dir=folder) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        if Path(file.name).read_bytes() != content:
            raise OSError("expected to read back what was written, but got other content: check the disk")


def _file_system(folder: Path, mounts: Path) -> str:
    """Return the kind of the file system of ``folder``, e.g. ``ext4``; empty: unknown."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    requirement = [(line[1].replace("\\040", " "), line[2]) for line in lines if len(line) > 2]
    return max((len(point), kind) for point, kind in [("", ""), *requirement] if not point or folder.is_relative_to(point))[1]


def time_service() -> Finding:
    """Ask the kernel whether a time service (NTP) sets this clock."""
    buffer = ctypes.create_string_buffer(1024)  # struct timex, all zero: read the clock's state, set nothing
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    if state < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if state == TIME_ERROR:
        return Finding(
            "warn",
            "time service",
            "the kernel says that no time service keeps this clock",
            "start chrony or systemd-timesyncd: Flower refuses a site whose clock is 5 s ahead of the server's, or 305 s behind",
        )
    largest = struct.unpack_from("@Iqqq", buffer.raw)[3]
    return Finding("ok", "time service", f"the kernel says that a time service keeps this clock, to {largest / 1000:.0f} ms at worst")
