"""Ctrl-C during a fit: the current step is finished first, so that there is a posterior to return."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType


class InterruptWatch:
    """Within its context, the first Ctrl-C only sets `pressed`, and the second raises KeyboardInterrupt.

    It does nothing outside the main thread, which alone receives signals, and where the program has its own handler.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._installed = False

    def __enter__(self) -> InterruptWatch:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
