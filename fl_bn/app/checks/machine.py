"""Check one machine before a run: installed versions, GPU and folders."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from importlib.metadata import metadata, requires
from pathlib import Path

from fl_bn.support.extras import ABSENT, version_of
from fl_bn.support.finding import Finding

LITTLE = 1 << 30  # a warning is due below these bytes of GPU memory or disk
GB = 1 << 30


def packages() -> Finding:
    """Compare Python and the installed packages with fl-bn's requirements."""
    from packaging.requirements import Requirement

    needed = [Requirement(f"python {metadata('fl-bn')['Requires-Python']}")]
    stated = map(Requirement, requires("fl-bn") or ())
    needed += [one for one in stated if one.marker is None]
    here = {one.name: platform.python_version() if one.name == "python" else version_of(one.name) for one in needed}
    if wrong := [one for one in needed if here[one.name] == ABSENT or not one.specifier.contains(here[one.name], prereleases=True)]:
        text = ", ".join(f"{one.name} is {here[one.name]}, but fl-bn needs {one.specifier}" for one in wrong)
        return Finding("fail", "packages", text, "install again: pip install -c constraints.txt -e '.[deployment,report,vision]'")
    return Finding("ok", "packages", ", ".join(f"{name} {version}" for name, version in here.items()))


def gpu(device: str, where: str) -> Finding:
    """Check whether the device exists, has free memory, and runs a kernel.

    ``where`` is the place that names the device, for the texts.
    """
    import torch

    request = f"device={device} ({where})"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not count):
        text = f"{request}: training is on the CPU ({os.cpu_count()} cores)"
        if device == "auto" and shutil.which("nvidia-smi"):
            text += f", as torch {torch.__version__} sees no GPU, though this machine has NVIDIA's driver"
            return Finding("warn", "gpu", text, "see whether nvidia-smi works, and torch is built for that driver; or take the device cpu")
        return Finding("ok", "gpu", text)
    index = 0 if device == "auto" else torch.device(device).index or 0
    if index >= count:
        return Finding("fail", "gpu", f"{request}, but torch sees {count} GPUs", "name one that nvidia-smi shows (from 0), or auto or cpu")
    torch.ones(1, device=f"cuda:{index}").sum().item()
    free, total = torch.cuda.mem_get_info(index)
    text = f"{request}: {torch.cuda.get_device_name(index)}, {free / GB:.1f} of {total / GB:.1f} GB free"
    if free < LITTLE:
        return Finding("warn", "gpu", text, "end other programs that use it (nvidia-smi lists them), or name another device")
    return Finding("ok", "gpu", text)


def storage(check: str, folder: Path) -> Finding:
    """Check whether a folder is writable, and its free room. For a missing folder, its nearest parent is checked."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    shown = str(folder) if existing == folder else f"{folder} (not made yet; {existing} was tried)"
    try:
        _write_and_remove(existing)
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding("fail", check, f"{shown} cannot be written or read back: {error}", "give write access, make room, or name another")
    text = f"{shown} is writable, a file was written, synced and read back; {free / GB:.1f} GB are free"
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
