"""Code in run folders: code that is not signed by this user is not executed unless the user allows it.

The source of a run's functions is stored in its checkpoints (runs/sources.py), with a mark: a keyed hash (HMAC) of it.
The key is outside of all run folders and only its owner can read it. A checkpoint that another person or machine made,
or whose source was changed, does not pass; one that was moved or copied does.

A run's config.yaml can be used as a recipe, and then names files. For this a run gets `code.json`, with keyed hashes of
each function and of each file that it needs: the file of the function, the packages around it, and the local modules
that it imports. A file outside of the run folder belongs to the user: it is accepted at its place with other content,
or elsewhere with the same content.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.folder import write_json
from paceline.runs.json_files import Fields, ListOf, read_object
from paceline.runs.local_code import UserModule, main_module, modules_needed
from paceline.settings.load import LoadedConfig, load_config
from paceline.settings.schema import Config
from paceline.settings.syntax import CODE_FIELDS, CodeReference, code_references

RECORD = "code.json"
TRUST_FLAG = "--trust-code"
TRUST_VARIABLE = "PACELINE_TRUST_CODE"  # set by the flag, for the ranks that a command starts
_is_trusting = ContextVar("is_trusting", default=False)  # per thread: another thread may read an untrusted folder
_SHAPE = Fields(required={"hmac_sha256": ListOf(str)})
_KEY_BYTES = 32
_MARKS = ("status.json", "metrics.jsonl", "environment.json", "checkpoints", RECORD)


class _NoKey(Exception):
    """There is no usable key; the text gives the reason."""


@contextmanager
def trusting_code(is_trusted: bool) -> Iterator[None]:
    """Allow the code of any run folder, in this block and this thread only. `trust_variables` is for processes."""
    token = _is_trusting.set(is_trusted or _is_trusting.get())
    try:
        yield
    finally:
        _is_trusting.reset(token)


def is_trusting() -> bool:
    return _is_trusting.get() or os.environ.get(TRUST_VARIABLE) == "1"


def trust_variables() -> dict[str, str]:
    """The environment variables for a process that is started in such a block."""
    return {TRUST_VARIABLE: "1"} if is_trusting() else {}


def sign_code(folder: Path, config: Config) -> str:
    """Sign the code of a run with this user's key. Returns the reason if that fails; otherwise empty."""
    references = code_references(config)
    if not references:
        with suppress(OSError):
            (folder / RECORD).unlink(missing_ok=True)
        return ""
    try:
        key = _key()
        seals = sorted({seal for item in references for seal in _seals(key, folder, item)})
        write_json(folder / RECORD, {"hmac_sha256": seals})
    except _NoKey as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"{folder / RECORD}: {error}"
    return ""


def require_trusted_run(folder: Path) -> None:
    """UserError if the run's config names code that is not this user's. Nothing is imported."""
    require_trusted_code(folder, load_config(str(folder / "config.yaml"), []).config)


def require_trusted_recipe(loaded: LoadedConfig) -> None:
    """The same for a recipe that is the config.yaml of a run folder. Code named by flags is trusted."""
    folder = loaded.recipe_path.parent
    is_run = loaded.recipe_path.name == "config.yaml" and any((folder / name).exists() for name in _MARKS)
    if is_run and any(loaded.origin(name) == "file" for name in CODE_FIELDS):
        require_trusted_run(folder)


def require_trusted_code(folder: Path, config: Config, fields: tuple[str, ...] = CODE_FIELDS) -> None:
    """The same for a config and some of its fields. The files of the functions must be in their places."""
    references = [item for item in code_references(config) if item.field in fields]
    _require_files(references)
    if not references or is_trusting():
        return
    fault = _find_fault(folder, references)
    if fault:
        places = [str(item.path if item.is_file else item.place) for item in references]
        raise _untrusted("\n".join(dict.fromkeys(places)), fault)


def sign_sources(sha256: str) -> str:
    """This user's mark for the stored source of a run (runs/sources.py). Empty if there is no key."""
    try:
        return _mark_of(_key(), sha256)
    except _NoKey:
        return ""


def require_trusted_sources(sha256: str, mark: str, *, functions: list[str], where: str) -> None:
    """UserError if the stored source of a run is not marked as this user's. Nothing is imported."""
    if is_trusting():
        return
    try:
        is_own = hmac.compare_digest(mark.encode(), _mark_of(_key(create=False), sha256).encode())
        fault = "" if is_own else "it comes from another person or machine, or was changed"
    except _NoKey as error:
        fault = str(error)
    if fault:
        raise _untrusted(f"{where}\n{', '.join(functions)}", fault)


def _mark_of(key: bytes, sha256: str) -> str:
    return hmac.new(key, json.dumps(["paceline sources 1", sha256]).encode(), hashlib.sha256).hexdigest()


def _untrusted(where: str, fault: str) -> UserError:
    return UserError(
        "this run folder would execute code that is not known to be yours",
        where=where,
        got=fault,
        allowed="code of runs that you trained on this machine",
        hint=f"read the code (in Python: run.source()); if you trust it, add {TRUST_FLAG} (trust_code=True)",
    )


