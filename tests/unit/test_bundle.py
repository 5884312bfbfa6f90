"""`lockstep report --bundle`: what is in the zip of a run or a sweep, and what no file of it has."""

import json
import os
import re
import zipfile
from pathlib import Path

import pytest
import yaml

from helpers import ROOT, forked, train
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.report import bundle
from lockstep.report.redaction import SHORTEST_SECRET, redacted, secrets_in
from lockstep.report.report import report

SECRET = "Zq9vT4mK+x/7Lw2p"
TOKEN = "hf_" + "Ab3" * 8
# Lines of logs, and texts in values: places where people and programs put secrets.
LINES = (
    f"logger.wandb.api_key={SECRET}",
    f"'logger.wandb.api_key=correct horse {SECRET}'",
    f"WANDB_API_KEY={SECRET} python train.py",
    f"env: WANDB_API_KEY: {SECRET}",
    f'{{"api_key": "{SECRET}", "epochs": 3}}',
    f"{{'password': 'it''s {SECRET}'}}",
    f'said "{{\\"token\\": \\"{SECRET}\\"}}"',
    f"{{api_key:{SECRET},epochs:3}}",
    f"password: correct horse {SECRET} staple",
    f"db_pwd = {SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"curl -H 'Cookie: session={SECRET}'",
    f"accelerate launch --api-key {SECRET} train.py",
    f"bearer {SECRET}",
    f"logger.mlflow.tracking_uri=http://me:{SECRET}@mlflow.example:5000",
    f"https://{SECRET}@github.com/me/project.git",
    f"https:/me:{SECRET}@host/x",
    f"https://bucket.example/data.tar?X-Amz-Signature={SECRET}&x=1",
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    "the token is " + TOKEN,
    f"image 3, photos/{SECRET}, b.jpg, cannot be decoded (truncated)",
    f"No such file or directory: '/data/Jane {SECRET}/scan 1.png'",
    f"/data/{SECRET}.TIFF is small",
)
# Values of a config.
VALUES = {
    "notes": f"my key: password={SECRET}",
    "tags": [f"api_key={SECRET}", "plain"],
    "logger": {
        "mine": {
            "api_keys": [SECRET],
            "credentials": {"user": SECRET},
            "passphrase": f"{'correct horse ' * 9}{SECRET}",
        }
    },
    "password": 123456789012,
    "uri": f"postgresql://me:{SECRET}@host/db",
}


