"""Imported first by the flows: without Metaflow they end with one screen instead of a traceback."""

from __future__ import annotations

import importlib.util
import sys

from paceline.errors import UserError

_missing = [name for name in ("metaflow", "metaflow_extensions") if importlib.util.find_spec(name) is None]
if _missing:
    _packages = {"metaflow": "Metaflow", "metaflow_extensions": "metaflow-checkpoint"}
    _error = UserError(
        f"{_packages[_missing[0]]} is not installed",
        where=sys.executable,
        hint="pip install 'paceline[metaflow]', or from a clone: pip install -e '.[metaflow]' -c constraints-flows.txt",
    )
    print(_error.screen(), file=sys.stderr)
    sys.exit(_error.exit_code)
