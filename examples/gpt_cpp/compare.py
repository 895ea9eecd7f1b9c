# SPDX-License-Identifier: Apache-2.0
"""Says what the losses of a training that was interrupted, and went on, show beside those of its twin in Python.

compare.py FIRST SECOND TWIN STEPS: what each has printed; the twin was not interrupted, and has the ranks of the first.
"""

import re
import sys


def losses(path: str) -> dict[int, str]:
    with open(path) as file:
        return {int(step): loss for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", file.read())}


def main() -> int:
    first, second, twin, steps = losses(sys.argv[1]), losses(sys.argv[2]), losses(sys.argv[3]), int(sys.argv[4])
    together = {step: float(loss) for step, loss in (first | second).items()}
    whole = sorted(together) == list(range(1, steps + 1))
    early, late = (
        sum(together.get(s, float("nan")) for s in part) / 5 for part in (range(1, 6), range(steps - 4, steps + 1))
    )
    apart = max(abs(together[s] - float(twin[s])) for s in second) if second else float("nan")
    answers = {
        "every step once": whole and not first.keys() & second.keys(),
        "ended in the middle": 0 < len(first) < steps,
        "the loss fell": late < early,
        "losses are those in Python, bit for bit": bool(first)
        and all(twin.get(s) == loss for s, loss in first.items()),
        "and near them on another number of ranks": apart < 0.01,
    }
    for question, yes in answers.items():
        print(f"{question}: {'yes' if yes else 'NO'}")
    return 0 if all(answers.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
