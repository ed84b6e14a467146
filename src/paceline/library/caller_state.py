"""Keeps the settings of the caller's process when a run's model is built or evaluated in it."""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_ONE_AT_A_TIME = threading.RLock()  # these settings belong to the process, not to a thread
# The first is set for runs with --exact or --deterministic, the second by torch when its compiler is imported.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")


@contextmanager
def caller_state_kept() -> Iterator[None]:
    """Restore random generators, the number of threads, filters of warnings, and what torch allows kernels to do.

    Modules that import torch are imported inside of it: torch adds a filter of warnings and a variable.

    Threads that use this wait for each other. A thread that draws random numbers meanwhile without it may get numbers
    of the run.
    """
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        variables = {name: os.environ.get(name) for name in _VARIABLES}
        import numpy as np
        import torch

        python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            if devices:
                torch.cuda.set_rng_state_all(devices)
            torch.set_num_threads(threads)
            torch.backends.cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
