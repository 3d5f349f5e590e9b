"""InfiniBand and Slingshot cards as the kernel shows them, and the interfaces that gloo and NCCL take."""

import pytest

from megaenc.doctor import network
from megaenc.doctor.network import check_gloo_interface, check_nccl_interface, check_network_cards, matches_ifname
from megaenc.doctor.result import ProbeContext

GID = "fe80:0000:0000:0000:0e42:a1ff:fe5c:1234"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


@pytest.fixture
def two_nodes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


@pytest.fixture
def card(tmp_path):
    """Make a card as /sys shows it, with its device for programs."""

    def make(layer="InfiniBand", state="4: ACTIVE", gids=(GID,), types=(), device=True, name="mlx5_0"):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        for folder in ("gids", "gid_attrs/types"):
            (port / folder).mkdir(parents=True)
        for file, text in (("link_layer", layer), ("state", state), ("rate", "400 Gb/sec (4X NDR)")):
            (port / file).write_text(f"{text}\n")
        for number, text in enumerate(gids):
            (port / "gids" / str(number)).write_text(f"{text}\n")
        for number, text in enumerate(types):
            (port / "gid_attrs/types" / str(number)).write_text(f"{text}\n")
        if device:
            (tmp_path / "dev/infiniband").mkdir(parents=True, exist_ok=True)
        return tmp_path

    return make


def asked(root, **environment) -> ProbeContext:
    return ProbeContext(root=root, environment=environment)


def test_a_card_is_shown_with_its_link(card):
    [finding] = check_network_cards(asked(card()))
    assert (finding.level, finding.name, finding.result) == ("ok", "mlx5_0 port 1", "InfiniBand, 400 Gb/sec (4X NDR), ACTIVE")


def test_no_card_matters_between_nodes_with_accelerators(tmp_path, two_nodes):
    assert check_network_cards(asked(tmp_path))[0].level == "ok"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    [finding] = check_network_cards(asked(tmp_path))
    assert finding.level == "note" and "--device /dev/infiniband" in finding.advice


def test_a_card_that_the_container_was_not_given_is_a_problem_between_nodes(card, request):
    root = card(device=False)
    finding = check_network_cards(asked(root))[-1]
    assert (finding.level, finding.name) == ("note", "/dev/infiniband")
    request.getfixturevalue("two_nodes")
    finding = check_network_cards(asked(root))[-1]
    assert (finding.level, finding.name) == ("problem", "/dev/infiniband")


def test_a_port_that_is_down_is_a_note(card):
    [finding] = check_network_cards(asked(card(state="1: DOWN")))
    assert finding.level == "note" and finding.result.endswith("DOWN")


def test_an_address_that_the_card_has_not_is_a_problem_between_nodes(card, request):
    """What rocm_env.sh sets is right for RoCE and wrong for native InfiniBand."""
    root = card(gids=(GID, NONE, NONE, NONE))
    assert check_network_cards(asked(root))[0].level == "ok"
    assert check_network_cards(asked(root, NCCL_IB_GID_INDEX="3"))[0].level == "note"
    request.getfixturevalue("two_nodes")
    for index in ("3", "9"):
        [finding] = check_network_cards(asked(root, NCCL_IB_GID_INDEX=index))
        assert finding.level == "problem" and f"NCCL_IB_GID_INDEX={index} is no address" in finding.advice


def test_an_address_of_the_first_roce_is_a_note(card):
    root = card(layer="Ethernet", gids=(GID, GID, GID, GID), types=("IB/RoCE v1", "RoCE v2", "IB/RoCE v1", "RoCE v2"))
    assert check_network_cards(asked(root, NCCL_IB_GID_INDEX="2"))[0].level == "note"
    [finding] = check_network_cards(asked(root, NCCL_IB_GID_INDEX="3"))
    assert finding.level == "ok" and finding.result.endswith("address 3: RoCE v2")


@pytest.fixture
def slingshot(tmp_path):
    """A node of Slingshot and AMD accelerators, as /sys and /dev show it: nothing of InfiniBand."""
    for path in ("sys/class/cxi/cxi0", "sys/class/cxi/cxi1", "dev", "etc", "plugins"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "dev/kfd").touch()
    return tmp_path


