"""A site's policy: what it refuses, in which words, and what it lets through."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fl_bn_site.guides import kit_file
from fl_bn_site.policy import NotAllowed
from tests.deployment.inner import Policy, PolicyError, Submitter, hand_out
from tests.deployment.test_signing import package_of
from tests.listed import listed
from tests.refusals import naming

RUN: dict[str, Any] = {"method": "hbn", "batch-size": 16, "hbn-stat-samples": 0, "dataset": "digits", "model": "mlp", "rounds": 3}


def policy(tmp_path: Path, text: str) -> Policy:
    (tmp_path / "policy.toml").write_text(text if "allow-code" in text or not text else f'allow-code = "any"\n{text}')
    return Policy.read(tmp_path / "policy.toml")


def test_a_missing_line_allows_everything_but_foreign_code_and_a_missing_or_empty_file_allows_nothing(tmp_path: Path) -> None:
    """An editor that saves a file may empty or remove it for a moment."""
    allowed = policy(tmp_path, 'allow-code = "any"\n')
    allowed.check_run({**RUN, "dataset": "own.module:load", "batch-size": 1})
    assert allowed.check_package(b"no zip file", {}) is None
    allowed.check_leaving({"moments": {"samples": 1}, "exchange": {}}, 1)
    for refused in (lambda: Policy.read(tmp_path / "none.toml"), lambda: policy(tmp_path, "")):
        with pytest.raises(PolicyError):
            refused()
    hand_out([Submitter("alice", bytes(32))], tmp_path)
    with pytest.raises(NotAllowed):
        policy(tmp_path, "").check_package(package_of({"app.py": ""}), {})
    with pytest.raises(NotAllowed):
        policy(tmp_path, "min-samples = 8").check_leaving({"moments": {"samples": 4}}, 100)


def test_the_template_s_lines_can_be_set_and_limits_reach_the_app(tmp_path: Path) -> None:
    alice = Submitter("alice", bytes(32))
    hand_out([alice], tmp_path)
    template = kit_file("policy.toml")
    assert policy(tmp_path, template) == Policy(allow_code="signed", trusted_submitters=(alice,)), "a new site takes part in signed runs"
    text = "".join(line.removeprefix("#") + "\n" for line in template.splitlines() if not line.startswith("# "))
    assert policy(tmp_path, text) == Policy(("fedbn", "hbn"), (), "signed", (alice,), 8.0, 8, 40, 0)
    # the app's gate gets the stricter of policy and node config
    eight = policy(tmp_path, "min-samples = 8\nmax-evaluations = 5\nmax-unknown-rounds = 2\n")
    assert eight.limits({"device": "cpu"}) == {"device": "cpu", "min-samples": 8, "max-evaluations": 5, "max-unknown-rounds": 2}
    stricter = {"min-samples": 30, "max-evaluations": 3, "max-unknown-rounds": 0}
    assert eight.limits(stricter) == stricter
    assert policy(tmp_path, "# no line").limits({"min-samples": 3}) == {"min-samples": 3}


@listed(
    ("lines", "run", "words"),
    [
        ('allow-methods = ["fedbn", "fbn"]', {}, "'hbn'"),
        ('allow-methods = ["hbn"]', {}, ""),
        ("allow-modules = []", {"dataset": "os:system"}, "os:system"),
        ("allow-modules = []", {"dataset": "o\u0301.a\u00b7b:\u2118"}, "o\u0301.a\u00b7b:\u2118"),  # identifiers, but no \\w of re
        ("allow-modules = []", {"dataset": "é.1a:f", "name": "x" * 2_000_000, "host": "a.b:80"}, "é.1a:f"),  # in no time
        ('allow-modules = ["hospital"]', {"callbacks": "hospital.a:b,hospitals:f"}, "hospitals:f"),
        ('allow-modules = ["hospital"]', {"dataset": "hospital.data:load"}, ""),
        ("min-samples = 8", {"batch-size": 4}, "batch-size"),
        ("min-samples = 8", {"hbn-stat-samples": 7}, "hbn-stat-samples"),
        ("min-samples = 8", {"batch-size": 8, "hbn-stat-samples": 0}, ""),
    ],
)
def test_a_run_that_is_not_allowed_is_refused_by_name(tmp_path: Path, lines: str, run: dict[str, Any], words: str) -> None:
    """Without words: the run is allowed."""
    given = policy(tmp_path, lines)
    with naming(words, NotAllowed) if words else nullcontext():
        given.check_run({**RUN, **run})


def test_only_the_installed_code_runs_where_the_policy_says_so(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "fl_bn"
    (package / "methods").mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 1\n")
    (package / "methods" / "hbn.py").write_text("x = 1\n")
    (package.parent / "mine.py").write_text("x = 3\n")  # the server does not learn that it guessed this file
    same = {"fl_bn/__init__.py": "VERSION = 1\n", "fl_bn/methods/hbn.py": "x = 1\n", "client_app/app.py": "not loaded"}
    only = policy(tmp_path, 'allow-code = "installed"')
    assert only.check_package(package_of(same), {}, package) is None
    for other, name in (
        ({**same, "fl_bn/methods/hbn.py": "x = 2\n"}, "fl_bn/methods/hbn.py"),
        ({**same, "fl_bn/new.py": ""}, "fl_bn/new.py"),
        ({**same, "fl_bn/../mine.py": "x = 3\n"}, "mine.py"),
        ({"other/app.py": ""}, "app"),
    ):
        with naming(name, NotAllowed):
            only.check_package(package_of(other), {}, package)
        policy(tmp_path, 'allow-code = "any"').check_package(package_of(other), {}, package)  # control
    whole = package_of(same)
    for broken in (b"", b"no zip file", whole.replace(b"VERSION = 1", b"VERSION = 2"), whole[:-30]):
        with pytest.raises(NotAllowed):
            only.check_package(broken, {}, package)


def test_a_policy_that_is_wrong_is_no_policy(tmp_path: Path) -> None:
    code = ('allow-code = "sent"', 'allow-code = "signed"')
    for text in ("allow-method = []", 'allow-methods = "hbn"', "max-memory = 0", "min-samples = 1.5", *code):
        with naming(text.split(" =")[0], PolicyError):
            policy(tmp_path, text)
