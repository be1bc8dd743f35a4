"""bench/mutants: which faults are made of a line, what is left alone, how a set is drawn, and how an end of pytest is read."""

import functools
import json
import shlex
from pathlib import Path

import pytest

from bench.mutants import run as mutants
from bench.mutants.edits import apply, draw, functions_of, is_valid, shown
from bench.mutants.run import AREAS, Area, Journal, Plan, chosen, draw_mutants, files_of, shares, summary
from bench.mutants.runner import limit_seconds, read_ending
from fleetx.errors import ConfigError

ROOT = Path(__file__).parents[2]


def mutated(body: str, head: str = "def f(a, b):") -> list[str]:
    """What becomes of a function with this body, edit by edit."""
    content = "\n    ".join([head, *body.splitlines()]).encode() + b"\n"
    edits = [edit for function in functions_of(content) for edit in function.edits]
    assert all(is_valid(content, edit) for edit in edits)
    texts = [apply(content, edit).decode() for edit in edits]
    assert all(text.count("\n") == content.count(b"\n") for text in texts)
    return [text.removeprefix(head).replace("\n    ", "\n").strip("\n") for text in texts]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", ["return a <= b"]),
        ("return a is not b", ["return a is b"]),
        ("return a not  in b", ["return a in b"]),
        ("return (a) <= (b) < f", ["return (a) < (b) < f", "return (a) <= (b) <= f"]),
        ("return a + b", ["return a - b"]),
        ("return a // b", ["return a * b"]),
        ("a -= b", ["a += b"]),
        ("return a and b and f", ["return a or b and f"]),
        ("return not a", ["return a"]),
        ("if a:\n    b()", ["if not (a):\n    b()", "if a:\n    pass"]),
        ("if a == b:\n    return", ["if a != b:\n    return"]),
        ("return a if b else f", ["return a if not (b) else f"]),
        ("return a[1]", ["return a[2]"]),
        ("return a(b=True)", ["return a(b=False)"]),
        ("a.b = f", ["pass"]),
        ("a.b, b.a = f", ["pass"]),
        ("a(\n    b\n)", ["pass"]),
        ("return min(a, b)", ["return max(a, b)"]),
        ("return 'ü', a < b", ["return 'ü', a <= b"]),
        ("warn('two words', 3)", ["pass"]),
    ],
)
def test_each_operator_changes_one_place_and_no_line_moves(body, expected):
    assert mutated(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        '"""Return 1 + 1."""',
        "raise ValueError(a + 1)",
        "assert a < b",
        "a: Literal[1]",
        "a = f'{b + 1} words'",
        "a = 'some words' if b < 1 else ''",
        "return 'a' + b",
        "return folder / a",
        "for _ in zip(a, b, strict=True): ...",
        "if TYPE_CHECKING:\n    a()",
        "if a.type == 'cuda':\n    b()",
        "torch.cuda.synchronize()",
        "os.close(a)",
        "a = b",
    ],
)
def test_texts_types_errors_and_code_for_gpus_are_left_alone(body):
    assert mutated(body) == []


def test_what_follows_the_way_of_a_cpu_is_left_alone():
    assert mutated("if a.type == 'cpu':\n    return\nb()") == ["if a.type != 'cpu':\n    return\nb()"]


def test_none_is_returned_only_where_the_annotation_excludes_it():
    assert mutated("return a", head="def f(a) -> int:") == ["return None"]
    for annotation in ("int | None", "None", "Iterator[int]"):
        assert mutated("return a", head=f"def f(a) -> {annotation}:") == []
    assert mutated("return 'no gradients'", head="def f() -> str:") == mutated("return False", head="def f() -> bool:")[:0] == []


def test_decorators_stubs_and_texts_for_people_are_no_functions_to_change():
    content = b"""
@dataclass(frozen=True)
class A:
    size: int = 3

    @given(1)
    def stub(self, a: int = 1) -> int:
        '''Say 1.'''

    def __repr__(self):
        return a + b

    def __init__(self):
        self.a = b
        def inner(): a()
"""
    assert [function.name for function in functions_of(content)] == ["A.__init__.inner"]


def test_an_edit_is_shown_by_its_lines_before_and_after():
    content = b"def f(a):\n    return g(\n        a,\n        1,  # one\n    )\n"
    ((edit,),) = (function.edits for function in functions_of(content))
    assert shown(content, edit) == ("1, # one", "2, # one")


FILES = [("one.py", b"def f(a): return a < 1\ndef g(a): return a + 2\n"), ("two.py", b"def h(a): return not a\n")]


def test_a_draw_is_repeatable_begins_alike_and_takes_each_function_once_before_any_twice():
    drawn = draw(FILES, 4, "22")
    assert drawn == draw(FILES, 4, "22") and drawn[:2] == draw(FILES, 2, "22")
    assert sorted(function.name for _, function, _ in drawn[:3]) == ["f", "g", "h"]
    everything = draw(FILES, 100, "22")
    assert len(everything) == len({(name, edit) for name, _, edit in everything}) == 5


def test_areas_share_a_count_as_evenly_as_may_be():
    assert shares(60, list(AREAS)) == dict.fromkeys(AREAS, 12)
    assert shares(7, ["a", "b", "c"]) == {"a": 3, "b": 2, "c": 2}


def test_the_tables_name_sources_and_tests_that_are_there():
    assert all(files_of(area) for area in AREAS.values())
    names = [name for area in AREAS.values() for name in area.tests]
    assert names and all((ROOT / name).is_file() for name in names)


