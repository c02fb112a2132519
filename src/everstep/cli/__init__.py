"""Parse, call, render."""

import signal


def start() -> None:
    """What the `everstep` script calls. Loading a command takes some tenths of a second; Ctrl-C then ends the
    process, as it ends any other, instead of printing where the import was.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if it is ignored, as behind `nohup`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from everstep.cli.main import main

    signal.signal(signal.SIGINT, before)
    main()
