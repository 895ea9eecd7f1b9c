# SPDX-License-Identifier: Apache-2.0
"""Cases of off_plan.py that end otherwise than they have to, by kind of plan. Each is an expected failure:
test_off_plan.py fails for one that is mended, until it is taken out here. (`off_plan.py` prints this list behind the
table.)"""

WRONG: dict[str, tuple[str, ...]] = {}
