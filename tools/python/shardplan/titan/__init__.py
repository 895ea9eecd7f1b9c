# SPDX-License-Identifier: Apache-2.0
"""`shardplan torchtitan`: a torchtitan job by its own configuration, traced, planned and simulated."""
