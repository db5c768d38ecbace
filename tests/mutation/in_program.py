"""Seeded bugs of files, plans, lowering and the check of a lowered model."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
CHECK = "tests/program/test_check.py"
FILES = (
    "tests/hosts/onnx/test_faults.py",
    "tests/hosts/onnx/test_save.py",
    "tests/program/test_plan_file.py",
    "tests/cli/test_outputs.py",
)
PLAN_FILE = "tests/program/test_plan_file.py"

# ---------------------------------------------------------------- check

bug(
    "only-the-last-output-compared",
    "close = all(output.error <= output.tolerance for output in self.outputs)",
    "close = self.outputs[-1].error <= self.outputs[-1].tolerance",
    "an error in another output than the last goes unnoticed",
    CHECK,
)
bug(
    "only-the-first-output-compared",
    "close = all(output.error <= output.tolerance for output in self.outputs)",
    "close = self.outputs[0].error <= self.outputs[0].tolerance",
    "an error in another output than the first goes unnoticed",
    CHECK,
)
bug(
    "tolerance-without-limit",
    "allowed = min(max(ROUNDINGS * rounding, usual / 10), usual * 10) if rounding else usual",
    "allowed = max(ROUNDINGS * rounding, usual / 10) * 1e4 if rounding else 1.0",
    "a tolerance so wide that wrong models pass",
    CHECK,
)
bug(
    "only-the-last-batch-counts",
    "error, moved, rounding = np.max([m[:3] for m in measures], axis=0).tolist()",
    "error, moved, rounding = measures[-1][:3]",
    "an error on an earlier batch goes unnoticed",
    CHECK,
)
bug(
    "nan-is-no-error",
    "nan=np.inf).max()) / scale",
    "nan=0.0).max()) / scale",
    "a lowered model that gives NaN counts as equal",
    CHECK,
)
bug(
    "dtypes-not-compared",
    "        if want.dtype != got.dtype:",
    "        if False:",
    "a lowered model of another precision counts as equal",
    CHECK,
)
bug(
    "whole-numbers-not-compared",
    "            float(np.any(want != got)),",
    "            0.0,",
    "another class among the outputs goes unnoticed",
    CHECK,
)
bug(
    "smallest-number-as-the-scale",
    "scale = float(np.abs(reference).max()) or 1.0",
    "scale = float(np.abs(reference).sum()) or 1.0",
    "errors are divided by the sum of the output",
    CHECK,
)
bug(
    "clamped-against-itself",
    "        results, plain = lowered.run(inputs), original.run(inputs)",
    "        results, plain = clamped.run(inputs), original.run(inputs)",
    "the check compares the clamped model with itself",
    CHECK,
)
bug(
    "nothing-is-nudged",
    "moved: Array = np.where(array == 0, array, np.nextafter(array, ends))",
    "moved: Array = array",
    "the rounding that errors are judged by is measured as 0",
    CHECK,
)

# ---------------------------------------------------------------- lowering

bug(
    "residue-ignored",
    'if result.residue and residue == "error":',
    "if False:",
    "what could not be folded stays without a word",
    "tests/program/test_lower.py",
)
bug(
    "plan-of-another-model-lowered",
    "    program.require(plan)\n    start = time.perf_counter()",
    "    start = time.perf_counter()",
    "a plan for another model is lowered",
    "tests/program",
)
bug(
    "constants-out-of-range",
    '        _require_range(values, chosen, axis, "constant", site.dtype, where)',
    "        pass",
    "a constant that is infinite in the precision of the model is accepted",
    "tests/program/test_plan.py",
    "tests/hosts/onnx/test_overflow.py",
)
bug(
    "unit-replaced-twice",
    "        if twice:\n            raise DoUnitsError",
    "        if False:\n            raise DoUnitsError",
    "two entries of a plan replace the same unit",
    "tests/program/test_plan.py",
)
bug(
    "fold-to-infinity",
    'if converted.dtype.kind not in "biu" and not _finite(converted):',
    "if False:",
    "a folded bias overflows to infinity",
    "tests/ir/test_tensors.py",
)
bug(
    "rotated-heads-vector",
    "        spread[axis], spread[-1] = values.shape\n        return values.reshape(spread)",
    "        spread[axis], spread[-1] = values.shape\n        return values[::-1].reshape(spread)",
    "heads get each other's vectors of constants",
    "tests/program/test_plan.py",
    "-k",
    "head",
)

# ---------------------------------------------------------------- files

bug(
    "no-sync-before-the-rename",
    "    _sync(staged)\n    os.replace(staged, path)",
    "    os.replace(staged, path)",
    "a file has its name before its content is on the disk",
    "tests/test_files.py",
)
bug(
    "synced-after-the-rename",
    "    _sync(staged)\n    os.replace(staged, path)",
    "    os.replace(staged, path)\n    _sync(path)",
    "a file has its name before its content is on the disk",
    "tests/test_files.py",
)
bug(
    "folder-not-synced",
    "    os.replace(staged, path)\n    _sync(path.parent)",
    "    os.replace(staged, path)",
    "the rename itself may be lost",
    "tests/test_files.py",
)
bug(
    "copied-not-renamed",
    "    os.replace(staged, path)\n",
    "    shutil.copyfile(staged, path)\n",
    "a file is half written if the process is killed",
    "tests/test_files.py",
)
bug(
    "link-replaced-by-a-file",
    "return path.resolve() if path.is_symlink() else path",
    "return path",
    "an output that is a symbolic link becomes a file",
    "tests/hosts/onnx/test_save.py",
    "tests/cli/test_outputs.py",
    PLAN_FILE,
)
bug(
    "staging-of-others-removed",
    "        if handle is not None:\n            shutil.rmtree(place, ignore_errors=True)\n            os.close(handle)",
    "        shutil.rmtree(place, ignore_errors=True)\n        if handle is not None:\n            os.close(handle)",
    "a writer removes what another is still writing",
    "tests/test_files.py",
)
bug(
    "abandoned-files-stay",
    "        _remove_abandoned(folder)\n        place = ",
    "        place = ",
    "what a killed writer left is never removed",
    "tests/test_files.py",
)
bug(
    "model-before-its-data",
    "        if data is not None:\n            publish(data, path.with_name(data.name))\n        publish(staged, path)",
    "        publish(staged, path)\n        if data is not None:\n            publish(data, path.with_name(data.name))",
    "a new model is there before the weights that it names",
    *FILES,
)
bug(
    "data-file-has-one-name",
    "return xxhash.xxh3_128_digest(data)",
    "return bytes(16)",
    "new weights overwrite those of the model that is still there",
    *FILES,
)
bug(
    "data-of-another-model-removed",
    "if not file.is_file() or file.is_symlink() or is_mentioned(file):",
    "if not file.is_file() or file.is_symlink():",
    "weights that another model mentions are removed",
    *FILES,
)
bug(
    "input-overwritten",
    "if source is not None and not overwrite and path.exists() and source.exists() and path.samefile(source):",
    "if False:",
    "the model that was lowered is overwritten by the result",
    "tests/hosts/onnx/test_save.py",
    "tests/cli/test_outputs.py",
)
bug(
    "hash-of-arrays-not-compared",
    "        if _digest(data) != named[1]:",
    "        if False:",
    "the arrays of another plan are accepted",
    PLAN_FILE,
)
bug(
    "arrays-from-anywhere",
    're.fullmatch(r"[^/\\\\\\0]*\\.([0-9a-f]{12})\\.safetensors", name)',
    're.fullmatch(r".*\\.([0-9a-f]{12})\\.safetensors", name)',
    "a plan reads arrays from outside its folder",
    PLAN_FILE,
)
bug(
    "external-data-from-anywhere",
    "if Path(location).is_absolute() or not file.resolve().is_relative_to(folder.resolve()):",
    "if False:",
    "a model reads data from outside its folder",
    "tests/hosts/onnx/test_load.py",
)
bug(
    "plan-before-its-arrays",
    "            if large:\n                publish(arrays, path.parent / name)\n            publish(staged, path)",
    "            publish(staged, path)\n            if large:\n                publish(arrays, path.parent / name)",
    "a plan is there before the arrays that it names",
    "tests/test_files.py",
)
