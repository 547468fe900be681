"""Processes that a test started."""

import psutil


def children(argument, of=None):
    """The children, and theirs, of a process whose command has an argument, but those that end meanwhile.

    Args:
        argument: one of the first four words of the command, such as "-c" or a module's name after "-m".
        of: the process id of the parent; this process's if None.
    """
    return [child for child in psutil.Process(of).children(recursive=True) if argument in _command(child)[:4]]


def _command(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it ended since it was listed, or is a zombie
        return []
