"""Which machines take part and which one is this: flags, faked variables of Slurm and Open MPI, faked name servers."""

from __future__ import annotations

import pytest

from fleetx.dist.launch_variables import job_port
from fleetx.errors import ConfigError
from fleetx.launch.nodes import Machine, NodeFlags, find_nodes, split_master, this_machine
from fleetx.launch.topology import Nodes

NAMES = {"node0": "10.0.0.1", "node1": "10.0.0.2", "gpu003": "10.0.0.1", "gpu004": "10.0.0.2", "localhost": "127.0.0.1"}


def machine(*own: str, names: dict[str, str] | None = None) -> Machine:
    known = {**NAMES, **(names or {})}

    def resolve(name: str) -> str:
        if name[0].isdigit():
            return name
        if name not in known:
            raise OSError("Name or service not known")
        return known[name]

    outward = next((address for address in own if not address.startswith("127.")), None)
    return Machine(lambda: ("127.0.0.1", *own), resolve, lambda address: outward)


def unasked() -> Machine:
    """A single node needs no addresses, and must not wait for a name server."""

    def refuse(*arguments: object) -> str:
        raise AssertionError("asked about addresses")

    return Machine(refuse, refuse, refuse)  # type: ignore[arg-type]


def slurm(node: int = 0, nodes: int = 2, tasks: int = 2, **others: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(node),
        "SLURM_NODEID": str(node),
        "SLURM_NNODES": str(nodes),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[003-004]",
        "SLURM_JOB_ID": "77",
        **others,
    }


def openmpi(rank: int = 0, size: int = 2, local_size: int = 1, **others: str) -> dict[str, str]:
    told = {"RANK": rank, "SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": local_size}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in told.items()}, **others}


@pytest.mark.parametrize(
    "asked", [NodeFlags(), NodeFlags(nnodes=1), NodeFlags(nnodes=1, rank=0, master="node0:6070"), NodeFlags(source="local")]
)
def test_one_node_listens_on_loopback_and_asks_no_other_node(asked: NodeFlags) -> None:
    assert find_nodes(asked, {}, unasked()) == Nodes(1, 0, "127.0.0.1", "127.0.0.1", None)


NODE_0 = ("10.0.0.1", 6070)
BOTH = ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(("own", "rank"), [("10.0.0.1", 0), ("10.0.0.2", 1)])
def test_each_node_finds_itself_in_ips(own: str, rank: int) -> None:
    assert find_nodes(NodeFlags(ips="node0, 10.0.0.2"), {}, machine(own)) == Nodes(2, rank, own, *NODE_0, BOTH)


def test_ips_beat_the_variables_of_slurm() -> None:
    found = find_nodes(NodeFlags(ips="10.0.0.2,10.0.0.1", start_port=7000), slurm(tasks=8), machine("10.0.0.1"))
    assert found == Nodes(2, 1, "10.0.0.1", "10.0.0.2", 7000, ("10.0.0.2", "10.0.0.1"))


def test_ips_of_one_machine_are_a_local_run() -> None:
    assert find_nodes(NodeFlags(ips="127.0.0.1"), {}, machine("10.0.0.1")) == Nodes()


def test_host_says_which_entry_is_ours_when_none_or_several_match() -> None:
    loopback = NodeFlags(ips="127.0.0.1,127.0.0.2", host="127.0.0.2")
    assert find_nodes(loopback, {}, machine()) == Nodes(2, 1, "127.0.0.2", "127.0.0.1", 6070, ("127.0.0.1", "127.0.0.2"))
    both = machine("10.0.0.1", "10.0.0.2")
    with pytest.raises(ConfigError, match=r"several addresses of this machine: 10.0.0.1, 10.0.0.2; .* --host"):
        find_nodes(NodeFlags(ips="10.0.0.1,10.0.0.2"), {}, both)
    assert find_nodes(NodeFlags(ips="10.0.0.1,10.0.0.2", host="node1"), {}, both).rank == 1
    assert find_nodes(NodeFlags(ips="10.0.0.1,10.0.0.2", rank=1), {}, both).address == "10.0.0.2"


