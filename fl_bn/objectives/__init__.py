"""Define local objectives, one file per paper: losses, or corrections of gradients.

``OBJECTIVES`` maps names of the run config to objectives. Every method works with
each, except for pairs that ``federation.composition`` refuses.
"""

from fl_bn.objectives.fedprox import FedProx
from fl_bn.objectives.fedsam import FedSAM
from fl_bn.objectives.moon import Moon
from fl_bn.objectives.objective import CONTROL, PLAIN, Finish, Objective, Round, Start, Step
from fl_bn.objectives.scaffold import Scaffold

OBJECTIVES: dict[str, type[Objective]] = {kind.name: kind for kind in (Objective, FedProx, Scaffold, Moon, FedSAM)}

__all__ = ["CONTROL", "OBJECTIVES", "PLAIN", "FedProx", "FedSAM", "Finish", "Moon", "Objective", "Round", "Scaffold", "Start", "Step"]
