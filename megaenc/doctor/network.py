"""Checks of network cards, and of the interfaces that gloo and NCCL choose."""

import re
import socket
from pathlib import Path

import psutil

from megaenc.dist_env import is_multi_node
from megaenc.doctor.result import (
    CheckContext,
    Finding,
    has_accelerators,
    multi_node_problem,
    note,
    ok,
    problem,
    read_kernel_file,
)

_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_EXCLUDED = ("lo", "docker")
_PLUGINS = ("librccl-net.so", "libnccl-net.so")
"""Network plugins of RCCL and NCCL for networks without built-in support."""


def check_network_cards(context: CheckContext) -> list[Finding]:
    """Check Slingshot, InfiniBand and RoCE cards: state, plugin and device files.

    Ports that are down are notes. What keeps NCCL or RCCL off a card (missing plugin or device
    files, wrong NCCL_IB_GID_INDEX) is a problem in a job on several nodes, else a note. If there is
    no card, there is one finding, a note in a job on several nodes if this one has accelerators.
    """
    classes = context.root / "sys/class"
    # HPE's, unsupported by RCCL and NCCL without a plugin
    slingshot = sorted(card.name for card in (classes / "cxi").glob("*"))
    ports = sorted((classes / "infiniband").glob("*/ports/*"))
    findings = [ok("Slingshot", ", ".join(slingshot), mismatch_level="note")] if slingshot else []
    findings += [_check_plugin(context)] if slingshot and has_accelerators(context) else []
    findings += [_check_port(port, context) for port in ports]
    if ports and not (context.root / "dev/infiniband").exists():
        advice = (
            "between nodes NCCL falls back to TCP: docker run --device /dev/infiniband, or a bind "
            "of it"
        )
        findings.append(
            multi_node_problem("/dev/infiniband", "missing, though there are cards", advice)
        )
    if not findings and is_multi_node() and has_accelerators(context):
        advice = (
            "nodes communicate over TCP; in a container: --device /dev/infiniband --network host"
        )
        return [note("InfiniBand, RoCE", "no card", advice)]
    return findings or [ok("InfiniBand, RoCE", "no card; needed between nodes only")]


def _check_plugin(context: CheckContext) -> Finding:
    """Return a finding about the plugin that RCCL and NCCL need for Slingshot."""
    label = "plugin for Slingshot"
    without = "without it RCCL and NCCL use TCP between nodes"
    name = context.environment.get("NCCL_NET_PLUGIN", "")
    if name.lower() == "none":
        return multi_node_problem(label, "NCCL_NET_PLUGIN=none", f"{without}: unset it")
    directories = filter(None, context.environment.get("LD_LIBRARY_PATH", "").split(":"))
    plugins = [f"NCCL_NET_PLUGIN={name}"] if name else []
    plugins += [
        str(path)
        for directory in directories
        for plugin in _PLUGINS
        if (path := Path(directory, plugin)).exists()
    ]
    plugins += [
        plugin
        for plugin in _PLUGINS
        if f"/{plugin}\0" in read_kernel_file(context.root / "etc/ld.so.cache")
    ]
    if plugins:
        return ok(label, plugins[0])
    advice = (
        f"{without}: load the cluster's module for aws-ofi-rccl or aws-ofi-nccl, or add its "
        "directory to LD_LIBRARY_PATH"
    )
    return multi_node_problem(label, f"neither {' nor '.join(_PLUGINS)} in LD_LIBRARY_PATH", advice)


def _check_port(port: Path, context: CheckContext) -> Finding:
    """Check the state of an InfiniBand or RoCE port and its NCCL_IB_GID_INDEX address."""
    name = f"{port.parents[1].name} port {port.name}"
    state = read_kernel_file(port / "state")
    rate = read_kernel_file(port / "rate")
    layer = read_kernel_file(port / "link_layer")
    kind = "RoCE" if layer == "Ethernet" else layer or "unknown link"
    text = f"{kind}, {rate}, {state.partition(':')[2].strip() or state}"
    if "ACTIVE" not in state:
        advice = "not used by NCCL; if NCCL hangs on it, select the active cards with NCCL_IB_HCA"
        return note(name, text, advice, mismatch_level="note")
    index = context.environment.get("NCCL_IB_GID_INDEX", "")
    if not index.isdigit():
        return ok(name, text, mismatch_level="note")
    version = read_kernel_file(port / "gid_attrs/types" / index)
    if read_kernel_file(port / "gids" / index) in ("", _NO_GID):
        advice = (
            f"NCCL_IB_GID_INDEX={index} is no address of this card: unset it (NCCL_IB_GID_INDEX= "
            "for rocm_env.sh)"
        )
        return multi_node_problem(name, f"{text}, address {index}: none", advice)
    text += f", address {index}: {version or 'InfiniBand'}"
    if kind == "RoCE" and "v2" not in version:
        version = version or "no RoCE v2"
        advice = (
            f"NCCL_IB_GID_INDEX={index} is {version}, which is not routable: choose one of RoCE v2 "
            "(show_gids)"
        )
        return note(name, text, advice)
    return ok(name, text, mismatch_level="note")


