"""Sizes and durations as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.errors import CkptfsError, Exit
from ckptfs.units import format_duration, format_size, parse_duration, parse_size, plural


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("123", 123), ("8GiB", 8 << 30), ("500M", 500 << 20), ("1.5g", 3 << 29), ("1kb", 1000),
        ("2 TB", 2 * 10**12), (" 7 b ", 7), (".5K", 512), ("9007199254740993", 9007199254740993),
        ("1.KiB", 1024),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_percentages_are_of_the_base() -> None:
    assert parse_size("50%", 1000) == 500
    assert parse_size("12.5 %", 1000) == 125


@pytest.mark.parametrize(
    "text", ["", " ", "x", "8XB", "-1G", "1e9", "nan", "inf", "1 2", "8GiBB", "%", "٣G", "9" * 40]
)
def test_bad_sizes_are_one_sentence(text: str) -> None:
    with pytest.raises(CkptfsError) as caught:
        parse_size(text)
    assert caught.value.code is Exit.USAGE
    assert repr(text) in caught.value.message


def test_a_percentage_needs_a_base_and_is_at_most_100() -> None:
    with pytest.raises(CkptfsError, match="percentage"):
        parse_size("50%")
    with pytest.raises(CkptfsError, match="more than 100%"):
        parse_size("101%", 1000)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("500ms", 0.5),
        ("1.5", 1.5),
        ("2 d", 172800.0),
        ("0", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1y", "nan", "1h30m", "99999999999"])
def test_bad_durations_are_one_sentence(text: str) -> None:
    with pytest.raises(CkptfsError) as caught:
        parse_duration(text)
    assert caught.value.code is Exit.USAGE


@given(st.text(max_size=20))
def test_any_text_is_a_value_or_a_clear_error(text: str) -> None:
    for parse in (parse_size, parse_duration):
        try:
            value = parse(text)
        except CkptfsError as error:
            value = error.code
        assert value == Exit.USAGE or value >= 0


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_formatted_size_reads_back_nearly_the_same(size: int) -> None:
    assert math.isclose(parse_size(format_size(size)), size, rel_tol=0.051, abs_tol=1)


@given(st.floats(min_value=0.001, max_value=1e8))
def test_formatted_durations_are_short(seconds: float) -> None:
    assert len(format_duration(seconds)) <= 10


def test_formats() -> None:
    assert [format_size(size) for size in (0, 999, 1000, 1536, 1 << 30, 200 << 20)] == [
        "0 B", "999 B", "1.0 KiB", "1.5 KiB", "1.0 GiB", "200 MiB",
    ]  # fmt: skip
    assert [format_duration(seconds) for seconds in (0, 0.25, 4.2, 75, 3600, 90000)] == [
        "0 s", "250 ms", "4.2 s", "1m 15s", "1h", "1d 1h",
    ]  # fmt: skip
    assert (plural(1, "file"), plural(1200, "file"), plural(2, "entry")) == (
        "1 file",
        "1,200 files",
        "2 entries",
    )
