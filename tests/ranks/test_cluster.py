"""A cluster on one machine: hosts of bench/lib/netns.py, the command bench.cluster.run, and the links' own byte counters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.count_bytes.run import reducers
from bench.lib import netns
from bench.lib.cluster import Run, run_on_cluster, run_on_hosts
from bench.lib.link_cut import cut
from bench.lib.link_speed import transfer_seconds
from bench.lib.netns import cluster, why_not
from fleetx.errors import ConfigError, LaunchError

ROOT = Path(__file__).parents[2]

LIMIT_SECONDS = 90.0
REDUCERS = reducers()


@pytest.fixture(scope="module")
def can_make_hosts() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def mark_in(text: str) -> str:
    """Of the first host named in a text."""
    found = re.search(r"fleetx-([0-9a-f]{8})-", text)
    assert found is not None, text
    return found[1]


def remains(mark: str) -> list[str]:
    """Namespaces, links, folders and processes of a cluster."""
    shown = [subprocess.run(["ip", *words], capture_output=True, text=True, check=True) for words in (["netns"], ["link"])]
    found = [line for done in shown for line in done.stdout.splitlines() if mark in line]
    found += [str(path) for path in Path(tempfile.gettempdir()).glob(f"fleetx-{mark}-*")]
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [str(entry)] if f"fleetx-{mark}-".encode() in entry.read_bytes() else []
        except OSError:
            continue  # it has ended
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.02)


def command(*words: str) -> subprocess.Popen[str]:
    """Start `python -m bench.cluster.run` with these words."""
    line = [sys.executable, "-m", "bench.cluster.run", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


# Hosts


@pytest.mark.usefixtures("can_make_hosts")
def test_hosts_reach_each_other_by_name_and_have_names_and_folders_of_their_own() -> None:
    ask = "import os, socket, sys; print(socket.gethostname(), socket.gethostbyname(sys.argv[1]), os.environ['HOME'])"
    with cluster(hosts=2) as (first, second):
        line = first.command(sys.executable, "-I", "-S", "-c", ask, second.namespace)
        told = subprocess.run(line, capture_output=True, text=True, check=True, env=first.environment(os.environ)).stdout
        assert told.split() == [first.namespace, second.address, str(first.home)]
        assert first.home.is_dir() and first.home != second.home
    assert remains(mark_in(first.namespace)) == []


@pytest.mark.usefixtures("can_make_hosts")
def test_several_clusters_live_side_by_side() -> None:
    with cluster(hosts=1) as (one,):
        with cluster(hosts=2) as (two, _):
            assert one.namespace != two.namespace and one.address == two.address
        assert remains(mark_in(two.namespace)) == []
        assert one.tx_bytes() >= 0


@pytest.mark.usefixtures("can_make_hosts")
def test_a_transfer_takes_its_size_over_the_rate_in_both_directions() -> None:
    payload_bytes, rate_mbit = 10_000_000, 100
    ideal_seconds = payload_bytes * 8 / (rate_mbit * 1e6)  # 0.8
    with cluster(hosts=2, rate_mbit=rate_mbit) as (first, second):
        for sender, receiver in ((first, second), (second, first)):
            before = sender.tx_bytes()
            took = [transfer_seconds(sender, receiver, payload_bytes)]
            assert sender.tx_bytes() - before == pytest.approx(payload_bytes, rel=0.05)
            while min(took) > 1.15 * ideal_seconds and len(took) < 20:  # a machine that is busy elsewhere is late, never early
                took.append(transfer_seconds(sender, receiver, payload_bytes))
            assert ideal_seconds <= min(took) <= 1.15 * ideal_seconds, took


@pytest.mark.usefixtures("can_make_hosts")
def test_hosts_that_send_to_one_share_its_link() -> None:
    payload_bytes, rate_mbit = 8_000_000, 100
    alone_seconds = payload_bytes * 8 / (rate_mbit * 1e6)  # 0.64
    with cluster(hosts=3, rate_mbit=rate_mbit) as (first, second, third), ThreadPoolExecutor(2) as pool:
        took: list[float] = []
        while max(took, default=0.0) < 1.5 * alone_seconds and len(took) < 40:  # where one is done before the other begins
            jobs = [pool.submit(transfer_seconds, h, third, payload_bytes, port=7001 + n) for n, h in enumerate((first, second))]
            took += [job.result() for job in jobs]
    assert max(took) >= 1.5 * alone_seconds, took  # 2 if they begin at the very same time


PYTHON = [sys.executable, "-I", "-S", "-c"]
RECEIVES = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
    line.bind((sys.argv[1], 5000))
    line.settimeout(60)
    print("ready", flush=True)
    words = []
    while "after" not in words:
        words.append(line.recv(100).decode())
print(*words)
"""
SENDS = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
    line.sendto(sys.argv[2].encode(), (sys.argv[1], 5000))
