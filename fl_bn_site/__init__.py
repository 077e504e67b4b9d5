"""Run fl-bn on separate machines.

This package has kits, Flower's processes with repairs, submission, queue, status, metrics and a site's policy.
The commands are part of ``fl-bn`` where the extra ``deployment`` is installed.
"""
