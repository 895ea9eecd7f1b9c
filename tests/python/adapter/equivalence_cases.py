# SPDX-License-Identifier: Apache-2.0
"""Every case of FSDP2 that has a name: test_equivalence.py compares a plan with each, and tests/python/races proves
that nothing races in it."""

from equivalence_families import CASES as FAMILIES
from equivalence_settings import CASES as SETTINGS

ALL = [*SETTINGS, *FAMILIES]
