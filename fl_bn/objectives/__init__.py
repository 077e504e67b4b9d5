"""Local objectives, one file per paper: what a client minimises, or how it corrects its gradients. ``OBJECTIVES`` has them by name.

A method (``fl_bn.methods``) decides how normalisation is federated, an objective how a client trains: any composes with any, but for the
few that ``training.composition`` refuses.
"""

from fl_bn.objectives.fedprox import FedProx
from fl_bn.objectives.fedsam import FedSAM
from fl_bn.objectives.moon import Moon
from fl_bn.objectives.objective import CONTROL, PLAIN, Finish, Objective, Round, Start, Step
from fl_bn.objectives.scaffold import Scaffold

OBJECTIVES: dict[str, type[Objective]] = {kind.name: kind for kind in (Objective, FedProx, Scaffold, Moon, FedSAM)}

__all__ = ["CONTROL", "OBJECTIVES", "PLAIN", "FedProx", "FedSAM", "Finish", "Moon", "Objective", "Round", "Scaffold", "Start", "Step"]
