"""Commands that measure are run in the test's process."""

from forks import console_forks, start
from in_process import as_it_was, built, in_process

__all__ = ["as_it_was", "built", "console_forks", "in_process", "start"]
