"""Read which Flower node each site has at present. This is known only on a server that was set up with ``fl-bn kit``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fl_bn.support.flower_config import NODES


def registered_nodes() -> dict[int, str]:
    """Return the sites of the nodes that are registered at the SuperLink at present: node id -> name of its site.

    The nodes are read from the file that the environment variable ``FL_BN_NODES`` names. ``fl-bn register`` writes this file,
    also during a run if ``fl-bn kit`` has changed a site. Without the variable or the file, the result is empty.
    """
    file = os.environ.get(NODES, "")
    try:
        nodes = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    except FileNotFoundError:
        return {}
    return {int(node): str(site) for site, node in nodes.items()}