def test_a_source_that_is_not_there_is_refused_and_one_that_is_left_out_is_not_drawn_from(tmp_path):
    folder = tmp_path / "src" / "fleetx" / "optim"
    (folder / "kernels").mkdir(parents=True)
    for name in ("lars.py", "kernels/lars.py"):
        (folder / name).touch()
    assert files_of(Area(("optim",), ()), ["optim/kernels"], tmp_path) == ["src/fleetx/optim/lars.py"]
    with pytest.raises(ConfigError, match=r"names src/fleetx/adam\.py, which is not there"):
        files_of(Area(("adam.py",), ()), [], tmp_path)


def test_mutants_of_our_sources_are_valid_and_have_names_by_area():
    drawn = list(of_our_sources())
    assert [one.id for one in drawn] == [f"{area}-{number:02}" for area in AREAS for number in (1, 2)]
    for one in drawn:
        content = (ROOT / one.file).read_bytes()
        assert is_valid(content, one.edit) and one.before != one.after
    assert chosen(drawn, drawn[3].id) == [drawn[3]]
    with pytest.raises(ConfigError, match="--only nothing is none of the mutants"):
        chosen(drawn, "nothing")


def test_stage_two_leaves_out_what_stage_one_has_run():
    area = next(iter(AREAS))
    first, second = Plan(2, ("tests/unit", "-k", "a b")).words(area)
    assert first == AREAS[area].tests and second[:3] == ("tests/unit", "-k", "a b")
    assert second[3:] == tuple(f"--ignore={name}" for name in first)
    assert Plan(1, ()).words(area) == [first]
    assert Plan(2, (), ("tests/unit/test_tail.py",)).words(area) == [("tests/unit/test_tail.py",)]


VERBOSE = """tests/unit/test_tail.py::test_a PASSED  [ 50%]
tests/unit/test_tail.py::test_b[x - y] """


def test_the_end_of_pytest_names_the_test():
    failed = VERBOSE + "FAILED  [100%]\nFAILED tests/unit/test_tail.py::test_b[x] - assert 1 == 2\n!!! stopping !!!\n"
    ended = read_ending(failed, 1, late=False, seconds=3.0)
    assert (ended.how, ended.by, ended.why) == ("failed", "tests/unit/test_tail.py::test_b[x]", "assert 1 == 2")
    ended = read_ending(VERBOSE, -6, late=True, seconds=3.0)
    assert (ended.how, ended.by) == ("timeout", "tests/unit/test_tail.py::test_b[x - y]")
    ended = read_ending(VERBOSE, -11, late=False, seconds=3.0)
    assert (ended.how, ended.why) == ("crashed", "signal 11")
    ended = read_ending("ImportError while loading conftest '/x'.\nE   NameError: a\n", 4, late=False, seconds=3.0)
    assert (ended.how, ended.by, ended.why) == ("failed", "collection", "E   NameError: a")
    assert read_ending(VERBOSE + "PASSED\n", 0, late=False, seconds=3.0).how == "passed"


def test_a_stage_may_take_four_times_as_long_as_without_a_mutant_but_never_less_than_ten_minutes():
    assert limit_seconds(20.0) == 600.0 and limit_seconds(1000.0) == 4000.0


@functools.cache
def of_our_sources() -> tuple[mutants.Mutant, ...]:
    return tuple(draw_mutants(10, seed=1))


def row_of(mutant, **ending):
    return {**mutant.told(), "passed": [], "seconds": [1.0], "stage": None, "killed_by": None, "how": None, "why": "", **ending}


def test_the_summary_counts_by_area_and_lists_survivors():
    first, second, third = of_our_sources()[:3]
    rows = [row_of(first, stage=1, killed_by="test", how="failed"), row_of(second, stage=2, killed_by="t", how="timeout")]
    told = summary([*rows, row_of(third)])
    assert told["counts"] == {"mutants": 3, "killed": 2, "survived": 1, "timed_out": 1, "killed_in_stage_1": 1}
    assert told["kill_rate"] == {first.area: 1.0, third.area: 0.0, "all": 0.667}
    assert [(one["id"], one["line"], one["after"]) for one in told["survivors"]] == [(third.id, third.line, third.after)]


def test_a_log_is_gone_on_with_only_for_the_same_mutants_and_tests(tmp_path):
    log, plan = tmp_path / "log.jsonl", Plan(1, ())
    mutant = of_our_sources()[0]
    survivor = row_of(mutant, passed=[shlex.join(words) for words in plan.words(mutant.area)])
    journal = Journal(log, None)
    journal.add({"clean": "tests/unit", "seconds": 4.0})
    journal.add(survivor)
    again = Journal(None, log)
    assert again.rows == {mutant.id: survivor} and again.clean_seconds == {"tests/unit": 4.0}
    again.require_same([mutant], plan)
    with pytest.raises(ConfigError, match="a survivor of other tests"):
        again.require_same([mutant], Plan(2, ()))
    log.write_text(json.dumps({**survivor, "line": 0}))
    with pytest.raises(ConfigError, match=f"--resume has another {mutant.id}"):
        Journal(None, log).require_same([mutant], plan)


def test_a_log_that_cannot_be_read_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mutants.signal, "signal", lambda *_: None)
    (tmp_path / "log").write_text("{")
    assert mutants.main(["--count", "5", "--resume", str(tmp_path / "log")]) == 1
    assert "cannot be read as lines of JSON" in capsys.readouterr().err
