"""Reading untrusted files: no kind of file, no size and no content makes the reader wait, crash or accept it."""

import errno
import json
import os
import pickle
import socket
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint import files
from lockstep.config import components
from lockstep.core import safe_read
from lockstep.core.errors import InputError
from lockstep.core.figures import Predictions
from lockstep.core.run import Run, read_overrides
from lockstep.core.safe_read import (
    LINE_LIMIT,
    UnreadableFile,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    read_yaml,
)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero, which has no end
    except PermissionError:
        pytest.skip("only root can make a device")


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda path: None, "is missing"),
    "folder": (Path.mkdir, "is a folder, expected a plain file"),
    "pipe": (os.mkfifo, "is a pipe, expected a plain file"),
    "socket": (_socket, "is a socket, expected a plain file"),
    "device": (_device, "is a device, expected a plain file"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a symbolic link, expected a plain file"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "is a symbolic link, expected a plain file"),
    "link to itself": (lambda path: path.symlink_to(path.name), "is a symbolic link, expected a plain file"),
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A short path: the path of a socket has at most 107 bytes."""
    monkeypatch.chdir(tmp_path)
    return Path("file")


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_plain_file_is_read_and_none_is_waited_for(short: Path, kind: str) -> None:
    make, expected = KINDS[kind]
    make(short)
    for read in (read_bytes, read_text, read_json, read_yaml, lambda path: list(read_lines(path))):
        with pytest.raises(UnreadableFile) as caught:
            read(short)
        assert (str(caught.value), caught.value.missing) == (f"{short} {expected}", kind == "none")


def test_a_link_that_the_user_named_is_followed_and_what_it_leads_to_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("content")
    (tmp_path / "link").symlink_to("plain")
    assert read_bytes(tmp_path / "link", links=True) == b"content"
    for target, expected in {"/dev/zero": "is a device", "link to itself": "cannot be read \\(Too many"}.items():
        (path := tmp_path / f"link to {'itself' if 'self' in target else 'zero'}").symlink_to(target)
        with pytest.raises(UnreadableFile, match=expected):
            read_bytes(path, links=True)


@pytest.mark.parametrize(("path", "missing"), [("a\0b", False), ("x" * 300, False), ("plain/below", True)])
def test_an_invalid_path_is_unreadable_and_nothing_is_below_a_file(tmp_path: Path, path: str, missing: bool) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(UnreadableFile) as caught:
        read_text(tmp_path / path)
    assert caught.value.missing == str(caught.value).endswith("is missing") == missing


def test_other_ranks_learn_all_of_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile) as caught:
        read_text(tmp_path / "absent")
    assert caught.value.missing
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), vars(copied)) == (str(caught.value), vars(caught.value))


def test_a_file_without_the_right_to_read_it_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")  # here, because root, who may run the tests, can read any file

    monkeypatch.setattr(safe_read, "_PatientFile", refused)
    with pytest.raises(UnreadableFile, match=r"file cannot be read \(Permission denied\)"):
        read_text(tmp_path / "file")


def test_a_file_with_more_bytes_than_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 2**42)
    with pytest.raises(UnreadableFile, match=r"has 4,398,046,511,104 bytes, expected at most 262,144"):
        read_text(path)
    assert list(read_lines(path)) == [None], "a line without an end"
    (tmp_path / "file").write_bytes(b"x" * 10)
    assert safe_read.read_bytes(tmp_path / "file", 10) == b"x" * 10
    with pytest.raises(UnreadableFile, match="has 10 bytes, expected at most 9"):
        safe_read.read_bytes(tmp_path / "file", 9)


def test_a_file_takes_the_memory_of_its_content_and_not_of_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * safe_read.MB)
    tracemalloc.start()
    assert safe_read.read_bytes(tmp_path / "file", 64 * safe_read.MB) == b"x" * safe_read.MB
    assert tracemalloc.get_traced_memory()[1] < 4 * safe_read.MB
    tracemalloc.stop()
    if (path := Path("/proc/self/cmdline")).exists():
        assert path.stat().st_size == 0
        assert safe_read.read_bytes(path) == path.read_bytes()


JSON = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[" * 40 + b"]" * 40, b"9" * 10_000, b"[9223372036854775808]"]
JSON += [b'"\\ud800"', b'{"\\ud800": 1}', b'{"a": [{"\\udfff": 1}]}', b'{"a": {"b": "\\udfff"}}']


@pytest.mark.parametrize("content", JSON, ids=lambda content: str(content[:20]))
def test_invalid_or_huge_json_is_unreadable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UnreadableFile, match=r"file is not (JSON|UTF-8 text)"):
        read_json(tmp_path / "file")


BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [{f'*{old}, ' * 9}]\n" for old, new in zip("abcdefgh", "bcdefghi"))  # noqa: B905
YAML = {
    "an alias bomb": BOMB,
    "an alias": "a: &a 1\nb: *a\n",
    "deeper lists": "[" * 50_000,
    "deep keys": "".join(f"{' ' * depth}a:\n" for depth in range(100)),
    "many values": "- 1\n" * 70_000,
    "half of it": "a: [1",
    "code": "!!python/object/apply:os.getcwd []",
    "a long number": "a: " + "9" * 10_000,
    "a set": "a: !!set {b, c}\n",
    "a surrogate": 'a: "\\ud800"\n',
    "a surrogate in a key": '"\\ud800": a\n',
    "keys of numbers": "1: a\n",
    "references": "a: " + "${" * 20_000,
    "nothing": "",
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_that_is_no_plain_config_is_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML[name])
    with pytest.raises(InputError) as caught:
        components.read_config(path)
    assert str(caught.value).startswith(f"{path} ")
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(InputError):
        read_overrides(path)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="ignore")))
def test_no_content_is_more_than_a_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    for read in (components.read_config, read_overrides, read_json):
        with suppress(InputError):
            read(path)


def test_a_config_and_a_list_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "file"
    words = ["x: y # z", "1e3", "yes", "2026-01-01", "1:30", "0x10", "~", "null", ".inf", "", "ü€"]
    config = {"a": {"b": [1, 2.5, 1e-05, 1e20, None, True, *words]}, "1": {}}
    path.write_text(components.dump(config))
    assert components.read_config(path) == config
    for overrides in (["steps=3", "~a", "name='x, y'", "a=[1,2]", "", "1"], []):
        path.write_text(components.dump(overrides))
        assert read_overrides(path) == overrides


def lines(path: Path, content: bytes) -> Iterator[str | None]:
    path.write_bytes(content)
    return read_lines(path)


def test_a_date_in_a_config_is_a_text(tmp_path: Path) -> None:
    texts = {"name": "2024-01-01", "notes": "2024-01-01T10:00:00Z"}
    (path := tmp_path / "config.yaml").write_text("".join(f"{key}: {text}\n" for key, text in texts.items()))
    assert read_yaml(path) == texts


def test_lines_are_whole_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert list(lines(path, b"one\ntwo\r\n\nthree")) == ["one\n", "two\r\n", "\n", None]
    assert list(lines(path, b"one\n\xff\ntwo\n")) == ["one\n", None, "two\n"]
    assert list(lines(path, b"one\n" + b"x" * LINE_LIMIT + b"\ntwo\n")) == ["one\n", None]
    assert list(lines(path, b"")) == []


def test_plain_values_are_told_from_others() -> None:
    assert safe_read.checked({"a": [1, None]}) == {"a": [1, None]}
    for value in ({1: 2}, {"a": (1, 2)}, [2**63], [b""], "\ud800"):
        with pytest.raises(ValueError, match=r"is neither a number|surrogates"):
            safe_read.checked(value)


def test_a_number_is_a_finite_one_and_no_truth_value() -> None:
    values = (3, 0.5, True, "3", float("nan"), float("-inf"), 10**400, -(10**400), safe_read.WHOLE)
    assert [value for value in values if safe_read.is_number(value)] == [3, 0.5]
    ends = [-safe_read.WHOLE, safe_read.WHOLE - 1, 1e300]
    assert [*filter(safe_read.is_number, ends)] == ends


def test_every_kind_of_file_has_a_name() -> None:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFREG: ""}
    kinds |= {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", 0: "a special file"}
    assert {kind: safe_read.file_kind(kind | 0o644) for kind in kinds} == kinds


def test_a_path_that_nobody_may_look_at_is_no_plain_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").touch()
    assert not safe_read.is_plain(tmp_path / ("x" * 300)), "no system takes such a name"
    assert [safe_read.is_plain(path) for path in (file, tmp_path, tmp_path / "none", file / "x")] == [
        True,
        *[False] * 3,
    ]

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refused)
    assert not safe_read.is_plain(file)


def test_a_file_that_need_not_exist_may_be_large_and_a_link_exists(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(content := b"x" * (safe_read.MOST_TEXT_BYTES + 1))
    assert (safe_read.read_if_exists(file), safe_read.read_if_exists(tmp_path / "none")) == (content, None)
    (link := tmp_path / "link").symlink_to("nothing")
    with pytest.raises(UnreadableFile, match="is a symbolic link"):
        safe_read.read_if_exists(link)


def test_an_error_while_a_file_is_read_is_one_of_the_file(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(UnreadableFile, match=r"file cannot be read \(Bad address\)"), safe_read.open_plain(file):
        raise OSError(errno.EFAULT, "Bad address")
    with pytest.raises(ValueError, match="of the caller"), safe_read.open_plain(file):
        raise ValueError("of the caller")


def test_a_name_that_bytes_spell_is_told_as_a_path(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match=r"^caf\\udce9 cannot be used") as caught, safe_read.unusable_paths():
        raise PermissionError(errno.EACCES, "Permission denied", b"caf\xe9")
    assert caught.value.path == Path("caf\udce9")


def test_json_has_the_limit_and_the_links_that_its_reader_allows(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text(f'"{"x" * safe_read.MOST_TEXT_BYTES}"')
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UnreadableFile, match="expected at most 262,144"):
        read_json(file)
    for path, links in ((file, False), (tmp_path / "link", True)):
        assert len(read_json(path, safe_read.MB, links=links)) == safe_read.MOST_TEXT_BYTES
    with pytest.raises(UnreadableFile, match=r"expected at most 2$"):
        read_json(file, 2)
    with pytest.raises(UnreadableFile, match="is a symbolic link"):
        read_json(tmp_path / "link", safe_read.MB)


def test_files_that_name_each_class_or_have_each_loss_may_be_longer_than_a_text(tmp_path: Path) -> None:
    name = "x" * safe_read.MOST_TEXT_BYTES
    losses = [0.5] * 400_000  # 2 MB: one of each micro-batch since the last log point
    facts = {"identity": {"name": name}, "progress": {"step": 1, "losses": losses}}
    (checkpoint := tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (checkpoint / "facts.json").write_text(json.dumps(facts))
    (checkpoint / "model.safetensors").touch()
    (checkpoint / "manifest.json").write_text(files.manifest_text(checkpoint))
    assert files.read_facts(checkpoint) == facts
    assert Run(tmp_path).identity == {"name": name}
    empty: Any = dict.fromkeys(("examples", "predicted", "hits", "confusion", "curves", "worst"), ())
    (predictions := Predictions(step=1, names=[name], **empty)).write(tmp_path / "validation.json")
    assert Predictions.read(tmp_path / "validation.json").names == predictions.names


def test_a_text_has_its_own_line_ends(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"\r\n one\r\ntwo \n\xc3\xa9\r\n\r")
    assert read_text(file) == "\r\n one\r\ntwo \n\u00e9\r\n\r"


def test_what_is_no_text_is_told_by_its_first_byte_and_a_name_without_its_end(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"a" * 1234 + b"\xff\xfe")
    with pytest.raises(UnreadableFile, match=r"is not UTF-8 text \(byte 1,234\)"):
        read_text(file)
    for name in ("003-seed=1", "a b", ".hidden", "a..b"):
        file.write_text(f" {name}\r\n")
        assert safe_read.read_name(file) == name
    for name in ("", " ", ".", "..", "a/b", "/a", "../a", "a\tb", "a\nb"):
        file.write_text(name)
        with pytest.raises(UnreadableFile, match="expected the name of a folder next to it"):
            safe_read.read_name(file)


def test_levels_are_counted_where_lists_are_beside_each_other(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("- [1]\n" * 100 + "- {a: {b: [1]}}\n" * 100)
    assert read_yaml(file) == [[1]] * 100 + [{"a": {"b": [1]}}] * 100


def test_a_line_of_exactly_the_most_bytes_is_whole(tmp_path: Path) -> None:
    path, longest = tmp_path / "file", "x" * (LINE_LIMIT - 1) + "\n"
    assert list(lines(path, f"{longest}two\n".encode())) == [longest, "two\n"]
    assert list(lines(path, longest[:-1].encode())) == [None], "its end is not there yet"


def test_a_file_that_need_not_exist_has_at_most_64_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").touch()
    limits: list[int] = []
    monkeypatch.setattr(safe_read, "read_bytes", lambda path, limit: limits.append(limit) or b"")
    assert safe_read.read_if_exists(file) == b"", "it is empty, and there"
    assert safe_read.read_if_exists(tmp_path / "none") is None
    assert limits == [64 * 2**20]


def test_a_long_name_in_a_file_is_told_by_its_begin(tmp_path: Path) -> None:
    (file := tmp_path / "best").write_text("x" * 90 + "/y")
    with pytest.raises(UnreadableFile) as caught:
        safe_read.read_name(file)
    assert str(caught.value) == f"{file} has '{'x' * 80}' in it, expected the name of a folder next to it"
    assert (caught.value.path, caught.value.missing) == (file, False)


def test_what_is_no_json_and_no_config_is_told_in_one_line_with_the_reason(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text('{"a": 1,\n "b"}')
    with pytest.raises(UnreadableFile, match=r"^\S+file is not JSON \(Expecting ':' delimiter: line 2 column 5"):
        read_json(file)
    file.write_text("a: [1\nb: 2")
    with pytest.raises(UnreadableFile, match=r"^\S+file is not the YAML of a config \(.*line 2, column \d+.*\)$"):
        read_yaml(file)
    for text in ("a: &x 1\nb: *x\n", "[" * 33 + "]" * 33):
        file.write_text(text)
        says = "is not the YAML of a config (it is too deep, or has aliases, expected plain keys and values)"
        with pytest.raises(UnreadableFile) as caught:
            read_yaml(file)
        assert str(caught.value) == f"{file} {says}"


def test_a_value_that_is_neither_a_number_nor_a_text_is_told_by_its_type() -> None:
    wrong: dict[str, object] = {"tuple": [(1,)], "bytes": {"a": b""}, "int": [2**63], "dict": {1: 2}}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^a value or key is neither a number nor a text: {name}$"):
            safe_read.checked(value)
    values = {"a": [float("nan"), True, None, "", {}, -(2**63)]}
    assert safe_read.checked(values) is values


def test_what_is_not_read_at_the_last_attempt_names_its_place_and_what_to_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read() -> None:
        attempts.append(len(attempts))
        raise OSError(errno.EIO, f"fault {len(attempts)}")

    attempts: list[int] = []
    monkeypatch.setattr(safe_read, "PAUSES_S", (0, 0, 0))
    with pytest.raises(safe_read.UnreadableStorage) as caught:
        safe_read.stored(read, "a/place")
    says = "cannot be read (fault 4, also when it was read again); check its disk or network"
    assert (str(caught.value), len(attempts)) == (f"a/place {says}", 4)
    assert (caught.value.exit_code, caught.value.path) == (74, "a/place"), "no mistake of the user"


@pytest.mark.parametrize(("times", "is_read"), [(3, True), (4, False)])
def test_each_read_of_a_file_that_is_open_has_attempts_of_its_own(
    times: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(read: Callable[[], object], place: object) -> object:
        def attempt() -> object:
            if number == 2 and len(failures) < times:  # the first one opens the file
                failures.append(number)
                raise OSError(errno.EIO, "fault")
            return read()

        places.append(place)
        number = len(places)
        return real(attempt, place)

    (file := tmp_path / "file").write_bytes(content := b"x" * 100_000)
    places: list[object] = []
    failures: list[int] = []
    real = safe_read.stored
    monkeypatch.setattr(safe_read, "PAUSES_S", (0, 0, 0))
    monkeypatch.setattr(safe_read, "stored", stored)
    if is_read:
        assert read_bytes(file) == content
    else:
        with pytest.raises(UnreadableFile, match=rf"^{file} cannot be read \(fault"):
            read_bytes(file)
    assert {str(place) for place in places} == {str(file)}
    assert len(failures) == times


@pytest.mark.parametrize(("times", "is_read"), [(3, True), (4, False)])
def test_a_file_that_the_system_cannot_look_at_is_looked_at_again(
    times: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(path: Path, **options: bool) -> os.stat_result:
        if path == file and len(failures) < times:
            failures.append(path)
            raise OSError(errno.ESTALE, "stale")
        return real(path, **options)

    (file := tmp_path / "file").write_bytes(b"content")
    failures: list[Path] = []
    real = Path.stat
    monkeypatch.setattr(safe_read, "PAUSES_S", (0, 0, 0))
    monkeypatch.setattr(Path, "stat", look)
    if is_read:
        assert read_bytes(file) == b"content"
    else:
        with pytest.raises(safe_read.UnreadableStorage, match=rf"^{file} cannot be read \(stale, also when it was"):
            read_bytes(file)
    assert len(failures) == times
