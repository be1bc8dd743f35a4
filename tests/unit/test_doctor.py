"""The checks of `fleetx doctor`, each bad case with made-up facts: the level, what is said, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from fleetx.doctor import hardware, network, software, variables
from fleetx.doctor import text as doctor_text
from fleetx.doctor.examine import check_all
from fleetx.doctor.facts import Backends, Devices, Facts, Gpu, Limits, Network, Package, Peer, Software
from fleetx.doctor.finding import Finding, Row, Table, bus_rate, count, from_json, note, ok, problem
from fleetx.doctor.trial import Trial, check_tables, check_trial, choose, environment

GIB = 1 << 30
H200 = Gpu("H200", 139 * GIB, (9, 0))
T4 = Gpu("T4", 16 * GIB, (7, 5), has_bf16=False)
CUDA = Devices(
    gpus=(H200,), torch_cuda="12.8", architectures=("sm_80", "sm_90", "compute_90"), driver="580.1", driver_cuda="13.0"
)
TORCH = Package("torch", "2.10", "2.13.0+cpu")
HELD = Peer("n0", 6070, "held", "10.0.0.1", "port 6070 of 10.0.0.1 is held by python (process 7)")


def worst(findings: Iterable[Finding]) -> Finding:
    """The first of the highest level."""
    found = list(findings)
    return min(found, key=lambda one: ("problem", "note", "ok").index(one.level))


def test_a_healthy_machine_has_no_problem_and_no_note() -> None:
    assert {finding.level for finding in check_all(Facts(software=Software(packages=(TORCH,))))} == {"ok"}


BAD: list[tuple[Callable[[Facts], Iterable[Finding]], Facts, str, str, str]] = [
    (software.check, Facts(software=Software(python="3.10.9")), "problem", "Python 3.10.9 is too old", "Python 3.11 or later"),
    (
        software.check,
        Facts(software=Software(packages=(Package("torch", "2.10", "2.9.1"),))),
        "problem",
        "torch 2.9.1 is too old",
        'pip install "torch>=2.10"',
    ),
    (
        software.check,
        Facts(software=Software(packages=(Package("psutil", "5.9", None),))),
        "problem",
        "psutil is not installed",
        'pip install "psutil>=5.9"',
    ),
    (
        software.check,
        Facts(software=Software(torch_error="ImportError: libtorch.so")),
        "problem",
        "torch cannot be imported: ImportError: libtorch.so",
        "pip install",
    ),
    (software.check, Facts(software=Software(installed=None)), "note", "not installed", "pip install -e ."),
    (software.check, Facts(software=Software(installed="0.0.9")), "note", "the installed one 0.0.9", "PYTHONPATH"),
    (software.check_triton, Facts(devices=CUDA), "note", "triton is not installed", "pip install triton"),
    (
        hardware.check_gpus,
        Facts(devices=Devices(driver="580.1")),
        "problem",
        "torch was built for CPUs only",
        "CUDA build of torch",
    ),
    (
        hardware.check_gpus,
        Facts(devices=Devices(driver="470.1", torch_cuda="12.8", driver_cuda="11.4", cuda_error="driver too old")),
        "problem",
        "no GPU can be used: driver too old",
        "newer driver, or a torch built for CUDA 11.4",
    ),
    (
        hardware.check_gpus,
        Facts(devices=Devices(driver="580.1", torch_cuda="12.8", driver_cuda="13.0")),
        "problem",
        "no GPU can be used",
        "--gpus all",
    ),
    (
        hardware.check_gpus,
        Facts(devices=replace(CUDA, architectures=("sm_60", "sm_70"))),
        "problem",
        "torch was built for sm_60, sm_70",
        "built for this GPU",
    ),
    (hardware.check_gpus, Facts(devices=replace(CUDA, gpus=(T4,), architectures=("sm_75",))), "note", "no bfloat16", ""),
    (hardware.check_cpu, Facts(devices=Devices(cores=64, allowed_cores=2)), "note", "may use 2 of 64 cores", "taskset"),
    (
        hardware.check_cpu,
        Facts(devices=Devices(cores=64, allowed_cores=64, cpu_quota=4.0)),
        "note",
        "allows 4 of 64 cores",
        "OMP_NUM_THREADS=4",
    ),
    (
        hardware.check_memory,
        Facts(devices=Devices(available_bytes=300 << 20)),
        "problem",
        "only 300 MiB of 8 GiB are free",
        "fewer ranks",
    ),
    (hardware.check_memory, Facts(devices=Devices(memory_limit_bytes=4 * GIB)), "note", "allows 4 GiB of 8 GiB", ""),
    (hardware.check_backends, Facts(backends=Backends(gloo=False)), "problem", "no gloo", "torch's own build"),
    (hardware.check_backends, Facts(devices=CUDA), "problem", "no NCCL", "CUDA build"),
    (hardware.check_shared_memory, Facts(limits=Limits(shm_bytes=None)), "problem", "does not exist", "--shm-size"),
    (hardware.check_shared_memory, Facts(limits=Limits(shm_bytes=64 << 20)), "problem", "64 MiB", "--shm-size=8g"),
    (hardware.check_shared_memory, Facts(limits=Limits(shm_free_bytes=100 << 20)), "note", "100 MiB of 16 GiB", "remount"),
    (hardware.check_limits, Facts(limits=Limits(open_files=(256, 4096))), "problem", "256 open files", "ulimit -n 4096"),
    (hardware.check_limits, Facts(limits=Limits(open_files=(1024, -1))), "note", "1024 open files", "ulimit -n 65536"),
    (hardware.check_limits, Facts(limits=Limits(open_files=(512, 512))), "problem", "512 open files", "limits.conf"),
    (hardware.check_limits, Facts(limits=Limits(processes=200)), "problem", "200 processes", "ulimit -u"),
    (
        hardware.check_limits,
        Facts(limits=Limits(infiniband=("mlx5_0",), locked_bytes=8 << 20)),
        "problem",
        "mlx5_0) pins memory, of which only 8 MiB",
        "ulimit -l unlimited",
    ),
    (hardware.check_limits, Facts(limits=Limits(address_space_bytes=4 * GIB)), "note", "limited to 4 GiB", "ulimit -v"),
    (
        hardware.check_log_folder,
        Facts(limits=Limits(log_error="Permission denied")),
        "problem",
        "log cannot be written: Permission denied",
        "--log_dir",
    ),
    (hardware.check_log_folder, Facts(limits=Limits(log_free_bytes=10 << 20)), "note", "only 10 MiB free", "--log_dir"),
    (
        network.check_name,
        Facts(network=Network(resolved=(), resolve_error="Name or service not known")),
        "note",
        "node0 cannot be resolved (Name or service not known)",
        "write `10.0.0.1 node0` into /etc/hosts",
    ),
    (
        network.check_name,
        Facts(network=Network(resolved=("127.0.1.1",), peers=(HELD,))),
        "problem",
        "node0 resolves to 127.0.1.1",
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    (network.check_name, Facts(network=Network(resolved=("10.9.9.9",))), "note", "no address of this machine", "/etc/hosts"),
    (network.check_addresses, Facts(network=Network(outward=None)), "note", "no route out", ""),
    (network.check_addresses, Facts(network=Network(outward=None, peers=(HELD,))), "problem", "no route out", "ip route"),
    (network.check_addresses, Facts(network=Network(down=("eth0",))), "problem", "eth0, by which", "ip link set eth0 up"),
    (network.check_peers, Facts(network=Network(peers=(HELD,))), "problem", "held by python (process 7)", "--start_port"),
    (
        network.check_peers,
        Facts(network=Network(peers=(Peer("n1", 6070, "silent", "10.0.0.2"),))),
        "problem",
        "n1 (10.0.0.2), port 6070: no answer",
        "open TCP port 6070",
    ),
    (
        network.check_peers,
        Facts(network=Network(peers=(Peer("n1", 6070, "unreachable", "10.0.0.2", "no route to it"),))),
        "problem",
        "no route to it",
        "ip route get",
    ),
    (
        network.check_peers,
        Facts(network=Network(peers=(Peer("n1", 6070, "unknown name", detail="the name cannot be resolved"),))),
        "problem",
        "cannot be resolved",
        "IP address",
    ),
    (variables.check, Facts(variables={"OMP_NUM_THREADS": "many"}), "problem", "'many'", "unset OMP_NUM_THREADS"),
    (variables.check, Facts(variables={"OMP_NUM_THREADS": "96"}), "note", "more than the 2 cores", "unset OMP_NUM_THREADS"),
    (variables.check, Facts(variables={"MKL_NUM_THREADS": "1"}), "note", "of 2 cores", "unset MKL_NUM_THREADS"),
    (
        variables.check,
        Facts(variables={"GLOO_SOCKET_IFNAME": "ib0"}),
        "problem",
        "names ib0, but the interfaces here are lo, eth0",
        "unset GLOO_SOCKET_IFNAME",
    ),
    (variables.check, Facts(variables={"MASTER_ADDR": "10.0.0.9"}), "note", "MASTER_ADDR=10.0.0.9", "unset MASTER_ADDR"),
    (variables.check, Facts(variables={"RANK": "0", "WORLD_SIZE": "2"}), "problem", "left over", "unset RANK WORLD_SIZE"),
    (variables.check, Facts(variables={"FLEETX_DEVICE": "tpu"}), "problem", "'tpu'", "unset FLEETX_DEVICE"),
    (variables.check, Facts(variables={"FLEETX_DEVICE": "cuda"}), "problem", "no GPU here", "unset FLEETX_DEVICE"),
    (variables.check, Facts(variables={"FLEETX_DEVICE": "cpu"}, devices=CUDA), "note", "does not use the GPUs", "unset"),
    (variables.check, Facts(variables={"CUDA_VISIBLE_DEVICES": ""}, devices=CUDA), "note", "hides every GPU", "unset"),
    (variables.check, Facts(variables={"CUDA_VISIBLE_DEVICES": "1"}, devices=CUDA), "note", "not visible", "--gpus"),
    (variables.check, Facts(variables={"NCCL_IB_DISABLE": "1"}), "note", "disables InfiniBand", "unset NCCL_IB_DISABLE"),
    (variables.check, Facts(variables={"NVIDIA_TF32_OVERRIDE": "1"}), "note", "changes results", "unset"),
    (
        variables.check,
        Facts(software=Software(shadows=(("queue", "/home/a/queue.py"),))),
        "problem",
        "/home/a/queue.py is imported in place of the module queue",
        "rename /home/a/queue.py",
    ),
    (
        variables.check,
        Facts(software=Software(shadows=(("fleetx", "/x/fleetx"),))),
        "note",
        "the installed fleetx",
        "unset",
    ),
]


@pytest.mark.parametrize(
    ("check", "facts", "level", "what", "fix"), BAD, ids=[f"{n}-{case[3][:30]}" for n, case in enumerate(BAD)]
)
def test_each_bad_case_is_found_with_its_fix(
    check: Callable[[Facts], Iterable[Finding]], facts: Facts, level: str, what: str, fix: str
) -> None:
    found = worst(check(facts))
    assert found.level == level, found
    assert what in found.what
    assert fix in found.fix


def test_every_problem_in_the_table_of_bad_cases_has_something_to_do() -> None:
    for check, facts, *_ in BAD:
        assert all(found.fix for found in check(facts) if found.level == "problem")


@pytest.mark.parametrize("answer", ["free", "answers", "refuses"])
def test_a_host_that_answers_in_any_way_is_no_problem(answer: Any) -> None:
    peers = (Peer("n1", 6070, answer, "10.0.0.2"),)
    assert [found.level for found in network.check_peers(Facts(network=Network(peers=peers)))] == ["ok"]


def test_a_name_that_is_loopback_is_a_note_for_one_machine_alone() -> None:
    assert worst(network.check_name(Facts(network=Network(resolved=("127.0.1.1",))))).level == "note"


@pytest.mark.parametrize(
    ("value", "missing"),
    [("eth", []), ("=eth0", []), ("=eth", ["eth"]), ("^docker", []), ("ib,eth", ["ib"]), ("eth0:4000", [])],
)
def test_nccl_takes_beginnings_of_interface_names(value: str, missing: list[str]) -> None:
    assert variables.missing_interfaces(value, "NCCL_SOCKET_IFNAME", ["lo", "eth0"]) == missing


def test_gloo_takes_whole_interface_names_alone() -> None:
    assert variables.missing_interfaces("eth,lo", "GLOO_SOCKET_IFNAME", ["lo", "eth0"]) == ["eth"]


def test_only_known_variables_are_kept_and_unknown_ones_of_nccl_without_their_value() -> None:
    environment = {"AWS_SECRET_ACCESS_KEY": "hunter2", "NCCL_TOKEN": "hunter2", "NCCL_ALGO": "Ring", "HOME": "/root"}
    kept = variables.known(environment)
    assert kept == {"NCCL_ALGO": "Ring", "NCCL_TOKEN": "..."}
    assert "hunter2" not in str(check_all(Facts(variables=kept)))


def test_variables_of_a_launcher_that_runs_now_are_not_left_over() -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "FLEETX_WORKER_LOG": "x", "OMP_NUM_THREADS": "1"}
    assert [found.level for found in variables.check(Facts(variables=launched))] == ["ok"]


def test_a_gpu_runs_code_of_its_major_version_or_code_compiled_on_loading() -> None:
    assert hardware.runs_on(H200, ["sm_90"])
    assert hardware.runs_on(Gpu("L40", GIB, (8, 9)), ["sm_80"])
    assert hardware.runs_on(Gpu("B200", GIB, (10, 0)), ["sm_80", "compute_90"])
    assert not hardware.runs_on(Gpu("B200", GIB, (10, 0)), ["sm_80", "sm_90"])
    assert not hardware.runs_on(Gpu("A100", GIB, (8, 0)), ["sm_86"])


# --- versions and extras ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("torch>=2.10", Package("torch", "2.10", None)),
        ("numpy", Package("numpy", "", None)),
        ("scikit-learn>=1.4; extra == 'demo'", Package("scikit-learn", "1.4", None, "demo")),
        ('ray[train]>=2.30; extra == "ray"', Package("ray", "2.30", None, "ray")),
    ],
)
def test_requirements_are_read_as_packages_write_them(text: str, package: Package) -> None:
    assert software.parse_requirement(text) == package


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("2.9.1", "2.10", True),
        ("2.10", "2.10.0", False),
        ("2.13.0+cpu", "2.10", False),
        ("13", "9.5", False),
        ("1.26rc1", "1.26", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, least: str, older: bool) -> None:
    assert software.is_older(version, least) is older


def test_extras_are_told_with_the_line_that_installs_them() -> None:
    packages = (Package("scikit-learn", "1.4", None, "demo"), Package("tokenizers", "0.20", "0.23", "text"))
    there, missing = software.check_extras(Facts(software=Software(packages=packages)))
    assert there == ok("extras", "installed: text")
    assert "demo (scikit-learn)" in missing.what and 'pip install "fleetx[NAME]"' in missing.what


def test_an_extra_that_is_too_old_is_a_note() -> None:
    packages = (Package("transformers", "4.50", "4.30", "hf"),)
    found = worst(software.check_extras(Facts(software=Software(packages=packages))))
    assert (found.level, found.fix) == ("note", 'pip install --upgrade "fleetx[hf]"')


# --- the trial --------------------------------------------------------------------------------------------------------------


def chosen(
    facts: Facts, backend: str | None = None, *, ranks: int = 2, is_wanted: bool = True
) -> tuple[tuple[str, ...], list[str]]:
    choice = choose(facts, ranks=ranks, backend=backend, is_wanted=is_wanted)
    return choice.backends, [found.level for found in choice.findings]


TWO_GPUS = Facts(devices=replace(CUDA, gpus=(H200, H200)), backends=Backends(nccl="2.27.3"))
ONE_GPU = Facts(devices=CUDA, backends=Backends(nccl="2.27.3"))


def test_gloo_is_tried_everywhere_and_nccl_with_a_gpu_for_each_rank() -> None:
    assert chosen(Facts()) == (("gloo",), [])
    assert chosen(TWO_GPUS) == (("gloo", "nccl"), [])
    assert chosen(TWO_GPUS, "nccl") == (("nccl",), [])
    assert chosen(TWO_GPUS, "gloo") == (("gloo",), [])
    assert chosen(ONE_GPU) == (("gloo",), ["note"])
    assert chosen(ONE_GPU, "nccl") == ((), ["problem"])
    assert chosen(TWO_GPUS, ranks=3) == (("gloo",), ["note"])


def test_nothing_is_tried_where_that_is_not_wanted_or_cannot_be() -> None:
    assert chosen(Facts(), is_wanted=False) == ((), ["note"])
    assert chosen(Facts(software=Software(torch_error="ImportError"))) == ((), ["note"])


def test_under_a_launcher_no_ranks_are_started_and_its_own_are_measured() -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    ours = choose(Facts(variables=launched | {"FLEETX_WORKER_LOG": "x"}), ranks=2, backend=None, is_wanted=True)
    assert ours.is_in_place and ours.backends == ("gloo",) and "without starting others" in ours.findings[0].what
    left_over = choose(Facts(variables=launched), ranks=2, backend=None, is_wanted=True)
    assert left_over.backends == () and "no ranks were started" in left_over.findings[0].what


def test_ranks_that_fail_or_hang_are_problems_with_the_end_of_their_logs() -> None:
    trial = Trial(2, ("gloo",), error="rank 1 failed first: exit code -9", log_tail=("rank 1: joining the other ranks",))
    (failed,) = check_trial(trial)
    assert failed.level == "problem" and "failed: rank 1 failed first" in failed.what and "joining" in failed.what
    (late,) = check_trial(replace(trial, error="no end within 5 s", is_late=True))
    assert late.level == "problem" and "hangs: no end within 5 s" in late.what and "--limit" in late.fix
    assert list(check_trial(Trial(2, ("gloo",)))) == []


def test_a_wrong_sum_is_a_problem_and_a_slow_link_a_note() -> None:
    right, wrong = Row(4, 1e-4, 4e4, True), Row(1 << 20, 1e-1, 1e7, False)
    found = list(check_tables([Table("gloo", 2, (right, wrong))], [4, 1 << 20, 1 << 24]))
    assert [one.level for one in found] == ["problem", "note", "note"]
    assert "wrong sums of 1,048,576 bytes" in found[0].what
    assert "2 smallest sizes" in found[1].what and "10 MB/s" in found[2].what


def test_the_bus_rate_of_four_ranks_is_three_halves_of_bytes_over_seconds() -> None:
    assert bus_rate(8e6, 2e-3, 4) == pytest.approx(6e9)
    assert bus_rate(8e6, 2e-3, 2) == pytest.approx(4e9)


def test_without_nccl_the_ranks_of_the_trial_leave_gpus_alone() -> None:
    assert environment({"A": "b"}, ["gloo"]) == {"A": "b", "FLEETX_DEVICE": "cpu"}
    assert environment({"A": "b"}, ["gloo", "nccl"]) == {"A": "b"}


# --- words ------------------------------------------------------------------------------------------------------------------

FINDINGS = [ok("CPU", "2 cores"), problem("limits", "[bold]few[/bold] files", "ulimit -n 65536"), note("limits", "little memory")]
TABLE = Table("gloo", 2, (Row(4, 5e-4, 8e3, True), Row(1 << 20, 2e-3, 5.24e8, False)))


def test_plain_text_has_whole_lines_no_escapes_and_the_fix_below_its_problem() -> None:
    lines = doctor_text.to_text(FINDINGS, [TABLE], width=doctor_text.WIDE, has_colour=False).splitlines()
    assert lines[:4] == [
        "CPU     ok       2 cores",
        "limits  problem  [bold]few[/bold] files",
        "                 fix: ulimit -n 65536",
        "        note     little memory",
    ]
    assert lines[-1] == "1 problem, 1 note"
    assert not any("\x1b" in line for line in lines)
    assert any(line.split() == ["1,048,576", "2.000", "0.524", "WRONG"] for line in lines)


def test_colours_are_there_where_they_are_wanted() -> None:
    assert "\x1b[" in doctor_text.to_text(FINDINGS, [], width=80, has_colour=True)


def test_json_has_findings_tables_and_facts_and_says_whether_all_is_well() -> None:
    found = json.loads(doctor_text.to_json(Facts(), FINDINGS, [TABLE], 1.234))
    assert (found["ok"], found["problems"], found["notes"], found["seconds"]) == (False, 1, 1, 1.23)
    assert found["findings"][1] == {
        "topic": "limits",
        "level": "problem",
        "what": "[bold]few[/bold] files",
        "fix": "ulimit -n 65536",
    }
    assert from_json(found["all_reduce"]) == (TABLE,)
    assert found["facts"]["network"]["hostname"] == "node0"


def test_findings_are_counted_by_level() -> None:
    assert [count(FINDINGS, level) for level in ("ok", "note", "problem")] == [1, 1, 1]
