"""`paceline verify` and `paceline sign`: the receipt of a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.cli.command import Command
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, UserError, printable_line
from paceline.settings.declare import Arg, FlagsOf, Range
from paceline.settings.schema import Config
from paceline.settings.values import Setting

if TYPE_CHECKING:
    from paceline.runs.receipt import Receipt
    from paceline.tools.trust.findings import Findings, Kind
    from paceline.tools.trust.signature import Signature
    from paceline.tools.trust.verify import Proof

_HEADINGS: dict[Kind, str] = {"proved": "proved", "different": "DIFFERENT", "not proved": "not proved"}


@dataclass(frozen=True)
class Verify:
    """Check the receipt of a run: the chain of hashes, the signature, the files, and steps that are replayed here.

    Steps are drawn at random and replayed in this process on one rank, from the nearest checkpoints. An exact run gives
    the same bits on one rank. Flags of `train` override settings, for example --data-dir. Exit code 1: something
    differs. --trust-code executes functions that the run folder names, although you did not train it on this machine.
    """

    run: Annotated[str, Arg("RECEIPT|RUN", place="word", completes="run")]
    """A run folder, its name in runs/, or a receipt.json."""
    steps: Annotated[int, Range(low=0, high=1_000_000)] = 20
    """Steps to draw. The steps from a checkpoint to a drawn step are replayed and compared, too."""
    at_most: Annotated[int, Range(low=0)] = 2000
    """The most steps to replay in all; 0: no limit. If it is too low, steps near stored checkpoints are drawn."""
    tolerance: Annotated[float, Range(low=0.0, high=1.0)] = 1e-3
    """Relative difference of losses, gradient norms and weights that is accepted where equal bits are not possible."""
    signers: Annotated[str, Arg("FILE", completes="file")] = ""
    """Who may have signed it: a public key (.pub), or an allowed_signers file of ssh."""
    flags: Annotated[tuple[Setting, ...], FlagsOf(Config)] = ()


@dataclass(frozen=True)
class Sign:
    """Sign the receipt of a run with your ssh key. The signature is written to receipt.json.sig."""

    run: Annotated[str, Arg("RECEIPT|RUN", place="word", completes="run")]
    """A run folder, its name in runs/, or a receipt.json."""
    key: Annotated[str, Arg("FILE", completes="file")] = "~/.ssh/id_ed25519"
    """The private key. Or a public one, if the ssh agent has its private key."""


def verify(settings: Verify) -> int:
    from paceline.runs.receipt import read_receipt
    from paceline.tools.trust.signature import check_signature

    path = _find_receipt(settings.run)
    receipt = read_receipt(path)
    signature = check_signature(path, Path(settings.signers) if settings.signers else None)
    run = path.parent
    print(f"{path}: {receipt.links['results']['steps']} steps, head {receipt.head[:12]}", flush=True)
    if not (run / "config.yaml").is_file():
        return _only_the_chain(receipt, path, signature)
    from paceline.tools.trust.replayed import Draw
    from paceline.tools.trust.verify import verify_run

    draw = Draw(settings.steps, settings.at_most, settings.tolerance, say=lambda text: print(text, flush=True))
    proof = verify_run(run, receipt, list(settings.flags), draw)
    findings = proof.findings
    if signature is None:
        text = "without one, a forger can write a new chain: the replayed steps are the proof"
        findings.add("not proved", "signature", f"{text} (paceline sign RUN)")
    elif not signature.is_valid:
        findings.add("different", "signature", signature.key)
    else:
        findings.add("proved", "signature", f"key {signature.key} {signature.signer}".strip())
        if not settings.signers:
            findings.add("not proved", "signature", "whose key it is (--signers FILE)")
    _print(findings)
    return _conclude(proof)


def _find_receipt(name: str) -> Path:
    from paceline.runs.catalog import locate_run
    from paceline.runs.folder import RunFolder, require_run_folder

    if Path(name).is_file():
        return Path(name)
    path = locate_run(name)
    require_run_folder(path)
    return RunFolder(path).receipt


def _only_the_chain(receipt: Receipt, path: Path, signature: Signature | None) -> int:
    """A receipt without its run: more cannot be checked."""
    is_whole = receipt.broken_at is None
    print("the chain is whole" if is_whole else f"DIFFERENT: the chain breaks at the link {receipt.broken_at}")
    is_signed = signature is None or signature.is_valid
    if signature is None:
        print("it has no signature")
    else:
        key = f"{signature.key} {signature.signer}".strip()
        print(f"the signature is valid: key {key}" if is_signed else f"DIFFERENT: the signature: {signature.key}")
    print(f"not proved: everything else. The run is not beside {path}: config.yaml is missing")
    return EXIT_FINISHED if is_whole and is_signed else EXIT_DIFFERENT


def _print(findings: Findings) -> None:
    for kind, heading in _HEADINGS.items():
        found = findings.of(kind)
        if not found:
            continue
        print(f"\n{heading}")
        for finding in found:
            first, *rest = finding.text.splitlines() or [""]
            print(f"  {finding.what:<10} {printable_line(first)}")
            for line in rest:
                print(f"  {'':<10} {printable_line(line)}")


def _conclude(proof: Proof) -> int:
    limit = f" that is off by more than {proof.tolerance:g}" if proof.tolerance else ""
    print(
        f"\none forged step{limit} would be found with a probability of {proof.detection:.0%}:"
        f" {proof.replayed_steps} of {proof.total_steps} steps were replayed"
    )
    if proof.findings.is_different:
        different = dict.fromkeys(finding.what for finding in proof.findings.of("different"))
        print(f"NOT verified: {', '.join(different)} differ from the receipt")
        return EXIT_DIFFERENT
    if proof.replayed_steps:
        print("verified: nothing differs from the receipt")
    else:
        print("nothing differs from the receipt, but no step was replayed: it is not proved that the run was trained")
    return EXIT_FINISHED


def sign(settings: Sign) -> int:
    from paceline.runs.receipt import read_receipt
    from paceline.tools.trust.signature import sign as sign_receipt

    path = _find_receipt(settings.run)
    receipt = read_receipt(path)
    if receipt.broken_at is not None:
        raise UserError(
            "a receipt with a broken chain is not signed",
            where=str(path),
            got=f"the link {receipt.broken_at} was changed",
            hint=f"paceline verify {shlex.quote(str(path.parent))} says what differs",
        )
    signature = sign_receipt(path, Path(settings.key).expanduser())
    print(f"signed: {signature}")
    print(f"check it: paceline verify {shlex.quote(str(path))} --signers PUBLIC-KEY")
    return EXIT_FINISHED


COMMANDS = (Command("verify", Verify, verify), Command("sign", Sign, sign))
