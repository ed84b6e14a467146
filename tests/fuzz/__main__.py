"""`python -m fuzz FORMAT [CASES] [SEED]`: fuzz one format by hand, from tests/, in this process."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from fuzz.samples import make_samples
from fuzz.sandbox import run_cases
from fuzz.table import FORMATS


def main() -> int:
    name, cases, seed = [*sys.argv[1:], "1000", "0"][:3]
    root = Path(tempfile.gettempdir(), "paceline-fuzz-samples")
    if not root.exists():
        root.mkdir()
        make_samples(root)
    work = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    form = next(form for form in FORMATS if form.name == name)
    began = time.monotonic()
    findings = run_cases(form, root, work, seed=int(seed), cases=range(int(cases)), by_all_readers=False)
    for finding in findings:
        print(finding)
    print(f"{name}: {len(findings)} findings, {time.monotonic() - began:.1f} s, files in {work}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
