# SPDX-License-Identifier: Apache-2.0
"""The ranks of a training job: what they share, which of them are alive, what they agree on; the compiled module and
the arguments of calls."""
