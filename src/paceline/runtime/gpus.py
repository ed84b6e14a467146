"""Counts GPUs without importing torch, which would take seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL


def count_gpus_without_torch() -> int | None:
    """None if only torch can count them."""
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return None
    if not any(Path(driver).exists() for driver in _DRIVERS) or _is_built_without_cuda():
        return 0
    count = _ask_nvidia()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count is None or visible is None:
        return count
    numbers = visible.split(",")
    is_plain = all(number.isdigit() and int(number) < count for number in numbers) and len(set(numbers)) == len(numbers)
    return len(numbers) if is_plain else None


def _is_built_without_cuda() -> bool:
    """Read from the file in which torch keeps its build settings."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    return all(re.search(rf"^{name}\b.*= None$", text, re.MULTILINE) for name in ("cuda", "hip"))


def _ask_nvidia() -> int | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
    except (OSError, AttributeError):
        return None
    return count.value
