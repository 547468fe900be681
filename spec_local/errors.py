"""Everything that specdec raises on purpose, as one tree.

    SpecLocalError            what went wrong, why, and what to do, in one line
    ├── ModelFileError        a GGUF file that is missing, damaged, or of a kind that cannot be used
    ├── ModelError            a loaded model that cannot do what was asked (no rollback, no text, no template)
    ├── VocabularyMismatch    main and draft have no token in common
    ├── ContextOverflow       more tokens than the context, or more context than memory
    ├── BackendError          llama.cpp refused or failed a call, or returned logits that are not numbers
    │   ├── BackendCrash      llama.cpp's build takes the whole process down on this machine
    │   └── DeadEnd           a constraint leaves the model no token to go on with
    ├── DownloadError         a file could not be fetched, or is not the one that was expected
    ├── ConfigError           a settings file (models.toml) that says something impossible
    └── InvalidRequest        an option value, a prompt or an input that makes no sense

Each message ends with the way out. The command line prints it after ``specdec: `` and leaves with the
exit code that ``specdec_cli.exits`` gives.
"""


class SpecLocalError(Exception):
    """Base of every error that specdec raises on purpose."""


class ModelFileError(SpecLocalError):
    """A GGUF file is missing, damaged, or of a kind that cannot be used."""


class ModelError(SpecLocalError):
    """A loaded model cannot do what was asked of it."""


class VocabularyMismatch(SpecLocalError):
    """Main and draft have no token in common."""


class ContextOverflow(SpecLocalError):
    """More tokens than the context holds, or more context than memory holds."""


class BackendError(SpecLocalError):
    """llama.cpp refused or failed a call, or returned logits that are not numbers."""


class BackendCrash(BackendError):
    """llama.cpp's build takes the whole process down on this machine."""


class DeadEnd(BackendError):
    """A constraint leaves the model no token to go on with."""


class DownloadError(SpecLocalError):
    """A file could not be fetched, or is not the one that was expected."""


class ConfigError(SpecLocalError):
    """A settings file says something impossible."""


class InvalidRequest(SpecLocalError, ValueError):
    """An option value, a prompt or an input makes no sense."""
