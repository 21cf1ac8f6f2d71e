"""The command line. Every command is one call of `m2flow.api`, imported when the command runs. The names are the
same, but where Python has another use for one: eval is `evaluate`, config `describe`, doctor `diagnose`.

Exit codes: 0 done; 1 the run failed, or `check`/`doctor` found a problem; 2 the request was wrong (one message says
what and how to mend it); 130 interrupted.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")
USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)

app = typer.Typer(
    name="m2flow",
    help="Train policies with reinforcement learning: say what happens in a recipe, where it runs in a plan.",
    epilog="\b\nStart with: m2flow init my.yaml, m2flow check my.yaml, m2flow train my.yaml",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_debug = False

RecipeArg = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one that comes with m2flow.")
]
OverridesArg = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, as section.key=value.")
]
RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
PlanOption = Annotated[
    str | None, typer.Option(help="Where it runs: collocated, disaggregated, hybrid, or a plan file.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and no notes.")]


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Register a command whose failures end in one clear message and the right exit code."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt as interrupt:  # a run says whether and how it can be continued
            typer.echo(f"m2flow: {str(interrupt) or 'interrupted'}", err=True)
            raise typer.Exit(130) from None
        except ImportError as error:
            _end_import(error)
        except USER_ERRORS as error:
            _end(error, 2)
        except RuntimeError as error:  # the run's own message: which stage failed, where, and its log
            _end(error, 1)
        except Exception as error:  # noqa: BLE001  a fault of m2flow: whoever reports it needs the traceback
            traceback.print_exc()
            _end(error, 1)

    return app.command()(guarded)


def _end_import(error: ImportError) -> NoReturn:
    """A package to install is the user's to mend; a name missing in a module of ours is not."""
    from m2flow import registry

    reason = registry.missing("this command", "m2flow", error) if isinstance(error, ModuleNotFoundError) else error
    ours = reason is error and error.name is not None
    if ours:
        traceback.print_exc()
    _end(reason, 1 if ours else 2)


