"""`--audit`: the share of steps in which ranks recompute each other's gradients, and its rules."""

from __future__ import annotations

from paceline.errors import UserError
from paceline.settings.faults import FLIP, parse_faults
from paceline.settings.load import LoadedConfig


def parse_audit(text: str, where: str = "flag --audit") -> float:
    """The share of steps that are audited: 0.01 for `1%` or `0.01`. 0: none."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number or "0") / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1 or (share and share < 1e-6):
        raise UserError(
            f"audit: {text!r} is not a share of the steps",
            where=where,
            allowed="a percentage such as 1%, up to 100%; or a fraction such as 0.01",
        )
    return share


def check_audit(loaded: LoadedConfig) -> None:
    """Only lanes of --exact are computed alone and with the same bits on every rank."""
    config = loaded.config
    share = parse_audit(config.guard.audit, loaded.where("audit"))
    if share and not config.parallel.exact:
        raise UserError(
            "audit compares gradients bit by bit, and only --exact gives the same bits on every rank",
            where=loaded.where("audit"),
            got=f"--audit {config.guard.audit} without --exact",
            hint="add --exact, or leave --audit out; paceline doctor tests the machines without a run",
        )
    has_flip = any(fault.kind == FLIP for fault in parse_faults(config.guard.inject))
    if has_flip and not config.parallel.exact:
        raise UserError(
            "the fault flip changes a gradient of a lane, and only --exact has lanes that are computed alone",
            where=loaded.where("inject"),
            got=f"--inject {config.guard.inject!r} without --exact",
            hint="add --exact",
        )
