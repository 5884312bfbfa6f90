"""How many lines the five most usual extensions take: as options of Lockstep, and for Lightning.

    python benchmarks/extending_lines.py          counts
    python benchmarks/extending_lines.py --run    also trains with Lightning's parts, to show that they work

Lockstep's code is in the blocks of docs/extending.md, which a test runs. Lightning's code is below, as in its
documentation, with the code that makes it and its values selectable on the command line. Blank lines, comments,
docstrings and imports are not counted.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

EXTENDING = Path(__file__).parents[1] / "docs" / "extending.md"
OURS = {
    "a model": "flat.py",
    "a data set in memory": "noise.py",
    "a data set of files": "birds.py",
    "a loss": "squared.py",
    "a logger": "bell.py",
}
THEIRS = {
    "a model": """
from lightning.pytorch import LightningModule
import torch
from torch import nn
from torch.nn import functional as F

class Flat(LightningModule):
    def __init__(self, channels: int, size: int, classes: int, width: int = 32, lr: float = 0.001):
        super().__init__()
        self.lr = lr
        pixels = channels * size * size
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, _):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        hits = (self(images).argmax(1) == labels).float()
        self.log("val_acc", hits.mean(), batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)
""",
    "a data set in memory": """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

class Noise(LightningDataModule):
    def __init__(self, batch: int = 64):
        super().__init__()
        self.batch = batch

    def split(self, train):
        generator = torch.Generator().manual_seed(int(train))
        labels = torch.arange(256 if train else 64) % 2
        images = torch.randint(0, 128, (len(labels), 3, 16, 16), generator=generator)
        images = (images + 100 * labels.view(-1, 1, 1, 1)) / 255
        return TensorDataset((images - 0.5) / 0.25, labels)

    def train_dataloader(self):
        return DataLoader(self.split(True), self.batch, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.split(False), self.batch)
""",
    "a data set of files": """
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

class Birds(LightningDataModule):
    def __init__(self, path: str = "photos", decode_size: int = 64, input_size: int = 32, batch: int = 64):
        super().__init__()
        self.path, self.batch = path, batch
        self.preprocess = transforms.Compose([
            transforms.Resize(decode_size),
            transforms.CenterCrop(decode_size),
            transforms.Resize(input_size),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ])

    def train_dataloader(self):
        split = ImageFolder(f"{self.path}/training", self.preprocess)
        return DataLoader(split, self.batch, shuffle=True)

    def val_dataloader(self):
        return DataLoader(ImageFolder(f"{self.path}/test", self.preprocess), self.batch)
""",
    "a loss": """
from torch.nn import functional as F

class Squared(Flat):
    def training_step(self, batch, _):
        images, labels = batch
        logits = self(images)
        targets = F.one_hot(labels, logits.shape[1])
        return (logits.softmax(1) - targets).square().sum(1).mean()
""",
    "a logger": """
from lightning.pytorch.callbacks import Callback

class Bell(Callback):
    def __init__(self, above: float = 0.0):
        self.best = above

    def setup(self, trainer, module, stage):
        print(f"{trainer.log_dir} begins after step {trainer.global_step}")

    def on_validation_end(self, trainer, module):
        score = 100 * trainer.callback_metrics["val_acc"].item()
        if score > self.best and not trainer.sanity_checking:
            self.best = score
            print(f"\\a{score:.1f} % at step {trainer.global_step}")

    def teardown(self, trainer, module, stage):
        print("the run has ended")
""",
}
RUN = """
from lightning.pytorch import Trainer
options = dict(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
Trainer(callbacks=[Bell()], **options).fit(Flat(3, 16, 2), Noise())
Trainer(callbacks=[Bell()], **options).fit(Squared(3, 32, 2), Birds(sys.argv[1]))
"""


def lines(source: str) -> int:
    """The lines of code of a Python source, without imports and docstrings."""
    tree = ast.parse(source)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(source.splitlines(), start=1)
    return sum(bool(re.match(r"\s*[^#\s]", line)) for number, line in numbered if number not in left_out)


def run_theirs() -> None:
    """Train with each of Lightning's parts."""
    with tempfile.TemporaryDirectory() as folder:
        for split in ("training", "test"):
            for number, species in enumerate(("owl", "wren") * 4):
                path = Path(folder, split, species, f"{number}.png")
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.effect_noise((48, 40), 60).convert("RGB").save(path)
        program = "import sys\n" + "".join(THEIRS.values()) + RUN
        subprocess.run([sys.executable, "-c", program, folder], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the lines of five common extensions.")
    parser.add_argument("--run", action="store_true", help="train with Lightning's parts, which has to be installed")
    if parser.parse_args().run:
        run_theirs()
    blocks = re.findall(r"^```python\n# mine/(\S+)\n(.*?)^```", EXTENDING.read_text(), re.MULTILINE | re.DOTALL)
    ours = dict(blocks)
    print(f"{'':24}{'Lockstep':>10}{'Lightning':>11}")
    for part, file in OURS.items():
        print(f"{part:24}{lines(ours[file]):10}{lines(THEIRS[part]):11}")


if __name__ == "__main__":
    main()
