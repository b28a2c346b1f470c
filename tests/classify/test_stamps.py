"""Time stamps of the formats that meet in one job's logs."""

from __future__ import annotations

import pytest

from ncclops.classify.stamps import comparable, first_stamp, last_stamp


def clock(h: int, m: int, s: float) -> float:
    return h * 3600 + m * 60 + s


@pytest.mark.parametrize(
    ("text", "stamp"),
    [
        ("[2026-02-25 18:08:45] n1:1:1 [0] x", (2026, 2, 25, clock(18, 8, 45))),
        ("2025-01-21T04:41:44,285060+00:00 pt", (2025, 1, 21, clock(4, 41, 44.28506))),
        ("2025-01-21T04:41:44.5Z", (2025, 1, 21, clock(4, 41, 44.5))),
        ("  time      : 2025-06-12_22:45:44", (2025, 6, 12, clock(22, 45, 44))),
        ("2023-May-21 01:40:03.0080 937:937", (2023, 5, 21, clock(1, 40, 3.008))),
        ("2025/06/12 22:45:44 main.go", (2025, 6, 12, clock(22, 45, 44))),
        ("[rank3]:[E606 09:09:08.164985344 P", (None, 6, 6, clock(9, 9, 8.164985344))),
        ("[E1218 20:27:21.426 P", (None, 12, 18, clock(20, 27, 21.426))),
        ("W0621 21:35:18.832000 23 run.py", (None, 6, 21, clock(21, 35, 18.832))),
        ("[Fri Oct 14 14:56:49 2022] NVRM", (2022, 10, 14, clock(14, 56, 49))),
        ("Oct  4 14:56:49 node kernel:", (None, 10, 4, clock(14, 56, 49))),
        ("[10/14/2025-12:04:44] [TRT]", (2025, 10, 14, clock(12, 4, 44))),
        ("[6781741.548779] NVRM: Xid", None),
        ("2025-13-40 10:00:00", None),
        ("1/1252 [00:02<58:30,  0.36it/s]", None),
        ("", None),
    ],
)
def test_formats(text: str, stamp: tuple[int | None, int, int, float] | None) -> None:
    assert first_stamp(text) == stamp


def test_the_nearest_stamp_above_is_inherited() -> None:
    text = "2026-01-01 10:00:00 a\n2026-01-01 10:00:05 b\nno time\n"
    assert last_stamp(text) == (2026, 1, 1, clock(10, 0, 5))


def test_stamps_without_a_year_take_the_one_the_job_shows() -> None:
    glog, iso = first_stamp("E606 09:09:08"), first_stamp("2026-06-06 09:09:09")
    assert glog and iso
    assert 0 < comparable(iso, 2026) - comparable(glog, 2026) < 2
