"""Imported by the fork server alone, before anything else: from here on it ends with the grid that started it.

The server has torch and transformers imported and no thread started; each run is a fork of it and begins in milliseconds.
"""

import os
import signal

from megaenc.console import silence_libraries
from megaenc.processes import set_up_child

PROCESS = os.getpid()

set_up_child(os.getppid())
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the grid decides. Forks keep this.
silence_libraries()
