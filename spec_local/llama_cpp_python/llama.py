"""llama-cpp-python's `Llama` with the engine of specdec.

    from spec_local.llama_cpp_python import Llama  # in place of: from llama_cpp import Llama

    llama = Llama("main.gguf", draft="draft.gguf", n_ctx=4096)

Completions, chats, streaming, stop strings, tools and grammars are llama-cpp-python's own code. It calls
`generate` for the tokens, which come from a `Session`: the weights are loaded there only, and the base class
loads the vocabulary.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import llama_cpp
import numpy as np
from llama_cpp import llama_chat_format
from numpy.typing import NDArray

from spec_local.core.sampling import TokenLogprob
from spec_local.core.sampling_settings import UNCHANGED
from spec_local.engine.events import Prefilled, Statistics
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama_cpp_python.chat_images import MarkedMessages
from spec_local.session import Session, Text
from spec_local.settings import MAX_LOGPROBS, GenerationSettings

_PASSED_ON = {
    *("seed", "logits_all", "last_n_tokens_size", "chat_format", "chat_handler", "tokenizer"),
    *("spm_infill", "verbose"),
}
"""Arguments that have the same meaning as for the base class."""
_WITHOUT_EFFECT = {
    *("n_batch", "n_ubatch", "n_threads_batch", "use_mmap", "use_mlock", "offload_kqv", "op_offload"),
    *("flash_attn", "swa_full", "no_perf", "numa"),
}
"""Arguments that change the speed of `llama_cpp.Llama`, but not what it generates."""
_CACHE_TYPES = {
    None: "f16",
    llama_cpp.GGML_TYPE_F16: "f16",
    llama_cpp.GGML_TYPE_Q8_0: "q8_0",
    llama_cpp.GGML_TYPE_Q4_0: "q4_0",
}
_KEPT = "remove it; the prompt cache keeps what the models have read"
_TRAINING_CONTEXT = 1 << 30  # tokens; a session limits it to the model's training context
_RANDOM_SEED = llama_cpp.LLAMA_DEFAULT_SEED
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


class _LogitBias(llama_cpp.LogitsProcessorList):  # type: ignore[misc]
    """The logit bias of a completion, in the argument that hands it to `generate`."""

    def __init__(self, bias: Mapping[Any, Any]) -> None:
        super().__init__()
        self.bias = {int(token): float(value) for token, value in bias.items()}


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A method of the base class that cannot work here."""

    def method(*args: Any, **kwargs: Any) -> NoReturn:
        raise _unsupported(name, instead)

    return method


