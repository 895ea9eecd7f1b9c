# SPDX-License-Identifier: Apache-2.0
"""Errors of the tracer: one sentence for a person, and the exit code of the command."""

EXIT_USAGE = 2
EXIT_BAD_INPUT = 3
EXIT_ENVIRONMENT = 4


class TracerError(Exception):
    """A request that cannot be traced. `exit_code` is what the command exits with."""

    exit_code = EXIT_BAD_INPUT


class EnvironmentProblem(TracerError):
    """The machine lacks something (a package, a supported version)."""

    exit_code = EXIT_ENVIRONMENT


class UsageProblem(TracerError):
    """Options that contradict each other."""

    exit_code = EXIT_USAGE