def _end(error: BaseException, code: int) -> NoReturn:
    if _debug:
        raise error
    typer.echo(
        f"m2flow: {str(error) or type(error).__name__}\n(m2flow --debug ... shows where this was raised)", err=True
    )
    raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        from m2flow._version import __version__

        typer.echo(f"m2flow {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[  # noqa: ARG001  its callback has answered
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    global _debug
    _debug = debug


@command
def train(
    recipe: RecipeArg,
    overrides: OverridesArg = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of this run. Default: a new one under the recipe's run_dir.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, help="One seed or several: --seed 0 1 2 trains three runs.")
    ] = None,
    plan: PlanOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train a policy and write a report."""
    from m2flow import api

    api.distinct(seed or [])
    seeds: list[int | None] = [*(seed or [])] or [None]
    runs = []
    for one in seeds:
        folder = run_dir / f"seed-{one}" if run_dir is not None and len(seeds) > 1 else run_dir
        run = api.train(recipe, *(overrides or ()), run_dir=folder, seed=one, plan=plan, quiet=quiet)
        runs.append(run.path)
    typer.echo(api.show(*runs))
    if len(runs) > 1:
        page = api.report(*runs)
        typer.echo(f"report of all seeds: {page}")
    if any(api.Run(path).alarmed for path in runs):
        raise typer.Exit(1)


@command
def eval(  # noqa: A001  the command is called eval
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or one of its checkpoints.")],
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="How many held-out seeds, or tasks of a language model. Default: as the recipe says."),
    ] = None,
    videos: Annotated[int, typer.Option(min=0, help="How many episodes to film.")] = 0,
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to evaluate. Default: the latest one.")] = None,
) -> None:
    """Evaluate a policy, each held-out seed once, and store the result."""
    from m2flow import api
    from m2flow.observe.rundata import attempted, show_number

    result = api.evaluate(run, seeds=seeds, videos=videos, step=step)
    counted, begun = attempted(result)
    typer.echo(f"{run}, weights after step {result.step}, {len(result.episodes)} {counted}, each {begun} once")
    for name, value in result.metrics.items():
        low, high = result.intervals.get(name, (value, value))
        between = f"  [{show_number(low, name)}, {show_number(high, name)}]" if low < high else ""
        typer.echo(f"  {name:<22} {show_number(value, name):>10}{between}")
    typer.echo(f"stored: {api.evaluation_file(run, result)}")


@command
def check(
    recipe: RecipeArg,
    overrides: OverridesArg = None,
    plan: PlanOption = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Check against a cluster described in YAML instead of this machine.")
    ] = None,
    diff: Annotated[
        str | None, typer.Option(metavar="PLAN", help="Another plan: check it too, and show what it changes.")
    ] = None,
) -> None:
    """Check recipe, plan and memory; start nothing."""
    from m2flow import api

    found = api.check(recipe, *(overrides or ()), plan=plan, cluster=cluster, diff=diff)
    typer.echo(found)
    if not found.ok:
        raise typer.Exit(1)


@command
def config(recipe: RecipeArg, overrides: OverridesArg = None) -> None:
    """Print a recipe filled in, each key explained."""
    from m2flow import api

    typer.echo(api.describe(recipe, *(overrides or ())), nl=False)


@command
def show(runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")]) -> None:
    """Show the results of runs, side by side."""
    from m2flow import api

    typer.echo(api.show(*runs))


@command
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page to write. Default: in or beside the first run's folder."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write an SVG picture of this curve alone, such as eval/success_once."),
    ] = None,
) -> None:
    """Write one page about runs: curves, timeline, episodes."""
    from m2flow import api

    typer.echo(f"wrote {api.report(*runs, out=out, metric=metric)}")


@command
def resume(
    run: RunArg,
    steps: Annotated[
        int | None, typer.Option(min=1, help="New total of training steps. Default: as the run began.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Checkpoint to continue from. Default: the latest one.")
    ] = None,
    plan: PlanOption = None,
    quiet: QuietOption = False,
) -> None:
    """Continue a run exactly where it was saved."""
    from m2flow import api

    done = api.resume(run, steps=steps, step=step, plan=plan, quiet=quiet)
    typer.echo(api.show(done.path))
    if done.alarmed:
        raise typer.Exit(1)


@command
def ls(root: Annotated[Path, typer.Argument(metavar="[ROOT]", help="Folder that holds runs.")] = Path("runs")) -> None:
    """List runs: state, step, results."""
    from m2flow import api

    typer.echo(api.ls(root))


@command
def doctor(root: Annotated[Path, typer.Option("--runs", help="Folder that holds runs.")] = Path("runs")) -> None:
    """Tell what this machine has and what is wrong."""
    from m2flow.doctor import examine  # not through the API, which a broken installation may keep from loading

    findings = examine(root)
    for finding in findings:
        typer.echo(f"{finding.level:<8} {finding.text}")
        if finding.fix:
            typer.echo(f"{'':<8} -> {finding.fix}")
    problems = sum(finding.level == "problem" for finding in findings)
    typer.echo(f"{problems or 'no'} problem{'' if problems == 1 else 's'}")
    if problems:
        raise typer.Exit(1)


@command
def init(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="File to write.")] = Path("recipe.yaml"),
    overrides: OverridesArg = None,
    start: Annotated[
        list[str] | None, typer.Option("--from", metavar="ENV[/POLICY[/OBJECTIVE]]", help="Parts to begin with.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented recipe to begin with."""
    from m2flow import api

    api.init(path, *(overrides or ()), start=start, force=force)
    files = ", ".join(api.awaited(path))
    first = f"put your rows into {files}, then " if files else ""
    typer.echo(f"wrote {path}; next: {first}m2flow check {path}")


def arguments(argv: Sequence[str]) -> list[str]:
    """The command line as typer reads it: `--debug` first, and `--seed 0 1 2` as `--seed 0 --seed 1 --seed 2`."""
    result: list[str] = []
    listing = False
    for word in argv:
        if listing and word.isdigit() and result[-1] != "--seed":
            result.append("--seed")
        elif word.startswith("-") or not (listing and word.isdigit()):
            listing = word == "--seed"
        result.append(word)
    return ["--debug", *(word for word in result if word != "--debug")] if "--debug" in result else result


def main(argv: Sequence[str] | None = None) -> Any:
    """Entry point of the `m2flow` command."""
    app(args=arguments(sys.argv[1:] if argv is None else argv), prog_name="m2flow")


if __name__ == "__main__":
    main()