class Llama(llama_cpp.Llama):  # type: ignore[misc]
    """`llama_cpp.Llama` that drafts tokens. Its output has the same distribution.

    What it does not support raises InvalidRequest; see docs/library.md.

    Args:
        model_path, draft, mmproj: the main model, the draft model, and the projector for images and sounds in
            messages, which are data URIs and base64; as for `Session.open`.
        n_ctx: context length in tokens, limited to the model's training context; 0: the training context.
        n_gpu_layers, n_threads: for each of the models.
        type_k, type_v: element type of the KV caches.
        settings: how to draft (policy, proposer …); other settings are those of each call.
        options: further arguments of `llama_cpp.Llama`.

    Raises:
        InvalidRequest: an option is not supported.
        SpecLocalError: another subclass; see `Session.open`.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        draft: Path | str | None = None,
        mmproj: Path | str = "auto",
        n_ctx: int = 512,
        n_gpu_layers: int = 0,
        n_threads: int | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        settings: GenerationSettings | None = None,
        **options: Any,
    ) -> None:
        self._stack = ExitStack()  # the base class closes it when it is deleted
        self._arguments = {
            "model_path": model_path,
            "draft": draft,
            "mmproj": mmproj,
            "n_ctx": n_ctx,
            "n_gpu_layers": n_gpu_layers,
            "n_threads": n_threads,
            "type_k": type_k,
            "type_v": type_v,
            "settings": settings,
            **options,
        }
        self.settings = settings or GenerationSettings()
        self._marked = MarkedMessages()
        self.statistics = Statistics()
        """Of the last completion."""
        _check_options(options)
        if type_k not in _CACHE_TYPES or _CACHE_TYPES[type_k] != _CACHE_TYPES.get(type_v):
            raise InvalidRequest("type_k and type_v are not supported: give F16, Q8_0 or Q4_0 for both")
        with ExitStack() as stack:
            self.session = Session.open(
                model_path,
                draft,
                n_ctx=n_ctx or _TRAINING_CONTEXT,
                threads=n_threads,
                gpu_layers=n_gpu_layers,
                cache_type=_CACHE_TYPES[type_k],
                mmproj=mmproj,
            )
            # Programs rarely close a `Llama`: at exit, the session closes while Python can still write files.
            stack.callback(weakref.finalize(self, self.session.close))
            passed_on = {name: value for name, value in options.items() if name in _PASSED_ON}
            path, length = str(self.session.main.model.path), self.session.main.n_ctx
            super().__init__(path, vocab_only=True, n_ctx=length, n_batch=1, **passed_on)
            self._model.add_eos_token = lambda: False  # the base class would put it behind each prompt
            self._stack.push(stack.pop_all())
        if not self._logits_all:
            self.scores[:] = np.nan  # one row, for stopping criteria: without logits_all there are no logits

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: llama_cpp.LogitsProcessorList | None = None,
        stopping_criteria: llama_cpp.StoppingCriteriaList | None = None,
        grammar: llama_cpp.LlamaGrammar | None = None,
    ) -> Generator[int, None, None]:
        """Yield the tokens of an answer, up to and including an end token.

        The arguments are those of `llama_cpp.Llama.generate`. With ``logits_all``, `scores` has the log
        probabilities of the most probable tokens, up to 20, and of the next one; others share the rest.

        Raises (with the first token):
            InvalidRequest: an argument is not supported.
            ContextOverflow: the context is full.
            SpecLocalError: see `Session.generate`.
        """
        bias: Mapping[int, float] = {}
        if isinstance(logits_processor, _LogitBias):
            bias = logits_processor.bias
        elif logits_processor:
            raise _unsupported("logits_processor", "give logit_bias or a grammar")
        if mirostat_mode in (1, 2):
            raise _unsupported("mirostat_mode", "use temperature, top_k, top_p and min_p")
        if typical_p < 1:
            raise _unsupported("typical_p", "use top_p or min_p")
        if tfs_z != 1 or not penalize_nl:
            raise _unsupported("tfs_z" if tfs_z != 1 else "penalize_nl", "leave it out; Llama ignores it")
        sampling = (
            replace(self.settings.sampling, temperature=temp, top_k=max(top_k, 0), top_p=top_p, min_p=min_p)
            if temp >= 0
            else UNCHANGED
        )
        settings = replace(
            self.settings,
            sampling=replace(
                sampling,
                repeat_penalty=repeat_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                penalty_window=max(self.last_n_tokens_size, 0),
                penalize_prompt=False,  # Llama's sampler is new for each answer
                logit_bias=bias,
            ),
            seed=None if self._seed & _RANDOM_SEED == _RANDOM_SEED else self._seed & _RANDOM_SEED,
            max_tokens=None,
            stops=(),
            grammar=grammar._grammar if grammar else None,
            json_schema=None,
            logprobs=MAX_LOGPROBS if self._logits_all else None,
        )
        prompt = list(tokens) if reset else [*self._input_ids.tolist(), *tokens]
        yield from self._tokens(prompt, settings, stopping_criteria)

    def _tokens(
        self,
        prompt: list[int],
        settings: GenerationSettings,
        stopping_criteria: llama_cpp.StoppingCriteriaList | None,
    ) -> Generator[int, None, None]:
        """Yield the tokens of an answer to a prompt, and keep them as the base class does."""
        with closing(self.session.generate(prompt, settings)) as events:
            self.input_ids[: len(prompt)] = prompt
            self.n_tokens = len(prompt)
            if self._logits_all:
                self.scores[: self.n_tokens] = np.nan  # those of the prompt are not computed
            for event in events:
                if isinstance(event, Prefilled):
                    self.statistics = event.statistics
                elif isinstance(event, Text):
                    for i, token in enumerate(event.tokens):
                        if self._logits_all:
                            self.scores[self.n_tokens - 1] = _scores(event.logprobs[i], self._n_vocab)
                        if stopping_criteria and stopping_criteria(self._input_ids, self._scores[-1]):
                            return
                        yield token
                        if self.n_tokens == self.n_ctx():
                            raise ContextOverflow(f"the context of {self.n_ctx()} tokens is full: give n_ctx")
                        self.input_ids[self.n_tokens] = token
                        self.n_tokens += 1
                elif event.reason == "cancelled":
                    raise InvalidRequest(
                        "another completion was started, or the model was closed: read one to its end first"
                    )
                elif event.end_token is not None:
                    yield event.end_token

    def _create_completion(
        self,
        *,
        logprobs: int | None = None,
        echo: bool = False,
        logits_processor: llama_cpp.LogitsProcessorList | None = None,
        logit_bias: Mapping[Any, Any] | None = None,
        **options: Any,
    ) -> Any:
        if logprobs is not None and (echo or logprobs > MAX_LOGPROBS):
            raise _unsupported("logprobs", f"give up to {MAX_LOGPROBS}, without echo")
        if logits_processor:
            raise _unsupported("logits_processor", "give logit_bias or a grammar")
        processor = _LogitBias(logit_bias) if logit_bias else None
        if options.get("seed") is None and self._seed & _RANDOM_SEED == _RANDOM_SEED:
            options["seed"] = _RANDOM_SEED  # the base class derives the same one in each process
        return super()._create_completion(logprobs=logprobs, echo=echo, logits_processor=processor, **options)

    def create_chat_completion(self, messages: list[Any], *args: Any, **options: Any) -> Any:
        """As that of `llama_cpp.Llama`; messages may have images and sounds.

        Raises:
            InvalidRequest: an image or sound is invalid, or no data URI.
            ModelError: the model has no projector that reads it.
        """
        marked = MarkedMessages(messages)
        if marked.images:
            self.session.main.model.check_reads(marked.images)
        self._marked = marked
        try:
            return super().create_chat_completion(marked.messages, *args, **options)
        finally:
            self._marked = MarkedMessages()

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As that of `llama_cpp.Llama`; in a chat, with the cells of images and sounds."""

        def tokenize(part: bytes, is_first: bool) -> list[int]:
            tokens: list[int] = super(Llama, self).tokenize(part, add_bos and is_first, special)
            return tokens

        return self._marked.tokens(text, tokenize, self.session.main.model.image_tokens)

    def n_ctx(self) -> int:
        """Context length in tokens."""
        return self.session.main.n_ctx

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    eval = _refused("eval", "call generate")
    sample = _refused("sample", "call generate")
    embed = _refused("embed", "use llama_cpp.Llama with embedding=True")
    set_cache = _refused("set_cache", _KEPT)
    save_state = _refused("save_state", _KEPT)
    load_state = _refused("load_state", _KEPT)


