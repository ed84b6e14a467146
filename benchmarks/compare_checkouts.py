"""Compare the step time of two checkouts of Paceline on two CPU ranks.

    python benchmarks/compare_checkouts.py BEFORE/.venv/bin/python AFTER/.venv/bin/python [--rounds 5]

Each round trains the CNN and the MLP of benchmarks/cpu.py with both checkouts, in alternating order. The ratio is
computed per round, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from cpu import flags_of, time_run
from cpu_ranks import WORKS
from reliability import describe_machine

STEPS, WARMUP = {"cnn": 150, "mlp": 1000}, {"cnn": 30, "mlp": 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=lambda path: str(Path(path).absolute()))
    parser.add_argument("after", type=lambda path: str(Path(path).absolute()))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    recipes = {"cnn": "cifar10-cnn", "mlp": "synthetic-mlp"}
    print("| model | clock | before, ms a step | after | after / before, median | smallest | largest |")
    print("|---|---|---|---|---|---|---|")
    for name, recipe in recipes.items():
        seen: dict[str, list[tuple[float, float]]] = {options.before: [], options.after: []}
        for number in range(options.rounds):
            turn = [options.before, options.after] if number % 2 == 0 else [options.after, options.before]
            for python in turn:
                with tempfile.TemporaryDirectory() as folder:
                    done = time_run(recipe, flags_of(WORKS[name]), Path(folder), STEPS[name], WARMUP[name], python)
                seen[python].append((1000 / done.steps_per_s, 1000 * done.step_cpu_s))
        for index, clock in enumerate(("wall", "CPU of all processes")):
            before, after = ([row[index] for row in seen[python]] for python in (options.before, options.after))
            ratios = [new / old for old, new in zip(before, after, strict=True)]
            print(
                f"| {name} | {clock} | {statistics.median(before):.2f} | {statistics.median(after):.2f} "
                f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |",
                flush=True,
            )
    print(f"\n{options.rounds} rounds. {describe_machine()}.")


if __name__ == "__main__":
    main()
