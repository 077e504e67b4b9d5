"""Compute medians and trimmed means of columns in machine code. This needs the extra ``robust`` (llvmlite).

On one thread, the median and the trimmed mean are 5 to 9 times as fast as with NumPy alone on a quiet machine
(benchmarks/results/robust.md). On a busy machine they are 7 to 15 times as fast. This holds for float32 tables with 5
to 110 million numbers in 10 or 50 rows. After nearest-neighbour mixing they are 1.1 to 1.7 times as fast, because the
distances of the mixing take most of the time. A defended update (``Defence.update``) is 1.1 to 1.5 times as fast, because it first
copies the rows to float64. ``benchmarks/robust.py`` repeats the comparison.

LLVM compiles one function for each pair of the number of rows and the number of values to cut. The function runs
the pruned sorting network without branches, on 32 bytes of every row at a time. These bytes stay in registers and
in the first-level cache. The function reads the rows without copying them. It adds the middle values in the same
order as ``coordinate`` does for few rows, so its results have the same bits.

Compiling the function for 100 rows takes a fifth of a second, so only large tables use it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fl_bn.robust.networks import Keep, selection

WORTH = 1 << 22  # numbers in a table above which compiling pays off within a few calls
MOST = 128  # the most rows; the code grows faster than their number
VECTOR = 32  # bytes of a row in one SIMD vector, on which the processor computes at once
AHEAD = 256  # bytes of a row that are fetched before they are needed


class Middle:
    """Average every column of ``n`` rows without its ``trim`` smallest and ``trim`` largest values.

    The function ``middle`` compiles the code for one pair of ``n`` and ``trim``.

    Args:
        engine: the LLVM engine that holds the compiled function.
        n: the number of rows.
        double: whether the rows are float64 instead of float32.

    Attributes:
        n: the number of rows.
        dtype: float32 or float64, for rows and results.
        lanes: the number of columns in one SIMD vector.
    """

    def __init__(self, engine: Any, n: int, double: bool) -> None:
        self._engine = engine  # keeps the machine code alive
        self._code = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(
            engine.get_function_address("middle")
        )
        self.n, self.dtype = n, np.dtype(np.float64 if double else np.float32)
        self.lanes = VECTOR // self.dtype.itemsize

    def of_rows(self, rows: Sequence[Any], out: np.ndarray) -> bool:
        """Compute the averages of the columns of ``rows``, and write them into ``out``.

        Args:
            rows: n contiguous arrays (width,).
            out: receives the averages, (width,).

        Returns:
            Whether all numbers are finite. If not, ``out`` holds no valid result.
        """
        if len(out) < self.lanes:
            return self._of_few(np.stack(rows), out)
        addresses = [row.__array_interface__["data"][0] for row in rows]
        return self._run(np.array(addresses, np.uintp), out)

    def of_block(self, block: np.ndarray, out: np.ndarray) -> bool:
        """Compute the averages of the columns of ``block``, and write them into ``out``.

        Args:
            block: the array (n, width), with contiguous rows.
            out: receives the averages, (width,).

        Returns:
            Whether all numbers are finite. If not, ``out`` holds no valid result.
        """
        if len(out) < self.lanes:
            return self._of_few(block, out)
        return self._run(block.ctypes.data + np.arange(len(block), dtype=np.uintp) * np.uintp(block.strides[0]), out)

    def _of_few(self, block: np.ndarray, out: np.ndarray) -> bool:
        """Compute as ``of_block`` does, for a block with fewer columns than one SIMD vector holds."""
        if not len(out):
            return True
        padded, values = np.zeros((self.n, self.lanes), self.dtype), np.empty(self.lanes, self.dtype)
        padded[:, : len(out)] = block
        finite = self.of_block(padded, values)
        out[:] = values[: len(out)]
        return finite

    def _run(self, addresses: np.ndarray, out: np.ndarray) -> bool:
        return not self._code(addresses.ctypes.data, len(out), out.ctypes.data)


@lru_cache(maxsize=64)
def middle(n: int, trim: int, double: bool) -> Middle | None:
    """Make the function that averages columns of ``n`` rows without ``trim`` values at either end.

    Args:
        n: the number of rows.
        trim: how many of the smallest, and how many of the largest values of a column are left out.
        double: whether the rows are float64 instead of float32.

    Returns:
        The function. None if llvmlite is missing, or for more than ``MOST`` rows.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    if n > MOST:
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), opt=2)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code(n, trim, double)), machine)
    engine.finalize_object()
    return Middle(engine, n, double)


