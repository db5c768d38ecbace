"""Every size beside the original under onnxruntime: all files in one process, on the same input, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.hosts.onnx.bench import PROVIDERS, median_interval, median_ratio, times
from cmrc.ir.graph import Array
from cmrc.reduction.goals import Speed
from cmrc.reduction.observer import Clock
from cmrc.reduction.workfolder import WorkFolder, digest_of
from cmrc.verification.bounds import Estimate

ORIGINAL = "original"
SESSIONS, ROUNDS = 5, 9
LONG = 20.0  # seconds that timing should take, about


@dataclass(frozen=True, slots=True)
class Timing:
    """Whether sizes are timed, and where."""

    wanted: bool
    threads: int
    provider: str

    def measure(
        self, files: Mapping[str, Path], feed: Mapping[str, Array], work: WorkFolder, clock: Clock
    ) -> dict[str, Speed]:
        """The speed of every file, the first of which is the original. What the work folder knows is not timed again."""
        asked = {
            "files": {name: path.stat().st_size for name, path in files.items()},
            "threads": self.threads,
            "provider": self.provider,
        }
        noted = work.load("speed", digest_of(asked))
        if noted is None:
            clock.stage("timing", f"{len(files)} files in turns, {self.provider}")
            once = self._run({ORIGINAL: files[ORIGINAL]}, feed, sessions=1, rounds=1)
            seconds = max(once[ORIGINAL].milliseconds.value / 1e3, 2e-3)
            rounds = int(np.clip(LONG / (seconds * len(files) * SESSIONS), 3, ROUNDS))
            watch: Callable[[Any], Any] = lambda items: clock.track(items, SESSIONS, "timing")  # noqa: E731
            measured = self._run(files, feed, sessions=SESSIONS, rounds=rounds, watch=watch)
            noted = {name: speed.to_json() for name, speed in measured.items()}
            work.save("speed", digest_of(asked), noted)
        else:
            clock.stage("timing", "done before")
        return {name: Speed.from_json(each) for name, each in noted.items()}

    def _run(self, files: Mapping[str, Path], feed: Mapping[str, Array], **options: Any) -> dict[str, Speed]:
        wanted = PROVIDERS.get(self.provider.lower(), self.provider)
        feeds = dict.fromkeys(files, feed)
        seconds, used = times(files, feeds, threads=self.threads, provider=wanted, **options)
        result = {}
        for name in files:
            low, high = median_interval(seconds[name])
            faster = median_ratio(np.stack([seconds[ORIGINAL], seconds[name]], axis=-1))
            own = Estimate(1e3 * float(np.median(seconds[name])), 1e3 * low, 1e3 * high)
            result[name] = Speed(own, Estimate(*faster), used[name][0])
        return result