"""


@pytest.mark.usefixtures("can_make_hosts")
@pytest.mark.parametrize(("direction", "lost"), [("both", ["up", "down"]), ("up", ["up"]), ("down", ["down"])])
def test_a_cut_loses_packets_on_their_way_and_tells_neither_host(direction: str, lost: list[str]) -> None:
    with cluster(hosts=3) as (first, second, third):
        for way, sender, receiver in (("up", first, second), ("down", second, first), ("elsewhere", second, third)):
            listens = receiver.command(*PYTHON, RECEIVES, receiver.address)
            with subprocess.Popen(listens, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"

                def send(word: str, sender: netns.Host = sender, receiver: netns.Host = receiver) -> None:
                    subprocess.run(sender.command(*PYTHON, SENDS, receiver.address, word), check=True)

                send("before")  # the hosts know each other from here on
                with cut(first, direction):
                    sent = sender.traffic().sent_packets
                    send("during")
                    assert sender.traffic().sent_packets > sent, "dropped by the host itself, which TCP would be told"
                send("after")
                assert process.stdout.read().split() == ["before", *(["during"] if way not in lost else []), "after"]


def test_a_burst_holds_a_packet_of_offload_and_what_a_late_timer_would_lose() -> None:
    assert netns.burst_bytes(100) == 128 * 2**10  # 4 ms would be 50,000 bytes
    assert netns.burst_bytes(1000) == 500_000  # 4 ms


@pytest.mark.parametrize(
    ("hosts", "rate_mbit", "said"),
    [
        (0, None, "hosts is 0; it must be a whole number from 1 to 100"),
        (True, None, "hosts is True"),
        (2, 0, "rate_mbit is 0; it must be a number from 0.1 to 100000, or None"),
        (2, float("nan"), "rate_mbit is nan"),
        (2, True, "rate_mbit is True"),
    ],
)
def test_hosts_and_rates_that_cannot_be_are_refused(hosts: Any, rate_mbit: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)), cluster(hosts=hosts, rate_mbit=rate_mbit):
        pass


# Why not


def test_without_root_the_command_ends_with_a_sentence_and_code_1() -> None:
    script = "import os, sys; from bench.cluster import run; os.geteuid() or os.setuid(65534); sys.exit(run.main(['train.py']))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cluster: network namespaces need root; run this as root, for instance with sudo\n"


def test_without_the_tools_the_sentence_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="need `ip`, `tc`, .* not found on PATH; install iproute2"):
        run_on_cluster("train.py", hosts=2, rate_mbit=None, timeout=10)


# Ends


SLEEPS_ON_A_HOST = """
import subprocess, sys
from bench.lib.netns import cluster
with cluster(hosts=1) as (host,):
    sleeper = subprocess.Popen(host.command("sleep", "600"), env=host.environment({"PATH": sys.argv[1]}))
    print(host.namespace, flush=True)
    sleeper.wait()
