"""Submit a package (Flower's FAB archive) to a SuperLink, and print the answer as one JSON object, as ``flwr run`` does.

Usage: ``python -P start_run.py ADDRESS AUTHORITY PACKAGE RUN_CONFIG``. The package is sent unchanged, so that the sites
receive the bytes that were signed. ``flwr run`` would pack the app's folder anew.

This file is run by its path, and runs ``compat`` by its path, since the package around it would import torch.
"""

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path

import grpc

find = runpy.run_path(str(Path(__file__).parents[1] / "fl_bn" / "flower" / "compat.py"))["find"]
TIME = 240.0  # seconds to wait for the answer


def start(address: str, authority: Path, package: bytes, run_config: str) -> str:
    """Start a run with ``package``, and return Flower's id of the run.

    Raises:
        grpc.RpcError: The SuperLink does not answer, or refuses the package.
        ValueError: The SuperLink answers, but started no run.
    """
    channel = find("create_channel")(server_address=address, insecure=False, root_certificates=authority.read_bytes())
    request = find("StartRunRequest")(
        fab=find("Fab")(hash_str=hashlib.sha256(package).hexdigest(), content=package),
        override_config=find("user_config_to_proto")(find("parse_config_args")([run_config] if run_config else [])),
        federation=find("NOOP_FEDERATION"),
    )
    answer = find("ControlStub")(channel).StartRun(request, timeout=TIME)
    if not answer.HasField("run_id"):
        size = len(package) / 2**20
        large = f"the package has {size:.2f} MiB, and Flower takes at most 10 MiB: leave out files (not-sent in pyproject.toml)"
        raise ValueError(f"no run was started: {large if size > 10 else 'the log of the SuperLink may say why'}")
    return str(answer.run_id)


def main() -> None:
    """Submit the package that the command line names."""
    address, authority, package, run_config = sys.argv[1:]
    try:
        said = {"success": True, "run-id": start(address, Path(authority), Path(package).read_bytes(), run_config)}
    except (grpc.RpcError, OSError, ValueError) as error:
        details = getattr(error, "details", None)
        said = {"success": False, "error-message": details() if callable(details) else str(error)}
    print(json.dumps(said), flush=True)
    os._exit(0 if said["success"] else 1)  # gRPC may wait for a lock for ever when Python ends


if __name__ == "__main__":
    main()
