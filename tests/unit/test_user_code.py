"""The code of the user that a run records: hashes of its files, the state of its repository, and the diff."""

from __future__ import annotations

import importlib
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.config import extensions
from lockstep.config.extensions import Extension
from lockstep.core.run import Code, Run
from lockstep.core.run_dir import RunDir
from lockstep.runtime import user_code
from lockstep.runtime.user_code import UserCode, changes

MODEL = "import torch\n\nACTIVATION = torch.nn.ReLU\n"
AUTHOR = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *AUTHOR, *words], check=True, capture_output=True, text=True)
    return done.stdout


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def committed(folder: Path) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return git(folder, "rev-parse", "HEAD").strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a subfolder of a repository, whose only commit has it."""
    git(tmp_path, "init", "-q")
    folder = written(tmp_path / "src" / "mine", {"__init__.py": "", "model.py": MODEL, "conf/model/x.yaml": "a: 1\n"})
    committed(tmp_path)
    return folder


def read(folder: Path) -> UserCode:
    user_code.read.cache_clear()
    return user_code.read(folder)


def changed(folder: Path, before: UserCode) -> str:
    return changes({folder.name: before.facts}, {folder.name: read(folder)}).get(folder.name, "")


def test_a_record_names_the_commit_the_place_and_the_files(package: Path, tmp_path: Path) -> None:
    facts = read(package).facts
    assert facts["git"] == git(tmp_path, "rev-parse", "HEAD").strip()
    assert (facts["place"], facts["git_changes"]) == ("src/mine", False)
    assert [*facts["files"]] == ["__init__.py", "model.py"]
    assert str(tmp_path) not in json.dumps(facts)
    assert read(package).diff == b""


def test_the_extensions_whose_classes_a_config_names_are_recorded(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {
        "mine": package,
        **{name: written(tmp_path / name, {"__init__.py": name}) for name in ("other", "idle")},
    }
    active = [Extension(name, "installed by it 1.0", folder) for name, folder in folders.items()]
    monkeypatch.setattr(extensions, "active", lambda: active)
    config = {"model": {"_target_": "mine.model.Net"}, "metric": {"f1": {"_target_": "other.F1"}}, "name": "idle.Net"}
    codes = user_code.code_of({**config, "loss": {"_target_": "lockstep.losses.CrossEntropy"}})
    assert [*codes] == ["mine", "other"]
    assert codes["mine"].facts["sha256"] != codes["other"].facts["sha256"]
    assert {*user_code.code_here(["lockstep", "json", "no_such"])} == {*folders}
    namesake = written(tmp_path / "old" / "mine", {"__init__.py": ""})
    monkeypatch.setitem(sys.modules, "mine", ModuleType("mine"))
    monkeypatch.setattr(sys.modules["mine"], "__path__", [str(namesake)], raising=False)
    assert user_code.code_here(["mine"])["mine"].facts["place"] == "src/mine", "that of the extension"


def test_the_diff_restores_the_code(package: Path, tmp_path: Path) -> None:
    written(package, {"model.py": MODEL.replace("ReLU", "GELU") + "no newline", "new/net.py": "x = 1\r\n"})
    code = read(package)
    assert code.facts["git_changes"] is True
    copy = tmp_path.parent / f"{tmp_path.name}-copy"
    git(tmp_path, "clone", "-q", str(tmp_path), str(copy))
    (copy / "code.diff").write_bytes(b"# mine\n" + code.diff)
    git(copy, "apply", "code.diff")
    assert read(copy / "src" / "mine").facts["sha256"] == code.facts["sha256"]


CHANGES: dict[str, tuple[dict[str, str], str]] = {
    "another activation": ({"model.py": MODEL.replace("ReLU", "GELU")}, "model.py"),
    "a comment": ({"model.py": MODEL + "# better\n"}, "model.py"),
    "a new file": ({"net.py": "x = 1\n"}, "net.py (new)"),
    "other line ends": ({"model.py": MODEL.replace("\n", "\r\n")}, ""),
    "a config": ({"conf/model/x.yaml": "a: 2\n"}, ""),
    "data": ({"data/cat/1.png": "x", ".env": "TOKEN=x", "notes.txt": "x"}, ""),
    "a program between data": ({"data/cat/dog/prepare.py": "x"}, ""),
    "many files": (
        {f"{name}.py": "x" for name in "abcdef"},
        "a.py (new), b.py (new), c.py (new), d.py (new), 2 more",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("has_git", [True, False])
def test_other_python_files_are_other_code_in_a_repository_or_not(package: Path, change: str, has_git: bool) -> None:
    if not has_git:
        (package.parents[1] / ".git").rename(package.parents[1] / "old")
    before = read(package)
    files, sentence = CHANGES[change]
    written(package, files)
    assert changed(package, before) == sentence
    assert (read(package).facts["git"] == "unknown") is not has_git


def test_a_renamed_file_is_a_new_one_and_one_that_is_gone(package: Path) -> None:
    before = read(package)
    (package / "model.py").rename(package / "net.py")
    assert changed(package, before) == "model.py (gone), net.py (new)"


def test_no_secret_is_in_the_diff(package: Path, tmp_path: Path) -> None:
    written(tmp_path, {".gitignore": "local.py\n", "src/mine/.env": "A=secret\n", "elsewhere.py": "a = 1\n"})
    committed(tmp_path)
    written(package, {"local.py": "A = 'secret'\n", ".env": "B=secret\n", "model.py": "x = 1\n"})
    written(tmp_path, {"elsewhere.py": "secret = 1\n", "other.py": "secret = 2\n"})
    diff = read(package).diff
    assert b"+x = 1" in diff
    assert b"secret" not in diff


def test_a_change_elsewhere_in_the_repository_is_known_without_its_content(package: Path, tmp_path: Path) -> None:
    written(tmp_path, {"elsewhere.py": "a = 1\n"})
    committed(tmp_path)
    before = read(package)
    written(tmp_path, {"elsewhere.py": "a = 2\n"})
    assert (read(package).facts["git_changes"], read(package).diff) == (True, b"")
    assert changed(package, before) == ""


@pytest.mark.parametrize("state", ["no commit", "ignored", "no git", "not of the user"])
def test_code_that_no_commit_has_is_known_by_its_hash(
    package: Path, tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = read(package).facts["sha256"]
    if state == "no commit":
        git(tmp_path, "update-ref", "-d", "HEAD")
    elif state == "ignored":
        git(tmp_path, "rm", "-rq", "--cached", ".")
        written(tmp_path, {".gitignore": "src\n"})
        committed(tmp_path)
    elif state == "no git":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(user_code, "git", lambda *words, **options: None)  # a repository of another owner
    facts = read(package).facts
    assert (facts["sha256"], facts["git"], facts["git_changes"], facts["place"]) == (digest, "unknown", "unknown", "")


def test_a_package_that_no_commit_has_yet_is_in_the_diff(package: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other", {"__init__.py": "x = 1\n"})
    assert b"+++ b/other/__init__.py\n@@ -0,0 +1 @@\n+x = 1\n" in read(other).diff


def test_a_long_diff_is_cut_and_says_so(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(package, {"large.py": "x = 1\n" * 20_000})
    assert b"# left out: src/mine/large.py is new, and its diff has 140," in read(package).diff
    written(package, {"model.py": "x = 1\n" * 200_000})
    diff = read(package).diff
    assert len(diff) < user_code.DIFF_LIMIT + 100
    assert diff.splitlines()[-1].startswith(b"# cut: the diff has 1,400,")


@pytest.mark.parametrize("more", [0, 1])
def test_a_new_file_is_in_the_diff_up_to_a_number_of_bytes(
    package: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    written(package, {"new.py": "x = 1\n"})
    own = read(package).diff
    monkeypatch.setattr(user_code, "NEW_FILE_LIMIT", len(own) - more)
    assert read(package).diff == (
        b"# left out: src/mine/new.py is new, and its diff has %d bytes\n" % len(own) if more else own
    )


def test_files_that_cannot_be_read_do_not_stop_a_run(package: Path) -> None:
    (package / "loop.py").symlink_to("loop.py")
    subprocess.run(["mkfifo", str(package / "pipe.py")], check=True)
    written(package, {"latin.py": ""})
    (package / "latin.py").write_bytes(b"# \xe9\n")
    (package / "model.py").write_bytes(b"# \xe9\x00\n")
    assert {"loop.py", "pipe.py", "latin.py"} <= {*read(package).facts["files"]}
    assert b"+# \xe9\n" in read(package).diff


def test_a_large_package_is_known_by_one_hash(package: Path) -> None:
    written(package, {f"part{number}.py": str(number) for number in range(user_code.FILES_LISTED)})
    before = read(package)
    assert before.facts["files"] == {}
    written(package, {"part7.py": "other"})
    assert changed(package, before) == "its files"


def started(run_dir: RunDir, package: Path, step: int) -> dict[str, Any]:
    """What `env.json` has after a run has begun after `step` with the present code."""
    facts = user_code.write_code(run_dir, {"mine": read(package)}, step)
    run_dir.environment.write_text(json.dumps(facts))
    return dict(facts)


def test_a_resumed_run_keeps_both_records(package: Path, tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path / "run")
    assert started(run_dir, package, 0)["earlier_code"] == []
    first = read(package).facts
    assert started(run_dir, package, 4)["earlier_code"] == [], "the same code"
    assert not run_dir.code_diff.exists()
    for step, text in ((6, "x = 1\n"), (9, "x = 2\n")):
        written(package, {"model.py": text})
        facts = started(run_dir, package, step)
    assert [(earlier["until_step"], earlier["package"]) for earlier in facts["earlier_code"]] == [
        (6, "mine"),
        (9, "mine"),
    ]
    without_files = {key: value for key, value in first.items() if key != "files"}
    assert facts["earlier_code"][0] == {"package": "mine", "until_step": 6, **without_files}
    assert facts["code"]["mine"]["sha256"] == read(package).facts["sha256"]
    diff = run_dir.code_diff.read_text()
    assert f"# mine after step 6, against commit {first['git']}\n" in diff
    assert "+x = 1" in diff
    assert "+x = 2" in diff


def test_code_that_trained_no_step_is_not_kept(package: Path, tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path / "run")
    started(run_dir, package, 0)
    written(package, {"model.py": "x = 1\n"})
    assert started(run_dir, package, 0)["earlier_code"] == []


def test_a_run_of_an_earlier_version_is_resumed_in_silence(package: Path, tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path / "run")
    run_dir.environment.write_text('{"extensions": {"mine": "named by train.py"}}')
    assert Run(run_dir.path).code is None
    assert changes(Run(run_dir.path).code or {}, {"mine": read(package)}) == {}
    assert started(run_dir, package, 3)["earlier_code"] == [{"package": "mine", "until_step": 3, "sha256": None}]


@pytest.mark.parametrize("text", ["[]", '{"code": 1}', '{"code": {"mine": 1}}', '{"code": {"mine": {"files": 1}}}'])
def test_a_record_of_somebody_else_may_be_anything(package: Path, tmp_path: Path, text: str) -> None:
    run_dir = RunDir.at(tmp_path / "run")
    run_dir.environment.write_text(text)
    assert changes(Run(run_dir.path).code or {}, {"mine": read(package)}) == {}
    earlier: Code = {"files": {"a.py": 1}, "sha256": []}
    assert "a.py (gone)" in changes({"mine": earlier}, {"mine": read(package)})["mine"]


SETTINGS = (
    "color.ui always",
    "diff.noprefix true",
    "diff.relative true",
    "diff.external false",
    "diff.x.textconv false",
)


def test_no_setting_of_the_users_git_changes_a_diff(package: Path, tmp_path: Path) -> None:
    written(package, {"model.py": "x = 1\n", "new/net.py": "y = 1\n"})
    expected = read(package).diff
    assert b"+++ b/src/mine/model.py\n" in expected
    assert b"+++ b/src/mine/new/net.py\n" in expected
    for setting in SETTINGS:
        git(tmp_path, "config", *setting.split())
    written(tmp_path, {".git/info/attributes": "*.py diff=x\n"})
    assert read(package).diff == expected
    git(tmp_path, "add", "src/mine/model.py")
    assert read(package).diff == expected, "a change is one before and after it is staged"


@pytest.mark.parametrize("name", ["model.py", "a[1]*.py", "é.py"])
def test_a_module_is_its_own_file_alone_whatever_its_name(name: str, package: Path, tmp_path: Path) -> None:
    own = written(tmp_path / "src", {name: "x = 1\n", "a1b.py": "y = 1\n"}) / name
    committed(tmp_path)
    own.write_text("x = 2\n")
    written(tmp_path / "src", {"a1b.py": "y = 2\n"})
    code = read(own)
    assert [*code.facts["files"]] == [name]
    assert (b"+x = 2" in code.diff, b"+y = 2" in code.diff) == (True, False)
    assert code.facts["place"] == "src"
    whole = changes({"m": code.facts}, {"m": UserCode({**code.facts, "sha256": "other"}, b"")})
    assert whole == {"m": ""}


def test_a_new_module_is_in_the_diff_and_a_folder_that_is_no_package_is_not(package: Path, tmp_path: Path) -> None:
    own = written(tmp_path, {"train.py": "x = 1\n"}) / "train.py"
    assert b"+++ b/train.py\n" in read(own).diff
    assert read(own).facts["git_changes"] is True
    written(tmp_path, {"a[1].py": "x = 1\n", "a1.py": "secret = 1\n"})
    assert b"secret" not in read(tmp_path / "a[1].py").diff
    package.joinpath("notes.txt").touch()
    assert read(package).facts["git_changes"] is False, "a new file that is no code"


def test_a_diff_is_cut_behind_the_most_bytes_and_a_large_file_is_hashed_whole(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(package, {"model.py": "x = 1\n", "table.py": "#" * 2_000_000})
    written(tmp_path, {os.fsdecode(b"src/mine/\xff.py"): "x"})
    git(tmp_path, "add", "src")
    whole = read(package)
    monkeypatch.setattr(user_code, "DIFF_LIMIT", 10**9)
    uncut = read(package).diff
    for limit, is_cut in ((len(uncut), False), (len(uncut) - 1, True)):
        monkeypatch.setattr(user_code, "DIFF_LIMIT", limit)
        assert (b"# cut: the diff has" in read(package).diff) == is_cut
    written(package, {"table.py": "#" * 1_999_999 + "x"})
    assert read(package).facts["sha256"] != whole.facts["sha256"]
    (package / "table.py").rename(tmp_path / "elsewhere.py")
    (package / "table.py").symlink_to(tmp_path / "elsewhere.py")
    before = read(package).facts["sha256"]
    (tmp_path / "elsewhere.py").write_text("y = 1\n")
    assert read(package).facts["sha256"] != before, "a link is read"
    files = {"a-b.py": "", "a-b/c.py": "", "a/b/c.py": "", "a/d.py": "", "e/f.txt": "", "e/g/h.py": ""}
    top = written(tmp_path / "top", files)
    assert [path.relative_to(top).as_posix() for path in user_code.python_files(top)] == ["a/b/c.py", "a/d.py"]


def test_the_hash_of_code_has_the_names_of_its_files_and_each_file_a_short_one(package: Path) -> None:
    before = read(package).facts
    assert {len(digest) for digest in before["files"].values()} == {12}
    assert len(before["sha256"]) == 64
    (package / "model.py").rename(package / "net.py")
    assert read(package).facts["sha256"] != before["sha256"]


def of_program(name: str, source: str, cell: str = "<cell 1>", **scope: Any) -> Any:
    """What a cell of a notebook defines under a name; its lines are known."""
    linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)
    values: dict[str, Any] = {"__name__": "__main__", **scope}
    exec(compile(source, cell, "exec"), values)
    return values[name]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a notebook."""
    module: Any = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(linecache, "cache", {})
    return module


