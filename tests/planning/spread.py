"""One of the processes that make a plan and verify it together: run by test_spread.py under torch.distributed.run.

python spread.py MODEL FOLDER CHECKPOINT OUT: a plan with fits in order along a checkpoint, one without, and two verifications;
the second process is killed once, while the plan with the checkpoint is half done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import cmrc
from cmrc.planning.progress import SpreadProgress
from cmrc.statistics import distributed


def main(model: str, data: str, checkpoint: str, out: str) -> None:
    spread = "WORLD_SIZE" in os.environ
    given: dict[str, Any] = {"preset": "joint", "keep": 4, "recompute": "fits", "batch": 8, "spread": spread}
    save, sites = SpreadProgress.save_site, []

    def killed(self: SpreadProgress, step: int, number: int, *rest: Any) -> None:
        save(self, step, number, *rest)
        sites.append(number)
        if len(sites) == 2 and distributed.shard()[0] == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    SpreadProgress.save_site = killed  # type: ignore[method-assign]
    with distributed.group():
        program = cmrc.trace(model)
        before = [path.name for path in Path(checkpoint).glob("site-*")]
        resumed = cmrc.plan(program, data=data, checkpoint=checkpoint, **given)
        plan = cmrc.plan(program, data=data, **given)
        known = cmrc.Plan(program).do("act_b", units=[1, 4], constant=0.3).do("act_early", units=[0, 2], constant=-0.2)
        asked: dict[str, Any] = {"swaps": 1100, "about": "fixed", "spread": spread}
        results = [cmrc.verify(program, known, data, **asked, **more) for more in ({}, {"until": "iia>=0.5"})]
        resumed.save(f"{out}.{distributed.shard()[0]}.resumed.json")
        plan.save(f"{out}.{distributed.shard()[0]}.json")
        document = {"verified": [result.to_json() for result in results], "before": before, "sites": sites}
        Path(f"{out}.{distributed.shard()[0]}.told").write_text(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
