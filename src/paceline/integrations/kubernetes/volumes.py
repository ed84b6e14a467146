"""The volumes of a Kubernetes job, from its flags: claims or folders of every node, and their mount paths."""

from __future__ import annotations

from pathlib import PurePosixPath

from paceline.errors import UserError
from paceline.integrations.kubernetes.job import DATA_PATH, FILES_PATH, RUNS_PATH, Volume
from paceline.integrations.kubernetes.values import invalid, read_text, read_values, require_name
from paceline.settings.sites import JobSettings

_OWN_PATHS = ("/tmp", "/dev/shm", FILES_PATH)


def parse_runs(settings: JobSettings) -> Volume:
    if "runs" not in settings:
        raise UserError(
            "where are runs kept?",
            allowed="--runs CLAIM, a PersistentVolumeClaim that all pods can write; or --runs /PATH of every node",
            hint="kubectl get pvc lists claims; examples/kubernetes/storage.yaml makes one",
        )
    return Volume(_source(settings, "runs", read_text(settings, "runs")), RUNS_PATH)


def parse_volumes(settings: JobSettings) -> tuple[Volume, ...]:
    volumes = []
    if "data" in settings:
        volumes.append(Volume(_source(settings, "data", read_text(settings, "data")), DATA_PATH))
    volumes += [_parse_mount(text, settings) for text in read_values(settings, "mount")]
    taken = [RUNS_PATH, *_OWN_PATHS]
    for volume in volumes:
        around = next((path for path in taken if _overlap(volume.path, path)), None)
        if around is not None:
            where = settings["mount"].where
            raise UserError("two volumes at one place", where=where, got=f"{volume.path} and {around}")
        taken.append(volume.path)
    return tuple(volumes)


def _parse_mount(text: str, settings: JobSettings) -> Volume:
    source, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not source or not path or mode not in ("", "ro", "rw"):
        raise invalid(settings, "mount", text, "CLAIM:/PATH or /PATH_OF_NODE:/PATH, optionally with :ro")
    if not path.startswith("/") or path.rstrip("/") == "" or ".." in path.split("/") or ":" in path:
        hint = f"--mount {source}:/{path.strip('/.')}" if path.strip("/.") else None
        raise invalid(settings, "mount", text, "an absolute path below /, without ..", hint)
    return Volume(_source(settings, "mount", source), path.rstrip("/"), mode == "ro")


def _source(settings: JobSettings, name: str, text: str) -> str:
    """The name of a claim, or an absolute path on the nodes."""
    if not text.startswith("/"):
        if "/" in text:
            raise invalid(settings, name, text, "the name of a PersistentVolumeClaim, or an absolute path of all nodes")
        return require_name(settings, name, text, dots=True, longest=253)
    if ".." in text.split("/"):
        raise invalid(settings, name, text, "an absolute path without ..")
    return text.rstrip("/") or "/"


def _overlap(one: str, other: str) -> bool:
    first, second = PurePosixPath(one), PurePosixPath(other)
    return first.is_relative_to(second) or second.is_relative_to(first)
