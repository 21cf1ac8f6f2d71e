"""Drawing frames without a display: is there a system OpenGL, and how to make simulators use it.

Software OpenGL is enough. On Debian and Ubuntu the packages are libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HINT = "videos need a system OpenGL: apt-get install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri (no GPU needed)"
_LOG = logging.getLogger("m2flow.envs")

# A broken driver may crash whoever asks it for a context, so another process asks. It makes the kind of context that
# MuJoCo needs (EGL, off screen, desktop OpenGL) and reads the renderer's name. 0x3024.. are constants of egl.h.
_PROBE = """
import ctypes
from ctypes import c_char_p, c_int, c_uint, c_void_p, byref
egl = ctypes.CDLL("libEGL.so.1", ctypes.RTLD_GLOBAL)
for name in ("eglGetDisplay", "eglCreatePbufferSurface", "eglCreateContext", "eglGetProcAddress"):
    getattr(egl, name).restype = c_void_p
display = None
query = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
platform = egl.eglGetProcAddress(b"eglGetPlatformDisplayEXT")
found, devices = c_int(), (c_void_p * 16)()
candidates = []
if query and platform:
    ctypes.CFUNCTYPE(c_uint, c_int, c_void_p, c_void_p)(query)(16, devices, byref(found))
    make = ctypes.CFUNCTYPE(c_void_p, c_uint, c_void_p, c_void_p)(platform)
    candidates = [make(0x313F, devices[i], None) for i in range(found.value)]
for display in [*candidates, egl.eglGetDisplay(c_void_p(0))]:
    if display and egl.eglInitialize(c_void_p(display), None, None):
        break
else:
    raise SystemExit("no EGL display (is a driver such as libegl-mesa0 installed?)")
egl.eglBindAPI(0x30A2)
wanted = (c_int * 9)(0x3033, 1, 0x3040, 8, 0x3024, 8, 0x3025, 24, 0x3038)
config, count = c_void_p(), c_int()
egl.eglChooseConfig(c_void_p(display), wanted, byref(config), 1, byref(count))
if not count.value:
    raise SystemExit("EGL has no off-screen OpenGL configuration")
size = (c_int * 5)(0x3057, 8, 0x3056, 8, 0x3038)
surface = egl.eglCreatePbufferSurface(c_void_p(display), config, size)
context = egl.eglCreateContext(c_void_p(display), config, None, None)
if not context or not egl.eglMakeCurrent(c_void_p(display), c_void_p(surface), c_void_p(surface), c_void_p(context)):
    raise SystemExit("EGL cannot make an OpenGL context (is libgl1-mesa-dri installed?)")
print(ctypes.CFUNCTYPE(c_char_p, c_uint)(egl.eglGetProcAddress(b"glGetString"))(0x1F01).decode(), end="")
"""


@cache
def gl_available() -> tuple[bool, str]:
    """(True, name of the renderer), or (False, why not and what to install), found out once per process."""
    if not sys.platform.startswith("linux"):
        return False, "drawing MuJoCo frames without a display is supported on Linux"
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], check=False, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False, f"{HINT}. The OpenGL driver did not answer within 60 s"
    if done.returncode == 0:
        return True, done.stdout
    lines = done.stderr.strip().splitlines()
    reason = lines[-1] if lines else f"the driver ended the probe with exit status {done.returncode}"
    return False, f"{HINT}. Here: {reason}"


@cache
def load_gl() -> bool:
    """Bring libEGL, where it is installed, into this process so that MuJoCo finds it (its symbols must be global)."""
    try:
        ctypes.CDLL("libEGL.so.1", ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


_INCLUDED = re.compile(r"""<include\s+file\s*=\s*["']([^"']+)["']""")


@cache
def without_shadows(assets: str) -> str:
    """A copy of an envpool asset folder in which MuJoCo draws no shadows and no multisampling; removed at exit.

    In software these cost ten times the rest of a frame. Only pictures differ: the physics of the models is untouched.
    Files are links, but for the models, which get a last word on visual quality.
    """
    target = Path(tempfile.mkdtemp(prefix="m2flow-assets-"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    sources = list((Path(assets) / "mujoco").rglob("*"))
    models = {source: source.read_text(encoding="utf-8") for source in sources if source.suffix == ".xml"}
    # An included file is pasted into the model that names it, and some of them into places without visual settings.
    pasted = {Path(name).name for text in models.values() for name in _INCLUDED.findall(text)}
    for source in sources:
        copy = target / source.relative_to(assets)
        if source.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = models.get(source, "")
        end = text.rfind("</mujoco>")
        if end < 0 or source.name in pasted:
            copy.symlink_to(source)
        else:
            quality = '<visual><quality shadowsize="0" offsamples="0"/></visual>'
            copy.write_text(text[:end] + quality + text[end:], encoding="utf-8")
    return str(target)


def prepare_mujoco(render: bool) -> None:
    """Import mujoco ready to draw off screen, and hand its warnings to `logging`, each once.

    By itself mujoco prints every warning of every lane to the terminal and into a file MUJOCO_LOG.TXT in the current
    folder.
    """
    if render:
        os.environ.setdefault("MUJOCO_GL", "egl")  # the default, glfw, needs a display
    import mujoco

    if mujoco.get_mju_user_warning() is None:
        seen: set[str] = set()

        def once(message: str) -> None:
            if message not in seen:
                seen.add(message)
                _LOG.warning("mujoco: %s", message)

        mujoco.set_mju_user_warning(once)
