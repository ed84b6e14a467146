"""Part one: this node by itself. No peer, no rendezvous, no torch in this process; nothing here can hang.

Facts are gathered all at once, each in a thread with a deadline of its own, and then judged.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from paceline.doctor.checks import disk as disk_checks
from paceline.doctor.checks import machine as machine_checks
from paceline.doctor.checks import network as network_checks
from paceline.doctor.checks import software as software_checks
from paceline.doctor.findings import Finding, failed
from paceline.doctor.gather.disk import gather_place
from paceline.doctor.gather.machine import gather_cores, gather_memory
from paceline.doctor.gather.network import gather_names, gather_network, gather_ports, own_address
from paceline.doctor.gather.software import gather_software, gather_torch
from paceline.doctor.plant import Planted
from paceline.doctor.request import Request, Surroundings

Judge = Callable[[Any], list[Finding | None]]


@dataclass(frozen=True)
class Exam:
    """Facts to gather, how long that may take, and what follows from them."""

    name: str
    group: str
    gather: Callable[[], Any]
    judge: Judge
    deadline_s: float
    if_silent: str  # the remedy when there is no answer


@dataclass(frozen=True)
class NodeReport:
    findings: list[Finding]
    facts: dict[str, Any]  # for the report; JSON

    @property
    def gpus(self) -> int:
        return len((self.facts.get("torch") or {}).get("devices", ()))


def examine_node(request: Request, around: Surroundings, planted: Planted) -> NodeReport:
    exams = _exams(request, around, planted)
    answers = _gather_all(exams)
    findings: list[Finding] = []
    facts: dict[str, Any] = {}
    for exam, answer in zip(exams, answers, strict=True):
        if isinstance(answer, Exception):
            findings.append(_no_answer(exam, answer))
            continue
        facts[exam.name] = _plain(answer)
        findings += [replace(finding, group=exam.group) for finding in exam.judge(answer) if finding is not None]
    return NodeReport(findings, facts)


def _exams(request: Request, around: Surroundings, planted: Planted) -> list[Exam]:
    ranks = around.local_ranks
    meeting = around.meets_at or ("", 0)
    port = meeting[1] if around.serves else None
    clocks = (time.time(), time.monotonic())

    def judge_run_folder(place: Any) -> list[Finding | None]:
        drift = (time.time() - clocks[0]) - (time.monotonic() - clocks[1])
        run = disk_checks.check_place("run folder", place, flag="--output-dir")
        return [run, disk_checks.check_clock(place, planted.wall_clock(), drift)]

    dead_disk = "a mount that does not answer? df and mount show which; --output-dir or --data-dir elsewhere"
    temporary = Path(tempfile.gettempdir())
    return [
        Exam("software", "SOFTWARE", gather_software, _judge_software, 10, "a Python environment on a dead mount?"),
        Exam(
            "torch",
            "SOFTWARE",
            gather_torch,
            lambda facts: [
                software_checks.check_torch(facts),
                software_checks.check_devices(facts, request.device, request.processes),
            ],
            46,
            "python -c 'import torch', nvidia-smi: one of the two hangs",
        ),
        Exam(
            "memory",
            "MACHINE",
            gather_memory,
            lambda facts: [
                machine_checks.check_shared_memory(facts, ranks),
                machine_checks.check_open_files(facts),
                machine_checks.check_memory(facts, ranks),
            ],
            5,
            "ls /dev/shm",
        ),
        Exam("cores", "MACHINE", gather_cores, lambda facts: [machine_checks.check_cores(facts, ranks)], 5, "lscpu"),
        Exam(
            "run folder",
            "DISK",
            lambda: gather_place(request.output_dir, planted.wall_clock),
            judge_run_folder,
            20,
            dead_disk,
        ),
        Exam(
            "data folder",
            "DISK",
            lambda: gather_place(request.data_dir, measures=False),
            lambda facts: [disk_checks.check_data(facts)],
            20,
            dead_disk,
        ),
        Exam(
            "temporary folder",
            "DISK",
            lambda: gather_place(temporary, measures=False),
            lambda facts: [disk_checks.check_place("temporary folder", facts, flag="TMPDIR=")],
            20,
            dead_disk,
        ),
        Exam(
            "host name",
            "NETWORK",
            lambda: gather_names(meeting[0]),
            lambda facts: [network_checks.check_host_name(facts, around), network_checks.check_meeting_name(facts)],
            12,
            "name lookups hang: a DNS server in /etc/resolv.conf that does not answer; an entry in /etc/hosts helps",
        ),
        Exam(
            "ports",
            "NETWORK",
            lambda: gather_ports(own_address(meeting[0]), port),
            lambda facts: [network_checks.check_ports(facts)],
            15,
            "a firewall that swallows packets on this host: iptables -L, nft list ruleset",
        ),
        Exam(
            "interfaces",
            "NETWORK",
            gather_network,
            lambda facts: [network_checks.check_interfaces(facts)],
            5,
            "ip link",
        ),
    ]


def _judge_software(facts: Any) -> list[Finding | None]:
    return [software_checks.check_python(facts), software_checks.check_packages(facts)]


def _gather_all(exams: list[Exam]) -> list[Any]:
    """By exam: the facts, or the exception that came instead of them."""
    answers: dict[int, Any] = {}

    def gather(number: int) -> None:
        try:
            answers[number] = exams[number].gather()
        except Exception as error:
            answers[number] = error

    threads = [threading.Thread(target=gather, args=(number,), daemon=True) for number in range(len(exams))]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for number, exam in enumerate(exams):
        threads[number].join(max(0.0, started + exam.deadline_s - time.monotonic()))
        answers.setdefault(number, TimeoutError(f"no answer within {exam.deadline_s:g} s"))
    return [answers[number] for number in range(len(exams))]


def _no_answer(exam: Exam, error: Exception) -> Finding:
    if isinstance(error, TimeoutError):
        return replace(failed(exam.name, str(error), exam.if_silent), group=exam.group)
    what = f"it cannot be looked at: {type(error).__name__}: {error}"
    return replace(failed(exam.name, what, exam.if_silent), group=exam.group)


def _plain(facts: Any) -> Any:
    return asdict(facts) if is_dataclass(facts) and not isinstance(facts, type) else facts
