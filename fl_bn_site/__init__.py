"""Run fl-bn on separate machines.

The package makes one folder per machine (a *kit*) and keeps Flower's processes running there. It submits
runs, reports the state of sites and runs, and enforces the policy of a site. Its commands are part of
``fl-bn`` where the extra ``deployment`` is installed.
"""
