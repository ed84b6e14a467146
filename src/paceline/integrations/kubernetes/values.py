"""Parse single values of a Kubernetes job: what Kubernetes accepts, or an error screen."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePosixPath

from paceline.errors import UserError, printable_line
from paceline.launch.job_record import SECRET_PREFIX
from paceline.runtime.secret import RUN_SECRET
from paceline.settings.values import START_TIMEOUT, Setting, invalid

_DNS_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_DNS_NAME = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_LABEL = re.compile(_DNS_LABEL)
_SERVICE = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # also the name of the job's Service
_SUBDOMAIN = re.compile(_DNS_NAME)
_KEY = re.compile(rf"((?=[^/]{{1,253}}/){_DNS_NAME}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(SECRET_PREFIX + rf"(?=[^/]{{1,253}}/){_DNS_NAME}/(?!\.\.|\.$)[A-Za-z0-9._-]{{1,253}}")
_VARIABLE_FORMS = "NAME=VALUE, or NAME=secret:SECRET/KEY for a key of a Secret in the namespace"
_QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[KMGTP]i|[kMGTP])?")
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
RUNS_PATH, DATA_PATH = "/runs", "/data"
FILES_PATH = "/etc/paceline"  # the user's recipe and functions
_OWN_PATHS = ("/tmp", "/dev/shm", FILES_PATH)


_BYTES |= {f"{unit}i": 1024 ** (power + 1) for power, unit in enumerate("KMGTP")}
# A registry has a dot or a port, or is localhost. Otherwise the text before the first slash is part of the path.
_REGISTRY = r"(?=[^/]*[.:]|localhost)(?i:" + _DNS_NAME + r")(:[0-9]+)?/"
_IMAGE_PART = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?P<name>({_REGISTRY})?{_IMAGE_PART}(/{_IMAGE_PART})*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(@sha256:(?P<digest>[0-9a-f]{64}))?"
)
_LONGEST_IMAGE_NAME = 255
LONGEST_NAME = 50  # of a job
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
# Set by the manifest, the launcher or torch. A second value would replace them.
_OWN_VARIABLES = (
    *("PYTHONUNBUFFERED", "HOME", "USER", "PACELINE_NODES", "PACELINE_NODE", "PACELINE_LEADER"),
    *(START_TIMEOUT, RUN_SECRET, "RANK", "WORLD_SIZE"),
)
_KUEUE = "kueue.x-k8s.io/"
_OWN_LABELS = (
    "app.kubernetes.io/",
    "batch.kubernetes.io/",
    "jobset.sigs.k8s.io/",
    "trainer.kubeflow.org/",
    _KUEUE,
)
NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_CAPABILITY = re.compile(r"[A-Z][A-Z0-9_]*")
_HUGE_PAGES = re.compile(r"hugepages-(?P<page>[1-9][0-9]*[KMG]i)")
_LONGEST_RESOURCE_DOMAIN = 253 - len("requests.")  # quotas prefix the name with this
_MOST_ANNOTATION_BYTES = 256 * 1024
# The API server warns about these, and newer nodes do not have the old labels.
_RENAMED_LABELS = {
    "beta.kubernetes.io/os": "kubernetes.io/os",
    "beta.kubernetes.io/arch": "kubernetes.io/arch",
    "beta.kubernetes.io/instance-type": "node.kubernetes.io/instance-type",
    "failure-domain.beta.kubernetes.io/zone": "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region": "topology.kubernetes.io/region",
}
# Without effect on current clusters, or only for static pods.
_REFUSED_ANNOTATIONS = (
    "scheduler.alpha.kubernetes.io/critical-pod",
    "security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "container.apparmor.security.beta.kubernetes.io/",
    "kubernetes.io/config.mirror",
)


def in_bytes(quantity: str) -> Fraction:
    match = _QUANTITY.fullmatch(quantity)
    assert match is not None, quantity
    return Fraction(match["number"]) * _BYTES[match["unit"] or ""]


@dataclass(frozen=True)
class Toleration:
    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True)
class PodUser:
    uid: int = 10001
    gid: int = 10001

    def __str__(self) -> str:
        return str(self.uid) if self.uid == self.gid else f"{self.uid}:{self.gid}"


def as_name(text: str, longest: int = LONGEST_NAME) -> str:
    """The nearest name that Kubernetes accepts. A long text is cut at its beginning: the end contains the time."""
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    short = name[-longest:].strip("-")
    if not short[:1].isdigit():
        return short
    return f"run-{name[4 - longest :].strip('-')}"  # the name of a Service must start with a letter


# --- Single values ----------------------------------------------------------------------------------------------------


def parse_word(text: str, setting: Setting) -> str:
    if not text or not text.isprintable() or " " in text:
        raise invalid(setting, text, "text without spaces")
    return text


def name_parser(*, dots: bool = False, longest: int = 0) -> Callable[[str, Setting], str]:
    """A parser of names: a label of DNS, with `dots` a subdomain."""

    def parse_name(text: str, setting: Setting) -> str:
        return require_name(parse_word(text, setting), setting, dots=dots, longest=longest or (253 if dots else 63))

    return parse_name


def require_name(text: str, setting: Setting, *, dots: bool, longest: int) -> str:
    if (_SUBDOMAIN if dots else _LABEL).fullmatch(text) and len(text) <= longest:
        return text
    letters = "small letters, digits and dashes" + (" and dots" if dots else "")
    allowed = f"{letters}, a letter or digit at both ends, up to {longest}"
    better = as_name(text)
    raise invalid(setting, text, allowed, f"{setting.field.flag} {better}" if better else None)


def require_job_name(text: str, longest: int, setting: Setting) -> None:
    if not _SERVICE.fullmatch(text) or len(text) > longest:
        allowed = f"small letters, digits and dashes, a letter first, up to {longest}: the cluster adds to it"
        raise invalid(setting, text, allowed, f"--job-name {as_name(text, longest) or 'my-job'}")


def refuse_repeated(keys: Sequence[str], setting: Setting | None) -> None:
    """The API server warns about a second entry of one name, and keeps one of them."""
    for key in keys:
        if keys.count(key) > 1 and setting is not None:
            what = f"{setting.field.flag} gives {printable_line(key)} twice"
            raise UserError(what, where=setting.where, got=printable_line(key), hint="leave one out")


def parse_image(text: str, setting: Setting) -> str:
    match = _IMAGE.fullmatch(parse_word(text, setting))
    if match is None or len(match["name"]) > _LONGEST_IMAGE_NAME:
        small = text.lower() if _IMAGE.fullmatch(text.lower()) else ""
        allowed = "[REGISTRY/]NAME:TAG or NAME@sha256:DIGEST, in small letters"
        raise invalid(setting, text, allowed, f"--image {small}" if small else None)
    if not match["digest"] and match["tag"] in (None, "latest"):
        raise UserError(
            "this tag may name another image later",
            where=setting.where,
            got=text,
            allowed="a tag other than latest, or a digest: a replaced pod must run the same image as the others",
            hint=f"--image {text.removesuffix(':latest')}:0.1.0",
        )
    return text


def parse_size(text: str, setting: Setting) -> str:
    match = _QUANTITY.fullmatch(parse_word(text, setting))
    flag = setting.field.flag
    if match is None or not match["unit"] or float(match["number"]) == 0:
        number = re.match(r"[0-9]+(\.[0-9]+)?", text)
        unit = re.sub(r"[^KMGTP]", "", text.upper())[:1] or "G"
        hint = f"{flag} {number[0]}{unit}i" if number and float(number[0]) else None
        raise invalid(setting, text, "a number with Mi, Gi or Ti (or M, G, T), as 64Gi", hint)
    if in_bytes(text).denominator != 1:
        nearest = f"{flag} {math.ceil(in_bytes(text) / 1024**2)}Mi"
        raise invalid(setting, text, "a whole number of bytes", nearest)
    return text


def parse_gpu_resource(text: str, setting: Setting) -> str:
    if not _is_extended(parse_word(text, setting)):
        allowed = "the full name of an extended resource, as nvidia.com/gpu"
        hint = "kubectl describe nodes lists them under Allocatable"
        raise invalid(setting, text, allowed, hint)
    return text


def _is_extended(name: str) -> bool:
    """Whether a device plugin may offer it. Names in kubernetes.io/ are reserved."""
    domain = name.partition("/")[0]
    is_native = "/" not in name or "kubernetes.io/" in name or name.startswith("requests.")
    return bool(_KEY.fullmatch(name)) and not is_native and len(domain) <= _LONGEST_RESOURCE_DOMAIN


def parse_resource(text: str, setting: Setting) -> tuple[str, str]:
    """An extended resource is a whole number, such as rdma/hca=1. Huge pages are a size."""
    name, _, amount = text.partition("=")
    huge = _HUGE_PAGES.fullmatch(name)
    if huge is not None and _QUANTITY.fullmatch(amount):
        _require_whole_pages(text, huge["page"], amount, setting)
    elif not (_is_extended(name) and re.fullmatch(r"[1-9][0-9]{0,8}", amount)):
        allowed = "DOMAIN/NAME=N, as rdma/hca=1, or hugepages-2Mi=SIZE; no name of kubernetes.io"
        raise invalid(setting, text, allowed)
    return name, amount


def _require_whole_pages(text: str, page: str, amount: str, setting: Setting) -> None:
    pages = in_bytes(amount) / in_bytes(page)
    if pages <= 0 or pages.denominator != 1:
        number, unit = int(page[:-2]), page[-2:]
        hint = f"--resource hugepages-{page}={max(1, math.ceil(pages)) * number}{unit}"
        raise invalid(setting, text, f"a multiple of the page, {page}", hint)


def parse_capability(name: str, setting: Setting) -> str:
    if not _CAPABILITY.fullmatch(name) or name.startswith("CAP_") or name == "ALL":
        better = name.upper().removeprefix("CAP_")
        hint = f"--capability {better}" if _CAPABILITY.fullmatch(better) and better != "ALL" else None
        raise invalid(setting, name, "one capability of Linux without CAP_, as IPC_LOCK", hint)
    return name


def parse_pair(text: str, setting: Setting) -> tuple[str, str]:
    """KEY=VALUE of labels, annotations and selectors. Only annotations accept any text as value."""
    name = setting.field.name
    key, is_set, value = text.partition("=")
    is_value = name == "annotation" or bool(_VALUE.fullmatch(value))
    if not is_set or not _KEY.fullmatch(key) or not is_value:
        examples = {"node_selector": "accelerator=h100", "label": "scheduling.x-k8s.io/pod-group=NAME"}
        example = examples.get(name, "k8s.v1.cni.cncf.io/networks=rdma-net")
        raise invalid(setting, text, f"KEY=VALUE, as {example}")
    # Users may set Kueue's topology annotations. Kueue's queue is a flag.
    is_kueues = name == "annotation" and key.startswith(_KUEUE) and key != f"{_KUEUE}queue-name"
    if name != "node_selector" and key.startswith(_OWN_LABELS) and not is_kueues:
        raise invalid(setting, text, "a key that the manifest does not set itself", "leave it out")
    if name == "node_selector" and key in _RENAMED_LABELS:
        hint = f"--node-selector {_RENAMED_LABELS[key]}={value}"
        raise invalid(setting, text, "a label that nodes still have", hint)
    if name == "annotation" and key.startswith(_REFUSED_ANNOTATIONS):
        hint = "--priority-class NAME" if "critical-pod" in key else "leave it out"
        raise invalid(setting, key, "a key that current clusters read from pods", hint)
    return key, value


def check_pairs(rows: Sequence[tuple[str, str]], setting: Setting | None) -> None:
    """Each key once, and not too much text in all."""
    refuse_repeated([key for key, _ in rows], setting)
    size_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in rows)
    if setting is not None and size_bytes > _MOST_ANNOTATION_BYTES:
        what, got = f"{setting.field.flag} holds too much text", f"{size_bytes:,} bytes"
        raise UserError(what, where=setting.where, got=got, allowed=f"{_MOST_ANNOTATION_BYTES:,} bytes in all")


def parse_variable(text: str, setting: Setting) -> tuple[str, str]:
    """A name and a value, or a name and `secret:SECRET/KEY`. Error screens do not repeat values."""
    name, is_set, value = text.partition("=")
    where = setting.where
    is_secret = value.startswith(SECRET_PREFIX)
    if not is_set or not _VARIABLE.fullmatch(name) or (is_secret and not _SECRET.fullmatch(value)):
        raise UserError("this is not a variable", where=where, got=printable_line(name), allowed=_VARIABLE_FORMS)
    if name in _OWN_VARIABLES or name.startswith(("SLURM_", "PET_", "LOCAL_", "MASTER_")):
        raise UserError(f"{name} belongs to the launcher", where=where, got=name, hint="leave it out")
    return name, value


def parse_toleration(text: str, setting: Setting) -> Toleration:
    rest, has_effect, effect = text.partition(":")
    key, _, value = rest.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (has_effect and effect not in _EFFECTS):
        close = difflib.get_close_matches(effect, _EFFECTS, n=1)
        hint = f"--toleration {rest}:{close[0]}" if close else None
        raise invalid(setting, text, f"KEY, KEY=VALUE, either with :{', :'.join(_EFFECTS)}", hint)
    return Toleration(key, value, effect)


def parse_user(text: str, setting: Setting) -> PodUser:
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None or int(match[1]) == 0:
        raise invalid(setting, text, "UID or UID:GID, numbers; not 0: pods do not run as root")
    return PodUser(int(match[1]), int(match[2] or match[1]))


# The volumes of a Kubernetes job: claims or folders of every node, and their mount paths.


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
