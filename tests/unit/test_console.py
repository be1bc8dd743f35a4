"""What the console shows of a log: warnings, errors and whole tracebacks, prefixed and harmless."""

from __future__ import annotations

import io
import traceback
from pathlib import Path

import pytest

from fleetx.launch import console
from fleetx.launch.console import CUT, LINE_BYTES, Bare, Excerpt, Prefixed, Tracebacks, escape, make_view
from fleetx.launch.topology import Nodes, Plan

PLAIN = ["epoch 1 loss 0.5", "    indented but harmless", "", "error rate 0.1, no warning given", "Warnings off"]
ANYTHING = ["step 7", "  a table row"]


def excerpt(*lines: str) -> list[str]:
    keep = Excerpt()
    return [shown for line in lines for shown in keep(line)]


def printed(error: BaseException) -> list[str]:
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    return text.getvalue().splitlines()


def raised(
    error: BaseException, *, cause: BaseException | None = None, while_handling: BaseException | None = None
) -> BaseException:
    try:
        if while_handling is None:
            raise error from cause
        try:
            raise while_handling
        except type(while_handling):
            raise error  # noqa: B904 (the context is what is wanted)
    except type(error) as caught:
        return caught


def test_ordinary_output_is_not_shown() -> None:
    assert excerpt(*PLAIN) == []


@pytest.mark.parametrize(
    "line",
    [
        "2026-01-01 WARNING slow disk",
        "ERROR:root:cannot open",
        "[CRITICAL] out of disk",
        "fatal: not a repository",
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'c10::Error'",
        "\x1b[33mWARNING\x1b[0m in colour",
        "[rank3]:[E1115 05:18:31.1 ProcessGroupNCCL.cpp:629] Watchdog caught a timeout",
        "[W1115 05:18:31.1 socket.cpp:1] Warning: name lookup is slow",
        "Exception in thread Thread-1 (run):",
    ],
)
def test_warnings_and_errors_are_shown(line: str) -> None:
    assert excerpt("before", line, "after") == [line]


def test_a_python_warning_comes_with_its_source_line_and_nothing_more() -> None:
    warning = ["train.py:3: UserWarning: odd", "  warnings.warn('odd')"]
    assert excerpt("before", *warning, *ANYTHING) == warning
    assert excerpt("x.py:1: FleetWarning: one", "after", "  indented") == ["x.py:1: FleetWarning: one"]


