"""InfiniBand and Slingshot cards in /sys, and interfaces for gloo and NCCL."""

import socket
from types import SimpleNamespace

import pytest

from megaenc.doctor import network
from megaenc.doctor.network import (
    check_gloo_interface,
    check_nccl_interface,
    check_network_cards,
    matches_ifname,
)
from megaenc.doctor.result import CheckContext

GID = "fe80:0000:0000:0000:0e42:a1ff:fe5c:1234"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
INFINIBAND = {"gids": (GID, NONE)}
ROCE = {
    "link_layer": ("Ethernet",),
    "gids": (GID, GID, GID, GID),
    "gid_attrs/types": ("IB/RoCE v1", "RoCE v2", "IB/RoCE v1", "RoCE v2"),
}


@pytest.fixture
def nodes(monkeypatch):
    """Return a function that simulates a job of several nodes with eight ranks each."""

    def several(count: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(8 * count))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")

    return several


def add_card(root, device=True, **changed):
    """Write a card as /sys shows it, with its device file.

    Names with gid are directories of numbered files; the others are files with one line.
    """
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    shown = {
        "link_layer": ("InfiniBand",),
        "state": ("4: ACTIVE",),
        "rate": ("400 Gb/sec (4X NDR)",),
        "gids": (GID,),
    } | changed
    for name, lines in shown.items():
        is_directory = name.startswith("gid")
        for number, line in enumerate(lines):
            file = port / name / str(number) if is_directory else port / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{line}\n")
    if device:
        (root / "dev/infiniband").mkdir(parents=True)


def asked(root, **environment) -> list:
    return check_network_cards(CheckContext(root=root, environment=environment))


@pytest.mark.parametrize(
    ("card", "index", "count", "level", "words"),
    [
        ({}, "", 1, "ok", "InfiniBand, 400 Gb/sec (4X NDR), ACTIVE"),
        ({"state": ("1: DOWN",)}, "", 1, "note", "DOWN"),
        (
            INFINIBAND,
            "1",
            1,
            "note",
            "address 1: none",
        ),  # what rocm_env.sh sets is right for RoCE alone
        (INFINIBAND, "1", 2, "problem", "NCCL_IB_GID_INDEX=1 is no address"),
        (INFINIBAND, "9", 2, "problem", "NCCL_IB_GID_INDEX=9 is no address"),
        (ROCE, "2", 2, "note", "not routable"),
        (ROCE, "3", 2, "ok", "address 3: RoCE v2"),
    ],
)
def test_a_card_is_shown_with_its_link_and_address(
    tmp_path, nodes, card, index, count, level, words
):
    nodes(count)
    add_card(tmp_path, **card)
    [finding] = asked(tmp_path, NCCL_IB_GID_INDEX=index)
    assert (finding.level, finding.name) == (level, "mlx5_0 port 1")
    assert words in finding.result + finding.advice


def test_no_card_matters_between_nodes_with_accelerators(tmp_path, nodes):
    nodes(2)
    assert asked(tmp_path)[0].level == "ok"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    [finding] = asked(tmp_path)
    assert finding.level == "note"
    assert "--device /dev/infiniband" in finding.advice


@pytest.mark.parametrize(("count", "level"), [(1, "note"), (2, "problem")])
def test_a_card_that_the_container_was_not_given_is_a_problem_between_nodes(
    tmp_path, nodes, count, level
):
    nodes(count)
    add_card(tmp_path, device=False)
    finding = asked(tmp_path)[-1]
    assert (finding.level, finding.name) == (level, "/dev/infiniband")


@pytest.fixture
def slingshot(tmp_path):
    for path in ("sys/class/cxi/cxi0", "sys/class/cxi/cxi1", "dev", "etc", "plugins"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "dev/kfd").touch()
    return tmp_path


def test_slingshot_without_its_plugin_goes_over_tcp(slingshot, nodes):
    nodes(1)
    card, plugin = asked(slingshot)
    assert (card.level, card.name, card.result) == ("ok", "Slingshot", "cxi0, cxi1")
    assert (plugin.level, plugin.name) == ("note", "plugin for Slingshot"), "one node does without"
    nodes(2)
    _, plugin = asked(slingshot, LD_LIBRARY_PATH=f"/nowhere:{slingshot}/plugins:")
    assert plugin.level == "problem"
    assert "aws-ofi-rccl" in plugin.advice
    _, plugin = asked(slingshot, NCCL_NET_PLUGIN="none")
    assert plugin.level == "problem"
    assert plugin.advice.endswith("unset it")
    (slingshot / "dev/kfd").unlink()
    assert [each.name for each in asked(slingshot)] == ["Slingshot"], (
        "processors speak over TCP as it is"
    )


