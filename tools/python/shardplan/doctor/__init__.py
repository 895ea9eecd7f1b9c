# SPDX-License-Identifier: Apache-2.0
"""`shardplan doctor`: says what is installed, which backends work here, and what to do about those that do not."""
