"""Load initial weights from a file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_bn.bn.derived import load_tensors, plain_names
from fl_bn.bn.roles import Role, roles
from fl_bn.models.head import head_of

MOST_NAMES = 5  # the most names in an error


def load_weights(model: nn.Module, path: str) -> None:
    """Load a file's state_dict into ``model``, by name.

    Three differences are allowed. If the head has another shape (for other
    classes), the model's keeps its initial weights. Counters
    (``num_batches_tracked``) may be missing. Names may have or lack ``module.``
    (DataParallel) and ``_orig_mod.`` (``torch.compile``).

    Args:
        model: changed in place.
        path: a .pt, .pth or .safetensors file. No code in it is run.

    Raises:
        ValueError: there is no such file, or it holds no state_dict of this model.
    """
    own = model.state_dict()
    tensors = _named_as(model, _read(Path(path)))
    role, head = roles(model), head_of(model)
    of_head = set() if head is None else {f"{head[0]}.{key}" if head[0] else key for key in head[1].state_dict()}
    missing = [name for name in own if name not in tensors and role[name] not in (Role.COUNTER, Role.BATCHES)]
    extra = [name for name in tensors if name not in own]
    if missing or extra:
        differ = {"missing": missing, "without a place": extra}
        said = "; ".join(f"{what}: {_few(names)}" for what, names in differ.items() if names)
        raise ValueError(f"weights {path} are of another network: {said}")
    wrong = [name for name in tensors if tensors[name].shape != own[name].shape]
    if others := [name for name in wrong if name not in of_head]:
        shapes = [f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}" for name in others]
        raise ValueError(f"weights {path}: {len(others)} tensors have another shape ({_few(shapes)}); only the head's may differ")
    kept = of_head if wrong else set()  # all of the head or nothing: an old bias does not fit a fresh weight
    load_tensors(model, own | {name: tensor for name, tensor in tensors.items() if name not in kept}, strict=True)


def _named_as(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename ``tensors`` to ``model``'s own names, if only prefixes of wrappers differ."""
    names = plain_names(model)
    own = {plain: name for name, plain in names.items()}
    new = {name: name if name in names else own.get(name.replace("_orig_mod.", "").removeprefix("module."), name) for name in tensors}
    return tensors if len({*new.values()}) < len(new) else {new[name]: tensor for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"weights {path}: there is no such file")
    if path.suffix not in (".pt", ".pth", ".safetensors"):
        raise ValueError(f"weights {path}: expected a .pt, .pth or .safetensors file, but its name ends in {path.suffix!r}")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise ValueError(f"weights {path}: expected a file of tensors, but could not read it: {str(error).splitlines()[0]}") from error
    if not isinstance(content, Mapping) or not content or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        kind = f"a dict of {_few([str(key) for key in content])}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(f"weights {path}: expected a state_dict, tensors by name, but the file holds {kind}")
    return dict(content)


def _few(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
