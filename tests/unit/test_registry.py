"""Names in recipes find classes: built in, from installed packages, by address; failures say what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

from m2flow import doctor, registry

REPO = Path(__file__).parents[2]

PACKAGE = '''
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmConfig:
    """A robot of another company."""

    speed: float = 1.0  # metres per second
    host: str  # where it listens

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise ValueError(f"speed: must be more than 0, got {self.speed}")
'''


def wheel(folder: Path, name: str, entry_points: str) -> Path:
    """A real wheel, as a build backend would write it."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": PACKAGE,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"]))
    return path


def install(folder: Path, name: str, entry_points: str) -> Path:
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheel(folder, name, entry_points))], check=True, timeout=120)
    return site


def python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path[:0] = [{str(site)!r}, {str(REPO)!r}]\n"
    return subprocess.run(
        [sys.executable, "-c", path + textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )


def test_an_installed_package_adds_an_env_by_entry_point(tmp_path: Path) -> None:
    site = install(tmp_path, "acme_arms", "[m2flow.env]\nacme_arm = acme_arms:ArmConfig\n")
    result = python(
        site,
        """
        from m2flow import registry
        assert "acme_arms" not in sys.modules
        assert "acme_arm" in registry.names("env"), registry.names("env")
        assert "acme_arms" not in sys.modules, "listing names must import nothing"
        cls = registry.resolve("env", "acme_arm")
        assert cls.__name__ == "ArmConfig"
        assert registry.name_of("env", cls) == "acme_arm"
        try:
            registry.resolve("env", "acme_arn")
        except ValueError as error:
            print(error)
        """,
    )
    assert result.returncode == 0, result.stderr
    assert "unknown env 'acme_arn'; did you mean 'acme_arm'? (known: acme_arm, arithmetic, bandit," in result.stdout


def test_a_recipe_may_use_the_part_of_an_installed_package(tmp_path: Path) -> None:
    site = install(tmp_path, "acme_arms", "[m2flow.env]\nacme_arm = acme_arms:ArmConfig\n")
    result = python(
        site,
        """
        from m2flow import config
        start = {"env": {"name": "acme_arm", "host": "arm.local"}, "policy": "mlp", "objective": "ppo"}
        recipe = config.load(start, "env.speed=0.5")
        assert recipe.env.speed == 0.5 and recipe.env.host == "arm.local"
        assert config.load(config.dump(recipe)) == recipe
        assert config.dump(recipe)["env"]["name"] == "acme_arm"
        try:
            config.load(start, "env.speed=-1", "env.hots=x")
        except ValueError as error:
            print(error)
        """,
    )
    assert result.returncode == 0, result.stderr
    assert "env.speed (override): must be more than 0, got -1" in result.stdout
    assert "env.hots (override): unknown key; did you mean 'host'?" in result.stdout


def test_a_package_cannot_take_over_a_built_in_name(tmp_path: Path) -> None:
    site = install(tmp_path, "acme_arms", "[m2flow.env]\ncount = acme_arms:ArmConfig\n")
    result = python(site, "from m2flow import registry; registry.resolve('env', 'count')")
    assert result.returncode != 0
    assert "env 'count' is registered twice" in result.stderr
    assert "acme_arms" in result.stderr


def test_a_direct_address_needs_no_registration() -> None:
    assert registry.resolve("env", "collections:OrderedDict.fromkeys")("ab") == {"a": None, "b": None}
    from m2flow.config import Recipe

    assert registry.name_of("env", Recipe) == "m2flow.config.recipe:Recipe"
    assert registry.resolve("env", registry.name_of("env", Recipe)) is Recipe


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("env", "gymnasum", "did you mean 'gymnasium'?"),
        ("policy", "xyz", "(known: causal_lm, flow, mlp; or give 'package.module:Class')"),
        ("objective", "m2flow.algorithms.onpolicy:PPO2", "has no 'PPO2'; did you mean 'PPO'?"),
        ("env", "no_such_package.arms:Arm", "no module named 'no_such_package'; check the address"),
        ("env", "m2flow.no_such_module:Arm", "no module named 'm2flow.no_such_module'; check the address"),
        ("env", ":Arm", "is no address"),
        ("envs", "count", "unknown kind 'envs'; did you mean 'env'?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(kind: str, name: str, message: str) -> None:
    with pytest.raises(registry.UnknownName) as caught:
        registry.resolve(kind, name)
    assert message in str(caught.value)


def test_a_missing_package_is_answered_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    (tmp_path / "needs_it.py").write_text("import envpool_is_not_here\n")
    code = """
        import builtins
        real = builtins.__import__
        def blocked(name, *rest):
            if name.partition(".")[0] in ("gymnasium", "imageio_ffmpeg"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, *rest)
        builtins.__import__ = blocked
        from m2flow import registry
        for kind, name in (("env", "needs_gym:A"), ("env", "needs_film:A"), ("env", "needs_other:A")):
            try:
                registry.resolve(kind, name)
            except registry.MissingPackage as error:
                print(error)
    """
    (tmp_path / "needs_gym.py").write_text("import gymnasium.vector\n")
    (tmp_path / "needs_film.py").write_text("import imageio_ffmpeg\n")
    (tmp_path / "needs_other.py").write_text("import some_other_package.part\n")
    out = python(tmp_path, code).stdout
    assert (
        "env 'needs_gym:A' needs the package 'gymnasium', which is not installed: pip install 'm2flow[gymnasium]'"
        in out
    )
    assert "needs the package 'some_other_package', which is not installed: pip install some-other-package" in out


def test_a_module_missing_inside_a_package_is_that_package_s_fault(tmp_path: Path) -> None:
    (tmp_path / "broken_arm").mkdir()
    (tmp_path / "broken_arm" / "__init__.py").write_text("import broken_arm.forgotten\n")
    result = python(tmp_path, "from m2flow import registry; registry.resolve('env', 'broken_arm:Arm')")
    assert "ModuleNotFoundError: No module named 'broken_arm.forgotten'" in result.stderr


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in registry.BUILTIN.items() for name in table])
def test_every_built_in_name_leads_to_something(kind: str, name: str) -> None:
    found = registry.resolve(kind, name)
    assert callable(found)
    assert registry.name_of(kind, found) == name


def test_the_extras_of_the_registry_and_of_pyproject_agree() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(registry.EXTRAS) <= set(extras)
    for extra, packages in registry.EXTRAS.items():
        wanted = " ".join(extras[extra])
        assert all(name.split("-")[0] in wanted for name in packages), (extra, packages, wanted)
    core = " ".join(project["dependencies"])
    assert all(name in core for name in doctor.CORE)
    assert len(project["dependencies"]) == len(doctor.CORE)
