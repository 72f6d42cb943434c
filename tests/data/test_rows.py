"""Table files: every line is found where it stands, whatever is wrong with its neighbours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmm4edit.data.rows import Row, find_byte_order_marks, read_rows, write_rows
from lmm4edit.errors import ManifestError


def file(tmp_path: Path, name: str, content: bytes | str) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def values(rows: list[Row]) -> list[tuple[int, dict[str, object]]]:
    return [(row.number, dict(row.values)) for row in rows]


def problems(path: Path) -> list[str]:
    return [str(row.problem) for row in read_rows(path) if row.problem]


def message_of(path: Path) -> str:
    with pytest.raises(ManifestError) as caught:
        list(read_rows(path))
    return str(caught.value)


def test_json_lines_count_blank_lines_and_end_at_newlines_alone(tmp_path: Path) -> None:
    content = '{"a": "x\u2028y\u0085z"}\r\n\n  \n{"a": 2}'
    path = file(tmp_path, "a.jsonl", content)
    assert values(list(read_rows(path))) == [(1, {"a": "x\u2028y\u0085z"}), (4, {"a": 2})]


@pytest.mark.parametrize(
    ("line", "got"),
    [
        (b'{"a": 1,}', "'{\"a\": 1,}': Illegal trailing comma before end of object at character 8"),
        (b'{"a": 1', "'{\"a\": 1': Expecting ',' delimiter at character 8"),
        (b'{"a": 1} {"a": 2}', '\'{"a": 1} {"a": 2}\': Extra data at character 10'),
        (b'{"a": 1, "a": 2}', "'{\"a\": 1, \"a\": 2}': the key 'a' stands twice"),
        (b"[1, 2]", "[1, 2]"),
        (b"17", "17"),
    ],
)
def test_bad_json_lines_do_not_hide_the_others(tmp_path: Path, line: bytes, got: str) -> None:
    path = file(tmp_path, "a.jsonl", b'{"a": 0}\n' + line + b'\n{"a": 3}\n')
    found = problems(path)
    if "trailing comma" in got:  # worded so from Python 3.13 on
        assert found[0].startswith(f"{path}:2: expected one JSON object on the line, got '{{\"a\": 1,}}': ")
    else:
        assert found == [f"{path}:2: expected one JSON object on the line, got {got}. Repair the line."]
    assert [row.number for row in read_rows(path) if not row.problem] == [1, 3]


def test_brackets_nested_beyond_reason(tmp_path: Path) -> None:
    path = file(tmp_path, "a.jsonl", "[" * 200_000)
    assert problems(path)[0].endswith(": brackets are nested too deeply. Repair the line.")


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    for name, good in (("a.jsonl", '{"a": 1}\n'), ("a.csv", "a\n1\n")):
        path = file(tmp_path, name, good.encode() + "é".encode("latin-1") + b"\n" + good.split("\n")[-2].encode())
        line = good.count("\n") + 1
        assert problems(path) == [
            f"{path}:{line}: expected UTF-8 text, got the byte 0xe9 at position 1. Save the file as UTF-8."
        ]
        assert len(list(read_rows(path))) == 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_utf16_is_named(tmp_path: Path, name: str) -> None:
    path = file(tmp_path, name, '{"a": 1}\n'.encode("utf-16"))
    assert message_of(path) == f"{path}: expected UTF-8 text, got UTF-16 text. Save the file as UTF-8."


@pytest.mark.parametrize(
    ("name", "content", "rows", "marks"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"a": "1"}\n\xef\xbb\xbf{"a": "2"}\n', [(1, {"a": "1"}), (2, {"a": "2"})], [1, 2]),
        ("a.csv", b"\xef\xbb\xbfa,b\n1,2\n", [(2, {"a": "1", "b": "2"})], [1]),
        ("a.csv", b'\xef\xbb\xbf"a","b"\n1,2\n', [(2, {"a": "1", "b": "2"})], [1]),
        ("a.json", b'\xef\xbb\xbf[{"a": "1"}]', [(1, {"a": "1"})], [1]),
        ("a.jsonl", b'{"a": "1"}\n', [(1, {"a": "1"})], []),
    ],
)
def test_byte_order_marks_change_no_column_and_are_found(
    tmp_path: Path, name: str, content: bytes, rows: object, marks: list[int]
) -> None:
    path = file(tmp_path, name, content)
    assert values(list(read_rows(path))) == rows
    assert find_byte_order_marks(path) == marks


def test_json_may_be_lines_or_one_list(tmp_path: Path) -> None:
    lines = file(tmp_path, "lines.json", '{"a": 1}\n{"a": 2}\n')
    whole = file(tmp_path, "list.json", '\n[\n {"a": 1},\n 5,\n {"a": 2}]\n')
    assert values(list(read_rows(lines))) == [(1, {"a": 1}), (2, {"a": 2})]
    assert values(list(read_rows(whole))) == [(1, {"a": 1}), (2, {}), (3, {"a": 2})]
    assert problems(whole) == [
        f"{whole}:2: expected one JSON object for each item of the list, got 5. Repair the item."
    ]
    broken = file(tmp_path, "broken.json", '[{"a": 1}')
    assert message_of(broken) == (
        f"{broken}: expected a JSON list of objects, got one that cannot be read: "
        "Expecting ',' delimiter: line 1 column 10 (char 9). Repair it."
    )


def test_csv_rows_stand_at_their_first_line(tmp_path: Path) -> None:
    path = file(tmp_path, "a.csv", 'a,b\r\n1,"two\nlines, ""quoted"""\r\n\r\n3,\r\n')
    assert values(list(read_rows(path))) == [
        (2, {"a": "1", "b": 'two\nlines, "quoted"'}),
        (5, {"a": "3", "b": ""}),
    ]


