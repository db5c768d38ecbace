"""Errors in the words of the command line: the library names keywords, and a user of `cmrc` types flags.

    allow what stays with residue="keep"        allow what stays with --residue keep
    calibrate with need=[..., "scatter"]        calibrate with --need scatter
    program.sites() lists the names             `cmrc inspect` lists the names

An error spells a keyword as `name=value`, or as `name=` if the value is up to the caller. A test compares the flags
below with the options that the commands have, and finds errors that name a keyword without a flag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cmrc.errors import CmrcError

# Keywords whose flag is the same word; then those with another name.
SAME = (
    "about", "agreement", "answer", "batch", "certify", "checkpoint", "class_axis", "controls", "counted", "data", "delta", "drop", "frontier", "growth", "held_out", "keep", "latency", "length", "loss",
    "macs", "metric", "minutes", "need", "normalise", "output", "pick",
    "plot", "positions", "preset", "protect", "provider", "rate", "reads", "recipe", "recover", "residue", "rounds", "samples", "seconds", "seed", "sessions", "side", "site", "sites",
    "size", "speedup", "steps",
    "stats", "stress", "swaps", "threads", "tokenizer", "tolerance", "train", "until", "work",
)  # fmt: skip
FLAGS = {name: f"--{name.replace('_', '-')}" for name in SAME} | {"sizes": "--size"}

# What only Python has, and what takes its place on the command line.
PHRASES = {
    "`cmrc inspect` or program.sites()": "`cmrc inspect`",
    "program.annotate(plan)": "`cmrc annotate` the model",
    "overwrite=True": "--force",
    "measured=True": "--measured",
    "timed=False": "--no-timed",
    "give batches: lowered.check((batch,))": "give inputs with --data",
    "`Plan.save`": "`cmrc plan`",
    "`Stats.save`": "`cmrc calibrate`",
    "cmrc.plan": "`cmrc plan`",
}

_NAMES = "|".join(FLAGS)
_KEYWORD = re.compile(rf"""(?<![\w'"`-])({_NAMES})=(?:\[\.\.\., )?(["']?)([^\s"'\],;()]*)\2\]?""")
_BOTH = re.compile(rf"({_NAMES})= and ({_NAMES})=(?= )")
_SIZES = re.compile(r"""sizes=\{(["'])(.+?)\1: (\w+)\}""")


def in_flags(text: str) -> str:
    """A fix with flags instead of keywords. A fix that already names flags was written for the command line."""
    if "--" in text:
        return text
    for phrase, words in PHRASES.items():
        text = text.replace(phrase, words)
    return _KEYWORD.sub(_flag, _SIZES.sub(r"--size \2=\3", text))


def page_in_flags(account: Mapping[str, Any]) -> dict[str, Any]:
    """What a page shows, for somebody who typed a command."""
    notes, problems = (list(map(in_flags, account[key])) for key in ("notes", "problems"))
    words, verdict = (in_flags(account[key]) for key in ("words", "verdict"))
    return {**account, "words": words, "verdict": verdict, "notes": notes, "problems": problems}


def reason_in_flags(text: str) -> str:
    """The same for a reason, but only at its start: later it may quote the user's names."""
    if both := _BOTH.match(text):
        return f"{FLAGS[both[1]]} and {FLAGS[both[2]]}{text[both.end() :]}"
    return _KEYWORD.sub(_flag, text, count=1) if _KEYWORD.match(text) else text


def _flag(match: re.Match[str]) -> str:
    return f"{FLAGS[match[1]]} {match[3]}".rstrip()


def on_the_command_line(error: CmrcError) -> dict[str, str]:
    """The parts of an error, for somebody who typed a command."""
    return {
        "kind": error.kind,
        "node": error.node,
        "op": error.op,
        "reason": reason_in_flags(error.reason),
        "at": error.at,
        "fix": in_flags(error.fix),
    }
