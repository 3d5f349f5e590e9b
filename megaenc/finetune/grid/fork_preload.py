"""First import of the fork server, which makes it end with the grid's process.

The server imports torch and transformers without starting a thread, so that each run is forked from
it in milliseconds.
"""

import os
import signal

from megaenc.console import silence_libraries
from megaenc.processes import set_up_child

PROCESS = os.getpid()

set_up_child(os.getppid())
# Ctrl-C reaches the whole process group; only the grid handles it. Forks inherit this.
signal.signal(signal.SIGINT, signal.SIG_IGN)
silence_libraries()