def test_the_code_of_a_notebook_is_that_of_the_cells_that_its_classes_name(main: Any) -> None:
    main.helper = helper = of_program("helper", "def helper(x):\n    return x\n", "<cell 2>")
    net = of_program("Net", "class Net:\n    def forward(self, x):\n        return helper(x)\n", helper=helper)
    idle = of_program("idle", "def idle():\n    pass\n", "<cell 3>")
    main.idle = idle
    code = user_code._code_in([net])["__main__"]
    assert {*code.facts["files"]} == {"Net", "helper"}
    assert (code.facts["git"], code.facts["git_changes"], code.facts["place"]) == ("unknown", "unknown", "")
    other = of_program("Net", "class Net:\n    def forward(self, x):\n        return helper(x) + 1\n", helper=helper)
    changed = user_code._code_in([other])
    assert changes({"__main__": code.facts}, changed) == {"__main__": "Net"}
    assert user_code._code_in([helper, net]) == user_code._code_in([net, helper]), "in any order"


def test_the_code_of_a_notebook_has_what_its_functions_name_in_turn_however_deep(main: Any) -> None:
    deepest = of_program("deepest", "def deepest():\n    return Net\n", "<cell 1>")  # the first one again
    part = of_program(
        "Part", "class Part:\n    def size(self):\n        return deepest()\n", "<cell 2>", deepest=deepest
    )
    helper = of_program("helper", "def helper():\n    return Part().size()\n", "<cell 3>", Part=part)
    main.Net = net = of_program(
        "Net", "class Net:\n    def forward(self):\n        return helper()\n", "<cell 4>", helper=helper
    )
    names = {"Net", "helper", "Part", "deepest"}
    assert [{*user_code._code_in([own])["__main__"].facts["files"]} for own in (net, helper, part)] == [names] * 3


