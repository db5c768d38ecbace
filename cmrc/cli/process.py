"""How the process reacts to its surroundings: Ctrl-C, a closed pipe, a stream that cannot show every character.

Ctrl-C      one line and exit code 130 within a second, even while the main thread is busy in a library
full disk   one line and exit code 2, if the output goes to a file
pipe        `cmrc inspect MODEL | head -1` ends quietly, as Unix tools do
encoding    a character that a stream cannot show is spelled in ASCII
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
AGAIN = 0.02  # seconds after which Ctrl-C is tried again, if it came during an import
GRACE = 0.7  # seconds that the main thread has after Ctrl-C to clean up and leave by itself

# Characters without a decomposition into ASCII (é has one, and loses its accent).
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
    """Ctrl-C. Not a KeyboardInterrupt, which typer would turn into another exit code, silently."""


def spell_in_ascii(text: str) -> str:
    """The same text for a stream that can show only ASCII."""
    plain = "".join(SPELLINGS.get(character, character) for character in text)
    return unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode() or "?" * len(text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Replace what a stream cannot show, up to the end of the line.

    A spelling is longer than the character, so spaces behind it are dropped where there are some: columns stay aligned.
    """
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
    """Let the standard streams spell characters that their encoding lacks, instead of failing."""
    codecs.register_error("cmrc.ascii", _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="cmrc.ascii")


@contextmanager
def stoppable() -> Iterator[None]:
    """In this context, Ctrl-C and a closed pipe end the process as described above."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    heard, rung = os.pipe()
    os.set_blocking(rung, False)
    signal.set_wakeup_fd(rung, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    # A thread, because the main one cannot react while it is inside a library: Python handles a signal only when it returns.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # later signals are ignored: clean-up must not be interrupted
    _interrupted.set()
    if _is_importing(frame) and hasattr(signal, "setitimer"):
        # An extension module that is stopped during its import prints a traceback. So the import is waited for.
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
    """End now if Ctrl-C was pressed. A library may turn it into another error, such as a failed import."""
    if _interrupted.is_set():
        _leave()


def _insist(heard: int) -> None:
    while True:
        if signal.SIGINT in os.read(heard, 64):
            threading.Event().wait(GRACE)
            _leave()


def _leave() -> None:
    """End now, without waiting for other threads."""
    if _leaving.acquire(blocking=False):  # both threads may arrive here at the same moment
        with suppress(OSError):
            os.write(2, b"\r\x1b[K\x1b[?25hinterrupted\n" if os.isatty(2) else b"interrupted\n")  # a bar hid the cursor
    os._exit(INTERRUPTED)
