"""The schema: what a payload must look like, and refusals that name section and tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fl_bn.conversion import convert
from fl_bn.federation import schema
from fl_bn.federation.payload import Payload, signature
from fl_bn.federation.schema import Schema
from fl_bn.methods import METHODS, Phase
from fl_bn.roles import Role
from fl_bn.support.wire import WireError
from tests.listed import listed
from tests.networks import NETWORKS, seeded_network


def example(specs: Schema) -> Payload:
    return {section: {k: np.ones(s.shape, s.dtype) for k, s in specs.sections[section].items()} for section in specs.sections}


def reply(method: str, phase: Phase = Phase.TRAIN, update: str = "weights", network: str = "cnn") -> Schema:
    return schema.reply(convert(seeded_network(network), METHODS[method]()), METHODS[method](), phase, update)


@listed("network", NETWORKS)
@listed("phase", [Phase.TRAIN, Phase.FROZEN, Phase.MEASURE])
@listed("name", METHODS)
def test_what_fits_passes_and_what_stays_home_is_in_no_schema(name: str, phase: Phase, network: str) -> None:
    method = METHODS[name]()
    model = convert(seeded_network(network), method)
    kept = set(model.state_dict()) - set(schema.names(model, method, *Role))
    for specs in (reply(name, phase, network=network), schema.instruction(model, method)):
        specs.check(example(specs))
        asked = {k for section in specs.sections if section != "moments" for k in specs.sections[section]}
        assert not asked & kept
        assert not any(k.endswith(("num_batches_tracked", "mixing_logit")) for k in asked)


@listed(
    ("name", "phase", "expected"),
    [
        ("fedavg", Phase.TRAIN, ["weights", "statistics"]),
        ("fedavg", Phase.FROZEN, ["weights"]),
        ("gn", Phase.TRAIN, ["weights"]),
        ("fedbn", Phase.TRAIN, ["weights"]),
        ("silobn", Phase.TRAIN, ["weights"]),
        ("fbn", Phase.TRAIN, ["weights", "moments"]),
        ("fbn", Phase.FROZEN, ["weights"]),
        ("hbn", Phase.TRAIN, ["weights", "moments"]),
        ("hbn", Phase.MEASURE, ["moments"]),
    ],
)
def test_the_sections_of_a_reply(name: str, phase: Phase, expected: list[str]) -> None:
    assert list(reply(name, phase).sections) == expected


def test_gradients_replace_weights() -> None:
    weights, gradients = reply("fbn").sections["weights"], reply("fbn", update="gradients").sections
    assert gradients["gradients"] == weights
    assert "weights" not in gradients


def test_layers_without_running_statistics_are_not_asked_for_moments() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4, track_running_stats=False), torch.nn.BatchNorm2d(4))
    asked = schema.reply(model, METHODS["fedavg"](), Phase.MEASURE).sections["moments"]
    assert list(asked) == ["2.count", "2.mean", "2.var"]


Change = Callable[[Payload], object]
WRONG: dict[str, tuple[Change, str]] = {
    "missing section": (lambda p: p.pop("moments"), r"moments: missing: expected 6 tensors, but got sections \['weights'\]"),
    "extra section": (lambda p: p.update(spam={}), r"spam: extra section: expected only the sections \['moments', 'weights'\]"),
    "missing tensor": (lambda p: p["weights"].pop("9.bias"), "weights/9.bias: missing"),
    "extra tensor": (
        lambda p: p["weights"].update({"9.spam": np.ones(1)}),
        "weights/9.spam: extra tensor: no tensor of this name was expected",
    ),
    "shape": (
        lambda p: p["weights"].update({"9.bias": np.ones((4, 1), "float32")}),
        r"weights/9.bias: expected shape \(4,\), but got \(4, 1\)",
    ),
    "dtype": (lambda p: p["weights"].update({"9.bias": np.ones(4)}), "weights/9.bias: expected dtype float32, but got float64"),
    "byte order": (lambda p: p["weights"].update({"9.bias": np.ones(4, ">f4")}), "weights/9.bias: expected dtype float32, but got >f4"),
    "NaN": (lambda p: p["weights"]["9.bias"].__setitem__(2, np.nan), r"weights/9.bias: 1 of 4 values are not finite \(NaN or Inf\)"),
    "Inf": (lambda p: p["moments"]["1.mean"].__setitem__(0, -np.inf), "moments/1.mean: 1 of 4 values are not finite"),
    "variance": (lambda p: p["moments"]["1.var"].__setitem__(0, -1e-3), "moments/1.var: expected values >= 0, but the smallest is -0.001"),
    "count": (lambda p: p["moments"]["1.count"].__setitem__(0, -1), "moments/1.count: expected values >= 0, but the smallest is -1"),
}


@listed("kind", WRONG)
def test_what_does_not_fit_is_named(kind: str) -> None:
    specs = reply("fbn")
    payload = example(specs)
    specs.check(payload)  # control
    change, expected = WRONG[kind]
    change(payload)
    with pytest.raises(WireError, match=expected):
        specs.check(payload)


def test_a_negative_running_variance_is_refused_but_a_negative_mean_is_not() -> None:
    specs = reply("fedavg")
    payload = example(specs)
    payload["statistics"]["1.running_mean"][:] = -5
    specs.check(payload)
    payload["statistics"]["1.running_var"][:] = -5
    with pytest.raises(WireError, match="statistics/1.running_var: expected values >= 0, but the smallest is -5"):
        specs.check(payload)


def test_the_signature_tells_models_methods_and_dtypes_apart() -> None:
    fbn, fedavg = METHODS["fbn"](), METHODS["fedavg"]()
    small, other = seeded_network("cnn"), seeded_network("resnet")
    found = [
        signature(convert(small, fedavg), fedavg),
        signature(convert(small, METHODS["fedbn"]()), METHODS["fedbn"]()),  # the same tensors
        signature(convert(small, fbn), fbn),
        signature(convert(other, fbn), fbn),
        signature(convert(seeded_network("cnn", dtype=torch.float64), fbn), fbn),
    ]
    assert len(set(found)) == len(found)
    assert signature(convert(seeded_network("cnn", seed=7), fbn), fbn) == found[2]  # values do not matter


@pytest.mark.parametrize("name", ["fedavg", "fbn"])
def test_the_one_wrong_tensor_among_many_is_named(name: str) -> None:
    """Small tensors of one dtype and range are checked together: the error and the largest value are those of each alone."""
    specs = reply(name)
    payload = example(specs)
    assert specs.check(payload) == {section: float(any("float" in s.dtype for s in of.values())) for section, of in specs.sections.items()}
    for section, of in specs.sections.items():
        for tensor, spec in of.items():
            right = payload[section][tensor]
            wrong = {"dtype": right.astype(np.float16), "shape": right[None]}
            if "float" in spec.dtype:
                wrong |= {"finite": np.where(np.arange(right.size).reshape(right.shape) == right.size - 1, np.nan, right)}
                wrong["finite"] = wrong["finite"].astype(spec.dtype)
            if np.isfinite(spec.at_least):
                wrong["expected values >="] = right * 0 + np.asarray(spec.at_least - abs(spec.at_least) - 1, right.dtype)
            for what, array in wrong.items():
                with pytest.raises(WireError, match=what) as refused:
                    specs.check({**payload, section: {**payload[section], tensor: array}})
                assert (refused.value.section, refused.value.tensor) == (section, tensor)
            if "float" in spec.dtype:
                assert specs.check({**payload, section: {**payload[section], tensor: right * 5}})[section] == 5.0
