"""`lockstep.train` from a script: the runs of the command line, several in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers import Done, command, forked

pytestmark = pytest.mark.slow

# No `if __name__ == "__main__"`, as in the cells of a notebook.
SCRIPT = """
import json, sys, torch
import lockstep

common = ["device=cpu", "logger=jsonl", "precision=fp64", "telemetry.interval=1"]
common.append(f"output_root={sys.argv[1]}")
torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # this process has threads now, so ranks are fresh interpreters
one = lockstep.train(["steps=4", *common])
two = lockstep.train(["steps=4", "strategy=allreduce", "launcher.ranks=2", *common])
inside = lockstep.train(["steps=1", f"hydra.run.dir={sys.argv[1]}/named", *common])
assert str(inside.folder) == f"{sys.argv[1]}/named", inside.folder
more = lockstep.train([f"resume={one.folder}", "steps=6", f"output_root={sys.argv[1]}"])
mistakes = []
for words in (["model=resnet1888"], ["optimizer.lr=-1"], ["epochs"], ["resume=nowhere"]):
    try:
        lockstep.train([*words, *common])
    except lockstep.InputError as error:
        mistakes.append(str(error))
print(json.dumps({
    "objectives": [one.objective, two.objective],
    "losses": [[line["loss/train"] for line in run.metrics if "loss/train" in line] for run in (one, two, more)],
    "resumed": [more.folder == one.folder, more.summary["step"], more.weights.is_file()],
    "mistakes": mistakes,
}))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the script prints at its end."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "script.py").write_text(SCRIPT)
    done: Done = forked(str(folder / "script.py"), str(folder / "outputs"), cwd=folder)
    assert done.code == 0, done.err
    return dict(json.loads(done.out.splitlines()[-1]))


def test_runs_of_one_process_are_those_of_the_command_line(printed: dict[str, list[list[float]]]) -> None:
    one, two, more = printed["losses"]
    assert len(one) == len(two) == 4
    assert two == pytest.approx(one, abs=1e-12)
    assert more[:4] == one
    assert len(more) == 6


def test_the_result_says_what_came_of_a_run(printed: dict[str, list[object]]) -> None:
    assert printed["resumed"] == [True, 6, True]
    assert printed["objectives"][0] == printed["objectives"][1]


def test_a_mistake_is_an_exception_with_the_sentence_of_the_command_line(printed: dict[str, list[str]]) -> None:
    model, lr, word, resume = printed["mistakes"]
    assert model.startswith("model=resnet1888: there is no model of that name. Did you mean 'resnet18'")
    assert lr == "optimizer.lr is -1, expected auto or a number above 0 and at most 1,000,000: optimizer.lr=auto"
    assert "epochs has no value, expected epochs=VALUE" in word
    assert "resume: nowhere is neither a run folder nor a checkpoint" in resume


def test_importing_the_library_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys, lockstep; sys.exit('torch' in sys.modules or 'omegaconf' in sys.modules)"
    assert command(sys.executable, "-c", code, cwd=tmp_path).code == 0
