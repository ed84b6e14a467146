"""The volumes of a Kubernetes job: claims or folders of every node, and their mount paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.errors import UserError
from paceline.integrations.kubernetes.values import parse_word, require_name
from paceline.settings.values import Setting, invalid

RUNS_PATH, DATA_PATH = "/runs", "/data"
FILES_PATH = "/etc/paceline"  # the user's recipe and functions
_OWN_PATHS = ("/tmp", "/dev/shm", FILES_PATH)


@dataclass(frozen=True)
class Volume:
    """A claim or a folder of every node, and its path in the pods."""

    source: str
    path: str
    is_read_only: bool = False

    @property
    def is_host_path(self) -> bool:
        return self.source.startswith("/")


def parse_runs(text: str, setting: Setting) -> Volume:
    return Volume(_source(parse_word(text, setting), setting), RUNS_PATH)


def parse_data(text: str, setting: Setting) -> Volume:
    return Volume(_source(parse_word(text, setting), setting), DATA_PATH)


def parse_mount(text: str, setting: Setting) -> Volume:
    source, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not source or not path or mode not in ("", "ro", "rw"):
        raise invalid(setting, text, "CLAIM:/PATH or /PATH_OF_NODE:/PATH, optionally with :ro")
    if not path.startswith("/") or path.rstrip("/") == "" or ".." in path.split("/") or ":" in path:
        hint = f"--mount {source}:/{path.strip('/.')}" if path.strip("/.") else None
        raise invalid(setting, text, "an absolute path below /, without ..", hint)
    return Volume(_source(source, setting), path.rstrip("/"), mode == "ro")


def check_volumes(volumes: Sequence[Volume], setting: Setting | None) -> None:
    """No two volumes at one path, or one inside the other."""
    taken = [RUNS_PATH, *_OWN_PATHS]
    for volume in volumes:
        around = next((path for path in taken if _overlap(volume.path, path)), None)
        if around is not None:
            where = setting.where if setting is not None else None
            raise UserError("two volumes at one path", where=where, got=f"{volume.path} and {around}")
        taken.append(volume.path)


def _source(text: str, setting: Setting) -> str:
    """The name of a claim, or an absolute path on the nodes."""
    if not text.startswith("/"):
        if "/" in text:
            raise invalid(setting, text, "the name of a PersistentVolumeClaim, or an absolute path of all nodes")
        return require_name(text, setting, dots=True, longest=253)
    if ".." in text.split("/"):
        raise invalid(setting, text, "an absolute path without ..")
    return text.rstrip("/") or "/"


def _overlap(one: str, other: str) -> bool:
    first, second = PurePosixPath(one), PurePosixPath(other)
    return first.is_relative_to(second) or second.is_relative_to(first)
