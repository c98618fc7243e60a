"""State that routes share: engine, configuration, token texts and metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from starlette.requests import Request

from ..engine.async_llm import AsyncLLM
from ..engine.request_stream import RequestStream
from ..engine.sampling_params import SamplingParams
from ..engine.structured_outputs import StructuredOutputsParams
from ..errors import RequestError
from .config import ServerConfig
from .errors import ApiError, field_error
from .metrics import Metrics
from .middleware import ApiKeys
from .output_form import form_field
from .page_map import PageFeed
from .schemas.common import GenerationFields
from .templates import ChatTemplate

_LOGGED_CHARS = 2000  # of a request's prompts, with --log-prompts


class Server:
    """One model behind HTTP."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm, self.config, self.limits = llm, config, config.limits
        self.tokenizer: Any = llm.engine.tokenizer
        self.max_model_len = llm.engine.max_model_len
        self.created = int(time.time())
        self.keys = ApiKeys(config.api_keys)
        self.metrics = Metrics(llm)
        self.words = llm.engine.token_text
        self.template = ChatTemplate(self.tokenizer, config, self.check_length)
        self.pages = PageFeed(llm, show_text=config.show_text)
        # A text of more characters has more tokens than the context, whatever they are.
        self._max_chars = self.max_model_len * self.words.longest

    @property
    def model_name(self) -> str:
        """Return the model name that responses report."""
        return self.config.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: With status 404.
        """
        if name is not None and name not in self.config.model_names:
            served = ", ".join(self.config.model_names)
            raise ApiError(
                404,
                f"model {name!r} is not served here, only {served}",
                param="model",
                code="model_not_found",
            )

    def check_length(self, num_chars: int, param: str) -> None:
        """Refuse a text that is too long for the context with any tokens of the tokenizer.

        Raises:
            ApiError: With status 400.
        """
        if num_chars > self._max_chars:
            raise field_error(
                f"{param} has {num_chars} characters, which cannot fit into max_model_len="
                f"{self.max_model_len} tokens"
            )

    async def submit(
        self,
        request: Request,
        body: GenerationFields,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        number: int = 0,
        stream: bool,
        generates: bool = True,
    ) -> RequestStream:
        """Queue a prompt of a request.

        Args:
            request: The HTTP request.
            body: Its fields.
            prompt: Text or token ids.
            params: Sampling parameters.
            number: Which of the request's prompts it is.
            stream: Whether to deliver text as it comes.
            generates: See ``AsyncLLM.submit``.

        Raises:
            ApiError: With status 400: the prompt is too long, or the structured-output constraint
                takes too long to compile.
        """
        if body.user is not None:
            request.state.log["user"] = body.user
        if isinstance(prompt, str):
            self.check_length(len(prompt), "prompt")
        if body.truncate_prompt_tokens is not None:
            prompt = await self._truncate(prompt, body.truncate_prompt_tokens, params)
        if self.config.log_prompts:
            await self._log_prompt(request, prompt)
        if params.structured_outputs is not None:
            await self._compile(params.structured_outputs, form_field(body))
        # Not the header's id: a proxy or a client may use one for several requests.
        name = body.request_id or self.new_id("request")
        handle = await self.llm.submit(
            prompt,
            params,
            request_id=f"{name}-{number}" if number else name,
            cache_salt=self.keys.cache_salt(request.state.key, body.cache_salt),
            stream=stream,
            generates=generates,
        )
        self.metrics.watch(handle)
        return handle

    async def _compile(self, form: StructuredOutputsParams, field: str) -> None:
        """Compile a field's constraint on a thread; the engine caches it for the validation."""
        seconds = self.limits.grammar_seconds
        compiling = asyncio.to_thread(self.llm.engine.grammars.compile, form)
        try:
            await asyncio.wait_for(compiling, seconds)
        except asyncio.TimeoutError:
            raise field_error(
                f"the form of the output was not compiled within grammar_seconds={seconds:g}: "
                "send a smaller schema, regular expression or grammar",
                field,
            ) from None
        except RequestError as error:
            reason = str(error).removeprefix("structured_outputs ")
            raise field_error(f"{field} {reason}") from None

    async def _log_prompt(self, request: Request, prompt: str | list[int]) -> None:
        """Add a prompt to the request's log line: its text, or token ids without a tokenizer."""
        if isinstance(prompt, str):
            text = prompt[:_LOGGED_CHARS]
        elif self.tokenizer is None:
            text = str(prompt[:_LOGGED_CHARS])
        else:
            # All tokens but a few special ones have at least one character.
            text = await self.llm.run_in_worker(self.tokenizer.decode, prompt[:_LOGGED_CHARS])
        fields = request.state.log
        earlier = f"{fields['prompt']}\n" if "prompt" in fields else ""
        fields["prompt"] = (earlier + text)[:_LOGGED_CHARS]

    async def _truncate(
        self, prompt: str | list[int], most: int, params: SamplingParams
    ) -> list[int]:
        token_ids = await self.llm.run_in_worker(self.llm.engine.inputs.encode, prompt)
        if most == -1:
            most = self.max_model_len - min(params.max_tokens or 1, self.max_model_len - 1)
        return token_ids[-most:]

    @staticmethod
    def created_now() -> int:
        """The time, as responses report it."""
        return int(time.time())

    def new_id(self, kind: str, name: str | None = None) -> str:
        """Return an id, ``cmpl-…`` or ``chatcmpl-…``, with the name that a client chose, if any."""
        return f"{kind}-{name or secrets.token_hex(12)}"


def server_of(request: Request) -> Server:
    """Return the server of a request."""
    server: Server = request.app.state.server
    return server
