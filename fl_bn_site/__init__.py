"""Separate machines: kits, Flower's processes with repairs, submission, queue, status, metrics, a site's policy.

The commands are part of ``fl-bn`` where the extra ``deployment`` is installed.
"""
