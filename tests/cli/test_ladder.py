"""`lockstep ladder`: the rungs of a job, what each brings, and how a ladder goes on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from helpers import ROOT, resolved, running_fork
from lockstep.core.errors import InputError, LockstepError, Stopped, StorageError
from lockstep.core.run import Run, State, born
from lockstep.core.run_dir import RunDir
from lockstep.diagnostics import ladder as module
from lockstep.diagnostics import ladder_table
from lockstep.diagnostics.ladder import Rung, chosen, ladder, rung_key, rungs, script_name
from lockstep.diagnostics.ladder_table import largest_difference, row_of, show_ladder
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import Record
from lockstep.runtime.commands import running
from lockstep.runtime.signals import StopNow
from lockstep.strategy.base import Auto, Single
from lockstep.strategy.ddp import DDP, AllReduce
from processes import wait_for

JOB = ("model=linear", "dataset=fake", "dataset.examples=64", "dataset.size=8", "batch=32", "steps=4", "name=tiny")
SCRIPT = """# A script of a user.
import json, sys
assert "--epochs=20" in sys.argv
print("training ...")
print(json.dumps({"img_per_s": 120.0, "top1": 12.5}))
"""


def test_a_script_may_give_its_setup_a_name() -> None:
    assert script_name(Path("hf_trainer.py"), b"import json\n# lockstep ladder calls it HF Trainer\n") == "HF Trainer"
    assert script_name(Path("mine.py"), SCRIPT.encode()) == "mine"


def climb(
    *words: str, scripts: Sequence[Path] = (), repeats: int = 1, only: str = "ddp", form: str = "table"
) -> None:
    ladder([*JOB, "device=cpu", *words], ranks=2, repeats=repeats, only=only, scripts=[*map(str, scripts)], form=form)


@pytest.mark.slow
def test_a_ladder_runs_what_is_left_and_shows_what_each_rung_brings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rung of torchrun is the real command in new processes; the others are forks."""
    monkeypatch.setattr(module, "running", running_fork)
    script = tmp_path / "mine.py"
    script.write_text("import beside_it\n" + SCRIPT)
    (tmp_path / "beside_it.py").touch()
    job = (f"output_root={tmp_path}", "telemetry.interval=1")
    climb(*job, scripts=[script], only="ddp,ddp-torchrun,mine")
    out = capsys.readouterr().out
    (folder,) = (tmp_path / module.LADDERS).iterdir()
    records = Ledger(folder).records()
    assert [record.state for record in records] == [State.done] * 4
    assert "  DDP                   strategy=ddp launcher=spawn launcher.ranks=2\n" in out
    rows = [line.split() for line in out[out.index("\nrung ") + 1 :].splitlines()]
    assert (rows[1][:2], rows[1][-2:]) == (["one", "device"], ["same", "0"])
    assert (rows[4][:2], rows[4][-2:]) == (["mine", "120"], ["12.50", "5"])
    assert (folder / module.LADDER_PICTURE).read_bytes().startswith(b"<?xml")
    assert RunDir(folder / records[2].folder).environment.is_file()

    # A rung that was killed is measured from its start; what is done stays as it is.
    ledger, done = (
        Ledger(folder),
        [(folder / record.folder / "summary.json").stat().st_mtime_ns for record in records],
    )
    ledger.write(replace(records[1], state=State.running, pid=2**22 + 1))
    (folder / records[1].folder / "leftover").touch()
    climb(*job, scripts=[script], only="ddp,ddp-torchrun,mine", form="json")
    again = [(folder / record.folder / "summary.json").stat().st_mtime_ns for record in records]
    assert [old == new for old, new in zip(done, again, strict=True)] == [True, False, True, True]
    assert not (folder / records[1].folder / "leftover").exists()
    rows_of_json = json.loads(capsys.readouterr().out)
    assert [row["rung"] for row in rows_of_json] == ["one device", "DDP", "DDP, torchrun", "mine"]
    assert rows_of_json[1]["difference"] < 1e-5


def test_a_first_rung_that_does_not_run_ends_the_ladder_with_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "running", running_fork)
    with pytest.raises(InputError, match="batch norm of this model"):
        climb(f"output_root={tmp_path}", "model=whitenet", "dataset.size=9", "dataset.examples=65")


