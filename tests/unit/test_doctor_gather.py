"""How `fleetx doctor` asks a machine: control groups from made-up files, shadows in real folders, questions without an answer."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from fleetx.cli.doctor import SIZES, hosts_of, size_list
from fleetx.dist import control_groups
from fleetx.doctor.gather import find_shadows
from fleetx.doctor.gather_network import ask_within, gather_network
from fleetx.doctor.trial import _summary, _tail
from fleetx.errors import ConfigError
from fleetx.launch.nodes import DEFAULT_PORT


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- control groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores"), [("400000 100000", 4.0), ("50000 100000", 0.5), ("max 100000", None), ("-1 100000", None), ("", None)]
)
def test_a_quota_is_cores_of_a_period(text: str, cores: float | None) -> None:
    assert control_groups.parse_quota(text) == cores


def test_the_tightest_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    write(tmp_path / "job" / "step" / "cpu.max", "max 100000\n")
    write(tmp_path / "job" / "cpu.max", "200000 100000\n")
    write(tmp_path / "job" / "step" / "memory.max", "8589934592\n")
    write(tmp_path / "job" / "memory.max", "max\n")
    assert control_groups.cpu_quota(tmp_path, "0::/job/step\n") == 2.0
    assert control_groups.memory_limit(tmp_path, "0::/job/step\n") == 8 << 30


def test_what_is_left_of_a_limit_is_less_what_is_used(tmp_path: Path) -> None:
    write(tmp_path / "job" / "step" / "memory.max", "8589934592\n")
    write(tmp_path / "job" / "step" / "memory.current", "1073741824\n")
    write(tmp_path / "job" / "memory.max", "9663676416\n")
    write(tmp_path / "job" / "memory.current", "8589934592\n")
    assert control_groups.memory_left(tmp_path, "0::/job/step\n") == 1 << 30  # of the group above, which others fill too


def test_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    write(tmp_path / "cpu,cpuacct" / "a" / "cpu.cfs_quota_us", "150000\n")
    write(tmp_path / "cpu,cpuacct" / "a" / "cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory" / "a" / "memory.limit_in_bytes", "1073741824\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    membership = "4:cpu,cpuacct:/a\n3:memory:/a\n"
    assert control_groups.cpu_quota(tmp_path, membership) == 1.5
    assert control_groups.memory_limit(tmp_path, membership) == 1 << 30


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert control_groups.cpu_quota(tmp_path, "") is None
    assert control_groups.memory_limit(tmp_path, "0::/\n") is None


# --- files that hide modules ------------------------------------------------------------------------------------------------


def test_files_that_hide_a_module_of_python_or_a_dependency_are_found(tmp_path: Path) -> None:
    work, path = tmp_path / "work", tmp_path / "path"
    for file in (work / "queue.py", work / "train.py", path / "numpy" / "__init__.py", path / "random" / "data.txt"):
        write(file, "")
    found = find_shadows([str(work)], [str(path)], {"torch", "numpy"})
    assert found == (("queue", str(work / "queue.py")), ("numpy", str(path / "numpy")))


def test_another_fleetx_hides_the_installed_one_on_pythonpath_alone(tmp_path: Path) -> None:
    write(tmp_path / "fleetx" / "__init__.py", "")
    assert find_shadows([str(tmp_path)], [], set()) == ()
    assert find_shadows([], [str(tmp_path)], set()) == (("fleetx", str(tmp_path / "fleetx")),)


def test_pythonpath_may_name_the_fleetx_that_runs() -> None:
    import fleetx

    assert find_shadows([], [str(Path(fleetx.__file__).parents[1])], set()) == ()


# --- the network ------------------------------------------------------------------------------------------------------------


def test_a_question_without_an_answer_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        ask_within(0.05, never.wait)
    never.set()


def test_an_error_of_a_question_is_its_answer() -> None:
    with pytest.raises(OSError, match="no such name"):
        ask_within(5.0, lambda: (_ for _ in ()).throw(OSError("no such name")))


def test_a_port_of_this_machine_is_free_or_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        (held,) = gather_network(["127.0.0.1"], port, has_torch=True).peers
    assert held.answer == "held" and f"port {port} of 127.0.0.1 is held by" in held.detail
    assert gather_network(["127.0.0.1"], port, has_torch=True).peers[0].answer == "free"


def test_a_name_that_no_server_knows_is_reported_as_such() -> None:
    (peer,) = gather_network(["no-such-host.invalid"], 6070, has_torch=True).peers
    assert peer.answer == "unknown name"


def test_without_torch_hosts_are_not_looked_at_and_that_is_said() -> None:
    network = gather_network(["127.0.0.1"], 6070, has_torch=False)
    assert network.peers == () and "torch cannot be imported" in network.peers_error


# --- flags ------------------------------------------------------------------------------------------------------------------


def test_hosts_are_those_of_master_or_of_ips() -> None:
    assert hosts_of(None, None) == ((), DEFAULT_PORT)
    assert hosts_of("n0:7000", None) == (("n0",), 7000)
    assert hosts_of(None, "a, b") == (("a", "b"), DEFAULT_PORT)


@pytest.mark.parametrize(("master", "ips"), [("n0", "a,b"), (None, "a,,b"), ("n0:x", None), ("n0:80", None)])
def test_hosts_that_cannot_be_meant_are_refused(master: str | None, ips: str | None) -> None:
    with pytest.raises(ConfigError):
        hosts_of(master, ips)


def test_sizes_are_ascending_numbers_of_whole_floats() -> None:
    assert size_list().parse("4B,64KiB,1MiB,16MiB,64MiB") == SIZES
    for text in ("3B", "64KiB,4B", "4B,4B", "2GiB", "many", ""):
        with pytest.raises(ValueError):
            size_list().parse(text)


# --- what a trial has left --------------------------------------------------------------------------------------------------


def test_the_words_of_a_failed_trial_are_told_without_their_frame_and_the_place_of_logs_that_are_gone() -> None:
    box = "+-----+\n| fleetrun: rank 1 failed first |\n| log: /tmp/x/workerlog.1 |\n+-----+\n"
    assert _summary(box.encode(), 1) == "fleetrun: rank 1 failed first"
    assert _summary(b"", 3) == "fleetrun ended with exit code 3"


def test_ranks_that_wrote_the_same_are_told_once(tmp_path: Path) -> None:
    for rank, text in enumerate(("joining\n", "joining\n", "joining\nKilled\n")):
        write(tmp_path / f"workerlog.{rank}", text)
    assert _tail(tmp_path, 4) == ("rank 0: joining", "rank 2: joining", "rank 2: Killed")
