"""``LLM``: a checkpoint, a cache and an engine in one object."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import RequestError
from .chat import Conversation, Tools, render
from .input_processor import Prompt, check_params, list_prompts
from .keywords import ExplainsAbsentNames, refuse_unknown_keywords
from .loading import load_engine
from .outputs import Delta, RequestOutput
from .prompt_dictionary import parse_prompt
from .sampling_params import SamplingParams
from .vllm_names import CALL_OPTIONS, LLM_NAMES, LLM_OPTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@refuse_unknown_keywords(LLM_OPTIONS)
class LLM(metaclass=ExplainsAbsentNames, of_vllm=LLM_NAMES):
    """Runs a Hugging Face checkpoint over a paged KV cache.

    Args:
        model: A checkpoint directory, or a loaded Transformers causal LM. ``None`` is the small
            model that comes with the package, which continues Python code.
        tokenizer: A directory with a tokenizer, or a Transformers tokenizer. ``None`` is the
            checkpoint's own; a loaded model then has token ids only.
        device: Any torch device. ``None``: a checkpoint goes to a GPU if torch finds one, else to
            the CPU, and a loaded model stays where it is. A loaded model is moved, not copied.
        dtype: Element type of the weights. ``"auto"`` is the checkpoint's own, except that float16
            becomes float32 on a CPU, where its products are hundreds of times slower.
        block_size: Tokens per cache block, 1 to 256.
        num_blocks: Size of the cache. ``None`` takes what ``memory_fraction`` of the free memory
            holds, at most what ``max_num_seqs`` full sequences can use.
        memory_fraction: See ``num_blocks``.
        max_num_seqs: The most sequences that run at the same time, 1 to 65,536.
        max_num_batched_tokens: The most tokens of one step; longer prompts are cut into chunks.
            ``None`` is 2048, 8192 on a GPU, or ``max_num_seqs`` where that is more.
        max_model_len: The most tokens of a sequence. ``None``: what the model and the cache allow.
        kv_cache_dtype: Element type of the cache; ``"auto"`` is that of the weights. ``"int8"``,
            ``"fp8_e4m3"`` and ``"fp8_e5m2"`` round keys and values, with a scale for each token
            and head: twice as many tokens fit, and results are no longer exactly the model's.
        enable_prefix_caching: Whether requests share the blocks of common prefixes.
        enforce_eager: On a GPU, launch the kernels of steps one by one. Otherwise kernels are
            compiled and steps captured as CUDA graphs before the first request.
        async_scheduling: Whether a step is launched before the tokens of the one before it are
            read. ``None``: on a GPU only. The tokens are the same.
        speculative: ``"ngram"``: draft the tokens that followed an earlier occurrence of the last
            few, and verify them in one step (prompt-lookup decoding). The tokens are the same;
            text that repeats its prompt or itself is generated faster. With it
            ``async_scheduling`` is off.
        num_speculative_tokens: The most tokens of a draft, 1 to 15; ``None`` is 7.
        generation_config: ``"auto"``: a request without ``sampling_params`` takes those of the
            checkpoint's generation_config.json; see ``get_default_sampling_params``. ``"vllm"``:
            it takes ``SamplingParams()``, as every request of a loaded model does.
        seed: Seeds the generator that gives seeds to requests without one.
        use_tqdm: Whether to show the progress of capturing CUDA graphs.

    Threads may share it: a call of ``generate`` waits for those of other threads, and is refused
    while a stream is open. A forked process cannot use its parent's, because a fork does not copy
    torch's threads: a call there raises EngineDeadError.

    On a CPU that has other work to do, set ``OMP_WAIT_POLICY=PASSIVE`` in the environment before
    torch is imported, as the command line does. Otherwise torch's threads wait for each other by
    spinning: on two cores, beside one busy process, the shipped model took 4 to 20 times as long.

    Raises:
        RequestError: The directory is not a checkpoint, or an argument is out of range.
        UnsupportedError: The model's outputs over the paged cache differ from Transformers' own,
            or cannot be compared, and the message says why; or Transformers is not installed.
        TypeError: An option does not exist; the message names the nearest one that does.
        OutOfBlocksError: The cache cannot hold one sequence of ``max_model_len`` tokens, or
            ``num_blocks`` are more than fit into memory.

    Examples:
        >>> llm = LLM(num_blocks=64)
        >>> [result] = llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=8),
        ...                         use_tqdm=False)
        >>> len(result.outputs[0].token_ids)
        8
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any = None,
        *,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float = 0.9,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        kv_cache_dtype: torch.dtype | str = "auto",
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        speculative: str | None = None,
        num_speculative_tokens: int | None = None,
        generation_config: str = "auto",
        seed: int = 0,
        use_tqdm: bool = False,
    ) -> None:
        # Reentrant, so that a nested call gets an error and does not deadlock.
        self._lock = threading.RLock()
        self._request_ids: list[Hashable] = []  # of the call or stream that runs
        self.engine, self._default_params = load_engine(
            model, tokenizer=tokenizer, device=device, dtype=dtype,
            block_size=block_size, num_blocks=num_blocks, memory_fraction=memory_fraction,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len, kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=enable_prefix_caching, enforce_eager=enforce_eager,
            async_scheduling=async_scheduling, speculative=speculative,
            num_speculative_tokens=num_speculative_tokens, generation_config=generation_config,
            seed=seed, use_tqdm=use_tqdm,
        )  # fmt: skip

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; results come in the order of the prompts.

        Args:
            prompts: One prompt or a list; each text, a list of token ids, or a dictionary as
                vLLM's: ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. With ``cache_salt``
                in it, cached prefixes are shared only between prompts of the same salt.
            sampling_params: For all prompts, or one for each; ``None`` takes
                ``get_default_sampling_params()``.
            use_tqdm: Whether to show progress, with input and output tokens per second.

        Raises:
            RequestError: A prompt can never be served; the message says which. Or other requests
                are running: a stream is open. Nothing has been started then.
        """
        with self._lock:
            requests = self._validate(prompts, sampling_params)
            with self.engine.in_use:
                try:
                    request_ids = self._add(requests)
                    self._run(requests, use_tqdm)
                    return [self.engine.take_output(request_id) for request_id in request_ids]
                finally:
                    self._end_requests()

    @refuse_unknown_keywords(CALL_OPTIONS)
    def chat(
        self,
        messages: Conversation | SequenceOf[Conversation],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, formatted by the model's chat template.

        The server makes the same prompts of the same messages.

        Args:
            messages: One conversation, ``[{"role": "user", "content": "Hello!"}]``, or a list of
                them, in OpenAI's form.
            sampling_params: As for ``generate``.
            use_tqdm: As there.
            chat_template: A Jinja template instead of the tokenizer's own.
            add_generation_prompt: Whether the prompt ends where an answer begins.
            continue_final_message: Whether the prompt ends within the last message, the
                assistant's, for the model to continue; no generation prompt is added then.
            tools: Functions that the model may call, in OpenAI's form. Calls are in the text of
                the output, in the model's own format.
            chat_template_kwargs: Further variables of the template, ``{"enable_thinking": False}``.

        Returns:
            As ``generate``; ``prompt`` is None, and ``prompt_token_ids`` what the template made.

        Raises:
            RequestError: There is no template, it refuses the messages, or it knows no tools; or
                as ``generate``.
        """
        with self._lock:
            prompts = render(
                self.engine.tokenizer,
                messages,
                chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_options=chat_template_kwargs,
            )
            return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Continue every prompt, yielding text as soon as it is certain.

        The ``request_id`` of a delta is the position of its prompt. The first delta of a prompt
        has its ``prompt_logprobs``, if requested. Computing starts when the first delta is taken.

        Raises:
            RequestError: As ``generate``.
        """
        with self._lock:
            return self._stream(self._validate(prompts, sampling_params))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or pickled: load another, in the process that uses it"
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that are given none.

        ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, and
        ``max_new_tokens`` as ``max_tokens``, of the checkpoint's generation_config.json, unless
        ``generation_config="vllm"``; the other fields are those of ``SamplingParams()``.
        """
        return self._default_params

    def get_tokenizer(self) -> Any:
        """The tokenizer of prompts and outputs, from Transformers; ``None`` where there is none."""
        return self.engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; call it after the model's weights have changed.

        Change weights in place: CUDA graphs keep reading the tensors that they were captured with.

        Raises:
            RequestError: Requests are running: a stream is open.
        """
        with self._lock:
            self._check_idle()
            self.engine.reset_prefix_cache()

    def _check_idle(self) -> None:
        """Raise RequestError while another call, a stream or an ``AsyncLLM`` uses the engine."""
        if not self.engine.in_use.locked():
            self._end_requests()  # of a call that was interrupted
            if not self.engine.has_unfinished:
                return
        # A step serves all requests: their deltas would be lost.
        raise RequestError(
            "other requests are running, those of an open stream or an AsyncLLM, say: finish or "
            "close it first, or add all to llm.engine and step that"
        )

    def _stream(self, requests: list[dict[str, Any]]) -> Iterator[Delta]:
        with self._lock:
            self._check_idle()
        with self.engine.in_use:
            try:
                request_ids, deltas = self._add(requests, stream=True), list[Delta]()
                positions = {request_id: at for at, request_id in enumerate(request_ids)}
                while not all(map(self.engine.is_finished, request_ids)):
                    yield from deltas
                    deltas = [d for d in self.engine.step() if d.request_id in positions]
                    for delta in deltas:
                        delta.request_id = positions[delta.request_id]
            finally:
                self._end_requests()
        yield from deltas  # other calls may start before the last are consumed

    def _add(self, requests: list[dict[str, Any]], **options: Any) -> list[Hashable]:
        for request in requests:
            self._request_ids.append(self.engine.make_id())
            self.engine.add_request(**request, **options, request_id=self._request_ids[-1])
        return self._request_ids.copy()

    def _end_requests(self) -> None:
        """Abort what still runs and take what is left, so that the next call starts afresh."""
        for request_id in self._request_ids:
            self.engine.abort(request_id)
            with suppress(RequestError):
                self.engine.take_output(request_id)
        self._request_ids.clear()

    def _run(self, requests: list[dict[str, Any]], use_tqdm: bool) -> None:
        from tqdm import tqdm

        start, num_output = time.perf_counter(), 0
        num_input = sum(len(request["token_ids"]) for request in requests)
        with tqdm(total=len(requests), desc="Generating", unit="req", disable=not use_tqdm) as bar:
            while self.engine.has_unfinished:
                deltas = self.engine.step()
                num_output += len(deltas)
                if not use_tqdm:
                    continue
                seconds = time.perf_counter() - start
                rates = num_input / seconds, num_output / seconds
                bar.set_postfix_str("input {:.0f} tok/s, output {:.0f} tok/s".format(*rates), False)
                done = {delta.request_id for delta in deltas if delta.finish_reason is not None}
                bar.update(sum(self.engine.is_finished(request_id) for request_id in done))

    def _validate(self, prompts: Any, sampling_params: Any) -> list[dict[str, Any]]:
        """Return arguments of ``Engine.add_request``, after validating all of them."""
        self._check_idle()
        listed = list_prompts(prompts)
        if sampling_params is None:
            sampling_params = self._default_params
        if not isinstance(sampling_params, SequenceOf):
            check_params(sampling_params)
            sampling_params = [sampling_params] * len(listed)
        if len(sampling_params) != len(listed):
            raise RequestError(
                f"{len(sampling_params)} sampling_params for {len(listed)} prompts: "
                "expected one for all, or one for each"
            )
        requests = []
        for position, (prompt, params) in enumerate(zip(listed, sampling_params, strict=True)):
            request = {"prompt": prompt, "params": params}
            try:
                if isinstance(prompt, Mapping):
                    request["prompt"], request["cache_salt"] = parse_prompt(prompt)
                request["token_ids"] = self.engine.inputs.validate(request["prompt"], params)
            except RequestError as error:
                raise RequestError(f"prompt {position}: {error}") from None
            requests.append(request)
        return requests
