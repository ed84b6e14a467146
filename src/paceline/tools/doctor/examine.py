"""Part one: this node alone. No peer, no rendezvous, no torch in this process. Nothing here can hang.

All facts are gathered in parallel, each in a thread with its own deadline, and then checked.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.tools.doctor import disk, machine, network, software
from paceline.tools.doctor.findings import DoctorFinding, failed
from paceline.tools.doctor.request import DoctorRequest, InjectedFaults, NodeRole

Judge = Callable[[Any], list[DoctorFinding | None]]


@dataclass(frozen=True)
class Exam:
    """Facts to gather, the time limit, and the checks on them."""

    name: str
    group: str
    gather: Callable[[], Any]
    judge: Judge
    deadline_s: float
    if_silent: str  # the remedy when there is no answer


@dataclass(frozen=True)
class NodeReport:
    findings: list[DoctorFinding]
    facts: dict[str, Any]  # for the report; JSON

    @property
    def gpus(self) -> int:
        return len((self.facts.get("torch") or {}).get("devices", ()))


def examine_node(request: DoctorRequest, around: NodeRole, faults: InjectedFaults) -> NodeReport:
    exams = _exams(request, around, faults)
    answers = _gather_all(exams)
    findings: list[DoctorFinding] = []
    facts: dict[str, Any] = {}
    for exam, answer in zip(exams, answers, strict=True):
        if isinstance(answer, Exception):
            findings.append(_no_answer(exam, answer))
            continue
        facts[exam.name] = asdict(answer)
        findings += [replace(finding, group=exam.group) for finding in exam.judge(answer) if finding is not None]
    return NodeReport(findings, facts)


def _exams(request: DoctorRequest, around: NodeRole, faults: InjectedFaults) -> list[Exam]:
    return [
        *_software_exams(request),
        *_machine_exams(around.local_ranks),
        *_disk_exams(request, faults),
        *_network_exams(around),
    ]


def _software_exams(request: DoctorRequest) -> list[Exam]:
    def judge_torch(facts: software.Torch) -> list[DoctorFinding | None]:
        return [software.check_torch(facts), software.check_devices(facts, request.device, request.processes)]

    def judge_software(facts: software.Software) -> list[DoctorFinding | None]:
        return [software.check_python(facts), software.check_packages(facts)]

    dead = "is the Python environment on a dead mount?"
    hangs = "try python -c 'import torch' and nvidia-smi: one of the two hangs"
    return [
        Exam("software", "SOFTWARE", software.gather_software, judge_software, 10, dead),
        Exam("torch", "SOFTWARE", software.gather_torch, judge_torch, 46, hangs),
    ]


def _machine_exams(ranks: int) -> list[Exam]:
    def judge_memory(facts: machine.MemoryFacts) -> list[DoctorFinding | None]:
        return [
            machine.check_shared_memory(facts, ranks),
            machine.check_open_files(facts),
            machine.check_memory(facts, ranks),
        ]

    return [
        Exam("memory", "MACHINE", machine.gather_memory, judge_memory, 5, "ls /dev/shm"),
        Exam("cores", "MACHINE", machine.gather_cores, lambda facts: [machine.check_cores(facts, ranks)], 5, "lscpu"),
    ]


def _disk_exams(request: DoctorRequest, faults: InjectedFaults) -> list[Exam]:
    began = (time.time(), time.monotonic())

    def judge_run_folder(place: disk.FolderFacts) -> list[DoctorFinding | None]:
        drift_s = (time.time() - began[0]) - (time.monotonic() - began[1])
        run = disk.check_place("run folder", place, flag="--output-dir")
        return [run, disk.check_clock(place, faults.wall_clock(), drift_s)]

    def judge_temporary(place: disk.FolderFacts) -> list[DoctorFinding | None]:
        return [disk.check_place("temporary folder", place, flag="TMPDIR=")]

    run = partial(disk.gather_place, request.output_dir, faults.wall_clock)
    data = partial(disk.gather_place, request.data_dir, measures=False)
    temporary = partial(disk.gather_place, Path(tempfile.gettempdir()), measures=False)
    dead = "does a mount hang? df and mount show which; use another --output-dir or --data-dir"
    return [
        Exam("run folder", "DISK", run, judge_run_folder, 20, dead),
        Exam("data folder", "DISK", data, lambda facts: [disk.check_data(facts)], 20, dead),
        Exam("temporary folder", "DISK", temporary, judge_temporary, 20, dead),
    ]


def _network_exams(around: NodeRole) -> list[Exam]:
    host, port = around.rendezvous_at or ("", 0)

    def look_at_ports() -> network.Ports:
        return network.gather_ports(network.own_address(host), port if around.serves else None)

    def judge_names(facts: network.Names) -> list[DoctorFinding | None]:
        return [network.check_host_name(facts, around), network.check_rendezvous_name(facts)]

    dns = "name lookups hang: does a DNS server in /etc/resolv.conf not answer? an entry in /etc/hosts helps"
    firewall = "does a firewall on this host drop packets? see iptables -L, nft list ruleset"
    return [
        Exam("host name", "NETWORK", partial(network.gather_names, host), judge_names, 12, dns),
        Exam("ports", "NETWORK", look_at_ports, lambda facts: [network.check_ports(facts)], 15, firewall),
        Exam(
            "interfaces",
            "NETWORK",
            network.gather_network,
            lambda facts: [network.check_interfaces(facts)],
            5,
            "ip link",
        ),
    ]


def _gather_all(exams: list[Exam]) -> list[Any]:
    """For each exam the facts, or the exception."""
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


def _no_answer(exam: Exam, error: Exception) -> DoctorFinding:
    if isinstance(error, TimeoutError):
        return replace(failed(exam.name, str(error), exam.if_silent), group=exam.group)
    what = f"the check failed: {type(error).__name__}: {error}"
    return replace(failed(exam.name, what, exam.if_silent), group=exam.group)
