"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ...errors import RequestError
from ..body import described, read_body
from ..errors import ApiError, field_error
from ..schemas.completions import DetokenizeRequest, TokenizeRequest
from ..state import Server, server_of

router = APIRouter()


@router.post("/tokenize", **described(TokenizeRequest))
async def tokenize(
    request: Request, body: Annotated[TokenizeRequest, Depends(read_body(TokenizeRequest))]
) -> dict[str, Any]:
    """The tokens of a text, or of a conversation."""
    server = server_of(request)
    server.check_model(body.model)
    _need_tokenizer(server)
    if (body.prompt is None) == (body.messages is None):
        raise field_error("give either prompt or messages", "prompt")
    if body.messages is not None:
        token_ids = await server.template.render(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            options=body.chat_template_kwargs,
        )
    else:
        if body.tools is not None or body.chat_template_kwargs is not None:
            name = "tools" if body.tools is not None else "chat_template_kwargs"
            raise field_error(f"{name} needs messages")
        text = body.prompt or ""
        server.check_length(len(text), "prompt")
        token_ids = await server.llm.run_in_worker(
            lambda: list(server.tokenizer.encode(text, add_special_tokens=body.add_special_tokens))
        )
    found: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": server.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        found["token_strs"] = server.tokenizer.convert_ids_to_tokens(token_ids)
    return found


@router.post("/detokenize", **described(DetokenizeRequest))
async def detokenize(
    request: Request, body: Annotated[DetokenizeRequest, Depends(read_body(DetokenizeRequest))]
) -> dict[str, Any]:
    """The text of tokens."""
    server = server_of(request)
    server.check_model(body.model)
    _need_tokenizer(server)

    def decode() -> str:
        if body.tokens:
            server.llm.engine.inputs.encode(body.tokens)  # refuses ids that the model does not know
        return str(server.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))

    try:
        return {"prompt": await server.llm.run_in_worker(decode)}
    except RequestError as error:
        raise field_error(str(error).replace("prompt", "list", 1), "tokens") from None


@router.get("/tokenizer_info", **described())
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What a client needs to count tokens as the server does."""
    server = server_of(request)
    _need_tokenizer(server)
    tokenizer = server.tokenizer
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": server.llm.engine.model.vocab_size,
        "model_max_length": server.max_model_len,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": server.template.source,
        "add_bos_token": bool(getattr(tokenizer, "add_bos_token", False)),
    }


def _need_tokenizer(server: Server) -> None:
    if server.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer: prompts are token ids")
