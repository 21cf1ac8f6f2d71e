"""The VideoSink contract, asked of every place that videos go to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.observe.video import VideoFolder

PROTOCOLS = ("VideoSink",)
SINKS: dict[str, Callable[[Path], Any]] = {"folder": VideoFolder}
sinks = pytest.mark.parametrize("make", SINKS.values(), ids=SINKS.keys())
FRAMES = [np.full((16, 16, 3), 40 * n, np.uint8) for n in range(3)]


@sinks
def test_a_video_is_whole_under_the_name_that_is_told(make: Any, tmp_path: Path) -> None:
    sink = make(tmp_path / "videos")
    names = [sink.write(name, FRAMES) for name in ("one", "two")]
    assert len(set(names)) == 2
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == sorted(names)
    assert all((tmp_path / "videos" / name).stat().st_size > 0 for name in names)


@sinks
def test_frames_that_are_none_are_refused_and_leave_nothing(make: Any, tmp_path: Path) -> None:
    sink = make(tmp_path)
    for wrong in ([], [np.zeros((16, 16, 3))], [*FRAMES, np.zeros((8, 8, 3), np.uint8)]):
        with pytest.raises(ValueError, match="frame"):
            sink.write("wrong", wrong)
    assert list(tmp_path.iterdir()) == []


@sinks
def test_why_there_are_none_can_be_read(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "new").none("no OpenGL here")
    [path] = (tmp_path / "new").iterdir()
    assert "no OpenGL here" in path.read_text(encoding="utf-8")
