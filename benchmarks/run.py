"""`python -m benchmarks [GROUP ...]`: measure, print tables against the bars, keep the values in results/*.json."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness, suite

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: every bar that was measured is met; 1: one is missed (never with --quick)."""
    options = _parse(arguments)
    groups = suite.groups(options.quick)
    unknown = sorted(set(options.groups) - groups.keys())
    if unknown:
        raise SystemExit(f"no group {unknown[0]!r}; there are {', '.join(groups)}")
    chosen = [groups[name] for name in options.groups or groups]
    results = options.results or (harness.REPO / ".bench" / "quick" if options.quick else RESULTS)
    rounds = 1 if options.quick else options.rounds
    command = "python -m benchmarks " + " ".join(sys.argv[1:] if arguments is None else arguments)
    missed = 0
    for group in chosen:
        store = harness.Store(results / f"{group.name}.json", group, command.strip(), options.fresh or options.quick)
        if not options.show:
            print(f"\n[bench] {group.title}: {len(group.cases)} cases x {rounds} rounds", flush=True)
            harness.measure(group, store, rounds, lambda text: print(text, flush=True))
        print(harness.table(group, store.rounds), flush=True)
        found = harness.summary(group, store.rounds)["ratios"]
        missed += sum(ratio["met"] is False for ratio in found)
    if options.quick:
        print("\n[bench] quick: everything ran; these numbers mean nothing")
        return 0
    print(f"\n[bench] {missed} bar(s) missed" if missed else "\n[bench] every bar that was measured is met")
    return int(missed > 0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{' '.join(suite.groups(True))} (default: all)")
    parser.add_argument("--only", metavar="GROUP", action="append", default=[], help="the same as naming GROUP")
    parser.add_argument("--rounds", type=int, default=5, help="times every case is measured (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round with few steps: a test that everything runs")
    parser.add_argument("--fresh", action="store_true", help="forget earlier rounds instead of going on with them")
    parser.add_argument("--show", action="store_true", help="print the tables of what has been measured; run nothing")
    parser.add_argument("--results", type=Path, help="folder of the JSON files (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    options.groups += options.only
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
