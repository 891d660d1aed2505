import signal

from hvdkit.system import signals


def test_a_handler_that_python_cannot_install_again_becomes_the_default(monkeypatch):
    """Simulated: `signal.signal` returns None for a handler that was installed from C."""
    install = signal.signal
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    with monkeypatch.context() as patch:

        def from_c(number, handler):
            previous = install(number, handler)
            return None if number == signal.SIGUSR1 else previous

        patch.setattr(signal, "signal", from_c)
        try:
            with signals.handle_stop_signals(lambda number, frame: None):
                assert signal.getsignal(signal.SIGUSR1) is not before[signal.SIGUSR1]
            found = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
        finally:
            install(signal.SIGUSR1, before[signal.SIGUSR1])
    assert found == before | {signal.SIGUSR1: signal.SIG_DFL}