@pytest.mark.parametrize(
    ("words", "options", "says"),
    [
        (
            ("resume=latest",),
            {},
            "resume=latest: ladder trains from the initial weights",
        ),
        ((), {"ranks": 1}, "--ranks is 1, expected from 2 to"),
        ((), {"ranks": 10_000}, "--ranks is 10000, expected from 2 to"),
        ((), {"repeats": 0}, "--repeat is 0, expected from 1 to 100"),
        ((), {"only": "fdsp"}, "--only: there is no setup 'fdsp' here; they are one-device, dataparallel, ddp"),
        ((), {"scripts": [__file__, __file__]}, "two setups are called test-ladder; give the file another name"),
        ((), {"scripts": ["no/such.py"]}, "no/such.py is missing"),
        ((), {"scripts": ["/"]}, "/ is a folder, expected a plain file"),
        (("launcher@x=1",), {}, "a config group takes the name of one of its options"),
        (("model=nosuch",), {}, "nosuch"),
        (("device=cpu", "batch=65"), {"ranks": 2}, "batch is 65, but the training split has 64 examples"),
    ],
)
def test_a_mistake_is_told_before_a_rung_runs(
    tmp_path: Path, words: tuple[str, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        ladder(
            [*JOB, f"output_root={tmp_path}", *words],
            **{"ranks": None, "repeats": 1, "only": None, "scripts": [], "form": "table", **options},
        )
    assert not list(tmp_path.iterdir())


def test_the_rungs_are_those_that_change_something(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*words: str) -> list[str]:
        return [rung.name for rung in rungs(resolved(*words, "device=cpu"), 2, ())]

    monkeypatch.setattr(module.host, "has_bfloat16", lambda: True)
    plain, normed = names("model=linear"), names("model=whitenet", "dataset.input_size=12")
    assert "DDP, mixed precision" in plain
    assert "DDP, own batch norm" not in plain
    assert "DDP, own batch norm" in normed
    assert "DDP, mixed precision" not in names("precision=bf16")
    monkeypatch.setattr(module.host, "has_bfloat16", lambda: False)
    assert "DDP, mixed precision" not in names("model=linear")


def test_the_users_strategy_comes_first_and_every_other_one_of_the_registry_last() -> None:
    ways = [*rungs(resolved("model=linear", "device=cpu", "precision=bf16"), 2, (), "zero")]
    assert [way.name for way in ways[:3]] == ["one device", "ZeRO", "DataParallel"]
    assert [way.name for way in ways].count("ZeRO") == 1
    names = {path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml")} - {"auto", "strict"}
    assert {word for way in ways for word in way.words if word.startswith("strategy=")} == {
        f"strategy={name}" for name in names
    }


def test_the_first_rung_is_always_there() -> None:
    climbed = [Rung("one device"), Rung("DDP"), Rung("ZeRO")]
    assert chosen(climbed, None) == climbed
    assert chosen(climbed, "zero") == [climbed[0], climbed[2]]


GOOD = json.dumps({"img_per_s": 120.0, "top1": 12.5})


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (f"print('more', flush=True); print({GOOD!r})", ""),
        ("raise SystemExit('no data')", "no data"),
        ("import os; os.kill(os.getpid(), 9)", "it ended with signal 9 (Killed)"),
        ("import sys; sys.stderr.buffer.write(b'\\xff\\xfe bad'); sys.exit(1)", "bad"),
        ("import traceback\ntry: 1 / 0\nexcept Exception: traceback.print_exc()", "end with ZeroDivisionError"),
        (f"print('x' * 1_000_000); import sys; print('y' * 1_000_000, file=sys.stderr); print({GOOD!r})", ""),
        ("", "its last line is '', expected"),
        ("print('[' * 100_000)", "its last line is '[[["),
        ("print('[1]')", "its last line is '[1]'"),
        ("""print('{"img_per_s": 1e999, "top1": NaN}')""", "its last line is"),
    ],
)
def test_a_script_may_do_anything(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "my script.py").write_text(code)
    ledger = Ledger(tmp_path / "ladder")
    ledger.create(Identity(base={}, swept=(), words=("ladder",)))
    rung = Rung("mine", script=tmp_path / "my script.py")
    (record,) = ledger.enter([(["rung=mine"], "mine")])
    ended = module.run_rung(ledger, rung, record, [sys.executable, str(rung.script)])
    assert ended.state is (State.failed if says else State.done)
    assert says in ended.error
    assert RunDir(ledger.folder / record.folder).summary.is_file() is not bool(says)


def test_a_ladder_that_is_stopped_or_refused_leaves_a_true_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first ladder waits for its script, a second one asks for more turns, and then comes a stop."""
    script = tmp_path / "mine.py"
    script.write_text("import time; time.sleep(600)")
    job = (f"output_root={tmp_path}", "telemetry.interval=1")

    @contextmanager
    def stopped(command: list[str], *, capture: bool = False) -> Iterator[object]:
        with pytest.raises(InputError, match="is in use by another ladder"):
            climb(*job, scripts=[script], only="mine", repeats=2)
        raise StopNow
        yield

    monkeypatch.setattr(module, "running", stopped)
    with pytest.raises(Stopped, match="rerun the command to resume"):
        climb(*job, scripts=[script], only="mine")
    (folder,) = (tmp_path / module.LADDERS).iterdir()
    stopped_turn, waiting = Ledger(folder).records()
    assert (stopped_turn.state, stopped_turn.exit_code) == (State.stopped, 75)
    assert stopped_turn.error == module.LADDER_STOPPED
    assert waiting.state is State.waiting
    assert "--repeat=1" in Ledger(folder).identity().words


def test_what_a_script_leaves_behind_is_ended_and_not_waited_for() -> None:
    """The script ends at once, and its child sleeps, with its streams."""
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid)
"""
    with running([sys.executable, "-c", code], capture=True) as process:
        child = int(process.communicate()[0])
    assert process.returncode == 0
    wait_for(lambda: not born(child))


@pytest.mark.parametrize(
    ("rate", "top1", "is_true"),
    [(1, 0, True), (0.5, 100, True), (1, 100.1, False), (1, -0.1, False), (0, 50, False), ("1e400", 50, False)],
)
def test_the_figures_of_a_script_are_a_rate_above_0_and_a_share_from_0_to_100(
    rate: float | str, top1: float, is_true: bool
) -> None:
    figures = module._figures_said(f'words\n{{"img_per_s": {rate}, "top1": {top1}}}\n')
    assert figures == ({"img_per_s": rate, "objective": top1} if is_true else None)


@pytest.mark.parametrize(
    "last",
    [
        "",
        "trained",
        "[1, 2]",
        '{"img_per_s": 9.0}',
        '{"img_per_s": null, "top1": 9.0}',
        f'{{"img_per_s": 1{"0" * 400}, "top1": 9.0}}',
        "[" * 100_000,
    ],
    ids=lambda last: last[:40],
)
def test_a_last_line_of_anything_else_has_no_figures(last: str) -> None:
    assert module._figures_said(f"training ...\n{last}\n") is None


def test_a_changed_script_is_measured_again(tmp_path: Path) -> None:
    old, new = (Rung("mine", script=tmp_path, code=code) for code in (b"1", b"2"))
    assert rung_key(old, 0) != rung_key(new, 0)
    assert rung_key(old, 0) == rung_key(replace(old), 0)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (8, 8)])
