"""Gather what several tests of a deployment import from inner modules: where one moves, only this file changes."""

# ruff: noqa: F401

from __future__ import annotations

from fl_bn.app.checks import machine
from fl_bn.app.config import ConfigError
from fl_bn.app.overrides import parse_overrides
from fl_bn.cli.main import app
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.support.finding import Finding
from fl_bn.support.flower_config import Scalar, flower_config
from fl_bn_site.audit import append, files_in, lines_in
from fl_bn_site.audit_check import check
from fl_bn_site.certificates import read_public, write_site_key
from fl_bn_site.commands import commands, environment, node_config
from fl_bn_site.folders import FolderError, ServerFolder, SiteFolder
from fl_bn_site.kit import KitError, KitPlan, create
from fl_bn_site.launch import with_sites
from fl_bn_site.leaving import OTHER
from fl_bn_site.membership import add_site, remove_site
from fl_bn_site.policy import Policy, PolicyError
from fl_bn_site.project import build, stage
from fl_bn_site.signing import KEY, OF_SERVER, NotSigned, Submitter
from fl_bn_site.status import status
from fl_bn_site.submit import COMPLETED, run_config
from fl_bn_site.submitters import Package, hand_out, key_file, read_key, write_submitter_key
from fl_bn_site.verify import verify
