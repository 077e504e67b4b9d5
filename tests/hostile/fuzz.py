"""Run ``tools.hostile.fuzz`` under its old name, which documents outside this repository use."""

from tools.hostile.fuzz import main

if __name__ == "__main__":
    raise SystemExit(main())