def test_csv_rows_of_another_length_and_open_quotes(tmp_path: Path) -> None:
    path = file(tmp_path, "a.csv", 'a,b\n1,2,3\n4,5\n6\n7,"open\n')
    cells = (
        "expected 2 cells as in the header, got {}. Quote texts that hold commas, and give every row the same columns."
    )
    assert problems(path) == [
        f"{path}:2: {cells.format(3)}",
        f"{path}:4: {cells.format(1)}",
        f"{path}:5: expected comma-separated values with closed quotes, got a row that breaks off: unexpected end of "
        "data. Quote texts that hold commas, quotes or line ends, and close every quote.",
    ]
    assert values([row for row in read_rows(path) if not row.problem]) == [(3, {"a": "4", "b": "5"})]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a;b", "expected columns separated by commas, got semicolons. Save the file with commas."),
        ("a\tb", "expected columns separated by commas, got tabs. Save the file with commas."),
        ("a,b,a", "expected each column once in the header, got 'a' twice. Remove or rename one."),
    ],
)
def test_csv_headers(tmp_path: Path, header: str, message: str) -> None:
    path = file(tmp_path, "a.csv", f"{header}\n1\n")
    assert message_of(path) == f"{path}:1: {message}"


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path) -> None:
    gone = tmp_path / "gone.jsonl"
    assert message_of(gone) == f"{gone}: expected a file or folder, got nothing there. Check the path."
    other = file(tmp_path, "a.xlsx", "")
    assert message_of(other) == (
        f"{other}: expected .jsonl, .json (one object per line, or one list of objects), .csv, .parquet, or a "
        "`datasets` folder, got the suffix '.xlsx'. Convert the file, or give it the right suffix."
    )
    assert message_of(tmp_path) == (
        f"{tmp_path}: expected a folder written by datasets' save_to_disk, got one without dataset_info.json. "
        "Check the path."
    )


def test_a_file_without_permission(tmp_path: Path) -> None:
    path = file(tmp_path, "a.jsonl", "{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("NOT TESTED: this user may read every file")
    assert message_of(path) == (
        f"{path}: expected a readable file, got one that cannot be opened: Permission denied. Check its permissions."
    )


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    path = file(tmp_path, "a.parquet", b"PAR1 this is none")
    assert message_of(path).startswith(f"{path}: expected a Parquet file, got one that cannot be read: Parquet magic")
    assert message_of(path).endswith("Write it again, or copy it again.")


def test_parquet_rows_are_numbered_across_batches(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, ({"a": str(number)} for number in range(2500)), ["a"])
    rows = list(read_rows(path))
    assert [row.number for row in rows] == list(range(1, 2501))
    assert rows[2499].values == {"a": "2499"}


def test_datasets_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"a": "x", "b": 1.5}, {"a": "y", "b": None}])
    table.save_to_disk(tmp_path / "one")
    assert values(list(read_rows(tmp_path / "one"))) == [(1, {"a": "x", "b": 1.5}), (2, {"a": "y", "b": None})]
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "both")
    assert message_of(tmp_path / "both") == (
        f"{tmp_path}/both: expected the folder of one split, got a folder of 2 splits. "
        f"Give the folder of one: {tmp_path}/both/train, {tmp_path}/both/test."
    )
    assert len(list(read_rows(tmp_path / "both" / "test"))) == 2


def test_damaged_datasets_folder(tmp_path: Path) -> None:
    file(tmp_path, "dataset_info.json", "{}")
    assert message_of(tmp_path).startswith(f"{tmp_path}: expected a `datasets` folder, got one that cannot be read: ")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_the_same_rows_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    rows = [{"a": "x", "b": 0.1}, {"b": None, "a": 'a,"b"\r\n\r'}]
    for name in ("one", "two"):
        write_rows(tmp_path / f"{name}{suffix}", rows, ["a", "b"])
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
    assert first == second
    assert [row.values["a"] for row in read_rows(tmp_path / f"one{suffix}")] == ["x", 'a,"b"\r\n\r']


def test_half_a_surrogate_pair_can_be_written_as_json_lines_only(tmp_path: Path) -> None:
    rows = [{"a": "file\udcff.png"}]
    write_rows(tmp_path / "a.jsonl", rows, ["a"])
    assert [dict(row.values) for row in read_rows(tmp_path / "a.jsonl")] == rows
    for suffix in (".csv", ".parquet"):
        path = tmp_path / f"a{suffix}"
        with pytest.raises(ManifestError) as caught:
            write_rows(path, rows, ["a"])
        assert str(caught.value) == (
            f"{path}: expected text that UTF-8 can hold, got the character '\\udcff'. "
            "Write .jsonl instead, which escapes it."
        )


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write_rows(path, [{"a": "old"}], ["a"])

    def rows():  # type: ignore[no-untyped-def]
        yield {"a": "new"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(path, rows(), ["a"])
    assert [dict(row.values) for row in read_rows(path)] == [{"a": "old"}]
    write_rows(path, (row.values for row in read_rows(path)), ["a"])
    assert [dict(row.values) for row in read_rows(path)] == [{"a": "old"}]
    assert os.listdir(tmp_path) == [path.name]


def test_only_three_kinds_are_written(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        write_rows(tmp_path / "a.xlsx", [], ["a"])
    assert str(caught.value) == (
        f"{tmp_path}/a.xlsx: expected one of .jsonl, .csv, .parquet to write, got the suffix '.xlsx'. Rename it."
    )
