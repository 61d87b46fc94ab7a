"""The signals that end a command."""

import signal


def stop_signals() -> list[signal.Signals]:
    """Returns what a user, a supervisor or a closed terminal sends, the last unless it is ignored, as under nohup."""
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if ends_with_terminal else [])]
