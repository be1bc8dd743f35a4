"""The script is looked at once before ranks start."""

from __future__ import annotations

import os
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest

from fleetx.launch.preflight import DoesNotCompile, NoInput, check_module, check_script


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pack"]:  # imported where it hides its modules
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    "source",
    [
        "",
        "print('ä')",
        b"# coding: latin-1\nname = '\xe4'\n",
        b"\xef\xbb\xbfx = 1\r\n",
        "import nothing_like_this\nraise SystemExit(3)",
        "x = '\\d'\nassert (x, 'always')",
    ],
)
def test_what_compiles_passes_without_being_run_or_warned_about(folder: Path, source: str | bytes) -> None:
    write(folder / "train.py", source)
    check_script("train.py")


def test_compiled_and_zipped_programs_pass(folder: Path) -> None:
    write(folder / "train.py", "x = 1")
    py_compile.compile("train.py", cfile="train.pyc")
    check_script("train.pyc")
    with zipfile.ZipFile("app.pyz", "w") as archive:
        archive.writestr("__main__.py", "x = 1")
    check_script("app.pyz")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\nif x:\n    print('a'\n", "train.py:3: SyntaxError: '(' was never closed\n    print('a'\n         ^"),
        ("def f():\nreturn 1\n", "train.py:2: IndentationError: expected an indented block after function definition on line 1"),
        ("\tx = = 1\n", "train.py:1: IndentationError: unexpected indent"),
        ("x = '\x1b[2J' = 2\n", r"x = '\x1b[2J' = 2"),
        (b"x = '\xe4'\n", "train.py"),
        (b"# coding: nonsense\n", "unknown encoding"),
        (b"x = 1\0\n", "null byte"),
    ],
)
def test_what_does_not_compile_is_one_message(folder: Path, source: str | bytes, told: str) -> None:
    write(folder / "train.py", source)
    with pytest.raises(DoesNotCompile) as refused:
        check_script("train.py")
    assert told in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("data/missing.py", "there is no script 'data/missing.py'; the working folder is "),
        (".", "is a folder; name the script in it, such as 'train.py'"),
        ("pipe", "'pipe' is not a regular file"),
    ],
)
def test_what_is_no_script_is_told_in_one_line(folder: Path, target: str, told: str) -> None:
    os.mkfifo("pipe")
    with pytest.raises(NoInput, match=told) as refused:
        check_script(target)
    assert "\n" not in str(refused.value)


def test_an_unreadable_script_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    write(folder / "train.py", "")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(NoInput, match="'train.py' cannot be read: Permission denied"):
        check_script("train.py")


def check(name: str) -> None:
    check_module(name, [os.getcwd(), *sys.path[1:]])


def test_modules_are_found_and_compiled_without_running_their_packages(folder: Path) -> None:
    write(folder / "pack" / "__init__.py", "raise RuntimeError('was run')")
    write(folder / "pack" / "job.py", "x = 1")
    write(folder / "pack" / "__main__.py", "x = 1")
    write(folder / "pack" / "broken.py", "x = (")
    write(folder / "spaces" / "job.py", "x = 1")
    before = sys.path[:]
    for name in ("pack", "pack.job", "spaces.job", "json.tool"):
        check(name)
    with pytest.raises(DoesNotCompile, match=r"broken.py:1: SyntaxError"):
        check("pack.broken")
    assert sys.path == before and "pack" not in sys.modules


def test_a_module_in_folders_without_init_files_is_found(folder: Path) -> None:
    write(folder / "pack" / "inner" / "job.py", "x = (")
    with pytest.raises(DoesNotCompile, match=r"job.py:1: SyntaxError"):
        check("pack.inner.job")


def test_a_package_may_say_when_it_is_run_where_its_modules_are(folder: Path) -> None:
    write(folder / "pack" / "__init__.py", "__path__.append(__path__[0] + '/../elsewhere')")
    write(folder / "elsewhere" / "job.py", "x = (")
    with pytest.raises(DoesNotCompile, match=r"job.py:1: SyntaxError"):
        check("pack.job")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_such_module", "there is no module 'no_such_module'"),
        ("pack.missing", "there is no module 'pack.missing'"),
        ("pack.job.deeper", "there is no module 'pack.job.deeper'"),
        ("pack", "is a package without a __main__ module"),
        ("", "there is no module ''"),
        (".job", "there is no module '.job'"),
        ("pack..job", "there is no module 'pack..job'"),
        ("pack/job.py", "there is no module 'pack/job.py'"),
    ],
)
def test_a_module_that_is_not_there_is_told_in_one_line(folder: Path, name: str, told: str) -> None:
    write(folder / "pack" / "__init__.py", "")
    write(folder / "pack" / "job.py", "x = 1")
    with pytest.raises(NoInput) as refused:
        check(name)
    assert told in str(refused.value) and "\n" not in str(refused.value)
