"""Objects that a program gives to `lockstep.train` beside words."""

from __future__ import annotations

import json
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import lockstep
from helpers import forked
from lockstep.core.run import Run
from lockstep.models.nets import DigitNet
from lockstep.optim import SGD
from lockstep.runtime.pickled import packed, unpacked
from lockstep.telemetry.loggers import JSONL, TensorBoard

pytestmark = pytest.mark.slow
TORCH_SGD = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())

# Every class is of `__main__`, as in the cells of a notebook.
SCRIPT = """
import json, sys, torch
from torch.nn.functional import cross_entropy
import lockstep
from lockstep.models.nets import DigitNet, Network

if "fresh" in sys.argv:
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # this process has threads now: ranks are fresh interpreters

class MyNet(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = DigitNet(width=width).build(10, (1, 8, 8))

    def forward(self, images):
        return self.net(images)

def my_loss(logits, targets):
    return cross_entropy(logits, targets, reduction="none")

class Scans(torch.utils.data.Dataset):
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return torch.full((1, 8, 8), index % 2 / 2), index % 2

@lockstep.option("model")
class OwnNet(Network):
    width: int = 8

    def build(self, classes, input_shape):
        return MyNet(self.width)

class Counting(lockstep.Callback):
    every_rank = True
    steps = 0

    def step_end(self, run):
        self.steps += 1
        if self.steps == 3:
            run.stop("three are enough")

common = ["device=cpu", "steps=4", "telemetry.interval=1", "logger=jsonl", "launcher.threads=1"]

def losses(*words, **objects):
    run = lockstep.train([*common, *words], **objects)
    return [line["loss/train"] for line in run.metrics if "loss/train" in line], str(run.folder)

torch.manual_seed(0)
net = MyNet(width=8)
given = {"model": net, "loss": my_loss}
"""
ONE = """
before = json.dumps([value.tolist() for value in net.state_dict().values()])
by_name, given_one = losses("model.width=8"), losses(**given)
assert before == json.dumps([value.tolist() for value in net.state_dict().values()]), "a copy is trained"
folder, sentences = given_one[1], []
for call in (
    lambda: lockstep.train([f"resume={folder}", "steps=6"]),
    lambda: lockstep.train([f"resume={folder}", "steps=6"], model=net),
    lambda: lockstep.load(folder),
    lambda: lockstep.load(by_name[1], model=net),
):
    try:
        call()
    except lockstep.InputError as error:
        sentences.append(str(error))
resumed = lockstep.train([f"resume={folder}", "steps=6"], **given)
scans = lockstep.dataset(Scans(64), Scans(16), classes=["dark", "bright"], mean=[0.2], std=[0.3])
other = losses("batch=16", dataset=scans)
option = losses("model.width=8", "model=own_net"), losses(model=OwnNet(width=8))
print(json.dumps({
    "by name": by_name, "given": given_one, "sentences": sentences, "step": resumed.summary["step"],
    "log": (resumed.folder / "train.log").read_text(),
    "predicted": len(lockstep.load(folder, model=net).predict(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))),
    "scans": other, "option": option, "wider": losses(model=MyNet(width=16)),
}))
"""
TWO = """
by_name, given_two = losses("model.width=8", ranks=2), losses(ranks=2, callbacks=[Counting()], **given)
print(json.dumps({"by name": by_name, "given": given_two, "option": losses("model=own_net", ranks=2)}))
"""


def result(folder: Path, body: str, *words: str) -> dict[str, Any]:
    """What the script prints at its end."""
    (folder / "script.py").write_text(SCRIPT + body)
    done = forked(str(folder / "script.py"), *words, cwd=folder)
    assert done.code == 0, done.err
    return dict(json.loads(done.out.splitlines()[-1]))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result(tmp_path_factory.mktemp("objects"), ONE)


def test_an_object_trains_to_the_bit_as_the_same_option_by_name(one: dict[str, Any]) -> None:
    assert one["by name"][0] == one["given"][0] == one["option"][0][0] == one["option"][1][0]
    assert len(one["given"][0]) == 4


def test_a_resume_and_weights_ask_for_the_object_again_and_take_it(one: dict[str, Any]) -> None:
    resume, half, load, not_given = one["sentences"]
    model = "model is MyNet of __main__, an object that a program gave to lockstep.train"
    objects = (
        "model is MyNet of __main__ and loss is my_loss of __main__, objects that a program gave to lockstep.train"
    )
    assert resume.startswith(objects)
    assert resume.endswith(
        'lockstep.train(["resume=RUN"], model=MyNet(...), loss=my_loss), or lockstep.load(RUN, model=MyNet(...))'
    )
    assert half.startswith("loss is my_loss of __main__, an object that a program gave")
    assert model in load
    assert not_given.endswith("model is DigitNet, which needs no object of a program; remove model=...")
    assert (one["step"], one["predicted"]) == (6, 2)


