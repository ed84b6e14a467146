"""Signatures of receipts by `ssh-keygen -Y`. The signature is beside the receipt: receipt.json.sig."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError, printable_line
from paceline.runs.folder import write_atomically

_NAMESPACE = "paceline-receipt"
_SIGNER = "signer"  # the name of the key in a .pub file
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Signature:
    is_valid: bool
    key: str  # its fingerprint, or why the signature is not valid
    signer: str  # by --signers; empty if it was not asked


def signature_of(receipt: Path) -> Path:
    return receipt.with_name(f"{receipt.name}.sig")


def sign(receipt: Path, key: Path) -> Path:
    """Sign a receipt with a private key, or with a public key whose private one the ssh agent has."""
    if not key.is_file():
        raise UserError("there is no such key", where="--key", got=str(key), hint="ssh-keygen -t ed25519 makes one")
    done = _ssh_keygen("sign", "-f", str(key), "-n", _NAMESPACE, content=receipt.read_bytes(), can_ask=True)
    if done.returncode:
        raise UserError("the receipt was not signed", where=str(receipt), got=_last_line(done))
    signature = signature_of(receipt)
    try:
        write_atomically(signature, done.stdout.decode())  # an earlier signature stays until this one is complete
    except OSError as error:
        raise UserError("the signature cannot be written", where=str(signature), got=error.strerror) from error
    return signature


def check_signature(receipt: Path, signers: Path | None) -> Signature | None:
    """None without a signature. `signers`: a public key, or an allowed_signers file of ssh; then it must be signed."""
    signature = signature_of(receipt)
    if not signature.is_file():
        return None if signers is None else Signature(False, f"{signature.name} is missing", "")
    words = ("-n", _NAMESPACE, "-s", str(signature))
    content = receipt.read_bytes()
    done = _ssh_keygen("check-novalidate", *words, content=content)
    if done.returncode:
        return Signature(False, _last_line(done), "")
    key = _last_line(done).rpartition(" ")[2]
    if signers is None:
        return Signature(True, key, "")
    with tempfile.TemporaryDirectory() as folder:
        allowed = _as_allowed_signers(signers, Path(folder))
        found = _ssh_keygen("find-principals", "-s", str(signature), "-f", str(allowed))
        name = _first_line(found)
        if found.returncode or not name:
            return Signature(False, f"{key} is not in {signers}", "")
        done = _ssh_keygen("verify", "-f", str(allowed), "-I", name, *words, content=content)
    return Signature(done.returncode == 0, key if done.returncode == 0 else _last_line(done), printable_line(name))


def _as_allowed_signers(signers: Path, folder: Path) -> Path:
    try:
        text = signers.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "the file of signers cannot be read",
            where="--signers",
            got=f"{signers}: {error}",
            allowed="a public key (.pub), or an allowed_signers file of ssh",
        ) from error
    if not text.startswith(("ssh-", "ecdsa-", "sk-")):
        return signers
    allowed = folder / "allowed_signers"
    allowed.write_text("".join(f"{_SIGNER} {line}\n" for line in text.splitlines() if line.strip()))
    return allowed


def _ssh_keygen(
    action: str, *arguments: str, content: bytes | None = None, can_ask: bool = False
) -> subprocess.CompletedProcess[bytes]:
    """`can_ask`: it may ask for a passphrase on the terminal."""
    try:
        return subprocess.run(
            ["ssh-keygen", "-Y", action, *arguments],
            input=content,
            stdin=None if content is not None or can_ask else subprocess.DEVNULL,
            capture_output=True,
            timeout=None if can_ask else _TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise UserError("ssh-keygen was not found", hint="install OpenSSH 8.1 or newer") from error


def _first_line(done: subprocess.CompletedProcess[bytes]) -> str:
    return next(iter(done.stdout.decode(errors="replace").splitlines()), "").strip()


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = [line for line in (done.stdout + done.stderr).decode(errors="replace").splitlines() if line.strip()]
    return printable_line(lines[-1].strip()) if lines else f"exit code {done.returncode}"
