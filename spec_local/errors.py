"""All errors that specdec raises deliberately, as one tree.

    SpecLocalError            what went wrong, why, and what to do, in one line
    ├── ModelFileError        a GGUF file is missing, damaged, or of an unsupported kind
    ├── ModelError            a loaded model lacks what was requested (rollback, text, a chat template)
    ├── VocabularyMismatch    the main model and the draft model have no token in common
    ├── ContextOverflow       more tokens than the context holds, or a context larger than the memory
    ├── BackendError          a llama.cpp call failed, or returned logits that are not numbers
    │   ├── BackendCrash      this build of llama.cpp crashes on this machine
    │   └── DeadEnd           a constraint allows no further token
    ├── DownloadError         a file could not be downloaded, or is not the expected one
    ├── ConfigError           a settings file (models.toml, config.toml) is invalid
    ├── InvalidRequest        an option, a prompt or another input is invalid
    └── InternalError         a defect of specdec ended one answer

Each message ends with what to do next. The command line prints it after ``specdec: `` and exits with the code
given in ``specdec_cli.exits``.
"""

import logging


class SpecLocalError(Exception):
    """Base class of all errors that specdec raises deliberately."""


class ModelFileError(SpecLocalError):
    """A GGUF file is missing, damaged, or of an unsupported kind."""


class ModelError(SpecLocalError):
    """A loaded model lacks what was requested: rollback, text generation or a chat template."""


class VocabularyMismatch(SpecLocalError):
    """The main model and the draft model have no token in common."""


class ContextOverflow(SpecLocalError):
    """More tokens than the context holds, or a context larger than the memory.

    Args:
        n_prompt: number of tokens of the prompt if the prompt is too long, otherwise 0.
        n_ctx: size of the context in tokens.
        is_exact: whether the prompt has exactly `n_prompt` tokens; otherwise, it has at least as many.
    """

    def __init__(self, message: str, n_prompt: int = 0, n_ctx: int = 0, *, is_exact: bool = True) -> None:
        super().__init__(message)
        self.n_prompt, self.n_ctx, self.is_exact = n_prompt, n_ctx, is_exact


class BackendError(SpecLocalError):
    """A llama.cpp call failed, or returned logits that are not numbers."""


class BackendCrash(BackendError):
    """This build of llama.cpp crashes on this machine."""


class DeadEnd(BackendError):
    """A constraint, or the logit bias, allows no further token."""


class DownloadError(SpecLocalError):
    """A file could not be downloaded, or is not the expected one."""


class ConfigError(SpecLocalError):
    """A settings file is invalid."""


class InvalidRequest(SpecLocalError, ValueError):
    """An option, a prompt or another input is invalid."""


class InternalError(SpecLocalError):
    """A defect of specdec ended one answer; its cause is the exception, whose traceback was logged.

    If only one answer is generated, that exception itself is raised.
    """


def as_failure(error: Exception) -> SpecLocalError:
    """The error with which an answer ends, so that the others go on, whatever exception it raised."""
    if isinstance(error, SpecLocalError):
        return error
    if isinstance(error, MemoryError):
        return BackendError("out of memory: use a smaller quantization, a smaller `n_ctx`, or `draft=none`")
    logging.getLogger(__name__).error("an answer failed unexpectedly", exc_info=error)
    failure = InternalError(
        f"specdec failed ({type(error).__name__}): please report this, with the traceback that was logged"
    )
    failure.__cause__ = error
    return failure