def _require_files(references: list[CodeReference]) -> None:
    """Report a missing file as missing, not as untrusted. A relative name refers to the working folder."""
    missing = [item for item in references if item.is_file and not item.path.exists()]
    if missing:
        is_relative = any(not item.path.is_absolute() for item in missing)
        raise UserError(
            "a file with code of this run was not found",
            where="\n".join(dict.fromkeys(str(item.path.absolute()) for item in missing)),
            got=", ".join(map(str, missing)),
            hint="run the command in the folder in which the run was started" if is_relative else "put the file back",
        )


def _find_fault(folder: Path, references: list[CodeReference]) -> str:
    seals = read_object(folder / RECORD, _SHAPE).get("hmac_sha256")
    if seals is None:
        return f"{folder} has no {RECORD}: another person made it, or an older paceline did"
    try:
        key = _key(create=False)
        for item in references:
            fault = _fault_of(key, folder, item, set(seals))
            if fault is not None:
                return f"{item} comes from another person or machine, or was changed{fault}"
    except _NoKey as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"its code cannot be read: {error}"
    return ""


def _fault_of(key: bytes, folder: Path, item: CodeReference, seals: set[str]) -> str | None:
    """None if the function and every module that it needs are signed.

    The user may edit a file at its place, outside of the run folder. It may then import other modules of the user.
    """
    modules = modules_needed(item)
    main = main_module(item, modules)
    if main is None or not set(_seals_of(key, folder, item, main).values()) & seals:
        return ""
    is_at_its_place = _seals_of(key, folder, item, main).get("place") in seals
    for module in modules:
        of_module = _seals_of(key, folder, item, module)
        is_signed = bool(set(of_module.values()) & seals)
        if not is_signed and not (is_at_its_place and "place" in of_module):
            return f": {module.path or module.name}"
    return None


def _seals(key: bytes, folder: Path, item: CodeReference) -> set[str]:
    """The signatures of a function: of each module that it needs."""
    return {seal for module in modules_needed(item) for seal in _seals_of(key, folder, item, module).values()}


def _seals_of(key: bytes, folder: Path, item: CodeReference, module: UserModule) -> dict[str, str]:
    """The signatures of a module: of its content and, for a file outside of the run folder, of its path."""
    facts = {}
    if module.path is None:
        facts["module"] = ""
    else:
        facts["content"] = hashlib.sha256(module.source).hexdigest()
        if not module.path.is_relative_to(folder.resolve()):
            facts["place"] = str(module.path)
    seals = {}
    for kind, fact in facts.items():
        text = json.dumps(["paceline code 1", item.field, module.name, item.function, kind, *([fact] if fact else [])])
        seals[kind] = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return seals


def hash_code(config: Config) -> dict[CodeReference, str]:
    """A hash of each function's file and of the local modules that it imports, as they were compiled.

    Functions whose file cannot be read are left out.
    """
    hashes = {}
    for item in code_references(config):
        with suppress(OSError, ValueError):
            modules = modules_needed(item)
            main = main_module(item, modules)
            if main is None or main.path is None:
                continue
            digests = {module.name: hashlib.sha256(module.source).hexdigest() for module in modules}
            alone = len(digests) == 1
            text = json.dumps(digests, sort_keys=True)
            hashes[item] = digests[main.name] if alone else hashlib.sha256(text.encode()).hexdigest()
    return hashes


# --- The key ----------------------------------------------------------------------------------------------------------


def key_path() -> Path:
    """$PACELINE_STATE/code.key, else $XDG_STATE_HOME/paceline/code.key, else ~/.local/state/paceline/code.key."""
    given = os.environ.get("PACELINE_STATE")
    if given:
        return Path(given) / "code.key"
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "paceline" / "code.key"
    except RuntimeError as error:
        raise _NoKey(
            "there is no home folder for the key that signs your runs; set PACELINE_STATE to a folder"
        ) from error


def _key(*, create: bool = True) -> bytes:
    path = key_path()
    try:
        return _read_key(path)
    except FileNotFoundError as error:
        if not create:
            raise _NoKey(f"there is no key of yours at {path}: it was trained elsewhere") from error
    except OSError as error:
        raise _NoKey(f"the key that signs your runs cannot be read: {path}: {error.strerror}") from error
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create_key(path)
        return _read_key(path)
    except OSError as error:
        raise _NoKey(f"the key that signs your runs cannot be written: {path}: {error.strerror}") from error


def _read_key(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            # Anyone who can read the key can sign a folder.
            raise _NoKey(f"{path} must be your file, without access for other users: remove it, or chmod 600")
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise _NoKey(f"{path} is not a key of {_KEY_BYTES} bytes: remove it")
    return key


def _create_key(path: Path) -> None:
    """Create the key atomically. If two processes do this, both use the key of the first."""
    descriptor, name = tempfile.mkstemp(prefix=".code.key.", dir=path.parent)  # has mode 0600
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)  # noqa: PTH108
