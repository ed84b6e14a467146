"""A token file that shows whether all nodes share the folder of runs. Imports no torch."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.runs.shared_token import find_token, remove_token, write_token

_TOKEN = "PACELINE_DOCTOR_TOKEN"  # set for ranks that we start on other machines


@dataclass(frozen=True)
class LeftToken:
    """Which host wrote the file, and its path."""

    folder: str
    name: str
    writer: str

    def find(self) -> str:
        """Empty if this node sees the file, otherwise the reason."""
        return find_token(Path(self.folder), self.name)

    def remove(self) -> None:
        remove_token(Path(self.folder), self.name)


def leave_token(output_dir: Path) -> LeftToken | None:
    """Write the file into the folder of runs, or its nearest existing parent. None if nothing can be written."""
    whole = output_dir.expanduser().absolute()
    folder = next((place for place in (whole, *whole.parents) if place.is_dir()), Path("/"))
    try:
        name = write_token(folder)
    except OSError:
        return None
    return LeftToken(str(folder), name, socket.gethostname()) if name else None


def read_token() -> LeftToken | None:
    """The file that the starting command has written."""
    text = os.environ.get(_TOKEN)
    return LeftToken(**json.loads(text)) if text else None


def token_variables(token: LeftToken | None) -> dict[str, str]:
    return {_TOKEN: json.dumps(asdict(token))} if token else {}
