"""Check single values of the flags of `paceline submit kubernetes`: what Kubernetes accepts, or an error screen."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from fractions import Fraction

from paceline.errors import UserError, printable_line
from paceline.integrations.kubernetes.job import (
    APIS,
    Api,
    KubernetesJob,
    Toleration,
    as_name,
)
from paceline.launch.job_record import SECRET_PREFIX
from paceline.runtime.secret import RUN_SECRET
from paceline.settings.sites import JobSettings
from paceline.settings.variables import START_TIMEOUT

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
_BYTES |= {f"{unit}i": 1024 ** (power + 1) for power, unit in enumerate("KMGTP")}
# A registry has a dot or a port, or is localhost. Otherwise the text before the first slash is part of the path.
_REGISTRY = r"(?=[^/]*[.:]|localhost)(?i:" + _DNS_NAME + r")(:[0-9]+)?/"
_IMAGE_PART = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?P<name>({_REGISTRY})?{_IMAGE_PART}(/{_IMAGE_PART})*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(@sha256:(?P<digest>[0-9a-f]{64}))?"
)
_LONGEST_IMAGE_NAME = 255
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
# Set by the manifest, the launcher or torch. A second value would replace them.
_OWN_VARIABLES = (
    *(
        "PYTHONUNBUFFERED",
        "HOME",
        "USER",
        "PACELINE_NODES",
        "PACELINE_NODE",
        "PACELINE_LEADER",
        START_TIMEOUT,
        RUN_SECRET,
    ),
    *("RANK", "WORLD_SIZE"),
)
_KUEUE = "kueue.x-k8s.io/"
_OWN_LABELS = (
    "app.kubernetes.io/",
    "batch.kubernetes.io/",
    "jobset.sigs.k8s.io/",
    "trainer.kubeflow.org/",
    _KUEUE,
)
_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
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


# --- Single values ----------------------------------------------------------------------------------------------------


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_values(settings: JobSettings, name: str) -> tuple[str, ...]:
    return settings[name].values if name in settings else ()


def read_text(settings: JobSettings, name: str) -> str:
    if name not in settings:
        return ""
    value = settings[name].values[-1]
    if not value or not value.isprintable() or " " in value:
        raise invalid(settings, name, value, "text without spaces")
    return value


def invalid(settings: JobSettings, name: str, value: str, allowed: str, hint: str | None = None) -> UserError:
    return UserError(f"{name}: {value!r} is not valid", where=settings[name].where, allowed=allowed, hint=hint)


def read_number(settings: JobSettings, name: str, default: int, *, low: int = 0, high: int = 1_000_000) -> int:
    if name not in settings:
        return default
    text = settings[name].values[-1]
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise invalid(settings, name, text, f"a whole number from {low} to {high:,}")
    return int(text)


def read_name(settings: JobSettings, name: str, *, dots: bool = False, longest: int = 0) -> str:
    text = read_text(settings, name)
    return require_name(settings, name, text, dots=dots, longest=longest or (253 if dots else 63)) if text else ""


def parse_job_name(settings: JobSettings, longest: int) -> str:
    text = read_text(settings, "job_name") or KubernetesJob.name
    if not _SERVICE.fullmatch(text) or len(text) > longest:
        allowed = f"small letters, digits and dashes, a letter first, up to {longest}: the cluster adds to it"
        raise invalid(settings, "job_name", text, allowed, f"--job-name {as_name(text, longest) or 'my-job'}")
    return text


def read_names(settings: JobSettings, name: str) -> tuple[str, ...]:
    texts = read_values(settings, name)
    _refuse_repeated(settings, name, texts)
    return tuple(require_name(settings, name, text, dots=True, longest=253) for text in texts)


def _refuse_repeated(settings: JobSettings, name: str, keys: Sequence[str]) -> None:
    """The API server warns about a repeated name and keeps only one entry."""
    for key in keys:
        if keys.count(key) > 1:
            what = f"{flag_of(name)} gives {printable_line(key)} twice"
            raise UserError(what, where=settings[name].where, got=printable_line(key), hint="leave one out")


def require_name(settings: JobSettings, name: str, text: str, *, dots: bool, longest: int) -> str:
    if (_SUBDOMAIN if dots else _LABEL).fullmatch(text) and len(text) <= longest:
        return text
    letters = "small letters, digits and dashes" + (" and dots" if dots else "")
    allowed = f"{letters}, a letter or digit at both ends, up to {longest}"
    better = as_name(text)
    flag = flag_of(name)
    raise invalid(settings, name, text, allowed, f"{flag} {better}" if better else None)


def parse_image(settings: JobSettings) -> str:
    if "image" not in settings:
        raise UserError(
            "which image do the pods run?",
            allowed="--image NAME:TAG, an image with paceline in it",
            hint="docker build --tag REGISTRY/paceline:0.1.0 . && docker push REGISTRY/paceline:0.1.0",
        )
    text = read_text(settings, "image")
    match = _IMAGE.fullmatch(text)
    if match is None or len(match["name"]) > _LONGEST_IMAGE_NAME:
        small = text.lower() if _IMAGE.fullmatch(text.lower()) else ""
        allowed = "[REGISTRY/]NAME:TAG or NAME@sha256:DIGEST, in small letters"
        raise invalid(settings, "image", text, allowed, f"--image {small}" if small else None)
    if not match["digest"] and match["tag"] in (None, "latest"):
        raise UserError(
            "this image may be another one tomorrow",
            where=settings["image"].where,
            got=text,
            allowed="a tag other than latest, or a digest: a pod that comes back must run what the others run",
            hint=f"--image {text.removesuffix(':latest')}:0.1.0",
        )
    return text


def parse_api(settings: JobSettings) -> Api:
    text = read_text(settings, "api") or "job"
    for api in APIS:
        if text.lower() == api:
            return api
    close = difflib.get_close_matches(text.lower(), APIS, n=1)
    raise invalid(settings, "api", text, ", ".join(APIS), f"--api {close[0]}" if close else None)


def parse_size(settings: JobSettings, name: str) -> str:
    text = read_text(settings, name)
    if not text:
        return ""
    match = _QUANTITY.fullmatch(text)
    if match is None or not match["unit"] or float(match["number"]) == 0:
        number = re.match(r"[0-9]+(\.[0-9]+)?", text)
        unit = re.sub(r"[^KMGTP]", "", text.upper())[:1] or "G"
        hint = f"{flag_of(name)} {number[0]}{unit}i" if number and float(number[0]) else None
        raise invalid(settings, name, text, "a number with Mi, Gi or Ti (or M, G, T), as 64Gi", hint)
    if in_bytes(text).denominator != 1:
        nearest = f"{flag_of(name)} {math.ceil(in_bytes(text) / 1024**2)}Mi"
        raise invalid(settings, name, text, "a whole number of bytes", nearest)
    return text


def parse_gpu_resource(settings: JobSettings) -> str:
    text = read_text(settings, "gpu_resource") or KubernetesJob.gpu_resource
    if not _is_extended(text):
        allowed = "the full name of an extended resource, as nvidia.com/gpu"
        hint = "kubectl describe nodes lists them under Allocatable"
        raise invalid(settings, "gpu_resource", text, allowed, hint)
    return text


def _is_extended(name: str) -> bool:
    """Whether a device plugin may offer it. Names in kubernetes.io/ are reserved."""
    domain = name.partition("/")[0]
    is_native = "/" not in name or "kubernetes.io/" in name or name.startswith("requests.")
    return bool(_KEY.fullmatch(name)) and not is_native and len(domain) <= _LONGEST_RESOURCE_DOMAIN


def parse_resources(settings: JobSettings) -> tuple[tuple[str, str], ...]:
    """Extended resources are whole numbers, such as rdma/hca=1. Huge pages are sizes."""
    rows = []
    for text in read_values(settings, "resource"):
        name, _, amount = text.partition("=")
        huge = _HUGE_PAGES.fullmatch(name)
        if huge is not None and _QUANTITY.fullmatch(amount):
            _require_whole_pages(settings, text, huge["page"], amount)
        elif not (_is_extended(name) and re.fullmatch(r"[1-9][0-9]{0,8}", amount)):
            allowed = "DOMAIN/NAME=N, as rdma/hca=1, or hugepages-2Mi=SIZE; no name of kubernetes.io"
            raise invalid(settings, "resource", text, allowed)
        if name == (read_text(settings, "gpu_resource") or KubernetesJob.gpu_resource):
            raise invalid(settings, "resource", text, "a resource other than GPUs", "--gpus-per-node N")
        rows.append((name, amount))
    _refuse_repeated(settings, "resource", [name for name, _ in rows])
    return tuple(rows)


def _require_whole_pages(settings: JobSettings, text: str, page: str, amount: str) -> None:
    pages = in_bytes(amount) / in_bytes(page)
    if pages <= 0 or pages.denominator != 1:
        number, unit = int(page[:-2]), page[-2:]
        hint = f"--resource hugepages-{page}={max(1, math.ceil(pages)) * number}{unit}"
        raise invalid(settings, "resource", text, f"a multiple of the page, {page}", hint)


def parse_capabilities(settings: JobSettings) -> tuple[str, ...]:
    names = read_values(settings, "capability")
    for name in names:
        if not _CAPABILITY.fullmatch(name) or name.startswith("CAP_") or name == "ALL":
            better = name.upper().removeprefix("CAP_")
            hint = f"--capability {better}" if _CAPABILITY.fullmatch(better) and better != "ALL" else None
            raise invalid(settings, "capability", name, "one capability of Linux without CAP_, as IPC_LOCK", hint)
    _refuse_repeated(settings, "capability", names)
    return names


def parse_pairs(settings: JobSettings, name: str) -> tuple[tuple[str, str], ...]:
    """KEY=VALUE of labels, annotations and selectors. Only annotations accept any text as value."""
    rows = []
    for text in read_values(settings, name):
        key, is_set, value = text.partition("=")
        is_value = name == "annotation" or bool(_VALUE.fullmatch(value))
        if not is_set or not _KEY.fullmatch(key) or not is_value:
            examples = {"node_selector": "accelerator=h100", "label": "scheduling.x-k8s.io/pod-group=NAME"}
            example = examples.get(name, "k8s.v1.cni.cncf.io/networks=rdma-net")
            raise invalid(settings, name, text, f"KEY=VALUE, as {example}")
        # Users may set Kueue's topology annotations. Kueue's queue is a flag.
        is_kueues = name == "annotation" and key.startswith(_KUEUE) and key != f"{_KUEUE}queue-name"
        if name != "node_selector" and key.startswith(_OWN_LABELS) and not is_kueues:
            raise invalid(settings, name, text, "a key that is not the manifest's own", "leave it out")
        if name == "node_selector" and key in _RENAMED_LABELS:
            hint = f"--node-selector {_RENAMED_LABELS[key]}={value}"
            raise invalid(settings, name, text, "a label that nodes still have", hint)
        if name == "annotation" and key.startswith(_REFUSED_ANNOTATIONS):
            hint = "--priority-class NAME" if "critical-pod" in key else "leave it out"
            raise invalid(settings, name, key, "a key that current clusters read from pods", hint)
        rows.append((key, value))
    _refuse_repeated(settings, name, [key for key, _ in rows])
    size_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in rows)
    if size_bytes > _MOST_ANNOTATION_BYTES:
        what, got = f"{flag_of(name)} holds too much text", f"{size_bytes:,} bytes"
        raise UserError(what, where=settings[name].where, got=got, allowed=f"{_MOST_ANNOTATION_BYTES:,} bytes in all")
    return tuple(rows)


def parse_variables(settings: JobSettings) -> tuple[tuple[str, str], ...]:
    rows = tuple(_parse_variable(text, settings) for text in read_values(settings, "env"))
    _refuse_repeated(settings, "env", [name for name, _ in rows])
    return rows


def _parse_variable(text: str, settings: JobSettings) -> tuple[str, str]:
    """A name and a value, or a name and `secret:SECRET/KEY`. Error screens do not repeat values."""
    name, is_set, value = text.partition("=")
    where = settings["env"].where
    is_secret = value.startswith(SECRET_PREFIX)
    if not is_set or not _VARIABLE.fullmatch(name) or (is_secret and not _SECRET.fullmatch(value)):
        raise UserError("this is not a variable", where=where, got=printable_line(name), allowed=_VARIABLE_FORMS)
    if name in _OWN_VARIABLES or name.startswith(("SLURM_", "PET_", "LOCAL_", "MASTER_")):
        raise UserError(f"{name} belongs to the launcher", where=where, got=name, hint="leave it out")
    return name, value


def parse_tolerations(settings: JobSettings) -> tuple[Toleration, ...]:
    texts = read_values(settings, "toleration")
    _refuse_repeated(settings, "toleration", texts)
    rows = tuple(_parse_toleration(text, settings) for text in texts)
    for row in rows:
        if row.key in _NODE_TAINTS and "node_timeout" in settings:
            what = "the time limit for a lost node is given twice"
            got = f"--toleration {row.key} and --node-timeout"
            raise UserError(what, where=settings["toleration"].where, got=got, hint="leave one out")
    return rows


def _parse_toleration(text: str, settings: JobSettings) -> Toleration:
    rest, has_effect, effect = text.partition(":")
    key, _, value = rest.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (has_effect and effect not in _EFFECTS):
        close = difflib.get_close_matches(effect, _EFFECTS, n=1)
        hint = f"--toleration {rest}:{close[0]}" if close else None
        raise invalid(settings, "toleration", text, f"KEY, KEY=VALUE, either with :{', :'.join(_EFFECTS)}", hint)
    return Toleration(key, value, effect)


def parse_user(settings: JobSettings) -> tuple[int, int]:
    text = read_text(settings, "user") or "10001"
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None or int(match[1]) == 0:
        raise invalid(settings, "user", text, "UID or UID:GID, numbers; not 0: pods do not run as root")
    return int(match[1]), int(match[2] or match[1])