def check_interfaces(context: CheckContext) -> list[Finding]:
    """Check the interfaces that are up, and those that NCCL and gloo choose.

    Returns:
        An ok finding for each interface with an IPv4 address, then those of `check_nccl_interface`
        and `check_gloo_interface`.
    """
    addresses_by_name = psutil.net_if_addrs()
    findings = []
    usable = []
    interface_by_address: dict[str, str] = {}
    for name, stats in psutil.net_if_stats().items():
        addresses = [
            address.address
            for address in addresses_by_name.get(name, ())
            if address.family == socket.AF_INET
        ]
        if stats.isup and addresses:
            speed = f", {stats.speed / 1000:g} Gbit/s" if stats.speed else ""
            findings.append(
                ok(f"interface {name}", f"{', '.join(addresses)}{speed}, MTU {stats.mtu}")
            )
            usable.append(name)
            interface_by_address |= dict.fromkeys(addresses, name)
    try:
        _, _, host_addresses = socket.gethostbyname_ex(socket.gethostname())
    except OSError:
        host_addresses = []
    findings.append(check_nccl_interface(context.environment.get("NCCL_SOCKET_IFNAME"), usable))
    findings.append(
        check_gloo_interface(
            context.environment.get("GLOO_SOCKET_IFNAME"),
            usable,
            host_addresses,
            interface_by_address,
        )
    )
    return findings


def check_nccl_interface(ifname: str | None, usable: list[str]) -> Finding:
    """Return a finding on the interfaces that NCCL chooses among `usable`.

    It is a problem if `ifname` matches none, and a note if NCCL itself may choose among several in
    a job on several nodes.

    Args:
        ifname: Value of NCCL_SOCKET_IFNAME; None or "": NCCL chooses from those that begin with
            ib, else from all but lo and docker.
        usable: Names of interfaces that are up and have an address.
    """
    label = "NCCL meets over"
    if ifname:
        chosen = ", ".join(name for name in usable if matches_ifname(ifname, name))
        advice = (
            f"NCCL_SOCKET_IFNAME={ifname} matches no interface that is up: unset it or choose from "
            f"{', '.join(usable)}"
        )
        return (
            ok(label, f"{chosen}, by NCCL_SOCKET_IFNAME")
            if chosen
            else problem(label, "nothing", advice)
        )
    first = [name for name in usable if name.startswith("ib")]
    chosen = first or [name for name in usable if not name.startswith(_EXCLUDED)] or usable
    several = is_multi_node() and len(chosen) > 1
    advice = (
        f"set NCCL_SOCKET_IFNAME={chosen[0]} if that is the interface between nodes"
        if several
        else ""
    )
    return note(label, ", ".join(chosen) or "no interface", advice)


def matches_ifname(ifname: str, name: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME=`ifname` selects interface `name`.

    `ifname` is a comma-separated list of prefixes; `=` before the list makes them full names, and
    `^` or `^=` before it excludes them instead. An empty one selects none.
    """
    kind, names = re.match(r"(\^=|\^|=|)(.*)", ifname).groups()
    patterns = [word.strip() for word in names.split(",") if word.strip()]
    is_match = any(name == word if "=" in kind else name.startswith(word) for word in patterns)
    return is_match != kind.startswith("^")


def check_gloo_interface(
    ifname: str | None,
    usable: list[str],
    host_addresses: list[str],
    interface_by_address: dict[str, str],
) -> Finding:
    """Return a finding on the interface that gloo chooses.

    It is a problem if an interface of `ifname` is not up, or if one is lo in a job on several nodes
    (`is_multi_node`). A host name that leads to no address of this machine counts as lo.

    Args:
        ifname: Value of GLOO_SOCKET_IFNAME, names separated by commas; None or "": gloo takes the
            interface of the host name.
        usable: Names of interfaces that are up and have an address.
        host_addresses: IPv4 addresses of the host name; the first one that is not of lo counts.
        interface_by_address: Interface name of each address of this machine.
    """
    label = "gloo meets over"
    if ifname:
        names = ifname.split(",")
        missing = [name for name in names if name not in usable]
        if missing:
            advice = f"GLOO_SOCKET_IFNAME={ifname}: name one of {', '.join(usable)}"
            return problem(label, f"{', '.join(missing)}, which is not up", advice)
        text = f"{ifname}, by GLOO_SOCKET_IFNAME"
        if "lo" not in names:
            return ok(label, text)
    else:
        for address in host_addresses:
            interface = interface_by_address.get(address, "lo")
            if interface != "lo":
                return ok(
                    label,
                    f"{interface}, the interface of {address}, to which the host name resolves",
                )
        text = f"lo: the host name resolves to {', '.join(host_addresses) or 'no address'}"
    if not is_multi_node():
        return ok(label, f"{text}; enough on one node")
    interface = next((name for name in usable if not name.startswith(_EXCLUDED)), "INTERFACE")
    return problem(
        label, text, f"other nodes cannot reach it: export GLOO_SOCKET_IFNAME={interface} on all"
    )
