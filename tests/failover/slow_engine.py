"""An engine that waits for two seconds, as for a slow disk, before it begins."""

from __future__ import annotations

import signal

from reference_impl.engine import process

if __name__ == "__main__":
    signal.sigtimedwait([signal.SIGUSR1], 2.0)  # neither ticks nor CPU time
    process.main()