"""


@pytest.mark.usefixtures("can_make_hosts")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_hosts_and_their_processes_go_when_their_owner_is_killed(signum: signal.Signals) -> None:
    line = [sys.executable, "-c", SLEEPS_ON_A_HOST, os.environ["PATH"]]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        mark = mark_in(owner.stdout.readline())
        assert remains(mark)
        owner.send_signal(signum)
        assert owner.wait(LIMIT_SECONDS) != 0
    wait_until(lambda: not remains(mark))


@pytest.mark.usefixtures("can_make_hosts")
def test_a_script_that_raises_ends_the_command_with_its_code_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise SystemExit(7)\n")
    job = command("--hosts", "2", "--timeout", "60", str(tmp_path / "train.py"))
    out, err = job.communicate(timeout=LIMIT_SECONDS)
    assert job.returncode == 7, out + err
    assert "10.213.7.1| " in out and re.search(r"^10\.213\.7\.2 ended with 7, its link sent [\d,]+ bytes$", out, re.MULTILINE)
    assert remains(mark_in(out)) == []


@pytest.mark.usefixtures("can_make_hosts")
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.campaign)]
)
def test_a_signal_to_the_command_ends_a_running_script_and_leaves_nothing(
    signum: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(600)\n")
    job = command("--hosts", "1", str(tmp_path / "train.py"), str(tmp_path / "runs"))
    wait_until((tmp_path / "runs").exists)
    job.send_signal(signum)
    out, err = job.communicate(timeout=LIMIT_SECONDS)
    assert job.returncode == code, out + err
    assert remains(mark_in(out)) == []


@pytest.mark.usefixtures("can_make_hosts")
def test_a_script_that_runs_out_of_time_is_killed_and_the_hosts_can_be_used_again() -> None:
    with cluster(hosts=1) as hosts:
        ended = run_on_hosts(hosts, ROOT / "bench" / "cluster" / "run.py", timeout=0.3)  # less than any launcher takes to start
        assert ended.exit_codes == [124] and ended.worst == 124 and ended.seconds < 30
        assert hosts[0].tx_bytes() >= 0
        subprocess.run(hosts[0].command("true"), check=True)


# A script on two hosts, and three


TELLS = """
import os, socket, sys
from bench.count_bytes.run import main
from fleetx import fleet
fleet.init()
facts = fleet.util.all_gather([socket.gethostname(), os.environ["HOME"], os.environ["GIVEN"]])
if fleet.is_first_worker():
    print("facts", fleet.worker_num(), fleet.node_num(), *(word for fact in facts for word in fact), flush=True)
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def two_host_run(can_make_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    script = tmp_path_factory.mktemp("cluster") / "train.py"
    script.write_text(TELLS)
    env = {"GIVEN": "told", "FLEETX_DEVICE": "cpu"}
    run = run_on_cluster(script, hosts=2, rate_mbit=None, env=env, timeout=LIMIT_SECONDS)
    assert run.exit_codes == [0, 0], run.consoles
    return run


def figures(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_a_script_sees_two_hosts_each_with_a_name_a_home_and_the_variables_given(two_host_run: Run) -> None:
    facts = next(line for line in two_host_run.stdout.splitlines() if line.startswith("facts")).split()[1:]
    mark = mark_in(facts[2])
    assert facts[:2] == ["2", "2"]
    assert [facts[2], facts[5]] == [f"fleetx-{mark}-0", f"fleetx-{mark}-1"]
    assert facts[3].endswith("/host0") and facts[6].endswith("/host1") and facts[4] == facts[7] == "told"
    assert remains(mark) == []


def test_a_run_tells_time_and_bytes_of_the_whole_script(two_host_run: Run) -> None:
    assert 0 < two_host_run.seconds < LIMIT_SECONDS
    for host, sent in enumerate(two_host_run.tx_bytes):
        assert sent > sum(figure["link_bytes"][host] for figure in figures(two_host_run))


@pytest.mark.parametrize("name", REDUCERS)
def test_the_byte_counter_agrees_with_the_link_for_every_reducer(name: str, two_host_run: Run) -> None:
    figure = next(figure for figure in figures(two_host_run) if figure["strategy"] == REDUCERS[name])
    for counted, sent in zip(figure["counted_bytes"], figure["link_bytes"], strict=True):
        assert counted > 100_000  # enough that no control message counts
        assert counted == pytest.approx(sent, rel=0.05)


@pytest.mark.usefixtures("can_make_hosts")
def test_the_byte_counter_agrees_with_the_links_of_three_hosts() -> None:
    env = {"FLEETX_DEVICE": "cpu"}
    run = run_on_cluster(
        ROOT / "bench" / "count_bytes" / "run.py", ["{}"], hosts=3, rate_mbit=None, env=env, timeout=LIMIT_SECONDS
    )
    assert run.exit_codes == [0, 0, 0], run.consoles
    (figure,) = figures(run)
    assert figure["counted_bytes"] == pytest.approx(figure["link_bytes"], rel=0.05)
