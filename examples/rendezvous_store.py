"""Hold the rendezvous of a run outside its nodes, for example on a login node.

    python examples/rendezvous_store.py PORT

Start torchrun on each node with `--rdzv-endpoint HOST:PORT --rdzv-conf is_host=0`. No node then
ends the run when it is lost; Ctrl-C ends the store, and every torchrun with it. The store has no
password: open the port to the nodes of the run alone.
"""

import argparse
import contextlib
import signal

from torch.distributed import DistNetworkError, TCPStore


def main() -> None:
    """Hold a store at the port until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int, help="port to listen at, on all network interfaces")
    port = parser.parse_args().port
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except DistNetworkError:
        parser.error(f"port: {port} is in use or not allowed; expected a free one")
    print(f"the store listens at port {store.port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    main()
