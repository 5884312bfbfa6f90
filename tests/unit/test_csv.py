"""Image files that are listed in a table."""

import csv
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.core.errors import InputError
from lockstep.data.datasets import CSV
from lockstep.data.datasets.files import LISTINGS
from lockstep.data.datasets.listing import class_names_of, in_order, option_of

LINES = ["path,label,split", "a.png,cat,train", "sub/b.png,dog,train", "c.png,dog,val"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The images a.png, sub/b.png and c.png with grey levels 10, 20 and 30, and a table that lists them."""
    (tmp_path / "sub").mkdir()
    for level, name in ((10, "a"), (20, "sub/b"), (30, "c")):
        Image.fromarray(np.full((8, 8, 3), level, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    (tmp_path / "list.csv").write_text("\n".join(LINES))
    return tmp_path


def source(root: Path, *lines: str, **keys: object) -> CSV:
    if lines:
        LISTINGS.clear()  # a process lists a table once
        (root / "list.csv").write_text("\n".join(lines))
    return CSV(path=str(root / "list.csv"), decode_size=8, **keys)  # type: ignore[arg-type]


def levels(split: object) -> list[int]:
    return split.fetch(list(range(len(split))))[:, 0, 0, 0].tolist()  # type: ignore[attr-defined,arg-type]


def test_a_table_has_paths_labels_and_splits(root: Path) -> None:
    table = source(root)
    table.prepare()
    assert table.class_names == ("cat", "dog")
    assert (levels(table.train()), table.train().labels.tolist()) == ([10, 20], [0, 1])
    assert (levels(table.eval()), table.eval().labels.tolist()) == ([30], [1])
    assert "cat" in table.notes()[0]
    apart = source(root, *(line for pair in zip(LINES, [""] * 4, strict=True) for line in pair))
    assert (levels(apart.train()), levels(apart.eval())) == ([10, 20], [30]), "with empty lines between them"


def test_a_table_may_be_a_link_and_its_paths_are_below_the_folder_of_the_link(root: Path, tmp_path: Path) -> None:
    (root / "list.csv").rename(tmp_path / "sub" / "kept.csv")
    (root / "list.csv").symlink_to(tmp_path / "sub" / "kept.csv")
    assert levels(source(root).train()) == [10, 20]


@pytest.mark.parametrize("between", [";", "\t", ", "])
def test_other_columns_separators_and_absolute_paths_work(root: Path, between: str) -> None:
    (root / "elsewhere").mkdir()
    rows = [
        ("what", "file", "more", "part"),
        ("1", "a.png", '"x, y"', "fit"),
        ("3 ", f"{root}/sub/b.png ", "", "fit "),
        ("3", f"{root}/sub/../sub/b.png", "named once more", "fit"),
    ]
    rows += [("2", "c.png", "", "fit"), ("3", "c2.png", "", "look"), ("1", "c3.png", "", "other"), ()]
    for name in ("c2.png", "c3.png"):
        shutil.copy(root / "c.png", root / name)
    lines = ["\ufeff" + between.join(rows[0]), *map(between.join, rows[1:])]
    (root / "elsewhere" / "list.csv").write_text("\r\n".join(lines))
    columns = {"path_column": "file", "label_column": "what", "split_column": "part"}
    names = {"images": str(root), "train_split": "fit", "val_split": "look"}
    table = CSV(path=str(root / "elsewhere" / "list.csv"), **columns, **names, decode_size=8)
    assert table.class_names == ("1", "2", "3")
    assert levels(table.train()) == [10, 30, 20, 20]
    assert table.eval().labels.tolist() == [2]
    assert table.notes()[0].endswith("skipped lines of other splits (1 'other')")


def test_an_image_counts_once_for_each_line_that_names_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["path,label,split", *["a.png,cat,train"] * 3, *["c.png,dog,train"] * 5, *["sub/b.png,dog,val"] * 2]
    table = source(root, *lines)
    rows = list(csv.DictReader(lines))
    for name, split in (("train", table.train()), ("val", table.eval())):
        counts = Counter(row["label"] for row in rows if row["split"] == name)
        assert Counter(table.class_names[label] for label in split.labels.tolist()) == counts
    assert levels(table.train()) == [10] * 3 + [30] * 5
    repeated = table.fingerprint()
    assert source(root, *dict.fromkeys(lines)).train().labels.tolist() == [0, 1]
    assert source(root, *dict.fromkeys(lines)).fingerprint() != repeated
    monkeypatch.chdir(root)
    for alias in ("./a.png", "sub/../a.png", str(root / "a.png")):
        (root / "list.csv").write_text("\n".join([*lines, f"{alias},cat,train"]))
        relative = CSV(path="list.csv", decode_size=8, skip=len(alias))
        LISTINGS.clear()
        assert levels(relative.train()) == [10] * 4 + [30] * 5
        assert len({*relative.train().paths}) == 2, "a file has the first of its names in every line"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_lines_of_one_image_are_on_one_side_of_a_held_out_share(root: Path, share: float) -> None:
    for number in range(12):
        shutil.copy(root / "a.png", root / f"{number}.png")
    pairs = [(number, time) for number in range(12) for time in range(1 + number % 5)]
    spellings = ("", "./", "sub/../", f"{root}/")
    lines = [f"{spellings[time % 4]}{number}.png,{number % 2}" for number, time in pairs]
    table = source(root, "path,label", *lines, val_share=share)
    train, val = (list(map(str, split.paths)) for split in (table.train(), table.eval()))
    assert not set(train) & set(val)
    assert Counter(Path(path).name for path in train + val) == Counter(f"{number}.png" for number, _ in pairs)
    assert len(set(val)) == 2 * round(share * 6), "the share of the six images of each class"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([*LINES, "a.png,cat"], "line 5 of .* has 2 columns, expected 3"),
        ([LINES[0], "", *LINES[1:], "", "a.png,cat"], "line 7 of .* has 2 columns, expected 3"),
        ([f"{LINES[0]},note", 'a.png,cat,train,"two\nlines"', "c.png"], "line 4 of .* has 1 column, expected 4"),
        ([*LINES, ",cat,train"], "line 5 of .* has nothing in the column 'path'"),
        ([*LINES, "c.png,,train"], "line 5 of .* has nothing in the column 'label'"),
        ([*LINES, "none.png,cat,train"], "line 5 .* has 'none.png', and .*/none.png is not a file.*dataset.images="),
        ([*LINES, "a.png,dog,train"], "line 5 of .* has 'a.png' with another label or split than line 2"),
        ([*LINES, "a.png,cat,val"], "line 5 of .* has 'a.png' with another label or split than line 2"),
        ([*LINES, "./a.png,cat,val"], "line 5 of .* has './a.png' with another label or split than line 2"),
        ([LINES[0], *LINES[2:], "a.png,yak,val"], "line 4 of .* has the label 'yak', which no training example has"),
        ([*LINES, '"a.png,cat,train'], "line 5 of .* cannot be read"),
        (LINES[:1], "has no lines below its first"),
        (["file,label,split"], "path_column is 'path', but the table .* has 'file', 'label', 'split'"),
        ([f"{LINES[0]},label"], "label_column is 'label', but the table .* has 'path', 'split'"),
        (
            ["a.png,cat,train"],
            "the first line of .* is 'a.png,cat,train', expected the names of .*: path,label,split;",
        ),
        ([""], "the first line of .* is empty, expected the names of the columns: path,label,split; add such a line"),
        (["path,label", "a.png,cat"], "split_column is 'split', but .*dataset.val_share=0.1"),
        (LINES[:3], "val_split is 'val', but .* has 'train'; name one with dataset.val_split=NAME"),
        ([LINES[0], LINES[3]], "train_split is 'train', but .* has 'val'"),
        ([f"path,label,split,{'x' * 131_073}"], r"line 1 of .*list.csv cannot be read \(field larger"),
        (['path,"label" of it,split', "a.png,cat,train"], r"line 1 of .*list.csv cannot be read \("),
        ([*LINES, f"a.png,cat,{'x' * 131_073}"], r"line 5 of .*list.csv cannot be read \(field larger"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(root: Path, lines: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^dataset.*{sentence}") as caught:
        source(root, *lines).prepare()
    assert "\n" not in str(caught.value)


def test_all_wrong_lines_are_told_at_once(root: Path) -> None:
    lines = [*LINES, "a.png,cat", ",cat,train", "c.png,,train", "none.png,cat,train", "a.png,dog,train"]
    with pytest.raises(InputError) as caught:
        source(root, *lines).prepare()
    assert [re.findall(r"line (\d)", sentence)[0] for sentence in caught.value.args] == [*"56789"]
    with pytest.raises(InputError) as caught:
        source(root, *lines, *[",cat,train"] * 3).prepare()
    assert caught.value.args[5:] == ("and 3 more",)
    with pytest.raises(InputError) as caught:
        source(root, "file,class,split").prepare()
    assert [sentence.split()[0] for sentence in caught.value.args] == ["dataset.path_column", "dataset.label_column"]
    for name in ("d", "e"):
        shutil.copy(root / "a.png", root / f"{name}.png")
    with pytest.raises(InputError) as caught:
        source(root, *LINES, "d.png,yak,val", "e.png,emu,val").prepare()
    assert [re.findall("label '(...)'", sentence)[0] for sentence in caught.value.args] == ["yak", "emu"]


def ordered(labels: list[str]) -> tuple[str, ...]:
    return class_names_of(labels, "line {}".format, gaps=False)


@pytest.mark.parametrize(
    ("labels", "wrong"),
    [
        *(([*"01", label], label) for label in ("-1", "7", "+1", "1.0", ".5", "1.", "2.0e0", "nan", "NaN")),
        *(([*"01", label], label) for label in ("00", "01", "9" * 5000, "-" + "9" * 5000)),
        (["2", "3"], "2"),
        (["2", "1", "4"], "4"),
        (["cat", "-1"], "-1"),
        (["cat", "2.5"], "2.5"),
    ],
)
def test_a_number_that_numbers_no_class_is_refused(labels: list[str], wrong: str) -> None:
    with pytest.raises(InputError) as caught:
        ordered(labels)
    begin = f"dataset: line {labels.index(wrong)} has the label {wrong[:70]!r}"[:80]
    assert str(caught.value).startswith(begin)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "labels", [list("012"), list("12"), ["0"], ["1"], [f"{n:03}" for n in range(101)], [*map(str, range(1, 12))]]
)
def test_numbers_without_gaps_are_the_classes_in_order_beside_names_too(labels: list[str]) -> None:
    assert ordered(labels[::-1]) == tuple(labels)
    assert ordered(["B", "A", "10", "9", "٣", "-a", "1x"]) == ("-a", "10", "1x", "9", "A", "B", "٣")


@pytest.mark.parametrize(("label", "split"), [("-1", "train"), ("7", "train"), ("7", "val")])
def test_a_stray_number_is_refused_with_its_line_in_every_split(root: Path, label: str, split: str) -> None:
    shutil.copy(root / "a.png", root / "d.png")
    rows = ["a.png,0,train", "sub/b.png,1,train", "c.png,0,val", f"d.png,{label},{split}"]
    with pytest.raises(InputError, match=rf"line 5 of .*list\.csv has the label '{label}', "):
        source(root, LINES[0], *rows).prepare()


def test_lines_of_other_splits_are_left_out_of_a_table_that_is_cut(root: Path) -> None:
    lines = ["path,label,split", "a.png,cat,train", "c.png,cat,train", "sub/b.png,cat,old"]
    table = source(root, *lines, val_share=0.5)
    assert sorted(levels(table.train()) + levels(table.eval())) == [10, 30]
    assert table.notes()[0].endswith("skipped lines of other splits (1 'old')")


def test_an_unreadable_table_and_a_split_that_it_does_not_have_are_refused(root: Path) -> None:
    (root / "list.csv").write_bytes(b"path,label\n\xff\xfe,cat")
    with pytest.raises(InputError, match=r"not in UTF-8"):
        source(root, val_share=0.5).prepare()
    with pytest.raises(InputError, match=r"none\.csv"):
        CSV(path=str(root / "none.csv")).prepare()
    with pytest.raises(InputError, match=r"split_column is 'split', but .*dataset\.test_share=0\.1$"):
        source(root, "path,label", "a.png,cat", "c.png,cat", val_share=0.5, test_split="test").prepare()


def test_the_order_of_the_lines_makes_no_other_data_and_another_label_does(root: Path) -> None:
    Image.new("RGB", (8, 8)).save(root / "d.png")
    lines = ["a.png,cat,train", "sub/b.png,dog,train", "c.png,dog,train", "d.png,dog,val", "sub/b.png,dog,train"]
    own = source(root, LINES[0], *lines)
    fingerprint, seen = own.fingerprint(), levels(own.train())
    for other in (lines[::-1], [*lines[2:], *lines[:2]]):
        again = source(root, LINES[0], *other)
        assert (again.fingerprint(), levels(again.train())) == (fingerprint, seen)
    assert source(root, LINES[0], *lines[1:], "a.png,dog,train").fingerprint() != fingerprint


@pytest.mark.parametrize(
    ("key", "share", "remedy"),
    [
        ("train_split", "", "NAME"),
        ("val_split", "", "NAME, or hold out a share of each class with dataset.val_share=0.1"),
        ("test_split", "", "NAME, or hold out a share of each class with dataset.test_share=0.1"),
        ("split_column", "val_share", "NAME, or hold out a share of each class with dataset.val_share=0.1"),
        ("label_column", "", "NAME"),
        ("label_columns", "", "[NAME]"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_those_that_are(key: str, share: str, remedy: str) -> None:
    options = {"b": 1, "a": 2}
    assert [option_of(options, name, "the table", key=key, share=share) for name in "ab"] == [2, 1]
    for of, available in ((options, "'a', 'b'"), ({}, "nothing")):
        with pytest.raises(InputError) as caught:
            option_of(of, "c", "the table", key=key, share=share)
        sentence = f"dataset.{key} is 'c', but the table has {available}; name one with dataset.{key}={remedy}"
        assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["b", "a", "b"], ("b", "a")),
        (["10", "9", "1"], ("1", "9", "10")),
        (["010", "02", "1", "01", "2", "0", "00"], ("0", "00", "1", "01", "2", "02", "010")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["e\N{COMBINING ACUTE ACCENT}", "é", "a"], ("é", "a")),
        (["9" * 5000, "1" + "0" * 5000, "1"], ("1", "9" * 5000, "1" + "0" * 5000)),
    ],
    ids=["names", "numbers", "zeros", "a name among numbers", "two spellings", "long numbers"],
)
def test_whole_numbers_are_in_their_order_and_names_in_the_one_that_they_come_in(
    names: list[str], expected: tuple[str, ...]
) -> None:
    assert in_order(names) == expected


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([*LINES, "a.png"], "path: line 5 of {} has 1 column, expected 3; correct it"),
        ([*LINES, "a.png,cat,train,more"], "path: line 5 of {} has 4 columns, expected 3; correct it"),
        ([*LINES, ",,train"], "path: line 5 of {} has nothing in the column 'path'; correct it"),
        (
            [*LINES, "sub,cat,train"],
            "images: line 5 of {} has 'sub', and {folder}/sub is not a file; correct it, or name the folder that its "
            "paths start from with dataset.images=FOLDER",
        ),
        (LINES[:1], "path: {} has no lines below its first, expected one for each image"),
    ],
)
def test_a_wrong_line_is_said_with_its_key_and_remedy(root: Path, lines: list[str], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        source(root, *lines).prepare()
    assert str(caught.value) == "dataset." + sentence.format(root / "list.csv", folder=root)


def test_a_first_line_without_names_is_answered_with_the_keys_that_say_them(root: Path) -> None:
    for options, columns, key in (
        ({}, "path,label,split", "label_column"),
        ({"label_columns": ["x", "y"], "targets": "values"}, "path,x,y,split", "label_columns"),
        ({"val_share": 0.5, "group_column": "group"}, "path,label,group", "label_column"),
    ):
        with pytest.raises(InputError) as caught:
            source(root, "a.png,cat,train", **options).prepare()
        assert str(caught.value).endswith(
            f"expected the names of the columns: {columns}; add such a line, or say their names with "
            f"dataset.path_column=NAME and dataset.{key}=NAME"
        )


def test_the_columns_are_separated_by_what_the_first_line_has_most_of(root: Path) -> None:
    lines = ["path;label, the animal;split", "a.png;cat, black;train", "c.png;cat, black;val"]
    table = source(root, *lines, label_column="label, the animal")
    assert (table.class_names, levels(table.train()), levels(table.eval())) == (("cat, black",), [10], [30])


def test_a_table_without_splits_has_examples_to_train_on_whatever_these_are_called(root: Path) -> None:
    table = source(root, "path,label", "a.png,cat", "c.png,cat", val_share=0.5, train_split="fit")
    assert sorted(levels(table.train()) + levels(table.eval())) == [10, 30]


def test_the_commonest_of_other_splits_are_named(root: Path) -> None:
    lines = list[str]()
    for name, number in zip("uvwxyz", (1, 2, 6, 4, 3, 5), strict=True):
        shutil.copy(root / "a.png", root / f"{name}.png")
        lines += [f"{name}.png,cat,{name}"] * number
    note = source(root, *LINES, *lines).notes()[0]
    path = root / "list.csv"
    assert note == f"{path}: skipped lines of other splits (6 'w', 5 'z', 4 'x', 3 'y', 2 'v')"


def test_lines_that_are_tested_on_are_not_skipped(root: Path) -> None:
    for name in ("d", "e"):
        shutil.copy(root / "a.png", root / f"{name}.png")
    table = source(root, *LINES, "d.png,cat,exam", "e.png,cat,old", test_split="exam")
    assert table.test() is not None
    assert table.notes()[0] == f"{root / 'list.csv'}: skipped lines of other splits (1 'old')"


def test_links_to_one_file_are_images_of_their_own(root: Path) -> None:
    (root / "link.png").symlink_to(root / "a.png")
    table = source(root, *LINES, "link.png,dog,train")
    assert (levels(table.train()), table.train().labels.tolist()) == ([10, 10, 20], [0, 1, 1])


def test_images_in_another_folder_are_relative_to_where_one_works(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "lists").mkdir()
    (root / "list.csv").rename(root / "lists" / "list.csv")
    monkeypatch.chdir(root)
    table = CSV(path="lists/list.csv", images=".", decode_size=8)
    assert (levels(table.train()), levels(table.eval())) == ([10, 20], [30])


def test_a_table_in_another_encoding_says_what_is_wrong_with_its_bytes(root: Path) -> None:
    (root / "list.csv").write_bytes(b"path,label,split\na.png,caf\xe9,train\n")
    with pytest.raises(InputError) as caught:
        source(root).prepare()
    says = f"dataset.path: {root / 'list.csv'} is not in UTF-8 (invalid continuation byte); save it in UTF-8"
    assert str(caught.value) == says


@pytest.mark.parametrize(("gaps", "numbers"), [(False, "from 0 (or 1) without gaps"), (True, "from 0")])
def test_a_number_of_no_class_is_answered_with_what_is_one(gaps: bool, numbers: str) -> None:
    with pytest.raises(InputError) as caught:
        class_names_of(["0", "1", "-1", "-1"], "line {}".format, gaps=gaps)
    assert str(caught.value) == (
        f"dataset: line 2 has the label '-1', but numbered classes are whole numbers {numbers}; correct it, remove "
        "the example, write names (class_2), or use task=regression for numbers"
    )
    assert class_names_of(["5", "0"], "line {}".format, gaps=True) == ("0", "5")