def test_a_resume_with_the_objects_again_keeps_their_words_once(one: dict[str, Any]) -> None:
    overrides = Run(Path(one["given"][1])).overrides
    assert len({word.lstrip("+").partition("=")[0] for word in overrides if word != "steps=4"}) == len(overrides) - 1


def test_the_lines_of_a_run_with_objects_name_their_classes_and_what_works_with_them(one: dict[str, Any]) -> None:
    lines = one["log"].splitlines()
    assert "     model  MyNet, " in one["log"]
    run, objects = f"outputs/{Path(one['given'][1]).name}", "model=MyNet(...), loss=my_loss"
    ends = ("      loss  my_loss", f'lockstep.load("{run}", model=MyNet(...)).predict(FILE)')
    for end in (*ends, f'lockstep.train(["resume={run}", "steps=12"], {objects})'):
        assert any(line.endswith(end) for line in lines), end


def test_datasets_of_a_program_train(one: dict[str, Any]) -> None:
    losses, folder = one["scans"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    identity = Run(Path(folder)).identity
    assert identity["class_names"] == ["dark", "bright"]


def test_compare_names_the_types_and_the_weights_of_objects(one: dict[str, Any]) -> None:
    def differences(first: str, second: str) -> dict[str, tuple[str, str]]:
        done = forked("lockstep", "compare", first, second, "--json", cwd=Path(first))
        return {row["key"]: (row["A"], row["B"]) for row in json.loads(done.out)}

    assert differences(one["by name"][1], one["given"][1])["model"] == ("digitnet", "object")
    rows = differences(one["given"][1], one["wider"][1])
    assert rows["loss"] == ("object", "cross_entropy")
    assert rows["model.weights"][0] != rows["model.weights"][1]


def test_rows_are_those_of_the_commands(one: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = one["by name"][1], one["given"][1]
    folder = str(Path(first).parent)
    for rows, words in (
        (lockstep.runs(folder, sort="score"), ("runs", folder, "--sort", "score")),
        (lockstep.compare(first, second), ("compare", first, second)),
        (lockstep.compare(folder), ("compare", folder)),
        (
            lockstep.runs(folder, sort="loss", filters=["state=done", "steps=4"], columns=["loss"]),
            ("runs", folder, "--sort", "loss", "--filter", "state=done", "--filter", "steps=4", "--columns", "loss"),
        ),
        (
            lockstep.compare(folder, by=["model"], sort="loss", columns=["loss"]),
            ("compare", folder, "--by", "model", "--sort", "loss", "--columns", "loss"),
        ),
    ):
        assert rows == json.loads(forked("lockstep", *words, "--json").out)
        table = rows.to_pandas()
        assert [*table.columns] == [*dict.fromkeys(name for row in rows for name in row)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(lockstep.InputError, match="needs pandas, which is not installed: pip install pandas"):
        rows.to_pandas()


def test_a_notebook_shows_where_rows_differ_as_text() -> None:
    rows = [{"name": f"<b>{number}", "score": None, "lr": 0.1234567 * number, "seed": 1} for number in (1, 2)]
    table = lockstep.Rows(rows)._repr_html_()
    assert "<td>&lt;b&gt;1</td><td></td><td>0.1235</td></tr>" in table
    assert "seed" not in table


def test_a_flag_of_the_command_is_no_word_of_a_program() -> None:
    with pytest.raises(lockstep.InputError, match=r"'-m' is a flag, expected KEY=VALUE; a sweep is lockstep.sweep"):
        lockstep.train(["-m", "seed=1,2"])


@pytest.mark.parametrize("words", [(), ("fresh",)], ids=["forked ranks", "fresh ranks"])
def test_objects_go_to_the_ranks(tmp_path: Path, words: tuple[str, ...]) -> None:
    ranks = result(tmp_path, TWO, *words)
    assert ranks["given"][0] == ranks["by name"][0][:3]
    assert len(ranks["option"][0]) == 4


def test_without_cloudpickle_what_the_script_defines_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type("Own", (), {"__module__": "__main__"})
    function = FunctionType((lambda: None).__code__, {"__name__": "__main__"}, "Own")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for own in (cls, cls(), [function]):
        with (
            pytest.raises(lockstep.InputError, match=r"is of __main__.* pip install cloudpickle, or move"),
            packed((own,)),
        ):
            pass
    with packed((torch.ones(2), DigitNet())) as (file,):
        tensor, option = unpacked(Path(file))
    assert torch.equal(tensor, torch.ones(2))
    assert option == DigitNet()


QUIET = """
import sys
import lockstep
words = ["device=cpu", "steps=1", "train.eval_every=1", "optimizer.lr=1e4", "launcher.threads=1"]
run = lockstep.train(words, verbose=False, ranks=int(sys.argv[1]))
assert "done in" in (run.folder / "train.log").read_text()
print("end")
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_without_verbose_a_run_prints_nothing(tmp_path: Path, ranks: str) -> None:
    (tmp_path / "script.py").write_text(QUIET)
    done = forked(str(tmp_path / "script.py"), ranks, cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, "end\n", "")


@pytest.mark.parametrize(
    ("objects", "sentence"),
    [
        ({"model": 3}, "model is an object of int, expected a torch.nn.Module, or an object of a class with"),
        ({"dataset": [1]}, "dataset is an object of list.*lockstep.dataset\\(train="),
        ({"optimiser": SGD()}, "optimiser is not a group of options. Did you mean 'optimizer'"),
        ({"epochs": 2}, r'epochs is a key, which is set by a word: \["epochs=2"\]'),
        ({"optimizer": "sgd"}, r'optimizer is a text, expected an object; .* by a word: \["optimizer=sgd"\]'),
        ({"model": torch.nn.Flatten}, r"model is the class Flatten, expected an object of it: model=Flatten\(...\)"),
        ({"optimizer": SGD}, r"optimizer is the class SGD, expected an object of it: optimizer=SGD\(...\)"),
        ({"optimizer": TORCH_SGD}, r"SGD, expected .*: lockstep\.optim\.SGD\(lr=\.\.\.\), or the word optimizer=sgd"),
        ({"optimizer": torch.optim.SGD}, r"optimizer is the class SGD, .*: lockstep\.optim\.SGD\(lr=\.\.\.\)"),
        ({"optimizer": torch.optim.RMSprop}, "; the words are optimizer=timm optimizer.opt=rmsprop"),
        (
            {"schedule": StepLR(TORCH_SGD, 1)},
            r": lockstep\.optim\.schedule\.Step\(\.\.\.\), or the word sch",
        ),
        ({"loss": torch.nn.CrossEntropyLoss()}, r'CrossEntropyLoss\(reduction="none"\), or use the word loss=cross_'),
        ({"loss": torch.nn.MSELoss()}, r'expected one loss per example: MSELoss\(reduction="none"\)$'),
        (
            {"dataset": DataLoader(range(3))},
            r"DataLoader, .*; Datasets .* LOADER\.dataset, are lockstep",
        ),
        ({"overrides": "epochs=2"}, r'overrides is \'epochs=2\', expected a list of words: \["epochs=3"\]'),
        ({"overrides": {"epochs": 2}}, "overrides is {'epochs': 2}, expected a list of words"),
        ({"model": DigitNet()}, "model=linear and an object both choose the model; remove one of them"),
        ({"ranks": 0}, r"launcher\.ranks is 0, expected"),
        (
            {"overrides": ["batch=5000", "hydra.run.dir=runs/mine"]},
            "batch is 5000, but the training split has",
        ),  # by the job, in its folder
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_object_is_refused_and_leaves_nothing(
    objects: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lockstep.InputError, match=sentence):
        lockstep.train(**({"overrides": ["model=linear"] if "DigitNet" in str(objects) else []} | objects))
    assert not list(tmp_path.iterdir())


def test_objects_of_options_are_their_words(tmp_path: Path) -> None:
    objects = {"optimizer": SGD(lr=0.5, nesterov=True), "logger": [JSONL(), TensorBoard()]}
    run = lockstep.train(["device=cpu", "steps=1", f"output_root={tmp_path}"], **objects)
    words = ["optimizer=sgd", "optimizer.lr=0.5", "optimizer.nesterov=true", 'logger=["jsonl", "tensorboard"]']
    assert Run(run.folder).overrides[:4] == words


class Named(torch.nn.Linear):
    def forward(self, images: torch.Tensor) -> Any:
        return {"logits": super().forward(images.flatten(1))}


class Flat(torch.nn.Module):
    """Pixels as outputs, without a parameter."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 11)),
            r"Sequential returns \[11\] .* expected \[10\]",
        ),
        (torch.nn.Linear(8, 8), r"the model Linear returns \[1, 8, 8\] for an example, expected \[10\]"),
        (Named(64, 10), r"the model Named returns a dict for an example, expected \[10\]: a tensor"),
        (Flat(), "the model Flat has no parameter that requires a gradient"),
    ],
)
def test_a_network_whose_outputs_are_not_the_classes_is_refused_before_the_first_step(
    model: torch.nn.Module, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(lockstep.InputError, match=sentence):
        lockstep.train(["steps=2", f"output_root={tmp_path}"], model=model, verbose=False)