def test_a_ladder_has_the_ranks_of_the_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int) -> None:
    class Planned(Exception):
        pass

    def planned(job: object, number: int, scripts: object, own: str) -> None:
        assert number == ranks
        raise Planned

    monkeypatch.setattr(module, "job_of", lambda words: SimpleNamespace(device="cuda"))
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(module, "rungs", planned)
    options: dict[str, Any] = {"repeats": 1, "only": None, "scripts": [], "form": "table"}
    with pytest.raises(Planned):
        ladder(JOB, ranks=None, **options)
    with pytest.raises(InputError, match=f"--ranks is {gpus + 1}, expected from 1 to {gpus} on this machine"):
        ladder(JOB, ranks=gpus + 1, **options)


def finished(folder: Path, rate: float, losses: dict[int, float], **facts: object) -> Run:
    run = RunDir.at(folder)
    run.summary.write_text(json.dumps({"img_per_s": rate, "objective": 90.0, **facts}))
    run.metrics.write_text(
        "".join(json.dumps({"step": step, "loss/train": loss}) + "\n" for step, loss in losses.items())
    )
    return Run(folder)


def test_a_figure_of_zero_is_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts: dict[str, Any] = {"time": {"communication": 0.0}, "objective": 0.0, "gpu_memory": 0}
    turns = [finished(tmp_path / name, 100, {1: 4.0}, **facts) for name in "ab"]
    row = row_of("DDP", turns, None, devices=2, lines=0, reason="")
    figures = ("communication", "top1", "memory_gb", "difference", "spread")
    assert [row[name] for name in figures] == [0, 0, 0, 0, 0]
    show_ladder([{**row, "efficiency": 0.0, "speed_up": 0.0}])
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells == ["DDP", "100", "±0", "0.00", "0", "%", "0", "%", "0.00", "0.00", "same", "0"]
    show_ladder([{**row, **dict.fromkeys((*figures, "efficiency", "speed_up"))}])
    assert capsys.readouterr().out.splitlines()[1].split() == ["DDP", "100", "0"], "what is not known is left out"


def test_a_row_is_the_median_of_its_turns_beside_the_first_rung(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = [finished(tmp_path / "a", 100, {1: 4.0, 2: 2.0})]
    first = row_of("one device", once, None, devices=None, lines=0, reason="")
    assert (first["speed_up"], first["efficiency"]) == (None, None), "one turn has no spread"
    turns = [
        finished(tmp_path / name, rate, {1: 4.0, 2: 3.0}, time={"communication": 0.25}, gpu_memory=3e9)
        for name, rate in (("b", 300), ("c", 320), ("d", 380))
    ]
    row = row_of("DDP", turns, first, devices=4, lines=0, reason="")
    figures = ("img_per_s", "spread", "speed_up", "efficiency", "communication", "memory_gb", "top1", "difference")
    assert [row[name] for name in figures] == [320, 40, 3.2, 0.8, 0.25, 3.0, 90.0, 0.5]
    none = row_of("FSDP", [], first, devices=4, lines=0, reason="it needs a GPU")
    show_ladder([first, row, none])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines[:3])
    assert lines[2].split() == ["DDP", "320", "±40", "3.20", "80", "%", "25", "%", "3.00", "90.00", "5e-01", "0"]
    assert lines[3] == "FSDP is not in the table: it needs a GPU"


