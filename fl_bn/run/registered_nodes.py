"""Read which node each site has now, where a ServerApp is deployed by a kit."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fl_bn.support.flower_config import NODES


def registered_nodes() -> dict[int, str]:
    """Return the sites' names by node, as the SuperLink has them now; empty where this process is not told.

    ``fl-bn register`` writes the file, also when ``fl-bn kit`` changes a site while a run goes on.
    """
    file = os.environ.get(NODES, "")
    try:
        nodes = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    except FileNotFoundError:
        return {}
    return {int(node): str(site) for site, node in nodes.items()}
