"""How the process behaves towards whoever started it: Ctrl-C, a closed pipe, a stream that cannot show every character.

Ctrl-C      one line, exit code 130, within a second: also while the main thread is busy in a library
full disk   one line and exit code 2, where the output goes to a file
pipe        `cmrc inspect MODEL | head -1` ends quietly, as Unix tools do
encoding    a character that a stream lacks is spelled in ASCII
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130  # the exit code of a command that was stopped by Ctrl-C: 128 + SIGINT
INVALID = 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
AGAIN = 0.02  # seconds after which Ctrl-C is tried again, where it came during an import
GRACE = 0.7  # seconds in which the main thread may leave by itself after Ctrl-C, and clean up

# What has no decomposition into ASCII (é has one, and loses its accent).
SPELLINGS = {
    "…": "...", "–": "-", "—": "-", "−": "-", "→": "->", "←": "<-", "×": "x", "·": ".", "±": "+-", "≤": "<=", "≥": ">=",
    "≠": "!=", "≈": "~", "‖": "||", "√": "sqrt", "Σ": "sum", "Δ": "Delta", "∞": "inf", "α": "alpha", "β": "beta",
    "γ": "gamma", "δ": "delta", "ε": "eps", "λ": "lambda", "μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "“": '"', "”": '"', "‘": "'", "’": "'", "═": "=", "─": "-", "━": "-", "│": "|", "•": "*", "✓": "ok", "✗": "x",
    "²": "^2", "³": "^3", "½": "1/2", "ᵀ": "^T", "∂": "d", "∈": "in", "θ": "theta", "κ": "kappa", "Φ": "Phi", "φ": "phi",
}  # fmt: skip


_leaving = threading.Lock()
_interrupted = threading.Event()


class Interrupted(BaseException):
    """Ctrl-C. Not a KeyboardInterrupt, which typer would turn into an exit code of its own, without a word."""


def spell_in_ascii(text: str) -> str:
    """The same text for a stream that has nothing but ASCII."""
    plain = "".join(SPELLINGS.get(character, character) for character in text)
    return unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode() or "?" * len(text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    """What a stream lacks, up to the end of its line: a spelling is longer, and what follows keeps its column where there is room."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text, begin = error.object, error.start
    end = text.find("\n", begin)
    end = len(text) if end < 0 else end
    spelled, debt = "", 0
    for part in re.split("( {2,})", text[begin:end]):
        if part.startswith("  "):
            taken = min(debt, len(part) - 1)
            spelled, debt = spelled + part[taken:], debt - taken
        else:
            plain = "".join(c if _has(error.encoding, c) else spell_in_ascii(c) for c in part)
            spelled, debt = spelled + plain, debt + len(plain) - len(part)
    return spelled, end


def _has(encoding: str, character: str) -> bool:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def accept_every_character() -> None:
    """Let the standard streams spell what their encoding lacks, instead of failing on it."""
    codecs.register_error("cmrc.ascii", _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="cmrc.ascii")


@contextmanager
def stoppable() -> Iterator[None]:
    """Within: Ctrl-C ends the process as described above, and so does a closed pipe."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    heard, rung = os.pipe()
    os.set_blocking(rung, False)
    signal.set_wakeup_fd(rung, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    # A thread, because the main one does not answer while it is inside a library: a signal waits until it is back.
    threading.Thread(target=_insist, args=(heard,), daemon=True).start()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where a failure can still be reported
    except (Interrupted, KeyboardInterrupt):
        _leave()
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        with suppress(OSError):
            os.write(2, f"file: cannot write to standard output: {error.strerror}\n".encode())
        os._exit(INVALID)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough: clean-up must not be interrupted
    _interrupted.set()
    if _is_importing(frame) and hasattr(signal, "setitimer"):
        # An extension that is stopped while it imports prints a traceback of its own. Its import is waited for.
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        return
    raise Interrupted


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def leave_if_interrupted() -> None:
    """End now if Ctrl-C was pressed. A library may turn it into an error of its own: an import that breaks off, say."""
    if _interrupted.is_set():
        _leave()


def _insist(heard: int) -> None:
    while True:
        if signal.SIGINT in os.read(heard, 64):
            threading.Event().wait(GRACE)
            _leave()


def _leave() -> None:
    """End now, without waiting for what other threads do."""
    if _leaving.acquire(blocking=False):  # the main thread and the other may come here at the same moment
        with suppress(OSError):
            os.write(2, b"\r\x1b[K\x1b[?25hinterrupted\n" if os.isatty(2) else b"interrupted\n")  # a bar hid the cursor
    os._exit(INTERRUPTED)