def test_a_rung_shows_what_a_user_types_and_writes(tmp_path: Path) -> None:
    spawned = Rung("DDP", ("strategy=ddp", "launcher=spawn", "launcher.ranks=2"))
    torchrun = Rung("DDP, torchrun", ("strategy=ddp",), ("torchrun", "--standalone"))
    script = Rung("mine", script=tmp_path / "my script.py", code=b"# a comment\nimport os\n\n  # more\n  print(1)\n")
    assert [rung.change for rung in (spawned, torchrun, script)] == [
        "strategy=ddp launcher=spawn launcher.ranks=2",
        "torchrun --standalone train.py strategy=ddp",
        f"python '{tmp_path}/my script.py'",
    ]
    assert [rung.has_ranks for rung in (spawned, torchrun, script, Rung("one", ("strategy=single",)))] == [
        True,
        True,
        False,
        False,
    ]
    assert [rung.lines for rung in (spawned, script)] == [0, 2]


def test_the_command_of_a_rung_sets_its_own_words_after_the_users_and_its_folder_last(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(data_root="data", epochs=3, seed=7)
    folder = tmp_path / "ladder" / "000-ddp"
    where = [*module.FIXED, f"hydra.run.dir={folder}", f"output_root={folder.parent}"]
    spawned = Rung("DDP", ("strategy=ddp",)).command(["batch=8"], job, folder)
    assert spawned == [sys.executable, "-m", "lockstep", "train", "batch=8", "strategy=ddp", *where]
    torchrun = Rung("DDP", ("strategy=ddp",), ("torchrun", "--standalone")).command(["batch=8"], job, folder)
    assert torchrun == [
        *(sys.executable, "-m", "torch.distributed.run", "--log-dir=/dev/null", "--standalone", "-m", "lockstep"),
        *("train", "batch=8", "strategy=ddp", *where),
    ]
    own = Rung("mine", script=tmp_path / "mine.py").command(["batch=8"], job, folder)
    assert own == [sys.executable, str(tmp_path / "mine.py"), "--data-root=data", "--epochs=3", "--seed=7"]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (b"", "mine"),
        (b"x = 1\n# lockstep ladder calls it HF  Trainer \t\ny", "HF  Trainer"),
        (b"# lockstep ladder calls it \xff\n", "\ufffd"),
        (b" # lockstep ladder calls it x", "mine"),
        (b"# lockstep ladder calls it a\n# lockstep ladder calls it b", "a"),
    ],
)
def test_the_name_of_a_script_is_in_a_comment_of_its_own_line(code: bytes, name: str) -> None:
    assert script_name(Path("folder/mine.py"), code) == name


def test_names_of_rungs_are_words_of_a_shell_and_several_may_be_chosen() -> None:
    assert [module.shell_name(name) for name in (" DDP, Torchrun ", "a--B", "é")] == ["ddp-torchrun", "a-b", "-"]
    climbed = [Rung("one device"), Rung("DDP"), Rung("ZeRO"), Rung("FSDP")]
    assert chosen(climbed, "FSDP, ddp") == [climbed[0], climbed[1], climbed[3]]
    with pytest.raises(InputError, match="there is no setup 'no' here; they are one-device, ddp, zero, fsdp"):
        chosen(climbed, "ddp,no")


def test_the_key_of_a_run_of_a_ladder_is_its_rung_its_turn_and_what_it_types(tmp_path: Path) -> None:
    assert rung_key(Rung("DDP", ("strategy=ddp",)), 3) == ("rung=ddp", "repeat=3", "change=strategy=ddp")
    script = Rung("mine", script=tmp_path, code=b"1")
    digest = hashlib.sha256(b"1").hexdigest()[:8]
    assert rung_key(script, 0) == ("rung=mine", "repeat=0", f"change=python {tmp_path}", f"code={digest}")


def test_a_link_to_a_script_is_followed_and_its_content_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print(1)\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "mine.py")
    *_, rung = rungs(resolved("model=linear", "device=cpu"), 2, [tmp_path / "link.py"])
    assert (rung.name, rung.code, rung.lines) == ("link", b"print(1)\n", 1)