def _unsupported(name: str, instead: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported by specdec's Llama: {instead}")


def _check_options(options: Mapping[str, Any]) -> None:
    """Reject arguments of the base class that are not supported, and warn of those without effect.

    Raises:
        InvalidRequest: an option is not supported.
        TypeError: there is no such option.
    """
    for name, value in options.items():
        if name not in _DEFAULTS:
            raise TypeError(f"Llama.__init__() got an unexpected keyword argument '{name}'")
        if name == "draft_model" and value is not None:
            raise _unsupported(name, "give draft, the file or name of a draft model")
        if name not in _PASSED_ON | _WITHOUT_EFFECT and value != _DEFAULTS[name]:
            raise _unsupported(name, "leave it out, or use llama_cpp.Llama")
    handler = options.get("chat_handler")
    if isinstance(handler, llama_chat_format.Llava15ChatHandler | llama_chat_format.MTMDChatHandler):
        raise _unsupported("chat_handler for images", "leave it out, and give mmproj")
    ignored = [name for name in options if name in _WITHOUT_EFFECT and options[name] != _DEFAULTS[name]]
    if ignored:
        warnings.warn(f"{', '.join(ignored)}: no effect on specdec's Llama", stacklevel=3)


def _scores(known: TokenLogprob, n_vocab: int) -> NDArray[np.single]:
    """Log probabilities of all tokens, where those that are not known share the rest of the probability."""
    found = {**dict(known.top), known.token: known.logprob}
    rest = max(0.0, 1.0 - float(np.exp(list(found.values())).sum()))
    with np.errstate(divide="ignore"):
        row = np.full(n_vocab, np.log(rest / max(1, n_vocab - len(found))), np.single)
    row[list(found)] = list(found.values())
    return row
