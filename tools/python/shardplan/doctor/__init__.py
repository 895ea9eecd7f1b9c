# SPDX-License-Identifier: Apache-2.0
"""What is installed, which backends work here, and what to do about those that do not: `shardplan doctor`."""
