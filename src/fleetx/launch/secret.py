"""The secret of a job: given by a file or the environment on several machines, made by fleetrun on one."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import MutableMapping
from pathlib import Path

from ..errors import ConfigError

SECRET_VARIABLE = "FLEETX_JOB_SECRET"  # the name of a variable
LEAST_LETTERS, MOST_BYTES = 16, 4096
HOW = "Make one with `head -c 32 /dev/urandom | base64 > job.secret; chmod 600 job.secret`."


def take_secret(path: str | None, environment: MutableMapping[str, str]) -> str:
    """Return the secret from the file, else from the environment, else "". It is taken out of the environment, which every
    process started from here would inherit."""
    inherited = environment.pop(SECRET_VARIABLE, "")
    if path is not None:
        return read_secret(Path(path))
    return _checked(inherited, SECRET_VARIABLE) if inherited else ""


def read_secret(path: Path) -> str:
    """Read a secret from a file that other users cannot read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"--job_secret_file {path} is not a regular file. {HOW}")
            if status.st_mode & stat.S_IRWXO:
                raise ConfigError(
                    f"--job_secret_file {path} can be read by other users of this machine; write `chmod 600 {path}`."
                )
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--job_secret_file {path} cannot be read: {error.strerror or error}. {HOW}") from error
    return _checked(text.decode("utf-8", "surrogateescape"), f"--job_secret_file {path}")


def _checked(text: str, origin: str) -> str:
    secret = text.strip()
    if not LEAST_LETTERS <= len(secret) <= MOST_BYTES:
        raise ConfigError(f"{origin} holds {len(secret)} characters; {LEAST_LETTERS} to {MOST_BYTES} are needed. {HOW}")
    return secret


def make_secret(folder: Path) -> str:
    """Make the secret of a run on one machine, and keep it in a file of the run's folder that only this user can read."""
    secret = secrets.token_hex(32)
    descriptor = os.open(folder / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secret)
    return secret
