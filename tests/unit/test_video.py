from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.observe import video
from m2flow.observe.video import VideoFolder, write_video


def read(path: Path) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """(what the container says, frames [T, H, W, 3])."""
    from imageio_ffmpeg import get_ffmpeg_exe

    exe = get_ffmpeg_exe()
    words = subprocess.run([exe, "-i", str(path)], capture_output=True, text=True).stderr
    found = re.search(r"Video: (\w+).*?, (\w+)\(?.*?, (\d+)x(\d+).*?, ([\d.]+) fps", words)
    assert found is not None, words
    meta = {"codec": found[1], "pix_fmt": found[2], "size": (int(found[3]), int(found[4])), "fps": float(found[5])}
    command = [exe, "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8)
    return meta, raw.reshape(-1, meta["size"][1], meta["size"][0], 3)


def frames(count: int, height: int = 48, width: int = 64) -> np.ndarray[Any, Any]:
    """Frames whose brightness is their number."""
    return np.stack([np.full((height, width, 3), (40 * i + 20) % 256, np.uint8) for i in range(count)])


def test_a16_five_frames_survive_a_process_that_ends_at_once(tmp_path: Path) -> None:
    script = (
        "import os, numpy as np\n"
        "from m2flow.observe.video import write_video\n"
        f"write_video({str(tmp_path / 'a.mp4')!r}, np.zeros((5, 48, 64, 3), np.uint8))\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert len(read(tmp_path / "a.mp4")[1]) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_frames_come_back_in_order_in_a_format_browsers_play(tmp_path: Path) -> None:
    path = write_video(tmp_path / "deep" / "b.mp4", frames(5), fps=10)
    meta, got = read(path)
    assert meta["codec"] == "h264"
    assert meta["pix_fmt"] == "yuv420p"
    assert meta["fps"] == 10
    assert meta["size"] == (64, 48)
    np.testing.assert_allclose(got.reshape(5, -1).mean(1), [20, 60, 100, 140, 180], atol=4)


def test_odd_sizes_and_generators_are_taken(tmp_path: Path) -> None:
    path = write_video(tmp_path / "c.mp4", (frame for frame in frames(3, 31, 33)))
    meta, got = read(path)
    assert meta["size"] == (34, 32)
    assert len(got) == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no frames"),
        ([np.zeros((4, 4, 3), np.float32)], r"frame 0: got float32 \[4, 4, 3\], expected uint8 \[height, width, 3\]"),
        ([np.zeros((4, 4), np.uint8)], r"frame 0: got uint8 \[4, 4\]"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 6, 3), np.uint8)], r"frame 1: .*expected uint8 \[4, 4, 3\]"),
    ],
)
def test_wrong_frames_are_errors_and_leave_no_file(tmp_path: Path, bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / "d.mp4", bad)
    assert not list(tmp_path.iterdir())


def test_an_encoder_that_fails_is_an_error_with_its_words_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / "e.mp4", frames(2))
    before = path.read_bytes()
    encoder = tmp_path / "encoder"
    encoder.write_text("#!/bin/sh\necho 'no such codec' >&2\nexit 3\n")
    encoder.chmod(0o755)
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(encoder))
    with pytest.raises(RuntimeError, match="no such codec"):
        write_video(path, frames(40, 256, 256))
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.mp4", "encoder"]


def test_an_encoder_that_hangs_is_an_error_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tmp_path / "encoder"
    encoder.write_text("#!/bin/sh\ncat > /dev/null\nexec sleep 60\n")
    encoder.chmod(0o755)
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(encoder))
    monkeypatch.setattr(video, "LIMIT", 0.5)
    with pytest.raises(RuntimeError, match=r"did not finish within 0\.5 s"):
        write_video(tmp_path / "f.mp4", frames(2))


def test_a_folder_of_videos_says_why_it_is_empty(tmp_path: Path) -> None:
    folder = VideoFolder(tmp_path / "videos", fps=5)
    folder.none("no OpenGL here")
    assert (tmp_path / "videos" / "none.txt").read_text() == "no OpenGL here\n"
    assert folder.write("step_000001_seed_7", frames(2)) == "step_000001_seed_7.mp4"
    assert len(read(tmp_path / "videos" / "step_000001_seed_7.mp4")[1]) == 2
