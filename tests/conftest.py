"""For all tests."""

from __future__ import annotations

import signal

# A test run started in the background inherits an ignored SIGINT, and would hand it on to the processes
# that tests start: Ctrl-C could then not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
