"""``python -m tests.children``: a child process that behaves as it is told."""

from __future__ import annotations

import gc
import os
import signal
import time

from minisgl.child_process import ChildOptions, Ready, beat, child_process
from minisgl.errors import ConfigError


class Behaviour(ChildOptions, frozen=True, kw_only=True):
    """What a child is to do."""

    behaviour: str


def main() -> None:
    print("a library says hello")
    with child_process(Behaviour) as (options, report):
        print("and goes on")
        match options.behaviour:
            case "fails":
                raise ConfigError("page_size: must be a power of two")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(3600)
            case "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report(Ready({"answer": 42}))
        while True:
            beat()
            time.sleep(0.1)
            match options.behaviour:
                case "hangs later":
                    time.sleep(3600)
                case "computes":
                    time.sleep(4)
                    raise ArithmeticError("the result is 42")
                case "breaks":
                    raise ZeroDivisionError("by nothing")
                case "counts":
                    raise ArithmeticError(f"{gc.get_freeze_count()} objects are frozen")


if __name__ == "__main__":
    main()
