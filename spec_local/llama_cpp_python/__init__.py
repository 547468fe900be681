"""specdec for programs that use llama-cpp-python.

llama: `Llama`, in place of `llama_cpp.Llama`. drafts: draft models for `llama_cpp.Llama` itself.
"""

from spec_local.llama_cpp_python.drafts import GGUFDraft, LookupDraft
from spec_local.llama_cpp_python.llama import Llama

__all__ = ["GGUFDraft", "Llama", "LookupDraft"]
