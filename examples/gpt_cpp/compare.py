# SPDX-License-Identifier: Apache-2.0
"""Says what the losses of a training that was interrupted, and went on, show."""

import re
import sys


def losses(path: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", open(path).read())}


def main() -> int:
    first, second, steps = losses(sys.argv[1]), losses(sys.argv[2]), int(sys.argv[3])
    together = first | second
    whole = sorted(together) == list(range(1, steps + 1))
    print(f"every step once: {'yes' if whole and not first.keys() & second.keys() else 'NO'}")
    print(f"ended in the middle: {'yes' if len(first) < steps else 'NO'}")
    early, late = (sum(together[s] for s in part) / 5 for part in (range(1, 6), range(steps - 4, steps + 1)))
    print(f"the loss fell: {'yes' if late < early else 'NO'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
