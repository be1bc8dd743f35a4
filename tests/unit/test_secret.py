"""The secret of a job: where it may come from, and who may read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fleetx.errors import ConfigError
from fleetx.launch.secret import SECRET_VARIABLE, make_secret, read_secret, take_secret

SECRET = "0123456789abcdef0123456789abcdef"


def written(folder: Path, text: str = SECRET + "\n", mode: int = 0o600) -> Path:
    path = folder / "job.secret"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_secret_is_read_from_a_file_without_the_line_end(tmp_path: Path) -> None:
    assert read_secret(written(tmp_path)) == SECRET
    assert read_secret(written(tmp_path, mode=0o440)) == SECRET, "as Kubernetes mounts it for a group"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused_with_the_command_to_write(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, mode=mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_secret(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 5000])
def test_a_secret_that_is_too_short_or_too_long_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="16 to 4096 are needed"):
        read_secret(written(tmp_path, text))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_secret(tmp_path)


def test_the_file_precedes_the_variable_which_no_process_inherits(tmp_path: Path) -> None:
    environment = {SECRET_VARIABLE: "x" * 32, "HOME": "/"}
    assert take_secret(str(written(tmp_path)), environment) == SECRET
    assert environment == {"HOME": "/"}
    environment = {SECRET_VARIABLE: SECRET}
    assert take_secret(None, environment) == SECRET and environment == {}
    assert take_secret(None, {}) == ""
    with pytest.raises(ConfigError, match="FLEETX_JOB_SECRET holds 5 characters"):
        take_secret(None, {SECRET_VARIABLE: "short"})


def test_a_made_secret_is_readable_by_this_user_alone_and_never_the_same(tmp_path: Path) -> None:
    made = make_secret(tmp_path)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert (tmp_path / "secret").read_text() == made
    other = tmp_path / "other"
    other.mkdir()
    assert make_secret(other) != made