def test_no_match_names_the_addresses_of_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"\(10.0.0.1, 10.0.0.2\) is this machine, whose addresses are 127.0.0.1, 10.9.9.9"):
        find_nodes(NodeFlags(ips="node0,node1"), {}, machine("10.9.9.9"))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (NodeFlags(ips="10.0.0.1,,10.0.0.2"), "such as 10.0.0.1,10.0.0.2"),
        (NodeFlags(ips=""), "got ''"),
        (NodeFlags(ips="10.0.0.1,node0"), "names the machine 10.0.0.1 twice"),
        (NodeFlags(ips="10.0.0.1,nowhere"), r"address of 'nowhere' \(--ips\) cannot be found: Name or service not known"),
        (NodeFlags(ips="node0,node1", nnodes=3), "names 2 nodes, but --nnodes is 3"),
        (NodeFlags(ips="node0,node1", master="node0"), "keep one of them"),
        (NodeFlags(ips="node0,node1", host="10.0.0.3"), "--host 10.0.0.3 is none of the nodes in --ips"),
        (NodeFlags(ips="node0,node1", host="node0", rank=1), "is node 0 of --ips, but --rank is 1"),
        (NodeFlags(ips="node0,node1", rank=2), "numbered 0 to 1"),
        (NodeFlags(nnodes=2), "write --master HOST with node 0's address, or --ips A,B"),
        (NodeFlags(nnodes=2, rank=0), "write --master HOST"),
        (NodeFlags(master="node0"), r"needs the number of nodes as well; add --nnodes N"),
        (NodeFlags(rank=1), "node 1 was given .* numbered 0 to 0"),
        (NodeFlags(nnodes=2, master="node0", rank=2), "node 2 was given .* numbered 0 to 1"),
        (NodeFlags(nnodes=2, master="nowhere"), r"address of 'nowhere' \(--master\) cannot be found"),
        (NodeFlags(nnodes=2, master="node0", host="nowhere"), r"address of 'nowhere' \(--host\)"),
        (
            NodeFlags(nnodes=2, master="node1", rank=0),
            r"this is node 0, but 10.0.0.2 is none of its addresses \(127.0.0.1, 10.0.0.1\)",
        ),
        (NodeFlags(nnodes=2, master="node0:80"), "port '80'; a port from 1024 to 65535"),
        (NodeFlags(nnodes=3, source="slurm"), "--nnodes 3 was given, but the variables of slurm say 2"),
        (NodeFlags(source="mpi"), "--env mpi was given, but its variables are not set here; start with `mpirun"),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(asked: NodeFlags, told: str) -> None:
    env = slurm() if asked.source else {}
    with pytest.raises(ConfigError, match=told) as refused:
        find_nodes(asked, env, machine("10.0.0.1"))
    assert "\n" not in str(refused.value)


def test_the_owner_of_the_masters_address_is_node_0_and_others_are_numbered_on_arrival() -> None:
    asked = NodeFlags(nnodes=2, master="node0:7001")
    assert find_nodes(asked, {}, machine("10.0.0.1")) == Nodes(2, 0, "10.0.0.1", "10.0.0.1", 7001)
    assert find_nodes(asked, {}, machine("10.0.0.2")) == Nodes(2, None, "10.0.0.2", "10.0.0.1", 7001)
    told = NodeFlags(nnodes=3, master="node0", rank=2, start_port=7002)
    assert find_nodes(told, {}, machine("10.0.0.2")) == Nodes(3, 2, "10.0.0.2", "10.0.0.1", 7002)


