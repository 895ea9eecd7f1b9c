# SPDX-License-Identifier: Apache-2.0
"""The error of this package."""


class NotBuilt(ImportError):
    """The adapter is not there for this torch, and cannot be compiled. The text says what to do."""
