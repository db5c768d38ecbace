"""One of the processes that recover a model together: run by test_spread.py under torch.distributed.run.

python spread.py MODEL DATA CHECKPOINT OUT: a recovery along a checkpoint; the second process is killed once, half-way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

import cmrc
from cmrc.recovery.recover import RecoveryRun
from cmrc.statistics import distributed


def main(model: str, data: str, checkpoint: str, out: str) -> None:
    save, rounds, began = RecoveryRun.save, list[int](), list[int]()

    def killed(self: RecoveryRun) -> None:
        save(self)
        rounds.append(self.rounds)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") == "0"
        if first and distributed.shard()[0] == 1 and len(rounds) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    RecoveryRun.save = killed  # type: ignore[method-assign]
    with distributed.group():
        program = cmrc.trace(model)
        lowered = cmrc.lower(program, cmrc.Plan(program).do("act_a", units=[0, 1], constant=0.0))
        arrays = np.load(data)
        recovered = cmrc.recover(
            program,
            lowered,
            [(arrays["x"], arrays["y"])],
            steps=12,
            batch=15,  # an odd number for two processes
            checkpoint=checkpoint,
            tell=lambda each: began.append(each.number),
            spread="WORLD_SIZE" in os.environ,
        )
        assert recovered.recovery is not None
        known = {**asdict(recovered.recovery), "seconds": 0.0, "began": began}
    rank = distributed.shard()[0]
    initializers = recovered.host.model.graph.initializers.values()  # type: ignore[attr-defined]
    np.savez(f"{out}.{rank}.npz", **{value.name: value.const_value.numpy() for value in initializers})
    Path(f"{out}.{rank}.json").write_text(json.dumps(known))


if __name__ == "__main__":
    main(*sys.argv[1:])
