"""Check the clock of this machine."""

from __future__ import annotations

import ctypes
import os
import struct

from fl_bn.support.finding import Finding

TIME_ERROR = 5  # result of adjtimex if no time service sets this clock


def time_service() -> Finding:
    """Ask the kernel whether a time service (NTP) sets this clock."""
    buffer = ctypes.create_string_buffer(1024)  # struct timex, all zero: read the clock's state, set nothing
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    if state < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if state == TIME_ERROR:
        return Finding(
            "warn",
            "time service",
            "the kernel says that no time service keeps this clock",
            "start chrony or systemd-timesyncd: Flower refuses a site whose clock is 5 s ahead of the server's, or 305 s behind",
        )
    largest = struct.unpack_from("@Iqqq", buffer.raw)[3]
    return Finding("ok", "time service", f"the kernel says that a time service keeps this clock, to {largest / 1000:.0f} ms at worst")
