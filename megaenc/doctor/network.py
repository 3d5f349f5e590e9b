"""How the machine is linked to others: cards of fast networks, network interfaces, and which of them gloo and NCCL would take."""

import re
import socket
from pathlib import Path

import psutil

from megaenc.dist_env import several_nodes
from megaenc.doctor.result import Finding, ProbeContext, accelerated, note, ok, problem, problem_between_nodes, text_of

_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_PASSED_OVER = ("lo", "docker")
_PLUGINS = ("librccl-net.so", "libnccl-net.so")
"""By which RCCL, in its versions, and NCCL speak over networks that they do not know themselves."""


def cards(asked: ProbeContext) -> list[Finding]:
    """Tell which networks' cards there are to link nodes by, and whether a process may use them as it is told to."""
    classes = asked.root / "sys/class"
    slingshot = sorted(card.name for card in (classes / "cxi").glob("*"))  # HPE's, which RCCL and NCCL pass over by themselves
    ports = sorted((classes / "infiniband").glob("*/ports/*"))
    found = [ok("Slingshot", ", ".join(slingshot), alike="note")] if slingshot else []
    found += [_plugin(asked)] if slingshot and accelerated(asked) else []
    found += [_port(port, asked) for port in ports]
    if ports and not (asked.root / "dev/infiniband").exists():
        advice = "between nodes NCCL falls back to TCP: docker run --device /dev/infiniband, or a bind of it"
        found.append(problem_between_nodes("/dev/infiniband", "not there, though there are cards", advice))
    if not found and several_nodes() and accelerated(asked):
        advice = "between nodes everything goes over TCP; in a container: --device /dev/infiniband --network host"
        return [note("InfiniBand, RoCE", "no card", advice)]
    return found or [ok("InfiniBand, RoCE", "no card; needed between nodes only")]


def _plugin(asked: ProbeContext) -> Finding:
    what, without = "plugin for Slingshot", "without it RCCL and NCCL speak over TCP between nodes"
    name = asked.environment.get("NCCL_NET_PLUGIN", "")
    if name.lower() == "none":
        return problem_between_nodes(what, "NCCL_NET_PLUGIN=none", f"{without}: take it out")
    folders = filter(None, asked.environment.get("LD_LIBRARY_PATH", "").split(":"))
    there = [f"NCCL_NET_PLUGIN={name}"] if name else []
    there += [str(path) for folder in folders for plugin in _PLUGINS if (path := Path(folder, plugin)).exists()]
    there += [plugin for plugin in _PLUGINS if f"/{plugin}\0" in text_of(asked.root / "etc/ld.so.cache")]
    if there:
        return ok(what, there[0])
    advice = f"{without}: load the cluster's module of aws-ofi-rccl or aws-ofi-nccl, or name its folder in LD_LIBRARY_PATH"
    return problem_between_nodes(what, f"neither {' nor '.join(_PLUGINS)} in LD_LIBRARY_PATH", advice)


def _port(port: Path, asked: ProbeContext) -> Finding:
    name = f"{port.parents[1].name} port {port.name}"
    state, rate, layer = (text_of(port / file) for file in ("state", "rate", "link_layer"))
    kind = "RoCE" if layer == "Ethernet" else layer or "unknown link"
    text = f"{kind}, {rate}, {state.partition(':')[2].strip() or state}"
    if "ACTIVE" not in state:
        advice = "not used by NCCL; name the cards that are with NCCL_IB_HCA if it hangs on this one"
        return note(name, text, advice, alike="note")
    index = asked.environment.get("NCCL_IB_GID_INDEX", "")
    if not index.isdigit():
        return ok(name, text, alike="note")
    version = text_of(port / "gid_attrs/types" / index)
    if text_of(port / "gids" / index) in ("", _NO_GID):
        advice = f"NCCL_IB_GID_INDEX={index} names no address of this card: take it out (NCCL_IB_GID_INDEX= for rocm_env.sh)"
        return problem_between_nodes(name, f"{text}, address {index}: none", advice)
    text += f", address {index}: {version or 'InfiniBand'}"
    if kind == "RoCE" and "v2" not in version:
        version = version or "no RoCE v2"
        advice = f"NCCL_IB_GID_INDEX={index} is {version}, which routers do not carry: name one of RoCE v2 (show_gids)"
        return note(name, text, advice)
    return ok(name, text, alike="note")


