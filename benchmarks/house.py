"""Count lines and files by package, the longest signatures, and the files whose functions a run of HBN calls.

Run ``python benchmarks/house.py [CHECKOUT]``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

TOUCHED = """
import logging, sys, torch
root, seen = sys.argv[1], set()
def called(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root) and code.co_name != "<module>":
        seen.add(code.co_filename)
torch.set_num_threads(1)
logging.getLogger("flwr").setLevel(logging.ERROR)
from fl_bn.flower import run_in_process
import fl_bn.apps.client, fl_bn.apps.server
sys.setprofile(called)
run_in_process({"rounds": 1, "clients": 2, "method": "hbn", "output": "", "evaluate-every": 1})
sys.setprofile(None)
print(len(seen))
"""


def parameters(function: ast.FunctionDef) -> int:
    """Count the parameters of a function without self or cls."""
    arguments = function.args
    return len([a for a in arguments.posonlyargs + arguments.args if a.arg not in ("self", "cls")]) + len(arguments.kwonlyargs)


def main(checkout: str = ".") -> None:
    """Print the files and lines by package of a checkout, its longest signatures, and how many files a run of HBN uses.

    A run uses a file if it calls a function of the file.
    """
    root = Path(checkout).resolve()
    lines, files, signatures = Counter[str](), Counter[str](), list[tuple[int, str]]()
    for path in sorted((root / "fl_bn").rglob("*.py")):
        if "pb2" in path.name:  # generated
            continue
        text, parts = path.read_text(), path.relative_to(root / "fl_bn").parts
        package = parts[0] if len(parts) > 1 else "(top level)"
        lines[package] += text.count("\n")
        files[package] += 1
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                signatures.append((parameters(node), f"{'/'.join(parts)}: {node.name}"))
    print("| package | files | lines |\n|---|---:|---:|")
    for package in sorted(lines):
        print(f"| {package} | {files[package]} | {lines[package]} |")
    print(f"| all | {files.total()} | {lines.total()} |\n")
    print("longest signatures:", ", ".join(f"{name} {count}" for count, name in sorted(signatures, reverse=True)[:3]))
    command = [sys.executable, "-c", TOUCHED, str(root / "fl_bn")]
    done = subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root), "PATH": ""}, capture_output=True, text=True, check=True)
    print("files that a run of HBN calls functions of:", done.stdout.split()[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
