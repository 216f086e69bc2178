"""Commands that measure are run in the test's process."""

from in_process import as_it_was, built, console_forks, in_process, start

__all__ = ["as_it_was", "built", "console_forks", "in_process", "start"]
