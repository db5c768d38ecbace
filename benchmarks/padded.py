"""How fast constants under zero padding run under onnxruntime: as added planes, and carried by a channel.

python -m benchmarks.padded [--quick] [--json OUT] [--threads N]

Timed as `benchmarks.latency` times its networks, beside the network of the same width that has biases only.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import models
from benchmarks.latency import build, measure, quiet_exporters
from benchmarks.measure import Ratio, arguments, console, use_threads, write_record
from benchmarks.section import Section, comparisons
from cmrc.hosts.onnx.bench import clock_for

SECTIONS = (
    Section(
        "padded",
        "Constants under zero padding",
        """Half of the channels behind each of four 3x3 convolutions with batch norm and ReLU replaced by constants, run by onnxruntime on the
CPU with {threads} intra-op thread(s); the clock is the {clock}. *Added planes*: as many channels stay as *native* has, and a plane is added behind
each padded convolution. *Carried*: one fewer stays, and a channel that is 1 everywhere brings the constants, so that the file is as wide as *native*.
""",
        comparisons,
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "padded.json")
    use_threads(options.threads)
    quiet_exporters()
    ratios: list[Ratio] = []
    for case in models.padded()[: 2 if options.quick else None]:
        with tempfile.TemporaryDirectory() as scratch:
            console.print(f"{case.name}: exporting and lowering")
            files = build(case, Path(scratch))
            ratios += measure(case, {name: path for name, path in files.items() if name != "masked"}, options)
    beside = [ratio for ratio in ratios if ratio.theirs == "native"]
    write_record(options.json, "padded", beside, options, clock=clock_for(options.threads))


if __name__ == "__main__":
    main()
