"""python -m tests.supply: known faults of the pinned set, into tests/supply/record.json.

PyPI names the known faults of a package's newest version beside its description. pip-audit asks for those of any version, which
not every mirror can answer. A pinned version that is not the newest is counted as not asked.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.records import ROOT, save_record

RECORD = Path(__file__).with_name("record.json")
CONTROL = "pycrypto"  # its newest version has known faults: the answer must name them
LINE = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)")


def pinned() -> dict[str, str]:
    """The packages of constraints.txt, without a local part of the version such as +cpu."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    matches = [match for line in lines if (match := LINE.match(line))]
    return {match[1]: match[2].partition("+")[0] for match in matches}


def asked(name: str) -> tuple[str, list[str]] | None:
    """The newest version of a package and its known faults; nothing where PyPI does not know it."""
    try:
        with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/json", timeout=60) as answer:
            document: dict[str, Any] = json.load(answer)
    except OSError:  # no such page, or no answer
        return None
    return document["info"]["version"], [fault["id"] for fault in document["vulnerabilities"]]


def main() -> int:
    packages = pinned()
    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(packages, pool.map(asked, packages), strict=True))
    control = asked(CONTROL)
    if control is None or not control[1]:
        sys.stderr.write(f"PyPI names no fault of {CONTROL}: it cannot be asked here\n")
        return 2
    newest = {name for name, answer in answers.items() if answer is not None and answer[0] == packages[name]}
    faults = {f"{name}=={packages[name]}": answers[name][1] for name in sorted(newest) if answers[name][1]}  # type: ignore[index]
    record = {
        "command": "python -m tests.supply", "packages": len(packages), "audited": len(newest), "faults": faults,
        "not newest": sorted(f"{name}=={packages[name]}" for name in packages if name not in newest),
        "control": {f"{CONTROL}=={control[0]}": control[1]},
    }  # fmt: skip
    save_record(record, RECORD)
    sys.stdout.write(json.dumps(record, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