@pytest.mark.parametrize("name", ["librccl-net.so", "libnccl-net.so"])
def test_slingshot_s_plugin_is_found_where_it_would_be_loaded_from(name, slingshot, nodes):
    nodes(2)
    (slingshot / "etc/ld.so.cache").write_bytes(
        b"glibc-ld.so.cache1.1\xff\0/opt/lib/" + name.encode() + b"\0/lib/libc.so.6\0"
    )
    (slingshot / "plugins" / name).touch()
    path = f"/nowhere:{slingshot}/plugins"
    for environment, found in (
        ({}, name),
        ({"LD_LIBRARY_PATH": path}, f"{slingshot}/plugins/{name}"),
        ({"LD_LIBRARY_PATH": path, "NCCL_NET_PLUGIN": "ofi"}, "NCCL_NET_PLUGIN=ofi"),
    ):
        plugin = asked(slingshot, **environment)[1]
        assert (plugin.level, plugin.result) == ("ok", found)


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("eth", "eth0 eth1"),
        ("=eth0", "eth0"),
        ("^eth", "ib0"),
        ("ib,eth1", "ib0 eth1"),
        ("^=eth0,ib0", "eth1"),
        ("en", ""),
    ],
)
def test_names_that_nccl_takes(pattern, selected):
    assert [
        name for name in ("ib0", "eth0", "eth1") if matches_ifname(pattern, name)
    ] == selected.split()


@pytest.mark.parametrize(
    ("ifname", "usable", "level", "words"),
    [
        (
            "hsn",
            ["lo", "eth0"],
            "problem",
            "NCCL_SOCKET_IFNAME=hsn matches no interface that is up",
        ),
        ("eth", ["lo", "eth0"], "ok", "eth0"),
        (None, ["lo", "docker0", "eth0"], "ok", "eth0"),
        (None, ["lo", "eth0", "ib0"], "ok", "ib0"),
        (None, ["lo", "eth0", "eth1"], "note", "NCCL_SOCKET_IFNAME=eth0"),
    ],
)
def test_nccl_passes_over_docker_and_prefers_infiniband(ifname, usable, level, words, nodes):
    nodes(2)
    finding = check_nccl_interface(ifname, usable)
    assert finding.level == level
    assert words in (finding.advice or finding.result)
    assert "docker" not in finding.result


@pytest.mark.parametrize(
    ("ifname", "own", "on_one_node", "between_nodes"),
    [
        (None, ["127.0.1.1"], "ok", "problem"),
        (None, ["127.0.0.1"], "ok", "problem"),
        (None, [], "ok", "problem"),
        (None, ["10.0.0.5"], "ok", "ok"),
        ("eth0", [], "ok", "ok"),
        ("hsn0", [], "problem", "problem"),
        ("lo", ["10.0.0.5"], "ok", "problem"),
        ("eth0,lo", ["10.0.0.5"], "ok", "problem"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_problem_between_nodes(
    ifname, own, on_one_node, between_nodes, nodes
):
    owners = {"127.0.0.1": "lo", "10.0.0.5": "eth0"}
    for count, level in ((1, on_one_node), (2, between_nodes)):
        nodes(count)
        finding = check_gloo_interface(ifname, ["lo", "eth0"], own, owners)
        assert finding.level == level
    assert (ifname or "eth0") in finding.result + finding.advice


def test_interfaces_that_are_up_are_named_with_their_addresses(monkeypatch):
    address = SimpleNamespace(family=socket.AF_INET, address="10.0.0.5")
    addresses = {
        "lo": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")],
        "eth0": [address],
        "eth1": [address],
        "ib0": [],
    }
    up = SimpleNamespace(isup=True, speed=25_000, mtu=1500)
    down = SimpleNamespace(isup=False, speed=0, mtu=1500)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)
    monkeypatch.setattr(
        "psutil.net_if_stats", lambda: {"lo": up, "eth1": down, "eth0": up, "ib0": up}
    )
    monkeypatch.setattr("socket.gethostbyname_ex", lambda name: (name, [], ["10.0.0.5"]))
    findings = {each.name: each.result for each in network.check_interfaces(CheckContext())}
    assert findings == {
        "interface lo": "127.0.0.1, 25 Gbit/s, MTU 1500",
        "interface eth0": "10.0.0.5, 25 Gbit/s, MTU 1500",
        "NCCL meets over": "eth0",
        "gloo meets over": "eth0, the interface of 10.0.0.5, to which the host name resolves",
    }
