"""Imported first by the flows: what Metaflow needs before it starts.

Without Metaflow a flow ends with one screen instead of a traceback. Metaflow refuses to start without a user name, and
it does not count root as one. The shell of a container often has no other, so a name is set.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import sys
from contextlib import suppress

from paceline.errors import UserError
from paceline.settings.extras import how_to_install

_missing = [name for name in ("metaflow", "metaflow_extensions") if importlib.util.find_spec(name) is None]
if _missing:
    _packages = {"metaflow": "Metaflow", "metaflow_extensions": "metaflow-checkpoint"}
    _error = UserError(
        f"{_packages[_missing[0]]} is not installed",
        where=sys.executable,
        hint=how_to_install("metaflow"),
    )
    print(_error.screen(), file=sys.stderr)
    sys.exit(_error.exit_code)

from metaflow.util import get_username  # noqa: E402 - only where it is installed

if get_username() is None:
    _name = "root"
    with suppress(KeyError):  # a user id without an entry in /etc/passwd
        _name = pwd.getpwuid(os.getuid()).pw_name
    os.environ["USERNAME"] = _name if _name != "root" else f"uid-{os.getuid()}"  # the tasks inherit it
