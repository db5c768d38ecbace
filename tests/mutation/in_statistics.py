"""Seeded bugs of the statistics: moments, rows, resuming, shards, readers and derivatives in closed form."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
CALIBRATE = "tests/statistics/test_calibrate.py"
FILES = "tests/statistics/test_files.py"
DRAWN = "tests/statistics/test_drawn.py"
CHECKPOINT = "tests/statistics/test_checkpoint.py"
CURVATURE = "tests/statistics/test_curvature.py"
OBJECTIVES = ("tests/planning/test_objectives.py", "tests/statistics/test_readers.py")

bug(
    "means-averaged",
    'merged = {"mean": mine["mean"] + apart * (other.count / total)}',
    'merged = {"mean": mine["mean"] + apart * 0.5}',
    "the means of two parts are averaged without their numbers of rows",
    CALIBRATE,
)
bug(
    "squares-just-added",
    'merged["squares"] = mine["squares"] + theirs["squares"] + apart**2 * weight',
    'merged["squares"] = mine["squares"] + theirs["squares"]',
    "moments are merged without the distance of the means",
    CALIBRATE,
)
bug(
    "scatter-just-added",
    'merged["scatter"] = _together(mine["scatter"], theirs["scatter"], weight, apart, apart)',
    'merged["scatter"] = mine["scatter"] + theirs["scatter"]',
    "the scatter is merged without the distance of the means",
    CALIBRATE,
)
bug(
    "chan-with-the-sum",
    "self.count * other.count / total\n",
    "self.count * other.count / (total - 1)\n",
    "the weight of Chan's formula",
    CALIBRATE,
)
bug(
    "sample-variance",
    'return self.arrays["squares"] / self.count',
    'return self.arrays["squares"] / (self.count - 1)',
    "ddof=1 in place of 0",
    CALIBRATE,
    *OBJECTIVES,
)
bug(
    "cross-moments-transposed",
    "merged[cross] = _together(mine[cross], theirs[cross], weight, apart, moved)",
    "merged[cross] = _together(mine[cross].T, theirs[cross].T, weight, apart, moved).T",
    "the cross moments of two parts are merged the wrong way round",
    CALIBRATE,
    "tests/planning/test_stream.py",
)
bug(
    "low-and-high-swapped",
    'EXTREMES = {"low": np.minimum, "high": np.maximum}',
    'EXTREMES = {"low": np.maximum, "high": np.minimum}',
    "the range of two parts shrinks",
    CALIBRATE,
)
bug(
    "pivot-not-added-back",
    'return {"mean": pivot + total / count,',
    'return {"mean": total / count,',
    "the mean of large numbers is that of their distances",
    CALIBRATE,
    "tests/planning/test_numerics.py",
)
bug(
    "digits-cancel",
    "    if (squares > LARGE * spread).any():",
    "    if False:",
    "the variance of large numbers is the difference of two sums",
    CALIBRATE,
    "tests/planning/test_numerics.py",
)
bug(
    "rows-count-as-samples",
    "self.count, self.samples, self.arrays = total, self.samples + other.samples, merged",
    "self.count, self.samples, self.arrays = total, total, merged",
    "a picture counts once for each of its positions",
    CALIBRATE,
    "-k",
    "picture_counts",
)
bug(
    "first-rows-sampled",
    'order = np.argsort(sample["hash"], kind="stable")[:ROWS]',
    'order = np.arange(len(sample["hash"]))[:ROWS]',
    "the sampled rows depend on the order of the shards",
    CALIBRATE,
)
bug(
    "padding-counts",
    "return np.asarray(by_position[_mask_of(columns, by_position, batch)])",
    "return np.asarray(by_position[np.ones_like(_mask_of(columns, by_position, batch))])",
    "tokens that only fill up are samples",
    CALIBRATE,
)
bug(
    "drawn-rows-count-once",
    "centred *= np.sqrt(drawn.weight)[:, None]",
    "centred *= np.sqrt(drawn.weight[:1] / drawn.weight)[:, None]",
    "a drawn row does not count for those that it stands for",
    DRAWN,
)
bug(
    "drawn-at-one-place",
    "inside = (steps + (places[:, None] + steps * GOLDEN) % 1) * part[:, None]",
    "inside = (steps + places[:, None]) * part[:, None]",
    "rows are drawn at the same place of every part",
    DRAWN,
)
bug(
    "drawn-by-batch",
    "number = (number ^ (number >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)",
    "number = (number + np.arange(len(number), dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)",
    "which rows are drawn depends on the place of a sample in its batch",
    DRAWN,
)
bug(
    "mean-of-drawn-rows",
    "sums = np.concatenate([block @ ones for block, _ in _wide_blocks(lines)])",
    "sums = np.concatenate([block[:, :1] @ ones[:1] * len(ones) for block, _ in _wide_blocks(lines)])",
    "the mean of channels is not of all positions",
    DRAWN,
)
bug(
    "positions-before-units",
    "return value.transpose([*batched, columns.axis, *places, *last]).reshape(-1, columns.count)",
    "return value.transpose([*batched, *places, columns.axis, *last]).reshape(-1, columns.count)",
    "wrong axis of a row: the columns of a position are another's",
    CALIBRATE,
)
bug(
    "batches-counted-twice",
    "        if saved is not None and i < saved.reached.batches:",
    "        if False:",
    "a calibration that resumes adds the first batches again",
    CHECKPOINT,
)
bug(
    "resumed-on-other-data",
    "        if seen != self.reached:",
    "        if False:",
    "a calibration resumes on other data",
    CHECKPOINT,
)
bug(
    "resumed-for-another-model",
    "        if progress.asked != self.asked:",
    "        if False:",
    "a calibration resumes from the checkpoint of another",
    CHECKPOINT,
)
bug(
    "checkpoint-stays",
    '        """The result is complete: there is nothing to resume."""\n        self.path.unlink(missing_ok=True)',
    "        pass",
    "a finished calibration leaves its checkpoint",
    CHECKPOINT,
)
bug(
    "batches-of-another-shard",
    "        if (count - 1) % shard[1] == shard[0]:",
    "        if count % shard[1] == shard[0]:",
    "every shard takes the batches of the next",
    CALIBRATE,
    "-k",
    "shard_takes",
)
bug(
    "samples-of-one-shard",
    "return Stats(sites, self.fingerprint, data, self.samples + other.samples, self.options)",
    "return Stats(sites, self.fingerprint, data, self.samples, self.options)",
    "merged statistics say the number of samples of the first part",
    CALIBRATE,
    FILES,
)
bug(
    "other-models-merged",
    "if self.fingerprint != other.fingerprint or list(self.sites) != list(other.sites):",
    "if False:",
    "statistics of two models are merged",
    CALIBRATE,
    FILES,
)
bug(
    "one-seed-for-all-batches",
    "options.seed * 1_000_003 + number,",
    "options.seed * 1_000_003,",
    "every batch draws the same labels",
    CALIBRATE,
    "-k",
    "draws_labels",
)
bug(
    "unlabelled-rows-count",
    "            residual[labels == NO_LABEL] = 0.0",
    "            pass",
    "positions without a label have a gradient",
    CURVATURE,
)
bug(
    "curvature-without-its-mean",
    "h = p @ weight**2 - (p @ weight) ** 2",
    "h = p @ weight**2",
    "the curvature of a softmax is taken about 0",
    CURVATURE,
)
bug(
    "logit-curvature-halved",
    '        scale = 2.0 if loss == "logit" else 1.0\n        h = ',
    "        scale = 1.0\n        h = ",
    "the factor of a squared distance",
    CURVATURE,
)
bug(
    "label-gradient-sign",
    "np.take_along_axis(p, known, -1) - 1.0",
    "np.take_along_axis(p, known, -1) + 1.0",
    "the gradient of a cross-entropy is p - y",
    CURVATURE,
)
bug(
    "curvature-of-raw-values",
    '"haa": h * rows**2',
    '"haa": h * np.abs(rows)',
    "a sum of the second order is one of the first",
    CURVATURE,
    *OBJECTIVES,
)
bug(
    "readers-without-scale",
    "    wide = wide * scale[0]\n",
    "",
    "a scaling between a site and its reader is forgotten",
    *OBJECTIVES,
    "-k",
    "scaling_on",
)
bug(
    "readers-of-the-first-group",
    "wide[g, :, :, g * inside : (g + 1) * inside] = parts[g]",
    "wide[g, :, :, :inside] = parts[g]",
    "every group of a convolution is taken to read the channels of the first",
    *OBJECTIVES,
    "-k",
    "group_of_a_conv",
)
bug(
    "readers-of-a-transposed-conv",
    "parts = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).transpose(0, 3, 2, 1)",
    "parts = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).transpose(0, 3, 1, 2)",
    "the weight of a transposed convolution has its inputs first",
    *OBJECTIVES,
    "-k",
    "transposed_conv",
)
bug(
    "nan-in-a-file",
    "        if not np.isfinite(array).all():\n            raise refuse(",
    "        if False:\n            raise refuse(",
    "statistics with NaN are read",
    FILES,
)
bug(
    "negative-variance-in-a-file",
    '    if any((arrays[name] < 0).any() for name in ("squares", "abs_ga", "hash") if name in arrays):',
    "    if False:",
    "a negative sum of squares is read",
    FILES,
)
bug(
    "infinite-sums",
    "        _require_finite([*stats.sites.values(), *source.halves], batch, number, known)",
    "        pass",
    "a batch with NaN makes the statistics NaN",
    CALIBRATE,
    "tests/planning/test_numerics.py",
)
bug(
    "big-endian-as-it-is",
    "    if isinstance(array, np.ndarray) and not array.dtype.isnative:",
    "    if False:",
    "numbers in another byte order are read as if they were native",
    CALIBRATE,
    FILES,
)