def code(n: int, trim: int, double: bool) -> str:
    """Write LLVM code for the function ``middle(addresses of the rows, number of columns, out)``.

    ``middle`` writes the average of each column's middle values to ``out``. It returns 0 if all numbers are finite.
    Each step computes as many columns as one SIMD vector holds. The last step ends at the last column. So it computes some
    columns a second time, unless the number of columns is a multiple of the vector's length.

    Args:
        n: the number of rows.
        trim: how many of the smallest, and how many of the largest values of a column are left out.
        double: whether the rows are float64 instead of float32.
    """
    number, size = ("double", 8) if double else ("float", 4)
    lanes = VECTOR // size
    vector, multiply = f"<{lanes} x {number}>", f"@llvm.fmuladd.v{lanes}f{8 * size}"
    count = ", ".join([f"{number} {n - 2 * trim}.0"] * lanes)
    lines = [
        f"declare {vector} {multiply}({vector}, {vector}, {vector})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "declare i64 @llvm.smin.i64(i64, i64)",
        "define i32 @middle(ptr noalias readonly %rows, i64 %columns, ptr noalias %out) {",
        f"entry:\n %last = sub i64 %columns, {lanes}\n br label %loop",
        "loop:\n %step = phi i64 [0, %entry], [%next, %loop]",
        f" %before = phi {vector} [zeroinitializer, %entry], [%seen, %loop]",
        " %at = call i64 @llvm.smin.i64(i64 %step, i64 %last)",
    ]
    sums = ["%before", *["zeroinitializer"] * 3]  # sums of 0 * number, NaN if any is not finite; four sums can be added in parallel
    for i in range(n):
        lines += [
            f" %entry{i} = getelementptr ptr, ptr %rows, i64 {i}\n %row{i} = load ptr, ptr %entry{i}, !invariant.load !0",
            f" %here{i} = getelementptr {number}, ptr %row{i}, i64 %at\n %ahead{i} = getelementptr i8, ptr %here{i}, i64 {AHEAD}",
            f" call void @llvm.prefetch.p0(ptr %ahead{i}, i32 0, i32 3, i32 1)",
            f" %x{i} = load {vector}, ptr %here{i}, align 1",
            f" %zero{i} = call {vector} {multiply}({vector} %x{i}, {vector} zeroinitializer, {vector} {sums[i % 4]})",
        ]
        sums[i % 4] = f"%zero{i}"
    wires = [f"%x{i}" for i in range(n)]
    for k, (low, high, keep) in enumerate(selection(n, trim)):
        a, b = wires[low], wires[high]
        lines.append(f" %less{k} = fcmp olt {vector} {a}, {b}")
        if keep & Keep.LOW:
            lines.append(f" %low{k} = select <{lanes} x i1> %less{k}, {vector} {a}, {vector} {b}")
            wires[low] = f"%low{k}"
        if keep & Keep.HIGH:
            lines.append(f" %high{k} = select <{lanes} x i1> %less{k}, {vector} {b}, {vector} {a}")
            wires[high] = f"%high{k}"
    total, seen = _sum(lines, vector, "total", wires[trim : n - trim]), _sum(lines, vector, "zeros", sums)
    lines += [
        f" %mean = fdiv {vector} {total}, <{count}>",
        f" %there = getelementptr {number}, ptr %out, i64 %at\n store {vector} %mean, ptr %there, align 1",
        f" %seen = fadd {vector} {seen}, zeroinitializer",
        f" %next = add i64 %step, {lanes}\n %more = icmp slt i64 %next, %columns\n br i1 %more, label %loop, label %done",
        f"done:\n %bad = fcmp uno {vector} %seen, %seen\n %bits = bitcast <{lanes} x i1> %bad to i{lanes}",
        f" %any = icmp ne i{lanes} %bits, 0\n %answer = zext i1 %any to i32\n ret i32 %answer\n}}\n!0 = !{{}}",
    ]
    return "\n".join(lines)


def _sum(lines: list[str], vector: str, name: str, values: list[str]) -> str:
    """Append LLVM instructions that add ``values`` in order to ``lines``, and return the name of the sum.

    Args:
        lines: the instructions so far.
        vector: the LLVM type of the values.
        name: the beginning of the names of the new values.
        values: the names of the values.
    """
    total = values[0]
    for k, value in enumerate(values[1:]):
        lines.append(f" %{name}{k} = fadd {vector} {total}, {value}")
        total = f"%{name}{k}"
    return total
