# SPDX-License-Identifier: Apache-2.0
"""shardplan's Python side: `shardplan.tracer` records models, `shardplan.torch` runs plans, `shardplan.plan` makes them
by a script. Importing this imports none."""

__version__ = "0.3.0"  # as in CMakeLists.txt: a test and dev/release compare them