def texts(folder: Path) -> dict[str, str]:
    """The files of the one zip in a folder."""
    (target,) = folder.glob("*.zip")
    with zipfile.ZipFile(target) as zipped:
        assert zipped.testzip() is None
        return {name: zipped.read(name).decode() for name in zipped.namelist()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the command, apart from the run's."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a run with a file of each kind."""
    run = RunDir.at(tmp_path / "runs" / "one")
    run.code_diff.write_text(SECRET)
    for path in (run.command, run.log, run.rank_log(0), run.logs / "slurm-7.log", run.metrics, run.gpu):
        path.write_text("a line\n")
    for path in (run.config, run.composed, run.hydra / "hydra.yaml"):
        path.write_text(yaml.safe_dump({"seed": 0}))
    run.overrides.write_text(yaml.safe_dump(["seed=0"]))
    run.incident.mkdir()
    for path in (run.environment, run.summary, run.rank_error(1), run.incident / "incident.json"):
        path.write_text("{}")
    return run


@pytest.mark.slow
def test_the_zip_of_a_failed_run_has_its_texts_and_nothing_else(here: Path) -> None:
    job = ("model.width=8", "optimizer.lr=1000000", "launcher.ranks=2", "telemetry.interval=1", "steps=9")
    assert train(*job, cwd=here).code == 76
    run = RunDir(here / "outputs" / (here / "outputs" / "latest").read_text().strip())
    before = {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")}
    done = forked("lockstep", "report", "--bundle", "latest", cwd=here)
    assert done.code == 0, done.err
    written = texts(here)
    names = ["command.txt", "config.yaml", "env.json", "metrics.jsonl", "summary.json", "train.log"]
    names += [f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")] + ["incident/incident.json"]
    names += [f"logs/rank{rank}.{kind}" for rank in (0, 1) for kind in ("log", "error.json")]
    assert sorted(written) == sorted(names)
    for name, text in written.items():
        assert text == (run.path / name).read_text().replace(str(Path.home()), "~")
        assert re.search(rf"^ *\d+ k?B  {re.escape(name)}$", done.out, re.M), done.out
    assert f"wrote lockstep-{run.path.name}.zip" in " ".join(done.out.split())
    assert {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_no_file_has_a_secret_or_the_name_of_an_image(
    here: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", SECRET[::-1])
    lines = "\n".join(LINES) + f"\nprinted {SECRET[::-1]} and {SECRET}!\n"
    for path in bundle._texts_of(run.path):
        match path.suffix:
            case ".yaml" if path != run.overrides:
                path.write_text(yaml.safe_dump(VALUES))
            case ".yaml":
                path.write_text(yaml.safe_dump([*LINES]))
            case ".json":
                path.write_text(json.dumps({"error": lines, "overrides": LINES, **VALUES}))
            case _:
                path.write_text(lines)
    report(str(run.path), bundle=True)
    for name, text in texts(here).items():
        leaked = [
            line for line in text.splitlines() if any(part in line for part in (SECRET, SECRET[::-1], TOKEN, "Jane"))
        ]
        assert not leaked, name
        assert "123456789012" not in text


@pytest.mark.parametrize("line", LINES)
def test_a_secret_is_known_by_its_place_alone(line: str) -> None:
    text = redacted(f"before\nlr 0.1 {line}\nafter\n", ())
    assert SECRET not in text
    assert TOKEN not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_homes_and_the_user_are_a_tilde(here: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/homes/aLice")
    lines = [
        "/data/homes/aLice/x.py",
        "/home/bob/.venv/lib",
        "/Users/carol/y",
        "/scratch/alice/z",
        "alice's run",
        "malice",
        "/x/data/homes/aLiceX",
    ]
    run.log.write_text("\n".join(lines))
    (place := run.path.parent / "alice-1").symlink_to(run.path)
    report(str(place), bundle=True)
    assert texts(here)["train.log"].splitlines() == [
        "~/x.py",
        "~/.venv/lib",
        "~/y",
        "/scratch/~/z",
        "~'s run",
        "malice",
        "/x/data/homes/aLiceX",
    ]
    assert [path.name for path in here.iterdir()] == ["lockstep-one.zip"]


def test_our_own_configs_have_nothing_to_hide() -> None:
    for path in (ROOT / "conf").rglob("*.yaml"):
        text = path.read_text()
        hidden = [
            line
            for line, shown in zip(text.split("\n"), redacted(text, ()).split("\n"), strict=True)
            if line != shown
        ]
        assert not [line for line in hidden if not line.lstrip().startswith("#")], path


def test_no_link_is_followed(here: Path, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere := tmp_path / "private").mkdir()
    for name in ("rank0.log", "incident.json", "000.log", "notes"):
        (elsewhere / name).write_text("private")
    for path, target in (
        (run.log, "notes"),
        (run.rank_log(7), "notes"),
        (run.path / "jobs", "."),
        (run.gpu, "absent"),
    ):
        path.unlink(missing_ok=True)
        path.symlink_to(elsewhere / target)
    (run.incident / "incident.json").unlink()
    run.incident.rmdir()
    run.incident.symlink_to(elsewhere)
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    report(str(run.path), bundle=True)
    assert not [name for name, text in texts(here).items() if "private" in text]
    shown = capsys.readouterr().out
    assert " left out  train.log is a symbolic link" in shown
    assert " left out  metrics.jsonl is a pipe" in shown


def test_a_name_with_control_characters_is_escaped(
    here: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.logs / "rank0\n\x1b[2Jwrote all.log").write_text("a line")
    report(str(run.path), bundle=True)
    assert r"logs/rank0\n\x1b[2Jwrote all.log" in texts(here)
    assert "\x1b" not in capsys.readouterr().out


def test_a_long_log_has_its_first_and_last_lines(here: Path, run: RunDir) -> None:
    run.log.write_text("".join(f"line {number:07}\n" for number in range(200_000)))
    report(str(run.path), bundle=True)
    lines = texts(here)["train.log"].splitlines()
    assert (lines[0], lines[-1]) == ("line 0000000", "line 0199999")
    (cut,) = [line for line in lines if "left out" in line]
    assert len(lines) < 90_000
    assert int(cut.split()[0][1:].replace(",", "")) == 13 * (200_000 - len(lines) + 1)


def test_a_zip_is_not_overwritten(here: Path, run: RunDir) -> None:
    (target := here / "lockstep-one.zip").write_text("mine")
    with pytest.raises(InputError, match=r"lockstep-one\.zip exists; remove it"):
        report(str(run.path), bundle=True)
    assert target.read_text() == "mine"
    assert [*here.iterdir()] == [target]


def test_a_sweep_is_bounded_and_its_failed_jobs_come_first(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundle, "BUNDLE_LIMIT", 150_000)
    (jobs := tmp_path / "sweep" / "jobs").mkdir(parents=True)
    (jobs.parent / "sweep.json").write_text("{}")
    for number in range(4):
        (jobs / f"{number:03}.log").write_text("a line\n")
        job = RunDir.at(jobs.parent / f"{number:03}-x={number}")
        job.overrides.write_text(f"- x={number}\n")
        job.log.write_text("a line\n" * 20_000)
        job.start_summary()
        job.write_summary(status="failed" if number == 3 else "completed")
    report(str(jobs.parent), bundle=True)
    written = texts(here)
    assert {"sweep.json", "jobs/000.log", "jobs/003.log", "003-x=3/train.log", "000-x=0/train.log"} <= written.keys()
    assert len(written["003-x=3/train.log"]) < 66_000
    assert "left out  002-x=2/train.log does not fit: all files may have 0.1 MB" in capsys.readouterr().out


def test_a_secret_of_any_job_is_in_no_file_of_a_sweep(here: Path, tmp_path: Path) -> None:
    (jobs := tmp_path / "sweep" / "jobs").mkdir(parents=True)
    (jobs.parent / "sweep.json").write_text("{}")
    for number in range(3):
        (jobs / f"{number:03}.log").write_text(f"printed hidden{number}\n")
        job = RunDir.at(jobs.parent / f"{number:03}-x={number}")
        job.overrides.write_text(yaml.safe_dump([f"+my.token=hidden{number}"]))
        job.log.write_text("printed hidden0, hidden1, hidden2\n")
        job.start_summary()
    report(str(jobs.parent), bundle=True)
    assert not [name for name, text in texts(here).items() if "hidden" in text]


@pytest.mark.parametrize("length", [SHORTEST_SECRET - 1, SHORTEST_SECRET, SHORTEST_SECRET + 1])
def test_a_secret_is_known_from_its_shortest_length_on(length: int) -> None:
    secret = "x" * length
    expected = [secret] * (length >= SHORTEST_SECRET)
    for values in ({"api_key": secret}, {"nested": [{"password": secret}]}, [f"my.token={secret}"]):
        assert [*secrets_in([values])] == expected


@pytest.mark.parametrize("only", ["logs/rank0.log", "command.txt", ".hydra/overrides.yaml", "summary.json"])
def test_a_run_that_has_not_come_far_has_a_zip(here: Path, run: RunDir, only: str) -> None:
    for path in bundle._texts_of(run.path):
        if path != run.path / only:
            path.unlink()
    report(str(run.path), bundle=True)
    assert [*texts(here)] == [only]


def test_damaged_files_are_in_it_as_they_are(here: Path, run: RunDir) -> None:
    for path in bundle._texts_of(run.path):
        path.write_bytes(b"\xff\x00{: \x1b[")
    report(str(run.path), bundle=True)
    assert {*texts(here).values()} == {r"\xff\x00{: \x1b["}


def test_the_forms_of_issues_are_whole_and_ask_for_the_zip() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.iterdir() if path.stem != "config"}
    for form in forms.values():
        assert {"name", "description", "body"} <= form.keys()
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
    assert "`lockstep report --bundle RUN`" in forms["bug"]["body"][2]["attributes"]["description"]


def test_what_is_no_run_has_no_zip(here: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is neither a run nor a sweep"):
        report(str(tmp_path), bundle=True)
    assert not [*here.iterdir()]


def test_the_zip_of_a_run_has_each_of_its_texts_in_order_and_no_lock(here: Path, run: RunDir) -> None:
    run.lock.write_text("{}")
    report(str(run.path), bundle=True)
    names = [".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "command.txt", "config.yaml"]
    names += ["env.json", "gpu.jsonl", "incident/incident.json", "logs/rank0.log", "logs/rank1.error.json"]
    names += ["logs/slurm-7.log", "metrics.jsonl", "summary.json", "train.log"]
    assert [*texts(here)] == names


def test_the_records_and_logs_of_the_jobs_of_a_sweep_are_in_its_zip(here: Path, tmp_path: Path) -> None:
    (jobs := tmp_path / "sweep" / "jobs").mkdir(parents=True)
    (jobs.parent / "sweep.json").write_text("{}")
    for name in ("000.json", "000.log", "000.damaged"):
        (jobs / name).write_text("{}")
    report(str(jobs.parent), bundle=True)
    assert [*texts(here)] == ["jobs/000.json", "jobs/000.log", "sweep.json"]


def test_a_link_in_the_place_of_the_zip_is_not_followed(here: Path, run: RunDir, tmp_path: Path) -> None:
    (here / "lockstep-one.zip").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"lockstep-one\.zip exists"):
        report(str(run.path), bundle=True)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("limit", [20, 21, 100])
def test_a_text_up_to_its_limit_is_whole(limit: int, tmp_path: Path) -> None:
    (path := tmp_path / "log").write_text("one\ntwo\nthree\nfour\n.")
    shown = bundle._shortened(path, limit)
    assert (shown == path.read_text()) == (limit >= 20)
    path.write_text("first\n" + "x" * 50 + "\nlast\n")
    assert bundle._shortened(path, 20) == "first\n[51 bytes in the middle are left out]\nlast\n"


@pytest.mark.parametrize(
    "prefix", ["ghp_", "github_pat_", "glpat-", "hf_", "sk-", "wandb_v1_", "xoxb-", "AKIA", "eyJ"]
)
@pytest.mark.parametrize("length", [15, 16])
def test_a_token_is_known_by_its_beginning_and_its_length(prefix: str, length: int) -> None:
    text = f"printed {prefix}{'a' * length} here"
    assert redacted(text, ()) == (text if length < 16 else "printed *** here")


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPEG", ".heic", ".tif", ".TIFF", ".npy", ".webp"])
def test_the_name_of_an_image_of_any_kind_is_hidden(suffix: str) -> None:
    assert "Jane" not in redacted(f"cannot read Jane Doe{suffix} here", ())
    assert redacted("see Jane.txt", ()) == "see Jane.txt"


@pytest.mark.parametrize(
    ("home", "text", "shown"),
    [
        ("/", "/a/b and root", "/a/b and root"),
        ("/root", "/root/x of root", "~/x of root"),
        ("/data/a+b", "/data/a+b/x of a+b, /data/aab/x", "~/x of ~, /data/aab/x"),
        ("/data/eve", "/data/eve-2/x, /data/eve_2, x/data/eve, Eve1", "/data/~-2/x, /data/~_2, x/data/~, Eve1"),
    ],
)
def test_only_the_home_and_the_name_of_this_user_are_hidden(
    home: str, text: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", home)
    assert redacted(text, ()) == shown


def test_the_parts_of_a_secret_are_those_between_spaces_quotes_and_backslashes() -> None:
    values = {"PASSWORD": "abcdef \"ghijkl' short mnopqr\\stuvwx", "a": ["my.TOKEN=secret1", "plain=secret2"]}
    values |= {"credentials": {"user": "somebody"}, "authors": "everybody"}  # type: ignore[dict-item]
    assert [*secrets_in(values)] == ["abcdef", "ghijkl", "mnopqr", "stuvwx", "secret1", "somebody"]


def test_a_log_of_a_run_or_a_sweep_is_whole_where_one_of_a_job_is_cut(
    here: Path, run: RunDir, tmp_path: Path
) -> None:
    text = "a line\n" * 10_000  # 70 kB
    run.log.write_text(text)
    report(str(run.path), bundle=True)
    assert texts(here)["train.log"] == text
    (here / "lockstep-one.zip").unlink()
    (jobs := tmp_path / "sweep" / "jobs").mkdir(parents=True)
    (jobs.parent / "sweep.json").write_text("{}")
    (jobs / "000.log").write_text(text)
    job = RunDir.at(jobs.parent / "000-a")
    job.overrides.write_text("[]")
    for lines, is_whole in ((9_000, True), (10_000, False)):
        job.log.write_text("a line\n" * lines)
        report(str(jobs.parent), bundle=True)
        written = texts(here)
        assert (written["000-a/train.log"] == job.log.read_text()) == is_whole
        assert written["jobs/000.log"] == text, "it is a file of the sweep itself"
        (here / "lockstep-sweep.zip").unlink()


@pytest.mark.parametrize("spare", [0, -1])
def test_all_files_may_have_the_whole_limit_and_a_smaller_one_may_still_fit(
    here: Path, run: RunDir, spare: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in bundle._texts_of(run.path):
        path.unlink()
    for path, size in ((run.config, 500), (run.metrics, 1500), (run.log, 300)):
        path.write_text("x" * size)
    monkeypatch.setattr(bundle, "BUNDLE_LIMIT", 2300 + spare)
    report(str(run.path), bundle=True)
    shown = capsys.readouterr().out
    assert [*texts(here)] == ["config.yaml", "metrics.jsonl", *["train.log"] * (spare == 0)]
    assert re.search(r"^    500 B  config\.yaml$", shown, re.MULTILINE)
    left_out = [" left out  train.log does not fit: all files may have 2 kB"] * (spare != 0)
    assert re.findall(r"^ left out .*$", shown, re.MULTILINE) == left_out
    size = (here / "lockstep-one.zip").stat().st_size
    assert f"wrote lockstep-one.zip, {size} B: no data, weights" in " ".join(shown.split())
    monkeypatch.setattr(bundle, "BUNDLE_LIMIT", 1000)
    (here / "lockstep-one.zip").unlink()
    report(str(run.path), bundle=True)
    assert [*texts(here)] == ["config.yaml", "train.log"], "what does not fit takes no room"


def test_a_long_text_is_cut_between_lines_and_counts_what_is_left_out(tmp_path: Path) -> None:
    (path := tmp_path / "log").write_text("".join(f"{number:03}\n" for number in range(100)))
    lines = bundle._shortened(path, 40).splitlines()
    assert lines == [
        "000",
        "001",
        "002",
        "003",
        "004",
        "[364 bytes in the middle are left out]",
        "096",
        "097",
        "098",
        "099",
    ]
    path.write_text("x" * 99 + "\n" + "y" * 99)
    assert bundle._shortened(path, 40) == "[199 bytes in the middle are left out]\n", "no line is whole"


def test_a_job_that_is_done_comes_behind_those_that_are_not(here: Path, tmp_path: Path) -> None:
    (jobs := tmp_path / "sweep" / "jobs").mkdir(parents=True)
    (jobs.parent / "sweep.json").write_text("{}")
    for number, status in enumerate(("completed", "stopped", "completed", "failed")):
        job = RunDir.at(jobs.parent / f"{number:03}-a")
        job.overrides.write_text("[]")
        job.write_summary(status=status)
    report(str(jobs.parent), bundle=True)
    names = [name.partition("/")[0] for name in texts(here) if name.endswith("summary.json")]
    assert names == ["001-a", "003-a", "000-a", "002-a"]


NAMES = (
    "api_key",
    "APIKEY",
    "access-key",
    "secret_key",
    "private_key",
    "accountkey",
    "signing_key",
    "token",
    "my_secret",
)
NAMES += ("passwd", "passphrase", "db_pass", "db_pwd", "credentials", "cookie", "auth", "authorization")


@pytest.mark.parametrize("name", NAMES)
def test_a_key_of_any_kind_of_secret_hides_its_value(name: str) -> None:
    assert redacted(f"say {name}={SECRET} now", ()) == f"say {name}=*** now"
    assert [*secrets_in({name: SECRET, "size": "plain text"})] == [SECRET]
    assert [*secrets_in([f"my.{name}={SECRET}"])] == [SECRET]
    for plain in ("null", "true", "False", "none"):
        assert redacted(f"{name}: {plain}", ()) == f"{name}: {plain}"


@pytest.mark.parametrize("text", ["authors=all", "key=value", "keyboard: us", "compass=north", "path_password_free"])
def test_words_that_only_look_like_secrets_stay(text: str) -> None:
    assert redacted(text, ()) == text