def test_classes_of_one_name_in_two_classes_of_a_notebook_are_two(main: Any) -> None:
    source = "class {}:\n    class Part:\n        def size(self):\n            return {}\n"
    sizes = {"One": 8, "Other": 16}
    parts = [of_program(name, source.format(name, size), f"<{name}>").Part for name, size in sizes.items()]
    sources = user_code._sources_of_cells(parts)
    assert {name: text.split()[-1] for name, text in sources.items()} == {"One.Part": "8", "Other.Part": "16"}


def test_a_class_without_functions_is_that_of_the_newest_cell_with_its_name(main: Any) -> None:
    for number, size in enumerate((8, 16), start=1):
        of_program("Net", f"class Net:\n    size = {size}\n", f"<cell {number}>")
    linecache.cache["<magic>"] = (5, None, ["%time\n"], "<magic>")
    linecache.cache[__file__] = (5, None, ["class Net:\n", "    size = 0\n"], __file__)
    bare = type("Net", (), {"__module__": "__main__"})
    assert user_code._source_in_cell(bare) == "class Net:\n    size = 16"
    function = of_program("size", "def size():\n    return 8\n", "<cell 9>")
    assert user_code._source_in_cell(function) == "def size():\n    return 8"
    assert user_code._source_in_cell(type("Unknown", (), {"__module__": "__main__"})) == ""


