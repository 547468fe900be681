"""specdec for programs that use llama-cpp-python: `Llama`, in place of `llama_cpp.Llama`."""

from spec_local.llama_cpp_python.llama import Llama

__all__ = ["Llama"]
