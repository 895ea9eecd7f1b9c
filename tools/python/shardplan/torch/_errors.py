# SPDX-License-Identifier: Apache-2.0
"""The adapter's exception."""


class PlanError(RuntimeError):
    """A plan that cannot be applied: unreadable, made for another model or for other ranks."""