class Ended:
    """A process that has ended with a code and what it printed."""

    def __init__(self, code: int, out: str = "", err: str = "") -> None:
        self.returncode, self.texts = code, (out, err)

    def communicate(self) -> tuple[str, str]:
        return self.texts


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a rung whose process ends so, and returns its record, the folder, and whether its output was kept."""

    def run(rung: Rung, *process: Any) -> tuple[Any, RunDir, bool]:
        captured: list[bool] = []

        @contextmanager
        def running_rung(command: list[str], *, capture: bool = False) -> Iterator[Ended]:
            captured.append(capture)
            assert not (run_dir.path / "leftover").exists()
            run_dir.path.mkdir(exist_ok=True)
            if rung.script is None:
                run_dir.checkpoints.mkdir()
                run_dir.summary.write_text('{"objective": 90.0}')
            yield Ended(*process)

        monkeypatch.setattr(module, "running", running_rung)
        ledger = Ledger(tmp_path / "ladder")
        ledger.create(Identity(swept=(), words=("ladder",)))
        (record,) = ledger.enter([((f"rung={rung.name}",), rung.name)])
        run_dir = RunDir(ledger.folder / record.folder)
        run_dir.path.mkdir()
        (run_dir.path / "leftover").touch()
        try:
            return module.run_rung(ledger, rung, record, []), run_dir, captured[0]
        except Stopped:
            return ledger.read(record), run_dir, captured[0]

    return run


def test_a_rung_that_is_done_leaves_no_checkpoints_and_has_its_score(ended: Callable[..., Any]) -> None:
    record, run_dir, captured = ended(Rung("ddp"), 0)
    assert (record.state, record.objective, record.error) == (State.done, 90.0, "")
    assert (run_dir.checkpoints.exists(), captured) == (False, False)


def test_an_earlier_run_that_cannot_be_removed_ends_the_ladder(
    ended: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StorageError, match=r"ladder/\S+ cannot be written \(Permission denied\)$"):
        ended(Rung("ddp"), 0)


@pytest.mark.parametrize(("code", "state"), [(75, State.stopped), (2, State.failed), (-9, State.failed)])
def test_a_rung_that_has_not_finished_says_how_it_ended(code: int, state: State, ended: Callable[..., Any]) -> None:
    record, *_ = ended(Rung("ddp"), code, "", "lockstep: it broke\n" * (code > 0))
    assert (record.state, record.exit_code) == (state, code)
    assert ("signal 9" if code < 0 else "it broke") in record.error


def test_a_script_that_ends_with_our_code_of_a_stop_has_failed(tmp_path: Path, ended: Callable[..., Any]) -> None:
    record, _, captured = ended(Rung("mine", script=tmp_path), 75, "", "bad")
    assert (record.state, record.exit_code, captured) == (State.failed, 75, True)


@pytest.mark.parametrize(
    ("out", "err", "error"),
    [
        ('x\n{"img_per_s": 5, "top1": 50}\n\n', "noise", ""),
        ("a\n" + "y" * 81, " \n", "its last line is '" + "y" * 80 + "', expected one such as "),
        ('{"img_per_s": 5, "top1": 50}\nmore', "", "its last line is 'more', expected one such as "),
        ('{"img_per_s": [], "top1": 50}', "", 'its last line is \'{"img_per_s": [], "top1": 50}\', expected'),
        ('{"img_per_s": 1' + "0" * 400 + ', "top1": 50}', "", "its last line is "),
        ("", "oops", "its last line is '', expected one such as "),
    ],
)
def test_the_last_line_of_a_script_has_its_figures(
    out: str, err: str, error: str, tmp_path: Path, ended: Callable[..., Any]
) -> None:
    record, run_dir, _ = ended(Rung("mine", script=tmp_path), 0, out, err)
    assert record.state is (State.failed if error else State.done)
    assert record.error.startswith(error)
    assert ("its errors end with" in record.error) == bool(error and err.strip())
    if not error:
        assert json.loads(run_dir.summary.read_text()) == {"status": "completed", "img_per_s": 5.0, "objective": 50.0}
        assert record.objective == 50.0


@pytest.mark.parametrize("fails_at", [None, 0, 1])
def test_the_rungs_climb_in_turns_and_what_is_done_stays(
    fails_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def run(ledger: Ledger, rung: Rung, record: Any, command: list[str]) -> Any:
        ran.append((rung.name, record.number))
        RunDir.at(ledger.folder / record.folder).summary.write_text('{"img_per_s": 5.0}')
        if fails_at is not None and rung is climbed[fails_at]:
            return ledger.end(record, State.failed, exit_code=70, error="it broke")
        return ledger.end(record, State.done)

    monkeypatch.setattr(module, "run_rung", run)
    climbed, ledger = [Rung("one"), Rung("DDP")], Ledger(tmp_path)
    ledger.create(Identity(swept=("rung",), words=("ladder",)))
    job: Any = SimpleNamespace()
    if fails_at == 0:
        with pytest.raises(LockstepError, match="it broke") as raised:
            module.climb(ledger, climbed, 2, [], job)
        assert type(raised.value) is LockstepError
        assert ran == [("one", 0)]
        return
    module.climb(ledger, climbed, 2, [], job)
    assert ran == [("one", 0), ("DDP", 1), ("one", 2), ("DDP", 3)]
    ran.clear()
    (tmp_path / ledger.records()[2].folder / "summary.json").unlink()
    module.climb(ledger, climbed, 2, [], job)
    assert ran == ([("one", 2)] if fails_at is None else [("DDP", 1), ("one", 2), ("DDP", 3)])
    rows = module._rows(ledger, climbed, 2, None)
    assert [(row["rung"], row["reason"]) for row in rows] == [("one", ""), ("DDP", "it broke" * (fails_at == 1))]


def test_the_largest_difference_of_two_curves_is_relative_and_at_their_common_steps() -> None:
    assert largest_difference({1: 1.5, 2: 3.0, 3: 9.0}, {1: 1.0, 2: -4.0, 4: 1.0}) == 1.75
    assert largest_difference({1: 1.25, 2: 1.0}, {1: 1.0, 2: 4.0}) == 0.75, "also of one that is lower"
    assert largest_difference({1: 1.0}, {1: 0.0}) is None
    assert largest_difference({1: 1.0}, {2: 1.0}) is None


def test_the_table_of_a_ladder_takes_the_memory_of_the_ranks_where_there_is_no_gpu(tmp_path: Path) -> None:
    facts = (("a", 4, 1.0), ("b", 6, 3.0))
    turns = [finished(tmp_path / name, rate, {1: 4.0}, cpu_mem_gb=gigabytes) for name, rate, gigabytes in facts]
    row = row_of("DDP", turns, None, devices=None, lines=0, reason="")
    figures = ("img_per_s", "spread", "speed_up", "efficiency", "memory_gb")
    assert [row[name] for name in figures] == [5, 1, 1.0, None, 2.0]
    empty = row_of("none", [], None, devices=2, lines=0, reason="no")
    assert [empty[name] for name in figures] == [None] * 5


def test_the_chart_of_a_ladder_has_the_first_rung_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = MagicMock()
    monkeypatch.setattr(ladder_table, "svg", lambda draw, width, height: draw(axes) or round(height, 3))
    rows = [{"rung": "one device", "img_per_s": 100.0, "spread": None, "speed_up": None}]
    rows += [{"rung": "x" * 25, "img_per_s": 250.0, "spread": 5.0, "speed_up": 2.5}]
    rows += [{"rung": "no", "img_per_s": None, "spread": None, "speed_up": None}]
    assert ladder_table.speed_chart(rows) == 1.4
    names, rates = axes.barh.call_args.args
    assert (names, rates) == (["x" * 23 + "…", "one device"], [250.0, 100.0])
    assert axes.barh.call_args.kwargs["xerr"] == [5.0, 0.0]
    assert axes.bar_label.call_args.args[1] == ["2.50x", ""]


def test_each_rung_has_its_own_words_and_the_ranks_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.host, "has_bfloat16", lambda: True)
    many = ("launcher=spawn", "launcher.ranks=3")
    of_tutorials = [
        Rung("one device", ("strategy=single", "launcher.ranks=1")),
        Rung("DataParallel", ("strategy=dp", "launcher.ranks=1")),
        Rung("DDP", ("strategy=ddp", *many)),
        Rung("DDP, torchrun", ("strategy=ddp",), ("torchrun", "--standalone", "--nproc-per-node=3")),
        Rung("averaged by hand", ("strategy=allreduce", *many)),
        Rung("averaged by hooks", ("strategy=allreduce_hooks", *many)),
    ]
    normed = Rung("DDP, own batch norm", ("strategy=ddp", "strategy.sync_batchnorm=false", *many))
    mixed = Rung("DDP, mixed precision", ("strategy=ddp", "precision=bf16", *many))
    job = resolved("model=whitenet", "dataset.input_size=12", "device=cpu")
    climbed = [*rungs(job, 3, ())]
    assert climbed[:8] == [*of_tutorials, normed, mixed]
    assert {rung.words[1:] for rung in climbed[8:]} == {many}
    assert {rung.words[0] for rung in climbed[8:]} == {
        f"strategy={name}" for name in ("accelerate", "fsdp", "pipeline", "zero")
    }
    monkeypatch.setattr(module.host, "has_bfloat16", lambda: False)
    assert mixed not in rungs(job, 3, ())
    assert mixed in rungs(replace(job, device="cuda"), 3, ()), "a GPU has it"


def test_a_strategy_of_the_users_has_its_own_name_and_one_of_a_single_rank_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"mine": AllReduce(), "alone": Single(), "auto": Auto(), "ddp": DDP()}
    monkeypatch.setattr(module.components, "all_options", lambda group: options)
    job = resolved("model=linear", "device=cpu", "precision=bf16")
    climbed = [*rungs(job, 2, (), "mine")]
    assert climbed[1] == Rung("mine", ("strategy=mine", "launcher=spawn", "launcher.ranks=2"))
    assert climbed[-1] == Rung("alone", ("strategy=alone", "launcher.ranks=1"))
    assert [rung.name for rung in climbed].count("mine") == 1
    assert [rung.name for rung in rungs(job, 2, (), "ddp")][1] == "DataParallel", "it is one of the tutorials"


ROW = {"rung": "one device", "img_per_s": 100.0, "spread": None, "speed_up": None, "efficiency": None}
ROW |= {"communication": None, "memory_gb": None, "top1": 90.0, "difference": 0.0, "losses": {1: 2.0}, "lines": 0}


@pytest.mark.parametrize(
    ("form", "repeats", "often"), [("table", 3, "3 times"), ("table", 1, "once"), ("json", 3, "")]
)
def test_a_ladder_says_what_it_climbs_and_keeps_its_line(
    form: str,
    repeats: int,
    often: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Any] = []

    def rows_of(ledger: Ledger, climbed: Any, number: int, gpus: int | None) -> list[dict[str, Any]]:
        calls.append((number, gpus))
        return [{**ROW, "change": "", "reason": ""}]

    monkeypatch.setattr(module, "climb", lambda *facts: calls.append(facts))
    monkeypatch.setattr(module, "_rows", rows_of)
    monkeypatch.chdir(tmp_path)
    words = (*JOB, "device=cpu", f"output_root={tmp_path}")
    climb(*words[len(JOB) + 1 :], repeats=repeats, form=form)
    (folder,) = (tmp_path / "ladders").iterdir()
    (ledger, climbed, number, of_job, job), rows = calls
    assert (ledger.folder, [rung.name for rung in climbed], number) == (folder, ["one device", "DDP"], repeats)
    assert (of_job, job.name, rows) == (words, "tiny", (repeats, None))
    identity = Ledger(folder).identity()
    assert identity.words == ("ladder", *words, "--ranks=2", f"--repeat={repeats}", "--only=ddp")
    assert (identity.swept, identity.figure) == (("repeat", "rung"), "top1")
    assert identity.base == {"job": [*words], "ranks": 2}
    assert re.fullmatch(r"tiny-[0-9a-f]{8}", folder.name)
    out = capsys.readouterr().out
    if form == "json":
        without_losses = {key: value for key, value in ROW.items() if key != "losses"}
        assert json.loads(out) == [{**without_losses, "change": "", "reason": ""}]
    else:
        assert out.splitlines()[:3] == [
            f"2 setups, {often} each: ladders/{folder.name}",
            "  one device            strategy=single launcher.ranks=1",
            "  DDP                   strategy=ddp launcher=spawn launcher.ranks=2",
        ]
        assert out.splitlines()[-1].split() == ["picture", f"ladders/{folder.name}/ladder.svg"]
    assert (folder / "ladder.svg").is_file()
    assert not (folder / "lock").exists(), "another ladder may begin"


def test_a_ladder_of_other_ranks_is_another_one_and_of_one_setup_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "climb", lambda *facts: None)
    monkeypatch.setattr(module, "_rows", lambda *facts: [{**ROW, "change": "", "reason": ""}])
    monkeypatch.setattr(module.host, "cores", lambda: 8)
    options: dict[str, Any] = {"only": "one-device", "scripts": [], "form": "table"}
    words = [*JOB, "device=cpu", f"output_root={tmp_path}"]
    for ranks, repeats in ((None, 1), (2, 1), (2, 100), (8, 1)):
        ladder(words, ranks=ranks, repeats=repeats, **options)
        assert capsys.readouterr().out.startswith("1 setup, ")
    lines = [Ledger(folder).identity().words[-3:] for folder in (tmp_path / "ladders").iterdir()]
    own = [("--ranks=2", "--repeat=100", "--only=one-device"), ("--ranks=8", "--repeat=1", "--only=one-device")]
    assert sorted(lines) == own, "more repeats go on with the same ladder"
    for wrong, says in (
        ({"ranks": 9, "repeats": 1}, "--ranks is 9, expected from 2 to 8 on this machine: --ranks=8"),
        ({"ranks": 2, "repeats": 101}, "--repeat is 101, expected from 1 to 100: --repeat=3"),
    ):
        with pytest.raises(InputError, match=f"^{says}$"):
            ladder(words, **wrong, **options)
    monkeypatch.setattr(module.host, "cores", lambda: 1)
    ladder(words, ranks=None, repeats=1, **options)
    assert capsys.readouterr().out.startswith("1 setup, "), "two ranks share a core"


def test_a_script_is_where_it_was_when_the_ladder_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module, "climb", lambda *facts: calls.append(facts))
    monkeypatch.setattr(module, "_rows", lambda *facts: [{**ROW, "change": "", "reason": ""}])
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCRIPT)
    climb(f"output_root={tmp_path}", scripts=[Path("mine.py")], only="mine")
    ((ledger, (_, rung), *_),) = calls
    assert rung.script == tmp_path / "mine.py"
    assert f"--script={tmp_path / 'mine.py'}" in ledger.identity().words


def test_the_progress_of_a_ladder_counts_its_runs_done_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, steps = Ledger(tmp_path), list[Any]()
    ledger.create(Identity(swept=("rung", "repeat")))

    @contextmanager
    def shown(*facts: Any) -> Iterator[Callable[[int], None]]:
        steps.append(facts)
        yield steps.append

    def run_rung(ledger: Ledger, rung: Rung, record: Record, command: list[str]) -> Record:
        RunDir.at(ledger.folder / record.folder).write_summary(status="completed")
        return ledger.end(record, State.done)

    monkeypatch.setattr(module, "progress", shown)
    monkeypatch.setattr(module, "run_rung", run_rung)
    rungs_to_climb = [Rung("one device"), Rung("DDP", ("strategy=ddp",))]
    for repeats in (1, 2):
        module.climb(ledger, rungs_to_climb, repeats, (), resolved("model=linear"))
    assert steps == [("climbing", 2), 1, 1, ("climbing", 4), 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], ["experiment=mnist_tutorial"]),
        (["strategy=zero", "strategy.x=1", "launcher=spawn", "launcher.ranks=4", "launcher.nodes=2"], None),
        (
            ["logger=[]", "repro=strict", "telemetry.report=auto", "sweep.retry=true", "output_root=a"],
            ["output_root=a"],
        ),
        (["launcher.threads=2", "seed=3"], ["launcher.threads=2", "seed=3"]),
    ],
)
def test_a_ladder_takes_the_line_of_a_run_without_what_its_rungs_set(
    typed: list[str], words: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planned(Exception):
        pass

    def planned(words: list[str]) -> None:
        raise Planned(words)

    monkeypatch.setattr(module, "job_of", planned)
    monkeypatch.setattr(module, "composed", lambda words: {})
    monkeypatch.setattr(module.commands, "latest_starts", lambda values: {})
    monkeypatch.setattr("lockstep.config.composition._compose", lambda *words, **options: None)
    with pytest.raises(Planned) as raised:
        ladder(typed, ranks=None, repeats=1, only=None, scripts=[], form="table")
    words = ["experiment=mnist_tutorial"] if words is None else words
    assert raised.value.args == ([*words, "strategy=single", "launcher.ranks=1"],)


def test_all_rungs_start_from_the_run_that_was_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planned(Exception):
        pass

    def planned(words: list[str]) -> None:
        raise Planned(words)

    def starts(values: dict[str, Any]) -> dict[str, str]:
        assert (values["init_from"], values["name"]) == ("latest", "ladder")
        return {"init_from": "runs/newest"}

    monkeypatch.setattr(module, "job_of", planned)
    monkeypatch.setattr(module.commands, "latest_starts", starts)
    with pytest.raises(Planned) as raised:
        ladder(["model=linear", "init_from=latest"], ranks=None, repeats=1, only=None, scripts=[], form="table")
    words = ["model=linear", "init_from=runs/newest", "strategy=single", "launcher.ranks=1"]
    assert raised.value.args == (words,)


def test_a_row_has_the_gpus_of_a_setup_with_ranks_and_the_turns_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"one": (100.0, 100.0), "DDP": (300.0, 320.0), "half": (None, 50.0), "none": (None, None)}
    rates["last"] = (200.0, 200.0)
    turns = {name: iter(of) for name, of in rates.items()}

    def run(ledger: Ledger, rung: Rung, record: Any, command: list[str]) -> Any:
        if (rate := next(turns[rung.name])) is None:
            return ledger.end(record, State.failed, exit_code=70, error=f"error {record.number}")
        finished(ledger.folder / record.folder, rate, {1: 4.0})
        return ledger.end(record, State.done)

    monkeypatch.setattr(module, "run_rung", run)
    climbed, ledger = [Rung(name, ("launcher=spawn",) * (name == "DDP")) for name in rates], Ledger(tmp_path)
    ledger.create(Identity(swept=("rung",), words=("ladder",)))
    module.climb(ledger, climbed, 2, [], SimpleNamespace())  # type: ignore[arg-type]
    rows = module._rows(ledger, climbed, 2, 4)
    figures = ("img_per_s", "speed_up", "efficiency", "reason", "change")
    assert [[row[name] for name in figures] for row in rows] == [
        [100.0, 1.0, None, "", ""],
        [310.0, 3.1, pytest.approx(3.1 / 4), "", "launcher=spawn"],
        [50.0, None, None, "", ""],
        [None, None, None, "error 3", ""],
        [200.0, 2.0, None, "", ""],
    ]
    assert [row["efficiency"] for row in module._rows(ledger, climbed, 2, None)] == [None] * 5


def test_the_figures_of_several_turns_are_their_medians(tmp_path: Path) -> None:
    facts = ((100.0, 0.1, 90.0, 1e9), (200.0, 0.2, 91.0, 2e9), (900.0, 0.9, 99.0, 9e9))
    turns = [
        finished(
            tmp_path / str(number), rate, {1: 4.0}, time={"communication": share}, objective=top1, gpu_memory=size
        )
        for number, (rate, share, top1, size) in enumerate(facts)
    ]
    row = row_of("DDP", turns, None, devices=None, lines=0)
    names = ("img_per_s", "spread", "communication", "top1", "memory_gb", "speed_up")
    assert [row[name] for name in names] == [200.0, 400.0, 0.2, 91.0, 2.0, 1.0]
    some = [turns[0], finished(tmp_path / "other", 100.0, {}, gpu_memory=3e9, objective=None, time=None)]
    row = row_of("DDP", some, None, devices=None)
    assert [row[name] for name in ("communication", "top1", "memory_gb")] == [0.1, 90.0, 2.0], "of the known ones"
