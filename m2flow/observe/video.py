"""Videos: H.264 in MP4, playable in browsers, complete on disk when `write_video` returns."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from m2flow.types import Array

LIMIT = 120.0  # seconds the encoder may take for one write, and to finish


def write_video(path: str | Path, frames: Iterable[Array], fps: float = 20.0) -> Path:
    """Write uint8 frames [H, W, 3] as MP4 (H.264, yuv420p). Odd sizes are padded by one row or column.

    The file appears under its name only when it is whole and on disk, so it survives if the process ends at once.

    Raises:
        ValueError: no frame, or a frame that is not uint8 [H, W, 3] of the first one's size.
        RuntimeError: the encoder failed; with its own words.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.mp4")
    encoder: subprocess.Popen[bytes] | None = None
    shape: tuple[int, ...] = ()
    with tempfile.TemporaryFile() as words:
        try:
            for index, frame in enumerate(frames):
                image = np.asarray(frame)
                if (
                    image.dtype != np.uint8
                    or image.ndim != 3
                    or image.shape[2] != 3
                    or (shape and image.shape != shape)
                ):
                    wanted = f"uint8 {list(shape)}" if shape else "uint8 [height, width, 3]"
                    raise ValueError(f"frame {index}: got {image.dtype} {list(image.shape)}, expected {wanted}")
                if encoder is None:
                    shape = image.shape
                    encoder = _start(scratch, shape, fps, words)
                assert encoder.stdin is not None
                encoder.stdin.write(_even(image).tobytes())
            if encoder is None:
                raise ValueError(f"{path}: there are no frames to write")
            _finish(encoder, path, words)
        except BrokenPipeError as error:
            raise RuntimeError(f"{path}: the video encoder ended early: {_said(words)}") from error
        finally:
            if encoder is not None:
                _stop(encoder)
            if sys.exc_info()[0] is not None:
                scratch.unlink(missing_ok=True)
    _settle(scratch, path)
    return path


def _start(target: Path, shape: tuple[int, ...], fps: float, words: IO[bytes]) -> subprocess.Popen[bytes]:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ImportError("package imageio-ffmpeg is missing: pip install 'm2flow[video]'")
    from imageio_ffmpeg import get_ffmpeg_exe

    size = f"{shape[1] + shape[1] % 2}x{shape[0] + shape[0] % 2}"
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
    coding = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20", "-movflags", "+faststart", "-threads", "1"]
    command = [get_ffmpeg_exe(), "-y", "-loglevel", "error", *source, *coding, str(target)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=words)


def _finish(encoder: subprocess.Popen[bytes], path: Path, words: IO[bytes]) -> None:
    assert encoder.stdin is not None
    encoder.stdin.close()
    try:
        status = encoder.wait(LIMIT)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{path}: the video encoder did not finish within {LIMIT:g} s") from error
    if status != 0:
        raise RuntimeError(f"{path}: the video encoder ended with status {status}: {_said(words)}")


def _stop(encoder: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind, whatever went wrong."""
    if encoder.poll() is None:
        encoder.kill()
        encoder.wait()
    assert encoder.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        encoder.stdin.close()


def _said(words: IO[bytes]) -> str:
    words.seek(0)
    return words.read().decode(errors="replace").strip()


def _even(image: Array) -> Array:
    """Repeat the last row or column where the encoder needs an even size."""
    height, width = image.shape[:2]
    if height % 2 == 0 and width % 2 == 0:
        return image
    return np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _settle(scratch: Path, path: Path) -> None:
    """Put the file on disk and give it its name; then put the name on disk."""
    for step in ("file", "name"):
        if step == "name":
            scratch.replace(path)
        handle = os.open(scratch if step == "file" else path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@dataclass(frozen=True, slots=True)
class VideoFolder:
    """A folder of videos: what an `Evaluator` writes to."""

    folder: Path
    fps: float = 20.0

    def write(self, name: str, frames: Iterable[Array]) -> str:
        """Store a video under `name`.mp4; the file name."""
        write_video(self.folder / f"{name}.mp4", frames, self.fps)
        return f"{name}.mp4"

    def none(self, reason: str) -> None:
        """Say in none.txt why there are no videos."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "none.txt").write_text(reason.strip() + "\n", encoding="utf-8")
