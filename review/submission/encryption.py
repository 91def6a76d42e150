"""Encrypts the archive for its recipients, by age or gpg, whichever their keys belong to.

A passphrase never stands on a command line, where every user of the machine could read it: it comes from a file.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from review.logs.mllog import text
from review.logs.output import ReviewError
from review.logs.tree import run

_AGE_KEYS = ("age1", "ssh-ed25519 ", "ssh-rsa ")


@dataclass(frozen=True, kw_only=True)
class Encryption:
    """Recipients: keys of age (age1..., ssh-...) or of gpg (address, fingerprint), or a file with a passphrase."""

    recipients: tuple[str, ...] = ()
    passphrase_file: Path | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to encrypt for."""
        return bool(self.recipients or self.passphrase_file)

    @property
    def tool(self) -> str:
        """age or gpg."""
        return "age" if self.recipients and all(key.startswith(_AGE_KEYS) for key in self.recipients) else "gpg"

    def check(self) -> None:
        """Raises ReviewError where it cannot be done: before anything is made."""
        if self.recipients and self.passphrase_file:
            raise ReviewError("--encrypt-for and --passphrase-file exclude each other: a key, or a passphrase")
        if any(key.startswith(_AGE_KEYS) for key in self.recipients) and self.tool != "age":
            raise ReviewError("--encrypt-for: keys of age and of gpg in one archive: name those of one of them")
        if shutil.which(self.tool) is None:
            raise ReviewError(f"{self.tool} is not installed, which is needed to encrypt the archive")
        if self.passphrase_file is not None:
            try:
                first = self.passphrase_file.read_text(encoding="utf-8").partition("\n")[0]
            except (OSError, ValueError) as error:
                raise ReviewError(f"--passphrase-file {self.passphrase_file}: cannot be read: {error}") from None
            if not first:
                raise ReviewError(f"--passphrase-file {self.passphrase_file}: its first line is empty")
        if self.tool == "gpg":
            for key in self.recipients:
                run(["gpg", "--batch", "--list-keys", "--", key], f"--encrypt-for {text(key)}: gpg knows no such key")

    def encrypt(self, path: Path) -> Path:
        """Writes the encrypted file beside the plain one; returns it. Raises ReviewError."""
        output = path.with_name(f"{path.name}.{self.tool}")
        how, recipients = ["--encrypt"], [part for key in self.recipients for part in ("-r", key)]
        if self.tool == "gpg":
            how = ["--batch", "--yes", "--no-tty", "--trust-model", "always", "--encrypt"]
        if self.passphrase_file is not None:
            how = ["--batch", "--yes", "--no-tty", "--pinentry-mode", "loopback", "--cipher-algo", "AES256"]
            how += ["--passphrase-file", str(self.passphrase_file), "--symmetric"]
        command = [self.tool, *how, *recipients, "-o", str(output), str(path)]
        run(command, f"{self.tool} cannot encrypt the archive")
        return output
