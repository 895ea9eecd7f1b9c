# SPDX-License-Identifier: Apache-2.0
"""The model before a plan is applied: its parameters, units, outline, copy and initial values."""