def test_two_nodes_on_one_machine_are_told_apart_by_host() -> None:
    asked = NodeFlags(nnodes=2, master="127.0.0.1:7003", host="127.0.0.2")
    assert find_nodes(asked, {}, machine("10.0.0.1")) == Nodes(2, None, "127.0.0.2", "127.0.0.1", 7003)
    assert find_nodes(NodeFlags(nnodes=2, master="127.0.0.1"), {}, machine("10.0.0.1")).rank == 0


def test_node_0_behind_another_address_listens_on_its_own() -> None:
    asked = NodeFlags(nnodes=2, master="10.7.7.7", rank=0, host="10.0.0.1")
    assert find_nodes(asked, {}, machine("10.0.0.1")) == Nodes(2, 0, "10.0.0.1", "10.0.0.1", 6070)


def test_a_name_that_means_loopback_on_its_own_machine_becomes_an_address_others_reach() -> None:
    debian = machine("10.0.0.1", names={"node0": "127.0.1.1"})
    assert find_nodes(NodeFlags(ips="node0,node1"), {}, debian) == Nodes(2, 0, "10.0.0.1", *NODE_0, BOTH)
    assert find_nodes(NodeFlags(nnodes=2, master="node0"), {}, debian).master == "10.0.0.1"


@pytest.mark.parametrize(("node", "own"), [(0, "10.0.0.1"), (1, "10.0.0.2")])
def test_one_slurm_task_on_each_node_gives_nodes_master_and_port(node: int, own: str) -> None:
    assert find_nodes(NodeFlags(), slurm(node), machine(own)) == Nodes(2, node, own, "10.0.0.1", job_port("77"))


def test_the_nodes_of_a_slurm_step_count_not_those_of_the_whole_job() -> None:
    env = {**slurm(node=0, nodes=1, tasks=1), "SLURM_NNODES": "4"}
    assert find_nodes(NodeFlags(), env, unasked()) == Nodes()


def test_flags_beat_slurm_one_by_one() -> None:
    asked = NodeFlags(master="node1", start_port=7004, rank=1)
    assert find_nodes(asked, slurm(0), machine("10.0.0.1")) == Nodes(2, 1, "10.0.0.1", "10.0.0.2", 7004)
    assert find_nodes(NodeFlags(nnodes=1), slurm(tasks=8), unasked()) == Nodes()


def test_slurms_master_may_be_set_in_the_script() -> None:
    env = slurm(1, MASTER_ADDR="10.0.0.9", MASTER_PORT="7005")
    assert find_nodes(NodeFlags(), env, machine("10.0.0.2")) == Nodes(2, 1, "10.0.0.2", "10.0.0.9", 7005)
    with pytest.raises(ConfigError, match="MASTER_PORT names the port '80'"):
        find_nodes(NodeFlags(), slurm(1, MASTER_PORT="80"), machine("10.0.0.2"))


def test_several_slurm_tasks_on_a_node_are_refused_with_both_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"8 tasks on 2 nodes.*srun --ntasks-per-node=1 fleetrun x.py.*srun python x.py"):
        find_nodes(NodeFlags(), slurm(tasks=8), unasked())
    assert find_nodes(NodeFlags(source="local"), slurm(tasks=8), unasked()) == Nodes()


@pytest.mark.parametrize(
    ("shell", "missing"),
    [
        ({"ENVIRONMENT": "BATCH"}, "SLURM_STEP_ID"),
        ({"SLURM_JOB_NAME": "interactive"}, "SLURM_STEP_ID"),
        ({"SLURM_STEP_ID": "4294967290"}, None),
        ({}, "SLURM_PROCID"),
    ],
)
def test_a_slurm_shell_without_srun_is_local(shell: dict[str, str], missing: str | None) -> None:
    env = {name: value for name, value in {**slurm(tasks=8), **shell}.items() if name != missing}
    assert find_nodes(NodeFlags(), env, unasked()) == Nodes()


