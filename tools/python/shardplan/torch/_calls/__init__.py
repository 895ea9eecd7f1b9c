# SPDX-License-Identifier: Apache-2.0
"""Calls of a training loop besides forward and backward."""
