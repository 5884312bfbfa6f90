"""The first hour, from a folder of photos to a model in use: typed as it stands, with the program from a wheel."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from helpers import ROOT, Done, build_wheel, command, installed, origin

pytestmark = pytest.mark.slow
SCRIPT = (ROOT / "tests" / "first_hour.sh").read_text().splitlines()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which is typed, with `photos`: scikit-learn's first 600 digits as JPEG files."""
    folder = tmp_path_factory.mktemp("first hour")
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images[:600], digits.target[:600], strict=True)):
        path = folder / "photos" / ("val" if number % 5 == 0 else "train") / f"digit {label}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).resize((64, 48)).save(path, quality=95)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment of its own with the wheel in it."""
    folder = tmp_path_factory.mktemp("environment")
    wheel = build_wheel(folder)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    needed = set(re.findall(r"^Requires-Dist: ([\w-]+)", metadata, re.MULTILINE))
    assert needed >= {"torch", "torchvision", "timm", "hydra-core", "omegaconf", "tensorboard"}
    python = installed(folder / "venv", str(wheel))
    assert origin(python).is_relative_to(folder)
    assert command(str(python.parent / "lockstep"), "new", "mine", cwd=folder).code == 0
    assert (folder / "mine" / "train.py").is_file()
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": "", "OMP_WAIT_POLICY": "passive"}


def test_the_first_hour_ends_with_a_page_that_knows_a_photo(photos: Path, environment: dict[str, str]) -> None:
    *lines, demo = SCRIPT
    typed: dict[str, Done] = {}
    for line in lines:
        done = command("bash", "-c", line, cwd=photos, **environment)
        assert done.code == 0, f"{line}\n{done.err}"
        typed[line.split()[1]] = done
    assert "done in" in typed["train"].out
    (run,) = (path.parent for path in photos.glob("outputs/*/summary.json"))
    assert json.loads((run / "evaluation.json").read_text())["top1"] > 30  # three times as good as guessing
    assert len((run / "predictions.csv").read_text().splitlines()) == 121
    assert len(typed["predict"].out.splitlines()) == 120 + 1, "and the line with their number"
    assert (run / "model.onnx").stat().st_size > 10_000
    process = subprocess.Popen(
        ["bash", "-c", f"exec {demo}"],
        cwd=photos,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        (address,) = re.findall(r"http://\S+", process.stdout.readline())
        photo = next((photos / "photos" / "val" / "digit 0").iterdir())
        page = address.rstrip("/")
        headers = {"Content-Type": "application/octet-stream", "Origin": page}  # as the page itself sends it
        request = urllib.request.Request(f"{page}/predict", photo.read_bytes(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            classes = json.load(answer)
        assert "digit 0" in json.dumps(classes)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