@pytest.mark.parametrize(
    "error",
    [
        raised(ValueError("plain")),
        raised(ValueError("two\n  lines, the second indented")),
        raised(KeyError("late"), cause=raised(ValueError("early"))),
        raised(KeyError("late"), while_handling=ValueError("early")),
        raised(SyntaxError("bad", ("x.py", 3, 5, "foo(\n"))),
        raised(ExceptionGroup("several", [raised(ValueError("one")), ExceptionGroup("inner", [raised(TypeError("two"))])])),
        raised(RuntimeError("after"), cause=raised(ExceptionGroup("several", [ValueError("one")]))),
        raised(ExceptionGroup("several", [ValueError("one")]), cause=raised(RuntimeError("before"))),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_whole_traceback_is_shown_and_nothing_around_it(error: BaseException) -> None:
    lines = printed(error)
    assert excerpt("before", *lines, *ANYTHING) == lines
    assert excerpt("before", *lines, "", *ANYTHING) == lines
    assert excerpt(*lines, *lines) == lines * 2


def test_a_traceback_in_colours_and_one_with_torchs_prefix_are_shown() -> None:
    lines = printed(raised(KeyError("late"), while_handling=ValueError("early")))
    coloured = [f"\x1b[1;35m{line}\x1b[0m" if line else line for line in lines]
    prefixed = [f"[rank3]: {line}" for line in lines]
    assert excerpt("before", *coloured, "after") == coloured
    assert excerpt("before", *prefixed, "after") == prefixed


def test_blank_lines_after_a_traceback_are_shown_only_inside_a_chain() -> None:
    lines = printed(raised(ValueError("plain")))
    assert excerpt(*lines, "", "", "step 8", "  row") == lines


def test_a_warning_right_after_a_traceback_is_shown() -> None:
    lines = printed(raised(ValueError("plain")))
    assert excerpt(*lines, "WARNING next", "after") == [*lines, "WARNING next"]


def test_control_characters_are_escaped_and_letters_of_any_script_are_not() -> None:
    assert escape("a\x1b[2Jb\x00\x7f\x9b\r") == r"a\x1b[2Jb\x00\x7f\x9b\r"
    assert escape("line\u2028end\u202e") == r"line\u2028end\u202e"
    assert escape("tab\tstays, ä 字 🙂") == "tab\tstays, ä 字 🙂"


def test_every_shown_line_is_prefixed_wherever_the_pieces_were_cut() -> None:
    data = "eins\r\nzwei ä\n\nbar 1%\rbar 2%\rlast".encode()
    expected = "n0·r1| eins\nn0·r1| zwei ä\nn0·r1| \nn0·r1| bar 1%\nn0·r1| bar 2%\nn0·r1| last\n".encode()
    for size in (1, 2, 3, 7, len(data)):
        view = Prefixed("n0·r1| ")
        shown = b"".join(view.feed(data[start : start + size]) for start in range(0, len(data), size))
        assert shown + view.end() == expected, size
        assert view.end() == b""


def test_a_line_is_cut_at_8_kib_and_the_next_is_whole_again() -> None:
    view = Prefixed("p| ")
    shown = b"".join(view.feed(piece) for piece in (b"x" * LINE_BYTES, b"y" * LINE_BYTES, b"y" * LINE_BYTES, b"\nnext\n"))
    assert shown == b"p| " + b"x" * LINE_BYTES + CUT.encode() + b"\np| next\n"
    exact = Prefixed("p| ").feed(b"x" * LINE_BYTES + b"\n")
    assert exact == b"p| " + b"x" * LINE_BYTES + b"\n"


def test_a_forged_prefix_and_bytes_that_are_no_text_stay_behind_the_true_prefix() -> None:
    assert Prefixed("n0·r1| ").feed(b"x\rn0\xc2\xb7r0| trust me\n") == "n0·r1| x\nn0·r1| n0·r0| trust me\n".encode()
    assert Prefixed("p| ").feed(b"\xff\n") == "p| �\n".encode()


def plan(**changes: object) -> Plan:
    settings = {"target": "x.py", "is_module": False, "arguments": (), "process_count": 2, "gpus": (), "devices": ("cpu", "cpu")}
    return Plan(**{**settings, "log_dir": Path("log"), **changes})  # type: ignore[arg-type]


def test_rank_0_alone_is_bare_and_keeps_its_carriage_returns() -> None:
    view = make_view(0, 0, plan())
    assert isinstance(view, Bare)
    assert view.feed(b"\r 10%\x1b[0m") == b"\r 10%\x1b[0m" and view.end() == b""
    assert isinstance(make_view(0, 0, plan(tee="all", process_count=1)), Bare)


@pytest.mark.parametrize(
    ("tee", "rank", "expected"),
    [
        (frozenset({0}), 1, b""),
        ("all", 0, "n0·r0| hello\n".encode()),
        ("all", 1, "n0·r1| hello\n".encode()),
        (frozenset({0, 1}), 0, "n0·r0| hello\n".encode()),
        (frozenset({1}), 1, "n0·r1| hello\n".encode()),
        (frozenset({1}), 0, b""),
        (frozenset(), 0, b""),
    ],
)
def test_tee_chooses_whose_output_is_shown_in_full(tee: object, rank: int, expected: bytes) -> None:
    assert make_view(rank, 0, plan(tee=tee)).feed(b"hello\n") == expected


def test_a_single_rank_of_several_nodes_is_prefixed_by_node_and_global_rank() -> None:
    several = plan(tee="all", process_count=1, nodes=Nodes(2, 1, "10.0.0.2", "10.0.0.1", 6070))
    assert make_view(5, 1, several).feed(b"hello\n") == "n1·r5| hello\n".encode()


def views(count: int) -> list[console.View]:
    tracebacks = Tracebacks()
    return [make_view(rank, 0, plan(process_count=count), tracebacks) for rank in range(count)]


def log_of(rank: int, *lines: str) -> bytes:
    return "".join(f"[rank{rank}]: {line}\n" if line else "\n" for line in lines).encode()


def test_a_traceback_that_all_ranks_have_is_shown_once_whichever_comes_first() -> None:
    lines = printed(raised(ValueError("plain, at 0x7f00")))
    for order in ((0, 1, 2), (2, 1, 0)):
        shown = views(3)
        fed = b"".join(shown[rank].feed(log_of(rank, *lines).replace(b"0x7f00", b"0x7f%02d" % rank)) for rank in order)
        ended = b"".join(view.end() for view in shown)
        assert fed.count(b"ValueError") == 1 and fed.startswith(b"[rank0]: Traceback") and ended == b""


def test_without_rank_0_the_first_one_is_shown_and_one_of_its_own_is_too() -> None:
    lines, other = printed(raised(ValueError("shared"))), printed(raised(ValueError("own")))
    shown = views(4)[1:]
    for rank, said in ((1, lines), (2, lines), (3, other)):
        assert shown[rank - 1].feed(log_of(rank, *said)) == b""
    ended = b"".join(view.end() for view in shown).decode()
    assert ended.splitlines() == [f"n0·r{rank}| [rank{rank}]: {line}" for rank, said in ((1, lines), (3, other)) for line in said]


def test_a_traceback_is_shown_when_more_follows_and_when_nothing_does_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(raised(ValueError("plain")))
    _, second, third = views(3)
    assert second.feed(log_of(1, *lines)) == b"" and b"ValueError" in second.feed(b"step 8\n")
    third = views(3)[2]
    assert third.feed(log_of(2, *lines)) == b"" and third.wait() == b""
    monkeypatch.setattr(console, "HOLD_SECONDS", -1.0)
    assert b"ValueError" in third.wait() and third.wait() == third.end() == b""