def test_slurm_variables_that_are_no_numbers_or_missing_are_named() -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_NODES is 'x'; .* --env local"):
        find_nodes(NodeFlags(), slurm(SLURM_STEP_NUM_NODES="x"), unasked())
    env = slurm()
    del env["SLURM_NODEID"]
    with pytest.raises(ConfigError, match="SLURM_NODEID is ''"):
        find_nodes(NodeFlags(), env, unasked())


def test_one_mpi_process_on_each_node_is_a_node() -> None:
    env = openmpi(1, MASTER_ADDR="node0", PMIX_NAMESPACE="job9")
    assert find_nodes(NodeFlags(), env, machine("10.0.0.2")) == Nodes(2, 1, "10.0.0.2", "10.0.0.1", job_port("job9"))
    assert find_nodes(NodeFlags(source="slurm"), {**env, **slurm(0)}, machine("10.0.0.1")).rank == 0
    with pytest.raises(ConfigError, match="write --master HOST"):
        find_nodes(NodeFlags(), openmpi(), machine("10.0.0.1"))
    with pytest.raises(ConfigError, match=r"4 processes on this node.*mpirun --npernode 1 fleetrun"):
        find_nodes(NodeFlags(), openmpi(size=4, local_size=4), unasked())
    assert find_nodes(NodeFlags(), openmpi(size=1), unasked()) == Nodes()


def test_one_process_of_mvapich_on_each_node_is_a_node() -> None:
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    env = {f"MV2_COMM_WORLD_{name}": value for name, value in names.items()} | {"MASTER_ADDR": "node0", "PBS_JOBID": "9"}
    assert find_nodes(NodeFlags(), env, machine("10.0.0.2")) == Nodes(2, 1, "10.0.0.2", "10.0.0.1", job_port("9"))
    with pytest.raises(ConfigError, match="2 processes on this node"):
        find_nodes(NodeFlags(), env | {"MV2_COMM_WORLD_LOCAL_SIZE": "2"}, unasked())


def test_one_process_of_mpich_on_each_node_is_a_node() -> None:
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "PBS_JOBID": "9"}
    found = find_nodes(NodeFlags(), {**env, "MASTER_ADDR": "node0"}, machine("10.0.0.2"))
    assert found == Nodes(2, 1, "10.0.0.2", "10.0.0.1", job_port("9"))
    with pytest.raises(ConfigError, match="write --master HOST"):
        find_nodes(NodeFlags(), env, machine("10.0.0.2"))
    with pytest.raises(ConfigError, match=r"2 processes on this node.*-ppn 1"):
        find_nodes(NodeFlags(), {**env, "MPI_LOCALNRANKS": "2"}, unasked())
    assert find_nodes(NodeFlags(), {**slurm(1), "PMI_RANK": "1", "PMI_SIZE": "2"}, machine("10.0.0.2")).master == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0", ("node0", None)),
        ("node0.site.org:6070", ("node0.site.org", 6070)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fe80::1]:6070", ("fe80::1", 6070)),
        ("[fe80::1]", ("fe80::1", None)),
        ("fe80::1", ("fe80::1", None)),
    ],
)
def test_a_master_is_a_host_and_perhaps_a_port(text: str, expected: tuple[str, int | None]) -> None:
    assert split_master(text) == expected


@pytest.mark.parametrize(
    "text", ["", ":6070", "etcd://10.0.0.1:2379", "a b", "node0:", "node0:65536", "node0:1023", "node0:x", "n:6:7"]
)
def test_other_masters_are_refused_with_the_text_given(text: str) -> None:
    with pytest.raises(ConfigError, match="--master"):
        split_master(text)


def test_this_machine_knows_its_loopback() -> None:
    real = this_machine()
    assert "127.0.0.1" in real.own_addresses()
    assert real.resolve("localhost") in ("127.0.0.1", "::1")
    assert real.resolve("127.0.0.1") == real.route_to("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match="."):
        real.resolve("no-such-host.invalid")