def interfaces(asked: ProbeContext) -> list[Finding]:
    """Tell each interface that is up, and the ones that processes would meet over."""
    addresses = {
        name: [each.address for each in given if each.family == socket.AF_INET] for name, given in psutil.net_if_addrs().items()
    }
    up = {name: about for name, about in psutil.net_if_stats().items() if about.isup and addresses.get(name)}
    found = []
    for name, about in sorted(up.items()):
        speed = f", {about.speed / 1000:g} Gbit/s" if about.speed else ""
        found.append(ok(f"interface {name}", f"{', '.join(addresses[name])}{speed}, MTU {about.mtu}"))
    owners = {address: name for name in up for address in addresses[name]}
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
        own = list(dict.fromkeys(address[0] for *_, address in resolved))
    except OSError:
        own = []
    environment = asked.environment
    nccl = nccl_interface(environment.get("NCCL_SOCKET_IFNAME"), list(up))
    return [*found, nccl, gloo_interface(environment.get("GLOO_SOCKET_IFNAME"), list(up), own, owners)]


def nccl_interface(asked: str | None, usable: list[str]) -> Finding:
    """Tell over which of the interfaces `usable` NCCL and RCCL meet. `asked`: NCCL_SOCKET_IFNAME."""
    what = "NCCL meets over"
    if asked:
        chosen = ", ".join(name for name in usable if matches(asked, name))
        advice = f"NCCL_SOCKET_IFNAME={asked} names none that is up: take it out or name one of {', '.join(usable)}"
        return ok(what, f"{chosen}, by NCCL_SOCKET_IFNAME") if chosen else problem(what, "nothing", advice)
    first = [name for name in usable if name.startswith("ib")]
    chosen = first or [name for name in usable if not name.startswith(_PASSED_OVER)] or usable
    several = several_nodes() and len(chosen) > 1
    advice = f"NCCL_SOCKET_IFNAME={chosen[0]} if it is that one which the nodes see each other by" if several else ""
    return note(what, ", ".join(chosen) or "no interface", advice)


def matches(asked: str, name: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME=`asked` takes the interface `name`: beginnings, `=` whole names, `^` none of them."""
    kind, given = re.match(r"(\^=|\^|=|)(.*)", asked).groups()
    words = [word.strip() for word in given.split(",") if word.strip()]
    hit = any(name == word if "=" in kind else name.startswith(word) for word in words)
    return hit != kind.startswith("^")


def gloo_interface(asked: str | None, usable: list[str], own: list[str], owners: dict[str, str]) -> Finding:
    """Tell over which interface gloo meets: the one asked for, else that of the address which this machine's own name leads to.

    `asked`: GLOO_SOCKET_IFNAME; `own`: the addresses of the machine's name; `owners`: interface by address.
    """
    what = "gloo meets over"
    if asked:
        missing = [name for name in asked.split(",") if name not in usable]
        if missing:
            advice = f"GLOO_SOCKET_IFNAME={asked}: name one of {', '.join(usable)}"
            return problem(what, f"{', '.join(missing)}, which is not up", advice)
        return ok(what, f"{asked}, by GLOO_SOCKET_IFNAME")
    real = next((address for address in own if owners.get(address, "lo") != "lo"), None)
    if real:
        return ok(what, f"{owners[real]}, the interface of {real}, to which this machine's name leads")
    text = f"lo: this machine's name leads to {', '.join(own) or 'no address'}"
    if not several_nodes():
        return ok(what, f"{text}; enough on one node")
    other = next((name for name in usable if not name.startswith(_PASSED_OVER)), "INTERFACE")
    return problem(what, text, f"other nodes cannot reach that: export GLOO_SOCKET_IFNAME={other} on all")
