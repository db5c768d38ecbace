"""Every code block of the README and of docs/ is run, page by page, from top to bottom.

python        in one namespace per page
sh            `cmrc` commands, as a user types them; `reduce` tries few sizes and does not time them, unless the page says otherwise
indented      the lines that begin with `cmrc`
yaml          a block whose first line is `# name.yaml` becomes that file
makefile      becomes the Makefile; it is run by the tests of the integrations
console       what only a fresh machine can show: installing, and scripts of this repository, which exist
text, json    output

A page begins in a folder that has the digits classifier as model.onnx, train.npz, test.npz, and as examples/. What a page
takes for granted beside that (somebody's model, somebody's loader) is made by its entry in GIVEN.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import cli

ROOT = Path(__file__).parents[2]
OWN_TEST = {"CONTRIBUTING.md", "docs/verification.md"}  # in test_generated.py, with what they print
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if path.relative_to(ROOT).as_posix() not in OWN_TEST
)
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$|^((?:    .*\n)+)", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "sh", "yaml", "makefile", "console", "text", "json", ""}
QUICK = {"--frontier": ["--frontier", "0.7,0.5"], "--no-timed": ["--no-timed"], "--no-refit": ["--no-refit"]}
DEMO_IS_TESTED = "cmrc demo"  # in cli/test_demo.py

MODULE = """
import numpy as np
import torch
import cmrc

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.ModuleDict({"fc1": torch.nn.Linear(8, 384), "act": torch.nn.GELU(), "fc2": torch.nn.Linear(384, 8)})
    def forward(self, x):
        return x + self.mlp["fc2"](self.mlp["act"](self.mlp["fc1"](x)))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(5))
        self.head = torch.nn.Linear(8, 4)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

torch.manual_seed(0)
model = Net().eval()
x = torch.randn(32, 8)
labels = torch.randint(0, 4, (32,))
loader = [(torch.randn(64, 8), torch.randint(0, 4, (64,))) for _ in range(4)]
"""
PICTURES = """
import numpy as np
from pathlib import Path
from PIL import Image

Path("images").mkdir()
for i, picture in enumerate(np.load("train.npz")["images"][:200]):
    Image.fromarray((picture[0] * 255).astype(np.uint8)).save(f"images/{i}.png")
"""
CHECKPOINT = """
import sys

import cmrc
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=32, **sizes)).save_pretrained("checkpoint")
gated = [site.name for site in cmrc.trace("checkpoint").sites() if site.units == 32 and site.folds and site.op == "mul"]
plan = cmrc.Plan(cmrc.trace("checkpoint")).do(gated[0], units=range(8), constant=0.0).do(gated[1], units=range(4), constant=0.0)
sys.path.insert(0, "smaller")
"""
GIVEN = {
    "docs/checkpoints.md": CHECKPOINT,
    "docs/planning.md": MODULE + "program = cmrc.trace(model, (x,))\nfolder = loader\n",
    "docs/python.md": MODULE,
    "docs/reduce.md": PICTURES,
}  # fmt: skip


def blocks(page: str) -> list[tuple[str, str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(match[1] or "", match[2] or match[3]) for match in BLOCK.finditer(text)]


def commands(text: str) -> list[list[str]]:
    """The commands of a block; a backslash continues a line, indented lines without `cmrc` are remarks."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in map(str.strip, lines) if line.startswith("cmrc ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, called in (
        ("digits.onnx", "model.onnx"),
        ("digits_test.npz", "test.npz"),
        ("digits_test.npz", "held-out.npz"),
    ):
        (tmp_path / called).symlink_to(ROOT / "examples" / name)
    train = np.load(ROOT / "examples" / "digits_train.npz")
    np.savez(tmp_path / "train.npz", **{name: train[name][:512] for name in train.files})
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if any(lang in ("python", "sh") for lang, _ in blocks(page))])
def test_the_code_of_a_page_runs(page: str, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    if page in GIVEN:
        exec(GIVEN[page], names)
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, page, "exec"), names)
        elif language == "yaml" and (named := re.match(r"# (\S+\.yaml)\n", text)):
            (folder / named[1]).write_text(text)
        elif language == "sh":
            for command in commands(text):
                run(command, page)


def run(command: list[str], page: str) -> None:
    if " ".join(command) == DEMO_IS_TESTED:
        return
    arguments = command[1:]
    if arguments[0] == "reduce":
        arguments += [part for flag, parts in QUICK.items() if flag not in arguments for part in parts]
    done = cli(*arguments)
    assert done.exit_code == 0 or arguments[:2] == ["plan", "diff"], (
        f"{page}: {shlex.join(command)}\n{done.output}\n{done.stderr}"
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_run(page: str) -> None:
    for language, text in blocks(page):
        assert language in LANGUAGES, f"{page}: {language}"
        if language == "sh":
            rest = [
                line
                for line in text.replace("\\\n", " ").splitlines()
                if line.strip() and not line.startswith(("cmrc ", "#"))
            ]
            assert not rest, f"{page}: {rest}"
        if language == "console":
            for script in re.findall(r"bash (\S+)", text):
                assert (ROOT / script).exists(), f"{page}: {script}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_options_that_exist(page: str) -> None:
    """Also of indented blocks, whose files are not there."""
    helps: dict[str, str] = {}
    for language, text in blocks(page):
        for command in commands(text) if language in ("sh", "") else []:
            name = command[1]
            if name.startswith("-"):
                continue
            words = [name, *command[2:3]] if name == "plan" and command[2] in ("show", "diff") else [name]
            shown = helps.setdefault(
                " ".join(words), cli(*words, *(["make"] if words == ["plan"] else []), "--help").output
            )
            for flag in (part.split("=")[0] for part in command if re.match(r"--?[a-z]", part)):
                assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", shown), (
                    f"{page}: {shlex.join(command)}: {flag}"
                )


def test_the_errors_of_the_page_on_troubleshooting_are_those_of_the_code() -> None:
    sources = "\n".join(path.read_text() for top in ("cmrc", "passes") for path in sorted((ROOT / top).rglob("*.py")))
    flat = re.sub(r'"\s*\n\s*f?"', "", sources)  # a text that goes on in the next line
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    texts = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(texts) > 20
    for text in texts:
        parts = [part.strip(" ,:") for part in text.split("…")]
        missing = [part for part in parts if part and part not in flat]
        assert not missing, f"{text}: {missing}"
