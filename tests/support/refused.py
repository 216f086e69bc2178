"""What a command says that the operator has to mend something."""

import subprocess
from typing import Any

from cli import console


def assert_refused(ended: "subprocess.CompletedProcess[Any]", *sentences: str) -> None:
    """The command ended with exit code 2, and its standard error has the sentences."""
    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT, ended.stderr
    for sentence in sentences:
        assert sentence in ended.stderr
