"""The old name of ``tools.hostile.fuzz``, which documents outside this repository give."""

from tools.hostile.fuzz import main

if __name__ == "__main__":
    raise SystemExit(main())
