# SPDX-License-Identifier: Apache-2.0
"""The entry points apply, auto and remove, and the change to another plan."""
