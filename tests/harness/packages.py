"""Hide a package from child processes."""

from __future__ import annotations

from pathlib import Path

_HIDE = """\
import importlib.machinery

_find = importlib.machinery.PathFinder.find_spec


def _find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {names!r} else _find(name, path, target)


importlib.machinery.PathFinder.find_spec = staticmethod(_find_spec)
"""


def hide_packages(folder: Path, *names: str) -> dict[str, str]:
    """Environment variables under which these packages cannot be found."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(_HIDE.replace("{names!r}", repr(names)))
    return {"PYTHONPATH": str(folder)}