def test_a_function_is_that_of_its_own_cell_with_the_names_of_its_own_program(main: Any) -> None:
    helper = of_program("helper", "def helper():\n    return 1\n", "<cell 1>")
    first = of_program("size", "def size():\n    return helper()\n", "<cell 2>", helper=helper)
    of_program("size", "def size():\n    return 16\n", "<cell 3>")
    assert user_code._source_in_cell(first) == "def size():\n    return helper()"
    assert {*user_code._code_in([first])["__main__"].facts["files"]} == {"size", "helper"}


def test_code_is_known_by_its_package_with_that_of_its_bases_and_without_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"based/__init__.py": "", "based/net.py": "class Base:\n    pass\n", "derived.py": "import based.net\n"}
    written(tmp_path, files)
    (tmp_path / "derived.py").write_text("import based.net\n\nclass Own(based.net.Base):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("derived").Own
    try:
        code = user_code._code_in([own, json.JSONDecoder, pytest.Item])
        assert {*code} == {"derived", "based"}
        assert [*code["based"].facts["files"]] == ["__init__.py", "net.py"]
        assert [*code["derived"].facts["files"]] == ["derived.py"]
        monkeypatch.setattr(extensions, "active", list)
        assert {*user_code.code_here(["derived", "based", "json", "lockstep", "not_loaded"])} == {"derived", "based"}
        monkeypatch.setattr(sys.modules["derived"], "__file__", "/usr/lib/python3/dist-packages/derived.py")
        assert user_code._place("derived") is None
        assert {*user_code.code_of({}, [own])} == {"based"}
        monkeypatch.setattr(extensions, "of_program", lambda: {("model", "own"): own})
        for target, packages in (("derived.Own", {"based"}), ("derived.Other", set[str]())):
            assert {*user_code.code_of({"model": {"_target_": target}})} == packages
    finally:
        for name in ("derived", "based", "based.net"):
            del sys.modules[name]


def test_the_line_of_an_error_is_the_deepest_of_the_users_file(tmp_path: Path) -> None:
    theirs = tmp_path / "lockstep" / "caller.py"
    library, own = tmp_path / "library.py", tmp_path / "own.py"
    texts = {theirs: "def call(f):\n    f()\n", library: "def fail():\n    raise ValueError('odd')\n"}
    texts[own] = "def inner():\n    fail()\ndef outer():\n    inner()\n"
    scope: dict[str, Any] = {}
    for path, text in texts.items():
        exec(compile(text, str(path), "exec"), scope)
    with pytest.raises(ValueError, match="odd") as caught:
        scope["call"](scope["outer"])
    callers = (Path(__file__).parent, theirs.parent)
    frame = user_code.frame_of(caught.value, *callers)
    assert frame is not None
    assert (frame.filename, frame.lineno) == (str(own), 2)
    assert user_code.frame_of(caught.value, Path("/")) is None


def test_packages_are_compared_in_their_order_and_new_ones_are_no_change() -> None:
    before: dict[str, Code] = {name: {"sha256": "a", "files": {"x.py": "1"}} for name in ("b", "a", "gone")}
    now = {name: UserCode({"sha256": "b", "files": {"x.py": "2"}}, b"") for name in ("new", "b", "a")}
    assert [*changes(before, now).items()] == [("a", "x.py"), ("b", "x.py")]
    for files in ({}, {"x.py": "2"}):
        large = {"a": UserCode({"sha256": "b", "files": files}, b"")}
        assert changes({"a": {"sha256": "a", "files": {"x.py": "2"} if not files else {}}}, large) == {
            "a": "its files"
        }


def test_code_that_was_recorded_is_not_recorded_again(package: Path, tmp_path: Path) -> None:
    run_dir = RunDir.at(tmp_path / "run")
    written(package, {"model.py": "x = 1\n"})
    for step in (0, 4):
        started(run_dir, package, step)
    assert run_dir.code_diff.read_text().count("# mine after step") == 1


@pytest.mark.parametrize(
    ("number", "names"), [(4, "a.py, b.py, c.py, d.py"), (5, "a.py, b.py, c.py, d.py, 1 more"), (1, "a.py")]
)
def test_four_changed_files_are_named(number: int, names: str) -> None:
    before: Code = {"sha256": "a", "files": {f"{name}.py": "1" for name in "abcdef"[:number]}}
    now = UserCode({"sha256": "b", "files": dict.fromkeys(before["files"], "2")}, b"")
    assert changes({"mine": before}, {"mine": now}) == {"mine": names}
    same = UserCode({"sha256": "a", "files": dict.fromkeys(before["files"], "2")}, b"")
    assert changes({"mine": before}, {"mine": same}) == {}, "the common hash decides"


@pytest.mark.parametrize(("number", "is_listed"), [(300, True), (301, False)])
def test_the_files_of_a_package_are_listed_up_to_three_hundred(number: int, is_listed: bool, tmp_path: Path) -> None:
    facts = read(written(tmp_path / "mine", {f"part{part}.py": str(part) for part in range(number)})).facts
    assert len(facts["files"]) == number * is_listed
    assert len(facts["sha256"]) == 64
