"""python -m tests.numerics: measure the tolerance of `check` on trained networks, into tests/numerics/record.json."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import weights
from tests.numerics.tolerance import measure
from tests.records import save_record

RECORD = Path(__file__).with_name("record.json")
DIGITS = Path(__file__).parent.parent.parent / "examples" / "digits.onnx"
CASES = 40
NETWORKS = {
    "digits (the example)": lambda: DIGITS,
    "Magika": lambda: weights.magika()[0],
    "PP-OCRv4 recognition": weights.recogniser,
}


def main() -> None:
    record: dict[str, Any] = {"command": "python -m tests.numerics", "networks": {}}
    for name, find in NETWORKS.items():
        record["networks"][name] = measure(find(), cases=CASES).to_json()
        save_record(record, RECORD)
        sys.stdout.write(f"{name}: {record['networks'][name]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
