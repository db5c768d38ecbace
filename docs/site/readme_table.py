"""Write the numbers of README.md anew, by running its command: `python docs/site/readme_table.py`. tests/cli/test_readme.py holds them to it."""

from __future__ import annotations

import re
from pathlib import Path

import cmrc

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "cmrc" / "demo"
WIDTH = 132  # of the verdict's lines


def main() -> None:
    names = ("digits.onnx", "digits_train.npz", "digits_test.npz")
    model, train, test = (str(DEMO / name) for name in names)
    result = cmrc.reduce(model, train, held_out=test, agreement=0.97, timed=False)
    _, *rows = result.frontier()
    lines = []
    for mark, share, parameters, _, file, _, _, agreement, kl, accuracy in rows:
        lines.append(f"    {mark or ' '} {share:<17} {parameters:<11} {file:<6} {agreement}  {kl:<8} {accuracy}")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    page = re.sub(r"(?ms)^    [> ] 0\.9 .*?(?=\n\n)", "\n".join(lines), page, count=1)
    words, verdict = result.verdict.split(), ["   "]
    for word in words:
        if len(verdict[-1]) + len(word) >= WIDTH:
            verdict.append("   ")
        verdict[-1] += f" {word}"
    page = re.sub(r"(?ms)^    ready: .*?(?=\n\n)", "\n".join(verdict), page, count=1)
    m, before = result.measures, result.whole
    parts = f"leaves {m.parameters / before.parameters:.0%} of the parameters and\n{m.macs / before.macs:.0%}".replace(
        "%", " %"
    )
    page = re.sub(r"leaves \d+ % of the parameters and\n\d+ %", parts, page, count=1)
    scores = m.quality.accuracy
    assert scores is not None
    page = re.sub(r"goes from [\d.]+ to [\d.]+:", f"goes from {scores[0]:.4f} to {scores[1]:.4f}:", page, count=1)
    (ROOT / "README.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
