# SPDX-License-Identifier: Apache-2.0
"""torchtitan's configuration of a job, by torchtitan's own parser."""

from __future__ import annotations

import sys
import unittest.mock
from typing import Any

from shardplan.installing import in_checkout
from shardplan.titan.unplanned import why_not_planned
from shardplan.tracer.errors import EnvironmentProblem, TracerError


def configuration(words: list[str], program: str) -> Any:
    """torchtitan's Trainer.Config of these arguments. program: that its parser names. Raises TracerError; SystemExit
    where the parser has said what is wrong, or helped."""
    try:
        from torchtitan.config.manager import ConfigManager
    except ImportError as error:
        raise why_not_imported(error) from error
    try:
        with unittest.mock.patch.object(sys, "argv", [program]):
            config = ConfigManager().parse_args(words)
    except ModuleNotFoundError as error:  # of a module that --module names it is a plain ImportError
        raise EnvironmentProblem(f"torchtitan's parser needs {error.name} (pip install {error.name})") from error
    except ImportError as error:
        raise TracerError(f"torchtitan: {error}") from error
    except (ValueError, AssertionError) as error:
        raise TracerError(f"torchtitan refuses the job: {error}") from error
    except Exception as error:  # --config names any callable of a module, which is called
        why = str(error) or type(error).__name__
        raise TracerError(f"--config names no configuration of torchtitan's: {why}") from error
    if getattr(config, "model_spec", None) is None:
        raise TracerError(
            f"--config names no configuration of torchtitan's trainer (found a {type(config).__name__}, expected a "
            "Trainer.Config with a model)"
        )
    if reason := why_not_planned(config):
        raise TracerError(reason)
    return config


def why_not_imported(error: ImportError) -> EnvironmentProblem:
    """torchtitan, or a package that it needs, is not there."""
    missing = isinstance(error, ModuleNotFoundError) and error.name
    package = error.name.partition(".")[0] if missing else "torchtitan"
    how = "tools/setup" if package == "torchtitan" and in_checkout() else f"pip install {package}"
    return EnvironmentProblem(f"cannot import torchtitan: {error} ({how})")
