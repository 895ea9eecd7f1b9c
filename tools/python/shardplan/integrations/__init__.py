# SPDX-License-Identifier: Apache-2.0
"""shardplan inside of other libraries' training loops."""

from .accelerate import use_plans

__all__ = ["use_plans"]