def test_slingshot_without_its_plugin_goes_over_tcp(slingshot, request):
    card, plugin = check_network_cards(asked(slingshot))
    assert (card.level, card.name, card.result) == ("ok", "Slingshot", "cxi0, cxi1")
    assert (plugin.level, plugin.name) == ("note", "plugin for Slingshot"), "one node does without"
    request.getfixturevalue("two_nodes")
    _, plugin = check_network_cards(asked(slingshot, LD_LIBRARY_PATH=f"/nowhere:{slingshot}/plugins:"))
    assert plugin.level == "problem" and "use TCP between nodes" in plugin.advice and "aws-ofi-rccl" in plugin.advice
    _, plugin = check_network_cards(asked(slingshot, NCCL_NET_PLUGIN="none"))
    assert plugin.level == "problem" and plugin.advice.endswith("unset it")
    (slingshot / "dev/kfd").unlink()
    assert [each.name for each in check_network_cards(asked(slingshot))] == ["Slingshot"], "processors speak over TCP as it is"


@pytest.mark.parametrize("name", ["librccl-net.so", "libnccl-net.so"])
def test_slingshot_s_plugin_is_found_where_it_would_be_loaded_from(name, slingshot, two_nodes):
    assert check_network_cards(asked(slingshot, NCCL_NET_PLUGIN="ofi"))[1].result == "NCCL_NET_PLUGIN=ofi"
    (slingshot / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\xff\0/opt/lib/" + name.encode() + b"\0/lib/libc.so.6\0")
    assert check_network_cards(asked(slingshot))[1].result == name
    (slingshot / "plugins" / name).touch()
    plugin = check_network_cards(asked(slingshot, LD_LIBRARY_PATH=f"/nowhere:{slingshot}/plugins"))[1]
    assert (plugin.level, plugin.result) == ("ok", f"{slingshot}/plugins/{name}")


def test_slingshot_beside_infiniband(slingshot, card):
    card()
    assert [each.name for each in check_network_cards(asked(slingshot, NCCL_NET_PLUGIN="ofi"))] == [
        "Slingshot",
        "plugin for Slingshot",
        "mlx5_0 port 1",
    ]


@pytest.mark.parametrize(
    ("pattern", "is_selected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("^eth", ["ib0"]),
        ("ib,eth1", ["ib0", "eth1"]),
        ("^=eth0,ib0", ["eth1"]),
        ("en", []),
    ],
)
def test_names_that_nccl_takes(pattern, is_selected):
    assert sorted(name for name in ("ib0", "eth0", "eth1") if matches_ifname(pattern, name)) == sorted(is_selected)


def test_an_interface_that_is_not_there_is_a_problem():
    finding = check_nccl_interface("hsn", ["lo", "eth0"])
    assert finding.level == "problem" and "NCCL_SOCKET_IFNAME=hsn" in finding.advice and "eth0" in finding.advice
    assert check_nccl_interface("eth", ["lo", "eth0"]).level == "ok"
    finding = check_gloo_interface("hsn0", ["lo", "eth0"], [], {})
    assert finding.level == "problem" and "hsn0" in finding.result


def test_nccl_passes_over_docker_and_prefers_infiniband(two_nodes):
    assert check_nccl_interface(None, ["lo", "docker0", "eth0"]).result == "eth0"
    assert check_nccl_interface(None, ["lo", "eth0", "ib0"]).result == "ib0"
    finding = check_nccl_interface(None, ["lo", "eth0", "eth1"])
    assert finding.level == "note" and "NCCL_SOCKET_IFNAME=eth0" in finding.advice


@pytest.mark.parametrize("own", [["127.0.1.1"], ["127.0.0.1"], []])
def test_a_name_that_leads_nowhere_is_a_problem_between_nodes_alone(own, monkeypatch):
    owners = {"127.0.0.1": "lo", "10.0.0.5": "eth0"}
    assert check_gloo_interface(None, ["lo", "eth0"], own, owners).level == "ok"
    monkeypatch.setattr(network, "is_multi_node", lambda: True)
    finding = check_gloo_interface(None, ["lo", "eth0"], own, owners)
    assert finding.level == "problem" and "GLOO_SOCKET_IFNAME=eth0" in finding.advice
    assert check_gloo_interface(None, ["lo", "eth0"], ["10.0.0.5"], owners).result.startswith("eth0,")
