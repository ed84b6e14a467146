"""One thread per process: threads are part of what makes results equal to the bit."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
